"""One partition of an output in an object store, or of a Delta table: write, read back, publish.

Rows are united and deduplicated as in `partition_job`. Parquet is written beside what is there,
read back and compared, then published by its manifest; what was there before is removed. A Delta
table takes the new partition in place of the old one in one commit, which is read back, and then
noted in a manifest. A run that is killed between these two has changed nothing that counts: the
next one takes the same archives again, and finds their messages there already.
"""

from __future__ import annotations

import uuid
from collections.abc import Iterable
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING
from urllib.parse import unquote, urlsplit

from nsqtools.errors import ConfigurationError
from nsqtools.spark.archives.damage import read_damage
from nsqtools.spark.jobs.compaction.compacted_output import Manifest, PartitionTotals, folder_of
from nsqtools.spark.jobs.compaction.compaction_plan import PlannedPartition
from nsqtools.spark.jobs.compaction.inventory import Slot
from nsqtools.spark.jobs.compaction.partition_job import (
    STORED_DDL,
    WRITE_OPTIONS,
    ArchiveReading,
    PartitionResult,
    compare,
    compare_written,
    deduplicated,
    differs,
    files_for,
    observed,
    once,
    read_archives,
    result_of,
    stored_damage,
    total_of,
    totals,
)
from nsqtools.spark.jobs.compaction.stored_output import StoredOutput
from nsqtools.spark.location import spark_url

if TYPE_CHECKING:
    from pyspark.sql import Column, DataFrame, SparkSession


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
        names = _write(spark, kept_rows, slot, output, -1 if version is None else version)
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


def _write(
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
