"""How long a quiet client waits while others do their worst: the embedded nsqd beside the Go nsqd.

    python tests/benchmarks/stalls.py [--seconds 4] [--only syncs --only bombs]

A client publishes one small message every 5 ms, while a scenario runs in another process. The
figures are of its waits; ``turn`` is the longest turn of the loop and ``cpu`` the most CPU time in
one, as the embedded nsqd measured them itself. On an idle machine p99 should stay below 25 ms and
the longest below 50 ms. Peers' figures say what the machine adds.
"""

from __future__ import annotations

import argparse
import contextlib
import http.client
import multiprocessing
import re
import socket
import struct
import sys
import tempfile
import time
import zlib
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

sys.path.insert(0, str(Path(__file__).parent.parent))

from plugins.daemons import EmbeddedNsqdProcess, GoNsqd
from plugins.raw_client import RawClient, sized

PAUSE_S = 0.005


class Scenario(NamedTuple):
    """What is done to an nsqd: once before, and then again and again."""

    flags: tuple[str, ...]
    prepare: Callable[[GoNsqd], None]
    trouble: Callable[[GoNsqd], None]


def nothing(nsqd: GoNsqd) -> None:
    """Be quiet, too."""
    time.sleep(0.05)


def packed(*bodies: bytes) -> bytes:
    return len(bodies).to_bytes(4, "big") + b"".join(map(sized, bodies))


LARGE = b"MPUB large\n" + sized(packed(*[b"x" * 200] * 24_000))
NOPS = b"NOP\n" * 8_000_000
PUBS = b"PUB bomb#ephemeral\n\0\0\0\x01x" * 300_000


def deflated(data: bytes) -> bytes:
    compressor = zlib.compressobj(6, zlib.DEFLATED, -15)
    return compressor.compress(data) + compressor.flush(zlib.Z_SYNC_FLUSH)


def bomb(data: bytes) -> Callable[[GoNsqd], None]:
    compressed = deflated(data)

    def drop(nsqd: GoNsqd) -> None:
        with RawClient(nsqd.tcp_address) as client:
            client.identify(deflate=True)
            client.socket.settimeout(2)
            with contextlib.suppress(OSError):
                client.socket.sendall(compressed)
                while client.socket.recv(1 << 20):
                    pass

    return drop


def snappy_chunk(nsqd: GoNsqd) -> None:
    with RawClient(nsqd.tcp_address) as client:
        client.identify(snappy=True)
        with contextlib.suppress(OSError):
            client.send(b"\xff\x06\0\0sNaPpY\0\xff\xff\xff")
            for _ in range(4000):
                client.send(bytes(4000))


def large_publishes(nsqd: GoNsqd) -> None:
    with RawClient(nsqd.tcp_address) as client:
        for _ in range(10):
            assert client.ask(LARGE) == b"OK"


def topics(count: int) -> Callable[[GoNsqd], None]:
    def create(nsqd: GoNsqd) -> None:
        with RawClient(nsqd.tcp_address) as client:
            for start in range(0, count, 500):
                for number in range(start, min(count, start + 500)):
                    client.send(b"PUB t%d\n" % number + sized(b"x"))
                for _ in range(min(count, start + 500) - start):
                    client.read_response()

    return create


def publish_everywhere(nsqd: GoNsqd) -> None:
    topics(300)(nsqd)
    time.sleep(0.1)


def publish_to_one(nsqd: GoNsqd) -> None:
    with RawClient(nsqd.tcp_address) as client:
        for _ in range(200):
            client.publish("busy", b"x" * 200)


def stats(nsqd: GoNsqd) -> None:
    nsqd.get("/stats", format="json")
    nsqd.get("/stats")


def fill_and_empty(nsqd: GoNsqd) -> None:
    nsqd.create_channel("full", "ch")
    with RawClient(nsqd.tcp_address) as client:
        for _ in range(12):
            assert client.ask(LARGE.replace(b"MPUB large", b"MPUB full")) == b"OK"
    nsqd.post("/channel/empty", topic="full", channel="ch")
    with RawClient(nsqd.tcp_address) as client:
        for _ in range(4):
            assert client.ask(LARGE.replace(b"MPUB large", b"MPUB full")) == b"OK"
    nsqd.post("/topic/delete", topic="full")


def pause(nsqd: GoNsqd) -> None:
    for number in range(20):
        nsqd.post("/topic/pause", topic=f"t{number}")
        nsqd.post("/topic/unpause", topic=f"t{number}")


