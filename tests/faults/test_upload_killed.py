"""``nsq to-file --upload`` killed again and again: every finished file is stored once, unchanged.

The long form, with 10 kills, runs with ``-m slow``.
"""

from __future__ import annotations

import random
from collections import Counter
from pathlib import Path

import pytest
from plugins.archives import (
    TOPIC,
    Writer,
    assert_each_once,
    bodies_at,
    ended,
    filled,
    finished_files,
    killed_again_and_again,
    to_file,
    wait_until_archived,
)
from plugins.cli import SpawnNsq
from plugins.embedded import EmbeddedServer
from plugins.object_store import Bucket
from plugins.waiting import wait_until

from nsqtools.archive.finding import find_archives
from nsqtools.archive.storage_objects import PART_SIZE
from nsqtools.archive.upload import uploaded_of
from nsqtools.protocol.frames import WireMessage


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


@pytest.mark.parametrize(
    ("kills", "small", "large", "live", "deletes"),
    [
        (1, 8, 1, 2000, True),
        pytest.param(10, 60, 6, 20_000, False, marks=pytest.mark.slow, id="kept"),
        pytest.param(10, 60, 6, 20_000, True, marks=pytest.mark.slow, id="deleted"),
    ],
)
def test_killed_while_it_uploads_every_file_is_stored_once(
    quick_nsqd: EmbeddedServer,
    spawn_nsq: SpawnNsq,
    bucket: Bucket,
    tmp_path: Path,
    kills: int,
    small: int,
    large: int,
    live: int,
    deletes: bool,
) -> None:
    nsqd, out = quick_nsqd, tmp_path / "out"
    out.mkdir()
    expected = left_by_an_earlier_run(out, small=small, large=large)
    published = filled(nsqd, [b"live %06d %s" % (n, b"x" * 300) for n in range(live)])
    args = to_file(nsqd.tcp_address, out, "--upload", f"{bucket.url}/lake", "--gzip")
    args += ["--max-in-flight", "200", "--rotate-text-size", "100KB"]
    args += ["--delete-uploaded"] if deletes else []

    process = killed_again_and_again(lambda: spawn_nsq(args), lambda: state(out), kills)
    nsqd.publish(TOPIC, b"the last one")  # which shows that the last run has begun
    published.append(b"the last one")
    wait_until_archived(nsqd)
    wait_until(
        lambda: all(uploaded_of(path).exists() for path in finished_files(out)),
        what="all uploads",
        timeout_s=90,
    )
    assert "not uploaded" not in ended(process)

    stored = find_archives([bucket.url])
    assert_each_once(bodies_at(bucket.url), expected + published)
    assert len({archive.head for archive in stored}) == len(stored), "a file is stored twice"
    names = bucket.names()
    assert len(names) == 3 * len(stored), "each file has its index and its manifest, and no more"
    if deletes:
        assert finished_files(out) == []
        return
    contents = Counter(path.read_bytes() for path in finished_files(out))
    assert contents == Counter(bucket.storage.read(each.name) for each in stored)
