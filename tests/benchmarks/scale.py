"""What many messages, topics, connections and requeues cost: the embedded nsqd beside the Go nsqd.

    python tests/benchmarks/scale.py [--scale 0.1] [--only topics --only storm]

With ``--scale 1`` there are 5 M messages of 100 bytes, 10,000 topics with a channel each, 5,000
consumers, 10,000 connections that come and go, and 500,000 requeues; each in a server of its own.
CPU is the server's, user and system, with what the disk costs; starts and stops are wall time.
"""

from __future__ import annotations

import argparse
import os
import resource
import socket
import struct
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent.parent))

from plugins import daemons
from plugins.daemons import EmbeddedNsqdProcess, GoNsqd
from plugins.raw_client import RawClient, sized

_TICKS = os.sysconf("SC_CLK_TCK")
_PAGE = os.sysconf("SC_PAGESIZE")
_AT_ONCE = 200  # commands before their answers are read


def cpu_s(nsqd: GoNsqd) -> float:
    fields = Path(f"/proc/{nsqd.pid}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / _TICKS


def megabytes(nsqd: GoNsqd) -> float:
    return int(Path(f"/proc/{nsqd.pid}/statm").read_text().split()[1]) * _PAGE / 1e6


def in_turn(client: RawClient, commands: list[bytes]) -> None:
    """Send commands, and read an answer for each."""
    for start in range(0, len(commands), _AT_ONCE):
        some = commands[start : start + _AT_ONCE]
        client.send(b"".join(some))
        for _ in some:
            client.read_response()


def messages(nsqd: GoNsqd, count: int) -> None:
    body = struct.pack(">i", 100) + sized(b"x" * 100) * 100
    with RawClient(nsqd.tcp_address) as client:
        for _ in range(count // 10_000):
            in_turn(client, [b"MPUB many\n" + sized(body)] * 100)


def topics(nsqd: GoNsqd, count: int) -> None:
    with RawClient(nsqd.tcp_address) as client:
        in_turn(client, [b"PUB t%d\n" % number + sized(b"x") for number in range(count)])
    for number in range(count):
        with RawClient(nsqd.tcp_address) as client:
            client.subscribe(f"t{number}", "ch")


def connections(nsqd: GoNsqd, count: int) -> Callable[[], None]:
    clients = [RawClient(nsqd.tcp_address) for _ in range(count)]
    for client in clients:
        client.send(b"SUB t ch\nRDY 1\n")
    for client in clients:
        client.read_response()
    return lambda: [client.socket.close() for client in clients] and None


def churn(nsqd: GoNsqd, count: int) -> None:
    host, _, port = nsqd.tcp_address.rpartition(":")
    for _ in range(count):
        with socket.create_connection((host, int(port))) as connection:
            connection.sendall(b"  V2PUB t#ephemeral\n" + sized(b"x"))
            connection.recv(10, socket.MSG_WAITALL)


def storm(nsqd: GoNsqd, count: int) -> None:
    with RawClient(nsqd.tcp_address) as client, RawClient(nsqd.tcp_address) as producer:
        client.subscribe("t", "ch", ready=2500)
        producer.publish("t", *[b"x" * 100] * 1000)
        for _ in range(count // 1000):
            found = client.read_messages(1000)
            client.send(b"".join(b"REQ %b 0\n" % message.id for message in found))
        client.finish(client.read_messages(1000))
        client.settle()


WORK: dict[str, tuple[Callable[[GoNsqd, int], object], int]] = {
    "messages": (messages, 5_000_000),
    "topics": (topics, 10_000),
    "connections": (connections, 5_000),
    "churn": (churn, 10_000),
    "storm": (storm, 500_000),
}


def measure(kind: type[GoNsqd], name: str, scale: float) -> str:
    work, full = WORK[name]
    count = max(1000, int(full * scale) // 1000 * 1000)
    with (
        tempfile.TemporaryDirectory(prefix="scale-") as directory,
        kind(Path(directory), "-mem-queue-size=10000000") as nsqd,
    ):
        before_s, began_s = cpu_s(nsqd), time.monotonic()
        end = work(nsqd, count)
        took_s, used_s, memory = time.monotonic() - began_s, cpu_s(nsqd) - before_s, megabytes(nsqd)
        if callable(end):
            end()
        stop_s = timed(nsqd.stop)
        start_s = timed(nsqd.start)
    per_s = count / took_s
    return f"{used_s / count * 1e6:9.2f}{per_s:11,.0f}{memory:8.0f}{stop_s:7.2f}{start_s:7.2f}"


def timed(work: Callable[[], None]) -> float:
    began_s = time.monotonic()
    work()
    return time.monotonic() - began_s


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--scale", type=float, default=0.1)
    parser.add_argument("--only", action="append", choices=WORK)
    arguments = parser.parse_args()
    most = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
    resource.setrlimit(resource.RLIMIT_NOFILE, (most, most))
    daemons.STOP_TIMEOUT_S = daemons.START_TIMEOUT_S = 120.0
    print(f"{'':<12}{'':<10}{'us each':>9}{'a second':>11}{'MB':>8}{'stop s':>7}{'start s':>7}")
    for name in arguments.only or WORK:
        for title, kind in (("Go", GoNsqd), ("embedded", EmbeddedNsqdProcess)):
            print(f"{name:<12}{title:<10}{measure(kind, name, arguments.scale)}", flush=True)


if __name__ == "__main__":
    main()
