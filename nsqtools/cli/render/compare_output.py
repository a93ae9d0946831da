"""How ``nsq bench compare`` shows two sides: as a table and bars, rows, JSON, or a page."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from nsqtools.cli.render.bench_output import MEGA, bound_of
from nsqtools.cli.render.charts import Bars, bars, dots, page, table
from nsqtools.cli.render.output import (
    ByteWriter,
    Cell,
    Form,
    rendered,
    write_json,
    write_listing,
)
from nsqtools.cli.running.runtime import Runtime
from nsqtools.protocol.wording import counted

if TYPE_CHECKING:
    from nsqtools.bench.comparison import Comparison, Difference, Side, Spread

COLUMNS = (
    *("figure", "a_median", "a_min", "a_max", "b_median", "b_min", "b_max"),
    *("ratio", "chance", "difference"),
)
BAR_WIDTH = 20
HEAD = ("", "A", "from - to", "B", "from - to", "B / A", "")
SPREADS = (2, 4)
GAP = 2

NAMES = {
    "messages_per_s": "messages/s",
    "bytes_per_s": "MB/s",
    "cpu_us_per_message": "CPU, us/message",
    "latency_p50_ms": "latency p50, ms",
    "latency_p99_ms": "latency p99, ms",
}


def write_comparison(runtime: Runtime, comparison: Comparison, form: Form) -> None:
    """Print a comparison in the form that fits."""
    if form.is_document:
        write_json(runtime, comparison.document(), indent=2)
    elif runtime.stdout_is_tty and form.kind is None and not form.columns:
        ByteWriter(runtime.stdout.fileno()).write(_on_screen(runtime, comparison).encode())
    else:
        rows = [_row(each) for each in comparison.differences]
        write_listing(runtime, COLUMNS, rows, form, optional=("chance",))


def _row(each: Difference) -> list[Cell]:
    figures: list[Cell] = [f"{value:.3f}" for value in (*each.a, *each.b)]
    ratio = None if each.ratio is None else f"{each.ratio:.3f}"
    return [each.figure, *figures, ratio, f"{each.chance:.4f}", each.verdict]


def _cells(each: Difference) -> list[str]:
    """A line for a person."""
    ratio = "-" if each.ratio is None else f"{each.ratio:.2f}"
    scale = MEGA if each.figure == "bytes_per_s" else 1.0
    a, b = _figures(each.a, scale), _figures(each.b, scale)
    return [NAMES[each.figure], *a, *b, ratio, each.verdict]


def _figures(spread: Spread, scale: float) -> list[str]:
    scaled = [value / scale for value in spread]
    median, least, most = (f"{value:,.0f}" if value >= 1000 else f"{value:.4g}" for value in scaled)
    return [median, f"{least} - {most}"]


def headline(comparison: Comparison) -> str:
    """What was done."""
    rounds = min(len(comparison.a.rounds), len(comparison.b.rounds))
    return f"{comparison.mode.value}: {counted(rounds, 'round')} of each side, in turns"


def side_line(side: Side) -> str:
    """What a side is."""
    return f"{side.name}  {side.what}  ({', '.join(side.nsqds)})"


def _on_screen(runtime: Runtime, comparison: Comparison) -> str:
    from rich.text import Text

    things: list[Any] = [headline(comparison)]
    things += [side_line(side) for side in (comparison.a, comparison.b)]
    things += ["", Text("\n".join(_figures_table(comparison, runtime.width)), no_wrap=True)]
    if groups := _groups(comparison):
        of = "a message" if comparison.mode.value == "e2e" else "a publish command"
        things += [f"\nlatency of {of}", _histograms(groups)]
    return rendered(runtime, *things)


def _figures_table(comparison: Comparison, width: int) -> list[str]:
    """The lines of a table. No figure is cut: where it is too wide, spreads are left out."""
    rows = [HEAD, *(_cells(each) for each in comparison.differences)]
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    shown = list(range(len(HEAD)))
    if sum(widths) + GAP * (len(widths) - 1) > width:
        shown = [at for at in shown if at not in SPREADS]
    names = (shown[0], shown[-1])
    lines = []
    for row in rows:
        cells = [
            row[at].ljust(widths[at]) if at in names else row[at].rjust(widths[at]) for at in shown
        ]
        lines.append((" " * GAP).join(cells).rstrip())
    return lines


def _histograms(groups: Sequence[Bars]) -> Any:
    from rich.bar import Bar
    from rich.table import Table

    drawn = Table(box=None, pad_edge=False, header_style="bold")
    for name in ("ms", "A", "", "B", ""):
        drawn.add_column(name, justify="left" if name in ("A", "B") else "right")
    most = max(share for group in groups for share in group.shares)
    for group in groups:
        row: list[Any] = [group.label]
        for share, color in zip(group.shares, ("cyan", "yellow"), strict=True):
            row += [Bar(most, 0, share, width=BAR_WIDTH, color=color), f"{share:.1%}"]
        drawn.add_row(*row)
    return drawn


def _groups(comparison: Comparison) -> list[Bars]:
    """The histograms of both sides in the same classes; nothing where one has no latencies."""
    latencies = [side.latencies for side in (comparison.a, comparison.b)]
    shares: dict[tuple[float, float | None], list[float]] = {}
    for at, each in enumerate(latencies):
        if each is None or not each.count:
            return []
        for low_ms, high_ms, values in each.classes():
            shares.setdefault((low_ms, high_ms), [0.0, 0.0])[at] = values / each.count
    ordered = sorted(shares.items(), key=lambda item: item[0][0])
    return [Bars(bound_of(low, high), share) for (low, high), share in ordered]


def comparison_page(comparison: Comparison, made_at: str) -> str:
    """The comparison with charts."""
    a, b = comparison.a, comparison.b
    parts = [
        table(("", "", "nsqd"), [(side.name, side.what, ", ".join(side.nsqds)) for side in (a, b)]),
        "<h2>Figures</h2>",
        table(HEAD, [_cells(each) for each in comparison.differences]),
        '<p class="note">The median of all rounds, from the least to the most. Within the noise: '
        "rounds of equal sides would be as far apart in more than one of twenty comparisons.</p>",
    ]
    for each in comparison.differences:
        values = [(side.name, side.values(each.figure)) for side in (a, b)]
        parts += [f"<h2>{NAMES[each.figure]}</h2>", dots(values, [each.a.median, each.b.median])]
    if groups := _groups(comparison):
        parts += ["<h2>Latency in ms: share of A and B</h2>", bars(groups)]
    limits = [f"{side.name}: {line}" for side in (a, b) for line in side.limits]
    if limits:
        parts += ["<h2>Limits</h2>", table(("",), [(line,) for line in limits])]
    title = f"nsq bench compare {comparison.mode.value}"
    note = f'<p class="note">{headline(comparison)}. Made at {made_at}.</p>'
    return page(title, note, *parts)
