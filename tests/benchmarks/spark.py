"""Measurements in a Spark session, compared with jobs of plain Spark.

Reading compares ``nsq-archive`` with Spark's own JSON reader, both written to Parquet with the same
columns, and as a stream. Latency is from publishing to ``foreachBatch``, at 200 messages a second.

Compaction is complete, also without Java: it plans, removes the 1 % of duplicates, sorts, and reads
its output back. The user's job drops duplicates and writes Parquet.

Publishing writes the bodies of a Parquet file to a plain topic of two Go nsqd, which keep on disk
the messages that do not fit in memory. It is compared with Spark's ``noop`` sink for the same rows.
"""

from __future__ import annotations

import shutil
import statistics
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from functools import partial
from itertools import count
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING

from benchmarks.contestants import NSQ
from benchmarks.logs import JSON_DDL, body, make_logs
from benchmarks.measure import Figures, in_turns, running
from benchmarks.parts import errors_as_rows
from benchmarks.raw import Row
from plugins.daemons import GoNsqd

from nsqtools.archive.compaction import Compaction
from nsqtools.archive.compaction_jobs import RunJobs, in_parallel
from nsqtools.archive.compaction_plan import Selection
from nsqtools.archive.finding import find_inputs
from nsqtools.archive.landing import Lander
from nsqtools.archive.place import LocalPlace
from nsqtools.archive.slices import Settings
from nsqtools.archive.table_writer import TablePlan
from nsqtools.spark.jobs.sql import NamedView, plan_query
from nsqtools.spark.session import in_tasks, spark_session
from nsqtools.spark.spark_settings import SparkSettings

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, SparkSession

SETTINGS = SparkSettings("local[2,4]")
FILES = 8
BATCH_ROWS = 500_000
RATE = 200  # messages a second
TICK_S = 0.05
JSON_COLUMNS = dict(column.split() for column in JSON_DDL.split(", "))
TOPIC = "clicks"
TOPICS = ("clicks", "views", "orders", "errors")
FROM = "2026-09-21T20:00:00Z"
JSON = "`spark.read.json`"
HOURS = "SELECT topic, date_trunc('hour', timestamp) AS hour, count(*) AS n FROM {} GROUP BY ALL"
GROUP = f"SELECT topic, CAST(hour AS STRING), n FROM ({HOURS})"


