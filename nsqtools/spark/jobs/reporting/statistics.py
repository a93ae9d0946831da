"""The figures of a report, aggregated in Spark: nothing that grows with the messages leaves it.

In two steps. First all copies of a message become one row, with their number: that alone tells
duplicates from messages, and it has only columns of fixed size, which Spark aggregates by hashing.
Then these rows are aggregated by topic and interval, and once more by topic alone, with the numbers
as weights: percentiles are exact, because there are not many different sizes.

A message counts as often as it is there; what is there more than once is a duplicate as well. One
that nsqd delivered before (attempts above 1) is a redelivery.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from nsqtools.errors import ConfigurationError

if TYPE_CHECKING:
    from pyspark.sql import Column, DataFrame

MOST_ROWS = 100_000
SIZES = (0.5, 0.95, 0.99)
ATTEMPTS = (0.5, 0.95)


@dataclass(frozen=True, slots=True)
class Figures:
    """A topic in an interval; ``begin_ns`` None for all time, or for bodies without a time.

    Sizes are of bodies, in bytes. ``topic`` is None for bare bodies.
    """

    topic: str | None
    begin_ns: int | None
    messages: int
    bytes: int
    size_p50: int
    size_p95: int
    size_p99: int
    size_max: int
    attempts_p50: int | None
    attempts_p95: int | None
    attempts_max: int | None
    redeliveries: int
    duplicates: int
    nsqd: tuple[str, ...]
    first_ns: int | None
    last_ns: int | None


def collect_figures(messages: DataFrame, step_ns: int) -> tuple[list[Figures], list[Figures]]:
    """Return the figures of each topic and interval, and those of each topic.

    Raises `ConfigurationError` when there are too many intervals to be a report.
    """
    from pyspark.sql import functions as F

    rows = _by_message(messages, step_ns)
    sets = [[F.col("topic"), F.col("begin")], [F.col("topic")]]
    grouped = rows.groupingSets(sets, F.col("topic"), F.col("begin"))
    summed = grouped.agg(F.grouping("begin").alias("is_total"), *_aggregates())
    found = summed.orderBy("is_total", "begin", "topic").limit(MOST_ROWS + 1).collect()
    if len(found) > MOST_ROWS:
        raise ConfigurationError(
            f"this report would have more than {MOST_ROWS} rows",
            hint="Give longer intervals (--by day), fewer topics, or a shorter time.",
        )
    figures = [(row["is_total"], _figures(row)) for row in found]
    return (
        [each for is_total, each in figures if not is_total],
        [each for is_total, each in figures if is_total],
    )


def _by_message(messages: DataFrame, step_ns: int) -> DataFrame:
    """A row for each message, with the number of its copies; bare bodies are told by size."""
    from pyspark.sql import functions as F

    begin = F.col("ts_ns") - F.pmod("ts_ns", F.lit(step_ns))
    rows = messages.select(
        *("topic", "nsqd", "id", "ts_ns", "attempts"),
        begin.alias("begin"),
        F.length("body").alias("size"),
    )
    bare = F.when(F.col("id").isNull(), F.col("size"))
    return rows.groupBy("topic", "begin", "nsqd", "id", bare.alias("bare")).agg(
        F.count(F.lit(1)).alias("copies"),
        F.max("size").alias("size"),
        F.sum("size").alias("bytes"),
        F.max("attempts").alias("attempts"),
        F.count_if(F.col("attempts") > 1).alias("redeliveries"),
        F.min("ts_ns").alias("first"),
        F.max("ts_ns").alias("last"),
    )


def _aggregates() -> list[Column]:
    from pyspark.sql import functions as F

    copies = F.col("copies")
    return [
        F.sum(copies).alias("messages"),
        F.sum("bytes").alias("bytes"),
        F.percentile("size", list(SIZES), copies).alias("sizes"),
        F.max("size").alias("size_max"),
        F.percentile("attempts", list(ATTEMPTS)).alias("attempts"),
        F.max("attempts").alias("attempts_max"),
        F.sum("redeliveries").alias("redeliveries"),
        F.sum(F.when(F.col("id").isNotNull(), copies - 1).otherwise(0)).alias("duplicates"),
        F.sort_array(F.collect_set("nsqd")).alias("nsqd"),
        F.min("first").alias("first"),
        F.max("last").alias("last"),
    ]


def _figures(row: Any) -> Figures:
    size_p50, size_p95, size_p99 = map(round, row["sizes"])
    attempts_p50, attempts_p95 = map(round, row["attempts"]) if row["attempts"] else (None, None)
    return Figures(
        topic=row["topic"],
        begin_ns=row["begin"],
        messages=row["messages"],
        bytes=row["bytes"],
        size_p50=size_p50,
        size_p95=size_p95,
        size_p99=size_p99,
        size_max=row["size_max"],
        attempts_p50=attempts_p50,
        attempts_p95=attempts_p95,
        attempts_max=row["attempts_max"],
        redeliveries=row["redeliveries"],
        duplicates=row["duplicates"],
        nsqd=tuple(row["nsqd"]),
        first_ns=row["first"],
        last_ns=row["last"],
    )
