"""Parquet published to two nsqd from Spark, beside the same Parquet read and discarded.

The baseline reads the bodies of that Parquet and hands them to Spark's ``noop`` sink. Publishing
writes them to a plain topic of two Go nsqd that run beside it, which keep on disk what does not fit
in memory. ``spark.read.json``, of the same messages as archives, is the yardstick of the other
benchmarks. Bodies are JSON of about 180 bytes. A ledger should not cost much.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack
from functools import partial
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING

from benchmarks.raw import Row
from benchmarks.spark_compact import SETTINGS, make_archives, seconds
from benchmarks.spark_read import read_json
from plugins.daemons import GoNsqd

from nsqtools.spark.session import spark_session

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

TOPIC = "bench"


def publish(spark: SparkSession, parquet: Path, nsqds: list[GoNsqd], ledger: Path | None) -> None:
    options = {
        "topic": TOPIC,
        "nsqdTcpAddress": ",".join(nsqd.tcp_address for nsqd in nsqds),
    }
    if ledger is not None:
        options["ledgerPath"] = str(ledger)
    rows = spark.read.parquet(str(parquet)).select("body")
    rows.write.format("nsq").mode("append").options(**options).save()


def discard(spark: SparkSession, parquet: Path) -> None:
    spark.read.parquet(str(parquet)).select("body").write.format("noop").mode("overwrite").save()


def publishing(messages: int, rounds: int) -> Iterator[Row]:
    with ExitStack() as stack:
        place = Path(stack.enter_context(TemporaryDirectory(prefix="publish-")))
        for name in ("archives", "nsqd-0", "nsqd-1"):
            (place / name).mkdir()
        written = make_archives(place / "archives", messages)
        nsqds = [stack.enter_context(GoNsqd(place / f"nsqd-{number}")) for number in range(2)]
        spark = stack.enter_context(spark_session(SETTINGS))
        for number in range(rounds + 1):  # the first warms the JVM up
            parquet, ledger = place / f"parquet-{number}", place / f"ledger-{number}"
            contestants = {
                "spark.read.json": partial(read_json, spark, place / "archives", parquet),
                "read, discard": partial(discard, spark, parquet),
                "publish": partial(publish, spark, parquet, nsqds, None),
                "publish, ledger": partial(publish, spark, parquet, nsqds, ledger),
            }
            for name, run in contestants.items():
                taken_s = seconds(run)
                if number:
                    yield Row(name, number, {"rate": written / taken_s})
        taken = sum(nsqd.topic_stats(TOPIC)["message_count"] for nsqd in nsqds)
    assert taken == 2 * written * (rounds + 1), "nsqd has not got every message"
