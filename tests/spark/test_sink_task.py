"""Publishing one partition without Spark: outcomes, dead letters, ledger, and interruptions."""

import json
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future
from dataclasses import replace
from pathlib import Path
from typing import Any

import pyarrow
import pytest
from plugins.archives import dead_letters, dead_rows, write_archive
from plugins.cli import RunNsq
from plugins.clients import bodies_in
from plugins.network import ProxyTo
from plugins.object_store import Bucket
from plugins.scripted_nsqd import Connection, ScriptedNsqd
from plugins.servers import DataPath, EmbeddedServer, MakeNsqd, Serve
from plugins.waiting import patience_s, wait_until

from nsqtools import ClientOptions
from nsqtools.archive.place import LocalPlace
from nsqtools.archive.place_url import parse_place
from nsqtools.client.connection_settings import ConnectionSettings, PublishMode
from nsqtools.errors import ConfigurationError, ConnectionFailed, NsqError, RefusedError
from nsqtools.protocol.frames import WireMessage
from nsqtools.publish.publisher import PublishOptions
from nsqtools.records.envelope import Envelope, decode
from nsqtools.spark.publishing import publish_task
from nsqtools.spark.publishing.publish_task import (
    Chunk,
    PublishTask,
    RowSpan,
    SinkPlan,
    byte_strings,
    chunk_of,
    count_fitting,
    record_finished_spans,
)
from nsqtools.spark.publishing.row_outcomes import (
    AHEAD_ROWS,
    LedgerEntry,
    PublishReport,
    RowCounts,
    read_entries,
)

FAST = ClientOptions(dial_timeout_s=1, publish_timeout_s=patience_s(20), max_outstanding=8)
WINDOW = (8 + 2) * 100


@pytest.fixture
def embedded(data_path: DataPath, serve: Serve) -> EmbeddedServer:
    return serve(EmbeddedServer(data_path()))


def chunk(
    bodies: Sequence[bytes | None],
    topics: Sequence[str | None] | None = None,
    defers_ms: Sequence[int | None] | None = None,
) -> Chunk:
    def message(index: int, topic: str) -> Envelope:
        return Envelope(topic, "n:1", b"%016d" % index, 1, 1, bodies[index] or b"")

    return Chunk(list(bodies), topics and [*topics], defers_ms and [*defers_ms], message)


def numbered(first: int, last: int) -> list[bytes | None]:
    return [b"%06d" % number for number in range(first, last)]


def make_plan(*addresses: str, topic: str | None = "clicks", **changes: Any) -> SinkPlan:
    changes.setdefault("client_options", FAST)
    changes.setdefault("options", PublishOptions(PublishMode.FAILOVER, patience_s(20), True))
    changes.setdefault("batch_rows", 100)
    return SinkPlan(ConnectionSettings(), topic=topic, job="job", addresses=addresses, **changes)


def run(plan: SinkPlan, *chunks: Chunk, attempt: int = 0) -> PublishReport:
    return PublishTask(plan, 0, attempt).run(iter(chunks))


def with_rows(nsqd: ScriptedNsqd) -> Connection:
    """Accept the connection of a task, and wait until it has sent its rows."""
    connection = nsqd.accept()
    connection.expect("IDENTIFY")
    connection.reply_identify()
    connection.expect("MPUB clicks")
    return connection


def test_rows_with_a_delay_are_deferred_and_the_others_are_not(embedded: EmbeddedServer) -> None:
    embedded.create_channel("clicks", "check")

    run(make_plan(embedded.tcp_address), chunk(numbered(0, 4), None, [0, None, 3_600_000, 60_000]))

    stats = embedded.channel_stats("clicks", "check")
    assert (stats["deferred_count"], stats["depth"]) == (2, 2)


BAD_ROWS = [
    (None, "clicks", None, "the body is null"),
    (b"", "clicks", None, "the body is empty"),
    (
        b"x" * 1_048_577,
        "clicks",
        None,
        "1048577 bytes are above the limit of 1048576 (publish_max_msg_size)",
    ),
    (b"x", None, None, "the topic is null"),
    (b"x", "a b", None, "'a b' is not a valid topic"),
    (b"x", "clicks", 10**13, "a delay of 10000000000000 ms"),
    (b"x", "clicks", -1, "a delay of -1 ms"),
]


