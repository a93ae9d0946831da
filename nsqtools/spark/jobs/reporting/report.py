"""A report as plain values, and as the document that ``--json`` prints and the page shows."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from datetime import UTC, datetime, timedelta
from typing import TYPE_CHECKING, Any

from nsqtools.spark.jobs.inputs import Choice, Inputs, read_messages
from nsqtools.spark.jobs.reporting.gaps import Gap, collect_gaps
from nsqtools.spark.jobs.reporting.statistics import Figures, collect_figures

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

NS = 1_000_000_000


@dataclass(frozen=True, slots=True)
class Report:
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
            "topics": [_figures(each, is_total=True) for each in self.topics],
            "intervals": [_figures(each, is_total=False) for each in self.intervals],
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
) -> Report:
    """Read the messages twice: for the figures, and for the pauses. Raises `NsqError`."""
    messages = read_messages(spark, inputs, choice)
    intervals, topics = collect_figures(messages, step_ns)
    gaps, gap_count = collect_gaps(messages.select("topic", "ts_ns"), gap_ns)
    sources = tuple(map(str, (*inputs.archives, *inputs.parquet)))
    return Report(sources, step_ns, gap_ns, intervals, topics, gaps, gap_count)


def moment(timestamp_ns: int | None) -> str | None:
    """A time in RFC 3339, with as many digits of a second as it needs, down to microseconds."""
    if timestamp_ns is None:
        return None
    at = datetime(1970, 1, 1, tzinfo=UTC) + timedelta(microseconds=timestamp_ns // 1000)
    return at.replace(tzinfo=None).isoformat() + "Z"


def _figures(figures: Figures, *, is_total: bool) -> dict[str, Any]:
    document = asdict(figures)
    begin_ns, first_ns, last_ns = (document.pop(key) for key in ("begin_ns", "first_ns", "last_ns"))
    document["nsqd"] = list(figures.nsqd)
    begin = {} if is_total else {"begin": moment(begin_ns)}
    return {
        "topic": document.pop("topic"),
        **begin,
        **document,
        "first": moment(first_ns),
        "last": moment(last_ns),
    }
