"""One partition in Spark: read, unite, deduplicate, write, read back, compare and publish.

Rows are shuffled by identity, so that all copies of a message meet in one task, which sorts them
and keeps the one of the lowest attempt: the result does not depend on the order of files. Then the
task's rows are sorted by time, and become one file. Spark's observations count on the way: what was
read from archives, what the partition held before, and what is kept, the last with a checksum over
every byte. What is read back must be equal.

Bare bodies are not shuffled: their files are added to the existing ones.

In an object store Parquet is written beside what is there, and published by its manifest; what was
there before is removed. A Delta table takes the new partition in place of the old one in one
commit, which is read back, and then noted in a manifest. A run that is killed between these two has
changed nothing that counts: the next one takes the same archives again, and finds their messages
there already.
"""

from __future__ import annotations

import os
import shutil
import uuid
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING, Any
from urllib.parse import unquote, urlsplit

from nsqtools.archive.storage import failure_of
from nsqtools.errors import ConfigurationError, NsqError, OutputError
from nsqtools.spark.archives.damage import ArchiveDamage, read_damage
from nsqtools.spark.jobs.compaction.compacted_output import (
    STAGING,
    SUMMARIES,
    CompactionOutput,
    Input,
    Manifest,
    PartitionTotals,
    data_files,
    folder_of,
    naming_path,
    write_manifest,
)
from nsqtools.spark.jobs.compaction.compaction_plan import PlannedPartition
from nsqtools.spark.jobs.compaction.inventory import CountedFile, Slot, begin_ns, end_ns
from nsqtools.spark.jobs.compaction.stored_output import StoredOutput
from nsqtools.spark.jobs.inputs import damage_options, escaped
from nsqtools.spark.location import Location, StoredPlace, spark_url

if TYPE_CHECKING:
    from pyspark.sql import Column, DataFrame, Observation, SparkSession

FILE_BYTES = 32 << 20
"""About how large a Parquet file becomes; a task sorts as much, some 200 MB unpacked."""

STORED_DDL = "nsqd string, id string, timestamp timestamp, ts_ns bigint, attempts int, body binary"
STORED = ("nsqd", "id", "timestamp", "ts_ns", "attempts", "body")
HASHED = ("nsqd", "id", "ts_ns", "attempts", "body")
WRITE_OPTIONS = {
    "compression": "zstd",
    "mapreduce.fileoutputcommitter.marksuccessfuljobs": "false",
}


@dataclass(frozen=True, slots=True)
class ArchiveReading:
    """How archives are read: what ends a bare body, and whether damage is skipped."""

    delimiter: bytes | None = None
    skip_damaged: bool = False


@dataclass(frozen=True, slots=True)
class PartitionResult:
    """What became of a partition in this run."""

    partition: PlannedPartition
    manifest: Manifest
    rows_read: int
    duplicates_removed: int
    damages: tuple[ArchiveDamage, ...] = ()


def compact_partition(
    spark: SparkSession,
    partition: PlannedPartition,
    before: Manifest | None,
    output: CompactionOutput,
    reading: ArchiveReading,
) -> PartitionResult:
    """Rebuild a partition from what it holds and from the new archives, and replace it.

    Raises `NsqError` when what was written is not what was read, or an archive is damaged; the
    partition is as it was then.
    """
    slot = partition.slot
    staged = output.staged(slot)
    with damage_folder(output, slot, reading) as damage_path:
        archived = read_archives(spark, partition, reading, damage_path)
        if slot.day is None:
            read, kept = _append(archived, partition, staged)
            held = PartitionTotals()
        else:
            read, held, kept = _merge(spark, archived, partition, before, output)
        damages = tuple(read_damage(damage_path)) if damage_path else ()
    damaged = {damage.file for damage in damages}
    compare(partition, read, held, before, damaged)
    compare_written(slot, kept, read_back(spark, staged))
    if (found := rows_in_place(staged)) != kept.rows:
        raise differs(slot, f"{staged} should hold", kept.rows, found)
    if slot.day is None and before is not None:
        _link(output.final(slot), staged)
        kept = _plus(kept, before)
    files = {path.name: path.stat().st_size for path in data_files(staged)}
    result = result_of(partition, before, read, kept, damages, damaged, files)
    write_manifest(staged, result.manifest)
    output.take_place(slot)
    return result


