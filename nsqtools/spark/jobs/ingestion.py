"""Ingestion: a live topic or an archive into Parquet or Delta, each message once.

Spark provides exactly once: the source repeats a batch unchanged, and the output knows which
batches it has, by the log of Spark's file sink or by that of the Delta table. What this demands of
the places, `ingest_places` sees to.
"""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from nsqtools.records.prometheus import Metric
from nsqtools.spark.archives.message_columns import MESSAGE_DDL
from nsqtools.spark.jobs.compaction.inventory import DAY_NS
from nsqtools.spark.jobs.delta_sink import DeltaSink
from nsqtools.spark.location import Location, spark_url

if TYPE_CHECKING:
    from pyspark.sql import SparkSession
    from pyspark.sql.streaming.query import StreamingQuery

POLL_S = 0.2
METRICS = "ingest"
DATE_IN_UTC = f"date_from_unix_date(int(ts_ns div {DAY_NS} - if(ts_ns % {DAY_NS} < 0, 1, 0)))"
"""Spark's own functions of a timestamp go by the time zone of the session."""


@dataclass(frozen=True, slots=True)
class IngestSource:
    """What is read: a format with its options, and how it is called in messages."""

    name: str
    format: str
    options: Mapping[str, str]


@dataclass(frozen=True, slots=True)
class IngestSink:
    """Where it goes, and the seconds between batches (None: what is there, then end)."""

    output: Location
    checkpoint: Location
    trigger_s: float | None
    is_delta: bool = False


@dataclass(slots=True)
class IngestCounts:
    """What was ingested. ``lag_s`` is the age of the newest message when its batch ended.

    ``rows_behind`` are waiting in the archive or the spool.
    """

    rows: int = 0
    batches: int = 0
    body_bytes: int = 0
    rows_per_s: float = 0.0
    lag_s: float | None = None
    rows_behind: int = 0
    bytes_behind: int = 0
    seconds_behind: int = 0

    def metrics(self) -> list[Metric]:
        """Return them for Prometheus."""
        counters = {
            "rows": (self.rows, "messages ingested"),
            "batches": (self.batches, "batches ended"),
            "body_bytes": (self.body_bytes, "bytes of the bodies ingested"),
        }
        gauges = {
            "rows_per_second": (self.rows_per_s, "rate of the last batch"),
            "rows_behind": (self.rows_behind, "messages that wait"),
            "bytes_behind": (self.bytes_behind, "compressed bytes that wait"),
            "seconds_behind": (self.seconds_behind, "age of the oldest message that waits"),
        }
        name = "nsq_spark_ingest"
        return [
            *(
                Metric(f"{name}_{x}_total", "counter", t, [({}, n)])
                for x, (n, t) in counters.items()
            ),
            *(Metric(f"{name}_{x}", "gauge", t, [({}, n)]) for x, (n, t) in gauges.items()),
        ]


def start_query(spark: SparkSession, source: IngestSource, sink: IngestSink) -> StreamingQuery:
    """Start it. The places must have been taken."""
    from pyspark.sql import functions as F

    stream = spark.readStream.format(source.format).schema(MESSAGE_DDL).options(**source.options)
    rows = stream.load().withColumn("date", F.expr(DATE_IN_UTC))
    rows = rows.observe(
        METRICS,
        F.count(F.lit(1)).alias("rows"),
        F.sum(F.length("body")).alias("body_bytes"),
        F.max("ts_ns").alias("newest_ns"),
    )
    writer = rows.writeStream.option("checkpointLocation", spark_url(sink.checkpoint))
    if sink.is_delta:
        writer = writer.foreachBatch(DeltaSink(sink.output, sink.checkpoint))
    else:
        writer = writer.format("parquet").partitionBy("topic", "date")
        writer = writer.option("compression", "zstd").option("path", spark_url(sink.output))
    if sink.trigger_s is None:
        return writer.trigger(availableNow=True).start()
    return writer.trigger(processingTime=f"{round(sink.trigger_s * 1000)} milliseconds").start()


class QueryFollower:
    """Counts what a query does. `stop`, from any thread, ends it after the current batch.

    ``for_s`` ends it after that time. ``show`` is called a few times a second.
    """

    def __init__(
        self,
        query: StreamingQuery,
        *,
        for_s: float | None = None,
        show: Callable[[IngestCounts], object] = lambda counts: None,
        monotonic: Callable[[], float] = time.monotonic,
    ) -> None:
        self.counts = IngestCounts()
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
        self._show(self.counts)

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
        lag = _lag(progress["sources"][0]["latestOffset"])
        self.counts.rows_behind = lag.get("rows_behind", 0)
        self.counts.bytes_behind = lag.get("bytes_behind", 0)
        self.counts.seconds_behind = lag.get("seconds_behind", 0)
        if seen["newest_ns"] is not None:
            self.counts.lag_s = max(0.0, (time.time_ns() - seen["newest_ns"]) / 1e9)


def _lag(latest: Any) -> dict[str, int]:
    """The lag that the source reports as its latest offset, which Spark gives as JSON."""
    document = json.loads(latest) if isinstance(latest, str) else latest
    return document if isinstance(document, dict) else {}


def _has_run(progress: Any) -> bool:
    """An idle query reports, too, under the number of the batch that will come."""
    return METRICS in progress["observedMetrics"] and "addBatch" in progress["durationMs"]
