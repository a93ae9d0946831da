"""Log lines in nsqd's format, ``[nsqd] 2026/11/21 03:45:10.909120 INFO: text``, and the version.

Programs parse these lines (``TCP: listening on ...``), so the format is part of the interface. An
embedded daemon writes no lines without a stream.
"""

from __future__ import annotations

import platform
from contextlib import suppress
from datetime import datetime
from functools import partialmethod
from typing import TextIO

from nsqtools.protocol.text import escape_line

LEVELS = ("debug", "info", "warn", "error", "fatal")
_WORDS = ("DEBUG", "INFO", "WARNING", "ERROR", "FATAL")


class DaemonLog:
    """Writes the lines of one daemon to ``stream``, if any. ``level`` may change at any time."""

    def __init__(self, stream: TextIO | None, prefix: str, level: str = "info") -> None:
        self._stream = stream
        self._prefix = prefix
        self.level = level

    def _write(self, level: int, text: str) -> None:
        if self._stream is None or level < LEVELS.index(self.level):
            return
        stamp = datetime.now().strftime("%Y/%m/%d %H:%M:%S.%f")
        # A full disk, or a pipe without a reader, must not stop the daemon.
        with suppress(OSError, ValueError):
            self._stream.write(f"{self._prefix}{stamp} {_WORDS[level]}: {escape_line(text)}\n")
            self._stream.flush()

    info = partialmethod(_write, 1)
    warn = partialmethod(_write, 2)
    error = partialmethod(_write, 3)
    fatal = partialmethod(_write, 4)


# The version of nsqd with the same behavior. nsqadmin compares it as a semantic version.
NSQ_VERSION = "1.3.0"


def version_line(program: str) -> str:
    """Return the line of ``--version``, the log and /stats, in nsqd's format."""
    return f"{program} v{NSQ_VERSION} (built w/python{platform.python_version()})"