@contextmanager
def damage_folder(
    output: CompactionOutput, slot: Slot, reading: ArchiveReading
) -> Iterator[Path | None]:
    """Where tasks report what they could not read, while they run."""
    folder = output.root / STAGING / "damage" / folder_of(slot)
    shutil.rmtree(folder, ignore_errors=True)
    yield folder if reading.skip_damaged else None
    shutil.rmtree(folder, ignore_errors=True)


@contextmanager
def stored_damage(root: Location, slot: Slot, reading: ArchiveReading) -> Iterator[Location | None]:
    """Where tasks report what they could not read, beside an output in an object store."""
    if isinstance(root, Path):
        with damage_folder(CompactionOutput(root), slot, reading) as folder:
            yield folder
        return
    place = root / f"{SUMMARIES}/damage/{folder_of(slot)}"
    _clear(place)
    yield place if reading.skip_damaged else None
    _clear(place)


def _clear(place: StoredPlace) -> None:
    try:
        for entry in list(place.below()):
            place.storage.delete((place / entry.name).key)
    except OSError as exc:
        raise failure_of(exc, "use", place) from exc


def read_archives(
    spark: SparkSession,
    partition: PlannedPartition,
    reading: ArchiveReading,
    damage_path: Location | None,
) -> DataFrame:
    """The rows of a partition's new archives."""
    from pyspark.sql import functions as F

    slot = partition.slot
    reader = spark.read.format("nsq-archive").schema(f"topic string, {STORED_DDL}")
    reader = reader.options(**damage_options(damage_path))
    if slot.topic is None or slot.day is None:
        if reading.delimiter is not None:
            reader = reader.option("delimiter", escaped(reading.delimiter))
        rows = reader.option("format", "raw").load(_paths(partition))
        return rows.where(F.col("topic").isNull()).select(*STORED)
    reader = reader.option("since", f"{slot.day}T00:00:00Z").option("topics", slot.topic)
    rows = reader.option("until", _moment(end_ns(slot.day))).load(_paths(partition))
    is_of_day = F.col("ts_ns").between(begin_ns(slot.day), end_ns(slot.day) - 1)
    return rows.where(is_of_day & (F.col("topic") == slot.topic)).select(*STORED)


def _paths(partition: PlannedPartition) -> list[str]:
    return [str(content.path) for content in partition.contents]