def test_bad_rows_become_dead_letters_with_reasons(
    embedded: EmbeddedServer, tmp_path: Path
) -> None:
    bodies, topics, defers_ms, reasons = zip(*BAD_ROWS, strict=True)
    rows = chunk([b"one", *bodies, b"two"], ["clicks", *topics, "clicks"], [None, *defers_ms, None])
    plan = make_plan(embedded.tcp_address, topic=None, dead_letters=LocalPlace(tmp_path))

    report = run(plan, rows)

    bad = len(BAD_ROWS)
    counts = (report.confirmed, report.rejected, report.dead_lettered, report.left)
    assert counts == (2, bad, bad, 0)
    for number, line in enumerate(dead_letters(tmp_path)):
        assert decode(line).body == (bodies[number] or b"")
        assert reasons[number] in json.loads(line)["reason"]
        assert json.loads(line)["row"] == number + 1
    assert number == bad - 1
    assert bodies_in(embedded, "clicks", 2) == [b"one", b"two"]
    # Without a directory of dead letters a bad row remains unpublished.
    report = run(make_plan(embedded.tcp_address), chunk([*numbered(0, 150), b"", b"last"]))
    assert (report.confirmed, report.rejected, report.left) == (151, 1, 1)
    assert report.reasons == ["row 150 of partition 0: the body is empty, which NSQ cannot carry"]


def test_a_row_that_nsqd_refuses_is_found_in_its_batch(go_nsqd: MakeNsqd, tmp_path: Path) -> None:
    nsqd = go_nsqd("-max-msg-size=1000")
    bodies = [*numbered(0, 250), b"x" * 1001, *numbered(250, 300)]

    report = run(make_plan(nsqd.tcp_address, dead_letters=LocalPlace(tmp_path)), chunk(bodies))

    assert (report.confirmed, report.rejected, report.dead_lettered) == (300, 1, 1)
    [line] = dead_letters(tmp_path)
    assert decode(line).body == b"x" * 1001
    assert "E_BAD_MESSAGE" in json.loads(line)["reason"]
    assert bodies_in(nsqd, "clicks", 300) == numbered(0, 300)


@pytest.mark.parametrize("goes_away", [False, True])
def test_a_failure_that_is_not_of_a_row_ends_the_task_without_dead_letters(
    scripted_nsqd: ScriptedNsqd,
    in_background: Callable[..., Future[PublishReport]],
    tmp_path: Path,
    goes_away: bool,
) -> None:
    """The outcome of rows in flight is unknown, but they did not cause the failure."""
    options = PublishOptions(PublishMode.FAILOVER, 0.3, retry_unknown=goes_away)
    dead, ledger = tmp_path / "dead", tmp_path / "ledger"
    ledger.mkdir()
    plan = make_plan(
        scripted_nsqd.address,
        dead_letters=LocalPlace(dead),
        ledger=LocalPlace(ledger),
        options=options,
    )
    task = in_background(run, plan, chunk(numbered(0, 10)))
    connection = with_rows(scripted_nsqd)
    if goes_away:
        scripted_nsqd.stop_listening()
        connection.close()
    else:
        connection.error("E_MPUB_FAILED the disk is full")

    reason = "not confirmed: an earlier" if goes_away else ".*E_MPUB_FAILED the disk is full"
    with pytest.raises(ConnectionFailed if goes_away else NsqError, match=f"partition 0: {reason}"):
        task.result(patience_s(10))
    assert dead_letters(dead) == []
    assert read_entries(LocalPlace(ledger))[0].done == 0  # The next attempt sends all rows.


def test_a_lost_nsqd_is_replaced(embedded: EmbeddedServer, unreachable_address: str) -> None:
    report = run(make_plan(unreachable_address, embedded.tcp_address), chunk(numbered(0, 1000)))

    assert (report.confirmed, report.repeated) == (1000, 0)
    assert embedded.depth("clicks") == 1000
    options = PublishOptions(PublishMode.FAILOVER, 0.3)
    client = replace(FAST, dial_timeout_s=0.3)
    plan = make_plan(unreachable_address, options=options, client_options=client)
    with pytest.raises(ConnectionFailed, match=f"partition 0: .*{unreachable_address}"):
        run(plan, chunk(numbered(0, 10_000)))


def test_a_refused_secret_is_not_retried(go_nsqd: MakeNsqd, auth_server: Any) -> None:
    nsqd = go_nsqd(f"-auth-http-address={auth_server.address}")
    options = PublishOptions(PublishMode.FAILOVER, patience_s(60))

    with pytest.raises(RefusedError, match=nsqd.tcp_address):
        run(make_plan(nsqd.tcp_address, options=options), chunk(numbered(0, 10)))


def test_a_lost_connection_loses_no_row_and_repeated_rows_are_counted(
    proxy_to: ProxyTo, embedded: EmbeddedServer, in_background: Callable[..., Future[PublishReport]]
) -> None:
    embedded.create_topic("clicks")
    proxy = proxy_to(embedded.tcp_address)
    plan = make_plan(proxy.address, rate=10_000.0)
    task = in_background(run, plan, *(chunk(numbered(n, n + 1000)) for n in range(0, 10_000, 1000)))
    for goal in (1000, 4000):
        wait_until(lambda goal=goal: embedded.depth("clicks") > goal, what="publishing goes on")
        proxy.cut(reset=True)

    report = task.result(patience_s(30))

    bodies = bodies_in(embedded, "clicks", embedded.depth("clicks"))
    assert sorted(set(bodies)) == numbered(0, 10_000)
    assert report.confirmed == 10_000
    assert len(bodies) - 10_000 <= report.repeated <= 2 * WINDOW


