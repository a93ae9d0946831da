"""A report on topics: figures by interval, and gaps, as plain values.

Spark aggregates the figures, so nothing that grows with the number of messages leaves it. First all
copies of a message become one row with their number: that alone distinguishes duplicates from
messages, and has only columns of fixed size, which Spark aggregates by hashing. Then these rows are
aggregated by topic and interval, and by topic alone, weighted by the numbers: percentiles are
exact, because there are few distinct sizes. A message counts once per copy; each further copy is a
duplicate as well. One that nsqd delivered before (attempts above 1) is a redelivery.

For gaps, messages are put into slots of the length looked for. A longer gap begins in one slot and
ends in another, and the slots between are empty, so the first and last message of each slot are
enough.
"""

from __future__ import annotations

from collections.abc import Sequence
from datetime import UTC, datetime, timedelta
from typing import Any

from pyspark.sql import Column, DataFrame, Observation, SparkSession, Window
from pyspark.sql import functions as F

from nsqtools.archive.catalog import Inputs
from nsqtools.errors import ConfigurationError
from nsqtools.protocol.text import NS
from nsqtools.spark.jobs.inputs import Choice, read_messages

MOST_ROWS = 100_000
MOST_GAPS = 1000
SIZES = (0.5, 0.95, 0.99)
ATTEMPTS = (0.5, 0.95)

Document = dict[str, Any]
"""As `cli.render.documents.SparkReport` and its parts describe: times are RFC 3339, spans seconds.

``topic`` is None for bare bodies, ``begin`` for what has no time. Sizes are of bodies, in bytes.
"""


def make_report(
    spark: SparkSession, inputs: Inputs, choice: Choice, *, step_ns: int, gap_ns: int
) -> Document:
    """Read the messages twice: for the figures, and for the pauses. Raises `NsqError`."""
    intervals, topics = collect_figures(read_messages(spark, inputs, choice), step_ns)
    times = ("topic", "ts_ns")  # much less to read
    gaps, gap_count = collect_gaps(read_messages(spark, inputs, choice, times), gap_ns)
    return {
        "sources": list(map(str, inputs.places)),
        "by_s": step_ns / NS,
        "gap_s": gap_ns / NS,
        "topics": topics,
        "intervals": intervals,
        "gaps": gaps,
        "gaps_in_all": gap_count,
    }


def collect_figures(messages: DataFrame, step_ns: int) -> tuple[list[Document], list[Document]]:
    """Return the figures of each topic and interval, and those of each topic.

    Raises `ConfigurationError` when there are too many intervals to be a report.
    """
    rows = _by_message(messages, step_ns)
    topic, begin = F.col("topic"), F.col("begin_ns")
    grouped = rows.groupingSets([[topic, begin], [topic]], topic, begin)
    summed = grouped.agg(F.grouping("begin_ns").alias("is_total"), *_aggregates())
    found = summed.orderBy("is_total", "begin_ns", "topic").limit(MOST_ROWS + 1).collect()
    if len(found) > MOST_ROWS:
        raise ConfigurationError(
            f"this report would have more than {MOST_ROWS} rows",
            hint="Give longer intervals (--by day), fewer topics, or a shorter time.",
        )
    intervals: list[Document] = []
    topics: list[Document] = []
    for row in found:
        figures = row.asDict()
        is_total, begin_ns = figures.pop("is_total"), figures.pop("begin_ns")
        figures |= {each: moment(figures[each]) for each in ("first", "last")}
        if is_total:
            topics.append(figures)
        else:
            intervals.append({"topic": figures.pop("topic"), "begin": moment(begin_ns), **figures})
    return intervals, topics


def _by_message(messages: DataFrame, step_ns: int) -> DataFrame:
    """A row for each message, with the number of its copies; bare bodies are identified by size."""
    begin = F.col("ts_ns") - F.pmod("ts_ns", F.lit(step_ns))
    rows = messages.select(
        "topic",
        "nsqd",
        "id",
        "ts_ns",
        "attempts",
        begin.alias("begin_ns"),
        F.length("body").alias("size"),
    )
    bare = F.when(F.col("id").isNull(), F.col("size"))
    return rows.groupBy("topic", "begin_ns", "nsqd", "id", bare.alias("bare")).agg(
        F.count(F.lit(1)).alias("copies"),
        F.max("size").alias("size"),
        F.sum("size").alias("bytes"),
        F.max("attempts").alias("attempts"),
        F.count_if(F.col("attempts") > 1).alias("redeliveries"),
        F.min("ts_ns").alias("first"),
        F.max("ts_ns").alias("last"),
    )


def _aggregates() -> list[Column]:
    """The figures. Spark computes equal percentiles once; half a byte goes to even."""
    copies = F.col("copies")
    sizes = F.percentile("size", list(SIZES), copies)
    attempts = F.percentile("attempts", list(ATTEMPTS))
    return [
        F.sum(copies).alias("messages"),
        F.sum("bytes").alias("bytes"),
        *_rounded("size", sizes, SIZES),
        F.max("size").alias("size_max"),
        *_rounded("attempts", attempts, ATTEMPTS),
        F.max("attempts").alias("attempts_max"),
        F.sum("redeliveries").alias("redeliveries"),
        F.sum(F.when(F.col("id").isNotNull(), copies - 1).otherwise(0)).alias("duplicates"),
        F.sort_array(F.collect_set("nsqd")).alias("nsqd"),
        F.min("first").alias("first"),
        F.max("last").alias("last"),
    ]


def _rounded(name: str, found: Column, shares: Sequence[float]) -> list[Column]:
    return [
        F.bround(found[at]).cast("bigint").alias(f"{name}_p{share * 100:.0f}")
        for at, share in enumerate(shares)
    ]


def collect_gaps(messages: DataFrame, longer_than_ns: int) -> tuple[list[Document], int]:
    """Return the longest pauses, at most `MOST_GAPS`, in order of time, and how many there are."""
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
    gaps = [
        {
            "topic": row["topic"],
            "begin": moment(row["begin"]),
            "end": moment(row["begin"] + row["length"]),
            "seconds": row["length"] / NS,
        }
        for row in sorted(longest, key=lambda row: (row["begin"], row["topic"]))
    ]
    return gaps, int(count.get["gaps"])


def moment(timestamp_ns: int | None) -> str | None:
    """A time in RFC 3339, with as many digits of a second as it needs, down to microseconds."""
    if timestamp_ns is None:
        return None
    at = datetime(1970, 1, 1, tzinfo=UTC) + timedelta(microseconds=timestamp_ns // 1000)
    return at.replace(tzinfo=None).isoformat() + "Z"
