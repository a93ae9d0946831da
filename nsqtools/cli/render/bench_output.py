"""How ``nsq bench`` shows a report: in figures and bars on a terminal, as columns, or as JSON."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from nsqtools.cli.render.output import ByteWriter, Cell, Form, rendered, write_json, write_listing
from nsqtools.cli.running.runtime import Runtime

if TYPE_CHECKING:
    from nsqtools.bench.bench_plan import BenchPlan
    from nsqtools.bench.bench_report import BenchReport, Latencies

MEGA = 1e6
BAR_WIDTH = 40


def how_far(phase: str, count: int, elapsed_s: float) -> str:
    """The progress line."""
    return f"{phase}: {count:,} messages after {elapsed_s:.1f} s"


def write_report(runtime: Runtime, report: BenchReport, form: Form) -> None:
    """Print a report in the form that fits."""
    if form.is_document:
        write_json(runtime, report.document(), indent=2)
    elif runtime.stdout_is_tty and form.kind is None and not form.columns:
        ByteWriter(runtime.stdout.fileno()).write(page(runtime, report).encode())
    else:
        columns = columns_of(report)
        write_listing(runtime, list(columns), [list(columns.values())], form)


def columns_of(report: BenchReport) -> dict[str, Cell]:
    """Everything in a line, for programs."""
    plan = report.plan
    columns: dict[str, Cell] = {
        "mode": plan.mode.value,
        "connections": plan.connections,
        "size_min": plan.size[0],
        "size_max": plan.size[1],
        "messages": report.messages,
        "seconds": f"{report.seconds:.3f}",
        "messages_per_s": f"{report.messages_per_s:.1f}",
        "bytes_per_s": f"{report.bytes_per_s:.1f}",
        "published": report.published,
        "consumed": report.consumed,
        "client_cpu": f"{report.client_cpu:.3f}",
        "cpu_us_per_message": f"{report.cpu_us_per_message:.3f}",
    }
    if report.latencies is not None:
        for name, value in report.latencies.figures_ms().items():
            columns[f"{name}_ms"] = f"{value:.3f}"
    return columns


def page(runtime: Runtime, report: BenchReport) -> str:
    """The report for a person. (rich is imported only here.)"""
    plan = report.plan
    things: list[Any] = [
        f"{plan.mode.value}: {', '.join(plan.nsqd_tcp_addresses)}, topic {report.topic}",
        f"{description(plan)}\n",
        _figures(report),
    ]
    if report.latencies is not None and report.latencies.count:
        of = "a message" if report.latency_of == "message" else "a publish command"
        figures = _row({k: f"{v:,.2f}" for k, v in report.latencies.figures_ms().items()})
        things += [f"\nlatency of {of} in ms", figures, "", _bars(report.latencies)]
    return rendered(runtime, *things)


def description(plan: BenchPlan) -> str:
    """What was done, in a line."""
    low, high = plan.size
    parts = [
        f"{plan.connections} connection{'s' if plan.connections > 1 else ''}",
        f"{low} bytes" if low == high else f"{low} to {high} bytes",
    ]
    if plan.mode.value != "sub":
        parts.append(f"batches of {plan.batch}" if plan.batch > 1 else "single messages")
        parts.append(f"window of {plan.producer_options.max_outstanding}")
        parts.append(f"{plan.rate:,.0f} messages/s asked" if plan.rate else "full speed")
    return ", ".join([*parts, *plan.transport])


def _figures(report: BenchReport) -> Any:
    figures = {
        "messages/s": f"{report.messages_per_s:,.0f}",
        "MB/s": f"{report.bytes_per_s / MEGA:,.1f}",
        "messages": f"{report.messages:,}",
        "seconds": f"{report.seconds:.2f}",
    }
    if report.consumed is not None:
        figures |= {"published": f"{report.published:,}", "consumed": f"{report.consumed:,}"}
    figures["client CPU"] = f"{report.client_cpu:.0%}"
    return _row({**figures, "us/message": f"{report.cpu_us_per_message:.2f}"})


def _row(figures: dict[str, str]) -> Any:
    from rich.table import Table

    table = Table(box=None, pad_edge=False, header_style="bold")
    for name in figures:
        table.add_column(name, justify="right")
    table.add_row(*figures.values())
    return table


def _bars(latencies: Latencies) -> Any:
    from rich.bar import Bar
    from rich.table import Table

    table = Table(box=None, pad_edge=False, show_header=False)
    table.add_column(justify="right")
    table.add_column(width=BAR_WIDTH)
    table.add_column(justify="right")
    classes = latencies.classes()
    most = max(each.values for each in classes)
    for each in classes:
        bar = Bar(most, 0, each.values, width=BAR_WIDTH, color="cyan")
        low_ms, high_ms, _ = each
        bound = f"over {low_ms:g}" if high_ms is None else f"up to {high_ms:g}"
        table.add_row(bound, bar, f"{each.values / latencies.count:.1%}")
    return table
