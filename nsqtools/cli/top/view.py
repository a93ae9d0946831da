"""The list of `nsq top`: its lines, columns and order, and the effect of keys. Pure.

Columns have the same names as in the whole package. Each reads a value from the subject of a line:
a `Sum` (of a topic or an nsqd), the `QueueRow` of a channel or a `ConsumerRow`. Only values on the
screen and in the column of the order are read.

The selection is the key of a line and not its number, so it stays with its topic when lines change
places. While the view is frozen, samples are dropped, and only keys change the screen.
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

from nsqtools.cluster.problems import Problem, RecentTotals, Severity, find_problems
from nsqtools.cluster.queue_rows import ConsumerRow, QueueRow, totals
from nsqtools.cluster.sampling import NO_SAMPLE, NodeState, Sample, SampleScope
from nsqtools.cluster.stats_documents import COLUMNS, CONSUMER_NUMBERS, Condition, parse_condition
from nsqtools.errors import ConfigurationError
from nsqtools.protocol.names import is_valid_name

Cell = str | int | float | bool | None
Read = Callable[[Any], Cell]
TREND = "trend"


class ViewKind(enum.Enum):
    """The kind of lines."""

    TOPICS = "topics"
    CHANNELS = "channels"
    CONSUMERS = "consumers"
    NODES = "nsqd"


class Column(NamedTuple):
    """A column. ``width`` is the minimum; texts are aligned on the left."""

    name: str
    read: Read
    width: int = 7
    is_text: bool = False


class ViewColumns(NamedTuple):
    """The columns of a kind of line. The first one is its name.

    ``shown`` are the initial columns; a narrow screen leaves out the last ones.
    """

    columns: dict[str, Column]
    shown: Sequence[str]


class Sum(NamedTuple):
    """A topic on all nsqd, or an nsqd (with its ``state``): its topics and their channels."""

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
    """Join the known values of rows. Without any it is ``none``, or None for a silent nsqd."""
    read = COLUMNS[name]

    def joined(subject: Sum) -> Cell:
        values = [value for row in getattr(subject, rows) if (value := read(row)) is not None]
        if values:
            return join(values)
        return None if subject.state and subject.state.is_silent else none

    return joined


def _heap_mib(subject: Sum) -> float | None:
    heap = subject.state.heap if subject.state else None
    return None if heap is None else heap / (1 << 20)


def _view(columns: Iterable[Column], shown: str) -> ViewColumns:
    return ViewColumns({column.name: column for column in columns}, shown.split())


_get = operator.attrgetter


def _text(name: str, attribute: str = "", width: int = 0) -> Column:
    return Column(name, _get(attribute or name), width or len(name), is_text=True)


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
        "topic waiting ingress finish requeue in_flight clients channels trend e2e_ms timed_out",
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
            Column("state", lambda subject: state_text(subject.state), 6, is_text=True),
            Column("version", lambda subject: subject.state.version or None, 7, is_text=True),
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
    """Return the health of an nsqd, or the time since its last answer."""
    return f"silent {age_text(state.silent_s)}" if state.is_silent else state.health or "OK"


def age_text(seconds: float) -> str:
    """Return ``8s``, ``12m``, ``3h``."""
    for size, unit in ((86400, "d"), (3600, "h"), (60, "m")):
        if seconds >= size:
            return f"{seconds // size:.0f}{unit}"
    return f"{max(1, seconds):.0f}s"


TREND_LENGTH = 40
# The worst queue comes first; nsqd keep their places.
FIRST_SORT = {
    ViewKind.TOPICS: "waiting",
    ViewKind.CHANNELS: "depth",
    ViewKind.CONSUMERS: "in_flight",
    ViewKind.NODES: "node",
}
SCOPES = {ViewKind.TOPICS: "topic", ViewKind.CHANNELS: "channel", ViewKind.NODES: "node"}
"""The part of the scope that a line sets."""
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
"""The method of each key, and its arguments. Textual names the keys."""


class Scope(NamedTuple):
    """The part of the cluster that the view shows; ``""`` is everything."""

    node: str = ""
    topic: str = ""
    channel: str = ""


class Line(NamedTuple):
    """One line. ``key`` is the same in all samples; columns read values from ``subject``."""

    key: str
    subject: Any
    is_paused: bool = False
    is_silent: bool = False


# -- lines --------------------------------------------------------------------------------------


def lines_of_view(sample: Sample, kind: ViewKind, scope: Scope) -> list[Line]:
    """Return all lines of a view."""
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
        # A silent nsqd has its last known rows.
        rows = totals(row for node in nodes for row in node.rows)
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
        Line(topic, _sum(topic, queues), any(row.paused for row in queues if not row.channel))
        for topic, queues in topics.items()
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
            subject = _sum(node.address, rows, state=node)
            lines.append(Line(node.address, subject, is_paused, node.is_silent))
    return lines


_SPACES = re.compile(r"\s*(>=|<=|!=|==|=|>|<)\s*")


class LineFilter(NamedTuple):
    """Words in the texts of a line, and conditions. ``problem`` explains an invalid condition."""

    text: str = ""
    words: tuple[str, ...] = ()
    conditions: tuple[Condition, ...] = ()
    problem: str = ""

    def keep(self, lines: Iterable[Line], kind: ViewKind) -> list[Line]:
        """Return the matching lines. Conditions on columns that the view lacks are ignored."""
        columns = VIEWS[kind].columns
        texts = [column for column in columns.values() if column.is_text]
        conditions = [c for c in self.conditions if c.column in columns]

        def has_words(line: Line) -> bool:
            values = (str(column.read(line.subject) or "") for column in texts)
            text = "\n".join([line.key, *values]).casefold()
            return all(word in text for word in self.words)

        return [
            line
            for line in lines
            if (not self.words or has_words(line))
            and all(c.holds(columns[c.column].read(line.subject)) for c in conditions)
        ]


def parse_line_filter(text: str) -> LineFilter:
    """Read a filter: words to find and conditions such as ``depth>1000``.

    An incomplete or invalid condition is left out, and becomes the problem.
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
    """Sort by a column: texts from A to Z, numbers from the largest down, unknown values last."""
    key: Callable[[Any], Any] = str if column.is_text else (lambda value: -value)
    valued = [(column.read(line.subject), line) for line in lines]
    entries = [(key(value), line.key, line) for value, line in valued if value is not None]
    entries.sort(key=lambda entry: entry[:2], reverse=is_reversed)
    unknown = sorted((line for value, line in valued if value is None), key=lambda line: line.key)
    return [*(line for _, _, line in entries), *unknown]


