"""``nsq spark compact`` beside Spark's own JSON reader, on the same files, in one session.

    python tests/benchmarks/spark_compact.py [--messages 3000000] [--rounds 3] [--driver-memory 1g]

The baseline reads the archives with ``spark.read.json`` and an explicit schema, and writes Parquet
by topic and date: no duplicate is removed, nothing is verified. Compaction does all it always does:
it plans, removes the 1 % of duplicates, reads back what it wrote, and puts it in place. Bodies are
JSON of about 180 bytes. Target: 0.35 times the baseline.
"""

from __future__ import annotations

import argparse
import json
import random
import shutil
import statistics
import sys
import time
from collections.abc import Callable
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING

sys.path.insert(0, str(Path(__file__).parent.parent))

from plugins.archives import write_archive

from nsqtools.protocol.frames import WireMessage
from nsqtools.spark.jobs.compaction.compacted_output import CompactionOutput
from nsqtools.spark.jobs.compaction.compaction_job import prepare_compaction
from nsqtools.spark.jobs.compaction.compaction_plan import DaySelection
from nsqtools.spark.jobs.compaction.partition_job import ArchiveReading
from nsqtools.spark.session import spark_session
from nsqtools.spark.spark_settings import SparkSettings

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

FILES = 8
MEMBER = 2500
BEGIN = 1_790_000_000_000_000_000  # 2026-09-21
DAY_NS = 86_400 * 10**9 // 3
JSON_DDL = (
    "topic string, nsqd string, id string, ts bigint, attempts int, body string, body64 string"
)


def make_archives(directory: Path, messages: int) -> int:
    """Write them; return the number of messages, one in a hundred of which is there twice."""
    written = 0
    a_file = messages // FILES
    for number in range(FILES):
        members = []
        for first in range(number * a_file, (number + 1) * a_file, MEMBER):
            last = min(first + MEMBER, (number + 1) * a_file)
            member = [
                WireMessage(BEGIN + each * (DAY_NS // messages), 1, b"%016x" % each, body(each))
                for each in range(first, last)
            ]
            member += random.sample(member, len(member) // 100)
            members.append(member)
            written += len(member)
        write_archive(directory / f"clicks.{number}.log.gz", *members)
    return written


def body(number: int) -> bytes:
    return json.dumps(
        {
            "user": random.randrange(1 << 40),
            "url": f"https://example.com/{random.randrange(1000)}/{number}",
            "agent": "Mozilla/5.0 (X11; Linux x86_64) AppleWebKit/537.36",
            "seconds": random.random(),
        }
    ).encode()


def read_json(spark: SparkSession, archives: Path, output: Path) -> None:
    from pyspark.sql import functions as F

    rows = spark.read.schema(JSON_DDL).json(f"{archives}/*.gz")
    rows = rows.select(
        "topic",
        "nsqd",
        "id",
        "attempts",
        F.col("ts").alias("ts_ns"),
        F.expr("timestamp_micros(ts div 1000)").alias("timestamp"),
        F.expr("coalesce(cast(body as binary), unbase64(body64))").alias("body"),
    )
    rows = rows.withColumn("date", F.to_date("timestamp"))
    rows.write.option("compression", "zstd").partitionBy("topic", "date").parquet(str(output))


def compact(spark: SparkSession, archives: Path, output: Path) -> None:
    target = CompactionOutput(output)
    with target.locked():
        job = prepare_compaction(archives, target, DaySelection(), grace_s=0.0, now_s=time.time())
        job.run(spark, ArchiveReading())
    [result] = job.results
    assert result.duplicates_removed > 0


def seconds(run: Callable[[], None]) -> float:
    began = time.monotonic()
    run()
    return time.monotonic() - began


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--messages", type=int, default=3_000_000)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--driver-memory", default="2g")
    arguments = parser.parse_args()
    settings = SparkSettings("local[2,4]", driver_memory=arguments.driver_memory)
    contestants = {"spark.read.json": read_json, "nsq spark compact": compact}
    rates: dict[str, list[float]] = {name: [] for name in contestants}
    with TemporaryDirectory(prefix="compact-") as directory, spark_session(settings) as spark:
        archives, output = Path(directory, "archives"), Path(directory, "output")
        archives.mkdir()
        written = make_archives(archives, arguments.messages)
        for number in range(arguments.rounds + 1):  # the first warms the JVM up
            for name, contestant in contestants.items():
                taken_s = seconds(lambda run=contestant: run(spark, archives, output))  # type: ignore[misc]
                shutil.rmtree(output)
                if number:
                    rates[name].append(written / taken_s)
    medians = {name: statistics.median(values) for name, values in rates.items()}
    for name, values in rates.items():
        figures = f"{medians[name]:>10,.0f}{min(values):>10,.0f}{max(values):>10,.0f}"
        print(f"{name:<20}{figures} rows/s")
    ratio = medians["nsq spark compact"] / medians["spark.read.json"]
    print(f"compaction with deduplication: {ratio:.2f} x spark.read.json (target: 0.35)")


if __name__ == "__main__":
    main()
