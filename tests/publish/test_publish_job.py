"""Publishing to real nsqd: every record has an outcome, and confirmed records are stored."""

import math
import os
import threading
from dataclasses import replace
from pathlib import Path
from threading import TIMEOUT_MAX
from types import SimpleNamespace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from plugins.clients import InBackground, bodies_in
from plugins.network import ProxyTo
from plugins.power_cut import PowerCut
from plugins.servers import GoNsqd, MakeNsqd
from plugins.waiting import patience_s, wait_until

from nsqtools import ClientOptions, ConfigurationError, ConnectionLost, OutputError, ServerError
from nsqtools.client.connection_settings import PublishMode
from nsqtools.client.outcomes import not_sent, rejected, unknown
from nsqtools.client.rate_limit import MAX_CATCH_UP_S, RateLimit
from nsqtools.publish.input import (
    BATCH_BYTES,
    BATCH_RECORDS,
    InputBatch,
    RecordSource,
    repeat_texts,
)
from nsqtools.publish.publish_job import PublishJob, UnsentFiles
from nsqtools.publish.publisher import (
    PublishBatch,
    PublishCounts,
    Publisher,
    PublishOptions,
    PublishOutcome,
    classify_error,
)

FAST = ClientOptions(dial_timeout_s=1, publish_timeout_s=patience_s(5))


def publisher_to(
    *addresses: str, client: ClientOptions = FAST, rate: float = 0, **options: Any
) -> Publisher:
    return Publisher(addresses, client, PublishOptions(**{"retry_timeout_s": 5, **options}), rate)


def run_job(text: bytes, publisher: Publisher, tmp_path: Path, **more: Any) -> PublishCounts:
    path = tmp_path / "input"
    path.write_bytes(text)
    job = PublishJob[bytes](publisher, "events", **more)
    return job.run(RecordSource([str(path)], b"\n", job.should_stop).batches())


@pytest.mark.parametrize("at_once", [5 << 20, 30], ids=["by default", "30 bytes"])
def test_all_records_arrive_except_too_long_ones(
    go_nsqd: MakeNsqd, tmp_path: Path, at_once: int
) -> None:
    nsqd = go_nsqd("-max-msg-size=1000000")
    records = [b"plain", b"\x00nul", b"\xff\xfe not UTF-8", b"x" * 1_000_000, b"cr\r", b"last"]
    text = b"\n".join([*records[:3], b"x" * 1_000_001, *records[3:]])
    options = replace(FAST, publish_max_body_size=at_once)
    counts = run_job(text, publisher_to(nsqd.tcp_address, client=options), tmp_path)
    assert counts == PublishCounts(confirmed=6, rejected=1)
    assert bodies_in(nsqd, "events", 6) == sorted(records)


def test_each_nsqd_gets_a_share_even_of_a_single_batch(go_nsqd: MakeNsqd, tmp_path: Path) -> None:
    three = [go_nsqd() for _ in range(3)]
    for nsqd in three:
        nsqd.create_channel("events", "check")
    addresses = [nsqd.tcp_address for nsqd in three]

    spread = publisher_to(*addresses, mode=PublishMode.ROUND_ROBIN, defer_s=3600)
    counts = run_job(b"1\n2\n3\n", spread, tmp_path)

    assert counts == PublishCounts(confirmed=3)
    for nsqd in three:
        wait_until(
            lambda nsqd=nsqd: nsqd.channel_stats("events", "check")["deferred_count"] == 1,
            what="a message for later",
        )


