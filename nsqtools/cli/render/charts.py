"""Charts as SVG in a page that needs nothing else: no network, no script, no package. Pure.

Series have the colors of the style sheet, in light and dark. Everything that is not a number is
escaped, and the page forbids itself to load anything.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from html import escape
from typing import NamedTuple

WIDTH = 720
LABEL = 130  # the left margin, for names
VALUE = 70  # the right margin, for values
ROW = 22
BAR = 9

STYLE = """
:root{color-scheme:light dark;--ink:#1d2733;--soft:#6a7786;--line:#d8dee6;--page:#fff;
--s0:#2563a8;--s1:#d1660a}
@media (prefers-color-scheme:dark){:root{--ink:#e4e9ef;--soft:#98a4b3;--line:#39434f;
--page:#14191f;--s0:#6cb0f5;--s1:#f5a04c}}
body{font:15px/1.5 system-ui,sans-serif;color:var(--ink);background:var(--page);max-width:760px;
margin:2rem auto;padding:0 1rem}
h1{font-size:1.4rem}h2{font-size:1.05rem;margin-top:2rem}
p.note{color:var(--soft)}
table{border-collapse:collapse;width:100%}
th,td{text-align:right;padding:.25rem .6rem;border-bottom:1px solid var(--line);
font-variant-numeric:tabular-nums}
th:first-child,td:first-child{text-align:left}
code{font:13px ui-monospace,monospace}
svg{width:100%;height:auto;display:block}
svg text{font:12px system-ui,sans-serif;fill:var(--ink)}
svg text.soft{fill:var(--soft)}svg line{stroke:var(--line)}
.s0{fill:var(--s0);color:var(--s0)}.s1{fill:var(--s1);color:var(--s1)}
line.s0{stroke:var(--s0)}line.s1{stroke:var(--s1)}
circle{fill-opacity:.65}
"""


class Bars(NamedTuple):
    """A group of bars: one value of each series, a share of 1."""

    label: str
    shares: Sequence[float]


def page(title: str, *parts: str) -> str:
    """A whole page of ``parts``, which are HTML already."""
    return (
        '<!doctype html>\n<html lang="en"><head><meta charset="utf-8">\n'
        '<meta http-equiv="Content-Security-Policy" '
        "content=\"default-src 'none'; style-src 'unsafe-inline'\">\n"
        '<meta name="viewport" content="width=device-width">\n'
        f"<title>{escape(title)}</title>\n<style>{STYLE}</style></head>\n"
        f"<body><h1>{escape(title)}</h1>\n" + "\n".join(parts) + "\n</body></html>\n"
    )


def table(head: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """A table; its first column holds names."""
    cells = "".join(f"<th>{escape(name)}</th>" for name in head)
    lines = "".join(
        f"<tr>{''.join(f'<td>{escape(cell)}</td>' for cell in row)}</tr>\n" for row in rows
    )
    return f"<table><thead><tr>{cells}</tr></thead>\n<tbody>{lines}</tbody></table>"


def bars(groups: Sequence[Bars], show: Callable[[float], str] = "{:.1%}".format) -> str:
    """Horizontal bars, the longest of which fills the width; ``show`` writes the values."""
    most = max((share for group in groups for share in group.shares), default=0.0) or 1.0
    series = max((len(group.shares) for group in groups), default=1)
    row = ROW + (series - 1) * BAR
    room = WIDTH - LABEL - VALUE
    parts = []
    for at, group in enumerate(groups):
        top = at * row + 5
        parts.append(_text(LABEL - 8, top + series * BAR / 2 + 4, group.label, "end"))
        for number, share in enumerate(group.shares):
            y, width = top + number * BAR, room * share / most
            parts.append(
                f'<rect class="s{number}" x="{LABEL}" y="{y}" width="{width:.1f}" '
                f'height="{BAR - 1}"><title>{escape(show(share))}</title></rect>'
            )
        shares = " ".join(map(show, group.shares))
        parts.append(_text(WIDTH, top + series * BAR / 2 + 4, shares, "end", "soft"))
    return _svg(len(groups) * row + 10, parts)


def dots(series: Sequence[tuple[str, Sequence[float]]], medians: Sequence[float]) -> str:
    """Values of each series on one axis that begins at 0, with a line at the median."""
    most = max((value for _, values in series for value in values), default=0.0) or 1.0
    room = WIDTH - LABEL - VALUE
    parts = []
    for number, (label, values) in enumerate(series):
        y = number * ROW + 16
        parts.append(_text(LABEL - 8, y + 4, label, "end"))
        parts.append(f'<line x1="{LABEL}" y1="{y}" x2="{LABEL + room}" y2="{y}"/>')
        at = LABEL + room * medians[number] / most
        parts.append(
            f'<line class="s{number}" x1="{at:.1f}" y1="{y - 8}" x2="{at:.1f}" y2="{y + 8}"/>'
        )
        parts += [
            f'<circle class="s{number}" cx="{LABEL + room * value / most:.1f}" cy="{y}" r="4">'
            f"<title>{value:,.2f}</title></circle>"
            for value in values
        ]
        parts.append(_text(WIDTH, y + 4, f"{medians[number]:,.5g}", "end", "soft"))
    return _svg(len(series) * ROW + 14, parts)


def _svg(height: float, parts: Sequence[str]) -> str:
    return (
        f'<svg viewBox="0 0 {WIDTH} {height:.0f}" role="img" '
        f'xmlns="http://www.w3.org/2000/svg">{"".join(parts)}</svg>'
    )


def _text(x: float, y: float, text: str, anchor: str, style: str = "") -> str:
    kind = f' class="{style}"' if style else ""
    return f'<text x="{x:.0f}" y="{y:.0f}" text-anchor="{anchor}"{kind}>{escape(text)}</text>'
