"""Read the input of a job: archives and Parquet, distinguished by their content.

A file is Parquet if it begins with Parquet's magic bytes, a directory if its first file is Parquet.
Everything else is an archive. Both are read as the same columns (`MESSAGE_COLUMNS`); Parquet
without them is refused. The output of a stream is read by its log, which omits the files of
interrupted batches.
"""

from __future__ import annotations

import logging
from collections.abc import Collection, Iterable, Sequence
from datetime import date
from functools import reduce
from typing import NamedTuple

from pyspark.sql import DataFrame, DataFrameReader, SparkSession
from pyspark.sql import functions as F
from pyspark.sql.types import StructType

from nsqtools.archive.catalog import REQUIRED_COLUMNS, day_range, missing_columns_error
from nsqtools.archive.columns import filtered_columns
from nsqtools.archive.delta import PartitionValues
from nsqtools.archive.finding import Inputs, table_files
from nsqtools.archive.form import LineKind
from nsqtools.archive.layout import ALL_TIMES, TimeRange
from nsqtools.archive.place import Place, translating_errors
from nsqtools.errors import NotFoundError
from nsqtools.spark.archives.archive_files import ArchiveListing, ListedFile
from nsqtools.spark.archives.read_settings import BYTES, ReadSettings, moment
from nsqtools.spark.pyspark_internals import GLOB_PATHS, struct_of

log = logging.getLogger("nsqtools")

INFERENCE = "spark.sql.sources.partitionColumnTypeInference.enabled"


class Choice(NamedTuple):
    """The selected messages: topics (empty: all) and times.

    Damage is skipped and reported in ``damage_path``; without it, damage is an error.
    ``delimiter`` ends each bare body.
    """

    topics: tuple[str, ...] = ()
    within: TimeRange = ALL_TIMES
    delimiter: bytes | None = None
    damage_path: Place | None = None
    min_partitions: int = 0
    """The least number of tasks for archives; 0 for the default of the format."""

    def may_contain(self, partition: PartitionValues) -> bool:
        """Return whether files of a partition may have selected messages."""
        topic, day = partition.get("topic"), partition.get("date")
        if self.topics and topic is not None and topic not in self.topics:
            return False
        try:
            begin, end = day_range(date.fromisoformat(day or ""))
        except ValueError:  # The date is missing or malformed.
            return True
        return self.within.overlaps(begin, end - 1)


MESSAGE_COLUMNS = tuple(BYTES.message_schema().names)


def select_messages(
    spark: SparkSession, inputs: Inputs, choice: Choice, used: Collection[str] = MESSAGE_COLUMNS
) -> DataFrame:
    """Read the selected messages in the columns of `MESSAGE_COLUMNS`.

    Only the ``used`` columns of archives, and those that the selection needs, are read; the others
    are null. Raises `ConfigurationError`.
    """
    tables = table_files((*inputs.parquet, *inputs.delta), choice.may_contain)
    columns = struct_of(BYTES.message_schema()).add("body_bytes", "binary").add("date", "date")
    frames = [
        read_files(spark, root, names, columns)
        .withColumn("body", F.coalesce(F.col("body"), F.col("body_bytes")))
        .select(*MESSAGE_COLUMNS)
        for root, names in tables.items()
    ]
    if inputs.archives:
        used = {*used, *filtered_columns(choice.within, ["topic"] if choice.topics else [])}
        frames.append(_read_archives(spark, inputs.archives, choice, used))
    rows = reduce(DataFrame.unionByName, frames)
    if choice.topics:
        rows = rows.where(F.col("topic").isin(*choice.topics))
    # py4j cannot pass integers of 64 bits to functions, so the bounds are part of SQL texts.
    if choice.within.since_ns is not None:
        rows = rows.where(f"ts_ns >= {choice.within.since_ns}")
    if choice.within.until_ns is not None:
        rows = rows.where(f"ts_ns < {choice.within.until_ns}")
    return rows


