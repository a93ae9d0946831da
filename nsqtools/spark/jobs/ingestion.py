"""Ingestion: a live topic or an archive into Parquet or Delta, each message once.

Spark provides exactly-once delivery: the source repeats a batch unchanged, and the output records
the number of its last batch (`table_sink`). This requires that output and checkpoint stay together,
which Spark does not check. It numbers batches in the checkpoint, and the sink skips the numbers
that the output has. A new checkpoint with an old output would skip its first batches, and an old
checkpoint with a new output would begin in the middle: messages would be lost silently. So both are
marked with one identity (`mark_directories`) and locked for one run, and any other combination is
refused, as is a place that was restored from a copy and is older than the other (`refuse_older`).

Trap: when this process is killed, its JVM survives it for a moment, and its tasks may still write
files. So the JVM inherits the lock of the checkpoint, which is released only when both have ended.

0.3.0 wrote Parquet with Spark's own sink, whose log (``_spark_metadata``) has the valid files. Such
an output becomes a plain folder of Parquet: the number of its last batch is recorded, files that
are not in the log are removed, and then the log itself is (`_adopt_files`, `IngestRun.start`).
"""

from __future__ import annotations

import json
import re
import threading
import time
import uuid
from collections.abc import Callable, Collection, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field, replace
from typing import Any, NamedTuple

from pyspark.sql import SparkSession
from pyspark.sql import functions as F
from pyspark.sql.streaming.query import StreamingQuery

from nsqtools.archive.delta import INGESTED, SINK_LOG, refuse_other_form
from nsqtools.archive.finding import committed_names
from nsqtools.archive.place import Place, PlaceLock, refuse_nested, translating_errors
from nsqtools.archive.table_writer import TablePlan
from nsqtools.client.change_log import ChangeLog
from nsqtools.errors import ConfigurationError, OutputError
from nsqtools.protocol.text import load_json
from nsqtools.records.envelope import BodyKind
from nsqtools.records.prometheus import Metric, metric_of
from nsqtools.spark.archives.damage import ArchiveDamage, read_damage
from nsqtools.spark.archives.read_settings import BYTES, Bodies
from nsqtools.spark.jobs.table_sink import (
    BEGUN_NOTE,
    NOTE,
    TableSink,
    encode_note,
    finish_batch,
    last_number,
    query_id,
    remove_staged,
)
from nsqtools.spark.pyspark_internals import delete_folder, struct_of

CHECKPOINT_MARK = "nsq-ingest.json"
LOCK = "nsq-ingest.lock"
BEGUN, COMMITS = "offsets", "commits"  # Spark's logs of the batches that began, and that ended.


@dataclass(frozen=True, slots=True)
class IngestMark:
    """The mark of an output and its checkpoint, with a random ``id``.

    ``body`` is the kind of bodies. Versions that wrote only bytes had none. 0.3.0 recorded the
    columns in ``fields``.
    """

    id: str
    source: str
    output: str
    checkpoint: str
    body: str = ""
    fields: Mapping[str, Any] | None = None


class IngestPlaces(NamedTuple):
    """The places of a query, and the plan of its tables.

    With tables of topics the output is the folder above them.
    """

    output: Place
    checkpoint: Place
    plan: TablePlan

    @property
    def source_bodies(self) -> Bodies:
        """The columns of bodies in the source: the sink adds those of fields."""
        return BYTES if self.plan.body is BodyKind.binary else Bodies(BodyKind.string)

    @property
    def damage(self) -> Place:
        """Where tasks report the archives that they cannot read."""
        return self.checkpoint / "damage"


