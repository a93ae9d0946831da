"""``nsq-archive`` beside Spark's own JSON reader, and the latency of both streams.

Read are jsonl archives in gzip, written to Parquet, in one session; all contestants give the same
columns. The stream reads the archive with ``availableNow``, 500,000 rows a batch. Latency is from
publishing to ``foreachBatch``, at 200 messages a second, by ``nsq to-file`` and ``nsq-archive``,
and through ``nsq``. Bodies are JSON of about 180 bytes.

Targets: batch 1.0 times spark.read.json, stream 0.6 times, median latency below 400 ms.
"""

from __future__ import annotations

import shutil
import statistics
import threading
import time
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING

from benchmarks.contestants import NSQ
from benchmarks.measure import running
from benchmarks.raw import Row
from benchmarks.spark_compact import JSON_DDL, MEMBER, body, seconds
from plugins.archives import Writer
from plugins.daemons import GoNsqd

from nsqtools.protocol.frames import WireMessage

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, SparkSession

FILES = 8
BEGIN = 1_790_000_000_000_000_000
BATCH_ROWS = 500_000
RATE = 200  # messages a second
TICK_S = 0.05
TOPIC = "clicks"


def write_topic(
    directory: Path, topic: str, messages: int, files: int, begin_ns: int, each_ns: int
) -> None:
    """Write the messages of a topic into some files, each ``each_ns`` after the one before."""
    writer = Writer(directory, topic=topic)
    for number in range(files):
        begin, end = number * messages // files, (number + 1) * messages // files
        for first in range(begin, end, MEMBER):
            some = range(first, min(first + MEMBER, end))
            writer.write(
                [WireMessage(begin_ns + n * each_ns, 1, b"%016x" % n, body(n)) for n in some]
            )
        writer.finish()


def read_json(spark: SparkSession, archives: Path, output: Path) -> None:
    rows = (
        spark.read.schema(JSON_DDL)
        .json(f"{archives}/*.gz")
        .selectExpr(
            "topic",
            "nsqd",
            "id",
            "timestamp_micros(ts div 1000) AS timestamp",
            "ts AS ts_ns",
            "attempts",
            "coalesce(cast(body as binary), unbase64(body64)) AS body",
            "_metadata.file_path AS file",
        )
    )
    write(rows, output)


def read_archive(spark: SparkSession, archives: Path, output: Path) -> None:
    write(spark.read.format("nsq-archive").load(str(archives)).drop("pos"), output)


def write(rows: DataFrame, output: Path) -> None:
    rows.write.option("compression", "zstd").parquet(str(output))


def stream_archive(spark: SparkSession, archives: Path, output: Path) -> None:
    stream = spark.readStream.format("nsq-archive").option("maxRowsPerTrigger", BATCH_ROWS)
    rows = stream.option("minPartitions", 2).load(str(archives)).drop("pos")
    writer = rows.writeStream.format("parquet").option("compression", "zstd")
    checkpoint = str(output / "checkpoint")
    query = writer.option("checkpointLocation", checkpoint).trigger(availableNow=True)
    query.start(str(output / "data")).awaitTermination()


CONTESTANTS = {
    "spark.read.json": read_json,
    "nsq-archive": read_archive,
    "nsq-archive, stream": stream_archive,
}


def reading(spark: SparkSession, messages: int, rounds: int, for_s: float) -> Iterator[Row]:
    with TemporaryDirectory(prefix="read-") as directory:
        yield from throughput(spark, Path(directory), messages, rounds)
        yield from latency(spark, Path(directory), for_s)


def throughput(spark: SparkSession, place: Path, messages: int, rounds: int) -> Iterator[Row]:
    archives, output = place / "archives", place / "output"
    archives.mkdir()
    write_topic(archives, TOPIC, messages, FILES, BEGIN, 1)
    for number in range(rounds + 1):  # the first warms the JVM up
        for name, contestant in CONTESTANTS.items():
            taken_s = seconds(partial(contestant, spark, archives, output))
            shutil.rmtree(output)
            if number:
                yield Row(name, number, {"rate": messages / taken_s})


def latencies_ms(
    spark: SparkSession, nsqd: GoNsqd, name: str, options: dict[str, str], place: Path, for_s: float
) -> list[float]:
    """The time from nsqd's timestamp of a message to the moment that its batch is collected."""
    found: list[float] = []

    def note(batch: DataFrame, number: int) -> None:
        stamps = batch.select("ts_ns").toArrow()["ts_ns"].to_pylist()
        now_ns = time.time_ns()
        found.extend((now_ns - stamp) / 1e6 for stamp in stamps)

    frame = spark.readStream.format(name).options(**options).load()
    writer = frame.writeStream.option("checkpointLocation", str(place / f"checkpoint-{name}"))
    query = writer.foreachBatch(note).start()
    stop = threading.Event()

    def publish() -> None:
        while not stop.wait(TICK_S):
            nsqd.publish(TOPIC, *[body(n) for n in range(int(RATE * TICK_S))])

    publisher = threading.Thread(target=publish)
    publisher.start()
    try:
        time.sleep(for_s / 2)  # to warm up
        found.clear()
        time.sleep(for_s)
        return list(found)
    finally:
        stop.set()
        publisher.join()
        query.stop()


def latency(spark: SparkSession, place: Path, for_s: float) -> Iterator[Row]:
    archive = place / "live"
    archive.mkdir()
    (place / "nsqd").mkdir()
    with GoNsqd(place / "nsqd") as nsqd:
        for channel in ("archive", "spark"):
            nsqd.create_channel(TOPIC, channel)
        at = ("--nsqd-tcp-address", nsqd.tcp_address, "--output-dir", str(archive))
        to_file = (*NSQ, "to-file", "-t", TOPIC, "-c", "archive", "--gzip", *at)
        with running((*to_file, "--sync-interval", "50ms")):
            through = latencies_ms(spark, nsqd, "nsq-archive", {"path": str(archive)}, place, for_s)
        topic = {"topic": TOPIC, "channel": "spark", "nsqdTcpAddress": nsqd.tcp_address}
        spool = {"spoolDir": str(place / "spool")}
        live = latencies_ms(spark, nsqd, "nsq", {**topic, **spool}, place, for_s)
    for name, values in (("to-file and nsq-archive", through), ("nsq", live)):
        p95 = statistics.quantiles(values, n=20)[-1]
        yield Row(name, 0, {"p50_ms": statistics.median(values), "p95_ms": p95})
