"""One line on a terminal's stderr that says how far a command is. Elsewhere it does nothing.

    with Progress(runtime) as progress:
        progress.show(lambda: f"{count:,} messages published")

The text is a function, so that a fast loop pays for making it only when it is shown, ten times a
second. A log line that comes in between wipes the progress line first.
"""

from __future__ import annotations

from collections.abc import Callable
from types import TracebackType
from typing import TYPE_CHECKING

from nsqtools.cli.running.runtime import Runtime
from nsqtools.protocol.text import escape_line

if TYPE_CHECKING:
    import logging

INTERVAL_S = 0.1
CLEAR_LINE = "\r\x1b[K"


class Progress:
    """The progress line of one run; a context manager, which wipes the line at the end."""

    def __init__(self, runtime: Runtime):
        self._runtime = runtime
        self._enabled = runtime.stderr_is_tty and not runtime.quiet
        self._next_s = 0.0
        self._shown = False

    @property
    def enabled(self) -> bool:
        """Whether there is a terminal to show anything on."""
        return self._enabled

    def show(self, text: Callable[[], str]) -> None:
        """Put ``text()`` on the line, if it is time to."""
        if not self._enabled or (now_s := self._runtime.monotonic()) < self._next_s:
            return
        self._next_s = now_s + INTERVAL_S
        self._write(CLEAR_LINE + escape_line(text()))
        self._shown = True

    def clear(self) -> None:
        """Wipe the line, before something else is written to the terminal."""
        if self._shown:
            self._write(CLEAR_LINE)
            self._shown = False

    def _write(self, text: str) -> None:
        self._runtime.stderr.write(text)
        self._runtime.stderr.flush()

    def __enter__(self) -> Progress:
        for handler in self._log_handlers():
            handler.addFilter(self._make_room)
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        for handler in self._log_handlers():
            handler.removeFilter(self._make_room)
        self.clear()

    def _log_handlers(self) -> list[logging.Handler]:
        if not self._enabled:
            return []
        from nsqtools.cli.running.logs import package_logger

        return package_logger().handlers

    def _make_room(self, _record: logging.LogRecord) -> bool:
        """A log filter that lets every record pass."""
        self.clear()
        return True