def test_rows_that_must_not_be_repeated_become_dead_letters_as_unknown(
    scripted_nsqd: ScriptedNsqd, in_background: Callable[..., Future[PublishReport]], tmp_path: Path
) -> None:
    options = PublishOptions(PublishMode.FAILOVER, 5, retry_unknown=False)
    plan = make_plan(scripted_nsqd.address, options=options, dead_letters=LocalPlace(tmp_path))
    task = in_background(run, plan, chunk(numbered(0, 10)))
    with_rows(scripted_nsqd).close()

    report = task.result(patience_s(10))

    assert (report.confirmed, report.unknown, report.dead_lettered) == (0, 10, 10)
    assert len(dead_letters(tmp_path)) == 10


class Cut(Exception):
    """Interrupts a task."""


def cut_after(*chunks: Chunk) -> Iterator[Chunk]:
    yield from chunks
    raise Cut


def chunks_of(bodies: Sequence[bytes | None], size: int) -> list[Chunk]:
    return [chunk(bodies[at : at + size]) for at in range(0, len(bodies), size)]


@pytest.mark.parametrize("size", [1, 77, 1000])
def test_a_task_continues_where_it_ended(
    size: int, embedded: EmbeddedServer, tmp_path: Path
) -> None:
    ledger, dead = tmp_path / "ledger", tmp_path / "dead"
    ledger.mkdir()
    plan = make_plan(embedded.tcp_address, ledger=LocalPlace(ledger), dead_letters=LocalPlace(dead))
    rows = numbered(0, 2000)
    rows[5] = rows[1900] = b""
    with pytest.raises(Cut):
        PublishTask(plan, 0).run(cut_after(*chunks_of(rows[:1234], 200)))
    [entry] = read_entries(LocalPlace(ledger)).values()

    report = run(plan, *chunks_of(rows, size), attempt=1)

    assert entry.sent == 1234
    assert report.before == entry.done > 1234 - WINDOW
    assert (report.confirmed, report.rejected, report.dead_lettered) == (1998, 2, 2)
    assert report.repeated == entry.sent - entry.done
    bodies = bodies_in(embedded, "clicks", embedded.depth("clicks"))
    assert sorted(set(bodies)) == [row for row in rows if row]
    assert len(bodies) - 1998 <= report.repeated
    assert dead_rows(dead) == [5, 1900]


def test_a_task_continues_with_a_ledger_in_a_bucket(
    embedded: EmbeddedServer, bucket: Bucket
) -> None:
    ledger, dead = (parse_place(f"{bucket.url}/{name}") for name in ("ledger", "dead"))
    plan = make_plan(embedded.tcp_address, ledger=ledger, dead_letters=dead, batch_rows=500)
    rows, refused = numbered(0, 3 * AHEAD_ROWS), range(0, 3 * AHEAD_ROWS, 1000)
    for number in refused:
        rows[number] = b""
    with pytest.raises(Cut):
        PublishTask(plan, 0).run(cut_after(*chunks_of(rows[: 2 * AHEAD_ROWS], 1000)))

    report = run(plan, *chunks_of(rows, 1000))

    assert report.before >= AHEAD_ROWS // 2
    assert report.confirmed == len(rows) - len(refused)
    assert (report.dead_lettered, dead_rows(dead)) == (len(refused), list(refused))
    depth = embedded.depth("clicks")
    assert depth - report.confirmed <= report.repeated <= 2 * AHEAD_ROWS
    assert set(bodies_in(embedded, "clicks", depth)) == set(filter(None, rows))
    assert read_entries(ledger)[0].done == len(rows)


@pytest.mark.slow
def test_a_replay_with_ledger_and_dead_letters_in_a_bucket_is_done_once(
    run_nsq: RunNsq,
    spark_env: dict[str, str],
    bucket: Bucket,
    embedded: EmbeddedServer,
    tmp_path: Path,
) -> None:
    """No jar is downloaded, as only Python uses the store."""
    messages = [WireMessage(n, 1, b"%016x" % n, b"%d" % n if n else b"") for n in range(100)]
    bucket.storage.put_file("in/clicks.gz", write_archive(tmp_path / "clicks.gz", messages))
    command = ["spark", "replay", f"{bucket.url}/in", "--ledger", f"{bucket.url}/ledger"]
    command += ["--dead-letters", f"{bucket.url}/dead", "--master", "local[2]"]
    command += ["--nsqd-tcp-address", embedded.tcp_address]

    first = run_nsq(command, env=spark_env, timeout=patience_s(100))
    second = run_nsq(command, env=spark_env, timeout=patience_s(100))

    assert (first.status, second.status) == (0, 0), first.err + second.err
    assert "99 confirmed, 0 unknown" in first.err.replace("1 rejected, ", "")
    assert "100 done before" in second.err
    assert embedded.depth("clicks") == 99
    assert dead_rows(parse_place(f"{bucket.url}/dead")) == [0]


