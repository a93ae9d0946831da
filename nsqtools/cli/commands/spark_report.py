"""``nsq spark report``: what went through topics, by the hour."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

from typer import Argument

from nsqtools.cli.options.params import OUTPUT, Delimiter, Since, Until, time_range
from nsqtools.cli.options.spark_options import (
    DamageDir,
    SkipDamaged,
    SparkOptions,
    Topics,
    check_page,
    damage_place,
    job_progress,
    naming_flags,
    open_spark,
    places,
)
from nsqtools.cli.parsing.binding import opt
from nsqtools.cli.render.outcomes import report_damages
from nsqtools.cli.render.output import ListingForm
from nsqtools.cli.render.report_output import show_report, write_page
from nsqtools.cli.running.runtime import Session
from nsqtools.protocol.text import NS
from nsqtools.records.units import parse_span

STEPS = {"hour": 3600.0, "day": 86_400.0}


def parse_step(text: str) -> float:
    """Read ``hour``, ``day`` or a duration, in seconds. Raises ``ValueError``."""
    seconds = STEPS[text] if text in STEPS else parse_span(text)
    if seconds < 1:
        raise ValueError(f"{text!r} is too short; write hour, day or 10m")
    return seconds


def parse_gap(text: str) -> float:
    """Read a duration that is not nothing, in seconds. Raises ``ValueError``."""
    seconds = parse_span(text)
    if seconds < 0.001:
        raise ValueError(f"{text!r} is too short; write 5m or 1s")
    return seconds


Paths = Annotated[
    list[Any],  # of Location
    Argument(
        parser=places,
        metavar="PATH",
        help="Archives, Parquet or Delta: files, directories with all below, or s3://... places.",
    ),
]


def report(
    paths: Paths,
    by: float = opt("hour|day|DURATION", "Length of an interval.", None, "hour", parser=parse_step),
    topic: Topics = None,
    since: Since = None,
    until: Until = None,
    gap: float = opt(
        "DURATION", "A topic that is silent for longer has a gap.", None, "5m", parser=parse_gap
    ),
    html: Path | None = opt("FILE", "Write a page with charts, which needs no network.", OUTPUT),
    delimiter: Delimiter = None,
    skip_damaged: SkipDamaged = False,
    damage_dir: DamageDir = None,
    *,
    form: ListingForm,
    spark: SparkOptions,
    runtime: Session,
) -> int:
    """Report what went through topics: messages, bytes, sizes, attempts, duplicates and gaps.

    Reads archives, and the Parquet of nsq spark compact and ingest; they are recognized by what is
    in them. Every copy of a message counts; a further copy (the same topic, nsqd and id) is also a
    duplicate, and one that was delivered before (attempts above 1) a redelivery. Times are in
    UTC.

    Examples:
        nsq spark report /var/nsq --since -24h
        nsq spark report /data/nsq -t clicks --by day --json
        nsq spark report /data/nsq --by 10m --gap 1m --html report.html
    """
    from nsqtools.archive.catalog import find_inputs
    from nsqtools.spark.archives.damage import read_damage
    from nsqtools.spark.jobs.inputs import Choice
    from nsqtools.spark.jobs.reporting import make_report

    inputs = find_inputs(paths)
    if html is not None:
        import plotly  # noqa: F401 - before the work, which takes long

        check_page(html)
    settings = spark.settings("nsq spark report", inputs.places)
    with damage_place(
        damage_dir, skip_damaged=skip_damaged, is_local=settings.is_local
    ) as damage_path:
        choice = Choice(tuple(topic or ()), time_range(since, until), delimiter, damage_path)
        with (
            naming_flags(),
            open_spark(runtime, settings) as session,
            job_progress(runtime, session),
        ):
            made = make_report(
                session, inputs, choice, step_ns=round(by * NS), gap_ns=round(gap * NS)
            )
        damages = read_damage(damage_path) if damage_path else []
    if html is not None:
        write_page(html, made)
    show_report(runtime, made, form)
    return report_damages(runtime, damages)
