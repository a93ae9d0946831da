"""``nsq to-file`` killed as it drains an nsqd and uploads, stopped for long, and two of them.

Nothing is lost, nothing doubled, and every finished file is stored once, unchanged. The long forms,
with 20 kills while a million messages of a Go nsqd drain, run with ``-m slow``.
"""

from __future__ import annotations

import os
import random
import signal
import time
from collections import Counter
from functools import partial
from pathlib import Path

import pytest
from plugins.archives import (
    CHANNEL,
    TOPIC,
    Writer,
    assert_each_once,
    bodies_at,
    ended,
    filled,
    finished_files,
    killed_again_and_again,
    lines_of,
    messages_of,
    parts,
    to_file,
    unfinished,
    wait_until_archived,
)
from plugins.cli import SpawnNsq
from plugins.embedded import EmbeddedServer
from plugins.examples import slow
from plugins.http_api import Nsqd
from plugins.network import TO_CLIENT, ProxyTo
from plugins.object_store import Bucket
from plugins.servers import MakeNsqd
from plugins.waiting import wait_until

from nsqtools.archive.finding import find_archives
from nsqtools.archive.storage_objects import PART_SIZE
from nsqtools.archive.upload import uploaded_of
from nsqtools.protocol.frames import WireMessage

FORMS = ["raw none", "raw gzip", "jsonl gzip", "raw zstd"]
SHORT_FORMS = ["raw none", "raw zstd"]  # fleets and uploads are killed as they write jsonl gzip


@pytest.mark.parametrize(
    ("form", "messages", "kills", "rotate"),
    [
        *((form, 20_000, 3, ["--rotate-text-size", "300KB"]) for form in SHORT_FORMS),
        *(slow(form, 1_000_000, 20, ["--rotate-size", "8MB"]) for form in FORMS),
    ],
)
def test_killed_at_random_points_nothing_is_lost_or_doubled(
    quick_nsqd: EmbeddedServer,
    go_nsqd: MakeNsqd,
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
    format, compression = form.split()
    flags = ["--format", format, "--compression", compression, "--max-in-flight", "100", *rotate]
    args = to_file(nsqd.tcp_address, out, *flags)

    process = killed_again_and_again(
        lambda: spawn_nsq(args), lambda: unfinished(nsqd, TOPIC, CHANNEL), kills
    )
    nsqd.publish(TOPIC, b"the last one")  # which shows that the last run has begun
    wait_until_archived(nsqd)
    ended(process)

    is_raw = format == "raw"
    found = lines_of(out) if is_raw else [message["body"] for message in messages_of(out)]
    assert_each_once(found, [*published, b"the last one"])
    assert parts(out) == []


def test_both_make_progress_one_may_end_and_nothing_is_lost_or_in_both(
    go_nsqd: MakeNsqd, spawn_nsq: SpawnNsq, tmp_path: Path
) -> None:
    nsqd = go_nsqd("-msg-timeout=5m")  # an archiver that waits for the processor is not away
    nsqd.create_channel(TOPIC, CHANNEL)

    def finished() -> list[int]:
        return [
            each["finish_count"] for each in nsqd.channel_stats(TOPIC, CHANNEL)["clients"] or ()
        ]

    slowly = ["--sync-interval", "20ms", "--max-in-flight", "5"]
    one, two = (
        spawn_nsq(to_file(nsqd.tcp_address, tmp_path / host, *slowly)) for host in ("one", "two")
    )
    wait_until(lambda: len(finished()) == 2, what="both", timeout_s=60)
    published = [b"%06d" % number for number in range(3000)]
    nsqd.publish(TOPIC, *published)
    wait_until(lambda: min(finished()) > 50, what="both to write", timeout_s=60)
    ended(one)  # in the midst of it
    more = [b"%06d" % number for number in range(3000, 3100)]
    nsqd.publish(TOPIC, *more)
    wait_until_archived(nsqd)
    ended(two)

    found = [[each["body"] for each in messages_of(tmp_path / host)] for host in ("one", "two")]
    assert min(map(len, found)) > 50
    assert_each_once([*found[0], *found[1]], [*published, *more])


def test_a_pause_of_the_archiver_doubles_no_row(
    quick_nsqd: EmbeddedServer, spawn_nsq: SpawnNsq, tmp_path: Path
) -> None:
    nsqd = quick_nsqd
    nsqd.create_channel(TOPIC, CHANNEL)
    archiver = spawn_nsq(to_file(nsqd.tcp_address, tmp_path))
    stats = partial(nsqd.channel_stats, TOPIC, CHANNEL)
    wait_until(
        lambda: any(client["ready_count"] for client in stats()["clients"]),
        what="an archiver that is ready",
        timeout_s=20,
    )
    os.kill(archiver.pid, signal.SIGSTOP)
    nsqd.publish(TOPIC, *[b"%d" % number for number in range(50)])
    wait_until(lambda: stats()["timeout_count"], what="messages that time out", timeout_s=20)
    os.kill(archiver.pid, signal.SIGCONT)
    wait_until_archived(nsqd)
    ended(archiver)
    ids = [message["id"] for message in messages_of(tmp_path)]
    assert len(ids) == len(set(ids)) == 50


def test_a_pause_of_the_archiver_while_it_connects_does_not_end_it(
    quick_nsqd: EmbeddedServer, proxy_to: ProxyTo, spawn_nsq: SpawnNsq, tmp_path: Path
) -> None:
    """A machine that stands still stops nsqd, too, which then answers when the time is over."""
    nsqd = quick_nsqd
    nsqd.create_channel(TOPIC, CHANNEL)
    nsqd.publish(TOPIC, b"x")
    proxy = proxy_to(nsqd.tcp_address)
    proxy.pause(TO_CLIENT)
    archiver = spawn_nsq(to_file(proxy.address, tmp_path, "-X", "dial_timeout=100ms"))
    wait_until(lambda: "desired protocol magic" in nsqd.log, what="the archiver", timeout_s=20)
    os.kill(archiver.pid, signal.SIGSTOP)
    time.sleep(7)  # a handshake may take 5 s
    os.kill(archiver.pid, signal.SIGCONT)
    wait_until(
        lambda: archiver.poll() is not None or nsqd.log.count("desired protocol magic") > 1,
        what="a second try",
    )
    proxy.resume(TO_CLIENT)
    wait_until_archived(nsqd)
    ended(archiver)
    assert [message["body"] for message in messages_of(tmp_path)] == [b"x"]


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
        slow(10, 60, 6, 20_000, False, id="kept"),
        slow(10, 60, 6, 20_000, True, id="deleted"),
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