@contextmanager
def lock_directories(source: str, places: IngestPlaces) -> Iterator[tuple[PlaceLock, IngestPlaces]]:
    """Mark and lock two places, and remove the leftovers of interrupted batches before and after.

    Yields the lock, with the descriptors that the JVM must inherit (`SparkSettings.inherited`), and
    the places as `mark_directories` returns them. Raises `ConfigurationError` and `OutputError`.
    """
    places = mark_directories(source, places)
    with places.checkpoint.lock(LOCK) as lock:
        remove_leftovers(places)
        yield lock, places
        # Without the lock, the files of another run's batch would look like leftovers.
        lock.check()
        remove_leftovers(places)


def mark_directories(source: str, places: IngestPlaces) -> IngestPlaces:
    """Create and mark two places for ``source``, or check that they have its mark.

    Returns the places with the kind of bodies that the output has, which an earlier version may
    have chosen. Raises `ConfigurationError` if they belong to another job, and `OutputError`.
    """
    output, checkpoint = places.output.absolute(), places.checkpoint.absolute()
    kind = places.plan.body
    refuse_nested("--output", output, checkpoint)
    with translating_errors("use", output):
        mark = _read_mark(checkpoint, CHECKPOINT_MARK)
        output_mark = _read_mark(output, INGESTED)
        if mark is None:
            _refuse_foreign(output, checkpoint, output_mark)
            urls = str(output), str(checkpoint)
            mark = IngestMark(uuid.uuid4().hex, source, *urls, kind.value)
            # A kill between the two leaves an unmarked, empty output, which is marked later.
            _write_mark(checkpoint, CHECKPOINT_MARK, mark)
            _write_mark(output, INGESTED, mark)
            return places
        if mark.source != source:
            raise ConfigurationError(
                f"the checkpoint {checkpoint} belongs to {mark.source}, not to {source}",
                hint="Each source needs its own checkpoint and output.",
            )
        if mark.output != str(output):
            raise ConfigurationError(
                f"the checkpoint {checkpoint} belongs to {mark.output}, not to {output}",
                hint="Spark's log of an output has its path: leave it there, or start both over.",
            )
        is_unused = not _is_used(output) and not _is_used(checkpoint, BEGUN)
        if output_mark is None and is_unused:
            _write_mark(output, INGESTED, mark)
        elif output_mark is None or output_mark.id != mark.id:
            raise ConfigurationError(
                f"{output} is not the output that was written with the checkpoint {checkpoint}",
                hint="Restore it, or start with a new checkpoint and a new output.",
            )
        if not mark.body and kind is not BodyKind.json:
            return places._replace(plan=replace(places.plan, body=BodyKind.binary))
        _refuse_other_bodies(mark, kind)
        return places


def _refuse_other_bodies(mark: IngestMark, kind: BodyKind) -> None:
    of_output = mark.body or BodyKind.binary.value
    if kind.value != of_output:
        raise ConfigurationError(
            f"bodies in {mark.output} are {of_output}, not {kind.value}",
            hint=f"Continue with --body {of_output}, or give a new output and a new checkpoint.",
        )


def _refuse_foreign(output: Place, checkpoint: Place, output_mark: IngestMark | None) -> None:
    if _is_used(checkpoint):
        problem = f"{checkpoint.url} is not a checkpoint of nsq spark ingest"
        raise ConfigurationError(problem, hint="Give a new directory.")
    if output_mark is not None:
        raise ConfigurationError(
            f"{output.url} was written with the checkpoint {output_mark.checkpoint}, not with "
            f"{checkpoint.url}",
            hint="Give that checkpoint, or a new output: otherwise messages would be lost.",
        )
    if _is_used(output):
        problem = f"{output.url} holds files that nsq spark ingest did not write"
        raise ConfigurationError(problem, hint="Give a new directory.")


def _is_used(place: Place, folder: str = "") -> bool:
    return next(iter(place.list(folder)), None) is not None


def _read_mark(place: Place, name: str) -> IngestMark | None:
    try:
        return IngestMark(**load_json(place.read(name)))
    except FileNotFoundError:
        return None
    except (ValueError, TypeError) as exc:
        raise OutputError(f"cannot read {place / name} ({exc})") from None