# -- the view -----------------------------------------------------------------------------------


@dataclass(slots=True)
class Look:
    """The user's choices for a kind of lines."""

    columns: Sequence[str]
    sort: str
    filter: LineFilter
    is_reversed: bool = False


class TopView:
    """The state of the list, which begins with these columns, this order and this filter."""

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
        self._history: list[tuple[ViewKind, Scope, str]] = []
        self.problems: list[Problem] = []
        self._critical: dict[tuple[str, str], str] = {}
        self._past = RecentTotals()
        self._trends: dict[tuple[str, str], deque[int]] = {}
        self.widths: dict[str, int] = {}  # of text columns, measured when they are drawn
        self._lines: list[Line] | None = None
        self._last_position = 0

    def _look(self, kind: ViewKind, names: Sequence[str], sort: str) -> Look:
        columns, shown = VIEWS[kind]
        chosen = [name for name in names if name in columns and name != shown[0]]
        names = [shown[0], *chosen] if chosen else shown
        first = FIRST_SORT[kind] if FIRST_SORT[kind] in names else shown[0]
        return Look(names, sort if sort in columns else first, self._filter)

    @property
    def look(self) -> Look:
        return self._looks[self.kind]

    @property
    def columns(self) -> list[Column]:
        """The chosen columns, except those with the same value in all lines."""
        is_list = self.kind is ViewKind.CONSUMERS
        columns, scope = VIEWS[self.kind].columns, self.scope._asdict()
        return [columns[name] for name in self.look.columns if not (is_list and scope.get(name))]

    @property
    def sample_scope(self) -> SampleScope:
        """The data that a sample for this view needs."""
        if self.kind is ViewKind.CONSUMERS:
            return SampleScope(consumers=True, topic=self.scope.topic, channel=self.scope.channel)
        return SampleScope(memory=self.kind is ViewKind.NODES)

    @property
    def path(self) -> str:
        """The scope in words: ``topics > clicks > archive``."""
        if not any(self.scope):
            return self.kind.value
        below = "" if self.kind is ViewKind.CHANNELS else f"[{self.kind.value}]"
        parts = ("nsqd" if self.scope.node else "topics", *self.scope, below)
        return " > ".join(filter(None, parts))

    def lines(self) -> list[Line]:
        """Return the lines that match the filter, sorted."""
        if self._lines is None:
            self.widths, look = {}, self.look
            kept = look.filter.keep(lines_of_view(self.sample, self.kind, self.scope), self.kind)
            column = VIEWS[self.kind].columns[look.sort]
            self._lines = sort_lines(kept, column, is_reversed=look.is_reversed)
        return self._lines

    def trend(self, line: Line) -> tuple[int, ...]:
        """Return the depths of a channel, or of a topic with its channels, at the last samples."""
        if self.scope.node:
            return ()
        topic = line.key if self.kind is ViewKind.TOPICS else self.scope.topic
        channel = line.key if self.kind is ViewKind.CHANNELS else ""
        return tuple(self._trends.get((topic, channel), ()))

    def note(self, line: Line) -> str:
        """Return ``paused``, or the critical problem of a topic or channel."""
        if line.is_paused or self.kind not in (ViewKind.TOPICS, ViewKind.CHANNELS):
            return "paused" * line.is_paused
        is_topic = self.kind is ViewKind.TOPICS
        return self._critical.get((line.key, "") if is_topic else (self.scope.topic, line.key), "")

    def position(self) -> int:
        """Return the number of the selected line, or of the line in its former place."""
        lines = self.lines()
        if not self.selected:
            return 0
        last = max(0, min(self._last_position, len(lines) - 1))
        numbers = (number for number, line in enumerate(lines) if line.key == self.selected)
        self._last_position = next(numbers, last)
        return self._last_position

    def selected_line(self) -> Line | None:
        """Return the selected line, or None if there are no lines."""
        lines = self.lines()
        return lines[self.position()] if lines else None

    def target(self) -> tuple[str, str] | str:
        """Return the topic and channel of the selected line, or why it cannot be changed."""
        scope, line = self.scope, self.selected_line()
        if line is None or self.kind not in (ViewKind.TOPICS, ViewKind.CHANNELS):
            return "select a topic or a channel for this"
        self.selected = line.key  # The change may move its line.
        target = (line.key, "") if self.kind is ViewKind.TOPICS else (scope.topic, line.key)
        if scope.node:
            return f"this changes every nsqd: go to the topics of all (1), not of {scope.node}"
        if not all(is_valid_name(name) for name in filter(None, target)):
            return "this is not a name that NSQ allows: nothing can be done with it"
        return target

    # -- keys and samples -----------------------------------------------------------------------

    def press(self, key: str, character: str | None = None) -> bool:
        """Handle a key; return whether it is a key of the view."""
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
        """Enter keys into the filter until Enter or Escape."""
        self.is_typing = True

    def show(self, sample: Sample) -> None:
        """Show a new sample, unless the view is frozen."""
        if self.is_frozen:
            return
        self.sample, self._lines = sample, None
        self.problems = find_problems(sample, self._past.before(sample))
        self._past.add(sample)
        self._critical = {}
        for problem in self.problems:
            if problem.severity is Severity.CRITICAL:
                for queue in (problem.queue, (problem.topic, "")):
                    self._critical.setdefault(queue, problem.kind)
        depths: Counter[tuple[str, str]] = Counter()
        for row in sample.totals:
            depths[row.topic, ""] += row.depth
            if row.channel:
                depths[row.topic, row.channel] = row.depth
        # Trends of deleted queues are dropped.
        trends, self._trends = self._trends, {}
        for key, depth in depths.items():
            self._trends[key] = trends.get(key) or deque(maxlen=TREND_LENGTH)
            self._trends[key].append(depth)

    def freeze(self) -> None:
        """Freeze the screen, or resume it."""
        self.is_frozen = not self.is_frozen

    def move(self, step: int) -> None:
        """Select the line ``step`` lines down, or up if negative."""
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
        """Select a line, or open the selected one."""
        was_selected = self.selected == self.lines()[number].key
        self.select(number)
        if was_selected:
            self.go_down()

    def sort_by(self, name: str) -> None:
        """Sort by a column, or reverse the order if it is sorted by that column."""
        if name == self.look.sort:
            self.reverse()
        elif name != TREND:
            self.look.sort, self.look.is_reversed, self._lines = name, False, None

    def sort_next(self, step: int) -> None:
        """Sort by the next chosen column, or by the previous one."""
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
        """Show or hide a column; the first one, the name, stays."""
        columns = list(self.look.columns)
        if name in columns[1:]:
            columns.remove(name)
        elif name not in columns:
            columns.append(name)
        self.look.columns = columns

    # -- navigation -----------------------------------------------------------------------------

    def go_to(self, kind: ViewKind) -> None:
        """Show all topics, nsqd or consumers."""
        self._history.clear()
        self._enter(kind, Scope())

    def go_next(self, step: int) -> None:
        """Show the next of topics, nsqd and consumers."""
        here = ORDER.index(self.kind) if self.kind in ORDER else 0
        self.go_to(ORDER[(here + step) % len(ORDER)])

    def go_down(self, kind: ViewKind | None = None) -> None:
        """Open the selected line; an nsqd opens the part of the scope that is on it.

        `ViewKind.NODES` shows the line on each nsqd, unless the scope is one nsqd.
        """
        line = self.selected_line()
        if line is None or self.kind not in SCOPES:
            return
        scope = self.scope._replace(**{SCOPES[self.kind]: line.key})
        if kind and scope.node:
            return
        below = ViewKind.CHANNELS if scope.topic else ViewKind.TOPICS
        self._history.append((self.kind, self.scope, line.key))
        self._enter(kind or (ViewKind.CONSUMERS if scope.channel else below), scope)

    def go_up(self) -> None:
        """Return to the previous view; in the first view, clear the filter."""
        if self._history:
            self._enter(*self._history.pop())
        elif self.kind is not ViewKind.TOPICS:
            self._enter(ViewKind.TOPICS, Scope())
        else:
            self.set_filter("")

    def _enter(self, kind: ViewKind, scope: Scope, selected: str = "") -> None:
        if sum(map(bool, scope)) > sum(map(bool, self.scope)):
            self._looks[kind].filter = self._filter
        self.kind, self.scope, self.selected = kind, scope, selected
        self._lines, self._last_position = None, 0
