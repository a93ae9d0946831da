"""A batch of messages into a Delta table: what the table has already is left out.

A message may come again in a later batch: two archivers had it, or nsqd gave it out again after a
crash. It has the identity and the time of publishing that it had. So a batch is compared with those
files of the table that may hold its topics, days and times, which Delta knows of each file, and the
rest is appended in one commit, which readers see whole or not at all. That is an insert-only merge;
as an append it does not fail for what another writer of the table does meanwhile.

The commit has the number of the batch. Spark repeats a batch when a crash came between the commit
of the table and that of the checkpoint: Delta then ignores it, bare bodies included, which have no
identity. As with Delta's own sink, a query is named by the id in its checkpoint.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from typing import TYPE_CHECKING

from nsqtools.archive.storage_objects import open_storage
from nsqtools.errors import OutputError
from nsqtools.spark.archives.message_columns import IDENTITY
from nsqtools.spark.location import Location, absolute, spark_url
from nsqtools.spark.packages import DELTA_LOG

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, Row

PARTITIONS = ("topic", "date")
FILE_BYTES = 64 << 20  # of bodies


@dataclass(frozen=True, slots=True)
class DeltaSink:
    """What ``foreachBatch`` calls."""

    output: Location
    checkpoint: Location

    def __call__(self, batch: DataFrame, number: int) -> None:
        """Append what is new of a batch. Raises what Spark raises, and `OutputError`."""
        kept = batch.persist()  # it is read twice, and must be counted once
        try:
            if slots := _slots(kept):
                self._append(self._new(kept, slots), number)
        finally:
            kept.unpersist()

    def _new(self, rows: DataFrame, slots: list[Row]) -> DataFrame:
        from pyspark.sql import functions as F

        tasks = 1 + sum(slot.body_bytes for slot in slots) // FILE_BYTES
        named, bare = rows.where(F.col("id").isNotNull()), rows.where(F.col("id").isNull())
        named = named.repartition(tasks, *IDENTITY).dropDuplicates(list(IDENTITY))
        dated = [slot for slot in slots if slot.first_ns is not None]
        if dated and self._has_table():
            table = rows.sparkSession.read.format("delta").load(spark_url(self.output))
            first, last = min(each.first_ns for each in dated), max(each.last_ns for each in dated)
            there = table.where(
                F.col("topic").isin([each.topic for each in dated])
                & F.col("date").isin([each.date for each in dated])
                & F.col("ts_ns").between(first, last)
            )
            named = named.join(there.select(*IDENTITY), list(IDENTITY), "left_anti")
        return named.unionByName(bare.coalesce(tasks)).select(*rows.columns)

    def _append(self, rows: DataFrame, number: int) -> None:
        writer = rows.write.format("delta").mode("append").partitionBy(*PARTITIONS)
        writer = writer.option("txnAppId", self._query()).option("txnVersion", number)
        writer.option("compression", "zstd").save(spark_url(self.output))

    def _has_table(self) -> bool:
        return next(iter(open_storage(str(self.output)).list(DELTA_LOG)), None) is not None

    def _query(self) -> str:
        place = open_storage(str(absolute(self.checkpoint)))
        try:
            return str(json.loads(place.read("metadata"))["id"])
        except (OSError, ValueError, KeyError) as exc:
            raise OutputError(f"cannot read {place.where('metadata')} ({exc})") from exc


def _slots(rows: DataFrame) -> list[Row]:
    """The topics and days in a batch, with the range of their times."""
    from pyspark.sql import functions as F

    size = F.coalesce(F.sum(F.length("body")), F.lit(0)).alias("body_bytes")
    first, last = F.min("ts_ns").alias("first_ns"), F.max("ts_ns").alias("last_ns")
    return rows.groupBy(*PARTITIONS).agg(size, first, last).collect()
