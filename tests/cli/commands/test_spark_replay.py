"""``nsq spark replay``: archives and Parquet tables are published again, and not twice.

The command runs in this process, with the session that the tests share.
"""

from __future__ import annotations

import json
import os
import re
import signal
import threading
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING

import pytest
from plugins.archives import BEGIN_NS, Writer, numbered, write_archive
from plugins.cli import Result
from plugins.clients import bodies_in
from plugins.daemons import GoNsqd
from plugins.spark import RunSpark
from plugins.waiting import wait_until

from nsqtools.archive.place import LocalPlace
from nsqtools.protocol.frames import WireMessage
from nsqtools.records.envelope import decode
from nsqtools.spark.jobs.replay_job import ReplayJob
from nsqtools.spark.publishing.row_outcomes import LedgerPart
from nsqtools.spark.spark_settings import SparkSettings

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

Replay = Callable[..., Result]


def bodies(first: int, last: int) -> list[bytes]:
    return sorted(message.body for message in numbered(first, last))


def write_parquet(spark: SparkSession, path: Path, first: int, last: int, topic: str) -> None:
    """Write the columns of ``nsq spark compact`` that a replay reads."""
    rows = [(m.id.decode(), m.timestamp_ns, m.attempts, m.body) for m in numbered(first, last)]
    frame = spark.createDataFrame(rows, "id string, ts_ns bigint, attempts int, body binary")
    constants = (f"'{topic}' AS topic", "'nsqd:4150' AS nsqd", "'2026-09-21' AS date")
    frame = frame.selectExpr("*", *constants, "timestamp_micros(ts_ns div 1000) AS timestamp")
    frame.coalesce(1).write.partitionBy("topic", "date").mode("append").parquet(str(path))


@pytest.fixture
def replay(nsqd: GoNsqd, run_spark: RunSpark) -> Replay:
    return lambda *words: run_spark("replay", *words, "--nsqd-tcp-address", nsqd.tcp_address)


def test_times_and_sql_select_messages_and_a_dry_run_publishes_none(
    spark: SparkSession, nsqd: GoNsqd, replay: Replay, tmp_path: Path
) -> None:
    archive = write_archive(tmp_path / "clicks.gz", numbered(0, 20))
    write_parquet(spark, tmp_path / "parquet", 0, 20, "views")
    options = ["--dry-run", "-o", "csv", "--ledger", tmp_path / "ledger"]
    dry = replay(archive, "--topic", "again", *options)
    for condition, complaint in (("colour = 'red'", "colour"), ("attempts >", "Syntax error")):
        result = replay(archive, "--where", condition)
        assert (result.status, complaint in result.err) == (2, True), result.err

    assert (dry.status, dry.out) == (0, b"topic,messages\nagain,20\n")
    assert "20 messages would be published" in dry.err
    assert nsqd.stats()["topics"] == []
    assert not (tmp_path / "ledger").exists()

    span = ["--since", "2026-09-21T14:13:25Z", "--until", "2026-09-21T14:13:35Z"]
    where = ["--where", "cast(body AS string) LIKE 'body 1_'"]
    (tmp_path / "bare.log").write_bytes(b"bare\n")
    bare = replay(archive, tmp_path / "bare.log", *span, "--topic", "again", "--dry-run")
    result = replay(archive, tmp_path / "parquet", *span, *where)

    assert "bare bodies, which have no time, are left out of the range" in bare.err
    assert "10 messages would be published" in bare.err
    assert result.status == 0, result.err
    for topic in ("clicks", "views"):
        assert bodies_in(nsqd, topic, 5) == bodies(10, 15)
    assert nsqd.topic_stats("views")["message_count"] == 5


def test_a_second_run_with_a_ledger_publishes_nothing_twice(
    spark: SparkSession, nsqd: GoNsqd, replay: Replay, tmp_path: Path
) -> None:
    (tmp_path / "in").mkdir()
    writer = Writer(tmp_path / "in")
    for number in range(3):
        writer.write(numbered(number * 1000, number * 1000 + 1000))
        writer.finish()
    writer.write(numbered(3000, 3100))
    write_parquet(spark, tmp_path / "parquet", 5000, 6000, "clicks")
    arguments = [tmp_path / "in", tmp_path / "parquet", "--ledger", tmp_path / "ledger"]
    first = replay(*arguments)
    writer.finish()
    write_parquet(spark, tmp_path / "parquet", 7000, 8000, "clicks")

    again = replay(*arguments)

    assert (first.status, again.status) == (0, 0), first.err + again.err
    assert "4000 confirmed" in first.err
    assert "is left out: it is in progress" in first.err
    assert "4000 confirmed" in again.err
    assert "4000 done before" in again.err
    assert nsqd.depth("clicks") == 4000
    assert replay(tmp_path / "in").status == 0
    assert nsqd.depth("clicks") == 4000 + 3100


