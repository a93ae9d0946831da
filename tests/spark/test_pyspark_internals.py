"""The names that `pyspark_internals` relies on: the first tests to fail with another PySpark."""

import inspect
import os
import re
import signal
import time
from importlib.metadata import requires
from pathlib import Path
from subprocess import Popen
from typing import Any

import pytest
from plugins.spark import SparkSession

from nsqtools.archive.place import LocalPlace
from nsqtools.spark import pyspark_internals
from nsqtools.spark.pyspark_internals import (
    BEYOND,
    OLDEST,
    QUERY_LOGGERS,
    delete_folder,
    launch,
    redirect_accumulator_errors,
)

java_gateway = pytest.importorskip("pyspark.java_gateway")


def test_pyspark_has_the_private_names_loggers_and_versions_we_rely_on() -> None:
    private = re.compile(r"\._gateway|\._jvm|\._jsc|_accumulatorServer|java_gateway")
    modules = Path(pyspark_internals.__file__).parent.rglob("*.py")

    users = {path.name for path in modules if private.search(path.read_text("utf-8"))}
    assert users == {"pyspark_internals.py"}
    from pyspark.errors.exceptions import base

    used = re.findall(r'PySparkLogger.getLogger\("(\w+)"\)', inspect.getsource(base))

    assert set(used) == set(QUERY_LOGGERS)
    lines = [line for line in requires("nsqtools") or () if line.startswith("pyspark")]
    [pyspark] = [line for line in lines if re.search(r"extra == .spark.", line)]

    assert f">={'.'.join(map(str, OLDEST))}" in pyspark
    assert f"<{'.'.join(map(str, BEYOND))}" in pyspark


def test_a_signal_before_the_gateway_has_started_still_ends_it(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    started: list[Popen[bytes]] = []

    def launch_gateway(conf: object, options: dict[str, Any]) -> None:
        os.kill(os.getpid(), signal.SIGUSR1)
        time.sleep(0.2)  # A fork may take this long.
        proc = Popen(["sleep", "1000"], **options)
        started.append(proc)
        proc.wait()
        raise RuntimeError

    def leave(number: int, _: object) -> None:
        raise SystemExit(number)

    monkeypatch.setattr(java_gateway, "launch_gateway", launch_gateway)
    previous = signal.signal(signal.SIGUSR1, leave)
    try:
        with pytest.raises(SystemExit):
            launch({}, start_new_session=True)
    finally:
        signal.signal(signal.SIGUSR1, previous)

    assert [process.returncode for process in started] == [-signal.SIGKILL]


def test_the_end_of_the_jvm_is_logged(spark: SparkSession) -> None:
    context = spark.sparkContext
    lines: list[str] = []

    redirect_accumulator_errors(context, lines.append)
    context._accumulatorServer.handle_error(None, None)  # type: ignore[attr-defined]

    assert lines == ["NoneType: None\n"]


def test_a_folder_is_deleted_with_its_content(spark: SparkSession, tmp_path: Path) -> None:
    (tmp_path / "a b" / "c").mkdir(parents=True)
    (tmp_path / "a b" / "c" / "file").touch()
    delete_folder(spark, LocalPlace(tmp_path / "a b").hadoop_url)
    assert list(tmp_path.iterdir()) == []
