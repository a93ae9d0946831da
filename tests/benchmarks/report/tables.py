"""Markdown tables of runs side by side, narrow enough for a manual page of 80 columns.

A missing figure is a dash, never a guess.
"""

from __future__ import annotations

from collections.abc import Sequence

from benchmarks.report.raw import Result

MISSING = "-"


def number(value: float | None) -> str:
    """Three digits that mean something, thousands apart."""
    if value is None:
        return MISSING
    if value >= 1000:
        step = 10 ** (len(str(int(value))) - 3)
        return f"{round(value / step) * step:,}"
    return f"{value:.0f}" if value >= 100 else f"{value:.3g}"


def whole(value: float | None) -> str:
    return MISSING if value is None else f"{value:.0f}"


def times(value: float | None) -> str:
    """A ratio: two digits, one after the point below ten."""
    if value is None:
        return MISSING
    return f"{value:.0f}" if value >= 9.95 else f"{value:.1f}" if value >= 1 else f"{value:.2f}"


def ratio(result: Result, name: str, other: str, figure: str) -> float | None:
    """Of the medians."""
    mine, theirs = result.middle(name, figure), result.middle(other, figure)
    return mine / theirs if mine and theirs else None


def markdown(head: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    lines = [f"| {' | '.join(head)} |".replace("|  |", "| |"), "|---" * len(head) + "|"]
    lines += [f"| {' | '.join(row)} |" for row in rows]
    return "\n".join(lines)


def compared(result: Result, names: dict[str, str], baseline: str, unit: str = "messages/s") -> str:
    """One line a contestant, by the names to show: rate, ratio, whole process, and what it took."""
    head = ["", unit, "ratio", "whole", "CPU us", "MB", "fds"]
    rows = [
        [
            shown,
            number(result.middle(name, "rate")),
            times(ratio(result, name, baseline, "rate")),
            times(ratio(result, name, baseline, "whole_rate")),
            number(result.middle(name, "cpu_us")),
            whole(max(result.values(name, "peak_mb"), default=None)),
            whole(max(result.values(name, "descriptors"), default=None)),
        ]
        for name, shown in names.items()
        if name in result.names()
    ]
    return markdown(head, rows)