def test_a_ledger_of_other_rows_is_refused(embedded: EmbeddedServer, tmp_path: Path) -> None:
    plan = make_plan(embedded.tcp_address, ledger=LocalPlace(tmp_path))
    rows = numbered(0, 500)
    run(plan, chunk(rows))

    for changed in (numbered(1, 501), rows[:-1], rows[::-1]):
        with pytest.raises(ConfigurationError, match="partition 0 is not what it was"):
            run(plan, chunk(changed))
    assert embedded.depth("clicks") == 500


def test_two_concurrent_attempts_do_not_publish_the_same_rows(
    embedded: EmbeddedServer,
    in_background: Callable[..., Future[PublishReport]],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    # A second attempt waits for a quarter of it.
    monkeypatch.setattr(publish_task, "LOCK_WAIT_S", patience_s(60))
    plan = make_plan(embedded.tcp_address, ledger=LocalPlace(tmp_path), rate=2000.0)
    rows = chunk(numbered(0, 1000))

    attempts = [in_background(run, plan, rows, attempt=number) for number in range(2)]

    # The second attempt waits for the lock, and then all rows are done.
    assert sorted(attempt.result(patience_s(30)).before for attempt in attempts) == [0, 1000]
    assert embedded.depth("clicks") == 1000


@pytest.mark.parametrize("type", ["binary", "large_binary", "string", "large_string"])
def test_values_are_bytes_in_any_memory_layout(type: str) -> None:
    kinds = [b"a\nb", b"\0", b"\xff\xfe\x80", bytes(range(256)) * 4096, b"", None]
    expected = ["ü".encode(), b"", None] if "string" in type else kinds
    for values in (expected, [None, None], []):
        array = pyarrow.array(values, type=pyarrow.large_binary()).cast(getattr(pyarrow, type)())

        assert byte_strings(array) == byte_strings(array.dictionary_encode()) == values
        assert byte_strings(array.slice(1)) == values[1:]
        assert byte_strings(array.slice(1, 2)) == values[1:3]


def test_a_row_keeps_its_origin_and_a_batch_fits_the_size_limit() -> None:
    id = "0123456789abcdef"
    batch = pyarrow.RecordBatch.from_pydict(
        {"topic": ["a"], "nsqd": ["n:1"], "id": [id], "ts_ns": [9], "attempts": [2], "body": [b"x"]}
    )
    chunk = chunk_of(batch, has_topic=True)
    assert (chunk.bodies, chunk.topics, chunk.defers_ms) == ([b"x"], None, None)
    assert chunk.message(0, "b") == Envelope("b", "n:1", id.encode(), 9, 2, b"x")

    batch = pyarrow.RecordBatch.from_pydict({"body": ["x"], "topic": ["a"], "defer_ms": [5]})
    chunk = chunk_of(batch, has_topic=False)
    assert (chunk.topics, chunk.defers_ms) == (["a"], [5])
    assert chunk.message(0, "a") == Envelope("a", "", b"0" * 16, 0, 0, b"x")
    half = b"x" * (1 << 18)

    assert count_fitting([half] * 5, 1 << 19) == 2
    assert count_fitting([b"x" * (1 << 20), half], 1 << 19) == 1
    assert count_fitting([None, b"", b"x"], 1 << 19) == 3
    assert count_fitting([b"x", b"y"], 0) == 1


def test_only_rows_before_the_first_unfinished_span_count_as_done() -> None:
    ledger_entry = LedgerEntry(done=5, topics={"a": 4}, rejected=1)
    first = RowSpan(10, 70, 1, RowCounts({"a": 3, "b": 1}, rejected=1))
    second, third = RowSpan(20, 140, 1, RowCounts({"b": 5}, unknown=1)), RowSpan(30, 210, 1)
    spans = deque([first, second, third])

    counts = {"topics": {"a": 7, "b": 6}, "rejected": 2, "unknown": 1}
    for ended, entry in (
        (second, LedgerEntry(done=5, topics={"a": 4}, rejected=1)),
        (first, LedgerEntry(done=20, checksum=140, **counts)),
        (third, LedgerEntry(done=30, checksum=210, **counts)),
    ):
        ended.pending = 0
        record_finished_spans(ledger_entry, spans)
        assert ledger_entry == entry
