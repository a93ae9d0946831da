"""``nsq spark report``: figures of topics by the hour, and gaps."""

from __future__ import annotations

from collections.abc import Mapping
from heapq import nlargest
from typing import Annotated, Any

from nsqtools.cli.options.params import Delimiter, Since, Until, parse_interval, time_range
from nsqtools.cli.options.spark_options import (
    ArchiveReading,
    SparkChoice,
    Topics,
    job_progress,
    places_argument,
)
from nsqtools.cli.parsing.binding import opt
from nsqtools.cli.render.output import Form, ListingForm, write_json, write_listing
from nsqtools.cli.running.runtime import Runtime, Session
from nsqtools.protocol.text import NS, format_duration
from nsqtools.records.units import parse_span

STEPS = {"hour": 3600.0, "day": 86_400.0}


def parse_step(text: str) -> float:
    """Read ``hour``, ``day`` or a duration, in seconds. Raises ``ValueError``."""
    seconds = STEPS[text] if text in STEPS else parse_span(text)
    if seconds < 1:
        raise ValueError(f"{text!r} is too short; write hour, day or 10m")
    return seconds


def report(
    paths: Annotated[
        list[Any],  # of Location
        places_argument(
            "Archives, Parquet or Delta: files, directories with all below, or s3://... places."
        ),
    ],
    by: float = opt("hour|day|DURATION", "Length of an interval.", None, "hour", parser=parse_step),
    topic: Topics = None,
    since: Since = None,
    until: Until = None,
    gap: float = opt(
        "DURATION",
        "A topic that is silent for longer has a gap.",
        None,
        "5m",
        parser=parse_interval,
    ),
    delimiter: Delimiter = None,
    *,
    reading: ArchiveReading,
    form: ListingForm,
    spark: SparkChoice,
    runtime: Session,
) -> int:
    """Report on topics: messages, bytes, sizes, attempts, duplicates and gaps.

    Reads archives, and the Parquet of nsq spark compact and ingest, which are recognized by their
    content. Every copy of a message counts. A further copy (the same topic, nsqd and id) is also a
    duplicate, and a message with more than one attempt is a redelivery. Times are in UTC.

    Examples:
        nsq spark report /var/nsq --since -24h
        nsq spark report /data/nsq -t clicks --by day --json
        nsq spark report /data/nsq --by 10m --gap 1m
    """
    from nsqtools.archive.finding import find_inputs
    from nsqtools.spark.jobs.inputs import Choice
    from nsqtools.spark.jobs.reporting import make_report

    form.check(tuple(KEYS))
    inputs = find_inputs(paths)
    tables = (*inputs.parquet, *inputs.delta)
    settings = spark.settings("nsq spark report", tables, python_places=inputs.archives)
    with reading.session(runtime, settings) as opened:
        choice = Choice(tuple(topic or ()), time_range(since, until), delimiter, opened.damage)
        with job_progress(runtime, opened.spark):
            document = make_report(
                opened.spark, inputs, choice, step_ns=round(by * NS), gap_ns=round(gap * NS)
            )
        show_report(runtime, document, form)
    return opened.status


GAPS_SHOWN = 20

KEYS = {"time": "begin", "topic": "topic", "messages": "messages", "bytes": "bytes"}
KEYS |= {name: f"size_{name}" for name in ("p50", "p95", "p99", "max")}
KEYS |= {f"att_{name}": f"attempts_{name}" for name in ("p50", "p95", "max")}
KEYS |= {"redelivered": "redeliveries", "duplicates": "duplicates", "nsqd": "nsqd"}
"""The columns of the table, each with its key in the document."""
OPTIONAL = ("nsqd", "att_p50", "att_p95", "p99", "att_max", "max", "redelivered", "p50", "bytes")
"""The columns that are omitted on a narrow terminal, in this order."""


def short_moment(moment: str | None) -> str | None:
    """Shorten a time on a full minute to the minute."""
    return moment.removesuffix(":00Z") + "Z" if moment and moment.endswith(":00Z") else moment


def show_report(runtime: Runtime, report: Mapping[str, Any], form: Form) -> None:
    """Print the intervals, the sum and the longest gaps."""
    if form.is_document:
        write_json(runtime, report, indent=2)
        return
    rows = []
    for interval in report["intervals"]:
        nsqd = ",".join(interval["nsqd"]) or None
        cells = {**interval, "begin": short_moment(interval["begin"]), "nsqd": nsqd}
        rows.append([cells[key] for key in KEYS.values()])
    write_listing(runtime, tuple(KEYS), rows, form, optional=OPTIONAL)
    messages = sum(topic["messages"] for topic in report["topics"])
    runtime.info(f"nsq: {messages} messages of {len(report['topics'])} topics")
    longest = nlargest(GAPS_SHOWN, report["gaps"], key=lambda gap: gap["seconds"])
    for gap in filter(longest.__contains__, report["gaps"]):
        length = format_duration(round(gap["seconds"], 0 if gap["seconds"] >= 1 else 3))
        runtime.info(f"nsq: gap in {gap['topic']}: {length} from {short_moment(gap['begin'])}")
    if (hidden := report["gaps_in_all"] - len(longest)) > 0:
        runtime.info(f"nsq: and {hidden} shorter gaps; --json lists the longest 1000")
