"""The plan that a replay with a ledger keeps from its first run, and checks in the next ones."""

from dataclasses import replace
from pathlib import Path

import pytest

from nsqtools.archive.place import LocalPlace
from nsqtools.errors import ConfigurationError, OutputError
from nsqtools.records.units import Moment
from nsqtools.spark.jobs.replay_job import (
    PLAN,
    ReplayJob,
    ReplayPlan,
    ReplayRequest,
    load_plan,
    partition_bytes,
)
from nsqtools.spark.spark_settings import SparkSettings

REQUEST = ReplayRequest(
    (LocalPlace(Path("/var/nsq")),), {"clicks": "again"}, Moment("-2h", 7), None, "attempts = 1"
)
PLANNED = ReplayPlan(REQUEST.job(), {"/var/nsq/a.gz": 5}, {"/data/b.parquet": 6}, 7, None, 8 << 20)

OTHERS = [
    (replace(REQUEST, paths=(LocalPlace(Path("/elsewhere")),)), "paths"),
    (replace(REQUEST, topics={}), "topics"),
    (replace(REQUEST, since=Moment("-3h", 7)), "since"),
    (replace(REQUEST, until=Moment("now", 7)), "until"),
    (replace(REQUEST, where="", delimiter=b"\0"), "where, delimiter"),
]


def test_the_next_run_reads_the_plan_of_the_first_and_refuses_an_invalid_one(
    tmp_path: Path,
) -> None:
    assert load_plan(LocalPlace(tmp_path), REQUEST.job()) is None
    (tmp_path / PLAN).write_bytes(PLANNED.encode())

    plan = load_plan(LocalPlace(tmp_path), replace(REQUEST, since=Moment("-2h", 99)).job())

    assert plan == PLANNED
    assert plan.inputs.archives == (LocalPlace(Path("/var/nsq/a.gz")),)
    for other, named in OTHERS:
        complaint = f"the ledger of another replay: {named} differ"
        with pytest.raises(ConfigurationError, match=complaint):
            load_plan(LocalPlace(tmp_path), other.job())
    assert plan.inputs.parquet == (LocalPlace(Path("/data/b.parquet")),)
    later = replace(PLANNED, version=99).encode()
    for content in (b"", b"{}", b"[]", b'{"version": 2}', later):
        (tmp_path / PLAN).write_bytes(content)
        with pytest.raises(ConfigurationError, match=r"replay.json is not a replay's plan"):
            load_plan(LocalPlace(tmp_path), REQUEST.job())


def job(request: ReplayRequest, work: Path, ledger: Path | None = None) -> ReplayJob:
    place = None if ledger is None else LocalPlace(ledger)
    return ReplayJob(SparkSettings(), request, {}, place, work=work, shares_work=True)


def test_files_must_be_unchanged(tmp_path: Path) -> None:
    archive, ledger = tmp_path / "a.gz", tmp_path / "ledger"
    archive.write_bytes(b"12345")
    ledger.mkdir()

    def replay(size: int) -> ReplayJob:
        request = ReplayRequest((LocalPlace(archive),), {"": "again"})
        plan = ReplayPlan(request.job(), {str(archive): size}, {}, None, None, 8 << 20)
        (ledger / PLAN).write_bytes(plan.encode())
        return job(request, tmp_path, ledger)

    replay(5)
    with pytest.raises(ConfigurationError, match="has changed since the ledger was begun"):
        replay(4)
    archive.unlink()
    with pytest.raises(OutputError, match=r"cannot read .*a.gz"):
        replay(5)


def test_the_second_of_two_concurrent_runs_uses_the_plan_of_the_first(tmp_path: Path) -> None:
    archive, ledger = tmp_path / "a.gz", tmp_path / "ledger"
    archive.write_bytes(b"")
    request = ReplayRequest((LocalPlace(archive),), {"": "again"})
    second = job(request, tmp_path, ledger)
    second._plan = replace(PLANNED, job=request.job())
    ledger.mkdir()
    first = replace(second._plan, archives={})
    (ledger / PLAN).write_bytes(first.encode())

    with pytest.raises(ConfigurationError, match="another run has begun the ledger"):
        second.run()
    assert load_plan(LocalPlace(ledger), request.job()) == first


def test_unusable_files_are_reported_early_and_parquet_is_split_for_slots(tmp_path: Path) -> None:
    (tmp_path / "a.log").write_bytes(b"one\ntwo\n")
    with pytest.raises(ConfigurationError, match="bare bodies, which have no topic"):
        job(ReplayRequest((LocalPlace(tmp_path / "a.log"),)), tmp_path)
    job(ReplayRequest((LocalPlace(tmp_path / "a.log"),), {"": "again"}), tmp_path)
    assert [partition_bytes(mib << 20, 2) >> 20 for mib in (0, 160, 1 << 20)] == [8, 20, 64]
