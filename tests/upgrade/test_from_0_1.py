"""What a crash of version 0.1 left is continued by this version: nothing lost, nothing doubled.

`make.py` made the directories in ``left_by_0_1`` with that version's own commands. It says what
each scene is.
"""

from __future__ import annotations

import os
import re
import tarfile
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

import pytest
from plugins.archives import lines_of, messages_of, unfinished
from plugins.cli import RunNsq
from plugins.embedded import EmbeddedServer
from plugins.spark import RunSpark
from plugins.waiting import wait_until
from upgrade.make import CHANNEL, FORMS, KEPT, MESSAGES, TOPIC, address_of, body, scratch_of

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

EVERY_BODY = [body(number) for number in range(MESSAGES)]


@pytest.fixture
def left(request: pytest.FixtureRequest) -> Iterator[Path]:
    """The directory that a scene left, as if the crash had been a moment ago."""
    with (
        scratch_of(request.param) as directory,
        tarfile.open(KEPT / f"{request.param}.tar.xz") as archive,
    ):
        archive.extractall(directory, filter="data")
        for path in directory.rglob("*.journal"):
            os.utime(path)  # they count for a week
        yield directory


@pytest.fixture
def nsqd(left: Path, request: pytest.FixtureRequest) -> Iterator[EmbeddedServer]:
    """An nsqd on the data that was left, at the address that it had."""
    scene = request.node.callspec.params["left"]
    nsqd = EmbeddedServer(left / "nsqd", f"--tcp-address={address_of(scene)}")
    nsqd.start()
    yield nsqd
    nsqd.stop()


@pytest.mark.parametrize("left", FORMS, indirect=True)
def test_an_archive_goes_on_with_nothing_lost_or_doubled(
    left: Path, nsqd: EmbeddedServer, run_nsq: RunNsq, request: pytest.FixtureRequest
) -> None:
    form = FORMS[request.node.callspec.params["left"]]
    archive = left / "archive"
    assert unfinished(nsqd, TOPIC, CHANNEL) > 0

    topic = ["to-file", "-t", TOPIC, "-c", CHANNEL, "--until-empty", "--host-identifier", "host"]
    where = ["--nsqd-tcp-address", nsqd.tcp_address, "--output-dir", str(archive)]
    done = run_nsq([*topic, *where, *form])

    assert done.status == 0, done.err
    if "jsonl" in form:
        written = [message["body"] for message in messages_of(archive)]
    else:
        written = lines_of(archive)
    assert sorted(written) == EVERY_BODY


@pytest.mark.parametrize("left", ["nsqd"], indirect=True)
@pytest.mark.usefixtures("left")
def test_an_nsqd_finds_every_message_that_was_on_disk(
    nsqd: EmbeddedServer, run_nsq: RunNsq
) -> None:
    wait_until(lambda: unfinished(nsqd, TOPIC, CHANNEL) == MESSAGES, what="all messages")
    topics = {topic["topic_name"]: topic for topic in nsqd.stats()["topics"]}

    assert drained(nsqd, run_nsq) == EVERY_BODY
    assert topics["paused"]["paused"]


@pytest.mark.parametrize("left", ["replay"], indirect=True)
def test_a_replay_goes_on_from_its_checkpoint(
    left: Path, nsqd: EmbeddedServer, run_nsq: RunNsq
) -> None:
    before = unfinished(nsqd, TOPIC, CHANNEL)
    assert 0 < before < MESSAGES

    checkpoint = ["--checkpoint", str(left / "checkpoint.json")]
    to = ["--nsqd-tcp-address", nsqd.tcp_address]
    replayed = run_nsq(["replay", str(left / "archive"), *checkpoint, *to])

    assert replayed.status == 0, replayed.err
    assert unfinished(nsqd, TOPIC, CHANNEL) == MESSAGES
    assert drained(nsqd, run_nsq) == EVERY_BODY


@pytest.mark.parametrize("left", ["spark-ingest"], indirect=True)
def test_a_stream_goes_on_from_its_offset(
    left: Path, spark: SparkSession, run_spark: RunSpark
) -> None:
    assert spark.read.parquet(str(left / "lake")).count() < MESSAGES
    for file in (left / "later").iterdir():
        file.rename(left / "archive" / file.name)

    to = ["--output", left / "lake", "--checkpoint", left / "checkpoint"]
    done = run_spark("ingest", left / "archive", *to, "--once")

    assert done.status == 0, done.err
    rows = spark.read.parquet(str(left / "lake")).select("body").collect()
    assert sorted(bytes(row.body) for row in rows) == EVERY_BODY


@pytest.mark.parametrize("left", ["spark-replay"], indirect=True)
def test_a_replay_on_spark_goes_on_from_its_ledger(
    left: Path, nsqd: EmbeddedServer, run_spark: RunSpark, run_nsq: RunNsq
) -> None:
    where = ["--ledger", left / "ledger", "--nsqd-tcp-address", nsqd.tcp_address]

    done = run_spark("replay", left / "archive", *where)

    assert done.status == 0, done.err
    said = re.search(r"up to (\d+) twice", done.err)
    published = drained(nsqd, run_nsq)
    assert sorted(set(published)) == EVERY_BODY
    assert len(published) - MESSAGES <= (int(said[1]) if said else 0) <= 100


def drained(nsqd: EmbeddedServer, run_nsq: RunNsq) -> list[bytes]:
    where = ["--nsqd-tcp-address", nsqd.tcp_address]
    count = str(unfinished(nsqd, TOPIC, CHANNEL))
    done = run_nsq(["tail", "-t", TOPIC, "-c", CHANNEL, *where, "-n", count])
    return sorted(done.out.splitlines())
