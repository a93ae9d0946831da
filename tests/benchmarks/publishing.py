"""Publishing to the embedded nsqd beside the Go nsqd: CPU a message, and what durability costs.

    python tests/benchmarks/publishing.py cpu        # PUB over 50 connections, POST /pub
    python tests/benchmarks/publishing.py durable    # --durable beside -sync-every 1

``cpu`` is CPU time of the server, which other programs on the machine disturb less than wall time.
``durable`` compares with the Go nsqd at ``-sync-every 1 -mem-queue-size 0``, which is the nearest
that it has, though it confirms before it syncs.
"""

from __future__ import annotations

import argparse
import os
import selectors
import socket
import statistics
import struct
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent.parent))

from plugins.daemons import EmbeddedNsqdProcess, GoNsqd

BODY = b"x" * 200
OK_SIZE = 10


@contextmanager
def running(kind: type[GoNsqd], *flags: str) -> Iterator[GoNsqd]:
    with (
        tempfile.TemporaryDirectory(prefix="publishing-") as directory,
        kind(Path(directory), *flags) as nsqd,
    ):
        yield nsqd


def cpu_s(pid: int) -> float:
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


def connect(address: str) -> socket.socket:
    host, _, port = address.rpartition(":")
    connection = socket.create_connection((host, int(port)))
    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    return connection


def publish(
    nsqd: GoNsqd, commands: list[bytes], connections: int, seconds: float, window: int = 1
) -> tuple[int, list[float]]:
    """Keep ``window`` commands unanswered on each connection; return answers, and their waits."""
    selector = selectors.DefaultSelector()
    waiting: dict[socket.socket, list[float]] = {}
    sent = 0

    def send(connection: socket.socket) -> None:
        nonlocal sent
        waiting[connection].append(time.monotonic())
        connection.sendall(commands[sent % len(commands)])
        sent += 1

    for _ in range(connections):
        connection = connect(nsqd.tcp_address)
        connection.sendall(b"  V2")
        selector.register(connection, selectors.EVENT_READ)
        waiting[connection] = []
        for _ in range(window):
            send(connection)
    waits: list[float] = []
    until_s = time.monotonic() + seconds
    while (now_s := time.monotonic()) < until_s:
        for key, _ in selector.select(1):
            connection = key.fileobj  # type: ignore[assignment]
            now_s = time.monotonic()
            for _ in range(len(connection.recv(1 << 16)) // OK_SIZE):
                waits.append(now_s - waiting[connection].pop(0))
                send(connection)
    for connection in waiting:
        connection.close()
    return len(waits), waits


def single(topics: int = 1) -> list[bytes]:
    size = struct.pack(">i", len(BODY))
    return [b"PUB t%d\n" % number + size + BODY for number in range(topics)]


def multi(topics: int, count: int = 100) -> list[bytes]:
    packed = struct.pack(">i", count) + (struct.pack(">i", len(BODY)) + BODY) * count
    size = struct.pack(">i", len(packed))
    return [b"MPUB t%d\n" % number + size + packed for number in range(topics)]


def post(nsqd: GoNsqd, seconds: float) -> int:
    request = b"POST /pub?topic=t0 HTTP/1.1\r\nHost: %b\r\nContent-Length: %d\r\n\r\n%b" % (
        nsqd.http_address.encode(),
        len(BODY),
        BODY,
    )
    done = 0
    with connect(nsqd.http_address) as connection:
        until_s = time.monotonic() + seconds
        while time.monotonic() < until_s:
            connection.sendall(request)
            answer = connection.recv(1 << 16)
            assert answer.startswith(b"HTTP/1.1 200"), answer
            done += 1
    return done


def compare_cpu(seconds: float, rounds: int) -> None:
    print(f"{'us of CPU a message':<28}{'Go':>9}{'embedded':>10}{'ratio':>8}")
    costs: dict[str, dict[type[GoNsqd], list[float]]] = {}
    for _ in range(rounds):
        for kind in (GoNsqd, EmbeddedNsqdProcess):
            with running(kind, "-mem-queue-size=10000000") as nsqd:
                publish(nsqd, single(), 1, 0.2)
                for name in ("PUB, 50 connections", "POST /pub, keep-alive"):
                    before = cpu_s(nsqd.pid)
                    if name.startswith("PUB"):
                        count, _ = publish(nsqd, single(), 50, seconds)
                    else:
                        count = post(nsqd, seconds)
                    cost = (cpu_s(nsqd.pid) - before) / count * 1e6
                    costs.setdefault(name, {}).setdefault(kind, []).append(cost)
    for name, found in costs.items():
        go, ours = (statistics.median(found[kind]) for kind in (GoNsqd, EmbeddedNsqdProcess))
        print(f"{name:<28}{go:>9.1f}{ours:>10.1f}{ours / go:>8.2f}")


def compare_durable(seconds: float) -> None:
    heads = f"{'messages/s':>12}{'p50 ms':>9}{'p99 ms':>9}"
    print(f"{'':<32}{'Go':<4}{heads}   {'durable':<8}{heads}")
    for topics in (1, 100, 1000):
        for name, commands, connections, window, weight in (
            (f"MPUB of 100, {topics} topics", multi(topics), 8, 4, 100),
            (f"PUB, 50 connections, {topics} topics", single(topics), 50, 1, 1),
        ):
            columns = []
            for kind, flags in (
                (GoNsqd, ("-sync-every=1", "-mem-queue-size=0")),
                (EmbeddedNsqdProcess, ("-durable",)),
            ):
                with running(kind, *flags) as nsqd:
                    publish(nsqd, commands, connections, 0.5, window)
                    count, waits = publish(nsqd, commands, connections, seconds, window)
                    waits = sorted(waits) or [float("inf")]  # the Go nsqd syncs each message
                    rate = count * weight / seconds
                    p50, p99 = waits[len(waits) // 2], waits[len(waits) * 99 // 100]
                    columns.append(f"{rate:>12,.0f}{p50 * 1e3:>9.1f}{p99 * 1e3:>9.1f}")
            print(f"{name:<36}{columns[0]}           {columns[1]}", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("what", choices=("cpu", "durable"))
    parser.add_argument("--seconds", type=float, default=3.0)
    parser.add_argument("--rounds", type=int, default=3)
    arguments = parser.parse_args()
    if arguments.what == "cpu":
        compare_cpu(arguments.seconds, arguments.rounds)
    else:
        compare_durable(arguments.seconds)


if __name__ == "__main__":
    main()
