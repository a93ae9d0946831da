"""Messages to work on, from archives and from Parquet, distinguished by their content.

A file is Parquet when it begins as such; a directory is when the first file in it is. Everything
else is an archive. Both become the same columns (`MESSAGE_DDL`); Parquet without such columns is
refused. The output of a stream is read by its log, which leaves out what an interrupted batch
wrote.
"""

from __future__ import annotations

import os
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from functools import reduce
from pathlib import Path
from typing import TYPE_CHECKING

from nsqtools.archive.columns import filtered_columns
from nsqtools.archive.finding import PARQUET_MAGIC
from nsqtools.archive.layout import PART, is_hidden
from nsqtools.archive.reader import EVER, TimeRange
from nsqtools.archive.storage import failure_of
from nsqtools.errors import ConfigurationError, NotFoundError
from nsqtools.files.opening import open_to_read
from nsqtools.spark.archives.message_columns import ARCHIVED_DDL, MESSAGE_DDL
from nsqtools.spark.jobs.compaction.inventory import day_of
from nsqtools.spark.location import Location, StoredPlace, absolute, contains, spark_url
from nsqtools.spark.packages import DELTA_LOG

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, DataFrameReader, SparkSession

NEEDED = ("ts_ns", "body")


@dataclass(frozen=True, slots=True)
class Inputs:
    """Where messages are. Made by `find_inputs`."""

    archives: tuple[Location, ...]
    parquet: tuple[Location, ...]
    delta: tuple[Location, ...] = ()

    @property
    def places(self) -> tuple[Location, ...]:
        """All of them."""
        return (*self.archives, *self.parquet, *self.delta)


@dataclass(frozen=True, slots=True)
class Choice:
    """Which messages, of what is read: topics (none: all) and times; and what damage does.

    With a ``damage_path`` it is skipped and reported there, else it is an error.
    ``delimiter`` ends each of the bare bodies.
    """

    topics: tuple[str, ...] = ()
    within: TimeRange = EVER
    delimiter: bytes | None = None
    damage_path: Location | None = None
    min_partitions: int = 0
    """Of archives; 0 leaves it to the format."""


def find_inputs(paths: Sequence[Location]) -> Inputs:
    """Separate archives from Parquet and Delta.

    Raises `NotFoundError`, and as `failure_of` says.
    """
    found: dict[str, list[Location]] = {"archives": [], "parquet": [], "delta": []}
    for path in map(absolute, paths):
        try:
            kind = _stored_kind(path) if isinstance(path, StoredPlace) else _kind(path)
        except OSError as exc:
            raise failure_of(exc, "read", path) from exc
        found[kind].append(path)
    return Inputs(*(tuple(found[kind]) for kind in ("archives", "parquet", "delta")))


def _kind(path: Path) -> str:
    if not path.exists():
        raise NotFoundError(f"there is no {path}")
    if (path / DELTA_LOG).is_dir():
        return "delta"
    return "parquet" if is_parquet(path) else "archives"


def _stored_kind(place: StoredPlace) -> str:
    """What lies in an object store: the first object with data decides, in order of names."""
    entries = {entry.name: entry for entry in place.below()}
    if not entries:
        try:
            entries = {"": place.entry()}
        except FileNotFoundError:
            raise NotFoundError(f"there is nothing in {place}") from None
    if any(name.startswith(f"{DELTA_LOG}/") for name in entries):
        return "delta"
    for name in sorted(entries):
        is_data = entries[name].size and not any(part[:1] in "._" for part in name.split("/"))
        if name == "" or is_data:
            first = place / name if name else place
            magic = first.storage.read_range(first.key, 0, len(PARQUET_MAGIC))
            return "parquet" if magic == PARQUET_MAGIC else "archives"
    return "archives"


