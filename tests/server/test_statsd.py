"""Pushes to statsd as by the Go nsqd: keys, differences, complete lines."""

import re
import socket
from collections import Counter
from pathlib import Path

import pytest
from plugins.servers import AnyNsqd, EmbeddedServer, Serve
from plugins.waiting import patience_s, wait_until

from nsqtools.protocol.stats import read_stats
from nsqtools.server.stats import statsd_lines

EVERY_QUEUE = {"message_count|c", "depth|g", "backend_depth|g"}
EVERY_QUEUE |= {"e2e_processing_latency_99|g", "e2e_processing_latency_50|g"}
OF_TOPIC = EVERY_QUEUE | {"message_bytes|c"}
OF_CHANNEL = EVERY_QUEUE | {"in_flight_count|g", "deferred_count|g", "clients|g"}
OF_CHANNEL |= {"requeue_count|c", "timeout_count|c"}
OF_MEMORY = {"mem.heap_objects|g", "mem.gc_runs|c"}  # a part of Go's
PACKET = 100


def test_the_documented_paths_are_pushed_and_counters_are_differences(any_nsqd: AnyNsqd) -> None:
    sums: Counter[str] = Counter()
    rounds = 0
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as statsd:
        statsd.bind(("127.0.0.1", 0))
        statsd.settimeout(patience_s(10))
        nsqd = any_nsqd(
            "-broadcast-address=127.0.0.1",
            "-e2e-processing-latency-percentile=0.99,0.5",
            f"-statsd-address=127.0.0.1:{statsd.getsockname()[1]}",
            "-statsd-interval=1100ms",  # The Go nsqd sends for a second less than this.
            "-statsd-prefix=a.%s.b",
            f"-statsd-udp-packet-size={PACKET}",
            "-statsd-exclude-ephemeral",
        )
        host = re.sub("[.:]", "_", nsqd.http_address)
        for topic, channel in (("t", "ch"), ("t", "ch#ephemeral"), ("e#ephemeral", "ch")):
            nsqd.create_channel(topic, channel)
        nsqd.publish("t", b"12", b"3", b"4")
        while rounds < 3:
            datagram = statsd.recv(2000)
            lines = datagram.decode().splitlines(keepends=True)
            assert len(datagram) <= PACKET or len(lines) == 1
            for line in lines:
                match = re.fullmatch(rf"a\.{host}\.b\.(\S+):(\d+)(\|[cg])\n", line)
                assert match, line
                key = match[1] + match[3]
                sums[key] += int(match[2])
                rounds += key == "topic.t.depth|g" and sums["topic.t.message_count|c"] >= 3

    queues = {key for key in sums if key.startswith("topic.")}
    assert queues == {
        *(f"topic.t.{metric}" for metric in OF_TOPIC),
        *(f"topic.t.channel.ch.{metric}" for metric in OF_CHANNEL),
    }
    assert sums.keys() >= OF_MEMORY
    assert (sums["topic.t.message_count|c"], sums["topic.t.message_bytes|c"]) == (3, 4)


@pytest.mark.parametrize("address", ["localhost:nope", "a..b:8125"])
def test_an_invalid_statsd_address_is_logged(tmp_path: Path, serve: Serve, address: str) -> None:
    flags = f"-statsd-address={address}", "-statsd-interval=10ms"
    nsqd = serve(EmbeddedServer(tmp_path, *flags))
    error = f"failed to create UDP socket to statsd({address}) - "
    wait_until(lambda: nsqd.log.count(error) > 1, what="it says so each time")


def test_a_missing_statsd_does_not_stop_pushes(tmp_path: Path, serve: Serve) -> None:
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as deaf:
        deaf.bind(("127.0.0.1", 0))
        deaf.connect(("127.0.0.1", 9))  # Packets from other addresses are refused.
        flags = f"-statsd-address=127.0.0.1:{deaf.getsockname()[1]}", "-statsd-interval=10ms"
        nsqd = serve(EmbeddedServer(tmp_path, *flags, "-statsd-udp-packet-size=1"))
        wait_until(lambda: nsqd.log.count("pushing stats") > 2, what="it goes on")
    assert "failed to create UDP socket" not in nsqd.log


def test_a_recreated_topic_counts_from_0() -> None:
    previous: dict[str, int] = {}

    def pushed(*counts: int) -> list[str]:
        topics = [{"topic_name": "t", "message_count": count} for count in counts]
        lines = statsd_lines(read_stats({"topics": topics}), previous, "", exclude_ephemeral=False)
        return [line.partition(":")[2] for line in lines if "message_count" in line]

    assert [pushed(7), pushed(9), pushed(3), pushed()] == [["7|c\n"], ["2|c\n"], ["3|c\n"], []]
    assert previous == {}  # Removed topics are dropped.
    assert pushed(2) == ["2|c\n"]
