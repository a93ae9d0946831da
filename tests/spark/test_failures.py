"""What Spark raises, as the one line that a user gets."""

from __future__ import annotations

import os
import sys
from pathlib import Path
from typing import TYPE_CHECKING
from unittest.mock import MagicMock

import pytest

from nsqtools.errors import ConfigurationError, NotFoundError, NsqError
from nsqtools.spark import session
from nsqtools.spark.failures import SESSION, explain, real_reason, spark_errors
from nsqtools.spark.spark_settings import SparkSettings

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, SparkSession


@pytest.fixture
def failing(spark: SparkSession, spark_settings: SparkSettings) -> Failing:
    return Failing(spark, spark_settings)


class Failing:
    """Runs what fails, in a worker or in Spark itself, and returns the error of ours."""

    def __init__(self, spark: SparkSession, settings: SparkSettings) -> None:
        from pyspark import cloudpickle

        cloudpickle.register_pickle_by_value(sys.modules[__name__])  # workers cannot import tests
        self.spark = spark
        self._settings = settings

    def sql(self, text: str) -> NsqError:
        with pytest.raises(NsqError) as caught, spark_errors(self._settings):
            self.spark.sql(text).collect()
        return caught.value

    def frame(self, make: str, **options: str) -> NsqError:
        with pytest.raises(NsqError) as caught, spark_errors(self._settings):
            self._source(make, options).collect()
        return caught.value

    def stream(self, make: str, checkpoint: Path) -> NsqError:
        frame = self.spark.readStream.format(self._register()).option("fail", make).load()
        sink = frame.writeStream.format("noop").option("checkpointLocation", str(checkpoint))
        with pytest.raises(NsqError) as caught, spark_errors(self._settings):
            sink.start().awaitTermination(60)
        return caught.value

    def _source(self, make: str, options: dict[str, str]) -> DataFrame:
        reader = self.spark.read.format(self._register()).option("fail", make)
        return reader.options(**options).load()

    def _register(self) -> str:
        self.spark.dataSource.register(make_failing_source())
        return "failing"


def make_failing_source() -> type:
    """A data source whose option ``fail`` says where it fails, with an error of ours or another."""
    from pyspark.sql.datasource import (
        DataSource,
        DataSourceReader,
        DataSourceStreamReader,
        InputPartition,
    )

    def fail(here: str, asked: str) -> None:
        if asked == here:
            raise NotFoundError("archive /x is not there", hint="Look elsewhere.")
        if (here, asked) == ("read", "bug"):
            raise ValueError("what nobody thought of")
        if (here, asked) == ("read", "death"):
            os._exit(9)

    class Reader(DataSourceReader):
        def __init__(self, asked: str) -> None:
            self.asked = asked

        def partitions(self) -> list[InputPartition]:
            fail("partitions", self.asked)
            return [InputPartition(0)]

        def read(self, partition: InputPartition) -> object:
            fail("read", self.asked)
            return iter([(1,)])

    class StreamReader(DataSourceStreamReader):
        def __init__(self, asked: str) -> None:
            self.asked = asked

        def initialOffset(self) -> dict[str, int]:
            return {"at": 0}

        def latestOffset(self, start: object = None, limit: object = None) -> dict[str, int]:
            fail("latestOffset", self.asked)
            return {"at": 1}

        def partitions(self, start: object, end: object) -> list[InputPartition]:
            return [InputPartition(0)]

        def read(self, partition: InputPartition) -> object:
            fail("read", self.asked)
            return iter([(1,)])

    class Failing(DataSource):
        @classmethod
        def name(cls) -> str:
            return "failing"

        def schema(self) -> str:
            return "a int"

        def reader(self, schema: object) -> DataSourceReader:
            fail("reader", self.options["fail"])
            return Reader(self.options["fail"])

        def streamReader(self, schema: object) -> DataSourceStreamReader:
            return StreamReader(self.options["fail"])

    return Failing


@pytest.mark.parametrize("where", ["reader", "read"])
def test_an_error_of_ours_in_a_worker_arrives_with_hint_and_category(
    failing: Failing, where: str
) -> None:
    error = failing.frame(where)

    assert str(error) == "archive /x is not there"
    assert error.hint == "Look elsewhere."
    assert error.category == "not_found"


@pytest.mark.parametrize("where", ["latestOffset", "read"])
def test_so_it_does_out_of_a_stream(failing: Failing, where: str, tmp_path: Path) -> None:
    error = failing.stream(where, tmp_path)

    assert (str(error), error.hint) == ("archive /x is not there", "Look elsewhere.")


def test_a_bug_in_a_worker_is_its_last_line_and_names_the_log(
    failing: Failing, spark_settings: SparkSettings
) -> None:
    error = failing.frame("bug")

    assert str(error) == "Spark failed: ValueError: what nobody thought of"
    assert error.hint == f"Spark's log is {spark_settings.log_path}."
    assert spark_settings.log_path.exists()