def refuse_nested(option: str, folder: Location, archives: Location) -> None:
    """Refuse an output in an archive, or the other way round: it would be read as one.

    Raises `ConfigurationError`.
    """
    if contains(folder, archives) or contains(archives, folder):
        raise ConfigurationError(
            f"{option} {folder} and the archives in {archives} must not contain each other",
            hint="Give a directory beside it.",
        )


def is_parquet(path: Path) -> bool:
    """Whether the first bytes are those of Parquet. Raises ``OSError``."""
    if path.is_dir():
        first = _first_file(path)
        return first is not None and is_parquet(first)
    with open_to_read(path) as file:
        return file.read(len(PARQUET_MAGIC)) == PARQUET_MAGIC


def _first_file(directory: Path) -> Path | None:
    """The first file that has data; of archives those in progress too."""
    for folder, folders, names in os.walk(directory):
        folders[:] = sorted(name for name in folders if name[0] not in "._")
        for name in sorted(names):
            path = Path(folder, name)
            if (name[0] not in "._" or is_hidden(name, PART)) and path.stat().st_size:
                return path
    return None


MESSAGE_COLUMNS = tuple(column.split()[0] for column in MESSAGE_DDL.split(", "))


def read_messages(
    spark: SparkSession, inputs: Inputs, choice: Choice, used: Collection[str] = MESSAGE_COLUMNS
) -> DataFrame:
    """The chosen messages, with the columns of `MESSAGE_DDL`. Raises `ConfigurationError`.

    Of archives only the ``used`` columns are read, and those that the choice is made by.
    """
    datasets: dict[Location, list[Location]] = {}
    for path in inputs.parquet:
        if isinstance(path, StoredPlace):
            datasets.setdefault(_stored_root(path), []).extend(parquet_objects(path))
        else:
            datasets.setdefault(_dataset_root(path), []).append(path)
    frames = [_read_parquet(spark, root, paths, choice) for root, paths in datasets.items()]
    frames += [_read_delta(spark, place, choice) for place in inputs.delta]
    if inputs.archives:
        read = {*used, *filtered_columns(choice.within, ["topic"] if choice.topics else [])}
        frames.append(_read_archives(spark, inputs.archives, choice, read))
    rows = reduce(lambda one, other: one.unionByName(other), frames)
    return _chosen(rows, choice)


def _read_archives(
    spark: SparkSession, paths: Sequence[Location], choice: Choice, used: Collection[str]
) -> DataFrame:
    reader = spark.read.format("nsq-archive").option("format", "raw")
    options = {
        "topics": ",".join(choice.topics),
        "since": _moment(choice.within.since_ns),
        "until": _moment(choice.within.until_ns, up=999),
        "delimiter": escaped(choice.delimiter),
        "minPartitions": str(choice.min_partitions or ""),
        **damage_options(choice.damage_path),
    }
    reader = reader.options(**{name: text for name, text in options.items() if text})
    return load_columns(reader, [str(path) for path in paths], used, MESSAGE_DDL)


def load_columns(
    reader: DataFrameReader, paths: Sequence[str], used: Collection[str], ddl: str = ARCHIVED_DDL
) -> DataFrame:
    """The rows of archives with all columns of ``ddl``: those that are not ``used`` are null.

    Spark asks a data source in Python for the columns of its schema, whatever a query uses.
    """
    known = [tuple(column.split()) for column in ARCHIVED_DDL.split(", ")]
    read = [(name, kind) for name, kind in known if name in used] or known[-1:]
    rows = reader.schema(", ".join(f"{name} {kind}" for name, kind in read)).load(list(paths))
    names = {name for name, _ in read}
    given = (column.split() for column in ddl.split(", "))
    return rows.selectExpr(
        *(name if name in names else f"CAST(NULL AS {kind}) AS {name}" for name, kind in given)
    )


def damage_options(damage_path: Location | None) -> dict[str, str]:
    """What has damage written to a directory; without one it fails the job."""
    if damage_path is None:
        return {}
    return {"onDamage": "report", "damagePath": str(damage_path)}


