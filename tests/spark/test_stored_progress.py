"""The ledger in an object store: what it says after any end, and whose it is."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest
from plugins.archives import write_archive
from plugins.cli import RunNsq
from plugins.clients import bodies_in
from plugins.embedded import EmbeddedServer
from plugins.object_store import Bucket
from plugins.servers import DataPath, Serve
from plugins.waiting import patience_s

from nsqtools import ClientOptions
from nsqtools.archive.location import StoredPlace, parse_place
from nsqtools.client.connection_settings import ConnectionSettings, PublishMode
from nsqtools.errors import NsqError
from nsqtools.protocol.frames import WireMessage
from nsqtools.publish.publisher import PublishOptions
from nsqtools.records.envelope import Envelope
from nsqtools.spark.publishing.publish_task import Chunk, PublishTask, SinkPlan
from nsqtools.spark.publishing.row_outcomes import (
    AHEAD_ROWS,
    LedgerEntry,
    PublishReport,
    StoredLedgerPart,
    read_entries,
)

ROWS = 3 * AHEAD_ROWS
CHUNK = 1000
REFUSED = Envelope("clicks", "n:4150", b"%016d" % 1, 17, 2, b"")


@pytest.fixture
def place(bucket: Bucket) -> StoredPlace:
    found = parse_place(f"{bucket.url}/progress")
    assert isinstance(found, StoredPlace)
    return found


# -- the ledger -----------------------------------------------------------------------------------


def test_what_was_noted_is_found_and_sent_is_noted_ahead(place: StoredPlace) -> None:
    with StoredLedgerPart(place, 3) as part:
        assert part.entry == LedgerEntry()
        part.entry.sent = 500
        part.note()
        part.entry.done, part.entry.sent = 500, 1000
        part.note()  # nothing new: it was noted that more may have been sent

    assert read_entries(place) == [LedgerEntry(sent=500 + AHEAD_ROWS)]
    with StoredLedgerPart(place, 3) as part:
        part.entry.done, part.entry.topics = 700, {"clicks": 700}
        part.finish()
    found = [LedgerEntry(done=700, sent=500 + AHEAD_ROWS, topics={"clicks": 700})]
    assert read_entries(place) == found


def test_few_objects_are_written_and_one_stays(bucket: Bucket, place: StoredPlace) -> None:
    with StoredLedgerPart(place, 0) as part:
        for sent in range(500, 3 * AHEAD_ROWS, 500):
            part.entry.sent = sent
            part.note()

    [name] = bucket.names()
    assert int(name.rpartition("/")[2].removesuffix(".json")) <= 4


def test_an_earlier_attempt_that_still_runs_cannot_note_anything_more(place: StoredPlace) -> None:
    first = StoredLedgerPart(place, 0)
    first.entry.sent = 500
    first.note()
    with StoredLedgerPart(place, 0) as second:
        for done in (1, 2, 3):  # the first one's next number was deleted by now
            second.entry.done = done
            second.finish()

        with pytest.raises(NsqError, match="partition 0 is being published by another task"):
            first.finish()

    assert read_entries(place)[0].done == 3


def rows_at(place: StoredPlace) -> list[int]:
    objects = [place.storage.read((place / entry.name).key) for entry in place.below()]
    return sorted(json.loads(line)["row"] for text in objects for line in text.splitlines())


# -- a task ---------------------------------------------------------------------------------------


@pytest.fixture
def embedded(data_path: DataPath, serve: Serve) -> EmbeddedServer:
    return serve(EmbeddedServer(data_path()))


def chunks(rows: int) -> Iterator[Chunk]:
    """Numbered bodies; each of the thousandth rows is empty, and refused."""
    for first in range(0, rows, CHUNK):
        bodies: list[bytes | None] = [b"%06d" % n for n in range(first, first + CHUNK)]
        bodies[0] = b""
        yield Chunk(bodies, None, None, lambda *_: REFUSED)


def run(nsqd: EmbeddedServer, place: StoredPlace, rows: Iterator[Chunk]) -> PublishReport:
    options = PublishOptions(PublishMode.FAILOVER, 5, retry_unknown=True)
    client, at = ClientOptions(max_outstanding=8), (nsqd.tcp_address,)
    plan = SinkPlan(ConnectionSettings(), client, options, "clicks", "job", at)
    plan = replace(plan, dead_letters=place / "dead", ledger=place / "ledger")
    return PublishTask(plan, 0).run(rows)


def test_a_task_that_ended_anywhere_continues_and_says_how_much_came_twice(
    embedded: EmbeddedServer, place: StoredPlace
) -> None:
    def cut_off() -> Iterator[Chunk]:
        yield from chunks(2 * AHEAD_ROWS)
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        run(embedded, place, cut_off())
    report = run(embedded, place, chunks(ROWS))

    refused = ROWS // CHUNK
    assert report.before >= AHEAD_ROWS // 2
    assert (report.confirmed, report.dead_lettered) == (ROWS - refused, refused)
    assert rows_at(place / "dead") == list(range(0, ROWS, CHUNK))
    depth = embedded.depth("clicks")
    assert depth - report.confirmed <= report.repeated <= 2 * AHEAD_ROWS
    expected = {b"%06d" % n for n in range(ROWS) if n % CHUNK}
    assert set(bodies_in(embedded, "clicks", depth)) == expected
    assert read_entries(place / "ledger")[0].done == ROWS


@pytest.mark.slow
def test_a_replay_with_ledger_and_dead_letters_in_a_bucket_is_done_once(
    run_nsq: RunNsq,
    spark_env: dict[str, str],
    bucket: Bucket,
    embedded: EmbeddedServer,
    tmp_path: Path,
) -> None:
    """Nothing is fetched for it: only Python uses the store."""
    found = [WireMessage(n, 1, b"%016x" % n, b"%d" % n if n else b"") for n in range(100)]
    bucket.storage.put_file("in/clicks.gz", write_archive(tmp_path / "clicks.gz", found))
    command = ["spark", "replay", f"{bucket.url}/in", "--ledger", f"{bucket.url}/ledger"]
    command += ["--dead-letters", f"{bucket.url}/dead", "--master", "local[2]"]
    command += ["--nsqd-tcp-address", embedded.tcp_address]

    first = run_nsq(command, env=spark_env, timeout=patience_s(100))
    second = run_nsq(command, env=spark_env, timeout=patience_s(100))

    assert (first.status, second.status) == (0, 0), first.err + second.err
    assert "99 confirmed, 0 unknown" in first.err.replace("1 rejected, ", "")
    assert "100 done before" in second.err
    assert embedded.depth("clicks") == 99
    assert rows_at(parse_place(f"{bucket.url}/dead")) == [0]  # type: ignore[arg-type]
