"""``nsq-archive`` beside Spark's own JSON reader, and the latency of both streams.

    python tests/benchmarks/spark_read.py [--messages 3000000] [--rounds 3] [--seconds 15]

Read are jsonl archives in gzip, written to Parquet, in one session; all contestants give the same
columns. The stream reads the archive with ``availableNow``, 500,000 rows a batch. Latency is from
publishing to ``foreachBatch``, at 200 messages a second, by ``nsq to-file`` and ``nsq-archive``,
and through ``nsq``. Bodies are JSON of about 180 bytes.

Targets: batch 1.0 times spark.read.json, stream 0.6 times, median latency below 400 ms.
"""

from __future__ import annotations

import argparse
import shutil
import statistics
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING

sys.path.insert(0, str(Path(__file__).parent.parent))

from benchmarks.measure import running
from benchmarks.spark_compact import JSON_DDL, MEMBER, body, seconds
from plugins.archives import Writer
from plugins.daemons import GoNsqd

from nsqtools.protocol.frames import WireMessage
from nsqtools.spark.session import spark_session
from nsqtools.spark.spark_settings import SparkSettings

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, SparkSession

FILES = 8
BEGIN = 1_790_000_000_000_000_000
BATCH_ROWS = 500_000
RATE = 200  # messages a second
TICK_S = 0.05
TOPIC = "clicks"


def make_archives(directory: Path, messages: int) -> None:
    writer = Writer(directory, topic=TOPIC)
    for number in range(FILES):
        begin, end = number * messages // FILES, (number + 1) * messages // FILES
        for first in range(begin, end, MEMBER):
            some = range(first, min(first + MEMBER, end))
            writer.write([WireMessage(BEGIN + n, 1, b"%016x" % n, body(n)) for n in some])
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


def throughput(spark: SparkSession, place: Path, messages: int, rounds: int) -> None:
    archives, output = place / "archives", place / "output"
    archives.mkdir()
    make_archives(archives, messages)
    rates: dict[str, list[float]] = {name: [] for name in CONTESTANTS}
    for number in range(rounds + 1):  # the first warms the JVM up
        for name, contestant in CONTESTANTS.items():
            taken_s = seconds(lambda run=contestant: run(spark, archives, output))  # type: ignore[misc]
            shutil.rmtree(output)
            if number:
                rates[name].append(messages / taken_s)
    baseline = rates["spark.read.json"]
    for name, values in rates.items():
        # of the same round: the speed of a shared machine drifts
        ratio = statistics.median(
            mine / other for mine, other in zip(values, baseline, strict=True)
        )
        best = max(values) / max(baseline)
        figures = f"{statistics.median(values):>10,.0f}{min(values):>10,.0f}{max(values):>10,.0f}"
        ratios = f"{ratio:6.2f} x spark.read.json in the same round, {best:.2f} x at best"
        print(f"{name:<22}{figures} rows/s {ratios}", flush=True)


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


@contextmanager
def archiving(nsqd: GoNsqd, archive: Path) -> Iterator[subprocess.Popen[bytes]]:
    command = [
        sys.executable,
        "-m",
        "nsqtools",
        "to-file",
        "-t",
        TOPIC,
        "-c",
        "archive",
        "--gzip",
        "--nsqd-tcp-address",
        nsqd.tcp_address,
        "--output-dir",
        str(archive),
        "--sync-interval",
        "50ms",
    ]
    with running(command) as program:
        yield program


def latency(spark: SparkSession, place: Path, for_s: float) -> None:
    archive = place / "live"
    archive.mkdir()
    (place / "nsqd").mkdir()
    with GoNsqd(place / "nsqd") as nsqd:
        for channel in ("archive", "spark"):
            nsqd.create_channel(TOPIC, channel)
        topic = {"topic": TOPIC, "channel": "spark", "nsqdTcpAddress": nsqd.tcp_address}
        with archiving(nsqd, archive):
            through = latencies_ms(spark, nsqd, "nsq-archive", {"path": str(archive)}, place, for_s)
        spool = {"spoolDir": str(place / "spool")}
        live = latencies_ms(spark, nsqd, "nsq", {**topic, **spool}, place, for_s)
    for name, values in (("to-file and nsq-archive", through), ("nsq", live)):
        p50, p95 = statistics.median(values), statistics.quantiles(values, n=20)[-1]
        figures = f"p50 {p50:5.0f} ms, p95 {p95:5.0f} ms, max {max(values):5.0f} ms"
        print(f"latency, {name:<24} {figures} ({len(values)} messages)", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--messages", type=int, default=3_000_000)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--seconds", type=float, default=15.0)
    parser.add_argument("--driver-memory", default="2g")
    arguments = parser.parse_args()
    settings = SparkSettings("local[2,4]", driver_memory=arguments.driver_memory)
    with TemporaryDirectory(prefix="read-") as directory, spark_session(settings) as spark:
        if arguments.messages:
            throughput(spark, Path(directory), arguments.messages, arguments.rounds)
        if arguments.seconds:
            latency(spark, Path(directory), arguments.seconds)


if __name__ == "__main__":
    main()
