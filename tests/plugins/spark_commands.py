"""``nsq spark`` commands in this process, on the session that the tests share.

A JVM takes longer to start than most of these commands run. What only a process shows - signals,
a kill, a terminal - is tested with processes.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

import pytest
from plugins.cli import Result

from nsqtools.cli.commands import spark_compact, spark_ingest, spark_report
from nsqtools.cli.main import main

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

    from nsqtools.services.spark.settings import SparkSettings

NsqSpark = Callable[..., Result]


@pytest.fixture
def nsq_spark(
    spark: SparkSession,
    spark_settings: SparkSettings,
    monkeypatch: pytest.MonkeyPatch,
    capfd: pytest.CaptureFixture[str],
    tmp_path: Path,
) -> NsqSpark:
    """Run ``nsq spark ARGS``: ``nsq_spark("compact", directory, "--output", output)``."""

    from nsqtools.services.spark.failures import spark_errors

    @contextmanager
    def shared(*_: object) -> Iterator[SparkSession]:
        with spark_errors(spark_settings):
            yield spark

    for module in (spark_compact, spark_ingest, spark_report):
        monkeypatch.setattr(module, "open_spark", shared)
    monkeypatch.setenv("HOME", str(tmp_path))

    def run(*arguments: object) -> Result:
        capfd.readouterr()
        status = main(["spark", *map(str, arguments)])
        out, err = capfd.readouterr()
        assert "This is a bug" not in err, err
        return Result(status, out.encode(), err)

    return run
