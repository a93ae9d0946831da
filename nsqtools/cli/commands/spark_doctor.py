"""``nsq spark doctor``: why Spark would not work here."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import asdict
from typing import TYPE_CHECKING, Annotated, Any

from typer import Option

from nsqtools.cli.options.connection import (
    DEFAULT_NSQD_HTTP_ADDRESS,
    ClusterConnection,
    ClusterSettings,
)
from nsqtools.cli.options.spark_options import place
from nsqtools.cli.options.spark_session import SparkChoice, SparkOptions, open_spark
from nsqtools.cli.render.output import ListingForm, write_json, write_listing
from nsqtools.cli.running.ends import ExitStatus, explain
from nsqtools.cli.running.runtime import Runtime, Session
from nsqtools.errors import NsqError

if TYPE_CHECKING:
    from nsqtools.spark.doctor import Finding
    from nsqtools.spark.location import Location

SharedDir = Annotated[
    Any,  # a Location or None
    Option(
        "--shared-dir",
        parser=place,
        metavar="DIR",
        help="Check that the driver and all executors can write here; also s3://BUCKET/PREFIX.",
    ),
]


def doctor(
    shared_dir: SharedDir = None,
    *,
    form: ListingForm,
    cluster: ClusterConnection,
    spark: SparkOptions,
    runtime: Session,
) -> int:
    """Check Java, versions, executors, the shared directory and nsqd.

    On a cluster (--master) this runs a small job on its executors. They need Java 17 or newer, the
    same Python with nsqtools[spark] under the path in PYSPARK_PYTHON, and archives, spools,
    checkpoints and output under one path that all share. The exit status is 1 when a check failed.

    Examples:
        nsq spark doctor --shared-dir /mnt/nsq
        nsq spark doctor --master spark://master:7077 --lookupd-http-address lookup:4161
    """
    from nsqtools.spark.doctor import FAILED

    findings = [*examine(runtime, spark, shared_dir), *examine_nsqds(cluster)]
    if form.is_document:
        write_json(runtime, [asdict(each) for each in findings], indent=2)
    else:
        rows = [(each.check, each.state, each.found) for each in findings]
        write_listing(runtime, ("check", "state", "found"), rows, form)
        for hint in dict.fromkeys(each.hint for each in findings if each.hint):
            runtime.tell(f"hint: {hint}")
    has_failed = any(each.state == FAILED for each in findings)
    return ExitStatus.FAILED if has_failed else ExitStatus.DONE


def examine(runtime: Runtime, spark: SparkChoice, shared_dir: Location | None) -> Iterator[Finding]:
    """This machine and, when a session can start, the executors."""
    from nsqtools.spark.doctor import FAILED, OK, Finding, check_driver, check_executors
    from nsqtools.spark.location import absolute

    here = list(check_driver())
    yield from here
    if any(each.state == FAILED for each in here):
        return
    places = () if shared_dir is None else (absolute(shared_dir),)
    settings = spark.settings("nsq spark doctor", places)
    began_s = runtime.monotonic()
    try:
        with open_spark(runtime, settings) as session:
            started_s = runtime.monotonic() - began_s
            yield Finding("session", OK, f"{settings.master}, started in {started_s:.1f} s")
            yield from check_executors(session, *(places or (None,)))
    except NsqError as error:
        yield Finding("session", FAILED, *explain(error))


def examine_nsqds(cluster: ClusterSettings) -> Iterator[Finding]:
    """The nsqd that were named; where none was, the one of this machine if there is one."""
    from nsqtools.spark.doctor import FAILED, Finding, check_nsqds

    try:
        with cluster.open() as opened:
            yield from check_nsqds(opened)
    except NsqError as error:
        if cluster.connection.nsqd_http_addresses != (DEFAULT_NSQD_HTTP_ADDRESS,):
            yield Finding("nsqd", FAILED, *explain(error))
