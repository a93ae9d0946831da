"""How cost grows, as a page of charts made with those of ``nsq bench --html``."""

from __future__ import annotations

from html import escape

from benchmarks.report.pages import GROWTH, grown_value
from benchmarks.report.raw import Result

from nsqtools.cli.render.charts import Bars, bars, page


def growth_page(result: Result) -> str:
    """A chart for each axis and program."""
    parts = [
        f"<p>{escape(str(result.facts['cpu']))}, {result.facts['cores']} cores, load "
        f"{result.facts['load_before']} before, measured {result.facts['at']}. Bars are "
        "microseconds of CPU a message unless the heading says otherwise.</p>"
    ]
    for axis, unit in GROWTH.items():
        for name in (each for each in result.names() if each.split()[0] == axis):
            rows = [row for row in result.rows if row.name == name and row.figures]
            groups = [Bars(f"{row.number:,} {axis}", [grown_value(axis, row)]) for row in rows]
            heading = f"{name.removeprefix(axis).strip()} over {axis}: {unit}"
            parts += [f"<h2>{escape(heading)}</h2>", bars(groups, show="{:,.2f}".format)]
    return page("How cost grows", *parts)
