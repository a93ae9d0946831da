"""Pauses in a topic: nobody published for longer than some time.

Messages are put into slots as long as that time. A pause that is longer begins in one slot and ends
in another, and the slots between are empty: so the first and last message of each slot are enough,
and of these there are no more than slots, however many messages there were.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from pyspark.sql import DataFrame

MOST_GAPS = 1000


@dataclass(frozen=True, slots=True)
class Gap:
    """After ``begin_ns`` nothing was published to a topic for ``length_ns``."""

    topic: str
    begin_ns: int
    length_ns: int


def collect_gaps(messages: DataFrame, longer_than_ns: int) -> tuple[list[Gap], int]:
    """Return the longest pauses, at most `MOST_GAPS`, in order of time, and how many there are."""
    from pyspark.sql import Observation, Window
    from pyspark.sql import functions as F

    timed = messages.where(F.col("topic").isNotNull() & F.col("ts_ns").isNotNull())
    slot = F.col("ts_ns") - F.pmod("ts_ns", F.lit(longer_than_ns))
    slots = timed.groupBy("topic", slot.alias("slot")).agg(
        F.min("ts_ns").alias("first"), F.max("ts_ns").alias("last")
    )
    before = F.lag("last").over(Window.partitionBy("topic").orderBy("slot"))
    pauses = slots.select(
        "topic", before.alias("begin"), (F.col("first") - before).alias("length")
    ).where(F.col("length") > longer_than_ns)
    count = Observation()
    counted = pauses.observe(count, F.count(F.lit(1)).alias("gaps"))
    longest = counted.orderBy(F.desc("length")).limit(MOST_GAPS).collect()
    gaps = [Gap(row["topic"], row["begin"], row["length"]) for row in longest]
    gaps.sort(key=lambda gap: (gap.begin_ns, gap.topic))
    return gaps, int(count.get["gaps"])