def _write_mark(place: Place, name: str, mark: IngestMark) -> None:
    try:
        place.put_if_absent(name, _encode_mark(mark))
    except FileExistsError:
        raise OutputError(f"another nsq spark ingest has begun to use {place.url}") from None


def _encode_mark(mark: IngestMark) -> bytes:
    return (json.dumps(asdict(mark), indent=2) + "\n").encode()


def refuse_older(places: IngestPlaces) -> None:
    """Refuse an output in another format, and a restored place that lacks batches of the other.

    Raises `ConfigurationError`, `OutputError` and ``OSError``.
    """
    output, checkpoint, plan = places.output.absolute(), places.checkpoint.absolute(), places.plan
    if not plan.is_by_topic:
        refuse_other_form(output, "--format", is_delta=plan.is_delta)
    # The checkpoint records that a batch begins before the output has it, and that it ended after.
    begun = _last_batch(checkpoint, BEGUN)
    if _is_of_sparks_sink(places):
        ended, written = _last_batch(checkpoint, COMMITS), _last_batch(output, SINK_LOG)
    else:
        # Numbers of commits begin at 1, and batches without new messages have no commit.
        ended = (checkpoint.read_json(NOTE, int) or 0) - 1
        written = last_number(plan, query_id(checkpoint)) - 1
    if ended <= written <= begun:
        return
    older, newer = places[:2] if written < ended else (places.checkpoint, places.output)
    raise ConfigurationError(
        f"{older} is older than {newer}: messages would be missing",
        hint="Restore both to the same point in time, or give a new checkpoint and a new output.",
    )


def _is_of_sparks_sink(places: IngestPlaces) -> bool:
    """Return whether Spark's sink wrote the output last. An unused output counts, too."""
    output, checkpoint = places.output.absolute(), places.checkpoint.absolute()
    notes = checkpoint.read_json(NOTE, int), output.read_json(BEGUN_NOTE)
    return not places.plan.is_delta and notes == (None, None)


def _last_batch(place: Place, log: str) -> int:
    """Return the number of the last batch in one of Spark's logs, -1 if it is empty."""
    names = (entry.name.rpartition("/")[2].removesuffix(".compact") for entry in place.list(log))
    return max(map(int, filter(str.isdecimal, names)), default=-1)


# Spark's names. A folder without a batch may have files of other programs.
_DATA = re.compile(r"(topic=[^/]*/date=[^/]*/)(part-[^/]*\.parquet)")


def remove_leftovers(places: IngestPlaces) -> None:
    """Remove the files of interrupted batches. No other process may write to the places.

    Raises the errors of `refuse_older`, also for an unreadable log, and then removes nothing.
    """
    with translating_errors("clean up", places.output):
        refuse_older(places)
        checkpoint = places.checkpoint.absolute()
        if _last_batch(checkpoint, BEGUN) < 0:
            # Spark refuses to begin if a kill left a temporary file of the first batch.
            for entry in list(checkpoint.list(BEGUN)):
                checkpoint.delete(entry.name)
        if places.plan.is_delta:  # Every reader of a Delta table follows its log.
            return
        output = places.output.absolute()
        if _is_of_sparks_sink(places):
            _adopt_files(output)
        finish_batch(output)
        remove_staged(output)


def _adopt_files(output: Place) -> None:
    """Take over the files of an output that Spark's sink wrote, and remove those of no batch."""
    names = [entry.name for entry in output.list()]
    counted = committed_names(output) or set()  # Spark creates the log with the end of a batch.
    for match in filter(None, map(_DATA.fullmatch, names)):
        if match[2] not in counted:
            output.delete(match[0])
            output.delete(f"{match[1]}.{match[2]}.crc")
    output.put(BEGUN_NOTE, encode_note(_last_batch(output, SINK_LOG) + 1))