def test_input_for_an_absent_nsqd_is_kept_completely(
    unreachable_address: str, tmp_path: Path
) -> None:
    count = 140_000  # more than the 128 batches of 1000 that may be outstanding at a time
    lines = [b"x" * 2_000_000 if n % 60_000 == 1 else b"%d" % n for n in range(count)]
    text = b"\n".join(lines) + b"\n"
    hasty = ClientOptions(dial_timeout_s=0.2)
    publisher = publisher_to(unreachable_address, client=hasty, retry_timeout_s=0.2)
    with UnsentFiles(tmp_path / "unsent", b"\n") as unsent:
        counts = run_job(text, publisher, tmp_path, unsent=unsent)

    assert counts == PublishCounts(unsent=count - 3, rejected=3)
    assert (tmp_path / "unsent").read_bytes() == text
    with pytest.raises(ConfigurationError, match="is an input"):
        UnsentFiles(tmp_path / "unsent", b"\n", inputs=[str(tmp_path / "unsent")])

    read_at_once = text[-30_000:]
    publisher = publisher_to(unreachable_address, client=hasty, rate=1)
    with UnsentFiles(tmp_path / "stopped", b"\n") as unsent:
        run_job(read_at_once, publisher, tmp_path, unsent=unsent, on_progress=publisher.stop)
    assert (tmp_path / "stopped").read_bytes() == read_at_once


def test_an_unreachable_nsqd_is_reported_long_before_the_retry_timeout(
    nsqd: GoNsqd, tmp_path: Path, in_background: InBackground, caplog: pytest.LogCaptureFixture
) -> None:
    nsqd.stop()
    publisher = publisher_to(nsqd.tcp_address, retry_timeout_s=60)
    counts = in_background(run_job, b"x\n", publisher, tmp_path)
    reason = f"cannot connect to {nsqd.tcp_address} (connection refused); trying for 1m"
    wait_until(lambda: reason in caplog.text, what="the reason")
    nsqd.start()
    assert counts.result(patience_s(30)) == PublishCounts(confirmed=1)
    assert caplog.text.count("trying for") == 1


def test_ended_batches_record_which_records_may_be_retried(tmp_path: Path) -> None:
    class Lossy(Publisher):
        def publish(self, topic: str, bodies: Any, on_ended: Any = None, **_: Any) -> None:
            lost = {500: {"a:1": unknown(ConnectionLost("lost"))}} if b"1500" in bodies else {}
            on_ended(PublishBatch(topic, bodies, 0, on_ended, lost))

    settled: list[InputBatch[bytes]] = []
    lines = b"".join(b"%d\n" % n for n in range(5000))
    run_job(lines, Lossy([], FAST, PublishOptions()), tmp_path, on_batch_ended=settled.append)
    assert [(batch.end.records, batch.retryable) for batch in settled] == [
        (1000, set()),
        (2000, {500}),
    ]


def test_no_record_is_lost_when_connections_are_cut(
    proxy_to: ProxyTo, nsqd: GoNsqd, in_background: InBackground, tmp_path: Path
) -> None:
    proxy = proxy_to(nsqd.tcp_address)
    lines = [b"%05d" % n + b"x" * 100 for n in range(30_000)]
    retrying = {"retry_timeout_s": 10, "retry_unknown": True}
    publisher = publisher_to(proxy.address, rate=30_000, **retrying)
    running = in_background(run_job, b"\n".join(lines), publisher, tmp_path)
    for goal in (3_000, 9_000, 15_000):
        wait_until(lambda goal=goal: publisher.counts.confirmed > goal, what="publishing")
        proxy.cut(reset=goal == 9_000)

    assert running.result(patience_s(30)) == PublishCounts(confirmed=30_000)
    assert nsqd.depth("events") >= 30_000


RECORDS = [b"record %d" % number for number in range(10)]


def test_synced_unsent_records_survive_a_power_cut(tmp_path: Path) -> None:
    with PowerCut(tmp_path) as record:
        with UnsentFiles(tmp_path / "unsent", b"\n") as unsent:
            for number, each in enumerate(RECORDS):
                unsent.write(each)
                if number == 4:
                    unsent.sync()
                    record.note(*RECORDS[:5])
        record.note(*RECORDS[5:])

    cuts = list(record.cuts())
    assert [promised for promised, _ in cuts][-1] == RECORDS
    for promised, cut in cuts:
        assert set(promised) <= set(cut.files.get("unsent", b"").splitlines())


