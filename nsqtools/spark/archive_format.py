"""``format("nsq-archive")``, for Spark. Its implementation is in `nsqtools.spark.archives`.

    path, paths        archives of ``nsq to-file``: files, directories with all below, patterns
    workDir            where files in progress are, if elsewhere
    topics             only these, separated by commas
    since, until       RFC 3339, or -2h; members outside are not read
    format=raw         also files of bare bodies, as nsq_to_file writes them; delimiter, topic
    body               binary (bytes), string (text, other bytes in body_bytes), or json: text,
                       and a column for each field of the schema; _error is what did not fit
    schema             for JSON bodies: a file of nsq archive schema, or JSON Schema itself
    onDamage=report    skip damage, and report it in damagePath
    partitionBytes     the approximate amount of a file that a task reads (16MiB)
    minPartitions      the least number of tasks, approximately
    filterPushdown     true had the filters of a query applied to later queries, so it has no effect

    startingOffsets    earliest, latest, or JSON as in a checkpoint; startingTimestamp
    maxRowsPerTrigger, maxBytesPerTrigger, maxFilesPerTrigger
    minRowsPerTrigger  a batch waits for this many rows, at most maxTriggerDelay (15m)
    failOnDataLoss     false continues without files that are gone
    pollInterval       the interval of listings (100ms; in an object store 5s)

The second group is for streams. Spark creates a reader on the driver, pickles it, and reads
partitions with copies of it on executors, so creating a reader must be cheap.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator
from functools import partial
from typing import TYPE_CHECKING

from pyspark.sql.datasource import DataSource, DataSourceReader, InputPartition
from pyspark.sql.types import StructType

from nsqtools.spark.archives.read_settings import (
    ReadSettings,
    archive_settings,
    body_settings,
    stream_settings,
)
from nsqtools.spark.format_options import Options
from nsqtools.spark.pyspark_internals import columns, require_streams, struct_of

if TYPE_CHECKING:
    import pyarrow
    from pyspark.sql.datasource import Filter

    from nsqtools.spark.stream_format import StreamReader

log = logging.getLogger("nsqtools")

FORMAT = "nsq-archive"
PUSHDOWN = "filterPushdown"
# Spark keeps a reader and the filters that it was given, and also reads with it for later queries
# of the DataFrame without a filter. So only `nsq spark sql`, which knows all scans of its queries,
# gives this value.
ONE_SCAN = "one-scan"

COMPARISONS = {"EqualTo": "=", "In": "in", "LessThan": "<", "LessThanOrEqual": "<="}
COMPARISONS |= {"GreaterThan": ">", "GreaterThanOrEqual": ">="}
"""Comparisons by the names of Spark's filters, which PySpark has since 4.1."""


class ArchiveFormat(DataSource):
    """Archives of ``nsq to-file``, as a batch or a stream."""

    @classmethod
    def name(cls) -> str:
        return FORMAT

    def schema(self) -> StructType:
        return struct_of(body_settings(Options(FORMAT, self.options)).archived_schema())

    def reader(self, schema: StructType) -> ArchiveReader:
        options = Options(FORMAT, self.options)
        settings = archive_settings(options)
        pushdown = options.choice(PUSHDOWN, ("false", "true", ONE_SCAN))
        options.end()
        if pushdown == "true":
            log.warning("%s has no effect: give the options topics, since and until", PUSHDOWN)
        reader = PruningReader if pushdown == ONE_SCAN else ArchiveReader
        return reader(settings, columns(schema, settings.bodies.archived_schema()))

    def streamReader(self, schema: StructType) -> StreamReader:
        require_streams()
        from nsqtools.spark.archives.archive_stream import ArchiveStream
        from nsqtools.spark.stream_format import StreamReader

        options = Options(FORMAT, self.options)
        settings, stream = archive_settings(options), stream_settings(options)
        options.end()
        names = columns(schema, settings.bodies.archived_schema())
        make = partial(ArchiveStream, settings, stream)
        return StreamReader(make, settings, stream, names, settings.description)


class SQLArchiveFormat(ArchiveFormat):
    """The same format with a name for SQL: ``CREATE TEMPORARY VIEW v USING nsq_archive``."""

    @classmethod
    def name(cls) -> str:
        return "nsq_archive"


class ArchiveReader(DataSourceReader):
    """Reads all current messages."""

    def __init__(self, settings: ReadSettings, names: list[str]) -> None:
        self._settings = settings
        self._names = names

    def partitions(self) -> list[InputPartition]:
        from nsqtools.spark.archives.partitions import plan_batch

        return [InputPartition(partition) for partition in plan_batch(self._settings)]

    def read(self, partition: InputPartition) -> Iterator[pyarrow.RecordBatch]:
        from nsqtools.spark.archives.partition_reader import read_partition

        return read_partition(partition.value, self._settings, self._names)


class PruningReader(ArchiveReader):
    """Skips files and members by the filters of a query, which is the only one that reads with it.

    Spark refuses a reader with this method unless `PUSHDOWN_CONF` is on; it is off by default.
    """

    def pushFilters(self, filters: list[Filter]) -> list[Filter]:
        for condition in filters:
            comparison = COMPARISONS.get(type(condition).__name__)
            column: tuple[str, ...] = getattr(condition, "attribute", ())
            if comparison is not None and len(column) == 1:
                value = getattr(condition, "value")  # noqa: B009 - `Filter` itself has none
                self._settings = self._settings.narrowed(column[0], comparison, value)
        return filters  # Whole members are read, so Spark must filter the rows again.
