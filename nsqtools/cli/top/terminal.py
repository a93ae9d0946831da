"""The terminal as a screen of its own: entered, drawn on, left as it was.

Only lines that changed are written, in one write a frame. Everything goes to the file descriptor at
once, so that `leave` may be called from a signal handler.
"""

from __future__ import annotations

import os
import termios
import tty
from types import TracebackType
from typing import Self

from nsqtools.cli.render.output import ByteWriter
from nsqtools.cli.top.screen import Row
from nsqtools.errors import OutputError

ENTER = "\x1b[?1049h\x1b[?25l\x1b[?7l\x1b[2J"  # alternate screen, no cursor, no wrapping, cleared
LEAVE = "\x1b[0m\x1b[?7h\x1b[?25h\x1b[?1049l"
MOUSE_ON, MOUSE_OFF = "\x1b[?1000h\x1b[?1006h", "\x1b[?1006l\x1b[?1000l"

STYLES = {"bold": "1", "dim": "2", "reverse": "7", "red": "31", "yellow": "33"}
COLOURS = ("red", "yellow")


class Terminal:
    """A context manager; inside, the screen is ours, and keys come one by one and unseen."""

    def __init__(self, stdin: int, stdout: int, *, colour: bool) -> None:
        self._stdin = stdin
        self._stdout = stdout
        self._colour = colour
        self._write = ByteWriter(stdout).write
        self._before = termios.tcgetattr(stdin)
        self._rows: list[Row] = []
        self._is_entered = False
        self.has_mouse = True

    def __enter__(self) -> Self:
        self.enter()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        value: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self.leave()

    @property
    def size(self) -> tuple[int, int]:
        """Columns and lines; 80 and 24 where the terminal does not know."""
        columns, lines = os.get_terminal_size(self._stdout)
        return columns or 80, lines or 24

    def enter(self) -> None:
        """Take the terminal. Signals of keys (^C, ^Z) work as ever."""
        self._is_entered = True
        tty.setcbreak(self._stdin, termios.TCSANOW)
        self._send(ENTER + (MOUSE_ON if self.has_mouse else ""))
        self.forget()

    def leave(self) -> None:
        """Give the terminal back as it was; more than once does no harm."""
        if not self._is_entered:
            return
        self._is_entered = False
        try:
            self._send(MOUSE_OFF + LEAVE)
            termios.tcsetattr(self._stdin, termios.TCSADRAIN, self._before)
        except (OSError, OutputError, termios.error):
            pass  # the terminal is gone

    def switch_mouse(self) -> None:
        """Leave the mouse to the terminal, or take it."""
        self.has_mouse = not self.has_mouse
        self._send(MOUSE_ON if self.has_mouse else MOUSE_OFF)

    def forget(self) -> None:
        """Draw everything the next time: the window has another size, or was ours no more."""
        self._rows = []

    def draw(self, rows: list[Row]) -> None:
        """Put a screen of lines on the terminal."""
        known: list[Row | None] = [*self._rows, *[None] * (len(rows) - len(self._rows))]
        changed = [
            f"\x1b[{number};1H{self._styled(row)}"
            for number, (row, before) in enumerate(zip(rows, known, strict=False), 1)
            if row != before
        ]
        self._rows = rows
        if changed:
            self._send("".join(changed))

    def _styled(self, row: Row) -> str:
        styles = [name for name in row.style.split() if self._colour or name not in COLOURS]
        codes = ";".join(STYLES[name] for name in styles)
        return f"\x1b[{codes}m{row.text}\x1b[0m" if codes else row.text

    def _send(self, text: str) -> None:
        self._write(text.encode("utf-8", "replace"))
