"""End-to-end latency, on the Go nsqd and on the embedded one."""

from __future__ import annotations

import time
from collections.abc import Callable

from plugins.http_api import Nsqd
from plugins.raw_client import RawClient

AnyNsqd = Callable[..., Nsqd]
FLAG = "-e2e-processing-latency-percentile=0.5,0.99"


def test_quantiles_of_the_time_from_publish_to_finish(any_nsqd: AnyNsqd) -> None:
    nsqd = any_nsqd(FLAG)
    with RawClient(nsqd.tcp_address) as client:
        client.subscribe("t", "ch", ready=100)
        started_s = time.monotonic()
        nsqd.publish("t", *[b"x"] * 100)
        messages = client.read_messages(100)
        client.finish(messages[:90])
        client.settle()
        quick_ns = (time.monotonic() - started_s) * 1e9
        time.sleep(0.2)
        client.finish(messages[90:])
        client.settle()
        [channel] = nsqd.topic_stats("t")["channels"]
        topic_latency = nsqd.topic_stats("t")["e2e_processing_latency"]

    latency = channel["e2e_processing_latency"]
    assert (latency["count"], topic_latency["count"]) == (100, 100)
    assert [each["quantile"] for each in latency["percentiles"]] == [0.99, 0.5]
    slow_ns, median_ns = (each["value"] for each in latency["percentiles"])
    assert slow_ns > 190e6
    assert 0 < median_ns < 190e6 + quick_ns
    assert topic_latency["percentiles"] == latency["percentiles"]


def test_only_a_finish_is_a_sample(any_nsqd: AnyNsqd) -> None:
    nsqd = any_nsqd(FLAG)
    with RawClient(nsqd.tcp_address) as client:
        client.subscribe("t", "ch", ready=2)
        nsqd.publish("t", b"requeued", b"held")
        client.send(b"REQ %b 60000\n" % client.read_messages(2)[0].id)
        client.settle()
        latency = nsqd.channel_stats("t", "ch")["e2e_processing_latency"]

    assert latency["count"] == 0
    assert [each["value"] for each in latency["percentiles"]] == [0, 0]
