"""Logging of a run: the ``nsqtools`` logger to stderr, as text or as JSON lines.

stdout carries data only, so nothing here ever writes there. A library user configures logging
himself; only the command line calls this. What a peer said breaks no line: journald and whoever
reads a log take each line for ours.
"""

from __future__ import annotations

import logging
from datetime import UTC, datetime
from typing import TextIO

from nsqtools.protocol.text import escape_json, escape_line, harmless_traceback

LEVELS = (logging.WARNING, logging.INFO, logging.DEBUG)


def configure_logging(level: int, stderr: TextIO, *, json: bool = False) -> None:
    """Send what the ``nsqtools`` loggers say at ``level`` and above to ``stderr``."""
    handler = logging.StreamHandler(stderr)
    handler.setFormatter(JsonLines() if json else TextLines())
    logger = package_logger()
    logger.handlers = [handler]
    logger.setLevel(level)
    logger.propagate = False


def package_logger() -> logging.Logger:
    """The logger above all loggers of this package."""
    return logging.getLogger("nsqtools")


def level(*, quiet: bool, verbose: int) -> int:
    """The log level for ``-q``, ``-v`` and ``-vv``; without any, warnings."""
    if quiet:
        return logging.ERROR
    return LEVELS[min(verbose, len(LEVELS) - 1)]


class TextLines(logging.Formatter):
    """``2026-11-21T08:00:00.123Z warning: connection to 127.0.0.1:4150 lost``"""

    def format(self, record: logging.LogRecord) -> str:
        message = escape_line(record.getMessage())
        line = f"{_moment(record)} {record.levelname.lower()}: {message}"
        if record.exc_info:
            line += f"\n{harmless_traceback(self.formatException(record.exc_info))}"
        return line


class JsonLines(logging.Formatter):
    """One object a line: ``time``, ``level``, ``logger``, ``message``, and ``exception`` if any."""

    def format(self, record: logging.LogRecord) -> str:
        import json

        fields = {
            "time": _moment(record),
            "level": record.levelname.lower(),
            "logger": record.name,
            "message": record.getMessage(),
        }
        if record.exc_info:
            fields["exception"] = self.formatException(record.exc_info)
        return escape_json(json.dumps(fields, ensure_ascii=False))


def _moment(record: logging.LogRecord) -> str:
    moment = datetime.fromtimestamp(record.created, UTC)
    return moment.isoformat(timespec="milliseconds").replace("+00:00", "Z")
