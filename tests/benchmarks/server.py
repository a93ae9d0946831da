"""The embedded nsqd beside the Go nsqd: publish (MPUB of 100), memory when all are queued, and
consume (RDY 2500), with messages of 200 bytes.

    python tests/benchmarks/server.py [--messages 1000000] [--rounds 3]

The client is the barest thing that keeps a server busy: it cuts frames of a known size out of what
it reads and answers with FINs in one write. Medians of the rounds, both servers in each round.
"""

from __future__ import annotations

import argparse
import socket
import struct
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from statistics import median

BODY = b"x" * 200
BATCH = 100
WINDOW = 50  # MPUBs under way
FRAME = struct.Struct(">II10x16s200s")
OK_FRAME_SIZE = 10

GO_NSQD = [str(Path(__file__).parents[1] / "go" / "bin" / "nsqd")]
EMBEDDED = [sys.executable, "-m", "nsqtools", "nsqd"]


@contextmanager
def running(command: list[str]) -> Iterator[tuple[tuple[str, int], int]]:
    """Run a server with everything in memory; yield its TCP address and process id."""
    with tempfile.TemporaryDirectory() as directory:
        arguments = [
            f"-data-path={directory}",
            "-tcp-address=127.0.0.1:0",
            "-http-address=127.0.0.1:0",
            "-mem-queue-size=2000000",
        ]
        process = subprocess.Popen([*command, *arguments], stderr=subprocess.PIPE, text=True)
        assert process.stderr is not None
        try:
            for line in process.stderr:
                if "TCP: listening on" in line:
                    host, _, port = line.split()[-1].rpartition(":")
                    yield (host, int(port)), process.pid
                    return
            raise RuntimeError("the server did not start")
        finally:
            process.kill()
            process.stderr.close()
            process.wait()


def connect(address: tuple[str, int]) -> socket.socket:
    connection = socket.create_connection(address)
    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    connection.sendall(b"  V2")
    return connection


def publish(address: tuple[str, int], count: int) -> None:
    payload = struct.pack(">I", BATCH) + (struct.pack(">I", len(BODY)) + BODY) * BATCH
    command = b"MPUB bench\n" + struct.pack(">I", len(payload)) + payload
    with connect(address) as connection:
        missing = 0
        for _ in range(count // BATCH):
            connection.sendall(command)
            missing += OK_FRAME_SIZE
            while missing > WINDOW * OK_FRAME_SIZE:
                missing -= len(connection.recv(65536))
        while missing:
            missing -= len(connection.recv(65536))


def subscribe(address: tuple[str, int]) -> socket.socket:
    connection = connect(address)
    connection.sendall(b"SUB bench ch\n")
    connection.recv(OK_FRAME_SIZE, socket.MSG_WAITALL)
    return connection


def consume(connection: socket.socket, count: int) -> None:
    connection.sendall(b"RDY 2500\n")
    buffered = b""
    while count > 0:
        buffered += connection.recv(1 << 18)
        whole = len(buffered) // FRAME.size * FRAME.size
        if whole:
            ids = [frame[2] for frame in FRAME.iter_unpack(buffered[:whole])]
            connection.sendall(b"FIN " + b"\nFIN ".join(ids) + b"\n")
            count -= len(ids)
            buffered = buffered[whole:]


def timed(work: Callable[[], None]) -> float:
    started = time.perf_counter()
    work()
    return time.perf_counter() - started


def resident_bytes(pid: int) -> int:
    return int(Path(f"/proc/{pid}/statm").read_text().split()[1]) * 4096


def measure(command: list[str], count: int) -> tuple[float, float, float]:
    """Return messages a second published and consumed, and bytes of memory a queued message."""
    with running(command) as (address, pid), subscribe(address) as consumer:
        before = resident_bytes(pid)
        published = timed(lambda: publish(address, count))
        queued = resident_bytes(pid) - before
        consumed = timed(lambda: consume(consumer, count))
    return count / published, count / consumed, queued / count


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--messages", type=int, default=1_000_000)
    parser.add_argument("--rounds", type=int, default=3)
    arguments = parser.parse_args()
    rounds = [
        (measure(GO_NSQD, arguments.messages), measure(EMBEDDED, arguments.messages))
        for _ in range(arguments.rounds)
    ]
    for index, what in enumerate(("published/s", "consumed/s", "bytes/queued message")):
        go = median(each[0][index] for each in rounds)
        embedded = median(each[1][index] for each in rounds)
        print(f"{what}: Go {go:,.0f}, embedded {embedded:,.0f}, ratio {embedded / go:.2f}")


if __name__ == "__main__":
    main()
