"""Queries of ``nsq spark sql`` beside the reader's options and Spark's own JSON reader.

One session, contestants in turns. A filter in SQL should cost what the same filter costs as options
of the reader, and a query over few columns should cost no more than with ``spark.read.json``. The
archive has four topics in one day, a file for each six hours; bodies are JSON of about 180 bytes.
Then archives of many small files are planned: the time, and the number of tasks.

Targets: filter 1.1 times the option, count 1.2 and group 1.0 times spark.read.json; 10,000 files
planned in 3 s, at least as many tasks as cores.
"""

from __future__ import annotations

import shutil
import time
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING

from benchmarks.raw import Row
from benchmarks.spark_compact import JSON_DDL, SETTINGS, body, seconds
from benchmarks.spark_read import write_topic
from plugins.archives import Writer

from nsqtools.protocol.frames import WireMessage
from nsqtools.spark.archives.partitions import plan_batch
from nsqtools.spark.archives.read_settings import ReadSettings
from nsqtools.spark.jobs.sql import NamedView, plan_query
from nsqtools.spark.session import spark_session

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, SparkSession

TOPICS = ("clicks", "views", "orders", "errors")
FILES_OF_TOPIC = 4
BEGIN = 1_789_948_800_000_000_000  # 2026-09-21
DAY_NS = 86_400 * 10**9
FROM = "2026-09-21T20:00:00Z"
SPARK = "spark.read.json"


def make_archives(directory: Path, messages: int) -> None:
    """Write ``messages`` of four topics, spread over a day."""
    of_topic = messages // len(TOPICS)
    for topic in TOPICS:
        write_topic(directory, topic, of_topic, FILES_OF_TOPIC, BEGIN, DAY_NS // of_topic)


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


def sql(text: str, spark: SparkSession, archives: Path) -> None:
    view = NamedView("archive", "archive", (str(archives),))
    plan_query(spark, SETTINGS, [view], text).collect()


def with_options(spark: SparkSession, archives: Path, **options: str) -> DataFrame:
    return spark.read.format("nsq-archive").options(**options).load(str(archives))


def contestants(spark: SparkSession, archives: Path) -> dict[str, dict[str, Callable[[], object]]]:
    """What is compared: the yardstick first, then ours."""

    def ours(text: str) -> Callable[[], None]:
        return partial(sql, text, spark, archives)

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


def queries(messages: int, rounds: int) -> Iterator[Row]:
    """Seconds of a query, and of what it is compared with in the same round."""
    with TemporaryDirectory(prefix="query-") as directory, spark_session(SETTINGS) as spark:
        make_archives(Path(directory), messages)
        for query, each in contestants(spark, Path(directory)).items():
            for number in range(rounds + 1):  # the first warms the JVM up
                (other, base_s), (_, sql_s) = ((name, seconds(run)) for name, run in each.items())
                if number:
                    figures = {"base": base_s, "sql": sql_s, "ratio": sql_s / base_s}
                    yield Row(f"{query}, {other}", number, figures)


def planning(files: int) -> Iterator[Row]:
    for count in (files // 10, files):
        with TemporaryDirectory(prefix="plan-") as directory:
            make_small_files(Path(directory), count)
            began = time.monotonic()
            planned = plan_batch(ReadSettings(paths=(directory,)))
            taken_s = time.monotonic() - began
        assert sum(len(each.ranges) for each in planned) == count
        yield Row(f"{count:,} files", 0, {"s": taken_s, "tasks": len(planned)})
