"""The list that `nsq top` shows: its lines, columns and order, and what keys change in that. Pure.

Columns have the names that the whole package uses. Each reads a value from the subject of a line: a
`Sum` (of a topic, of an nsqd), the `QueueRow` of a channel or a `ConsumerRow`. Nothing is read but
what is on the screen, and what is sorted by.

The selection is a line's key and not its number, so it stays with its topic when lines change
places. While the view is frozen, samples are dropped: nothing of the screen changes but by keys.
"""

from __future__ import annotations

import enum
import operator
import re
import sys
from collections import Counter, deque
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

from nsqtools.cluster.problems import Problem, RecentTotals, find_problems
from nsqtools.cluster.queue_rows import ConsumerRow, QueueRow, totals
from nsqtools.cluster.sampling import NO_SAMPLE, NodeState, Sample, SampleScope
from nsqtools.cluster.stats_documents import COLUMNS, CONSUMER_NUMBERS, Condition, parse_condition
from nsqtools.errors import ConfigurationError
from nsqtools.protocol.names import is_valid_name

Cell = str | int | float | bool | None
Read = Callable[[Any], Cell]
TREND = "trend"


class ViewKind(enum.Enum):
    """What a line is."""

    TOPICS = "topics"
    CHANNELS = "channels"
    CONSUMERS = "consumers"
    NODES = "nsqd"


class Column(NamedTuple):
    """``width`` is what it takes at least; texts are aligned on the left."""

    name: str
    read: Read
    width: int = 7
    is_text: bool = False


class View(NamedTuple):
    """The columns of a kind of line: the first one is its name.

    ``shown`` are those to begin with; the last ones are left out where the screen is narrow.
    """

    columns: dict[str, Column]
    shown: Sequence[str]


class Sum(NamedTuple):
    """A topic on all nsqd, or an nsqd (``state``): its topics, and their channels."""

    name: str
    topics: list[QueueRow]
    channels: list[QueueRow]
    state: NodeState | None = None

    @property
    def queues(self) -> list[QueueRow]:
        return [*self.topics, *self.channels]


def _joined(
    rows: str, name: str, join: Callable[[list[Any]], Cell] = sum, none: Cell = None
) -> Read:
    """What is known of some rows, joined; ``none`` where that is nothing, but of a silent nsqd."""
    read = COLUMNS[name]

    def joined(each: Sum) -> Cell:
        known = [value for row in getattr(each, rows) if (value := read(row)) is not None]
        if known:
            return join(known)
        return None if each.state and each.state.is_silent else none

    return joined


def _heap_mib(each: Sum) -> float | None:
    heap = each.state.heap if each.state else None
    return None if heap is None else heap / (1 << 20)


def _view(columns: Iterable[Column], shown: str) -> View:
    return View({column.name: column for column in columns}, shown.split())


_get = operator.attrgetter


def _text(name: str, what: str = "", width: int = 0) -> Column:
    return Column(name, _get(what or name), width or len(name), is_text=True)


_trend = Column(TREND, lambda _: None, 12, is_text=True)
_waiting = Column("waiting", _joined("queues", "depth", none=0))
_rates = [Column("ingress", _joined("topics", "ingress"), 8)]
_rates += [Column("finish", _joined("channels", "finish"), 8)]
_rates += [Column("requeue", _joined("channels", "requeue"))]
_summed = ["in_flight", "deferred", "requeued", "timed_out", "clients"]
_sums = [Column(name, _joined("channels", name, none=0)) for name in _summed]
_sums += [Column("e2e_ms", _joined("channels", "e2e_ms", max))]
_queue = "depth memory disk in_flight deferred ingress egress finish requeue requeued timed_out"
_wide = {"ingress": 8, "egress": 8, "finish": 8, "messages": 8, "paused": 6}

