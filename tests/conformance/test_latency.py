"""End-to-end latency, on the Go nsqd and on the embedded one."""

from __future__ import annotations

import time
from collections.abc import Callable

from plugins.http_api import Nsqd
from plugins.raw_client import RawClient

AnyNsqd = Callable[..., Nsqd]


def test_quantiles_of_the_time_from_publish_to_finish(any_nsqd: AnyNsqd) -> None:
    nsqd = any_nsqd("-e2e-processing-latency-percentile=0.5,0.99")
    with RawClient(nsqd.tcp_address) as client:
        client.subscribe("t", "ch", ready=102)
        started_s = time.monotonic()
        nsqd.publish("t", *[b"x"] * 102)
        requeued, _, *messages = client.read_messages(102)  # one is held; neither is a sample
        client.send(b"REQ %b 60000\n" % requeued.id)
        client.settle()
        before = nsqd.channel_stats("t", "ch")["e2e_processing_latency"]
        client.finish(messages[:90])
        client.settle()
        quick_ns = (time.monotonic() - started_s) * 1e9
        time.sleep(0.2)
        client.finish(messages[90:])
        client.settle()
        topic = nsqd.topic_stats("t")
        [latency, of_topic] = (
            each["e2e_processing_latency"] for each in (topic["channels"][0], topic)
        )

    assert (before["count"], [each["value"] for each in before["percentiles"]]) == (0, [0, 0])
    assert (latency["count"], of_topic["count"]) == (100, 100)
    assert [each["quantile"] for each in latency["percentiles"]] == [0.99, 0.5]
    slow_ns, median_ns = (each["value"] for each in latency["percentiles"])
    assert slow_ns > 190e6
    assert 0 < median_ns < 190e6 + quick_ns
    assert of_topic["percentiles"] == latency["percentiles"]
