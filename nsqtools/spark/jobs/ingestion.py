"""Ingestion: a live topic or an archive into Parquet or Delta, each message once.

Spark provides exactly once: the source repeats a batch unchanged, and the output knows which
batches it has, by the log of Spark's file sink (``_spark_metadata``) or by that of the Delta table.
Both hold only while output and checkpoint stay together, which Spark does not check: it numbers
batches in the checkpoint and believes the output's log about which of them are written. A new
checkpoint with an old output would skip its first batches, and an old checkpoint with a new output
would begin in the middle; messages would be missing without a word. So both are marked with one
identity (`mark_directories`), belong to one run at a time, and anything else is refused. So is one
of them that was put back from a copy and is older than the other (`refuse_older`).

Files that an interrupted batch wrote are not in the sink's log, and Spark ignores them. Other
readers of the directory would count their messages twice, so they are removed.

Trap: when this process is killed, its JVM lives on for a moment and may still commit its batch. The
files of that batch are no leftovers yet, so the JVM inherits the lock of the checkpoint, which is
free only when both have ended.

A message may come again in a later batch: two archivers had it, or nsqd gave it out again after a
crash. It has the identity and the time of publishing that it had. Of a Delta table a batch is
compared with those files that may hold its topics, days and times, which Delta knows of each file,
and the rest is appended in one commit, which readers see whole or not at all. That is an
insert-only merge; as an append it does not fail for what another writer does meanwhile.

The commit has the number of the batch. Spark repeats a batch when a crash came between the commit
of the table and that of the checkpoint: Delta then ignores it, bare bodies included, which have no
identity. As with Delta's own sink, a query is named by the id in its checkpoint.
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

from pyspark.sql import DataFrame, Row, SparkSession
from pyspark.sql import functions as F
from pyspark.sql.streaming.query import StreamingQuery

from nsqtools.archive.body_columns import ERROR
from nsqtools.archive.catalog import DAY_NS, PARTITIONS
from nsqtools.archive.columns import IDENTITY
from nsqtools.archive.delta import INGESTED, SINK_LOG, DeltaCatalog, refuse_other_form
from nsqtools.archive.finding import committed
from nsqtools.archive.layout import TimeRange
from nsqtools.archive.place import Place, PlaceLock, refuse_nested, translating_errors
from nsqtools.archive.slices import prepare_table
from nsqtools.cluster.topics import ChangeLog
from nsqtools.errors import ConfigurationError, OutputError
from nsqtools.records.envelope import BodyKind
from nsqtools.records.prometheus import Metric, metric_of
from nsqtools.spark.archives.damage import ArchiveDamage, read_damage
from nsqtools.spark.archives.read_settings import BYTES, Bodies
from nsqtools.spark.pyspark_internals import GLOB_PATHS, struct_of

CHECKPOINT_MARK = "nsq-ingest.json"
LOCK = "nsq-ingest.lock"
NOTE = "nsq-ingest-table.json"  # the number of the last commit to a Delta table
BEGUN, COMMITS = "offsets", "commits"  # Spark makes them as the first batch begins and ends


@dataclass(frozen=True, slots=True)
class IngestMark:
    """What is ingested, and where to. ``id`` is made up once.

    ``body`` and ``fields`` say what became of bodies. Earlier versions wrote bytes, and no word.
    """

    id: str
    source: str
    output: str
    checkpoint: str
    body: str = ""
    fields: Mapping[str, Any] | None = None


class IngestPlaces(NamedTuple):
    """Where a query writes, and what: the columns of bodies, in Parquet or Delta."""

    output: Place
    checkpoint: Place
    bodies: Bodies = BYTES
    is_delta: bool = False

    @property
    def damage(self) -> Place:
        """Where tasks report the archives that they cannot read."""
        return self.checkpoint / "damage"


@contextmanager
def lock_directories(source: str, places: IngestPlaces) -> Iterator[tuple[PlaceLock, IngestPlaces]]:
    """Mark two places, lock them, and remove what interrupted batches left before and after.

    Yields the lock, with the descriptors that the JVM must inherit (`SparkSettings.inherited`), and
    the places as `mark_directories` returns them. Raises `ConfigurationError`, and `OutputError`.
    """
    places = mark_directories(source, places)
    with places.checkpoint.lock(LOCK) as lock:
        remove_leftovers(places)
        yield lock, places
        lock.check()  # the files of another run's batch look like leftovers until it commits them
        remove_leftovers(places)


def mark_directories(source: str, places: IngestPlaces) -> IngestPlaces:
    """Mark two places, which are made, as those of ``source``; or see that they are.

    Returns them with what becomes of bodies: of the output of an earlier version what it was.

    Raises `ConfigurationError` when they are another job's, and `OutputError`.
    """
    output, checkpoint = places.output.absolute(), places.checkpoint.absolute()
    bodies = places.bodies
    refuse_nested("--output", output, checkpoint)
    with translating_errors("use", output):
        of_checkpoint = _read_mark(checkpoint, CHECKPOINT_MARK)
        of_output = _read_mark(output, INGESTED)
        if of_checkpoint is None:
            _refuse_foreign(output, checkpoint, of_output)
            where = str(output), str(checkpoint)
            mark = IngestMark(uuid.uuid4().hex, source, *where, bodies.kind.value, bodies.fields)
            _write_mark(checkpoint, CHECKPOINT_MARK, mark)
            _write_mark(output, INGESTED, mark)
            return places
        if of_checkpoint.source != source:
            raise ConfigurationError(
                f"the checkpoint {checkpoint} belongs to {of_checkpoint.source}, not to {source}",
                hint="Each source needs a checkpoint and an output of its own.",
            )
        if of_checkpoint.output != str(output):
            raise ConfigurationError(
                f"the checkpoint {checkpoint} belongs to {of_checkpoint.output}, not to {output}",
                hint="Spark's log of an output has its path: leave it there, or start both over.",
            )
        if of_output is None and not _is_used(output) and not _is_used(checkpoint, BEGUN):
            _write_mark(output, INGESTED, of_checkpoint)
        elif of_output is None or of_output.id != of_checkpoint.id:
            raise ConfigurationError(
                f"{output} is not the output that was written with the checkpoint {checkpoint}",
                hint="Restore it, or start with a new checkpoint and a new output.",
            )
        if not of_checkpoint.body and bodies.kind is not BodyKind.json:
            return places._replace(bodies=BYTES)
        _refuse_other_bodies(of_checkpoint, bodies)
        if bodies.fields != of_checkpoint.fields:  # they have grown
            mark = replace(of_checkpoint, fields=bodies.fields)
            checkpoint.put(CHECKPOINT_MARK, _encoded(mark))
        return places


def _refuse_other_bodies(mark: IngestMark, bodies: Bodies) -> None:
    """Refuse columns of other types than the output has."""
    there = mark.body or BodyKind.binary.value
    if bodies.kind.value != there:
        raise ConfigurationError(
            f"bodies in {mark.output} are {there}, not {bodies.kind.value}",
            hint=f"Go on with --body {there}, or give a new output and a new checkpoint.",
        )
    before, now = (each["properties"] if each else {} for each in (mark.fields, bodies.fields))
    for name in before:
        if now.get(name) != before[name]:
            raise ConfigurationError(
                f"{name} is not in the schema as it is in {mark.output}",
                hint="Add fields to the schema that it was made with, or give a new output and a "
                "new checkpoint.",
            )


def _refuse_foreign(output: Place, checkpoint: Place, of_output: IngestMark | None) -> None:
    new = "Give a new directory."
    if _is_used(checkpoint):
        raise ConfigurationError(
            f"{checkpoint.url} is not a checkpoint of nsq spark ingest", hint=new
        )
    if of_output is not None:
        raise ConfigurationError(
            f"{output.url} was written with the checkpoint {of_output.checkpoint}, not with "
            f"{checkpoint.url}",
            hint="Give that one, or a new output: with another one messages would be missing.",
        )
    if _is_used(output):
        raise ConfigurationError(
            f"{output.url} holds files that nsq spark ingest did not write", hint=new
        )


def _is_used(place: Place, folder: str = "") -> bool:
    return next(iter(place.list(folder)), None) is not None


def _read_mark(place: Place, name: str) -> IngestMark | None:
    try:
        return IngestMark(**json.loads(place.read(name)))
    except FileNotFoundError:
        return None
    except (ValueError, TypeError) as exc:
        raise OutputError(f"cannot read {place / name} ({exc})") from None


def _write_mark(place: Place, name: str, mark: IngestMark) -> None:
    try:
        place.put_if_absent(name, _encoded(mark))
    except FileExistsError:
        raise OutputError(f"another nsq spark ingest has begun to use {place.url}") from None


def _encoded(mark: IngestMark) -> bytes:
    return (json.dumps(asdict(mark), indent=2) + "\n").encode()


def refuse_older(places: IngestPlaces) -> None:
    """Refuse an output of another form, and a place that was put back and lacks batches that the
    other has.

    The checkpoint knows of a batch before the output has it, and that it has ended after that.
    Raises `ConfigurationError`, `OutputError` and ``OSError``.
    """
    output, checkpoint = (each.absolute() for each in places[:2])
    refuse_other_form(output, "--format", is_delta=places.is_delta)
    most = _last(checkpoint, BEGUN)
    least, written = _last(checkpoint, COMMITS), _last(output, SINK_LOG)
    if places.is_delta:  # numbers begin at 1, and batches without anything new have none
        table, least = DeltaCatalog(str(places.output)), (checkpoint.read_json(NOTE) or 0) - 1
        written = -1
        if table.exists():
            table.check_writable()
            written = table.number_of(_query(checkpoint)) - 1
    if least <= written <= most:
        return
    older, newer = places[:2] if written < least else (places.checkpoint, places.output)
    raise ConfigurationError(
        f"{older} is older than {newer}: messages would be missing",
        hint="Put both back as they were at one time, or give a new checkpoint and a new output.",
    )


def _query(checkpoint: Place) -> str:
    """The id of a checkpoint's query, "" before its first start."""
    return str((checkpoint.read_json("metadata") or {"id": ""})["id"])


