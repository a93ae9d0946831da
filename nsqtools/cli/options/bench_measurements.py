"""The measurements of ``nsq bench``, made from their options, and the form of their report.

They are apart from the commands, because `nsq bench compare` reads the same options from the text
of a side.
"""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, NamedTuple

from nsqtools.cli.options.bench_options import (
    FOR_S,
    WINDOW,
    Batch,
    BenchLoad,
    Duration,
    Messages,
    Rate,
    WarmUp,
    Window,
)
from nsqtools.cli.options.forms import ListingForm
from nsqtools.cli.options.html_page import Html
from nsqtools.cli.options.subscribing import Create
from nsqtools.cli.parsing.binding import From
from nsqtools.cli.render.output import Form

if TYPE_CHECKING:
    from nsqtools.bench.bench_plan import BenchPlan

BACKLOG_TO_DRAIN = 200_000


class Measurement(NamedTuple):
    """A plan; ``embedded`` is to start the nsqd, ``create`` that a missing topic is created."""

    plan: BenchPlan
    embedded: bool
    create: bool = False


class Output(NamedTuple):
    """How a report is printed, and the page that it is written to besides."""

    form: Form
    html: Path | None


def bench_output(html: Html = None, *, form: ListingForm) -> Output:
    """The form of a report."""
    return Output(form, html)


BenchOutput = Annotated[Output, From(bench_output)]


def pub_measurement(
    batch: Batch = 100,
    window: Window = WINDOW,
    rate: Rate = 0.0,
    count: Messages = None,
    for_: Duration = None,
    warm_up: WarmUp = "500ms",  # type: ignore[assignment]
    *,
    load: BenchLoad,
) -> Measurement:
    """Publishers alone."""
    from nsqtools.bench.bench_plan import BenchMode

    plan = load.plan(
        BenchMode.PUB,
        batch=batch,
        window=window,
        rate=rate,
        count=count,
        for_s=for_ or (None if count else FOR_S),
        warm_up_s=warm_up,
    )
    return Measurement(plan, load.embedded)


def sub_measurement(
    count: Messages = BACKLOG_TO_DRAIN,
    for_: Duration = None,
    create: Create = False,
    *,
    load: BenchLoad,
) -> Measurement:
    """Consumers of a backlog."""
    from nsqtools.bench.bench_plan import BenchMode

    return Measurement(
        load.plan(BenchMode.SUB, count=count, for_s=for_), load.embedded, create=create
    )


def e2e_measurement(
    batch: Batch = 1,
    window: Window = WINDOW,
    rate: Rate = 0.0,
    count: Messages = None,
    for_: Duration = None,
    warm_up: WarmUp = "500ms",  # type: ignore[assignment]
    create: Create = False,
    *,
    load: BenchLoad,
) -> Measurement:
    """Publishers, and consumers of what they publish."""
    from nsqtools.bench.bench_plan import BenchMode

    plan = load.plan(
        BenchMode.E2E,
        batch=batch,
        window=window,
        rate=rate,
        count=count,
        for_s=for_ or (None if count else FOR_S),
        warm_up_s=warm_up,
    )
    return Measurement(plan, load.embedded, create=create)


PubMeasurement = Annotated[Measurement, From(pub_measurement)]
SubMeasurement = Annotated[Measurement, From(sub_measurement)]
E2eMeasurement = Annotated[Measurement, From(e2e_measurement)]
