"""Markdown tables of runs side by side. A missing figure is a dash, never a guess."""

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


def times(value: float | None) -> str:
    """A ratio: two digits, one after the point below ten."""
    if value is None:
        return MISSING
    return f"{value:.0f}" if value >= 9.95 else f"{value:.1f}" if value >= 1 else f"{value:.2f}"


def ratio(result: Result, name: str, other: str, figure: str) -> float | None:
    """Of the medians."""
    mine, theirs = result.middle(name, figure), result.middle(other, figure)
    return mine / theirs if mine and theirs else None


def whole_ratio(result: Result, name: str, other: str) -> float | None:
    """Of messages a second with the start-up of the process in it."""

    def rate(of: str) -> float | None:
        messages, seconds = result.middle(of, "messages"), result.middle(of, "whole_s")
        return messages / seconds if messages and seconds else None

    mine, theirs = rate(name), rate(other)
    return mine / theirs if mine and theirs else None


def markdown(head: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    lines = [f"| {' | '.join(head)} |".replace("|  |", "| |"), "|---" * len(head) + "|"]
    lines += [f"| {' | '.join(row)} |" for row in rows]
    return "\n".join(lines)


def compared(result: Result, names: dict[str, str], baseline: str, unit: str = "messages/s") -> str:
    """One line a contestant, by the names to show: rate, ratio, whole process, and what it took."""
    head = ["", unit, "ratio", "with start-up", "CPU us", "peak MB", "descriptors"]
    rows = [
        [
            shown,
            number(result.middle(name, "rate")),
            times(ratio(result, name, baseline, "rate")),
            times(whole_ratio(result, name, baseline)),
            number(result.middle(name, "cpu_us")),
            number(max(result.values(name, "peak_mb"), default=None)),
            number(max(result.values(name, "descriptors"), default=None)),
        ]
        for name, shown in names.items()
        if name in result.names()
    ]
    return markdown(head, rows)
