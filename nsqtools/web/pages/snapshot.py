"""A sample prepared for pages: totals, problems, and the table of queues. Pure.

By default the table begins with the deepest queue. A topic has its own row if it has no channels,
is paused, or has messages that it has not passed to its channels. A cluster may have thousands of
queues, so the table has pages.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Generic, NamedTuple, TypeVar
from urllib.parse import urlencode

from nsqtools.cluster.problems import EarlierTotals, Problem, Severity, find_problems
from nsqtools.cluster.queue_rows import QueueKey, QueueRow, sums_of
from nsqtools.cluster.sampling import NodeState, Sample
from nsqtools.cluster.stats_documents import COLUMNS


class Snapshot:
    """A sample, prepared once for all readers."""

    def __init__(
        self,
        sample: Sample,
        earlier: EarlierTotals | None = None,
        oldest_s: Mapping[QueueKey, float] | None = None,
    ) -> None:
        self.sample = sample
        self._oldest_s = oldest_s or {}
        self.totals = sample.totals
        self.sums = sums_of(self.totals)
        self.problems: list[Problem] = find_problems(sample, earlier)
        # The worst problem of each queue.
        self.critical: dict[tuple[str, str], str] = {}
        for problem in self.problems:
            if problem.topic and problem.severity is Severity.CRITICAL:
                self.critical.setdefault(problem.queue, problem.kind)
        earlier_depths = {row.key: row.depth for row in earlier.totals} if earlier else {}
        # In messages a second.
        self.growth = {
            row.key: (row.depth - earlier_depths[row.key]) / earlier.ago_s
            for row in sample.totals
            if earlier and row.key in earlier_depths
        }
        self.silent = {node.address: node for node in sample.nodes if node.error}
        self.gone = {address: node for address, node in self.silent.items() if node.is_gone}
        self.reports = {report.address: report for report in sample.reports}
        self._rows_of = {node.address: node.rows for node in sample.nodes}

    def drains_s(self, row: QueueRow) -> float | None:
        """Return the seconds until a queue is empty at its current rate, None if it grows."""
        growth = self.growth.get(row.key, 0.0)
        return row.depth / -growth if row.depth and growth <= -LEAST_GROWTH else None

    def oldest_s(self, row: QueueRow) -> float | None:
        """Return the least age of the oldest message of a queue, None if that is little."""
        age_s = self._oldest_s.get(row.key, 0.0)
        return age_s if age_s >= LEAST_AGE_S else None

    def queue(self, topic: str, channel: str) -> QueueRow | None:
        """Return the total of a channel, or of a topic."""
        rows = (row for row in self.totals if row.topic == topic and row.channel == channel)
        return next(rows, None)

    def channels(self, topic: str) -> list[QueueRow]:
        """Return the totals of a topic's channels, the deepest first."""
        rows = [row for row in self.totals if row.topic == topic and row.channel]
        return sorted(rows, key=lambda row: -row.depth)

    def on_nodes(self, topic: str, channel: str = "") -> list[QueueRow]:
        """Return a queue on each nsqd that has it, or had it in its last sample."""
        last_known = (row for node in self.gone.values() for row in node.rows)
        rows = (row for row in (*self.sample.rows, *last_known) if row.topic == topic)
        return sorted((row for row in rows if row.channel == channel), key=lambda row: row.node)

    def left_out(self, topic: str = "", channel: str = "") -> list[tuple[NodeState, int | None]]:
        """Return the nsqd that are missing in the sums of a queue, or of all queues.

        Each has the last known depth, None for an nsqd that was never sampled.
        """
        nodes: list[tuple[NodeState, int | None]] = []
        for node in self.silent.values():
            rows = [row for row in node.rows if topic in ("", row.topic)]
            rows = [row for row in rows if channel in ("", row.channel)]
            if rows or not topic or not node.is_gone:
                nodes.append((node, sum(row.depth for row in rows) if node.is_gone else None))
        return nodes

    def of_node(self, node: str) -> list[QueueRow]:
        """Return the queues of an nsqd, from its last sample if it does not answer."""
        return self._rows_of.get(node, [])

    def problems_of_queue(self, topic: str, channel: str = "") -> list[Problem]:
        """Return the problems of a topic and its channels, or of one channel."""
        return [
            problem
            for problem in self.problems
            if problem.topic == topic and (not channel or problem.channel == channel)
        ]


PAGE_LINES = 50
# Messages a second. A smaller growth counts as none.
LEAST_GROWTH = 0.05

