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

from typing import Any

from pyspark.sql import DataFrame, Observation, SparkSession
from pyspark.sql import functions as F

from nsqtools.archive.finding import Inputs
from nsqtools.errors import ConfigurationError
from nsqtools.protocol.text import NS
from nsqtools.spark.archives.read_settings import moment
from nsqtools.spark.jobs.inputs import Choice, read_messages, warn_of_bare_bodies

MOST_ROWS = 100_000
MOST_GAPS = 1000

Document = dict[str, Any]
"""As `cli.render.documents.SparkReport` and its parts describe: times are RFC 3339, spans seconds.

``topic`` is None for bare bodies, ``begin`` for what has no time. Sizes are of bodies, in bytes.
"""


def make_report(
    spark: SparkSession, inputs: Inputs, choice: Choice, *, step_ns: int, gap_ns: int
) -> Document:
    """Read the messages twice: for the figures, and for the pauses. Raises `NsqError`."""
    warn_of_bare_bodies(inputs, choice.within)
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


FIGURES = """
    WITH found AS (
        SELECT topic, nsqd, id, ts_ns, attempts, length(body) AS size,
            ts_ns - pmod(ts_ns, {step}) AS begin_ns
        FROM {messages}
    ), once AS (
        SELECT topic, begin_ns, nsqd, id, count(*) AS copies, max(size) AS size,
            sum(size) AS bytes, max(attempts) AS attempts,
            count_if(attempts > 1) AS redeliveries, min(ts_ns) AS first, max(ts_ns) AS last
        FROM found
        GROUP BY topic, begin_ns, nsqd, id, if(id IS NULL, size, NULL)
    ), figures AS (
        SELECT topic, begin_ns, grouping(begin_ns) AS is_total, sum(copies) AS messages,
            sum(bytes) AS bytes, percentile(size, array(0.5, 0.95, 0.99), copies) AS sizes,
            max(size) AS size_max, percentile(attempts, array(0.5, 0.95)) AS tries,
            max(attempts) AS attempts_max, sum(redeliveries) AS redeliveries,
            sum(if(id IS NULL, 0, copies - 1)) AS duplicates,
            sort_array(collect_set(nsqd)) AS nsqd, min(first) AS first, max(last) AS last
        FROM once
        GROUP BY GROUPING SETS ((topic, begin_ns), (topic))
    )
    SELECT is_total, topic, begin_ns, messages, bytes,
        bigint(bround(sizes[0])) AS size_p50, bigint(bround(sizes[1])) AS size_p95,
        bigint(bround(sizes[2])) AS size_p99, size_max,
        bigint(bround(tries[0])) AS attempts_p50, bigint(bround(tries[1])) AS attempts_p95,
        attempts_max, redeliveries, duplicates, nsqd, first, last
    FROM figures
    ORDER BY is_total, begin_ns, topic
    LIMIT {limit}
"""
"""A row for each message with the number of its copies; bare bodies are identified by their size.

Half a byte goes to even.
"""


def collect_figures(messages: DataFrame, step_ns: int) -> tuple[list[Document], list[Document]]:
    """Return the figures of each topic and interval, and those of each topic.

    Raises `ConfigurationError` when there are too many intervals to be a report.
    """
    limit = MOST_ROWS + 1
    found = messages.sparkSession.sql(FIGURES, messages=messages, step=step_ns, limit=limit)
    rows = found.collect()
    if len(rows) > MOST_ROWS:
        raise ConfigurationError(
            f"this report would have more than {MOST_ROWS} rows",
            hint="Give longer intervals (--by day), fewer topics, or a shorter time.",
        )
    intervals: list[Document] = []
    topics: list[Document] = []
    for figures in (row.asDict() for row in rows):
        is_total, begin_ns = figures.pop("is_total"), figures.pop("begin_ns")
        figures |= {each: moment(figures[each]) for each in ("first", "last")}
        if is_total:
            topics.append(figures)
        else:
            intervals.append({"topic": figures.pop("topic"), "begin": moment(begin_ns), **figures})
    return intervals, topics


PAUSES = """
    WITH slots AS (
        SELECT topic, ts_ns - pmod(ts_ns, {gap}) AS slot, min(ts_ns) AS first, max(ts_ns) AS last
        FROM {messages}
        WHERE topic IS NOT NULL AND ts_ns IS NOT NULL
        GROUP BY topic, slot
    ), pauses AS (
        SELECT topic, first, lag(last) OVER (PARTITION BY topic ORDER BY slot) AS begin
        FROM slots
    )
    SELECT topic, begin, first - begin AS length FROM pauses WHERE first - begin > {gap}
"""


def collect_gaps(messages: DataFrame, longer_than_ns: int) -> tuple[list[Document], int]:
    """Return the longest pauses, at most `MOST_GAPS`, in order of time, and how many there are."""
    pauses = messages.sparkSession.sql(PAUSES, messages=messages, gap=longer_than_ns)
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