def busy_publishers(nsqd: GoNsqd) -> None:
    clients = [RawClient(nsqd.tcp_address) for _ in range(50)]
    data = (b"PUB busy#ephemeral\n" + sized(b"x" * 200)) * 500
    for _ in range(4):
        for client in clients:
            client.send(data)
        for client in clients:
            for _ in range(500):
                client.read_response()
    for client in clients:
        client.socket.close()


MEMORY = "-mem-queue-size=3000000"
SCENARIOS = {
    "nothing": Scenario((), lambda _: None, nothing),
    "NOP bombs": Scenario((), lambda _: None, bomb(NOPS)),
    "PUB bombs": Scenario((), lambda _: None, bomb(PUBS)),
    "snappy chunks": Scenario((), lambda _: None, snappy_chunk),
    "300 queues sync": Scenario(("-mem-queue-size=0",), topics(300), publish_everywhere),
    "1000 queues sync": Scenario(
        ("-mem-queue-size=0", "-sync-timeout=500ms"), topics(1000), topics(1000)
    ),
    "sync-every=1": Scenario(
        ("-mem-queue-size=0", "-sync-every=1"), lambda _: None, publish_to_one
    ),
    "MPUB of 24,000": Scenario((MEMORY,), lambda _: None, large_publishes),
    "MPUB to disk": Scenario((), lambda _: None, large_publishes),
    "stats of 10,000": Scenario((), topics(10_000), stats),
    "pausing of 10,000": Scenario((), topics(10_000), pause),
    "empty and delete": Scenario((MEMORY,), lambda _: None, fill_and_empty),
    "50 publishers": Scenario((), lambda _: None, busy_publishers),
}


def trouble(name: str, tcp_address: str, http_address: str) -> None:
    """Run a scenario until killed: in a process of its own."""
    nsqd = GoNsqd(Path("/"))
    nsqd.tcp_address, nsqd.http_address = tcp_address, http_address
    while True:
        SCENARIOS[name].trouble(nsqd)


def waits_s(nsqd: GoNsqd, seconds: float) -> list[float]:
    """Publish now and then, and return how long each took."""
    host, _, port = nsqd.tcp_address.rpartition(":")
    waits = []
    with socket.create_connection((host, int(port))) as connection:
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        connection.sendall(b"  V2")
        command = b"PUB quiet#ephemeral\n" + struct.pack(">i", 5) + b"quiet"
        until_s = time.monotonic() + seconds
        while (started_s := time.monotonic()) < until_s:
            connection.sendall(command)
            connection.recv(10, socket.MSG_WAITALL)
            waits.append(time.monotonic() - started_s)
            time.sleep(PAUSE_S)
    return sorted(waits)


def measure(kind: type[GoNsqd], name: str, seconds: float) -> str:
    scenario = SCENARIOS[name]
    with (
        tempfile.TemporaryDirectory(prefix="stalls-") as directory,
        kind(Path(directory), *scenario.flags) as nsqd,
    ):
        scenario.prepare(nsqd)
        time.sleep(0.5)
        addresses = (nsqd.tcp_address, nsqd.http_address)
        other = multiprocessing.Process(target=trouble, args=(name, *addresses), daemon=True)
        other.start()
        time.sleep(0.3)
        waits = waits_s(nsqd, seconds)
        other.kill()
        other.join()
        shown = f"{waits[len(waits) // 2] * 1e3:7.1f}{waits[len(waits) * 99 // 100] * 1e3:7.1f}"
        return f"{shown}{waits[-1] * 1e3:7.1f}{own_measurement(nsqd.http_address)}"


def own_measurement(http_address: str) -> str:
    connection = http.client.HTTPConnection(http_address, timeout=10)
    connection.request("GET", "/metrics")
    page = connection.getresponse().read().decode()
    connection.close()
    found = re.findall(r"^nsqd_longest_stall(?:_cpu)?_seconds (\S+)$", page, re.MULTILINE)
    return "".join(f"{float(each) * 1e3:7.1f}" for each in found)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--seconds", type=float, default=4.0)
    parser.add_argument("--only", action="append", choices=SCENARIOS)
    arguments = parser.parse_args()
    heads = "".join(f"{head:>7}" for head in ("p50", "p99", "max"))
    print(f"{'ms':<18}Go{heads}    embedded{heads}   turn    cpu")
    for name in arguments.only or SCENARIOS:
        go = measure(GoNsqd, name, arguments.seconds)
        embedded = measure(EmbeddedNsqdProcess, name, arguments.seconds)
        print(f"{name:<18}  {go}            {embedded}", flush=True)


if __name__ == "__main__":
    multiprocessing.set_start_method("fork")
    main()
