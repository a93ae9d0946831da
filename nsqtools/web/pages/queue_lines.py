"""The lines of the table of queues: what it lists, in which order, and which page of it. Pure.

Lag first: the deepest queue stands on top unless another order is asked for. A topic has a line of
its own where its channels do not say everything: without channels, paused, or with messages that
it has not handed to them. A cluster may have thousands of queues: one page of them is shown.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from urllib.parse import urlencode

from nsqtools.cluster.queue_rows import QueueRow

PAGE_LINES = 50

SORTS: dict[str, tuple[str, Callable[[QueueRow], float]]] = {
    "depth": ("Depth", lambda row: row.depth),
    "in_flight": ("In flight", lambda row: row.in_flight),
    "deferred": ("Deferred", lambda row: row.deferred),
    "clients": ("Consumers", lambda row: row.clients),
    "ingress": ("In /s", lambda row: row.rates.ingress if row.rates else -1.0),
    "finish": ("Finished /s", lambda row: row.rates.finish if row.rates else -1.0),
    "requeue": ("Requeued /s", lambda row: row.rates.requeue if row.rates else -1.0),
    "timed_out": ("Timed out", lambda row: row.timed_out),
}
"""Columns by their name in the address, with heading and value."""

SHOWN: dict[str, tuple[str, Callable[[QueueRow], bool]]] = {
    "all": ("All", lambda row: True),
    "lagging": ("With a backlog", lambda row: row.depth > 0),
    "unconsumed": (
        "Without consumers",
        lambda row: bool(row.channel) and not row.clients and row.depth > 0,
    ),
    "paused": ("Paused", lambda row: row.paused),
    "failing": ("Timed out or requeued", lambda row: row.timed_out + row.requeued > 0),
}
"""What can be listed, by its name in the address."""


@dataclass(frozen=True, slots=True)
class QueueQuery:
    """What is asked of the table. ``page`` counts from 1."""

    text: str = ""
    shown: str = "all"
    sort: str = "depth"
    is_ascending: bool = False
    page: int = 1

    def address(self, **changes: object) -> str:
        """Return the query string with some changes; defaults are left out."""
        values: dict[str, object] = {
            "q": self.text,
            "show": self.shown,
            "sort": self.sort,
            "order": "asc" if self.is_ascending else "desc",
            "page": self.page,
        }
        usual = {"q": "", "show": "all", "sort": "depth", "page": 1}
        values |= changes
        usual["order"] = "asc" if values["sort"] == "name" else "desc"
        kept = {name: value for name, value in values.items() if value != usual[name]}
        return "?" + urlencode(kept, errors="replace") if kept else "?"


def read_query(parameters: Mapping[str, str]) -> QueueQuery:
    """Read the query of an address; what makes no sense is as if it were not there."""
    sort = parameters.get("sort", "")
    shown = parameters.get("show", "")
    sort = sort if sort in SORTS or sort == "name" else "depth"
    order = parameters.get("order", "asc" if sort == "name" else "desc")
    return QueueQuery(
        text=parameters.get("q", "")[:200].strip(),
        shown=shown if shown in SHOWN else "all",
        sort=sort,
        is_ascending=order == "asc",
        page=page_number(parameters),
    )


def page_number(parameters: Mapping[str, str]) -> int:
    """Return which page of a table an address asks for; the first if it makes no sense."""
    text = parameters.get("page", "")
    return max(1, int(text)) if text.isascii() and text.isdigit() and len(text) < 7 else 1


@dataclass(frozen=True, slots=True)
class QueueLines:
    """One page of the table. ``found`` is how many lines there are on all pages."""

    rows: Sequence[QueueRow]
    found: int
    page: int
    pages: int
    counts: Mapping[str, int] = field(default_factory=dict)


def lines_of(totals: Iterable[QueueRow], query: QueueQuery) -> QueueLines:
    """Return the page of the table that the query asks for, the last one if there are fewer."""
    rows = listed(totals)
    words = query.text.casefold().split()
    if words:
        rows = [row for row in rows if _has(row, words)]
    counts = {name: sum(map(is_shown, rows)) for name, (_, is_shown) in SHOWN.items()}
    is_shown = SHOWN[query.shown][1]
    rows = sorted((row for row in rows if is_shown(row)), key=_name)
    if query.sort != "name":
        rows.sort(key=SORTS[query.sort][1], reverse=not query.is_ascending)
    elif not query.is_ascending:
        rows.reverse()
    pages = max(1, -(-len(rows) // PAGE_LINES))
    page = min(query.page, pages)
    first = (page - 1) * PAGE_LINES
    return QueueLines(rows[first : first + PAGE_LINES], len(rows), page, pages, counts)


def listed(totals: Iterable[QueueRow]) -> list[QueueRow]:
    """Return the channels, and the topics that need a line of their own."""
    rows = list(totals)
    with_channels = {row.topic for row in rows if row.channel}
    return [
        row
        for row in rows
        if row.channel or row.topic not in with_channels or row.depth or row.paused
    ]


def _name(row: QueueRow) -> tuple[str, str]:
    return row.topic, row.channel


def _has(row: QueueRow, words: Sequence[str]) -> bool:
    name = f"{row.topic}/{row.channel}".casefold()
    return all(word in name for word in words)