def _last(place: Place, log: str) -> int:
    """The number of the last batch in a log of Spark, -1 without any."""
    names = (each.name.rpartition("/")[2].removesuffix(".compact") for each in place.list(log))
    return max(map(int, filter(str.isdecimal, names)), default=-1)


_DATA = re.compile(r"(topic=[^/]*/date=[^/]*/)([^/]*\.parquet)")


def remove_leftovers(places: IngestPlaces) -> None:
    """Remove them. Nothing may be writing there.

    Raises as `refuse_older`, also for a log that cannot be read: nothing is removed then.
    """
    with translating_errors("clean up", places.output):
        refuse_older(places)
        checkpoint = places.checkpoint.absolute()
        if _last(checkpoint, BEGUN) < 0:  # Spark refuses to begin beside what a kill left of that
            for entry in list(checkpoint.list(BEGUN)):
                checkpoint.delete(entry.name)
        if places.is_delta:  # its log says what counts, to every reader
            return
        place = places.output.absolute()
        names = [entry.name for entry in place.list()]
        known = committed(place) or set()  # the log begins when the first batch has ended
        for match in filter(None, map(_DATA.fullmatch, names)):
            if match[2] not in known:
                place.delete(match[0])
                place.delete(f"{match[1]}.{match[2]}.crc")


