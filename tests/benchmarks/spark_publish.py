"""Parquet published to two nsqd from Spark, beside the same Parquet read and discarded.

    python tests/benchmarks/spark_publish.py [--messages 2000000] [--rounds 3]

The baseline reads the bodies of that Parquet and hands them to Spark's ``noop`` sink. Publishing
writes them to a plain topic of two nsqd that run beside it, which keep what does not fit in memory
on disk: the Go nsqd, or the embedded one where that is missing. ``spark.read.json``, of the same
messages as archives, is shown as the yardstick of the other benchmarks. Bodies are JSON of about
180 bytes. With a ledger it should not be much less than without.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import time
from contextlib import ExitStack
from functools import partial
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING

sys.path.insert(0, str(Path(__file__).parent.parent))

from benchmarks.spark_compact import make_archives, read_json
from plugins.daemons import GO_PROGRAMS, GoNsqd
from plugins.embedded import EmbeddedServer
from plugins.http_api import Nsqd

from nsqtools.spark.session import spark_session
from nsqtools.spark.spark_settings import SparkSettings

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

TOPIC = "bench"
BASELINE = "read, discard"


def start_nsqd(stack: ExitStack) -> Nsqd:
    """An nsqd until the stack ends."""
    directory = Path(stack.enter_context(TemporaryDirectory(prefix="nsqd-")))
    nsqd = GoNsqd(directory) if (GO_PROGRAMS / "nsqd").exists() else EmbeddedServer(directory)
    nsqd.start()
    stack.callback(nsqd.kill)
    return nsqd


def publish(spark: SparkSession, parquet: Path, nsqds: list[Nsqd], ledger: Path | None) -> None:
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


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--messages", type=int, default=2_000_000)
    parser.add_argument("--rounds", type=int, default=3)
    arguments = parser.parse_args()
    rates: dict[str, list[float]] = {}
    with ExitStack() as stack:
        directory = Path(stack.enter_context(TemporaryDirectory(prefix="publish-")))
        archives = directory / "archives"
        archives.mkdir()
        written = make_archives(archives, arguments.messages)
        nsqds = [start_nsqd(stack), start_nsqd(stack)]
        spark = stack.enter_context(spark_session(SparkSettings("local[2,4]")))
        for number in range(arguments.rounds + 1):  # the first warms the JVM up
            parquet = directory / f"parquet-{number}"
            contestants = {
                "spark.read.json": partial(read_json, spark, archives, parquet),
                BASELINE: partial(discard, spark, parquet),
                "publish": partial(publish, spark, parquet, nsqds, None),
                "publish, ledger": partial(
                    publish, spark, parquet, nsqds, directory / f"ledger-{number}"
                ),
            }
            for name, run in contestants.items():
                began = time.monotonic()
                run()
                if number:
                    rates.setdefault(name, []).append(written / (time.monotonic() - began))
        taken = sum(nsqd.topic_stats(TOPIC)["message_count"] for nsqd in nsqds)
    assert taken == 2 * written * (arguments.rounds + 1), "nsqd has not got every message"
    medians = {name: statistics.median(values) for name, values in rates.items()}
    for name, values in rates.items():
        figures = f"{medians[name]:>10,.0f}{min(values):>10,.0f}{max(values):>10,.0f}"
        print(f"{name:<20}{figures} rows/s")
    for name in ("publish", "publish, ledger"):
        ratio, other = (medians[name] / medians[each] for each in (BASELINE, "spark.read.json"))
        print(f"{name}: {ratio:.2f} x {BASELINE}, {other:.2f} x spark.read.json")


if __name__ == "__main__":
    main()
