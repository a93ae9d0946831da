"""What goes to statsd: keys, differences, datagrams; and over a real socket."""

from __future__ import annotations

import re
import socket
from dataclasses import replace

from plugins.waiting import patience_s

from nsqtools.protocol.stats import ChannelStats, LatencyStats, NsqdStats, TopicStats
from nsqtools.server import EmbeddedNsqd
from nsqtools.server.stats import expand_prefix, pack_datagrams, statsd_lines

COMMON = {"depth": 1, "backend_depth": 2, "message_count": 50, "paused": False}
CHANNEL = ChannelStats(
    channel_name="ch",
    in_flight_count=3,
    deferred_count=4,
    requeue_count=6,
    timeout_count=7,
    client_count=8,
    clients=None,
    e2e_processing_latency=LatencyStats(count=1, percentiles=((0.99, 12345.6), (0.5, 1.0))),
    **COMMON,
)
TOPIC = TopicStats(
    topic_name="t",
    channels=(CHANNEL,),
    message_bytes=500,
    e2e_processing_latency=LatencyStats(),
    **COMMON,
)
STATS = NsqdStats(
    version="1.3.0",
    health="OK",
    start_time=0,
    topics=(TOPIC,),
    memory={"heap_objects": 5, "gc_total_runs": 9},
    producers=None,
)


def lines(
    stats: NsqdStats, before: dict[str, int], *, exclude_ephemeral: bool = False
) -> list[str]:
    found = statsd_lines(stats, before, "nsq.h.", exclude_ephemeral=exclude_ephemeral)
    return [line.removeprefix("nsq.h.").rstrip("\n") for line in found]


def test_the_documented_paths_are_pushed() -> None:
    topic = "message_count:50|c message_bytes:500|c depth:1|g backend_depth:2|g"
    channel = """
        message_count:50|c depth:1|g backend_depth:2|g in_flight_count:3|g deferred_count:4|g
        requeue_count:6|c timeout_count:7|c clients:8|g
        e2e_processing_latency_99:12345|g e2e_processing_latency_50:1|g
    """
    assert lines(STATS, {}) == [
        *(f"topic.t.{figure}" for figure in topic.split()),
        *(f"topic.t.channel.ch.{figure}" for figure in channel.split()),
        "mem.heap_objects:5|g",
        "mem.gc_runs:9|c",
    ]


def test_counters_are_differences() -> None:
    before: dict[str, int] = {}
    lines(STATS, before)
    later = replace(STATS, topics=(replace(TOPIC, message_count=53),))

    assert lines(later, before)[:2] == ["topic.t.message_count:3|c", "topic.t.message_bytes:0|c"]


def test_ephemeral_ones_can_be_left_out() -> None:
    ephemeral = replace(CHANNEL, channel_name="ch#ephemeral")
    topics = (replace(TOPIC, channels=(ephemeral,)), replace(TOPIC, topic_name="e#ephemeral"))
    found = lines(replace(STATS, topics=topics), {}, exclude_ephemeral=True)

    assert [line for line in found if "ephemeral" in line] == []
    assert "topic.t.depth:1|g" in found


def test_the_prefix_names_the_host() -> None:
    assert expand_prefix("nsq.%s", "127.0.0.1", 4151) == "nsq.127_0_0_1_4151."
    assert expand_prefix("a.%s.b.%s.", "h", 1) == "a.h_1.b.h_1."
    assert expand_prefix("", "h", 1) == ""


def test_lines_are_never_split_between_datagrams() -> None:
    packed = pack_datagrams(["aaa\n", "bbb\n", "c" * 20 + "\n", "d\n"], 8)
    assert packed == [b"aaa\nbbb\n", b"c" * 20 + b"\n", b"d\n"]


def test_a_running_nsqd_pushes() -> None:
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as statsd:
        statsd.bind(("127.0.0.1", 0))
        statsd.settimeout(patience_s(10))
        address = f"127.0.0.1:{statsd.getsockname()[1]}"
        with EmbeddedNsqd(statsd_address=address, statsd_interval=0.05) as nsqd:
            host = nsqd.http_address.replace(".", "_").replace(":", "_")
            datagram = statsd.recv(2000).decode()

    assert re.match(rf"nsq\.{host}\.mem\.heap_objects:\d+\|g\n", datagram)
