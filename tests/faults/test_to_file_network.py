"""``nsq to-file`` while nsqd dies and comes back, and while connections are cut under it."""

from __future__ import annotations

import subprocess
from collections.abc import Callable
from pathlib import Path

from plugins.archives import (
    CHANNEL,
    TOPIC,
    ended,
    filled,
    messages_of,
    to_file,
    unfinished,
    wait_until_archived,
)
from plugins.cli import SpawnNsq
from plugins.daemons import GoNsqd
from plugins.embedded import EmbeddedServer
from plugins.network import TO_SERVER, Proxy
from plugins.waiting import wait_until


def archived_when_stopped(process: subprocess.Popen[bytes], directory: Path) -> list[bytes]:
    ended(process)
    return sorted(message["body"] for message in messages_of(directory))


def numbers(count: int) -> list[bytes]:
    return [b"%06d" % number for number in range(count)]


def test_cut_connections_lose_and_double_nothing(
    quick_nsqd: EmbeddedServer,
    proxy_to: Callable[[str], Proxy],
    spawn_nsq: SpawnNsq,
    tmp_path: Path,
) -> None:
    nsqd = quick_nsqd
    bodies = filled(nsqd, numbers(15_000))
    proxy = proxy_to(nsqd.tcp_address)
    fast = ["--consumer-opt", "reconnect_base=100ms", "--max-in-flight", "200"]
    process = spawn_nsq(to_file(proxy.address, tmp_path, *fast))
    left = len(bodies)
    for _ in range(2):
        wait_until(
            lambda left=left: unfinished(nsqd, TOPIC, CHANNEL) < left,  # type: ignore[misc]
            what="progress",
            timeout_s=20,
        )
        proxy.pause(TO_SERVER)  # what is FINished now does not arrive
        more = numbers(len(bodies) + 100)[len(bodies) :]
        nsqd.publish(TOPIC, *more)  # it may have been done with what there was
        bodies += more
        wait_until(
            lambda: nsqd.channel_stats(TOPIC, CHANNEL)["in_flight_count"], what="messages in flight"
        )
        left = unfinished(nsqd, TOPIC, CHANNEL)
        proxy.cut(reset=True)
        proxy.resume(TO_SERVER)

    wait_until_archived(nsqd)

    assert nsqd.channel_stats(TOPIC, CHANNEL)["timeout_count"] > 0  # FINs were lost
    assert archived_when_stopped(process, tmp_path) == bodies


def test_an_nsqd_killed_and_started_again_has_lost_nothing_that_was_on_its_disk(
    go_nsqd: Callable[..., GoNsqd], spawn_nsq: SpawnNsq, tmp_path: Path
) -> None:
    # nothing in memory: what is killed with nsqd is only what it had in flight
    nsqd = go_nsqd("-mem-queue-size=0", "-sync-every=1", "-msg-timeout=2s")
    bodies = filled(nsqd, numbers(1_500))
    fast = ["--consumer-opt", "reconnect_base=100ms", "--max-in-flight", "50"]
    process = spawn_nsq(to_file(nsqd.tcp_address, tmp_path, *fast))
    wait_until(lambda: nsqd.depth(TOPIC, CHANNEL) < 1_200, what="progress", timeout_s=20)

    nsqd.kill()
    nsqd.start()
    wait_until_archived(nsqd)

    archived = archived_when_stopped(process, tmp_path)
    # nsqd counts what it reads ahead as consumed: at most that and what was in flight is its loss
    assert len(set(bodies) - set(archived)) <= 50 + 2
    assert set(archived) <= set(bodies)


def test_sigterm_amid_a_backlog_leaves_each_message_in_the_file_or_in_the_queue(
    go_nsqd: Callable[..., GoNsqd], spawn_nsq: SpawnNsq, tmp_path: Path
) -> None:
    nsqd = go_nsqd("-mem-queue-size=100000")
    bodies = filled(nsqd, numbers(100_000))
    process = spawn_nsq(to_file(nsqd.tcp_address, tmp_path, "--max-in-flight", "200"))
    wait_until(lambda: nsqd.depth(TOPIC, CHANNEL) < 95_000, what="progress", timeout_s=20)

    archived = archived_when_stopped(process, tmp_path)

    assert 0 < len(archived) < len(bodies)
    assert len(set(archived)) == len(archived)
    wait_until(
        lambda: nsqd.depth(TOPIC, CHANNEL) == len(bodies) - len(archived),
        what="the rest to be in the queue",
    )
