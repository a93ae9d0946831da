"""``nsq spark doctor``: check whether Spark works on this machine and its cluster."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import asdict
from typing import TYPE_CHECKING

from nsqtools.cli.options.spark_options import SparkChoice, open_spark
from nsqtools.cli.render.output import ListingForm, write_records
from nsqtools.cli.running.runtime import ExitStatus, Runtime, Session, explain
from nsqtools.errors import NsqError

if TYPE_CHECKING:
    from nsqtools.spark.doctor import Finding

COLUMNS = ("check", "state", "found")


def doctor(*, form: ListingForm, spark: SparkChoice, runtime: Session) -> int:
    """Check Java, the versions of packages, a session of Spark and its executors.

    On a cluster (--master) this runs a small job on its executors. They need Java 17 or newer and
    the same Python with nsqtools[spark] under the path in PYSPARK_PYTHON. The exit status is 1 when
    a check failed.

    Examples:
        nsq spark doctor
        nsq spark doctor --master spark://master:7077
    """
    from nsqtools.spark.doctor import FAILED

    form.check(COLUMNS)
    findings = list(examine(runtime, spark))
    write_records(runtime, COLUMNS, list(map(asdict, findings)), form)
    if not form.is_document:
        for hint in dict.fromkeys(finding.hint for finding in findings if finding.hint):
            runtime.info(f"hint: {hint}")
    has_failed = any(finding.state == FAILED for finding in findings)
    return ExitStatus.FAILED if has_failed else ExitStatus.DONE


def examine(runtime: Runtime, spark: SparkChoice) -> Iterator[Finding]:
    """Check this machine and, if a session starts, the executors."""
    from nsqtools.spark.doctor import FAILED, OK, Finding, check_driver, check_executors

    driver = list(check_driver())
    yield from driver
    if any(finding.state == FAILED for finding in driver):
        return
    settings = spark.settings("nsq spark doctor")
    began_s = runtime.monotonic()
    try:
        with open_spark(runtime, settings) as session:
            started_s = runtime.monotonic() - began_s
            yield Finding("session", OK, f"{settings.master}, started in {started_s:.1f} s")
            yield from check_executors(session)
    except NsqError as error:
        yield Finding("session", FAILED, *explain(error))
