"""``nsq to-nsq`` beside nsq_to_nsq, and ``nsq to-http`` beside nsq_to_http, in one run.

    python tests/benchmarks/forward.py nsq --messages 600000 --rounds 3
    python tests/benchmarks/forward.py http --messages 100000 --rounds 3

Whole processes, start-up included, from a full channel until nothing is left of it. The endpoint is
a Go server that answers 200 (tests/go/http_sink). Prints messages a second, CPU a message, and the
ratios of the medians.
"""

from __future__ import annotations

import argparse
import os
import statistics
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import NamedTuple

sys.path.insert(0, str(Path(__file__).parent.parent))

from plugins.daemons import GO_PROGRAMS, GoNsqd
from plugins.waiting import wait_until

from nsqtools.client.producer import Producer

TOPIC = "clicks"
BODY = b"x" * 200
NSQ = [sys.executable, "-m", "nsqtools"]
TICKS = os.sysconf("SC_CLK_TCK")


class Figures(NamedTuple):
    """Of one run."""

    rate: float
    cpu_us: float


def fill(nsqd: GoNsqd, messages: int, *channels: str) -> None:
    for channel in channels:
        nsqd.create_channel(TOPIC, channel)
    with Producer(nsqd.tcp_address) as producer:
        for begin in range(0, messages, 1000):
            producer.publish_many(TOPIC, [BODY] * min(1000, messages - begin))
    for channel in channels:
        wait_until(
            lambda channel=channel: nsqd.depth(TOPIC, channel) == messages,  # type: ignore[misc]
            what="a full channel",
            timeout_s=60,
        )


def drain(nsqd: GoNsqd, channel: str, messages: int, command: list[str]) -> Figures:
    """Run a command until its channel is empty."""
    began = time.monotonic()
    with subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL) as process:
        while True:
            stats = nsqd.channel_stats(TOPIC, channel)
            if not stats["depth"] + stats["in_flight_count"]:
                break
            time.sleep(0.02)
        took_s = time.monotonic() - began
        fields = Path(f"/proc/{process.pid}/stat").read_text().rsplit(") ", 1)[1].split()
        process.terminate()
    cpu_s = (int(fields[11]) + int(fields[12])) / TICKS
    return Figures(messages / took_s, cpu_s / messages * 1e6)


def to_nsq(source: GoNsqd, target: GoNsqd, messages: int) -> tuple[Figures, Figures]:
    place = ["nsqd-tcp-address", source.tcp_address]
    there = ["destination-nsqd-tcp-address", target.tcp_address]
    go = [str(GO_PROGRAMS / "nsq_to_nsq"), f"-topic={TOPIC}", "-channel=go", "-status-every=0"]
    go += ["-destination-topic=go", "-" + place[0], place[1], "-" + there[0], there[1]]
    ours = [*NSQ, "to-nsq", "-t", TOPIC, "-c", "ours", "--destination-topic", "ours"]
    ours += ["--" + place[0], place[1], "--" + there[0], there[1], "--no-loop-guard"]
    ours += ["--nsqd-http-address", source.http_address]
    return drain(source, "go", messages, go), drain(source, "ours", messages, ours)


def to_http(source: GoNsqd, messages: int) -> tuple[Figures, Figures]:
    go = [str(GO_PROGRAMS / "nsq_to_http"), f"-topic={TOPIC}", "-channel=go", "-status-every=0"]
    go += ["-nsqd-tcp-address", source.tcp_address, "-post"]
    ours = [*NSQ, "to-http", "-t", TOPIC, "-c", "ours", "--nsqd-tcp-address", source.tcp_address]
    ours += ["--nsqd-http-address", source.http_address, "--post"]
    with http_sink() as url:
        theirs = drain(source, "go", messages, [*go, url])
    with http_sink() as url:
        return theirs, drain(source, "ours", messages, [*ours, url])


@contextmanager
def http_sink() -> Iterator[str]:
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE}
    with subprocess.Popen([GO_PROGRAMS / "http_sink"], text=True, **pipes) as server:
        assert server.stdout is not None
        yield f"http://{server.stdout.readline().strip()}/"
        assert server.stdin is not None
        server.stdin.close()


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("what", choices=["nsq", "http"])
    parser.add_argument("--messages", type=int, default=100_000)
    parser.add_argument("--rounds", type=int, default=3)
    given = parser.parse_args()
    rounds = []
    for _ in range(given.rounds):
        with TemporaryDirectory() as here, TemporaryDirectory() as there:
            memory = f"-mem-queue-size={3 * given.messages}"
            with GoNsqd(Path(here), memory) as source, GoNsqd(Path(there), memory) as target:
                fill(source, given.messages, "go", "ours")
                if given.what == "nsq":
                    rounds.append(to_nsq(source, target, given.messages))
                else:
                    rounds.append(to_http(source, given.messages))
    for name, figures in zip(("Go", "ours"), zip(*rounds, strict=True), strict=True):
        rate = statistics.median(each.rate for each in figures)
        cpu_us = statistics.median(each.cpu_us for each in figures)
        print(f"{name:5} {rate:9,.0f} messages/s {cpu_us:8.2f} us of CPU a message")
    ratio = statistics.median(ours.rate / go.rate for go, ours in rounds)
    cpu = statistics.median(go.cpu_us / ours.cpu_us for go, ours in rounds)
    print(
        f"ours is {ratio:.1f} x as fast, with {cpu:.1f} x less CPU; load {os.getloadavg()[0]:.1f}"
    )


if __name__ == "__main__":
    main()
