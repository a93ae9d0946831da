"""Errors of Spark as the one line that a user gets."""

import os
from pathlib import Path

import pytest
from plugins.spark import SparkSession

from nsqtools.archive.topic_writer import WriteFailed
from nsqtools.errors import NotFoundError, NsqError
from nsqtools.spark.failures import SESSION, nsq_error_of, real_reason, spark_errors
from nsqtools.spark.spark_settings import SparkSettings


@pytest.mark.parametrize(
    ("how", "text", "hint", "category"),
    [
        ("ours", "archive /x is not there", "Look elsewhere.", "not_found"),
        ("of a module", "cannot write /x (full)", "LOG", "failed"),
        ("bug", "Spark failed: ValueError: what nobody thought of", "LOG", "failed"),
        ("death", "Spark failed: Python worker exited unexpectedly (crashed)", "LOG", "failed"),
    ],
)
def test_an_error_in_a_worker_is_reported_in_one_line(
    spark: SparkSession,
    spark_settings: SparkSettings,
    how: str,
    text: str,
    hint: str,
    category: str,
) -> None:
    def fail(_: int) -> None:
        if how == "ours":
            raise NotFoundError("archive /x is not there", hint="Look elsewhere.")
        if how == "of a module":
            raise WriteFailed("cannot write /x (full)", "full", 1) from OSError("full")
        if how == "bug":
            raise ValueError("what nobody thought of")
        os._exit(9)

    with pytest.raises(NsqError) as caught, spark_errors(spark_settings):
        spark.sparkContext.parallelize([0], 1).map(fail).collect()

    hint = hint.replace("LOG", f"Spark's log is {spark_settings.log_path}.")
    assert (str(caught.value), caught.value.hint, caught.value.category) == (text, hint, category)
    assert spark_settings.log_path.exists()


JAVA = """An error occurred while calling o131.parquet.
: org.apache.spark.SparkException: Job aborted due to stage failure: Task 0 in stage 2.0 failed
\tat org.apache.spark.x(y.scala:1)
Caused by: o.a.s.SparkException: [TASK_WRITE_FAILED] Failed writing rows to file:/x. SQLSTATE: 5
\tat org.apache.spark.x(y.scala:1)
Caused by: java.io.IOException: No space left on device
\tat org.apache.spark.x(y.scala:1)
Caused by: java.io.EOFException
\tat org.apache.spark.x(y.scala:1)
"""


CLASS_NOT_FOUND = """An error occurred while calling o1.load.
: org.apache.spark.SparkClassNotFoundException: [DATA_SOURCE_NOT_FOUND] Failed to find.
\tat x
Caused by: java.lang.ClassNotFoundException: nsqx.DefaultSource
"""


FOREACH_BATCH = """\
[STREAM_FAILED] Query terminated: Return Message: Traceback (most recent call last):
  File "clientserver.py", line 644, in _call_proxy
ValueError: no such day
 SQLSTATE: 39000
Caused by: py4j.Py4JException: Return Message: Traceback (most recent call last):"""


def test_the_reason_is_that_of_the_last_cause_that_has_one() -> None:
    assert real_reason(JAVA) == "No space left on device (writing rows to file:/x)"
    assert real_reason(CLASS_NOT_FOUND) == "Failed to find"
    assert real_reason(FOREACH_BATCH) == "ValueError: no such day"


def test_an_ended_jvm_is_reported_with_the_reason_in_its_log(tmp_path: Path) -> None:
    log = tmp_path / "spark.log"
    settings = SparkSettings(log_file=log)
    refused = ConnectionRefusedError(111, "Connection refused")

    class OnlyTheJVMKnew(Exception):
        __module__ = "pyspark.errors"

        def __str__(self) -> str:
            raise refused

    begin = f"java.lang.OutOfMemoryError: of another session\n{SESSION} at noon\nall well\n"
    log.write_text(begin)
    for error in (refused, OnlyTheJVMKnew()):
        assert str(nsq_error_of(error, settings)) == "Spark's JVM ended unexpectedly"

    log.write_text(f"{begin}ERROR x: Application has been killed. Reason: Master removed it!\n")
    assert str(nsq_error_of(refused, settings)).endswith("unexpectedly (Master removed it)")

    log.write_text(f"{begin}java.lang.OutOfMemoryError: Java heap space\n")
    explained = nsq_error_of(refused, settings)
    assert str(explained) == "Spark ran out of memory"
    assert "--driver-memory" in explained.hint
    # Other errors are not translated.
    with pytest.raises(ZeroDivisionError), spark_errors(settings):
        _ = 1 / 0


def test_a_machine_that_is_too_busy_to_start_a_worker_is_the_reason() -> None:
    error = Exception(
        "[STREAM_FAILED] Query terminated\nCaused by: java.net.SocketTimeoutException: "
        "Timed out while waiting for the Python worker to connect back"
    )
    explained = nsq_error_of(error, SparkSettings())
    assert str(explained) == "Python did not start within the 10 s for which Spark waits"
    assert "too busy" in explained.hint


def test_a_java_error_that_is_not_an_exception_is_reported(
    spark: SparkSession, spark_settings: SparkSettings, tmp_path: Path
) -> None:
    """A class without its dependency raises NoClassDefFoundError in the thread of the query."""
    setting = "spark.sql.streaming.commitProtocolClass"
    spark.conf.set(setting, "org.apache.logging.log4j.core.async.AsyncLogger")
    rows = spark.readStream.format("rate").load()
    writer = rows.writeStream.format("parquet").option("checkpointLocation", str(tmp_path / "cp"))
    reason = "Spark failed: NoClassDefFoundError: com/lmax/disruptor/"
    try:
        with pytest.raises(NsqError, match=reason), spark_errors(spark_settings):
            writer.start(str(tmp_path / "out")).awaitTermination()
    finally:
        spark.conf.unset(setting)
