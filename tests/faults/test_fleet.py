"""Fleets of workers whose handlers take a good part of msg_timeout: nothing unseen, little twice.

Each worker is a process with default options, and writes a line for each message it has handled.
That handlers are busy all the time is in tests/client/test_in_flight_limit.py, and workers that
are killed are in test_crash_loop.py there and in test_forwarders_killed.py.
`pytest -rP -m "slow or not slow" tests/faults/test_fleet.py` prints the table.
"""

from __future__ import annotations

import collections
import itertools
import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path

import pytest
from plugins.archives import unfinished
from plugins.clients import CHANNEL, TOPIC
from plugins.embedded import EmbeddedServer
from plugins.http_api import Nsqd
from plugins.waiting import wait_until

MSG_TIMEOUT_S = 2.0

WORKER = """
import asyncio, os, sys, time
from concurrent.futures import ThreadPoolExecutor
from nsqtools import Consumer, aio

way, count, handler_s, *addresses = sys.argv[1:]
count, handler_s = int(count), float(handler_s)
log = os.open("handled", os.O_WRONLY | os.O_CREAT | os.O_APPEND)

def handle(message):
    time.sleep(handler_s)
    os.write(log, b"%s\\n" % message.body)

async def handle_in_task(message):
    await asyncio.sleep(handler_s)
    os.write(log, b"%s\\n" % message.body)

def handle_in_pool(message):
    pool.submit(lambda: (handle(message), message.finish()))

if way == "asyncio":
    consumer = aio.Consumer("clicks", "archive", nsqd_tcp_addresses=addresses)
    asyncio.run(consumer.run(handle_in_task, concurrency=count))
consumer = Consumer("clicks", "archive", nsqd_tcp_addresses=addresses)
if way == "pool":
    with ThreadPoolExecutor(count) as pool:
        consumer.run(handle_in_pool, auto_answer=False)
consumer.run(handle, workers=count)
"""


class Fleet:
    """``processes`` workers of ``count`` handlers each, on some nsqd with ``messages`` in all."""

    def __init__(
        self,
        nsqds: list[Nsqd],
        path: Path,
        *,
        way: str,
        processes: int,
        count: int,
        handler_s: float,
        messages: int,
    ) -> None:
        self._nsqds = nsqds
        self._messages = messages
        self._path = path
        for number, nsqd in enumerate(nsqds):
            nsqd.create_channel(TOPIC, CHANNEL)
            bodies = [b"%d" % n for n in range(number, messages, len(nsqds))]
            if bodies:
                nsqd.publish(TOPIC, *bodies)
        addresses = [nsqd.tcp_address for nsqd in nsqds]
        command = [sys.executable, "-c", WORKER, way, str(count), str(handler_s), *addresses]
        environment = os.environ | {"PYTHONPATH": os.getcwd()}
        self._workers = [
            subprocess.Popen(command, cwd=path, env=environment) for _ in range(processes)
        ]

    @property
    def handled(self) -> collections.Counter[bytes]:
        """What was handled until now, and how often."""
        path = self._path / "handled"
        return collections.Counter(path.read_bytes().split() if path.exists() else [])

    @property
    def is_done(self) -> bool:
        is_empty = not any(unfinished(nsqd, TOPIC, CHANNEL) for nsqd in self._nsqds)
        return len(self.handled) == self._messages or is_empty

    def end(self) -> None:
        for worker in self._workers:
            worker.kill()
            worker.wait()


MakeFleet = Callable[..., Fleet]


@pytest.fixture
def fleet(data_path: Callable[[], Path], tmp_path: Path) -> Iterator[MakeFleet]:
    with ExitStack() as all_of_it:

        def make(nsqds: int, **how: object) -> Fleet:
            servers: list[Nsqd] = []
            for _ in range(nsqds):
                server = EmbeddedServer(data_path(), f"-msg-timeout={MSG_TIMEOUT_S:g}s")
                server.start()
                all_of_it.callback(server.stop)
                servers.append(server)
            made = Fleet(servers, tmp_path, **how)  # type: ignore[arg-type]
            all_of_it.callback(made.end)
            return made

        yield make


def cells() -> Iterator[object]:
    """(way, nsqd, processes, handlers of each, handler time in msg_timeouts, messages)"""
    yield pytest.param("threads", 12, 2, 2, 0.35, 14)
    ways = [
        ("threads", 1, 1),
        ("threads", 6, 1),
        ("threads", 2, 16),
        ("pool", 2, 4),
        ("asyncio", 1, 32),
    ]
    for share, nsqds, (way, processes, count) in itertools.product(
        (0.01, 0.1, 0.35, 0.7), (1, 12), ways
    ):
        rounds = 300 if share < 0.05 else 40 if share < 0.3 else 15
        messages = max(rounds * processes * count, 3 * nsqds)
        yield pytest.param(way, nsqds, processes, count, share, messages, marks=pytest.mark.slow)
    for way, processes, count in (("threads", 4, 8), ("asyncio", 1, 32)):
        yield pytest.param(way, 200, processes, count, 0.1, 1000, marks=pytest.mark.slow)


@pytest.mark.parametrize(("way", "nsqds", "processes", "count", "share", "messages"), list(cells()))
def test_a_healthy_fleet_handles_everything_once(
    fleet: MakeFleet,
    way: str,
    nsqds: int,
    processes: int,
    count: int,
    share: float,
    messages: int,
) -> None:
    handler_s = share * MSG_TIMEOUT_S
    made = fleet(
        nsqds, way=way, processes=processes, count=count, handler_s=handler_s, messages=messages
    )
    expected_s = messages * handler_s / (processes * count)
    wait_until(lambda: made.is_done, what="all messages", timeout_s=20 + 3 * expected_s)
    seen = made.handled
    print(
        f"{way:8} {nsqds:3} nsqd {processes} x {count:2} at {share:4.2f}: {messages - len(seen)} "
        f"unseen, {seen.total() - len(seen)} of {messages} twice"
    )
    assert len(seen) == messages
    if way != "pool" or share < 0.5:  # only a pool's answers tell how many it can take: a few late
        assert seen.total() - len(seen) <= 0.01 * messages + 1