def test_a_worker_that_died_is_said_to_have(failing: Failing) -> None:
    assert (
        str(failing.frame("death")) == "Spark failed: Python worker exited unexpectedly (crashed)"
    )


@pytest.mark.parametrize(
    ("sql", "kind", "text"),
    [
        ("SELEC 1", ConfigurationError, "Syntax error at or near 'SELEC'"),
        ("SELECT nix FROM range(3)", ConfigurationError, "name `nix` cannot be resolved"),
        ("SELECT * FROM nix", NotFoundError, "The table or view `nix` cannot be found"),
        ("SELECT * FROM parquet.`/nix`", NotFoundError, "/nix"),
        ("SELECT cast('x' AS int)", NsqError, "The value 'x'"),
        ("SELECT raise_error('so')", NsqError, "so"),
    ],
)
def test_what_is_wrong_with_sql_is_one_line(
    failing: Failing, sql: str, kind: type[NsqError], text: str, capfd: pytest.CaptureFixture[str]
) -> None:
    error = failing.sql(sql)

    assert isinstance(error, kind)
    assert text in str(error)
    assert "\n" not in str(error)
    assert "SQLSTATE" not in str(error)
    assert capfd.readouterr() == ("", "")  # pyspark's own loggers write JSON to stderr


JAVA = """An error occurred while calling o131.parquet.
: org.apache.spark.SparkException: Job aborted due to stage failure: Task 0 in stage 2.0 failed
\tat org.apache.spark.x(y.scala:1)
Caused by: org.apache.spark.SparkException: [TASK_WRITE_FAILED] Task failed while writing rows
\tat org.apache.spark.x(y.scala:1)
Caused by: java.io.IOException: No space left on device
\tat org.apache.spark.x(y.scala:1)
Caused by: java.io.EOFException
\tat org.apache.spark.x(y.scala:1)
"""


def test_the_reason_is_the_last_cause_that_gives_one() -> None:
    assert real_reason(JAVA) == "No space left on device"


def test_a_class_that_was_not_found_is_no_reason() -> None:
    text = (
        "An error occurred while calling o1.load.\n"
        ": org.apache.spark.SparkClassNotFoundException: [DATA_SOURCE_NOT_FOUND] Failed to find.\n"
        "\tat x\nCaused by: java.lang.ClassNotFoundException: nsqx.DefaultSource\n"
    )

    assert real_reason(text) == "Failed to find"


def test_a_jvm_that_is_gone_is_said_to_be_and_out_of_memory_where_it_was(tmp_path: Path) -> None:
    log = tmp_path / "spark.log"
    settings = SparkSettings(log_file=log)
    gone = ConnectionRefusedError(111, "Connection refused")

    log.write_text(f"java.lang.OutOfMemoryError: of another session\n{SESSION} at noon\nall well\n")
    assert str(explain(gone, settings)) == "Spark's JVM ended unexpectedly"

    with log.open("a") as file:
        file.write("ERROR Backend: Application has been killed. Reason: Master removed it!\n")
    assert str(explain(gone, settings)).endswith("unexpectedly (Master removed it)")

    with log.open("a") as file:
        file.write("java.lang.OutOfMemoryError: Java heap space\n")
    error = explain(gone, settings)
    assert str(error) == "Spark ran out of memory"
    assert "--driver-memory" in error.hint


def test_errors_of_others_pass_untouched(spark_settings: SparkSettings) -> None:
    with pytest.raises(ZeroDivisionError), spark_errors(spark_settings):
        _ = 1 / 0


class OnlyTheJVMKnows(Exception):
    """As pyspark's errors are: their text is in the JVM."""

    __module__ = "pyspark.errors"

    def __init__(self, jvm: list[str]) -> None:
        self._jvm = jvm

    def __str__(self) -> str:
        assert self._jvm
        return self._jvm[0]


def test_an_error_is_explained_before_the_session_forgets_its_jvm(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    jvm = ["[BAD] the real reason"]
    monkeypatch.setattr("pyspark.SparkContext", MagicMock())
    session_class = MagicMock(getActiveSession=lambda: None)
    monkeypatch.setattr("pyspark.sql.SparkSession", session_class)
    for name in ("find_java", "java_home", "spark_environ", "environment", "start_jvm", "end_jvm"):
        monkeypatch.setattr(session, name, MagicMock())
    monkeypatch.setattr(session, "register", MagicMock())
    monkeypatch.setattr(session, "disconnect", lambda *_: jvm.clear())
    settings = SparkSettings(log_file=tmp_path / "spark.log")

    with pytest.raises(NsqError, match="the real reason"), session.spark_session(settings):
        raise OnlyTheJVMKnows(jvm)


def test_an_error_whose_jvm_is_gone_is_no_fault_of_ours(tmp_path: Path) -> None:
    settings = SparkSettings(log_file=tmp_path / "spark.log")

    assert str(explain(OnlyTheJVMKnows([]), settings)) == "Spark's JVM ended unexpectedly"
