"""Ingestion: a live topic or an archive into Parquet by topic and date, each message once.

Spark provides exactly once: the source repeats a batch unchanged, and the log of Spark's file sink
(``_spark_metadata``) lists the files of the output that count. Both hold only while output and
checkpoint stay together, which Spark does not check: it numbers batches in the checkpoint and
believes the output's log about which of them are written. A new checkpoint with an old output would
skip its first batches, and an old checkpoint with a new output would begin in the middle; messages
would be missing without a word. So both are marked with one identity (`mark_directories`), and
anything else is refused.

Files that an interrupted batch wrote are not in the sink's log, and Spark ignores them. Other
readers of the directory would count their messages twice, so they are removed.
"""

from __future__ import annotations

import json
import os
import re
import threading
import time
import uuid
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from nsqtools.errors import ConfigurationError, OutputError
from nsqtools.files.durable import replace_file
from nsqtools.files.locks import lock_file
from nsqtools.spark.archives.message_columns import MESSAGE_DDL
from nsqtools.spark.location import spark_url

if TYPE_CHECKING:
    from pyspark.sql import SparkSession
    from pyspark.sql.streaming.query import StreamingQuery

OUTPUT_MARK = "_ingest.json"
CHECKPOINT_MARK = "nsq-ingest.json"
LOCK = "nsq-ingest.lock"
BEGUN = "offsets"  # Spark makes it with the first batch


@dataclass(frozen=True, slots=True)
class IngestMark:
    """What is ingested, and where to. ``id`` is made up once."""

    id: str
    source: str
    output: str
    checkpoint: str


@contextmanager
def held_directories(source: str, output: Path, checkpoint: Path) -> Iterator[None]:
    """Mark two directories, lock them, and remove what interrupted batches left before and after.

    Raises `ConfigurationError`, and `OutputError`.
    """
    mark_directories(source, output, checkpoint)
    try:
        descriptor = lock_file(checkpoint / LOCK)
    except OSError as exc:
        raise OutputError(f"cannot write {exc.filename} ({exc.strerror})") from exc
    if descriptor is None:
        raise OutputError(f"another nsq spark ingest uses {checkpoint}")
    try:
        remove_leftovers(output)
        yield
        remove_leftovers(output)
    finally:
        os.close(descriptor)


def mark_directories(source: str, output: Path, checkpoint: Path) -> None:
    """Mark two directories, which are made, as those of ``source``; or see that they are.

    Raises `ConfigurationError` when they are somebody else's, and `OutputError`.
    """
    output, checkpoint = output.absolute(), checkpoint.absolute()
    if output == checkpoint or output in checkpoint.parents or checkpoint in output.parents:
        raise ConfigurationError("--output and --checkpoint must not contain each other")
    try:
        of_checkpoint, of_output = (
            _read_mark(checkpoint / CHECKPOINT_MARK),
            _read_mark(output / OUTPUT_MARK),
        )
        if of_checkpoint is None:
            _refuse_foreign(output, checkpoint, of_output)
            mark = IngestMark(uuid.uuid4().hex, source, str(output), str(checkpoint))
            _write_mark(checkpoint / CHECKPOINT_MARK, mark)
            _write_mark(output / OUTPUT_MARK, mark)
            return
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
        if of_output is None and not _is_used(output) and not (checkpoint / BEGUN).exists():
            _write_mark(output / OUTPUT_MARK, of_checkpoint)
        elif of_output is None or of_output.id != of_checkpoint.id:
            raise ConfigurationError(
                f"{output} is not the output that was written with the checkpoint {checkpoint}",
                hint="Restore it, or start with a new checkpoint and a new output.",
            )
    except OSError as exc:
        raise OutputError(f"cannot use {exc.filename or output} ({exc.strerror})") from exc


