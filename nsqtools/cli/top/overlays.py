"""What can lie over the list: help, the choice of columns, a plan to confirm, messages. Pure.

Each has a title, lines, and a hint with its keys. `press` returns what came of a key: `Outcome`.
Text of the cluster is escaped where it becomes a line.
"""

from __future__ import annotations

import enum
import textwrap
from collections import deque
from collections.abc import Iterable, Sequence

from nsqtools.cli.top.keyboard import Click, Key
from nsqtools.protocol.text import escape_line

MOST_MESSAGE_LINES = 2000


class Outcome(enum.Enum):
    """What a key did to an overlay."""

    STAY = "stay"
    CLOSE = "close"
    AGREE = "agree"


class Page:
    """Lines to read and to scroll through."""

    hint = "↑↓ scroll  Esc back"

    def __init__(self, title: str, lines: Iterable[str] = ()) -> None:
        self.title = escape_line(title)
        self._lines: Sequence[str] = [escape_line(line) for line in lines]
        self._first = 0

    def body(self, width: int, height: int) -> list[str]:
        """The lines that are on a screen of this size."""
        lines = [part for line in self._lines for part in self._parts(line, width)]
        self._first = max(0, min(self._first, len(lines) - height))
        return lines[self._first : self._first + height]

    def _parts(self, line: str, width: int) -> list[str]:
        """A line, folded where it is too long."""
        if len(line) <= width:
            return [line]
        return textwrap.wrap(line, width, subsequent_indent="    ", drop_whitespace=False)

    @property
    def marked(self) -> int | None:
        """The number of the line on the screen that stands out."""
        return None

    def press(self, key: Key, page: int) -> Outcome:
        """A key; ``page`` is how many lines the screen has."""
        if key in ("escape", "q", "left", "backspace", "enter", "?"):
            return Outcome.CLOSE
        self._scroll(key, page)
        return Outcome.STAY

    def _scroll(self, key: Key, page: int) -> None:
        steps = {"up": -1, "k": -1, "down": 1, "j": 1, "page up": -page, "page down": page}
        steps |= {"wheel up": -3, "wheel down": 3, "home": -len(self._lines)}
        steps["end"] = len(self._lines)
        self._first = max(0, self._first + (0 if isinstance(key, Click) else steps.get(key, 0)))


class ColumnChooser(Page):
    """The columns of a view, each shown or not; the first one, the name, is always."""

    hint = "↑↓ select  space show or hide  Enter done"

    def __init__(self, names: Sequence[str], shown: Iterable[str]) -> None:
        super().__init__("columns")
        self._names = names[1:]
        self.shown = set(shown)
        self._here = 0

    def body(self, width: int, height: int) -> list[str]:
        marks = ("x" if name in self.shown else " " for name in self._names)
        self._lines = [f"[{mark}] {name}" for mark, name in zip(marks, self._names, strict=True)]
        self._first = max(min(self._first, self._here), self._here - height + 1)
        return super().body(width, height)

    @property
    def marked(self) -> int | None:
        return self._here - self._first

    def press(self, key: Key, page: int) -> Outcome:
        if key in ("escape", "enter", "q", "c"):
            return Outcome.CLOSE
        if key == " ":
            self.shown ^= {self._names[self._here]}
        steps = {"up": -1, "k": -1, "down": 1, "j": 1}
        step = 0 if isinstance(key, Click) else steps.get(key, 0)
        self._here = min(max(self._here + step, 0), len(self._names) - 1)
        return Outcome.STAY


class Confirmation(Page):
    """A plan, and the question whether to carry it out.

    What destroys is agreed to by typing ``word``; what does not, by y.
    """

    def __init__(self, title: str, lines: Iterable[str], word: str) -> None:
        super().__init__(title, lines)
        self._word = word
        self._typed = ""

    @property
    def hint(self) -> str:  # type: ignore[override]
        if not self._word:
            return "y go on  Esc do nothing"
        return f"type {self._word} and Enter to go on, Esc to do nothing: {self._typed}_"

    def press(self, key: Key, page: int) -> Outcome:
        if key == "escape":
            return Outcome.CLOSE
        if not self._word:
            if key in ("y", "Y"):
                return Outcome.AGREE
            if key in ("n", "N", "q", "enter"):
                return Outcome.CLOSE
        elif key == "enter":
            return Outcome.AGREE if self._typed == self._word else Outcome.STAY
        elif key == "backspace":
            self._typed = self._typed[:-1]
        elif isinstance(key, str) and len(key) == 1:
            self._typed += key
            return Outcome.STAY
        self._scroll(key, page)
        return Outcome.STAY


class MessagePane(Page):
    """Messages as they come. It follows them until one scrolls up or freezes it.

    What comes while it is frozen is counted, and not shown.
    """

    def __init__(self, title: str, *, folds: bool) -> None:
        super().__init__(title)
        self._folds = folds
        self._lines: deque[str] = deque(maxlen=MOST_MESSAGE_LINES)
        self.is_frozen = False
        self._follows = True
        self._missed = 0
        self.state = ""

    @property
    def hint(self) -> str:  # type: ignore[override]
        frozen = "[frozen]  " if self.is_frozen else ""
        missed = f"{self._missed} not shown  " if self._missed else ""
        state = f"{self.state}  " if self.state else ""
        return f"{frozen}{missed}{state}↑↓ scroll  space freeze  Esc back"

    def add(self, lines: Sequence[str]) -> None:
        """Messages, each in a line or more, escaped."""
        if self.is_frozen:
            self._missed += len(lines)
        else:
            dropped = max(0, len(self._lines) + len(lines) - MOST_MESSAGE_LINES)
            self._lines.extend(lines)
            self._first = max(0, self._first - dropped)

    def body(self, width: int, height: int) -> list[str]:
        if self._follows:
            self._first = MOST_MESSAGE_LINES * width
        return super().body(width, height)

    def _parts(self, line: str, width: int) -> list[str]:
        return super()._parts(line, width) if self._folds else [line]

    def press(self, key: Key, page: int) -> Outcome:
        if key in ("escape", "q", "left"):
            return Outcome.CLOSE
        if key == " ":
            self.is_frozen = not self.is_frozen
            self._missed = 0
        elif key in ("end", "enter"):
            self._follows = True
        else:
            if key in ("up", "k", "page up", "home", "wheel up"):
                self._follows = False
            self._scroll(key, page)
        return Outcome.STAY
