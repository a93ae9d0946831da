"""What ``nsq spark report`` prints: a table, TSV, JSON or a page, and on stderr what stands out."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from nsqtools.cli.options.spark_options import save_page
from nsqtools.cli.render.output import Cell, Form, write_json, write_listing
from nsqtools.cli.running.runtime import Runtime
from nsqtools.protocol.text import NS, format_duration

if TYPE_CHECKING:
    from nsqtools.spark.jobs.reporting import Figures, TrafficReport

MOST_GAPS = 20

CELLS: dict[str, Callable[[Figures], Cell]] = {
    "time": lambda each: short_moment(each.begin_ns),
    "topic": lambda each: each.topic,
    "messages": lambda each: each.messages,
    "bytes": lambda each: each.bytes,
    "p50": lambda each: each.size_p50,
    "p95": lambda each: each.size_p95,
    "p99": lambda each: each.size_p99,
    "max": lambda each: each.size_max,
    "att_p50": lambda each: each.attempts_p50,
    "att_p95": lambda each: each.attempts_p95,
    "att_max": lambda each: each.attempts_max,
    "redelivered": lambda each: each.redeliveries,
    "duplicates": lambda each: each.duplicates,
    "nsqd": lambda each: ",".join(each.nsqd) or None,
}
OPTIONAL = ("nsqd", "att_p50", "att_p95", "p99", "att_max", "max", "redelivered", "p50", "bytes")
"""The columns that a narrow terminal leaves out, the first ones first."""


def short_moment(timestamp_ns: int | None) -> str | None:
    """A time to the second, or to the minute when it is a whole one."""
    from nsqtools.spark.jobs.reporting import moment

    text = moment(timestamp_ns)
    return text.removesuffix(":00Z") + "Z" if text and text.endswith(":00Z") else text


def show_report(runtime: Runtime, report: TrafficReport, form: Form) -> None:
    """Print the intervals; tell the sum, and the longest gaps."""
    form.check(tuple(CELLS))
    if form.is_document:
        write_json(runtime, report.document(), indent=2)
        return
    rows: list[Sequence[Cell]] = [
        [cell(each) for cell in CELLS.values()] for each in report.intervals
    ]
    write_listing(runtime, tuple(CELLS), rows, form, optional=OPTIONAL)
    messages = sum(each.messages for each in report.topics)
    runtime.tell(f"nsq: {messages} messages of {len(report.topics)} topics")
    longest = sorted(report.gaps, key=lambda gap: -gap.length_ns)[:MOST_GAPS]
    for gap in sorted(longest, key=lambda gap: (gap.begin_ns, gap.topic)):
        length = format_duration(round(gap.length_ns / NS, 3 if gap.length_ns < NS else 0))
        runtime.tell(f"nsq: gap in {gap.topic}: {length} from {short_moment(gap.begin_ns)}")
    if (more := report.gap_count - len(longest)) > 0:
        runtime.tell(f"nsq: and {more} shorter gaps; --json and --html list the longest 1000")


def write_page(path: Path, report: TrafficReport) -> None:
    """Write the page with charts. Raises `OutputError`."""
    from nsqtools.spark.jobs.reporting import moment, render_page

    save_page(path, render_page(report.document(), moment(int(time.time()) * NS) or ""))
