"""``nsq to-file`` killed again and again as it drains an nsqd: nothing lost, nothing doubled.

The long form, with 20 kills while a million messages of a Go nsqd drain, runs with ``-m slow``.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
from plugins.archives import (
    CHANNEL,
    TOPIC,
    assert_each_once,
    ended,
    filled,
    killed_again_and_again,
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


@pytest.mark.parametrize(
    ("form", "messages", "kills", "rotate"),
    [
        *((form, 20_000, 3, ["--rotate-text-size", "300KB"]) for form in SHORT_FORMS),
        *(
            pytest.param(form, 1_000_000, 20, ["--rotate-size", "8MB"], marks=pytest.mark.slow)
            for form in FORMS
        ),
    ],
)
def test_killed_at_random_points_nothing_is_lost_or_doubled(
    quick_nsqd: EmbeddedServer,
    go_nsqd: Callable[..., GoNsqd],
    spawn_nsq: SpawnNsq,
    tmp_path: Path,
    form: str,
    messages: int,
    kills: int,
    rotate: list[str],
) -> None:
    nsqd: Nsqd = quick_nsqd
    if messages > 100_000:
        nsqd = go_nsqd("-mem-queue-size=1000000", "-msg-timeout=2s")
    bodies = [b"%08d some text that a message may have" % number for number in range(messages)]
    published = filled(nsqd, bodies)
    out = tmp_path / "out"
    args = to_file(nsqd.tcp_address, out, *FORMS[form], "--max-in-flight", "100", *rotate)

    process = killed_again_and_again(
        lambda: spawn_nsq(args), lambda: unfinished(nsqd, TOPIC, CHANNEL), kills
    )
    nsqd.publish(TOPIC, b"the last one")  # which shows that the last run has begun
    wait_until_archived(nsqd)
    ended(process)

    assert_each_once(archived(out, form), [*published, b"the last one"])
    assert parts(out) == []
