"""Queries of ``nsq spark sql`` beside the reader's options and Spark's own JSON reader.

    python tests/benchmarks/spark_query.py [--messages 800000] [--rounds 5] [--files 10000]

One session, contestants in turns. A filter in SQL should cost what the same filter costs as options
of the reader, and a query over few columns should cost no more than with ``spark.read.json``. The
archive has four topics in one day, a file for each six hours; bodies are JSON of about 180 bytes.
Then archives of ``--files`` small files are planned: the time, and the number of tasks.

Targets: filter 1.1 times the option, count 1.2 and group 1.0 times spark.read.json; 10,000 files
planned in 3 s, at least as many tasks as cores.
"""

from __future__ import annotations

import argparse
import shutil
import statistics
import sys
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING

sys.path.insert(0, str(Path(__file__).parent.parent))

from benchmarks.spark_compact import JSON_DDL, body, seconds
from plugins.archives import Writer

from nsqtools.protocol.frames import WireMessage
from nsqtools.spark.archives.partitions import plan_batch
from nsqtools.spark.archives.read_settings import ReadSettings
from nsqtools.spark.jobs.sql import NamedView, plan_query
from nsqtools.spark.session import spark_session
from nsqtools.spark.spark_settings import SparkSettings

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, SparkSession

TOPICS = ("clicks", "views", "orders", "errors")
FILES_OF_TOPIC = 4
MEMBER = 2500
BEGIN = 1_789_948_800_000_000_000  # 2026-09-21
DAY_NS = 86_400 * 10**9
FROM = "2026-09-21T20:00:00Z"
SPARK = "spark.read.json"


def make_archives(directory: Path, messages: int) -> None:
    """Write ``messages`` of four topics, spread over a day."""
    of_topic = messages // len(TOPICS)
    step_ns = DAY_NS // of_topic
    for topic in TOPICS:
        writer = Writer(directory, topic=topic)
        for number in range(FILES_OF_TOPIC):
            begin = number * of_topic // FILES_OF_TOPIC
            end = (number + 1) * of_topic // FILES_OF_TOPIC
            for first in range(begin, end, MEMBER):
                some = range(first, min(first + MEMBER, end))
                writer.write(
                    [WireMessage(BEGIN + n * step_ns, 1, b"%016x" % n, body(n)) for n in some]
                )
            writer.finish()


def make_small_files(directory: Path, files: int) -> None:
    """Write small files, with heads, as an archiver does that is restarted again and again.

    Copies of one file, with a head of their own: what is planned are names and indexes.
    """
    writer = Writer(directory, topic="clicks")
    writer.write([WireMessage(BEGIN + n, 1, b"%016x" % n, body(n)) for n in range(20)])
    path = writer.finish()
    index = path.with_name(f".{path.name}.index")
    head, _, lines = index.read_bytes().partition(b"\n")
    for number in range(2, files + 1):
        copy = path.with_name(f"clicks-{number:06d}.log.gz")
        shutil.copyfile(path, copy)
        mine = head.replace(b" 1", b" %d" % number)
        copy.with_name(f".{copy.name}.index").write_bytes(mine + b"\n" + lines)


def sql(text: str, spark: SparkSession, settings: SparkSettings, archives: Path) -> None:
    view = NamedView("archive", "archive", (str(archives),))
    plan_query(spark, settings, [view], text).collect()


def with_options(spark: SparkSession, archives: Path, **options: str) -> DataFrame:
    return spark.read.format("nsq-archive").options(**options).load(str(archives))


def contestants(
    spark: SparkSession, settings: SparkSettings, archives: Path
) -> dict[str, dict[str, Callable[[], object]]]:
    """What is compared: the yardstick first, then ours."""

    def ours(text: str) -> Callable[[], None]:
        return partial(sql, text, spark, settings, archives)

    def by_json() -> DataFrame:
        return spark.read.schema(JSON_DDL).json(f"{archives}/*.gz")

    both = f"topic = 'clicks' AND timestamp >= '{FROM}'"
    return {
        "one topic of four": {
            "option": lambda: (
                with_options(spark, archives, topics="clicks").selectExpr("max(id)").collect()
            ),
            "sql": ours("SELECT max(id) FROM archive WHERE topic = 'clicks'"),
        },
        "last hours of a day": {
            "option": lambda: (
                with_options(spark, archives, since=FROM).selectExpr("max(id)").collect()
            ),
            "sql": ours(f"SELECT max(id) FROM archive WHERE timestamp >= '{FROM}'"),
        },
        "topic and time": {
            "option": lambda: (
                with_options(spark, archives, topics="clicks", since=FROM)
                .selectExpr("max(id)")
                .collect()
            ),
            "sql": ours(f"SELECT max(id) FROM archive WHERE {both}"),
        },
        "count(*)": {
            SPARK: lambda: by_json().count(),
            "sql": ours("SELECT count(*) FROM archive"),
        },
        "group by topic": {
            SPARK: lambda: by_json().groupBy("topic").count().collect(),
            "sql": ours("SELECT topic, count(*) FROM archive GROUP BY topic"),
        },
    }


def queries(settings: SparkSettings, messages: int, rounds: int) -> None:
    with TemporaryDirectory(prefix="query-") as directory, spark_session(settings) as spark:
        archives = Path(directory)
        make_archives(archives, messages)
        print(f"{messages} messages, seconds (medians of {rounds}):", flush=True)
        for query, each in contestants(spark, settings, archives).items():
            taken: dict[str, list[float]] = {name: [] for name in each}
            for number in range(rounds + 1):  # the first warms the JVM up
                for name, run in each.items():
                    taken_s = seconds(run)
                    if number:
                        taken[name].append(taken_s)
            (other, base), (_, mine) = taken.items()
            ratio = statistics.median(one / two for one, two in zip(mine, base, strict=True))
            base_s, mine_s = statistics.median(base), statistics.median(mine)
            print(
                f"{query:<22}{other} {base_s:.2f}  sql {mine_s:.2f}  {ratio:.2f} x {other}",
                flush=True,
            )


def planning(files: int) -> None:
    for count in (1000, files):
        with TemporaryDirectory(prefix="plan-") as directory:
            make_small_files(Path(directory), count)
            began, cpu = time.monotonic(), time.process_time()
            planned = plan_batch(ReadSettings(paths=(directory,)))
            taken_s, cpu_s = time.monotonic() - began, time.process_time() - cpu
        assert sum(len(each.ranges) for each in planned) == count
        print(f"{count} files: {taken_s:.2f} s ({cpu_s:.2f} s of CPU), {len(planned)} tasks")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--messages", type=int, default=800_000)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--files", type=int, default=10_000)
    parser.add_argument("--driver-memory", default="1g")
    arguments = parser.parse_args()
    if arguments.messages:
        settings = SparkSettings("local[2,4]", driver_memory=arguments.driver_memory)
        queries(settings, arguments.messages, arguments.rounds)
    if arguments.files:
        planning(arguments.files)


if __name__ == "__main__":
    main()