def test_a_replay_fails_without_nsqd_and_continues_when_it_is_back(
    nsqd: GoNsqd, replay: Replay, tmp_path: Path
) -> None:
    write_archive(tmp_path / "a.gz", numbered(0, 2000))
    arguments = [tmp_path / "a.gz", "--retry-timeout", "200ms", "--ledger", tmp_path / "ledger"]
    nsqd.kill()

    result = replay(*arguments)
    nsqd.start()
    again = replay(*arguments)

    assert result.status == 4
    assert nsqd.tcp_address in result.err
    assert "run it again to continue" in result.err
    assert again.status == 0, again.err
    assert bodies_in(nsqd, "clicks", 2000) == bodies(0, 2000)


def test_a_replay_stopped_by_a_signal_reports_progress_and_continues(
    nsqd: GoNsqd, replay: Replay, tmp_path: Path
) -> None:
    write_archive(tmp_path / "a.gz", *(numbered(n, n + 1000) for n in range(0, 10_000, 1000)))
    arguments = [tmp_path / "a.gz", "--ledger", tmp_path / "ledger"]
    nsqd.create_topic("clicks")

    def terminate() -> None:
        wait_until(lambda: nsqd.depth("clicks") > 1000, what="some messages", timeout_s=60)
        if nsqd.depth("clicks") < 10_000:
            os.kill(os.getpid(), signal.SIGTERM)

    killer = threading.Thread(target=terminate)
    killer.start()
    stopped = replay(*arguments, "--rate", "1000")
    killer.join()
    with LedgerPart(LocalPlace(tmp_path / "ledger"), 0):  # the task has ended
        remaining = replay(*arguments, "--dry-run")
    again = replay(*arguments)

    assert stopped.status == 143
    assert re.search(r"nsq: [1-9]\d* confirmed", stopped.err)
    assert "run it again to continue" in stopped.err
    assert "error" not in stopped.err
    assert again.status == 0, again.err
    done = re.search(r"10000 confirmed.* ([1-9]\d*) done before", again.err)
    assert done is not None
    assert remaining.out == b"topic\tmessages\nclicks\t%d\n" % (10_000 - int(done[1]))
    published = bodies_in(nsqd, "clicks", nsqd.depth("clicks"))
    assert sorted(set(published)) == bodies(0, 10_000)
    assert len(published) <= 10_000 + 5000


def test_a_signal_before_the_spark_job_ends_the_replay(
    nsqd: GoNsqd, replay: Replay, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    archive = write_archive(tmp_path / "a.gz", numbered(0, 9000))
    nsqd.create_topic("clicks")
    for name in ("_sink_options", "_remaining_rows"):
        ask = getattr(ReplayJob, name)

        def interrupted(job: ReplayJob, ask: Callable[[ReplayJob], object] = ask) -> object:
            os.kill(os.getpid(), signal.SIGTERM)
            return ask(job)

        monkeypatch.setattr(ReplayJob, name, interrupted)

    stopped = replay(archive, "--rate", "1000")
    with pytest.raises(SystemExit, match="143"):
        replay(archive, "--dry-run")

    assert (stopped.status, "error" in stopped.err) == (143, False), stopped.err
    assert nsqd.depth("clicks") < 9000


def test_damage_and_rejected_messages_set_the_exit_status(
    nsqd: GoNsqd, replay: Replay, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    large = WireMessage(BEGIN_NS, 1, b"%016x" % 99, b"x" * 1_100_000)
    write_archive(tmp_path / "a.gz", [*numbered(0, 5), large])
    torn = write_archive(tmp_path / "torn.gz", numbered(0, 10), numbered(10, 20), topic="torn")
    torn.write_bytes(torn.read_bytes()[:-20])

    damaged = replay(torn)
    with monkeypatch.context() as on_a_cluster:
        on_a_cluster.setattr(SparkSettings, "is_local", False)
        refused = replay(torn)
    result = replay(tmp_path / "a.gz")
    aside = replay(tmp_path / "a.gz", "--dead-letters", tmp_path / "dead", "--json")

    assert (damaged.status, str(torn) in damaged.err) == (6, True)
    assert "or give a --ledger, where damage is reported." in refused.err
    assert nsqd.topic_stats("torn")["message_count"] >= 10
    assert result.status == 6
    for complaint in ("1 rows were refused", "1100000 bytes are above", "5 confirmed, 1 rejected"):
        assert complaint in result.err
    assert aside.status == 0
    assert "5 confirmed, 1 rejected, 0 unknown, 1 dead-lettered" in aside.err
    document = json.loads(aside.out)
    assert (document["topics"], document["confirmed"]) == ({"clicks": 5}, 5)
    [path] = (tmp_path / "dead").iterdir()
    message = decode(path.read_bytes())
    assert (message.id, message.nsqd, message.body) == (large.id, "nsqd:4150", large.body)


def test_the_auth_secret_reaches_the_workers_and_is_not_shown(
    replay: Replay, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("NSQ_AUTH_SECRET", "")
    (tmp_path / "secret").write_text("s3cret\n")
    write_archive(tmp_path / "a.gz", numbered(0, 10))

    result = replay(tmp_path / "a.gz", "--auth-secret-file", tmp_path / "secret")

    assert result.status == 0, result.err
    assert os.environ["NSQ_AUTH_SECRET"] == "s3cret"
    assert "s3cret" not in result.err
