"""A report on topics: figures by interval, and gaps, as plain values.

Spark aggregates the figures, so its results do not grow with the number of messages. First, all
copies of a message become one row with a count. Only that distinguishes duplicates from messages,
and its columns have a fixed size, which Spark aggregates by hashing. Second, these rows are
aggregated by topic and interval, and by topic alone, weighted by the counts. Percentiles are exact,
because there are few distinct sizes. Every copy counts as a message, and every further copy also as
a duplicate. A message with more than one attempt is a redelivery.

To find gaps, messages are put into slots with the length of the gap. A longer gap begins in one
slot, ends in another, and the slots between are empty, so the first and last message of each slot
are sufficient.
"""

from __future__ import annotations

from typing import Any

from pyspark.sql import DataFrame, Observation, SparkSession
from pyspark.sql import functions as F

from nsqtools.archive.finding import Inputs
from nsqtools.errors import ConfigurationError
from nsqtools.protocol.text import NS
from nsqtools.spark.archives.read_settings import moment
from nsqtools.spark.jobs.inputs import Choice, select_messages, warn_of_bare_bodies

MAX_ROWS = 100_000  # The driver collects all rows, and a longer report has no reader.
MAX_GAPS = 1000

Document = dict[str, Any]
"""A `cli.render.documents.SparkReport` or a part of it: times are RFC 3339, spans are seconds.

``topic`` is None for bare bodies, ``begin`` for messages without a time. Sizes are those of bodies,
in bytes.
"""


def make_report(
    spark: SparkSession, inputs: Inputs, choice: Choice, *, step_ns: int, gap_ns: int
) -> Document:
    """Read the messages twice, for the figures and for the gaps. Raises `NsqError`."""
    warn_of_bare_bodies(inputs, choice.within)
    intervals, topics = collect_figures(select_messages(spark, inputs, choice), step_ns)
    times = ("topic", "ts_ns")  # Gaps need no bodies, which are most of the data.
    gaps, gap_count = collect_gaps(select_messages(spark, inputs, choice, times), gap_ns)
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
    WITH sized AS (
        SELECT topic, nsqd, id, ts_ns, attempts, length(body) AS size,
            ts_ns - pmod(ts_ns, {step}) AS begin_ns
        FROM {messages}
    ), once AS (
        SELECT topic, begin_ns, nsqd, id, count(*) AS copies, max(size) AS size,
            sum(size) AS bytes, max(attempts) AS attempts,
            count_if(attempts > 1) AS redeliveries, min(ts_ns) AS first, max(ts_ns) AS last
        FROM sized
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
"""``once`` has a row for each message with the number of its copies. Bare bodies, which have no id,
are grouped by size. Percentiles between two sizes are rounded half to even, as Python rounds.
"""


def collect_figures(messages: DataFrame, step_ns: int) -> tuple[list[Document], list[Document]]:
    """Return the figures of each topic and interval, and the totals of each topic.

    Raises `ConfigurationError` if there are more than `MAX_ROWS` of them.
    """
    limit = MAX_ROWS + 1
    query = messages.sparkSession.sql(FIGURES, messages=messages, step=step_ns, limit=limit)
    rows = query.collect()
    if len(rows) > MAX_ROWS:
        raise ConfigurationError(
            f"this report would have more than {MAX_ROWS} rows",
            hint="Give longer intervals (--by day), fewer topics, or a shorter time.",
        )
    intervals: list[Document] = []
    topics: list[Document] = []
    for figures in (row.asDict() for row in rows):
        is_total, begin_ns = figures.pop("is_total"), figures.pop("begin_ns")
        figures |= {name: moment(figures[name]) for name in ("first", "last")}
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
    """Return the `MAX_GAPS` longest gaps in order of time, and the number of all gaps."""
    pauses = messages.sparkSession.sql(PAUSES, messages=messages, gap=longer_than_ns)
    count = Observation()
    counted = pauses.observe(count, F.count(F.lit(1)).alias("gaps"))
    longest = counted.orderBy(F.desc("length")).limit(MAX_GAPS).collect()
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