def _moment(timestamp_ns: int) -> str:
    return datetime.fromtimestamp(timestamp_ns // 1_000_000_000, UTC).strftime("%Y-%m-%dT%H:%M:%SZ")


def _merge(
    spark: SparkSession,
    archived: DataFrame,
    partition: PlannedPartition,
    before: Manifest | None,
    output: CompactionOutput,
) -> tuple[PartitionTotals, PartitionTotals, PartitionTotals]:
    """Write the staged partition; return what was read, what was held, and what was kept."""
    passing, read = observed(archived)
    rows, stored, held = passing, None, None
    size = partition.size
    if before is not None:
        stored = spark.read.schema(STORED_DDL).parquet(spark_url(output.final(partition.slot)))
        passing, held = observed(stored)
        rows = rows.unionByName(passing)
        size += sum(before.files.values())
    kept_rows, kept = observed(deduplicated(rows, files_for(size)), checksum=True)
    _write(kept_rows.sortWithinPartitions("ts_ns", "nsqd", "id"), output.staged(partition.slot))
    held_rows = before.rows_written if before is not None else 0
    return (
        once(archived, totals(read), partition.messages),
        once(stored, totals(held), held_rows),
        totals(kept),
    )


def deduplicated(rows: DataFrame, partitions: int) -> DataFrame:
    """Each message once, the copy of the lowest attempt, in ``partitions`` tasks."""
    identity = ["nsqd", "id"]
    # dropDuplicates takes the first of a group, and finds the rows sorted as it needs them
    together = rows.repartition(partitions, *identity)
    return together.sortWithinPartitions(*identity, "attempts").dropDuplicates(identity)


def _append(
    archived: DataFrame, partition: PlannedPartition, staged: Path
) -> tuple[PartitionTotals, PartitionTotals]:
    rows = archived.coalesce(files_for(partition.size))
    rows, kept = observed(rows, checksum=True)
    _write(rows, staged)
    written = totals(kept)
    return written, written


def _write(rows: DataFrame, folder: Path) -> None:
    rows.write.mode("overwrite").options(**WRITE_OPTIONS).parquet(spark_url(folder))


def files_for(size: int) -> int:
    """Return how many Parquet files ``size`` compressed bytes become."""
    return max(1, -(-size // FILE_BYTES))


def observed(rows: DataFrame, *, checksum: bool = False) -> tuple[DataFrame, Observation]:
    """Count rows while they pass."""
    from pyspark.sql import Observation

    observation = Observation()
    return rows.observe(observation, *_measures(checksum=checksum)), observation


def _measures(*, checksum: bool) -> list[Column]:
    from pyspark.sql import functions as F

    measures = [
        F.count(F.lit(1)).alias("rows"),
        F.coalesce(F.sum(F.length("body")), F.lit(0)).alias("body_bytes"),
    ]
    if checksum:
        hashes = F.bit_xor(F.xxhash64(*HASHED))
        measures.append(F.coalesce(hashes, F.lit(0).cast("long")).alias("checksum"))
    return measures


def totals(observation: Observation | None) -> PartitionTotals:
    """What was counted, once the rows have passed."""
    return PartitionTotals(**observation.get) if observation is not None else PartitionTotals()


def once(rows: DataFrame | None, counted: PartitionTotals, expected: int) -> PartitionTotals:
    """Count rows again that were counted before a shuffle, when there are too many of them.

    When an executor dies, what its tasks had kept for the next stage is gone: they run again, and
    Spark adds their counts again. The rows that are written are counted after the shuffle, once.
    """
    if rows is None or counted.rows <= expected:
        return counted
    found: Any = rows.agg(*_measures(checksum=False)).first()
    return PartitionTotals(**found.asDict())


def read_back(spark: SparkSession, folder: Path) -> tuple[PartitionTotals, int]:
    """Read what was written: see `total_of`."""
    return total_of(spark.read.schema(STORED_DDL).parquet(spark_url(folder)))


def total_of(rows: DataFrame) -> tuple[PartitionTotals, int]:
    """Read rows back: their totals, and how many different messages have an id."""
    from pyspark.sql import functions as F

    measures = _measures(checksum=True)
    row: Any = rows.agg(*measures, F.count_distinct("nsqd", "id").alias("distinct")).first()
    found = row.asDict()
    return PartitionTotals(found["rows"], found["body_bytes"], found["checksum"]), found["distinct"]


def rows_in_place(folder: Path) -> int:
    """Count the rows of the files in a directory, as this process sees them, without Spark.

    Archives are deleted for these files: what Spark wrote elsewhere, it would read back there.
    """
    from pyarrow import ArrowException, parquet

    try:
        return sum(parquet.read_metadata(path).num_rows for path in data_files(folder))
    except (OSError, ArrowException) as exc:
        raise OutputError(f"cannot read back what was written into {folder} ({exc})") from exc


def compare(
    partition: PlannedPartition,
    read: PartitionTotals,
    held: PartitionTotals,
    before: Manifest | None,
    damaged: set[str],
) -> None:
    """Compare what Spark read with the archives' indexes and the manifest."""
    slot = partition.slot
    if before is not None and slot.day is not None:
        expected = (before.rows_written, before.body_bytes)
        if expected != (held.rows, held.body_bytes):
            raise differs(slot, "the partition held", expected[0], held.rows)
    if slot.day is not None and not damaged and read.rows != partition.messages:
        raise differs(slot, "the archives hold", partition.messages, read.rows)


def compare_written(
    slot: Slot, kept: PartitionTotals, written: tuple[PartitionTotals, int]
) -> None:
    """Compare what was read back with what was kept, byte by byte."""
    found, distinct = written
    if found != kept:
        raise differs(slot, "kept were", kept.rows, found.rows)
    if slot.day is not None and distinct != kept.rows:
        raise differs(slot, "different messages are", distinct, found.rows)


def differs(slot: Slot, what: str, expected: int, found: int) -> NsqError:
    """The error for counts that differ; nothing was changed."""
    name = f"{slot.topic} on {slot.day}" if slot.day else "bare bodies"
    return NsqError(
        f"{name}: {what} {expected} rows, {found} were found, or their bytes differ; "
        "the partition stays as it was",
        hint="Check the archives with nsq archive verify, and the disk of the output.",
    )


def _link(final: Path, staged: Path) -> None:
    """Put the files that are there beside the new ones."""
    with naming_path(staged):
        for path in data_files(final):
            try:
                os.link(path, staged / path.name)
            except OSError:
                shutil.copy2(path, staged / path.name)


def _plus(kept: PartitionTotals, before: Manifest) -> PartitionTotals:
    return PartitionTotals(
        kept.rows + before.rows_written,
        kept.body_bytes + before.body_bytes,
        kept.checksum ^ int(before.checksum),
    )


def result_of(
    partition: PlannedPartition,
    before: Manifest | None,
    read: PartitionTotals,
    kept: PartitionTotals,
    damages: tuple[ArchiveDamage, ...],
    damaged: set[str],
    files: Mapping[str, int],
) -> PartitionResult:
    """What became of a partition, with its manifest."""
    slot = partition.slot
    inputs = {each.key: each for each in before.inputs} if before else {}
    inputs |= {each.key: _input(each, slot, damaged) for each in partition.contents}
    rows_read = read.rows + (before.rows_read if before else 0)
    manifest = Manifest(
        topic=slot.topic,
        date=slot.day.isoformat() if slot.day else None,
        compacted_at=datetime.now(UTC).strftime("%Y-%m-%dT%H:%M:%SZ"),
        inputs=tuple(inputs.values()),
        rows_read=rows_read,
        duplicates_removed=rows_read - kept.rows,
        rows_written=kept.rows,
        body_bytes=kept.body_bytes,
        checksum=str(kept.checksum),
        files=dict(files),
    )
    removed = manifest.duplicates_removed - (before.duplicates_removed if before else 0)
    return PartitionResult(partition, manifest, read.rows, removed, damages)


def _input(content: CountedFile, slot: Slot, damaged: set[str]) -> Input:
    return Input(
        str(content.path),
        content.key,
        content.size,
        content.mtime_ns,
        content.members,
        content.messages[slot] if slot.day else None,
        str(content.path) in damaged,
    )


def compact_stored(
    spark: SparkSession,
    partition: PlannedPartition,
    before: Manifest | None,
    output: StoredOutput,
    reading: ArchiveReading,
) -> PartitionResult:
    """Rebuild a partition from what it holds and from the new archives, and replace it.

    Raises `NsqError` when what was written is not what was read, or an archive is damaged.
    """
    slot = partition.slot
    if output.is_delta and slot.day is None:
        raise ConfigurationError(
            "bare bodies have no identity, so a Delta table cannot take them exactly once",
            hint="Compact them to Parquet: without --format delta.",
        )
    with stored_damage(output.root, slot, reading) as damage_path:
        archived = read_archives(spark, partition, reading, damage_path)
        rows, passed_read = observed(archived)
        stored, passed_held = None, None
        size = partition.size + (sum(before.files.values()) if before else 0)
        version = output.table_version()
        if slot.day is not None and (before is not None or version is not None):
            stored = _rows(spark, output, slot, before.files if before else {}, version)
            passing, passed_held = observed(stored)
            rows = rows.unionByName(passing)
        if slot.day is None:
            rows = rows.coalesce(files_for(size))
        else:
            rows = deduplicated(rows, files_for(size)).sortWithinPartitions("ts_ns", "nsqd", "id")
        kept_rows, kept = observed(rows, checksum=True)
        names = _write_stored(spark, kept_rows, slot, output, -1 if version is None else version)
        read, held = totals(passed_read), totals(passed_held)
        if slot.day is not None:
            read = once(archived, read, partition.messages)
        if before is not None and not output.is_delta:
            held = once(stored, held, before.rows_written)
        damages = tuple(read_damage(damage_path)) if damage_path else ()
    damaged = {damage.file for damage in damages}
    written = totals(kept)
    try:
        compare(partition, read, held, None if output.is_delta else before, damaged)
        compare_written(slot, written, total_of(_rows(spark, output, slot, names)))
        if (found := output.rows_in_place(slot, names)) != written.rows:
            raise differs(slot, f"{output.root} should hold", written.rows, found)
    except Exception:
        if not output.is_delta:
            output.remove(slot, names)
        raise
    result = result_of(partition, before, read, written, damages, damaged, names)
    if slot.day is None and before is not None:
        result = replace(result, manifest=_joined(result.manifest, before))
    output.publish(result.manifest)
    if before is not None and slot.day is not None and not output.is_delta:
        output.remove(slot, before.files.keys() - names.keys())
    return result


def _rows(
    spark: SparkSession,
    output: StoredOutput,
    slot: Slot,
    names: Iterable[str],
    version: int | None = None,
) -> DataFrame:
    """What a partition holds: its files, or its rows in a table, of a version or the newest."""
    if output.is_delta:
        reader = spark.read.format("delta")
        if version is not None:
            reader = reader.option("versionAsOf", version)
        table = reader.load(spark_url(output.root))
        return table.where(_is_of(slot)).drop("topic", "date")
    folder = f"{spark_url(output.root)}/{folder_of(slot)}"
    return spark.read.schema(STORED_DDL).parquet(*(f"{folder}/{name}" for name in names))


def _is_of(slot: Slot) -> Column:
    from pyspark.sql import functions as F

    return (F.col("topic") == F.lit(slot.topic)) & (F.col("date") == F.lit(slot.day))


def _write_stored(
    spark: SparkSession, rows: DataFrame, slot: Slot, output: StoredOutput, version: int
) -> dict[str, int]:
    """Write a partition's rows; return the names and sizes of its files."""
    output.still_ours()
    if output.is_delta:
        return _commit(spark, rows, slot, output, version)
    before = output.files(slot)
    folder = f"{spark_url(output.root)}/{folder_of(slot)}"
    rows.write.mode("append").options(**WRITE_OPTIONS).parquet(folder)
    return {name: size for name, size in output.files(slot).items() if name not in before}


def _commit(
    spark: SparkSession, rows: DataFrame, slot: Slot, output: StoredOutput, version: int
) -> dict[str, int]:
    """Replace a partition, of which ``version`` of the table was read."""
    from pyspark.sql import functions as F

    ours, url = uuid.uuid4().hex, spark_url(output.root)
    partitioned = rows.select(
        F.lit(slot.topic).alias("topic"), F.lit(slot.day).alias("date"), *rows.columns
    )
    writer = partitioned.write.format("delta").mode("overwrite").partitionBy("topic", "date")
    writer = writer.option("userMetadata", ours)
    writer.option("replaceWhere", f"topic = '{slot.topic}' AND date = '{slot.day}'").save(url)
    output.refuse_changed(slot, version, ours)
    table = spark.read.format("delta").load(url).where(_is_of(slot))
    urls = [unquote(urlsplit(each).path) for each in table.inputFiles()]
    sizes = output.files(slot)
    return {name: sizes.get(name, 0) for name in (Path(path).name for path in urls)}


def _joined(new: Manifest, before: Manifest) -> Manifest:
    """The manifest of a partition to which bare bodies were added."""
    kept = PartitionTotals(
        new.rows_written + before.rows_written,
        new.body_bytes + before.body_bytes,
        int(new.checksum) ^ int(before.checksum),
    )
    return replace(
        new,
        duplicates_removed=0,
        rows_written=kept.rows,
        body_bytes=kept.body_bytes,
        checksum=str(kept.checksum),
        files={**before.files, **new.files},
    )