# A younger message is nothing unusual, and samples are seconds apart.
LEAST_AGE_S = 10.0

# Columns by their name in the address, with heading.
SORTS = {
    "name": "Topic / channel",
    "depth": "Depth",
    "in_flight": "In flight",
    "deferred": "Deferred",
    "clients": "Consumers",
    "ingress": "In /s",
    "finish": "Finished /s",
    "requeue": "Requeued /s",
    "latency": "Latency",
    "growth": "Growth /s",
}

# Filters of the list by their name in the address, with label.
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


class QueueQuery(NamedTuple):
    """The search, filter and order of the table. ``page`` counts from 1."""

    text: str = ""
    shown: str = "all"
    sort: str = "depth"
    is_ascending: bool = False
    page: int = 1

    def address(self, **changes: object) -> str:
        """Return the query string with changes, without default values."""
        values: dict[str, object] = {"q": self.text, "show": self.shown, "sort": self.sort}
        values |= {"order": "asc" if self.is_ascending else "desc", "page": self.page, **changes}
        default_order = "asc" if values["sort"] == "name" else "desc"
        defaults = {"q": "", "show": "all", "sort": "depth", "order": default_order, "page": 1}
        changed = {name: value for name, value in values.items() if value != defaults[name]}
        return "?" + urlencode(changed, errors="replace") if changed else "?"


def parse_query(parameters: Mapping[str, str]) -> QueueQuery:
    """Parse the query of an address. Invalid values are ignored."""
    sort = parameters.get("sort", "")
    show = parameters.get("show", "")
    sort = sort if sort in SORTS else "depth"
    order = parameters.get("order", "asc" if sort == "name" else "desc")
    return QueueQuery(
        text=parameters.get("q", "")[:200].strip(),
        shown=show if show in SHOWN else "all",
        sort=sort,
        is_ascending=order == "asc",
        page=page_number(parameters),
    )


def page_number(parameters: Mapping[str, str]) -> int:
    """Return the page number in the query of an address, 1 if it is invalid."""
    text = parameters.get("page", "")
    return max(1, int(text)) if text.isascii() and text.isdigit() and len(text) < 7 else 1


T = TypeVar("T")


class TablePage(NamedTuple, Generic[T]):
    """One page of a table. ``found`` is the number of lines on all pages."""

    rows: Sequence[T]
    found: int
    page: int
    pages: int
    counts: Mapping[str, int]

    @property
    def first(self) -> int:
        return (self.page - 1) * PAGE_LINES + 1


def page_of(rows: Sequence[T], page: int, counts: Mapping[str, int] | None = None) -> TablePage[T]:
    """Return a page of the rows, the last one if there are fewer."""
    pages = max(1, -(-len(rows) // PAGE_LINES))
    page = min(page, pages)
    first = (page - 1) * PAGE_LINES
    return TablePage(rows[first : first + PAGE_LINES], len(rows), page, pages, counts or {})


def page_of_queues(
    totals: Iterable[QueueRow],
    query: QueueQuery,
    growth: Mapping[QueueKey, float] | None = None,
) -> TablePage[QueueRow]:
    """Return the page of the table for a query, the last page if there are fewer."""
    rows = [
        row for row in listed(totals) if contains_words(f"{row.topic}/{row.channel}", query.text)
    ]
    counts = {name: sum(map(is_shown, rows)) for name, (_, is_shown) in SHOWN.items()}
    is_shown = SHOWN[query.shown][1]
    rows = sorted((row for row in rows if is_shown(row)), key=lambda row: (row.topic, row.channel))
    read = COLUMNS.get("e2e_ms" if query.sort == "latency" else query.sort)

    def size(row: QueueRow) -> float:
        value = read(row) if read else (growth or {}).get(row.key, 0.0)
        return value if isinstance(value, int | float) else -1.0

    if query.sort != "name":
        rows.sort(key=size, reverse=not query.is_ascending)
    elif not query.is_ascending:
        rows.reverse()
    return page_of(rows, query.page, counts)


def listed(totals: Iterable[QueueRow]) -> list[QueueRow]:
    """Return the channels, and the topics that need a separate line."""
    rows = list(totals)
    with_channels = {row.topic for row in rows if row.channel}
    return [
        row
        for row in rows
        if row.channel or row.topic not in with_channels or row.depth or row.paused
    ]


def contains_words(text: str, words: str) -> bool:
    """Return whether the text contains all words, regardless of case."""
    return all(word in text.casefold() for word in words.casefold().split())
