"""Compaction, in Spark and without Java, beside the job that a user would write, on the same files.

The user's job reads the archives with ``spark.read.json`` and an explicit schema, drops duplicates
and writes Parquet by topic and date; nothing is verified. Compaction does all it always does: it
plans, removes the 1 % of duplicates, sorts, and reads back what it wrote. Bodies are JSON of about
180 bytes. Target: 1.8 times the job, both.
"""

from __future__ import annotations

import json
import random
import shutil
import time
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING

from benchmarks.measure import cost
from benchmarks.raw import Row
from plugins.archives import write_archive

from nsqtools.archive.catalog import find_inputs
from nsqtools.archive.compaction import Compaction, RunJobs, Selection, in_processes
from nsqtools.archive.slices import Settings
from nsqtools.protocol.frames import WireMessage
from nsqtools.spark.jobs.compaction import in_tasks
from nsqtools.spark.spark_settings import SparkSettings

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

SETTINGS = SparkSettings("local[2,4]")
JOB = "a job with dropDuplicates"
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


def users_job(spark: SparkSession, archives: Path, output: Path) -> None:
    """What somebody writes who has only Spark: duplicates dropped, nothing verified."""
    from pyspark.sql import functions as F

    rows = spark.read.schema(JSON_DDL).json(f"{archives}/*.gz")
    rows = rows.dropDuplicates(["topic", "nsqd", "id"])
    rows = rows.withColumn("date", F.expr("to_date(timestamp_micros(ts div 1000))"))
    rows.write.option("compression", "zstd").partitionBy("topic", "date").parquet(str(output))


def compact(spark: SparkSession, archives: Path, output: Path) -> None:
    run_compaction(archives, output, in_tasks(spark, SETTINGS))


def without_java(spark: SparkSession, archives: Path, output: Path) -> None:
    run_compaction(archives, output, in_processes(2))


def run_compaction(archives: Path, output: Path, run_jobs: RunJobs) -> None:
    selection = Selection(open_days=True)
    job = Compaction(find_inputs([archives]), output, selection, Settings(parallel=2))
    with job.locked():
        job.plan()
        job.run(run_jobs)
    assert sum(done.duplicates for each in job.work for done in each.done) > 0


def seconds(run: Callable[[], None]) -> float:
    began = time.monotonic()
    run()
    return time.monotonic() - began


def compaction(spark: SparkSession, messages: int, rounds: int) -> Iterator[Row]:
    contestants = {
        JOB: users_job,
        "nsq spark compact": compact,
        "nsq archive compact": without_java,
    }
    with TemporaryDirectory(prefix="compact-") as directory:
        archives, output = Path(directory, "archives"), Path(directory, "output")
        archives.mkdir()
        written = make_archives(archives, messages)
        for number in range(rounds + 1):  # the first warms the JVM up
            for name, contestant in contestants.items():
                figures = cost(partial(contestant, spark, archives, output), written)
                size = sum(path.stat().st_size for path in output.rglob("*.parquet"))
                shutil.rmtree(output)
                if number:
                    yield Row(name, number, {**figures, "row_bytes": size / written})