def test_a_renamed_file_of_unsent_records_is_created_again(tmp_path: Path) -> None:
    with UnsentFiles(tmp_path / "unsent", b"\n") as unsent:
        unsent.write(b"x" * 100_000)  # more than the buffer
        (tmp_path / "unsent").rename(tmp_path / "taken")
        unsent.write(b"2")
    assert (tmp_path / "unsent").read_bytes() == b"2\n"
    assert (tmp_path / "taken").stat().st_size == 100_001
    (tmp_path / "folder").mkdir()
    with UnsentFiles(tmp_path / "folder" / "unsent", b"\n") as unsent:
        (tmp_path / "folder").rename(tmp_path / "moved")
        unsent.write(b"3")
    assert (tmp_path / "moved" / "unsent").read_bytes() == b"3\n"


def test_a_full_disk_leaves_no_partial_record(small_disk: Path) -> None:
    """A partial record would join the first record of the next run."""
    with UnsentFiles(small_disk / "unsent", b"\n") as unsent:
        with pytest.raises(OutputError, match="No space left"):
            unsent.write(bytes(100_000))
        unsent.write(b"record")
    assert (small_disk / "unsent").read_bytes() == b"record\n"


def test_unsent_records_are_written_through_a_link_or_a_pipe(
    tmp_path: Path, in_background: InBackground
) -> None:
    """Earlier records stay in the file, and only its owner may read it."""
    (tmp_path / "link").symlink_to("file")
    os.mkfifo(tmp_path / "pipe")
    reading = in_background((tmp_path / "pipe").read_bytes)
    for name in ("link", "link", "pipe"):
        with UnsentFiles(tmp_path / name, b"\n") as unsent:
            unsent.write(b"record")

    assert (tmp_path / "file").read_bytes() == b"record\nrecord\n"
    assert (tmp_path / "file").stat().st_mode & 0o777 == 0o600
    assert reading.result(patience_s(10)) == b"record\n"


# -- the outcome of a record from those of several nsqd, and the rate limit -----------------------


LOST = ConnectionLost("nsqd:4150: gone")
TOO_LARGE = rejected(ServerError("E_BAD_MESSAGE", "", fatal=True), 1)
DISK_FULL = rejected(ServerError("E_PUB_FAILED", "", fatal=True), 1)


def test_the_worst_outcome_counts_and_counts_by_nsqd_have_a_port() -> None:
    kinds = PublishOutcome
    assert [classify_error(cause) for cause in (None, DISK_FULL)] == [kinds.CONFIRMED, kinds.UNSENT]
    batch = PublishBatch("events", [b"0", b"1"], 6, on_ended=lambda batch: None)
    for nsqd, place, error in (
        ("b", 0, unknown(LOST)),
        ("b", 1, TOO_LARGE),
        ("c", 0, not_sent(LOST)),
        ("c", 1, not_sent(LOST)),
    ):
        batch.errors.setdefault(place, {})[nsqd] = error
    worst = {place: classify_error(error) for place, error in batch.failures().items()}
    assert worst == {0: kinds.UNSENT, 1: kinds.REJECTED}
    publisher = Publisher(["a", "a:4150", "b:1"], ClientOptions(), PublishOptions())
    assert [*publisher.counts_by_nsqd] == ["a:4150", "b:1"]


def publish_for(limit: RateLimit, seconds: float, step_s: float) -> int:
    """Spend every allowance, on a clock that advances by the wait that the limit returns."""
    now, published = 0.0, 0
    while now < seconds:
        if allowed := limit.allowance(now):
            limit.spend(allowed)
            published += allowed
            now += step_s
        else:
            now += max(limit.wait_s(now), 1e-6)
    return published


@pytest.mark.parametrize("rate", [0.5, 10, 1_000, 100_000, 2_000_000])
def test_the_rate_is_exact_at_any_size_and_the_wait_is_bounded(rate: float) -> None:
    published = publish_for(RateLimit(rate, 0.0), 20, step_s=0.0005)
    assert published == pytest.approx(rate * 20, rel=0.01, abs=1)
    limit = RateLimit(1e-300, 0.0)
    limit.spend(1)
    assert limit.wait_s(0.0) == TIMEOUT_MAX