POLL_S = 0.2  # The progress line changes five times a second, and a stop waits no longer.
METRICS = "ingest"
SPOOL = "spool"


class IngestSource(NamedTuple):
    """What a query reads: a format with its options, and its name in messages."""

    name: str
    format: str
    options: Mapping[str, str]
    places: tuple[Place, ...] = ()
    """Object stores among them need credentials."""


@dataclass(slots=True)
class IngestCounts:
    """The counts of a run.

    ``without_column`` has the fields that could not get a column. ``lag_s`` is the age of the
    newest message at the end of its batch. ``rows_behind`` are waiting in the archive or the spool.
    """

    rows: int = 0
    batches: int = 0
    body_bytes: int = 0
    misfits: int = 0
    without_column: Collection[str] = ()
    rows_per_s: float = 0.0
    lag_s: float | None = None
    rows_behind: int = 0
    bytes_behind: int = 0
    seconds_behind: int = 0

    def metrics(self) -> list[Metric]:
        """Return the metrics for Prometheus."""
        return [
            metric_of(f"nsq_spark_ingest_{name}", text, [({}, getattr(self, field))])
            for field, name, text in METRICS_OF_COUNTS
        ]


METRICS_OF_COUNTS = (
    ("rows", "rows_total", "messages ingested"),
    ("batches", "batches_total", "batches ended"),
    ("body_bytes", "body_bytes_total", "bytes of the bodies ingested"),
    ("misfits", "body_misfits_total", "bodies that did not fit their columns"),
    ("rows_per_s", "rows_per_second", "rate of the last batch"),
    ("rows_behind", "rows_behind", "messages waiting"),
    ("bytes_behind", "bytes_behind", "compressed bytes waiting"),
    ("seconds_behind", "seconds_behind", "age of the oldest message waiting"),
)


