"""What --durable costs, beside the Go nsqd with -sync-every 1 -mem-queue-size 0.

    python tests/benchmarks/durable.py [--seconds 3]

MPUBs of 100 messages of 200 bytes from 4 connections with 20 under way each, to 1, 100 and 1,000
topics in turn, and single PUBs over 50 connections that wait for each answer. The latency is from a
command to its answer. What a disk takes for a sync decides most of it, so it is printed first.
Then each starts again after a kill, with 200,000 messages (Go's were not synced one by one).
"""

from __future__ import annotations

import argparse
import os
import selectors
import socket
import struct
import sys
import tempfile
import time
from collections import deque
from dataclasses import dataclass
from itertools import cycle
from pathlib import Path
from statistics import median

sys.path.insert(0, str(Path(__file__).parent.parent))

from plugins.daemons import EmbeddedNsqdProcess, GoNsqd
from plugins.raw_client import RawClient, sized

BODY = b"x" * 200
OK_FRAME_SIZE = 10
CONTESTANTS: dict[str, tuple[type[GoNsqd], tuple[str, ...]]] = {
    "Go": (GoNsqd, ("-sync-every=1", "-mem-queue-size=0")),
    "embedded": (EmbeddedNsqdProcess, ("-durable",)),
}


@dataclass(slots=True)
class Publisher:
    """One connection, when its commands under way were sent, and the size of half an answer."""

    connection: socket.socket
    sent_s: deque[float]
    part: int = 0


def sync_ms(folder: str) -> float:
    """What a short write and its sync take."""
    waits = []
    with open(Path(folder) / "probe", "wb", buffering=0) as file:
        for _ in range(50):
            began_s = time.monotonic()
            file.write(b"x" * 4096)
            os.fsync(file.fileno())
            waits.append(time.monotonic() - began_s)
    return median(waits) * 1e3


def load(
    nsqd: GoNsqd, commands: list[bytes], connections: int, window: int, seconds: float
) -> tuple[float, float]:
    """Keep ``window`` commands under way on each connection: commands a second, and the median
    latency in milliseconds."""
    host, _, port = nsqd.tcp_address.rpartition(":")
    upcoming = cycle(commands)
    waits: list[float] = []
    publishers = []
    with selectors.DefaultSelector() as selector:
        for _ in range(connections):
            connection = socket.create_connection((host, int(port)))
            connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            publisher = Publisher(connection, deque([time.monotonic()] * window))
            publishers.append(publisher)
            selector.register(connection, selectors.EVENT_READ, publisher)
            connection.sendall(b"  V2" + b"".join(next(upcoming) for _ in range(window)))
        began_s = time.monotonic()
        while not waits or time.monotonic() < began_s + seconds:
            for key, _ in selector.select(0.1):
                publisher = key.data
                received = publisher.part + len(publisher.connection.recv(1 << 16))
                answers, publisher.part = divmod(received, OK_FRAME_SIZE)
                now_s = time.monotonic()
                waits += [now_s - publisher.sent_s.popleft() for _ in range(answers)]
                publisher.sent_s.extend([now_s] * answers)
                publisher.connection.sendall(b"".join(next(upcoming) for _ in range(answers)))
        took_s = time.monotonic() - began_s
    for publisher in publishers:
        publisher.connection.close()
    return len(waits) / took_s, median(waits) * 1e3


def multi_publishes(topics: int) -> list[bytes]:
    body = sized(struct.pack(">i", 100) + sized(BODY) * 100)
    return [b"MPUB t%d\n" % number + body for number in range(topics)]


def restart(kind: type[GoNsqd], *flags: str) -> float:
    """Seconds from the start of a process to its first answer, after it was killed."""
    with (
        tempfile.TemporaryDirectory(prefix="durable-") as folder,
        kind(Path(folder), *flags) as nsqd,
    ):
        with RawClient(nsqd.tcp_address) as client:
            for _ in range(100):
                client.send(multi_publishes(1)[0] * 20)
                for _ in range(20):
                    client.read_response()
        nsqd.kill()
        began_s = time.monotonic()
        nsqd.start()
        return time.monotonic() - began_s


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--seconds", type=float, default=3.0)
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="durable-") as folder:
        print(f"a sync of the disk takes {sync_ms(folder):.1f} ms")
    for title, (kind, flags) in CONTESTANTS.items():
        with (
            tempfile.TemporaryDirectory(prefix="durable-") as folder,
            kind(Path(folder), *flags) as nsqd,
        ):
            for topics in (1, 100, 1000):
                commands = multi_publishes(topics)
                with RawClient(nsqd.tcp_address) as client:
                    client.publish("t0", b"first")
                per_s, wait_ms = load(nsqd, commands, 4, 20, arguments.seconds)
                what = f"MPUB of 100, {topics} topics"
                print(f"{title:<10}{what:<26}{per_s * 100:>10,.0f}/s {wait_ms:8.1f} ms", flush=True)
            publish = b"PUB t0\n" + sized(BODY)
            per_s, wait_ms = load(nsqd, [publish], 50, 1, arguments.seconds)
            print(f"{title:<10}{'PUB, 50 connections':<26}{per_s:>10,.0f}/s {wait_ms:8.1f} ms")
    for title, kind, flag in (
        ("Go", GoNsqd, "-mem-queue-size=0"),
        ("embedded", EmbeddedNsqdProcess, "-durable"),
    ):
        print(f"{title:<10}{'start after a kill':<26}{restart(kind, flag):>12.2f} s", flush=True)


if __name__ == "__main__":
    main()
