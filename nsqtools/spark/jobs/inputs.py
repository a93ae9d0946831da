"""Messages to work on, from archives and from Parquet, distinguished by their content.

A file is Parquet when it begins as such; a directory is when the first file in it is. Everything
else is an archive. Both become the same columns (`MESSAGE_COLUMNS`); Parquet without such columns
is refused. The output of a stream is read by its log, which leaves out what an interrupted batch
wrote.
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

from nsqtools.archive.catalog import NEEDED, range_of, without_columns
from nsqtools.archive.columns import filtered_columns
from nsqtools.archive.delta import Partition
from nsqtools.archive.finding import Inputs, table_files
from nsqtools.archive.form import LineKind
from nsqtools.archive.layout import EVER, TimeRange
from nsqtools.archive.place import Place, translating_errors
from nsqtools.errors import NotFoundError
from nsqtools.spark.archives.archive_files import ArchiveListing, ListedFile
from nsqtools.spark.archives.read_settings import BYTES, ReadSettings, moment
from nsqtools.spark.pyspark_internals import GLOB_PATHS, struct_of

log = logging.getLogger("nsqtools")

INFERENCE = "spark.sql.sources.partitionColumnTypeInference.enabled"


class Choice(NamedTuple):
    """Which messages, of what is read: topics (none: all) and times; and what damage does.

    With a ``damage_path`` it is skipped and reported there, else it is an error.
    ``delimiter`` ends each of the bare bodies.
    """

    topics: tuple[str, ...] = ()
    within: TimeRange = EVER
    delimiter: bytes | None = None
    damage_path: Place | None = None
    min_partitions: int = 0
    """Of archives; 0 leaves it to the format."""

    def is_wanted(self, partition: Partition) -> bool:
        """Whether files of a partition have to be read."""
        topic, day = partition.get("topic"), partition.get("date")
        if self.topics and topic is not None and topic not in self.topics:
            return False
        try:
            begin, end = range_of(date.fromisoformat(day or ""))
        except ValueError:  # missing, or not a date
            return True
        return self.within.meets(begin, end - 1)


MESSAGE_COLUMNS = tuple(BYTES.message_schema().names)


def read_messages(
    spark: SparkSession, inputs: Inputs, choice: Choice, used: Collection[str] = MESSAGE_COLUMNS
) -> DataFrame:
    """The chosen messages, with the columns of `MESSAGE_COLUMNS`. Raises `ConfigurationError`.

    Of archives only the ``used`` columns are read, and those that the choice is made by.
    """
    tables = table_files((*inputs.parquet, *inputs.delta), choice.is_wanted)
    columns = struct_of(BYTES.message_schema()).add("body_bytes", "binary").add("date", "date")
    frames = [
        read_files(spark, root, names, columns)
        .withColumn("body", F.coalesce(F.col("body"), F.col("body_bytes")))
        .select(*MESSAGE_COLUMNS)
        for root, names in tables.items()
    ]
    if inputs.archives:
        read = {*used, *filtered_columns(choice.within, ["topic"] if choice.topics else [])}
        frames.append(_read_archives(spark, inputs.archives, choice, read))
    rows = reduce(lambda one, other: one.unionByName(other), frames)
    return _chosen(rows, choice)


def listed(inputs: Inputs) -> list[ListedFile]:
    """The archive files, as the format ``nsq-archive`` finds and orders them. Raises `NsqError`."""
    listing = ArchiveListing(ReadSettings(tuple(map(str, inputs.archives))))
    return list(listing.files(lambda damage: None).values())


def has_bare_bodies(inputs: Inputs) -> bool:
    """Whether some archive holds bodies alone. Raises `NsqError`."""
    with translating_errors("read", ""):
        found = (file.content() for file in listed(inputs))
        return any(each.kind is LineKind.bodies and not each.foreign for each in found)


def warn_of_bare_bodies(inputs: Inputs, within: TimeRange) -> None:
    """Log that a range of times leaves them out, if there are some. Raises `NsqError`."""
    if within != EVER and has_bare_bodies(inputs):
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
    given = {name: text for name, text in options.items() if text}
    reader = spark.read.format("nsq-archive").options(**given)
    known = struct_of(BYTES.archived_schema())
    return load_columns(reader, paths, used, known).select(*MESSAGE_COLUMNS)


def load_columns(
    reader: DataFrameReader, paths: Iterable[Place], used: Collection[str], known: StructType
) -> DataFrame:
    """The rows of archives with all ``known`` columns: those that are not ``used`` are null.

    Spark asks a data source in Python for the columns of its schema, whatever a query uses.
    """
    # the file's name is there without a look at the lines
    read = [each for each in known.fields if each.name in used] or [known["file"]]
    rows = reader.schema(StructType(read)).load(list(map(str, paths)))
    missing = {each.name: F.lit(None).cast(each.dataType) for each in known if each not in read}
    return rows.withColumns(missing).to(known)  # a name may have a dot


def damage_options(damage_path: Place | None) -> dict[str, str]:
    """What has damage written to a directory; without one it fails the job."""
    if damage_path is None:
        return {}
    return {"onDamage": "report", "damagePath": str(damage_path)}


def read_files(
    spark: SparkSession, root: Place, names: Sequence[str], columns: StructType | None = None
) -> DataFrame:
    """The rows of Parquet files below a root. They are named, by a log where there is one.

    So no jar of Delta is needed, and every version of Spark will do. Without ``columns`` there are
    all that some file has; a topic may be called 2026, so the values of partitions are text, and
    only the date is one. Raises `NotFoundError` where there is nothing, and
    `ConfigurationError` for Parquet of something else.
    """
    reader = spark.read.option("basePath", root.hadoop_url).option(GLOB_PATHS, value=False)
    reader = reader.option("mergeSchema", columns is None)
    urls = [f"{root.hadoop_url}/{name}" for name in names]
    if columns is not None:
        if not urls:
            return spark.createDataFrame([], columns)
        known = reader.parquet(urls[0]).columns
        if missing := [name for name in NEEDED if name not in known]:
            raise without_columns(f"{root}/{names[0]}", missing)
        return reader.schema(columns).parquet(*urls)
    if not urls:
        raise NotFoundError(f"{root} has no rows yet")
    before = spark.conf.get(INFERENCE) or "true"
    spark.conf.set(INFERENCE, "false")
    try:
        frame = reader.parquet(*urls)
    finally:
        spark.conf.set(INFERENCE, before)
    is_text = dict(frame.dtypes).get("date") == "string"
    return frame.withColumn("date", frame["date"].cast("date")) if is_text else frame


def _chosen(rows: DataFrame, choice: Choice) -> DataFrame:
    if choice.topics:
        rows = rows.where(F.col("topic").isin(*choice.topics))
    if choice.within.since_ns is not None:
        rows = rows.where(f"ts_ns >= {choice.within.since_ns}")  # py4j has no greater numbers
    if choice.within.until_ns is not None:
        rows = rows.where(f"ts_ns < {choice.within.until_ns}")
    return rows
