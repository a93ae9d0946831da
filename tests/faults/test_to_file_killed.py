"""``nsq to-file`` killed again and again as it drains an nsqd: nothing lost, nothing doubled.

The long form, with 20 kills while a million messages of a Go nsqd drain, runs with ``-m slow``.
"""

from __future__ import annotations

import random
import signal
import subprocess
import threading
from collections import Counter
from collections.abc import Callable, Sequence
from pathlib import Path

import pytest
from plugins.archives import lines_of, messages_of, parts, unfinished
from plugins.cli import SpawnNsq
from plugins.daemons import GoNsqd
from plugins.embedded import EmbeddedServer
from plugins.http_api import Nsqd
from plugins.waiting import patience_s, wait_until

TOPIC, CHANNEL = "clicks", "archive"
DEADLINE_S = patience_s(60.0)

FORMS = {
    "plain": ["--format", "raw"],
    "gzip": ["--format", "raw", "--gzip"],
    "jsonl-gzip": ["--format", "jsonl", "--gzip"],
    "zstd": ["--format", "raw", "--compression", "zstd"],
}
SHORT_FORMS = ["plain", "zstd"]  # fleets and uploads are killed as they write jsonl-gzip


def bodies(count: int) -> list[bytes]:
    return [b"%08d some text that a message may have" % number for number in range(count)]


def filled(nsqd: Nsqd, count: int) -> list[bytes]:
    """Publish messages that all differ, and wait until the channel has them."""
    nsqd.create_channel(TOPIC, CHANNEL)
    published = bodies(count)
    for begin in range(0, count, 1000):
        nsqd.publish(TOPIC, *published[begin : begin + 1000])
    wait_until(lambda: nsqd.depth(TOPIC, CHANNEL) == count, what="a full channel", timeout_s=60)
    return published


def arguments(nsqd: Nsqd, directory: Path, *flags: str) -> list[str]:
    place = ["--nsqd-tcp-address", nsqd.tcp_address, "--output-dir", str(directory)]
    return ["to-file", "-t", TOPIC, "-c", CHANNEL, *place, *flags]


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


def finish_draining(nsqd: Nsqd, spawn_nsq: SpawnNsq, args: Sequence[str]) -> None:
    """Run to the end of the channel, redeliveries included, and stop with SIGTERM."""
    process = spawn_nsq(args)
    wait_until(
        lambda: unfinished(nsqd, TOPIC, CHANNEL) == 0, what="an empty channel", timeout_s=DEADLINE_S
    )
    process.send_signal(signal.SIGTERM)
    _, stderr = process.communicate(timeout=DEADLINE_S)
    assert process.returncode == 143, stderr.decode()


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
    published = filled(nsqd, messages)
    args = arguments(nsqd, directory, *FORMS[form], *flags)
    for _ in range(kills):
        process = spawn_nsq(args)
        if wait_for_progress(nsqd, process):
            threading.Event().wait(rng.uniform(0, 0.15))  # the random point
        process.kill()
        process.wait(DEADLINE_S)
    nsqd.publish(TOPIC, b"the last one")  # which shows that the last run has begun
    published.append(b"the last one")
    finish_draining(nsqd, spawn_nsq, args)

    found = Counter(archived(directory, form))
    assert set(published) - set(found) == set(), "messages were lost"
    assert [body for body, times in found.items() if times > 1] == [], "messages were doubled"
    assert len(found) == len(published)
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
