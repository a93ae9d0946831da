"""``format("nsq-archive")``, for Spark; what it decides is in `nsqtools.services.spark.archives`.

Spark makes a reader on the driver, pickles it, and reads partitions with copies of it on executors:
making one must cost nothing.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING

from pyspark.sql.datasource import DataSource, DataSourceReader, InputPartition
from pyspark.sql.types import StructType

from nsqtools.errors import ConfigurationError
from nsqtools.services.spark.archives.plan import Partition
from nsqtools.services.spark.archives.settings import ReadSettings, read_settings
from nsqtools.services.spark.options import Options
from nsqtools.services.spark.schema import ARCHIVED_DDL

if TYPE_CHECKING:
    import pyarrow

FORMAT = "nsq-archive"


class ArchiveSource(DataSource):
    """What ``nsq to-file`` writes, as a batch or a stream."""

    @classmethod
    def name(cls) -> str:
        return FORMAT

    def schema(self) -> str:
        return ARCHIVED_DDL

    def reader(self, schema: StructType) -> ArchiveReader:
        options = Options(FORMAT, self.options)
        settings = read_settings(options)
        options.end()
        return ArchiveReader(settings, columns(schema))


class SQLArchiveSource(ArchiveSource):
    """The same under a name that SQL takes: ``CREATE TEMPORARY VIEW v USING nsq_archive``."""

    @classmethod
    def name(cls) -> str:
        return "nsq_archive"


@dataclass
class ArchivePartition(InputPartition):
    """What one task reads. Spark gives ``None`` to the only task when there is nothing."""

    value: Partition | None


class ArchiveReader(DataSourceReader):
    """Reads all there is."""

    def __init__(self, settings: ReadSettings, names: list[str]) -> None:
        self._settings = settings
        self._names = names

    def partitions(self) -> list[ArchivePartition]:
        from nsqtools.services.spark.archives.batch import plan_batch

        return [ArchivePartition(partition) for partition in plan_batch(self._settings)]

    def read(self, partition: InputPartition) -> Iterator[pyarrow.RecordBatch]:
        return read(partition.value, self._settings, self._names)


def read(
    partition: Partition | None, settings: ReadSettings, names: list[str]
) -> Iterator[pyarrow.RecordBatch]:
    """Iterate over what a task reads."""
    if partition is not None:
        from nsqtools.services.spark.archives.reading import read_partition

        yield from read_partition(partition, settings, names)


def columns(schema: StructType) -> list[str]:
    """Return the columns that are wanted: all, or those of a schema that the user gave."""
    known = dict(column.split() for column in ARCHIVED_DDL.split(", "))
    for field in schema.fields:
        if known.get(field.name) != field.dataType.simpleString():
            raise ConfigurationError(
                f"there is no column {field.simpleString()} in an archive",
                hint=f"There are: {ARCHIVED_DDL}.",
            )
    return [field.name for field in schema.fields]
