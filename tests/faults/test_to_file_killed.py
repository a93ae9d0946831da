"""``nsq to-file`` killed again and again as it drains an nsqd: nothing lost, nothing doubled.

The long form, with 20 kills while a million messages of a Go nsqd drain, runs with ``-m slow``.
"""

from __future__ import annotations

import random
import subprocess
import threading
from collections.abc import Callable, Sequence
from pathlib import Path

import pytest
from plugins.archives import (
    CHANNEL,
    TOPIC,
    assert_each_once,
    ended,
    filled,
    lines_of,
    messages_of,
    parts,
    to_file,
    unfinished,
    wait_until_archived,
)
from plugins.cli import SpawnNsq
from plugins.daemons import GoNsqd
from plugins.embedded import EmbeddedServer
from plugins.http_api import Nsqd
from plugins.waiting import patience_s, wait_until

DEADLINE_S = patience_s(60.0)

FORMS = {
    "plain": ["--format", "raw"],
    "gzip": ["--format", "raw", "--gzip"],
    "jsonl-gzip": ["--format", "jsonl", "--gzip"],
    "zstd": ["--format", "raw", "--compression", "zstd"],
}
SHORT_FORMS = ["plain", "zstd"]  # fleets and uploads are killed as they write jsonl-gzip


def archived(directory: Path, form: str) -> list[bytes]:
    if form == "jsonl-gzip":
        return [message["body"] for message in messages_of(directory)]
    return lines_of(directory)


def wait_for_progress(nsqd: Nsqd, process: subprocess.Popen[bytes]) -> int:
    """Wait until something more is finished; returns what is left."""
    before = unfinished(nsqd, TOPIC, CHANNEL)

    def moved() -> bool:
        assert process.poll() is None, "it ended by itself"
        return unfinished(nsqd, TOPIC, CHANNEL) < before or before == 0

    wait_until(moved, what="progress", timeout_s=DEADLINE_S)
    return unfinished(nsqd, TOPIC, CHANNEL)


def drain_with_kills(
    nsqd: Nsqd,
    spawn_nsq: SpawnNsq,
    directory: Path,
    form: str,
    *,
    messages: int,
    kills: int,
    flags: Sequence[str],
) -> None:
    rng = random.Random(f"{form} {messages}")
    bodies = [b"%08d some text that a message may have" % number for number in range(messages)]
    published = filled(nsqd, bodies)
    args = to_file(nsqd.tcp_address, directory, *FORMS[form], *flags)
    for _ in range(kills):
        process = spawn_nsq(args)
        if wait_for_progress(nsqd, process):
            threading.Event().wait(rng.uniform(0, 0.15))  # the random point
        process.kill()
        process.wait(DEADLINE_S)
    nsqd.publish(TOPIC, b"the last one")  # which shows that the last run has begun
    published.append(b"the last one")
    process = spawn_nsq(args)
    wait_until_archived(nsqd)
    ended(process)

    assert_each_once(archived(directory, form), published)
    assert parts(directory) == []


@pytest.mark.parametrize("form", SHORT_FORMS)
def test_killed_at_random_points_nothing_is_lost_or_doubled(
    quick_nsqd: EmbeddedServer, spawn_nsq: SpawnNsq, tmp_path: Path, form: str
) -> None:
    small = ["--max-in-flight", "100", "--rotate-text-size", "300KB"]
    drain_with_kills(
        quick_nsqd, spawn_nsq, tmp_path / "out", form, messages=20_000, kills=3, flags=small
    )


@pytest.mark.slow
@pytest.mark.parametrize("form", FORMS)
def test_killed_twenty_times_in_a_million_messages(
    go_nsqd: Callable[..., GoNsqd], spawn_nsq: SpawnNsq, tmp_path: Path, form: str
) -> None:
    small = ["--max-in-flight", "300", "--rotate-size", "8MB"]
    nsqd = go_nsqd("-mem-queue-size=1000000", "-msg-timeout=2s")
    drain_with_kills(
        nsqd, spawn_nsq, tmp_path / "out", form, messages=1_000_000, kills=20, flags=small
    )
