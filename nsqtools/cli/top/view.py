"""What `nsq top` shows, and what each key changes of it. Pure: samples and keys in, lines out.

The selection is a line's key and not its number, so it stays with its topic when lines change
places. Rates are kept for a while, for the trend of each line.
"""

from __future__ import annotations

import enum
from collections import deque

from nsqtools.cli.top.columns import (
    CHANNELS,
    CLIENTS,
    TOPICS,
    TREND,
    Column,
    Line,
    channel_lines,
    client_lines,
    sort_lines,
    topic_lines,
)
from nsqtools.cluster.sampling import Sample

TREND_LENGTH = 60


class Level(enum.Enum):
    """How deep one looks."""

    TOPICS = 0
    CHANNELS = 1
    CLIENTS = 2


COLUMNS: dict[Level, tuple[Column, ...]] = {
    Level.TOPICS: TOPICS,
    Level.CHANNELS: CHANNELS,
    Level.CLIENTS: CLIENTS,
}


class TopView:
    """The state of the screen."""

    def __init__(self) -> None:
        self.sample: Sample | None = None
        self.error = ""
        self.level = Level.TOPICS
        self.topic = ""
        self.channel = ""
        self.filter = ""
        self.is_typing = False
        self.is_frozen = False
        self.is_done = False
        self.selected = ""
        self._sort = dict.fromkeys(Level, 0)
        self._is_reversed = dict.fromkeys(Level, False)
        self._trends: dict[tuple[str, str], deque[float]] = {}

    # -- what is shown --------------------------------------------------------------------------

    @property
    def columns(self) -> tuple[Column, ...]:
        return COLUMNS[self.level]

    @property
    def sort_column(self) -> int:
        return self._sort[self.level]

    @property
    def is_reversed(self) -> bool:
        return self._is_reversed[self.level]

    @property
    def path(self) -> str:
        """Where one is: ``topics > clicks > archive``."""
        return " > ".join(["topics", *filter(None, (self.topic, self.channel))])

    def lines(self) -> list[Line]:
        """The lines of this level that the filter lets through, sorted."""
        if self.sample is None:
            return []
        if self.level is Level.TOPICS:
            lines = topic_lines(self.sample.totals)
        elif self.level is Level.CHANNELS:
            lines = channel_lines(self.sample.totals, self.topic)
        else:
            lines = client_lines(self.sample, self.topic, self.channel)
        kept = [line for line in lines if self.filter in str(line.cells[0])]
        return sort_lines(kept, self.sort_column, is_reversed=self.is_reversed)

    def trend(self, line: Line) -> tuple[float, ...]:
        """The ingress of a topic or channel at the last looks."""
        key = (line.key, "") if self.level is Level.TOPICS else (self.topic, line.key)
        return tuple(self._trends.get(key, ()))

    def position(self, lines: list[Line]) -> int:
        """The number of the selected line; the first where it is gone."""
        return next((n for n, line in enumerate(lines) if line.key == self.selected), 0)

    # -- what changes it ------------------------------------------------------------------------

    def show(self, sample: Sample) -> None:
        """A new look; rates are remembered even while the screen is frozen.

        Where nobody answers any more, the last look stays, with the reason over it.
        """
        if sample.failures and not sample.reports:
            self.error = str(sample.failures[0].error)
            return
        for row in sample.totals:
            if row.rates is not None:
                trend = self._trends.setdefault(
                    (row.topic, row.channel), deque(maxlen=TREND_LENGTH)
                )
                trend.append(row.rates.ingress)
        self.error = ""
        if not self.is_frozen or self.sample is None:
            self.sample = sample

    def press(self, key: str, page: int) -> None:
        """A key; ``page`` is how many lines the screen has."""
        if self.is_typing:
            self._type(key)
        elif key in ("up", "down", "page up", "page down", "home", "end", "k", "j"):
            self._move(key, page)
        elif key in ("enter", "right"):
            self._go_down()
        elif key in ("escape", "backspace", "left"):
            self._go_up()
        elif key in ("s", "S"):
            sortable = [n for n, column in enumerate(self.columns) if column.name != TREND]
            step = 1 if key == "s" else -1
            self._sort[self.level] = (self.sort_column + step) % len(sortable)
        elif key == "r":
            self._is_reversed[self.level] = not self.is_reversed
        elif key == "/":
            self.is_typing = True
        elif key == " ":
            self.is_frozen = not self.is_frozen
        elif key == "q":
            self.is_done = True

    def _type(self, key: str) -> None:
        if key == "enter":
            self.is_typing = False
        elif key == "escape":
            self.is_typing, self.filter = False, ""
        elif key == "backspace":
            self.filter = self.filter[:-1]
        elif len(key) == 1:
            self.filter += key

    def _move(self, key: str, page: int) -> None:
        lines = self.lines()
        if not lines:
            return
        here = self.position(lines)
        target = {
            "up": here - 1,
            "k": here - 1,
            "down": here + 1,
            "j": here + 1,
            "page up": here - page,
            "page down": here + page,
            "home": 0,
            "end": len(lines) - 1,
        }[key]
        self.selected = lines[min(max(target, 0), len(lines) - 1)].key

    def _go_down(self) -> None:
        lines = self.lines()
        if self.level is Level.CLIENTS or not lines:
            return
        name = lines[self.position(lines)].key
        if self.level is Level.TOPICS:
            self.topic = name
        else:
            self.channel = name
        self.level = Level(self.level.value + 1)
        self.selected, self.filter = "", ""

    def _go_up(self) -> None:
        if self.level is Level.TOPICS:
            self.filter = ""
        elif self.level is Level.CHANNELS:
            self.level, self.selected, self.topic, self.filter = Level.TOPICS, self.topic, "", ""
        else:
            self.level, self.selected, self.channel = Level.CHANNELS, self.channel, ""
            self.filter = ""