def test_an_infinite_rate_is_no_limit() -> None:
    limit = RateLimit(math.inf, 0.0)
    assert [limit.reserve(1000, 0.0) for _ in range(3)] == [1000, 1000, 1000]


@given(
    st.floats(0.1, 1e6), st.lists(st.tuples(st.floats(0, 0.5), st.integers(1, 5000)), max_size=50)
)
def test_the_rate_is_never_exceeded_by_more_than_the_catch_up(
    rate: float, steps: list[tuple[float, int]]
) -> None:
    limit, now, published = RateLimit(rate, 0.0), 0.0, 0
    for delay_s, requested in steps:
        now += delay_s
        spent = min(requested, limit.allowance(now))
        if spent:
            limit.spend(spent)
        published += spent
        assert published <= rate * (now + MAX_CATCH_UP_S + 0.02) + 1


# -- reading: promptly from a slow input, in full batches from a fast one -------------------------


def batches_of(*paths: Path) -> list[list[bytes]]:
    source = RecordSource(list(map(str, paths)), b"\n", lambda: False)
    return [list(batch.records) for batch in source.batches()]


def test_a_file_is_read_in_full_batches_bounded_in_bytes(tmp_path: Path) -> None:
    lines = [b"line %d" % n for n in range(3 * BATCH_RECORDS + 7)]
    (tmp_path / "log").write_bytes(b"\n".join(lines) + b"\n")
    batches = batches_of(tmp_path / "log")
    assert [record for batch in batches for record in batch] == lines
    assert [len(batch) for batch in batches] == [BATCH_RECORDS] * 3 + [7]
    (tmp_path / "large").write_bytes((b"x" * 100_000 + b"\n") * 20)
    batches = batches_of(tmp_path / "large")
    assert sum(map(len, batches)) == 20
    assert max(sum(map(len, batch)) for batch in batches) < BATCH_BYTES + (1 << 18)


@pytest.mark.parametrize(
    ("texts", "records"),
    [
        ([b"abc\nlast"], [b"abc", b"last"]),
        ([b"a\n\nb\n"], [b"a", b"", b"b"]),
        ([b""], []),
        ([b"one\ntwo", b"three\n"], [b"one", b"two", b"three"]),
    ],
)
def test_the_last_record_needs_no_delimiter(
    tmp_path: Path, texts: list[bytes], records: list[bytes]
) -> None:
    paths = [tmp_path / str(number) for number in range(len(texts))]
    for path, text in zip(paths, texts, strict=True):
        path.write_bytes(text)
    assert [record for batch in batches_of(*paths) for record in batch] == records


def test_reading_a_fifo_waits_for_its_writer_or_a_stop(
    tmp_path: Path, in_background: InBackground
) -> None:
    os.mkfifo(path := tmp_path / "fifo")
    stopped = threading.Event()
    batches = RecordSource([str(path)], b"\n", stopped.is_set).batches()
    first = in_background(next, batches)
    with path.open("wb") as writer:
        writer.write(b"one\n")
        writer.flush()
        assert first.result(patience_s(5)).records == [b"one"]
    assert list(batches) == []
    waiting = in_background(list, RecordSource([str(path)], b"\n", stopped.is_set).batches())
    stopped.set()
    assert waiting.result(patience_s(5)) == []


def test_delayed_repetitions_are_not_caught_up_in_a_burst(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    now, rounds = 0.0, []

    def pass_time(seconds: float) -> None:
        nonlocal now
        now += seconds

    clock = SimpleNamespace(monotonic=lambda: now, sleep=pass_time)
    monkeypatch.setattr("nsqtools.publish.input.time", clock)
    for batch in repeat_texts([b"{n}"], 4, 0.2, lambda: False):
        rounds.append((now, batch.records))
        pass_time(0.5 if now == 0.2 else 0.0)
    assert rounds == [(0.0, [b"1"]), (0.2, [b"2"]), (0.7, [b"3"]), (pytest.approx(0.9), [b"4"])]
