"""``format("nsq-archive")``, for Spark. Its decisions are in `nsqtools.spark.archives`.

    path, paths        what ``nsq to-file`` wrote: files, directories with all below, patterns
    workDir            where files in progress are, if elsewhere
    topics             only these, separated by commas
    since, until       RFC 3339, or -2h; members outside are not even read
    format=raw         also files of bare bodies, as nsq_to_file writes them; delimiter, topic
    onDamage=report    skip what cannot be read, and report it in damagePath
    partitionBytes     about how much of a file a task reads (16MiB)
    minPartitions      the least number of tasks, approximately
    filterPushdown     true skips files and members by the query's own filters on topic, timestamp
                       and ts_ns, and rows by those on nsqd; needs
                       spark.sql.python.filterPushdown.enabled=true

    startingOffsets    earliest, latest, or JSON as in a checkpoint; startingTimestamp
    maxRowsPerTrigger, maxBytesPerTrigger, maxFilesPerTrigger
    minRowsPerTrigger  a batch waits for so many rows, at most maxTriggerDelay (15m)
    failOnDataLoss     false continues without files that are gone
    pollInterval       how often to look for new data (100ms; in an object store 5s)

The second group is for streams. Spark makes a reader on the driver, pickles it, and reads
partitions with copies of it on executors: making one must cost nothing.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property
from types import TracebackType
from typing import TYPE_CHECKING, Any, Self

from pyspark.sql.datasource import (
    DataSource,
    DataSourceReader,
    DataSourceStreamReader,
    EqualTo,
    Filter,
    GreaterThan,
    GreaterThanOrEqual,
    In,
    InputPartition,
    LessThan,
    LessThanOrEqual,
)
from pyspark.sql.streaming.datasource import (
    ReadAllAvailable,
    ReadLimit,
    ReadMaxBytes,
    ReadMaxFiles,
    ReadMaxRows,
    SupportsTriggerAvailableNow,
)
from pyspark.sql.types import StructType

from nsqtools.errors import ConfigurationError
from nsqtools.spark.archives.message_columns import ARCHIVED_DDL
from nsqtools.spark.archives.offsets import Offset, decode_offset
from nsqtools.spark.archives.partitions import ReadPartition
from nsqtools.spark.archives.read_settings import (
    BatchLimits,
    ReadSettings,
    StreamSettings,
    archive_settings,
    stream_settings,
)
from nsqtools.spark.format_options import Options

if TYPE_CHECKING:
    import pyarrow

    from nsqtools.spark.archives.archive_stream import ArchiveStream

IDLE_SHARE = 2.0  # how long to wait after a look that found nothing, as a share of its time


def default_limit(own: BatchLimits) -> ReadLimit:
    """Return what Spark hands to ``latestOffset``: it knows one limit, and never two."""
    if own.rows is not None:
        return ReadMaxRows(own.rows)
    if own.bytes is not None:
        return ReadMaxBytes(own.bytes)
    if own.files is not None:
        return ReadMaxFiles(own.files)
    return ReadAllAvailable()


def limits_under(limit: ReadLimit, own: BatchLimits) -> BatchLimits:
    """Return the limits of a batch: all of ours, unless Spark wants everything."""
    return BatchLimits() if isinstance(limit, ReadAllAvailable) else own


class Poll:
    """Entered to look for something new: waits before, when the last look found nothing.

    Spark asks a hundred times a second. Looking at a large archive takes long, and is done less
    often then.
    """

    def __init__(self, interval_s: float) -> None:
        self._interval_s = interval_s
        self._began_s = 0.0
        self._not_before_s = 0.0
        self._has_found = True

    def __enter__(self) -> Self:
        pause_s = self._not_before_s - time.monotonic()
        if not self._has_found and pause_s > 0:
            time.sleep(pause_s)
        self._began_s = time.monotonic()
        return self

    def found_something(self, has_found: bool) -> None:
        """Note whether the look found something."""
        self._has_found = has_found

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        took_s = time.monotonic() - self._began_s
        self._not_before_s = self._began_s + max(self._interval_s, took_s * (1 + IDLE_SHARE))


FORMAT = "nsq-archive"
PUSHDOWN = "filterPushdown"

COMPARISONS: dict[type[Any], str] = {
    EqualTo: "=",
    In: "in",
    LessThan: "<",
    LessThanOrEqual: "<=",
    GreaterThan: ">",
    GreaterThanOrEqual: ">=",
}


class ArchiveFormat(DataSource):
    """What ``nsq to-file`` writes, as a batch or a stream."""

    @classmethod
    def name(cls) -> str:
        return FORMAT

    def schema(self) -> str:
        return ARCHIVED_DDL

    def reader(self, schema: StructType) -> ArchiveReader:
        options = Options(FORMAT, self.options)
        settings = archive_settings(options)
        reader = PruningReader if options.flag(PUSHDOWN, default=False) else ArchiveReader
        options.end()
        return reader(settings, columns(schema, ARCHIVED_DDL))

    def streamReader(self, schema: StructType) -> ArchiveStreamReader:
        options = Options(FORMAT, self.options)
        settings, stream = archive_settings(options), stream_settings(options)
        options.end()
        return ArchiveStreamReader(settings, stream, columns(schema, ARCHIVED_DDL))


class SQLArchiveFormat(ArchiveFormat):
    """The same under a name that SQL takes: ``CREATE TEMPORARY VIEW v USING nsq_archive``."""

    @classmethod
    def name(cls) -> str:
        return "nsq_archive"


@dataclass
class ArchivePartition(InputPartition):
    """What one task reads. With nothing to read, Spark gives ``None`` to the only task."""

    value: ReadPartition | None


class ArchiveReader(DataSourceReader):
    """Reads all there is."""

    def __init__(self, settings: ReadSettings, names: list[str]) -> None:
        self._settings = settings
        self._names = names

    def partitions(self) -> list[ArchivePartition]:
        from nsqtools.spark.archives.partitions import plan_batch

        return [ArchivePartition(partition) for partition in plan_batch(self._settings)]

    def read(self, partition: InputPartition) -> Iterator[pyarrow.RecordBatch]:
        return read(partition.value, self._settings, self._names)


class PruningReader(ArchiveReader):
    """Skips files and members by the query's own filters.

    Spark refuses a reader with this method unless `PUSHDOWN_CONF` is on; it is off by default.
    """

    def pushFilters(self, filters: list[Filter]) -> list[Filter]:
        for each in filters:
            comparison = COMPARISONS.get(type(each))
            column: tuple[str, ...] = getattr(each, "attribute", ())
            if comparison is not None and len(column) == 1:
                value = getattr(each, "value")  # noqa: B009 - `Filter` itself has none
                self._settings = self._settings.narrowed(column[0], comparison, value)
        return filters  # Spark still drops rows: whole members are read


class ArchiveStreamReader(DataSourceStreamReader, SupportsTriggerAvailableNow):
    """Reads what comes. One of it lives as long as the query does, and decides; its copies read."""

    def __init__(self, settings: ReadSettings, stream: StreamSettings, names: list[str]) -> None:
        self._reached: Offset | None = None
        self._settings = settings
        self._options = stream
        self._names = names

    @cached_property
    def _stream(self) -> ArchiveStream:
        from nsqtools.spark.archives.archive_stream import ArchiveStream

        return ArchiveStream(self._settings, self._options)

    @cached_property
    def _poll(self) -> Poll:
        return Poll(self._options.poll_s)

    def initialOffset(self) -> dict[str, Any]:
        return self._stream.initial().encode()

    def getDefaultReadLimit(self) -> ReadLimit:
        return default_limit(self._options.limits)

    def latestOffset(self, start: dict[str, Any], limit: ReadLimit) -> dict[str, Any]:
        limits = limits_under(limit, self._options.limits)
        with self._poll as poll:
            self._reached = self._stream.latest(decode_offset(start), limits)
            end = self._reached.encode()
            poll.found_something(end != start)
        return end

    def reportLatestOffset(self) -> dict[str, Any] | None:
        """What is read, and the lag, in a query's progress: as of the last look."""
        lag = None if self._reached is None else self._stream.lag(self._reached)
        # Spark describes a source in Python by the name of a Java class
        return None if lag is None else {"source": self._settings.description, **lag}

    def prepareForTriggerAvailableNow(self) -> None:
        self._stream.freeze()

    def partitions(self, start: dict[str, Any], end: dict[str, Any]) -> list[ArchivePartition]:
        planned = self._stream.plan(decode_offset(start), decode_offset(end))
        return [ArchivePartition(partition) for partition in planned]

    def read(self, partition: InputPartition) -> Iterator[pyarrow.RecordBatch]:
        return read(partition.value, self._settings, self._names)


def read(
    partition: ReadPartition | None, settings: ReadSettings, names: list[str]
) -> Iterator[pyarrow.RecordBatch]:
    """Iterate over what a task reads."""
    if partition is not None:
        from nsqtools.spark.archives.partition_reader import read_partition

        yield from read_partition(partition, settings, names)


def columns(schema: StructType, all_columns: str) -> list[str]:
    """Return the columns that are wanted: all, or those of a schema that the user gave."""
    known = dict(column.split() for column in all_columns.split(", "))
    for field in schema.fields:
        if known.get(field.name) != field.dataType.simpleString():
            raise ConfigurationError(
                f"unknown column {field.simpleString()}", hint=f"The columns are: {all_columns}."
            )
    return [field.name for field in schema.fields]