def _refuse_foreign(output: Path, checkpoint: Path, of_output: IngestMark | None) -> None:
    if _is_used(checkpoint):
        raise ConfigurationError(
            f"{checkpoint} is not a checkpoint of nsq spark ingest",
            hint="Give a new directory.",
        )
    if of_output is not None:
        raise ConfigurationError(
            f"{output} was written with the checkpoint {of_output.checkpoint}, not with "
            f"{checkpoint}",
            hint="Give that one, or a new output: with another one messages would be missing.",
        )
    if _is_used(output):
        raise ConfigurationError(
            f"{output} holds files that nsq spark ingest did not write",
            hint="Give a new directory.",
        )


def _is_used(folder: Path) -> bool:
    return folder.exists() and any(folder.iterdir())


def _read_mark(path: Path) -> IngestMark | None:
    try:
        return IngestMark(**json.loads(path.read_text("utf-8")))
    except FileNotFoundError:
        return None
    except (ValueError, TypeError) as exc:
        raise OutputError(f"cannot read {path} ({exc})") from None


def _write_mark(path: Path, mark: IngestMark) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    replace_file(path, (json.dumps(asdict(mark), indent=2) + "\n").encode(), 0o666)


SINK_LOG = "_spark_metadata"
SINK_LOG_VERSION = "v1"

_BATCH = re.compile(r"\d+(\.compact)?")


def remove_leftovers(output: Path) -> int:
    """Remove them, and return how many there were. Nobody may be writing.

    Raises `OutputError`, also for a log that cannot be read: nothing is removed then.
    """
    try:
        known = committed(output)
        if known is None:
            return 0
        left = [path for path in output.glob("topic=*/date=*/*.parquet") if path.name not in known]
        for path in left:
            path.unlink()
            path.with_name(f".{path.name}.crc").unlink(missing_ok=True)
        return len(left)
    except OSError as exc:
        raise OutputError(f"cannot clean up {exc.filename or output} ({exc.strerror})") from exc


def committed(output: Path) -> set[str] | None:
    """Return the names of the files that count; None before the first batch.

    A name is made up by Spark for one file, so that it is enough without its directory. Raises
    ``OSError``, and `OutputError`.
    """
    if not (output / SINK_LOG).is_dir():
        return None
    names: set[str] = set()
    for path in (output / SINK_LOG).iterdir():
        if _BATCH.fullmatch(path.name):
            version, *lines = path.read_text("utf-8").splitlines()
            try:
                if version != SINK_LOG_VERSION:
                    raise ValueError(f"it is of version {version}")
                names |= {json.loads(line)["path"].rpartition("/")[2] for line in lines}
            except (ValueError, KeyError, TypeError) as exc:
                raise OutputError(f"cannot read {path} ({exc})") from exc
    return names


POLL_S = 0.2
METRICS = "ingest"


@dataclass(frozen=True, slots=True)
class IngestSource:
    """What is read: a format with its options, and how it is called in messages."""

    name: str
    format: str
    options: Mapping[str, str]


@dataclass(frozen=True, slots=True)
class IngestSink:
    """Where it goes, and the seconds between batches (None: what is there, then end)."""

    output: Path
    checkpoint: Path
    trigger_s: float | None


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


def start_query(spark: SparkSession, source: IngestSource, sink: IngestSink) -> StreamingQuery:
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
        .option("path", spark_url(sink.output))
        .option("checkpointLocation", spark_url(sink.checkpoint))
    )
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
        self.counts.rows_behind = _rows_behind(progress["sources"][0]["latestOffset"])
        if seen["newest_ns"] is not None:
            self.counts.lag_s = max(0.0, (time.time_ns() - seen["newest_ns"]) / 1e9)


def _rows_behind(latest: Any) -> int:
    """The lag that the source reports as its latest offset, which Spark gives as JSON."""
    document = json.loads(latest) if isinstance(latest, str) else latest
    return int(document.get("rows_behind", 0)) if isinstance(document, dict) else 0


def _has_run(progress: Any) -> bool:
    """An idle query reports, too, under the number of the batch that will come."""
    return METRICS in progress["observedMetrics"] and "addBatch" in progress["durationMs"]