VIEWS = {
    ViewKind.TOPICS: _view(
        [
            _text("topic", "name", 10),
            Column("depth", _joined("topics", "depth"), 9),
            _waiting,
            Column("disk", _joined("queues", "disk", none=0)),
            *_rates,
            *_sums,
            Column("channels", _joined("channels", "channel", len, 0)),
            Column("messages", _joined("topics", "messages"), 8),
            Column("paused", _joined("topics", "paused", any), 6),
            _trend,
        ],
        "topic depth waiting ingress finish requeue clients channels in_flight trend e2e_ms "
        "timed_out",
    ),
    ViewKind.CHANNELS: _view(
        [
            _text("channel", width=10),
            *(
                Column(name, COLUMNS[name], _wide.get(name, 7))
                for name in f"{_queue} clients e2e_ms messages paused".split()
            ),
            _trend,
        ],
        "channel depth clients in_flight finish ingress requeue deferred trend timed_out requeued "
        "e2e_ms",
    ),
    ViewKind.CONSUMERS: _view(
        [
            *(
                _text(name, f"client.{name}")
                for name in ["client_id", "hostname", "remote_address"]
            ),
            *map(_text, ["topic", "channel", "node"]),
            *(Column(name, _get(f"client.{theirs}")) for name, theirs in CONSUMER_NUMBERS.items()),
            *(Column(name, _get(name), 6) for name in ["finish", "requeue"]),
            _text("user_agent", "client.user_agent"),
        ],
        "client_id remote_address channel topic in_flight finish node ready hostname requeued "
        "requeue finished user_agent",
    ),
    ViewKind.NODES: _view(
        [
            _text("node", "name", 10),
            Column("state", lambda each: state_text(each.state), 6, is_text=True),
            Column("version", lambda each: each.state.version or None, 7, is_text=True),
            Column("topics", _joined("topics", "topic", len, 0), 6),
            _waiting,
            *_rates,
            *_sums,
            Column("heap_mib", _heap_mib),
        ],
        "node state waiting clients ingress finish heap_mib in_flight requeue topics timed_out "
        "version",
    ),
}

ALL_NAMES = tuple(dict.fromkeys(name for view in VIEWS.values() for name in view.columns))
TEXTS = frozenset(
    name for view in VIEWS.values() for name, column in view.columns.items() if column.is_text
)


def state_text(state: NodeState) -> str:
    """How an nsqd is: what it says of its health, or since when it does not answer."""
    return f"silent {duration_text(state.silent_s)}" if state.is_silent else state.health or "OK"


def duration_text(seconds: float) -> str:
    """``8s``, ``12m``, ``3h``."""
    for size, unit in ((86400, "d"), (3600, "h"), (60, "m")):
        if seconds >= size:
            return f"{seconds // size:.0f}{unit}"
    return f"{max(1, seconds):.0f}s"


TREND_LENGTH = 40
SCOPES = {ViewKind.TOPICS: "topic", ViewKind.CHANNELS: "channel", ViewKind.NODES: "node"}
"""What a line narrows the scope to."""
ORDER = (ViewKind.TOPICS, ViewKind.NODES, ViewKind.CONSUMERS)
WHEEL_LINES = 3
KEYS: dict[str, tuple[str, *tuple[Any, ...]]] = {
    **dict.fromkeys(("up", "k"), ("move", -1)),
    **dict.fromkeys(("down", "j"), ("move", 1)),
    "wheel up": ("move", -WHEEL_LINES),
    "wheel down": ("move", WHEEL_LINES),
    "pageup": ("move_pages", -1),
    "pagedown": ("move_pages", 1),
    "home": ("select", 0),
    "end": ("select", sys.maxsize),
    **dict.fromkeys(("enter", "right"), ("go_down",)),
    **dict.fromkeys(("escape", "backspace", "left"), ("go_up",)),
    **{str(number): ("go_to", kind) for number, kind in enumerate(ORDER, 1)},
    "tab": ("go_next", 1),
    "shift+tab": ("go_next", -1),
    "n": ("go_down", ViewKind.NODES),
    "s": ("sort_next", 1),
    "S": ("sort_next", -1),
    "r": ("reverse",),
    "space": ("freeze",),
    "slash": ("type_filter",),
}
"""What keys do to the view: a method and its arguments. The names of keys are those of textual."""


class Scope(NamedTuple):
    """What the view looks into; ``""`` is everything."""

    node: str = ""
    topic: str = ""
    channel: str = ""


class Line(NamedTuple):
    """One line: ``key`` stays the same from sample to sample, ``subject`` is what columns read."""

    key: str
    subject: Any
    is_paused: bool = False
    is_silent: bool = False


# -- lines --------------------------------------------------------------------------------------


