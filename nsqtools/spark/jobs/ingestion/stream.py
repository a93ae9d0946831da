"""The query of an ingestion, and following it until it ends or is to end."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from nsqtools.spark.schema import MESSAGE_DDL

if TYPE_CHECKING:
    from pyspark.sql import SparkSession
    from pyspark.sql.streaming.query import StreamingQuery

POLL_S = 0.2
METRICS = "ingest"


@dataclass(frozen=True, slots=True)
class Source:
    """What is read: a format with its options, and how it is called in messages."""

    name: str
    format: str
    options: Mapping[str, str]


@dataclass(frozen=True, slots=True)
class Sink:
    """Where it goes, and how often: every so many seconds, or once and at an end (None)."""

    output: Path
    checkpoint: Path
    trigger_s: float | None


@dataclass(slots=True)
class Counts:
    """What was ingested. ``lag_s`` is the age of the newest message when its batch ended."""

    rows: int = 0
    batches: int = 0
    body_bytes: int = 0
    rows_per_s: float = 0.0
    lag_s: float | None = None


def start_query(spark: SparkSession, source: Source, sink: Sink) -> StreamingQuery:
    """Start it. The places must have been taken."""
    from pyspark.sql import functions as F

    stream = spark.readStream.format(source.format).schema(MESSAGE_DDL).options(**source.options)
    rows = stream.load().withColumn("date", F.to_date("timestamp"))
    rows = rows.observe(
        METRICS,
        F.count(F.lit(1)).alias("rows"),
        F.sum(F.length("body")).alias("body_bytes"),
        F.max("ts_ns").alias("newest_ns"),
    )
    writer = (
        rows.writeStream.format("parquet")
        .partitionBy("topic", "date")
        .option("compression", "zstd")
        .option("path", str(sink.output.absolute()))
        .option("checkpointLocation", str(sink.checkpoint.absolute()))
    )
    if sink.trigger_s is None:
        return writer.trigger(availableNow=True).start()
    return writer.trigger(processingTime=f"{round(sink.trigger_s * 1000)} milliseconds").start()


class Follower:
    """Counts what a query does; `stop`, on any thread, ends it behind the batch that runs.

    ``for_s`` ends it after so long. ``show`` is called a few times a second.
    """

    def __init__(
        self,
        query: StreamingQuery,
        *,
        for_s: float | None = None,
        show: Callable[[Counts], object] = lambda counts: None,
        monotonic: Callable[[], float] = time.monotonic,
    ) -> None:
        self.counts = Counts()
        self._query = query
        self._show = show
        self._monotonic = monotonic
        self._until_s = None if for_s is None else monotonic() + for_s
        self._stop = threading.Event()
        self._last_batch = -1

    def stop(self) -> None:
        """Ask for the end."""
        self._stop.set()

    def run(self) -> None:
        """Follow the query to its end. Raises what the query failed with."""
        while self._query.isActive:
            self._count()
            self._show(self.counts)
            if self._until_s is not None and self._monotonic() >= self._until_s:
                self._stop.set()
            if self._stop.wait(POLL_S):
                self._end()
        self._query.awaitTermination()
        self._count()

    def _end(self) -> None:
        """Wait for the batch that runs; what a broken one wrote would lie about in the output."""
        batch = self._last_batch
        while self._query.isActive and self._query.status["isTriggerActive"]:
            time.sleep(POLL_S)
            self._count()
            if self._last_batch != batch:
                break
        self._query.stop()

    def _count(self) -> None:
        """Add the batches that have ended since."""
        for progress in self._query.recentProgress:
            if progress["batchId"] <= self._last_batch or not _has_run(progress):
                continue
            self._last_batch = progress["batchId"]
            self._add(progress)

    def _add(self, progress: Any) -> None:
        seen = progress["observedMetrics"][METRICS]
        self.counts.rows += seen["rows"]
        self.counts.body_bytes += seen["body_bytes"] or 0
        self.counts.batches += 1
        took_ms = progress["durationMs"].get("triggerExecution", 0)
        self.counts.rows_per_s = seen["rows"] * 1000 / took_ms if took_ms else 0.0
        if seen["newest_ns"] is not None:
            self.counts.lag_s = max(0.0, (time.time_ns() - seen["newest_ns"]) / 1e9)


def _has_run(progress: Any) -> bool:
    """An idle query reports, too, under the number of the batch that will come."""
    return METRICS in progress["observedMetrics"] and "addBatch" in progress["durationMs"]