def escaped(delimiter: bytes | None) -> str:
    """A delimiter as the format ``nsq-archive`` reads it; empty for None."""
    return "".join(f"\\x{byte:02x}" for byte in delimiter or b"")


def _moment(timestamp_ns: int | None, *, up: int = 0) -> str:
    """A time for the reader to skip by: to the microsecond, rounded so that nothing is missed."""
    if timestamp_ns is None:
        return ""
    moment = datetime(1970, 1, 1, tzinfo=UTC) + timedelta(microseconds=(timestamp_ns + up) // 1000)
    return moment.isoformat()


def _read_delta(spark: SparkSession, place: Location, choice: Choice) -> DataFrame:
    rows = spark.read.format("delta").load(spark_url(place))
    return _of_days(rows, choice.within).select(*MESSAGE_COLUMNS)


def parquet_objects(place: StoredPlace, *, as_files: bool = False) -> list[StoredPlace]:
    """Return what of the Parquet at a place counts: what compaction published, or all of it.

    All of it is the place itself, or ``as_files`` each of them. Raises as `failure_of` says.
    """
    from nsqtools.spark.jobs.compaction.stored_output import StoredOutput

    published = StoredOutput(place, is_delta=False).published()
    if published is not None:
        return [place / name for name in published]
    if not as_files:
        return [place]
    try:
        found = [place / each.name if each.name else place for each in place.below()]
        return [each for each in found if each.name.endswith(".parquet")] or [place]
    except OSError as exc:
        raise failure_of(exc, "list", place) from exc


def _stored_root(place: StoredPlace) -> StoredPlace:
    """The place above the partitions that a place leads into."""
    parts = place.key.split("/")
    at = next((at for at, part in enumerate(parts) if "=" in part), None)
    return place if at is None else StoredPlace(place.bucket, "/".join(parts[:at]))


def _read_parquet(
    spark: SparkSession, root: Location, paths: Sequence[Location], choice: Choice
) -> DataFrame:
    """The rows of one dataset: all of it, or those of its directories and files that are given."""
    reader = spark.read
    urls = [spark_url(path) for path in paths]
    if list(paths) != [root]:
        reader = reader.option("basePath", spark_url(root))
    known = {field.name for field in reader.parquet(*urls).schema.fields}
    if missing := [name for name in NEEDED if name not in known]:
        raise ConfigurationError(
            f"{paths[0]} is Parquet without the columns {', '.join(missing)}",
            hint="What nsq spark compact and nsq spark ingest write has them.",
        )
    # given, not inferred: a topic may be called 2026
    rows = reader.schema(f"{MESSAGE_DDL}, date date").parquet(*urls)
    return _of_days(rows, choice.within).drop("date")


def _dataset_root(path: Path) -> Path:
    """The directory above the partitions that a path leads into; of a lone file its own."""
    folders = [folder for folder in (path, *path.parents) if "=" in folder.name]
    if folders:
        return folders[-1].parent
    return path if path.is_dir() else path.parent


def _of_days(rows: DataFrame, within: TimeRange) -> DataFrame:
    """Let Spark leave out whole partitions."""
    from pyspark.sql import functions as F

    day = F.col("date")
    if within.since_ns is not None:
        rows = rows.where(day.isNull() | (day >= F.lit(day_of(within.since_ns))))
    if within.until_ns is not None:
        rows = rows.where(day.isNull() | (day <= F.lit(day_of(within.until_ns))))
    return rows


def _chosen(rows: DataFrame, choice: Choice) -> DataFrame:
    from pyspark.sql import functions as F

    if choice.topics:
        rows = rows.where(F.col("topic").isin(*choice.topics))
    if choice.within.since_ns is not None:
        rows = rows.where(F.col("ts_ns") >= choice.within.since_ns)
    if choice.within.until_ns is not None:
        rows = rows.where(F.col("ts_ns") < choice.within.until_ns)
    return rows