def lines_of(sample: Sample, kind: ViewKind, scope: Scope) -> list[Line]:
    """All lines of a view."""
    if kind is ViewKind.NODES:
        return _node_lines(sample, scope)
    if kind is ViewKind.CONSUMERS:
        return [
            Line(" ".join(row.id), row)
            for node in sample.nodes
            for row in node.consumers
            if scope.node in ("", row.node) and _is_within(row, scope)
        ]
    rows = sample.totals
    if scope.node:
        nodes = (node for node in sample.nodes if node.address == scope.node)
        rows = totals(row for node in nodes for row in node.rows)  # the last known ones, too
    if kind is ViewKind.CHANNELS:
        return [
            Line(row.channel, row, row.paused)
            for row in rows
            if row.topic == scope.topic and row.channel
        ]
    topics: dict[str, list[QueueRow]] = {}
    for row in rows:
        topics.setdefault(row.topic, []).append(row)
    return [
        Line(topic, _sum(topic, found), any(row.paused for row in found if not row.channel))
        for topic, found in topics.items()
    ]


def _is_within(row: QueueRow | ConsumerRow, scope: Scope) -> bool:
    return scope.topic in ("", row.topic) and scope.channel in ("", row.channel)


def _sum(name: str, rows: Sequence[QueueRow], **state: Any) -> Sum:
    topics = [row for row in rows if not row.channel]
    return Sum(name, topics, [row for row in rows if row.channel], **state)


def _node_lines(sample: Sample, scope: Scope) -> list[Line]:
    lines = []
    for node in sample.nodes:
        rows = [row for row in node.rows if _is_within(row, scope)]
        if rows or not scope.topic or node.is_silent:
            is_paused = bool(scope.topic) and any(row.paused for row in rows)
            found = _sum(node.address, rows, state=node)
            lines.append(Line(node.address, found, is_paused, node.is_silent))
    return lines


_SPACES = re.compile(r"\s*(>=|<=|!=|==|=|>|<)\s*")


class LineFilter(NamedTuple):
    """Words that the line's texts hold, and conditions; ``problem`` is what was not understood."""

    text: str = ""
    words: tuple[str, ...] = ()
    conditions: tuple[Condition, ...] = ()
    problem: str = ""

    def keep(self, lines: Iterable[Line], kind: ViewKind) -> list[Line]:
        """The lines that meet all of it; a view without the column of a condition ignores that."""
        columns = VIEWS[kind].columns
        texts = [column for column in columns.values() if column.is_text]
        conditions = [each for each in self.conditions if each.column in columns]

        def has_words(line: Line) -> bool:
            found = (str(column.read(line.subject) or "") for column in texts)
            said = "\n".join([line.key, *found]).casefold()
            return all(word in said for word in self.words)

        return [
            line
            for line in lines
            if (not self.words or has_words(line))
            and all(each.holds(columns[each.column].read(line.subject)) for each in conditions)
        ]


def parse_line_filter(text: str) -> LineFilter:
    """Read a filter: words to find and conditions such as ``depth>1000``.

    A condition that is not finished or not understood is left out, and named as the problem.
    """
    words, conditions, problem = [], [], ""
    for word in _SPACES.sub(r"\1", text).split():
        if not _SPACES.search(word):
            words.append(word.casefold())
            continue
        try:
            conditions.append(parse_line_condition(word))
        except ConfigurationError as error:
            problem = str(error)
    return LineFilter(text, tuple(words), tuple(conditions), problem)


def parse_line_condition(text: str) -> Condition:
    """Read a condition on a column of any view. Raises `ConfigurationError`."""
    return parse_condition(text, ALL_NAMES, TEXTS)


def sort_lines(lines: Iterable[Line], column: Column, *, is_reversed: bool) -> list[Line]:
    """Sort by a column: texts from A to Z, numbers from the greatest down, unknown ones last."""
    key: Callable[[Any], Any] = str if column.is_text else (lambda value: -value)
    valued = [(column.read(line.subject), line) for line in lines]
    known = [(key(value), line.key, line) for value, line in valued if value is not None]
    known.sort(key=lambda entry: entry[:2], reverse=is_reversed)
    unknown = sorted((line for value, line in valued if value is None), key=lambda line: line.key)
    return [*(line for _, _, line in known), *unknown]


# -- the view -----------------------------------------------------------------------------------


@dataclass(slots=True)
class Look:
    """What was chosen for a kind of lines."""

    columns: Sequence[str]
    sort: str
    filter: LineFilter
    is_reversed: bool = False


