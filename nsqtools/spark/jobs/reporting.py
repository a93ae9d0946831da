"""A report on topics: figures by interval, gaps, as plain values, as JSON and as a page.

Spark aggregates the figures, so nothing that grows with the number of messages leaves it. First all
copies of a message become one row with their number: that alone distinguishes duplicates from
messages, and has only columns of fixed size, which Spark aggregates by hashing. Then these rows are
aggregated by topic and interval, and by topic alone, weighted by the numbers: percentiles are
exact, because there are few distinct sizes. A message counts once per copy; each further copy is a
duplicate as well. One that nsqd delivered before (attempts above 1) is a redelivery.

For gaps, messages are put into slots of the length looked for. A longer gap begins in one slot and
ends in another, and the slots between are empty, so the first and last message of each slot are
enough.

The page holds data, script and style, for a browser without a network. The charts are Plotly's,
whose script (4.8 MB) is embedded. Data from messages appears only in the JSON, which the page shows
as text, never as markup.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from datetime import UTC, datetime, timedelta
from importlib import resources
from typing import Any

from pyspark.sql import Column, DataFrame, Observation, SparkSession, Window
from pyspark.sql import functions as F

from nsqtools.archive.catalog import Inputs
from nsqtools.errors import ConfigurationError
from nsqtools.protocol.text import NS
from nsqtools.spark.jobs.inputs import Choice, read_messages

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
    nsqd: Sequence[str]
    first_ns: int | None
    last_ns: int | None


def collect_figures(messages: DataFrame, step_ns: int) -> tuple[list[Figures], list[Figures]]:
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
    intervals: list[Figures] = []
    topics: list[Figures] = []
    for row in found:
        values = row.asDict()
        (topics if values.pop("is_total") else intervals).append(Figures(**values))
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
        F.min("ts_ns").alias("first_ns"),
        F.max("ts_ns").alias("last_ns"),
    )


def _aggregates() -> list[Column]:
    """The columns of `Figures`. Spark computes equal percentiles once; half a byte goes to even."""
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
        F.min("first_ns").alias("first_ns"),
        F.max("last_ns").alias("last_ns"),
    ]


def _rounded(name: str, found: Column, shares: Sequence[float]) -> list[Column]:
    return [
        F.bround(found[at]).cast("bigint").alias(f"{name}_p{share * 100:.0f}")
        for at, share in enumerate(shares)
    ]


MOST_GAPS = 1000


@dataclass(frozen=True, slots=True)
class Gap:
    """After ``begin_ns`` nothing was published to a topic for ``length_ns``."""

    topic: str
    begin_ns: int
    length_ns: int


def collect_gaps(messages: DataFrame, longer_than_ns: int) -> tuple[list[Gap], int]:
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
    gaps = [Gap(row["topic"], row["begin"], row["length"]) for row in longest]
    gaps.sort(key=lambda gap: (gap.begin_ns, gap.topic))
    return gaps, int(count.get["gaps"])


@dataclass(frozen=True, slots=True)
class TrafficReport:
    """What was found. Of ``gap_count`` pauses longer than ``gap_ns`` the longest are listed."""

    sources: tuple[str, ...]
    step_ns: int
    gap_ns: int
    intervals: Sequence[Figures]
    topics: Sequence[Figures]
    gaps: Sequence[Gap]
    gap_count: int

    def document(self) -> dict[str, Any]:
        """Return it for JSON: times are RFC 3339, spans seconds."""
        return {
            "sources": list(self.sources),
            "by_s": self.step_ns / NS,
            "gap_s": self.gap_ns / NS,
            "topics": [_figures_document(each, is_total=True) for each in self.topics],
            "intervals": [_figures_document(each, is_total=False) for each in self.intervals],
            "gaps": [
                {
                    "topic": gap.topic,
                    "begin": moment(gap.begin_ns),
                    "end": moment(gap.begin_ns + gap.length_ns),
                    "seconds": gap.length_ns / NS,
                }
                for gap in self.gaps
            ],
            "gaps_in_all": self.gap_count,
        }


def make_report(
    spark: SparkSession, inputs: Inputs, choice: Choice, *, step_ns: int, gap_ns: int
) -> TrafficReport:
    """Read the messages twice: for the figures, and for the pauses. Raises `NsqError`."""
    messages = read_messages(spark, inputs, choice)
    intervals, topics = collect_figures(messages, step_ns)
    times = ("topic", "ts_ns")  # much less to read
    gaps, gap_count = collect_gaps(read_messages(spark, inputs, choice, times), gap_ns)
    sources = tuple(map(str, (*inputs.archives, *inputs.parquet)))
    return TrafficReport(sources, step_ns, gap_ns, intervals, topics, gaps, gap_count)


def moment(timestamp_ns: int | None) -> str | None:
    """A time in RFC 3339, with as many digits of a second as it needs, down to microseconds."""
    if timestamp_ns is None:
        return None
    at = datetime(1970, 1, 1, tzinfo=UTC) + timedelta(microseconds=timestamp_ns // 1000)
    return at.replace(tzinfo=None).isoformat() + "Z"


def _figures_document(figures: Figures, *, is_total: bool) -> dict[str, Any]:
    document = asdict(figures)
    begin_ns, first_ns, last_ns = (document.pop(key) for key in ("begin_ns", "first_ns", "last_ns"))
    begin = {} if is_total else {"begin": moment(begin_ns)}
    return {
        "topic": document.pop("topic"),
        **begin,
        **document,
        "first": moment(first_ns),
        "last": moment(last_ns),
    }


def render_page(document: Mapping[str, Any], made: str) -> str:
    """Return the page of a report's document; ``made`` is the time, in RFC 3339."""
    from plotly.offline import get_plotlyjs

    template = resources.files(__package__).joinpath("report_page.html").read_text("utf-8")
    data = json.dumps({**document, "made": made}, ensure_ascii=False).replace("<", "\\u003c")
    head, _, rest = template.partition("@REPORT@")
    middle, _, tail = rest.partition("@PLOTLY@")
    return "".join((head, data, middle, get_plotlyjs(), tail))