POLL_S = 0.2
METRICS = "ingest"
SPOOL = "spool"
DATE_IN_UTC = f"date_from_unix_date(int(ts_ns div {DAY_NS} - if(ts_ns % {DAY_NS} < 0, 1, 0)))"
"""Spark's own functions of a timestamp go by the time zone of the session."""


class IngestSource(NamedTuple):
    """What a query reads: a format with its options, and its name in messages."""

    name: str
    format: str
    options: Mapping[str, str]
    places: tuple[Place, ...] = ()
    """Object stores among them need credentials."""


@dataclass(slots=True)
class IngestCounts:
    """What was ingested. ``lag_s`` is the age of the newest message when its batch ended.

    ``rows_behind`` are waiting in the archive or the spool.
    """

    rows: int = 0
    batches: int = 0
    body_bytes: int = 0
    misfits: int = 0
    rows_per_s: float = 0.0
    lag_s: float | None = None
    rows_behind: int = 0
    bytes_behind: int = 0
    seconds_behind: int = 0

    def metrics(self) -> list[Metric]:
        """Return them for Prometheus."""
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
    ("rows_behind", "rows_behind", "messages that wait"),
    ("bytes_behind", "bytes_behind", "compressed bytes that wait"),
    ("seconds_behind", "seconds_behind", "age of the oldest message that waits"),
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
        columns = struct_of(self.places.bodies.message_schema())
        options = {**self.source.options, **self.places.bodies.options()}
        stream = spark.readStream.schema(columns).options(**options).format(self.source.format)
        rows = stream.load().withColumn("date", F.expr(DATE_IN_UTC))
        bodies = [name for name in ("body", "body_bytes") if name in columns.names]
        misfits = F.col(ERROR) if ERROR in columns.names else F.lit(None)
        rows = rows.observe(
            METRICS,
            F.count(F.lit(1)).alias("rows"),
            F.sum(F.coalesce(*map(F.octet_length, bodies))).alias("body_bytes"),
            F.max("ts_ns").alias("newest_ns"),
            F.count(misfits).alias("misfits"),
        )
        writer = rows.writeStream.option("checkpointLocation", self.places.checkpoint.hadoop_url)
        if self.places.is_delta:
            writer = writer.foreachBatch(DeltaSink(self.places))
        else:
            writer = writer.format("parquet").partitionBy("topic", "date")
            writer = writer.option("compression", "zstd")
            writer = writer.option("path", self.places.output.hadoop_url)
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
        return [each for each in read_damage(self.places.damage) if each not in self._reported]

    def _end(self, query: StreamingQuery) -> None:
        # A batch that is interrupted leaves files which readers other than Spark would count.
        batch = self._last_batch
        while self._last_batch == batch and query.isActive and query.status["isTriggerActive"]:
            time.sleep(POLL_S)
            self._count(query)
        query.stop()

    def _count(self, query: StreamingQuery) -> None:
        """Add the batches that have ended since the last call, and log what fills no spool."""
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
        self.counts.misfits += metrics["misfits"]
        self.counts.batches += 1
        duration_ms = progress["durationMs"].get("triggerExecution", 0)
        self.counts.rows_per_s = metrics["rows"] * 1000 / duration_ms if duration_ms else 0.0
        for name in ("rows_behind", "bytes_behind", "seconds_behind"):
            setattr(self.counts, name, lag.get(name, 0))
        if metrics["newest_ns"] is not None:
            self.counts.lag_s = max(0.0, (time.time_ns() - metrics["newest_ns"]) / 1e9)
        self.on_batch(self.counts)