class TopView:
    """The state of the list. It begins with the columns, order and filter that are given."""

    def __init__(self, columns: Sequence[str] = (), sort: str = "", filter: str = "") -> None:
        self.sample = NO_SAMPLE
        self.kind = ViewKind.TOPICS
        self.scope = Scope()
        self.is_frozen = False
        self.is_typing = False  # a filter
        self.room = 1  # the lines of a page
        self.selected = ""
        self._filter = parse_line_filter(filter)
        self._looks = {kind: self._look(kind, columns, sort) for kind in ViewKind}
        self._way: list[tuple[ViewKind, Scope, str]] = []
        self.problems: list[Problem] = []
        self._past = RecentTotals()
        self._trends: dict[tuple[str, str], deque[int]] = {}
        self.widths: dict[str, int] = {}  # of the texts in columns, as far as they were measured
        self._lines: list[Line] | None = None
        self._last_position = 0

    def _look(self, kind: ViewKind, names: Sequence[str], sort: str) -> Look:
        columns, shown = VIEWS[kind]
        chosen = [name for name in names if name in columns and name != shown[0]]
        names = [shown[0], *chosen] if chosen else shown
        return Look(names, sort if sort in columns else shown[0], self._filter)

    @property
    def look(self) -> Look:
        return self._looks[self.kind]

    @property
    def columns(self) -> list[Column]:
        """The columns that were chosen. What is the same in all lines is left out."""
        is_list = self.kind is ViewKind.CONSUMERS
        view, known = VIEWS[self.kind].columns, self.scope._asdict()
        return [view[name] for name in self.look.columns if not (is_list and known.get(name))]

    @property
    def question(self) -> SampleScope:
        """What is to be asked for this view."""
        if self.kind is ViewKind.CONSUMERS:
            return SampleScope(consumers=True, topic=self.scope.topic, channel=self.scope.channel)
        return SampleScope(memory=self.kind is ViewKind.NODES)

    @property
    def path(self) -> str:
        """Where the view is: ``topics > clicks > archive``."""
        if not any(self.scope):
            return self.kind.value
        below = "" if self.kind is ViewKind.CHANNELS else f"[{self.kind.value}]"
        parts = ("nsqd" if self.scope.node else "topics", *self.scope, below)
        return " > ".join(filter(None, parts))

    def lines(self) -> list[Line]:
        """The lines that the filter lets through, sorted."""
        if self._lines is None:
            self.widths, look = {}, self.look
            kept = look.filter.keep(lines_of(self.sample, self.kind, self.scope), self.kind)
            column = VIEWS[self.kind].columns[look.sort]
            self._lines = sort_lines(kept, column, is_reversed=look.is_reversed)
        return self._lines

    def trend(self, line: Line) -> tuple[int, ...]:
        """The depth of a channel, or of a topic with its channels, at the last samples."""
        if self.scope.node:
            return ()
        topic = line.key if self.kind is ViewKind.TOPICS else self.scope.topic
        channel = line.key if self.kind is ViewKind.CHANNELS else ""
        return tuple(self._trends.get((topic, channel), ()))

    def position(self) -> int:
        """The number of the selected line; where it is gone, of the one in its place."""
        lines = self.lines()
        if not self.selected:
            return 0
        last = max(0, min(self._last_position, len(lines) - 1))
        found = (number for number, line in enumerate(lines) if line.key == self.selected)
        self._last_position = next(found, last)
        return self._last_position

    def selected_line(self) -> Line | None:
        """The selected line; None where there are no lines."""
        lines = self.lines()
        return lines[self.position()] if lines else None

    def target(self) -> tuple[str, str] | str:
        """The topic and channel of the selected line, or why nothing can be done with it."""
        scope, line = self.scope, self.selected_line()
        if line is None or self.kind not in (ViewKind.TOPICS, ViewKind.CHANNELS):
            return "select a topic or a channel for this"
        target = (line.key, "") if self.kind is ViewKind.TOPICS else (scope.topic, line.key)
        if scope.node:
            return f"this changes every nsqd: go to the topics of all (1), not of {scope.node}"
        if not all(is_valid_name(name) for name in filter(None, target)):
            return "this is not a name that NSQ allows: nothing can be done with it"
        return target

    # -- what changes it ------------------------------------------------------------------------

    def press(self, key: str, character: str | None = None) -> bool:
        """Do what a key does to the view; return whether it is one of its keys."""
        if self.is_typing:
            self._type(key, character or "")
            return True
        if key not in KEYS:
            return False
        name, *arguments = KEYS[key]
        getattr(self, name)(*arguments)
        return True

    def _type(self, key: str, character: str) -> None:
        text = self.look.filter.text
        self.is_typing = key not in ("enter", "escape")
        if key == "escape":
            self.set_filter("")
        elif key == "backspace":
            self.set_filter(text[:-1])
        elif character.isprintable():
            self.set_filter(text + character)

    def type_filter(self) -> None:
        """Take keys as text of the filter, until Enter or Escape."""
        self.is_typing = True

    def show(self, sample: Sample) -> None:
        """Show a new sample, unless the view is frozen."""
        if self.is_frozen:
            return
        self.sample, self._lines = sample, None
        self.problems = find_problems(sample, self._past.before(sample))
        self._past.add(sample)
        depths: Counter[tuple[str, str]] = Counter()
        for row in sample.totals:
            depths[row.topic, ""] += row.depth
            if row.channel:
                depths[row.topic, row.channel] = row.depth
        before, self._trends = self._trends, {}
        for key, depth in depths.items():  # those of queues that are gone are forgotten
            self._trends[key] = before.get(key) or deque(maxlen=TREND_LENGTH)
            self._trends[key].append(depth)

    def freeze(self) -> None:
        """Stop the screen, or let it go on."""
        self.is_frozen = not self.is_frozen

    def move(self, step: int) -> None:
        """Select the line ``step`` lines down; up where negative."""
        self.select(self.position() + step)

    def move_pages(self, step: int) -> None:
        """Select the line ``step`` screens down."""
        self.move(step * self.room)

    def select(self, number: int) -> None:
        """Select a line by its number, or the nearest."""
        lines = self.lines()
        if lines:
            self._last_position = min(max(number, 0), len(lines) - 1)
            self.selected = lines[self._last_position].key

    def click(self, number: int) -> None:
        """Select a line; look into it where it was selected."""
        was_selected = self.selected == self.lines()[number].key
        self.select(number)
        if was_selected:
            self.go_down()

    def sort_by(self, name: str) -> None:
        """Sort by a column; where that is the order already, reverse it."""
        if name == self.look.sort:
            self.reverse()
        elif name != TREND:
            self.look.sort, self.look.is_reversed, self._lines = name, False, None

    def sort_next(self, step: int) -> None:
        """Sort by the next column of those that were chosen, or by the one before."""
        names = [column.name for column in self.columns if column.name != TREND]
        here = names.index(self.look.sort) if self.look.sort in names else -step
        self.look.sort, self.look.is_reversed = names[(here + step) % len(names)], False
        self._lines = None

    def reverse(self) -> None:
        """Reverse the order."""
        self.look.is_reversed, self._lines = not self.look.is_reversed, None

    def set_filter(self, text: str) -> None:
        """Filter the lines of this kind."""
        self.look.filter, self._lines = parse_line_filter(text), None

    def switch_column(self, name: str) -> None:
        """Show a column of this kind of lines, or hide it; the first one, the name, stays."""
        shown = list(self.look.columns)
        if name in shown[1:]:
            shown.remove(name)
        elif name not in shown:
            shown.append(name)
        self.look.columns = shown

    # -- where the view is ----------------------------------------------------------------------

    def go_to(self, kind: ViewKind) -> None:
        """Show all topics, nsqd or consumers."""
        self._way.clear()
        self._enter(kind, Scope())

    def go_next(self, step: int) -> None:
        """Show the next of these."""
        here = ORDER.index(self.kind) if self.kind in ORDER else 0
        self.go_to(ORDER[(here + step) % len(ORDER)])

    def go_down(self, kind: ViewKind | None = None) -> None:
        """Look into the selected line; of an nsqd, into what of the scope is there.

        With `ViewKind.NODES` show it on each nsqd, unless it is of one already.
        """
        line = self.selected_line()
        if line is None or self.kind not in SCOPES:
            return
        scope = self.scope._replace(**{SCOPES[self.kind]: line.key})
        if kind and scope.node:
            return
        below = ViewKind.CHANNELS if scope.topic else ViewKind.TOPICS
        self._way.append((self.kind, self.scope, line.key))
        self._enter(kind or (ViewKind.CONSUMERS if scope.channel else below), scope)

    def go_up(self) -> None:
        """Go back to the view before; at the beginning: clear the filter."""
        if self._way:
            self._enter(*self._way.pop())
        elif self.kind is not ViewKind.TOPICS:
            self._enter(ViewKind.TOPICS, Scope())
        else:
            self.set_filter("")

    def _enter(self, kind: ViewKind, scope: Scope, selected: str = "") -> None:
        if sum(map(bool, scope)) > sum(map(bool, self.scope)):
            self._looks[kind].filter = self._filter
        self.kind, self.scope, self.selected = kind, scope, selected
        self._lines, self._last_position = None, 0