def beside_spark(messages: int, rounds: int) -> Iterator[Row]:
    with spark_session(SETTINGS) as spark:
        yield from errors_as_rows("reading", reading(spark, messages // 2, 2))
        yield from errors_as_rows("latency", latency(spark, 5.0))
        yield from queries(spark, 3 * messages, rounds)
        yield from compaction(spark, messages, rounds)


def by_json(spark: SparkSession, archives: Path) -> DataFrame:
    return spark.read.schema(JSON_DDL).json(f"{archives}/*.gz")


def write(rows: DataFrame, output: Path) -> None:
    rows.write.mode("overwrite").option("compression", "zstd").parquet(str(output))


def reading(spark: SparkSession, messages: int, rounds: int) -> Iterator[Row]:
    with TemporaryDirectory(prefix="read-") as place:
        archives, output, numbers = Path(place, "archives"), Path(place, "output"), count()
        archives.mkdir()
        make_logs(archives, messages, FILES)

        def stream() -> None:
            place = output / str(next(numbers))
            read = spark.readStream.format("nsq-archive").option("maxRowsPerTrigger", BATCH_ROWS)
            rows = read.option("minPartitions", 2).load(str(archives)).drop("pos")
            writer = rows.writeStream.format("parquet").option("compression", "zstd")
            writer = writer.option("checkpointLocation", f"{place}/checkpoint")
            writer.trigger(availableNow=True).start(f"{place}/data").awaitTermination()

        archive = partial(spark.read.format("nsq-archive").load, str(archives))
        contestants: dict[str, Callable[[], None]] = {
            JSON: lambda: read_json(spark, archives, output),
            "`nsq-archive`, batch": lambda: write(archive().drop("pos"), output),
            "`nsq-archive`, stream": stream,
        }
        yield from in_turns(contestants, messages, rounds)


def read_json(spark: SparkSession, archives: Path, output: Path) -> None:
    """Read JSON lines into the columns of ``nsq-archive``."""
    body = "coalesce(cast(body as binary), unbase64(body64)) AS body"
    times = ("timestamp_micros(ts div 1000) AS timestamp", "ts AS ts_ns")
    names = ("topic", "nsqd", "id", *times, "attempts", body, "_metadata.file_path AS file")
    write(by_json(spark, archives).selectExpr(*names), output)


def latency(spark: SparkSession, for_s: float) -> Iterator[Row]:
    with TemporaryDirectory(prefix="latency-") as directory:
        place = Path(directory)
        archive = place / "live"
        archive.mkdir()
        (place / "nsqd").mkdir()
        with GoNsqd(place / "nsqd") as nsqd:
            for channel in ("archive", "spark"):
                nsqd.create_channel(TOPIC, channel)
            at = ("--nsqd-tcp-address", nsqd.tcp_address, "--output-dir", str(archive))
            to_file = (*NSQ, "to-file", "-t", TOPIC, "-c", "archive", "--gzip", *at)
            files = spark.readStream.format("nsq-archive").option("path", str(archive))
            with running((*to_file, "--sync-interval", "50ms")):
                waited = latencies_ms(files.load(), nsqd, place / "checkpoint-archive", for_s)
                yield Row("to-file and nsq-archive", 0, waited)
            topic = {"topic": TOPIC, "channel": "spark", "nsqdTcpAddress": nsqd.tcp_address}
            live = spark.readStream.format("nsq").options(spoolDir=str(place / "spool"), **topic)
            yield Row("nsq", 0, latencies_ms(live.load(), nsqd, place / "checkpoint-nsq", for_s))


def latencies_ms(frame: DataFrame, nsqd: GoNsqd, checkpoint: Path, for_s: float) -> Figures:
    """The time from nsqd's timestamp of a message until its batch is collected."""
    latencies: list[float] = []

    def note(batch: DataFrame, number: int) -> None:
        stamps = batch.select("ts_ns").toArrow()["ts_ns"].to_pylist()
        now_ns = time.time_ns()
        latencies.extend((now_ns - stamp) / 1e6 for stamp in stamps)

    writer = frame.writeStream.option("checkpointLocation", str(checkpoint))
    query = writer.foreachBatch(note).start()
    stop = threading.Event()

    def publish() -> None:
        while not stop.wait(TICK_S):
            nsqd.publish(TOPIC, *[body(n) for n in range(int(RATE * TICK_S))])

    publisher = threading.Thread(target=publish)
    publisher.start()
    try:
        time.sleep(for_s / 2)  # to warm up
        latencies.clear()
        time.sleep(for_s)
        p95 = statistics.quantiles(latencies, n=20)[-1]
        return {"p50_ms": statistics.median(latencies), "p95_ms": p95}
    finally:
        stop.set()
        publisher.join()
        query.stop()


def queries(spark: SparkSession, messages: int, rounds: int) -> Iterator[Row]:
    """Query a table that `Lander` made of finished logs, with its defaults."""
    with TemporaryDirectory(prefix="nsq-lake-") as place:
        logs, json, lake, output = (Path(place, name) for name in ("logs", "json", "lake", "out"))
        logs.mkdir()
        make_logs(logs, messages, 4)
        shutil.copytree(logs, json)
        Lander(TablePlan(str(lake), False, "web1"), logs).land(sorted(logs.glob("*.log.gz")))
        of_table = partial(spark.read.parquet, str(lake))
        contestants: dict[str, Callable[[], None]] = {
            "GROUP BY, spark.read.json": lambda: _group(spark, _timed(by_json(spark, json))),
            "scan, spark.read.json": lambda: write(_timed(by_json(spark, json)), output),
            "GROUP BY topic, hour in Spark": lambda: _group(spark, of_table()),
            "full scan into Parquet in Spark": lambda: write(of_table(), output),
            "the same in DuckDB": lambda: _by_duckdb(lake),
        }
        yield from in_turns(contestants, messages, rounds)


def _timed(rows: DataFrame) -> DataFrame:
    from pyspark.sql import functions as F

    return rows.withColumn("timestamp", F.expr("timestamp_micros(ts div 1000)"))


def _group(spark: SparkSession, rows: DataFrame) -> None:
    rows.createOrReplaceTempView("messages")
    assert len(spark.sql(GROUP.format("messages")).collect()) == 24


def _by_duckdb(lake: Path) -> None:
    import duckdb

    files = f"read_parquet('{lake}/*/*/*.parquet', hive_partitioning = true)"
    assert len(duckdb.sql(GROUP.format(files)).fetchall()) == 24


def _compact_by_duckdb(archives: Path, output: Path) -> None:
    import duckdb

    columns = "{" + ", ".join(f"{name}: '{kind}'" for name, kind in JSON_COLUMNS.items()) + "}"
    logs = f"read_json('{archives}/*.log.gz', format='newline_delimited', columns={columns})"
    select = f"""SELECT DISTINCT ON (topic, nsqd, id) * EXCLUDE ts, ts AS ts_ns,
        make_timestamp_ns(ts)::TIMESTAMP AS timestamp, CAST(timestamp AS DATE) AS date
        FROM {logs}"""
    options = "FORMAT parquet, COMPRESSION zstd, PARTITION_BY (topic, date)"
    with duckdb.connect(config={"threads": 2}) as database:
        database.sql(f"COPY ({select}) TO '{output}' ({options})")


def _compact_by_polars(archives: Path, output: Path) -> None:
    import polars

    kinds = {"bigint": polars.Int64, "int": polars.Int32, "string": polars.String}
    schema = {name: kinds[kind] for name, kind in JSON_COLUMNS.items()}
    logs = [polars.scan_ndjson(path, schema=schema) for path in sorted(archives.glob("*.log.gz"))]
    time_of = polars.from_epoch("ts", "ns")
    rows = polars.concat(logs).unique(["topic", "nsqd", "id"]).sort("ts")
    rows = rows.with_columns(timestamp=time_of.cast(polars.Datetime("us")), date=time_of.dt.date())
    output.mkdir()
    rows.collect().write_parquet(output, compression="zstd", partition_by=["topic", "date"])


def compaction(spark: SparkSession, messages: int, rounds: int) -> Iterator[Row]:
    with TemporaryDirectory(prefix="compact-") as place:
        archives, output = Path(place, "archives"), Path(place, "output")
        archives.mkdir()
        written = make_logs(archives, messages, FILES, hours=8, doubled=0.01)

        def into(run: Callable[[], None]) -> Figures:
            shutil.rmtree(output, ignore_errors=True)
            run()
            size = sum(path.stat().st_size for path in output.rglob("*.parquet"))
            return {"row_bytes": size / written}

        def compact(run_jobs: RunJobs) -> None:
            selection = Selection(open_days=True)
            job = Compaction(
                find_inputs([LocalPlace(archives)]),
                LocalPlace(output),
                selection,
                Settings(parallel=2),
            )
            with job.locked():
                job.plan()
                job.run(run_jobs)
            assert sum(done.duplicates for task in job.work for done in task.results) > 0

        def users_job() -> None:
            from pyspark.sql import functions as F

            rows = by_json(spark, archives).dropDuplicates(["topic", "nsqd", "id"])
            rows = rows.withColumn("date", F.expr("to_date(timestamp_micros(ts div 1000))"))
            writer = rows.write.option("compression", "zstd").partitionBy("topic", "date")
            writer.parquet(str(output))

        contestants = {
            "a job with dropDuplicates": partial(into, users_job),
            "`nsq spark compact`": partial(into, partial(compact, in_tasks(spark, SETTINGS))),
            "`nsq archive compact`": partial(into, partial(compact, in_parallel(2))),
            "the same in DuckDB, not verified": partial(
                into, partial(_compact_by_duckdb, archives, output)
            ),
            "the same in Polars, not verified": partial(
                into, partial(_compact_by_polars, archives, output)
            ),
        }
        yield from in_turns(contestants, written, rounds)


def sql_queries(messages: int, rounds: int) -> Iterator[Row]:
    """Query four topics of one day, with a file for each six hours."""
    with TemporaryDirectory(prefix="query-") as place, spark_session(SETTINGS) as spark:
        for topic in TOPICS:
            make_logs(Path(place), messages // len(TOPICS), 4, topic=topic)
        view = NamedView("archive", "archive", (Path(place),))

        def with_options(**options: str) -> None:
            rows = spark.read.format("nsq-archive").options(**options).load(place)
            rows.selectExpr("max(id)").collect()

        def ours(what: str) -> Callable[[], object]:
            return lambda: plan_query(spark, SETTINGS, [view], f"SELECT {what}").collect()

        rows = by_json(spark, Path(place))
        topic, since = "topic = 'clicks'", f"timestamp >= '{FROM}'"
        contestants: dict[str, Callable[[], object]] = {
            "one topic of four, the option": lambda: with_options(topics="clicks"),
            "one topic of four, by SQL": ours(f"max(id) FROM archive WHERE {topic}"),
            "last hours of a day, the option": lambda: with_options(since=FROM),
            "last hours of a day, by SQL": ours(f"max(id) FROM archive WHERE {since}"),
            "topic and time, the option": lambda: with_options(topics="clicks", since=FROM),
            "topic and time, by SQL": ours(f"max(id) FROM archive WHERE {topic} AND {since}"),
            f"count(*), {JSON}": rows.count,
            "count(*), by SQL": ours("count(*) FROM archive"),
            f"group by topic, {JSON}": lambda: rows.groupBy("topic").count().collect(),
            "group by topic, by SQL": ours("topic, count(*) FROM archive GROUP BY topic"),
        }
        yield from in_turns(contestants, messages, rounds)


def publishing(messages: int, rounds: int) -> Iterator[Row]:
    with ExitStack() as stack:
        place = Path(stack.enter_context(TemporaryDirectory(prefix="publish-")))
        for name in ("archives", "nsqd-0", "nsqd-1"):
            (place / name).mkdir()
        written = make_logs(place / "archives", messages, FILES)
        nsqds = [stack.enter_context(GoNsqd(place / f"nsqd-{number}")) for number in range(2)]
        spark = stack.enter_context(spark_session(SETTINGS))
        read_json(spark, place / "archives", place / "parquet")
        numbers = count()

        def publish(**options: str) -> None:
            addresses = ",".join(nsqd.tcp_address for nsqd in nsqds)
            options |= {"topic": "bench", "nsqdTcpAddress": addresses}
            bodies().write.format("nsq").mode("append").options(**options).save()

        def bodies() -> DataFrame:
            return spark.read.parquet(str(place / "parquet")).select("body")

        def discard() -> None:
            bodies().write.format("noop").mode("overwrite").save()

        def with_a_ledger() -> None:
            publish(ledgerPath=str(place / f"ledger-{next(numbers)}"))

        contestants: dict[str, Callable[[], None]] = {
            "Parquet read, discarded": discard,
            "the same, published": publish,
            "and noted in a ledger": with_a_ledger,
        }
        yield from in_turns(contestants, written, rounds)
        published = sum(nsqd.topic_stats("bench")["message_count"] for nsqd in nsqds)
    assert published == 2 * written * (rounds + 1), "nsqd has not got every message"