def list_archives(inputs: Inputs) -> list[ListedFile]:
    """List the archive files in the order of the format ``nsq-archive``. Raises `NsqError`."""
    listing = ArchiveListing(ReadSettings(tuple(map(str, inputs.archives))))
    return list(listing.files(lambda damage: None).values())


def has_bare_bodies(inputs: Inputs) -> bool:
    """Return whether an archive holds bare bodies. Raises `NsqError`."""
    with translating_errors("read", ""):
        contents = (file.content() for file in list_archives(inputs))
        return any(item.kind is LineKind.bodies and not item.foreign for item in contents)


def warn_of_bare_bodies(inputs: Inputs, within: TimeRange) -> None:
    """Log that a range of times excludes bare bodies, if there are any. Raises `NsqError`."""
    if within != ALL_TIMES and has_bare_bodies(inputs):
        log.warning("bare bodies, which have no time, are left out of the range")


def _read_archives(
    spark: SparkSession, paths: Sequence[Place], choice: Choice, used: Collection[str]
) -> DataFrame:
    options = {
        "format": "raw",
        "topics": ",".join(choice.topics),
        "since": moment(choice.within.since_ns),
        "until": moment(choice.within.until_ns, up=999),
        "delimiter": "".join(f"\\x{byte:02x}" for byte in choice.delimiter or b""),
        "minPartitions": str(choice.min_partitions or ""),
        **damage_options(choice.damage_path),
    }
    options = {name: text for name, text in options.items() if text}
    reader = spark.read.format("nsq-archive").options(**options)
    columns = struct_of(BYTES.archived_schema())
    return load_columns(reader, paths, used, columns).select(*MESSAGE_COLUMNS)


def load_columns(
    reader: DataFrameReader, paths: Iterable[Place], used: Collection[str], columns: StructType
) -> DataFrame:
    """Load archives with all ``columns``, of which those that are not ``used`` are null.

    Spark reads all columns in the schema of a Python data source, even if a query uses only a few.
    """
    # The name of the file costs nothing: no line is parsed for it.
    read = [field for field in columns.fields if field.name in used] or [columns["file"]]
    rows = reader.schema(StructType(read)).load(list(map(str, paths)))
    unread = {
        field.name: F.lit(None).cast(field.dataType) for field in columns if field not in read
    }
    # Unlike `select`, `to` needs no quotes for names with a dot.
    return rows.withColumns(unread).to(columns)


def damage_options(damage_path: Place | None) -> dict[str, str]:
    """Return the options that report damage in a directory; without one, damage fails the job."""
    if damage_path is None:
        return {}
    return {"onDamage": "report", "damagePath": str(damage_path)}


def read_files(
    spark: SparkSession, root: Place, names: Sequence[str], columns: StructType | None = None
) -> DataFrame:
    """Read the named Parquet files below a root.

    The names come from the log of a table, so Spark needs no jar of Delta. Without ``columns`` the
    result has the columns of all files. Values of partitions are text, because a topic may be
    called 2026; only the date is a date. Raises `NotFoundError` if there are no files, and
    `ConfigurationError` for Parquet without messages.
    """
    reader = spark.read.option("basePath", root.hadoop_url).option(GLOB_PATHS, value=False)
    reader = reader.option("mergeSchema", columns is None)
    urls = [f"{root.hadoop_url}/{name}" for name in names]
    if columns is not None:
        if not urls:
            return spark.createDataFrame([], columns)
        file_columns = reader.parquet(urls[0]).columns
        if missing := [name for name in REQUIRED_COLUMNS if name not in file_columns]:
            raise missing_columns_error(f"{root}/{names[0]}", missing)
        return reader.schema(columns).parquet(*urls)
    if not urls:
        raise NotFoundError(f"{root} has no rows yet")
    setting = spark.conf.get(INFERENCE) or "true"
    spark.conf.set(INFERENCE, "false")
    try:
        frame = reader.parquet(*urls)
    finally:
        spark.conf.set(INFERENCE, setting)
    is_text = dict(frame.dtypes).get("date") == "string"
    return frame.withColumn("date", frame["date"].cast("date")) if is_text else frame
