"""Messages to work on, from archives and from Parquet, distinguished by their content.

A file is Parquet when it begins as such; a directory is when the first file in it is. Everything
else is an archive. Both become the same columns (`MESSAGE_DDL`); Parquet without such columns is
refused. The output of a stream is read by its log, which leaves out what an interrupted batch
wrote.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from functools import reduce
from pathlib import Path
from typing import TYPE_CHECKING

from nsqtools.archive.layout import PART, is_hidden
from nsqtools.archive.reader import EVER, TimeRange
from nsqtools.errors import ConfigurationError, NotFoundError, OutputError
from nsqtools.files.opening import open_to_read
from nsqtools.spark.archives.message_columns import MESSAGE_DDL
from nsqtools.spark.jobs.compaction.inventory import day_of
from nsqtools.spark.location import spark_url

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, SparkSession

PARQUET_MAGIC = b"PAR1"
NEEDED = ("ts_ns", "body")


@dataclass(frozen=True, slots=True)
class Inputs:
    """Where messages are. Made by `find_inputs`."""

    archives: tuple[Path, ...]
    parquet: tuple[Path, ...]


@dataclass(frozen=True, slots=True)
class Choice:
    """Which messages, of what is read: topics (none: all) and times; and what damage does.

    With a ``damage_path`` it is skipped and reported there, else it is an error.
    ``delimiter`` ends each of the bare bodies.
    """

    topics: tuple[str, ...] = ()
    within: TimeRange = EVER
    delimiter: bytes | None = None
    damage_path: Path | None = None
    min_partitions: int = 0
    """Of archives; 0 leaves it to the format."""


def find_inputs(paths: Sequence[Path]) -> Inputs:
    """Separate archives from Parquet. Raises `NotFoundError` and `OutputError`."""
    archives: list[Path] = []
    parquet: list[Path] = []
    for path in map(Path.absolute, paths):
        if not path.exists():
            raise NotFoundError(f"there is no {path}")
        try:
            (parquet if is_parquet(path) else archives).append(path)
        except OSError as exc:
            raise OutputError(f"cannot read {exc.filename or path} ({exc.strerror})") from exc
    return Inputs(tuple(archives), tuple(parquet))


def refuse_nested(option: str, folder: Path, archives: Path) -> None:
    """Refuse an output in an archive, or the other way round: it would be read as one.

    Raises `ConfigurationError`.
    """
    folder, archives = folder.resolve(), archives.resolve()
    if folder == archives or folder in archives.parents or archives in folder.parents:
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


def read_messages(spark: SparkSession, inputs: Inputs, choice: Choice) -> DataFrame:
    """The chosen messages, with the columns of `MESSAGE_DDL`. Raises `ConfigurationError`."""
    datasets: dict[Path, list[Path]] = {}
    for path in inputs.parquet:
        datasets.setdefault(_dataset_root(path), []).append(path)
    frames = [_read_parquet(spark, root, paths, choice) for root, paths in datasets.items()]
    if inputs.archives:
        frames.append(_read_archives(spark, inputs.archives, choice))
    rows = reduce(lambda one, other: one.unionByName(other), frames)
    return _chosen(rows, choice)


def _read_archives(spark: SparkSession, paths: Sequence[Path], choice: Choice) -> DataFrame:
    reader = spark.read.format("nsq-archive").schema(MESSAGE_DDL).option("format", "raw")
    options = {
        "topics": ",".join(choice.topics),
        "since": _moment(choice.within.since_ns),
        "until": _moment(choice.within.until_ns, up=999),
        "delimiter": escaped(choice.delimiter),
        "minPartitions": str(choice.min_partitions or ""),
        **damage_options(choice.damage_path),
    }
    reader = reader.options(**{name: text for name, text in options.items() if text})
    return reader.load([str(path) for path in paths])


def damage_options(damage_path: Path | None) -> dict[str, str]:
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


def _read_parquet(
    spark: SparkSession, root: Path, paths: Sequence[Path], choice: Choice
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