@dataclass(slots=True)
class IngestRun:
    """One run of ``nsq spark ingest``: locks its places, starts the query and follows it.

    ``trigger_s`` are the seconds between batches; None reads what the source has now, then ends.
    ``for_s`` bounds the run. ``on_batch`` is called at the start and after each batch, ``on_poll``
    every `POLL_S`.
    """

    source: IngestSource
    places: IngestPlaces
    trigger_s: float | None = None
    for_s: float | None = None
    on_batch: Callable[[IngestCounts], object] = lambda counts: None
    on_poll: Callable[[IngestCounts], object] = lambda counts: None
    counts: IngestCounts = field(default_factory=IngestCounts)
    _lock: PlaceLock | None = None
    _sink: TableSink | None = None
    _reported: Collection[ArchiveDamage] = ()
    _stop: threading.Event = field(default_factory=threading.Event)
    _last_batch: int = -1
    _change_log: ChangeLog = field(default_factory=ChangeLog)

    @contextmanager
    def locked(self) -> Iterator[tuple[int, ...]]:
        """Lock the places for the run; yield the descriptors that the JVM must inherit.

        Raises `ConfigurationError` and `OutputError`.
        """
        self._reported = set(read_damage(self.places.damage))
        with lock_directories(self.source.name, self.places) as (lock, self.places):
            self._lock = lock
            yield lock.descriptors

    def start(self, spark: SparkSession) -> StreamingQuery:
        """Start the query. The places must be locked."""
        output, plan = self.places.output, self.places.plan
        if not plan.is_delta and SINK_LOG in output.absolute().children()[1]:
            # Spark and nsqtools would read only the files in this log of an earlier version.
            delete_folder(spark, (output / SINK_LOG).hadoop_url)
        source_bodies = self.places.source_bodies
        columns = struct_of(source_bodies.message_schema())
        options = {**self.source.options, **source_bodies.options()}
        stream = spark.readStream.schema(columns).options(**options).format(self.source.format)
        rows = stream.load()
        bodies = [name for name in ("body", "body_bytes") if name in columns.names]
        rows = rows.observe(
            METRICS,
            F.count(F.lit(1)).alias("rows"),
            F.sum(F.coalesce(*map(F.octet_length, bodies))).alias("body_bytes"),
            F.max("ts_ns").alias("newest_ns"),
        )
        self._sink = TableSink(plan, self.places.checkpoint)
        writer = rows.writeStream.option("checkpointLocation", self.places.checkpoint.hadoop_url)
        writer = writer.foreachBatch(self._sink)
        if self.trigger_s is None:
            return writer.trigger(availableNow=True).start()
        interval_ms = round(self.trigger_s * 1000)
        return writer.trigger(processingTime=f"{interval_ms} milliseconds").start()

    def follow(self, query: StreamingQuery) -> None:
        """Follow the query to its end.

        Raises what the query failed with, and `OutputError` when another run takes the places.
        """
        deadline_s = None if self.for_s is None else time.monotonic() + self.for_s
        self.on_batch(self.counts)
        while query.isActive:
            if self._lock is not None:
                self._lock.raise_if_lost()
            self._count(query)
            self.on_poll(self.counts)
            if deadline_s is not None and time.monotonic() >= deadline_s:
                self._stop.set()
            if self._stop.wait(POLL_S):
                self._end(query)
        query.awaitTermination()
        self._count(query)
        self.on_poll(self.counts)

    def stop(self) -> None:
        """End the run after the current batch. May be called from any thread."""
        self._stop.set()

    def new_damages(self) -> list[ArchiveDamage]:
        """Return the damage that this run reported, without that of earlier runs."""
        damages = read_damage(self.places.damage)
        return [damage for damage in damages if damage not in self._reported]

    def _end(self, query: StreamingQuery) -> None:
        # The next run would have to repeat an interrupted batch.
        batch = self._last_batch
        while self._last_batch == batch and query.isActive and query.status["isTriggerActive"]:
            time.sleep(POLL_S)
            self._count(query)
        query.stop()

    def _count(self, query: StreamingQuery) -> None:
        """Add the batches that have ended since the last call, and log a problem of the spool."""
        problem = ""
        for progress in query.recentProgress:
            lag = _parse_lag(progress["sources"][0]["latestOffset"])
            problem = lag.get("problem", "")
            # An idle query reports progress as well, under the number of the batch to come.
            has_run = (
                METRICS in progress["observedMetrics"] and "addBatch" in progress["durationMs"]
            )
            if has_run and progress["batchId"] > self._last_batch:
                self._last_batch = progress["batchId"]
                self._add(progress, lag)
        if problem:
            self._change_log.report(SPOOL, f"{problem}: messages stay in NSQ")
        else:
            self._change_log.resolve(SPOOL, "messages are taken again")

    def _add(self, progress: Any, lag: Mapping[str, Any]) -> None:
        metrics = progress["observedMetrics"][METRICS]
        self.counts.rows += metrics["rows"]
        self.counts.body_bytes += metrics["body_bytes"] or 0
        if self._sink is not None:
            self.counts.misfits = self._sink.misfits
            self.counts.without_column = self._sink.without_column
        self.counts.batches += 1
        duration_ms = progress["durationMs"].get("triggerExecution", 0)
        self.counts.rows_per_s = metrics["rows"] * 1000 / duration_ms if duration_ms else 0.0
        for name in ("rows_behind", "bytes_behind", "seconds_behind"):
            setattr(self.counts, name, lag.get(name, 0))
        if metrics["newest_ns"] is not None:
            self.counts.lag_s = max(0.0, (time.time_ns() - metrics["newest_ns"]) / 1e9)
        self.on_batch(self.counts)


def _parse_lag(latest: Any) -> dict[str, Any]:
    """Return the lag that the source reports as its latest offset, which Spark has as JSON."""
    document = json.loads(latest) if isinstance(latest, str) else latest
    return document if isinstance(document, dict) else {}
