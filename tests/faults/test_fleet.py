"""Fleets of workers with slow handlers: every message is handled, few of them twice.

Each worker is a process with default options, and writes a line for each message it has handled.
`pytest -rP -m "slow or not slow" tests/faults/test_fleet.py` prints the table.
"""

import itertools
from collections import Counter
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path

import pytest
from plugins.archives import unfinished
from plugins.clients import CHANNEL, TOPIC, start_worker
from plugins.examples import slow
from plugins.servers import AnyNsqd
from plugins.waiting import wait_until

MSG_TIMEOUT_S = 2.0


def cells() -> Iterator[object]:
    """Yield (way, processes, handlers per process, nsqd, handler time / msg_timeout, messages)."""
    yield "threads", 2, 2, 12, 0.35, 14
    ways = [("threads", 1, 1), ("threads", 6, 1), ("threads", 2, 16), ("pool", 2, 4)]
    ways += [("asyncio", 1, 32)]
    rounds = {0.01: 300, 0.1: 40, 0.35: 15, 0.7: 15}
    for way, nsqds, share in itertools.product(ways, (1, 12), rounds):
        messages = max(rounds[share] * way[1] * way[2], 3 * nsqds)
        yield slow(*way, nsqds, share, messages)
    for way in (("threads", 4, 8), ("asyncio", 1, 32)):
        yield slow(*way, 200, 0.1, 1000)


@pytest.mark.parametrize(("way", "processes", "count", "nsqds", "share", "messages"), [*cells()])
def test_a_healthy_fleet_handles_each_message_once(
    embedded_nsqd: AnyNsqd,
    tmp_path: Path,
    way: str,
    processes: int,
    count: int,
    nsqds: int,
    share: float,
    messages: int,
) -> None:
    handler_s, log = share * MSG_TIMEOUT_S, tmp_path / "handled"
    log.touch()
    flag = f"-msg-timeout={MSG_TIMEOUT_S:g}s"
    servers = [embedded_nsqd(flag) for _ in range(nsqds)]
    for number, nsqd in enumerate(servers):
        nsqd.create_channel(TOPIC, CHANNEL)
        if bodies := [b"%d" % index for index in range(number, messages, nsqds)]:
            nsqd.publish(TOPIC, *bodies)
    addresses = [nsqd.tcp_address for nsqd in servers]

    def handled() -> Counter[bytes]:
        return Counter(log.read_bytes().split())

    with ExitStack() as workers:
        for _ in range(processes):
            worker = start_worker(tmp_path, way, count, handler_s, addresses)
            workers.callback(worker.wait)
            workers.callback(worker.kill)
        wait_until(
            lambda: (
                len(handled()) == messages
                or not any(unfinished(nsqd, TOPIC, CHANNEL) for nsqd in servers)
            ),
            what="all messages",
            timeout_s=20 + 3 * messages * handler_s / (processes * count),
        )
        counts = handled()
    print(
        f"{way:8} {nsqds:3} nsqd {processes} x {count:2} at {share:4.2f}: {messages - len(counts)} "
        f"unseen, {counts.total() - len(counts)} of {messages} twice"
    )
    assert len(counts) == messages
    if way != "pool" or share < 0.5:  # a pool shows its capacity only by late answers
        assert counts.total() - len(counts) <= 0.01 * messages + 1