def _parse_lag(latest: Any) -> dict[str, Any]:
    """The lag that the source reports as its latest offset, which Spark gives as JSON."""
    document = json.loads(latest) if isinstance(latest, str) else latest
    return document if isinstance(document, dict) else {}


MOST_TASKS = 64


@dataclass(frozen=True, slots=True)
class DeltaSink:
    """What ``foreachBatch`` calls."""

    places: IngestPlaces

    def __call__(self, batch: DataFrame, number: int) -> None:
        """Append what is new of a batch. Raises what Spark raises, and `NsqError`."""
        output, bodies = str(self.places.output), self.places.bodies
        table, checkpoint = DeltaCatalog(output), self.places.checkpoint
        query = _query(checkpoint)
        prepare_table(table, bodies.message_schema(), bodies.kind)
        if table.number_of(query) > number:
            return
        kept = batch.persist()  # it is read twice, and must be counted once
        try:
            first, last = F.min("ts_ns").alias("first_ns"), F.max("ts_ns").alias("last_ns")
            if slots := kept.groupBy(*PARTITIONS).agg(first, last).collect():
                rows = self._new(kept, slots)
                placed = rows.repartition(min(len(slots), MOST_TASKS), *PARTITIONS)
                writer = placed.sortWithinPartitions(*PARTITIONS).write.format("nsq-table")
                writer = writer.options(app=query, number=str(number + 1))
                writer.mode("append").save(output)
                checkpoint.put(NOTE, b"%d" % (number + 1))
        finally:
            kept.unpersist()

    def _new(self, rows: DataFrame, slots: list[Row]) -> DataFrame:
        """Of the rows in some topics and days, with the range of their times, those to append."""
        named, bare = rows.where(F.col("id").isNotNull()), rows.where(F.col("id").isNull())
        named = named.dropDuplicates(list(IDENTITY))
        ranges = {
            (str(each.topic), str(each.date)): TimeRange(each.first_ns, each.last_ns + 1)
            for each in slots
            if each.first_ns is not None
        }
        there = [
            file.path
            for file in DeltaCatalog(str(self.places.output)).files()
            if (within := ranges.get((str(file.partition["topic"]), str(file.partition["date"]))))
            and (file.min_ts_ns is None or within.meets(file.min_ts_ns, file.max_ts_ns or 0))
        ]
        if there:
            root = self.places.output.hadoop_url
            reader = rows.sparkSession.read.option("basePath", root).option(GLOB_PATHS, value=False)
            known = reader.schema("topic string, nsqd string, id string").parquet(
                *(f"{root}/{path}" for path in there)
            )
            named = named.join(known, list(IDENTITY), "left_anti")
        return named.unionByName(bare).to(rows.schema)  # a name may have a dot
