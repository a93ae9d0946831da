"""The formats are known: by `register`, or without it by the modules beside the package."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from typing import TYPE_CHECKING
from unittest.mock import MagicMock, PropertyMock

import pytest
from plugins.archives import write_archive
from plugins.waiting import patience_s

import nsqtools
import nsqtools.spark
from nsqtools.errors import ConfigurationError
from nsqtools.protocol.frames import WireMessage
from nsqtools.spark.java import find_java, java_home

if TYPE_CHECKING:
    from pyspark.sql import SparkSession


def test_registering_twice_does_no_harm_and_sql_knows_the_archive(
    spark: SparkSession, tmp_path: Path
) -> None:
    write_archive(tmp_path / "clicks.gz", [WireMessage(1, 1, b"%016x" % 1, b"body")])
    nsqtools.spark.register(spark)
    nsqtools.spark.register(spark)

    spark.sql(f"CREATE TEMPORARY VIEW v USING nsq_archive OPTIONS (path '{tmp_path}')")

    try:
        [row] = spark.sql("SELECT topic, cast(body AS string) AS body FROM v").collect()
        assert (row.topic, row.body) == ("clicks", "body")
    finally:
        spark.catalog.dropTempView("v")
    assert "ts_ns" in spark.readStream.format("nsq").load().columns


@pytest.mark.parametrize("source", ["exit 1", 'exec "$NSQ_PYTHON" -S "$@"'])
def test_a_worker_without_nsqtools_is_refused_with_the_remedy(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, source: str
) -> None:
    monkeypatch.setenv("NSQ_PYTHON", sys.executable)
    monkeypatch.delenv("PYTHONPATH", raising=False)
    monkeypatch.chdir(tmp_path)
    worker = tmp_path / "python3"
    worker.write_text(f"#!/bin/sh\n{source}\n")
    worker.chmod(0o700)
    spark = MagicMock()
    spark.sparkContext.pythonExec = str(worker)

    with pytest.raises(ConfigurationError, match=f"{worker}, which cannot import") as caught:
        nsqtools.spark.register(spark)

    assert caught.value.hint.startswith(f"Set PYSPARK_PYTHON={sys.executable} before")


def test_a_worker_that_runs_this_python_or_cannot_be_tried_is_taken() -> None:
    spark = MagicMock()
    for worker in (sys.executable, "no-such-python"):
        spark.sparkContext.pythonExec = worker
        nsqtools.spark.register(spark)
    # a session of Spark Connect has no context to ask
    type(spark).sparkContext = PropertyMock(side_effect=RuntimeError)
    nsqtools.spark.register(spark)

    assert spark.dataSource.register.call_count == 3 * 4


PLAIN_PYSPARK = """
import sys
from pyspark.sql import SparkSession
spark = SparkSession.builder.master("local[1]").config("spark.ui.enabled", "false").getOrCreate()
print(spark.read.format("nsq-archive").load(sys.argv[1]).count())
spark.sql(f"CREATE TEMPORARY VIEW v USING nsq_archive OPTIONS (path '{sys.argv[1]}')")
print(len(spark.table("v").columns), len(spark.readStream.format("nsq").load().columns))
"""


def test_a_plain_pyspark_finds_them_by_itself(spark_env: dict[str, str], tmp_path: Path) -> None:
    write_archive(tmp_path / "clicks.gz", [WireMessage(1, 1, b"%016x" % 1, b"body")])
    # the modules are beside the installed package, or in a checkout below it
    modules = Path(nsqtools.__file__).parent / "spark" / "top_level"
    java = java_home(find_java(os.environ), os.environ, tmp_path / "java")
    path = f"{modules}{os.pathsep}{spark_env['PYTHONPATH']}"
    own = {"PYTHONPATH": path, "PYSPARK_PYTHON": sys.executable, "JAVA_HOME": str(java)}

    done = subprocess.run(
        [sys.executable, "-c", PLAIN_PYSPARK, tmp_path],
        capture_output=True,
        text=True,
        env=spark_env | own,
        timeout=patience_s(60),
        check=False,
    )

    assert done.stdout.split() == ["1", "9", "7"], done.stderr
