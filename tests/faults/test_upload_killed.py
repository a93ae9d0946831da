"""``nsq to-file --upload`` killed again and again: every finished file is stored once, unchanged.

The long form, with 10 kills, runs with ``-m slow``.
"""

from __future__ import annotations

import random
import subprocess
import threading
from collections import Counter
from collections.abc import Callable
from pathlib import Path

import pytest
from plugins.archives import (
    TOPIC,
    Writer,
    assert_each_once,
    ended,
    filled,
    finished_files,
    to_file,
    wait_until_archived,
)
from plugins.cli import SpawnNsq
from plugins.daemons import GoNsqd
from plugins.embedded import EmbeddedServer
from plugins.http_api import Nsqd
from plugins.object_store import Bucket
from plugins.waiting import patience_s, wait_until

from nsqtools.archive.finding import find_archives
from nsqtools.archive.reader import read_messages
from nsqtools.archive.storage_objects import PART_SIZE
from nsqtools.archive.upload import uploaded_of
from nsqtools.protocol.frames import WireMessage

DEADLINE_S = patience_s(90.0)


def left_by_an_earlier_run(directory: Path, *, small: int, large: int) -> list[bytes]:
    """Finished files that nobody uploaded; the large ones are written in parts."""
    writer, rng, bodies = Writer(directory, topic=TOPIC), random.Random(7), []
    for number in range(small + large):
        is_large = number >= small
        size = 600_000 + PART_SIZE // 2 if is_large else 100  # bytes, which hex doubles
        for each in range(2 if is_large else 10):
            body = b"%06d %02d " % (number, each) + rng.randbytes(size).hex().encode()
            writer.write([WireMessage(1, 1, b"%08d%08d" % (number, each), body)])
            bodies.append(body)
        writer.finish()
    return bodies


def state(directory: Path) -> tuple[int, int]:
    return len(list(directory.rglob(".*.uploading"))), len(list(directory.rglob(".*.uploaded")))


def kill_in_the_middle(
    start: Callable[[], subprocess.Popen[bytes]], directory: Path, rng: random.Random
) -> None:
    before = state(directory)
    process = start()

    def moved() -> bool:
        assert process.poll() is None, "it ended by itself"
        return state(directory) != before

    wait_until(moved, what="progress", timeout_s=DEADLINE_S)
    threading.Event().wait(rng.uniform(0, 0.3))  # the random point
    process.kill()
    process.wait(DEADLINE_S)


def upload_with_kills(
    nsqd: Nsqd,
    spawn_nsq: SpawnNsq,
    bucket: Bucket,
    out: Path,
    *,
    kills: int,
    small: int,
    large: int,
    live: int,
    deletes: bool,
) -> None:
    out.mkdir()
    expected = left_by_an_earlier_run(out, small=small, large=large)
    published = filled(nsqd, [b"live %06d %s" % (n, b"x" * 300) for n in range(live)])
    args = to_file(nsqd.tcp_address, out, "--upload", f"{bucket.url}/lake", "--gzip")
    args += ["--max-in-flight", "200", "--rotate-text-size", "100KB"]
    args += ["--delete-uploaded"] if deletes else []

    rng = random.Random(kills)
    for _ in range(kills):
        kill_in_the_middle(lambda: spawn_nsq(args), out, rng)
    nsqd.publish(TOPIC, b"the last one")  # which shows that the last run has begun
    published.append(b"the last one")
    process = spawn_nsq(args)
    wait_until_archived(nsqd)
    wait_until(
        lambda: all(uploaded_of(path).exists() for path in finished_files(out)),
        what="all uploads",
        timeout_s=DEADLINE_S,
    )
    assert "not uploaded" not in ended(process)

    stored = find_archives([bucket.url])
    problems: list[tuple[str, str]] = []
    bodies = [
        message.body
        for archive in stored
        for message in read_messages(archive, lambda *problem: problems.append(problem))
    ]
    assert problems == []
    assert_each_once(bodies, expected + published)
    assert len({archive.head for archive in stored}) == len(stored), "a file is stored twice"
    names = bucket.names()
    assert len(names) == 3 * len(stored), "each file has its index and its manifest, and no more"
    if deletes:
        assert finished_files(out) == []
        return
    contents = Counter(path.read_bytes() for path in finished_files(out))
    assert contents == Counter(bucket.storage.read(each.name) for each in stored)


def test_killed_while_it_uploads_and_deletes_every_file_is_stored_once(
    quick_nsqd: EmbeddedServer, spawn_nsq: SpawnNsq, bucket: Bucket, tmp_path: Path
) -> None:
    out = tmp_path / "out"
    upload_with_kills(
        quick_nsqd, spawn_nsq, bucket, out, kills=1, small=8, large=1, live=2000, deletes=True
    )


@pytest.mark.slow
@pytest.mark.parametrize("deletes", [False, True], ids=["kept", "deleted"])
def test_killed_ten_times_while_it_uploads_every_file_is_stored_once(
    go_nsqd: Callable[..., GoNsqd],
    spawn_nsq: SpawnNsq,
    bucket: Bucket,
    tmp_path: Path,
    deletes: bool,
) -> None:
    nsqd, out = go_nsqd("-msg-timeout=2s"), tmp_path / "out"
    upload_with_kills(
        nsqd, spawn_nsq, bucket, out, kills=10, small=60, large=6, live=20_000, deletes=deletes
    )
