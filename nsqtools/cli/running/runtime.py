"""What a command knows of the world: streams, terminal, environment, clock.

Built once per run by `Runtime.of_process` and handed down; tests build their own with buffers and
a clock they move. A command that declares ``runtime: Session`` also gets the options that every
command has: how much to log, and in what form.
"""

from __future__ import annotations

import logging
import os
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from datetime import UTC, datetime
from enum import Enum
from typing import Annotated, TextIO

from typer import Context

from nsqtools.cli.parsing.binding import From, opt
from nsqtools.cli.parsing.help import terminal_width, wants_colour
from nsqtools.errors import ConfigurationError, NsqError
from nsqtools.protocol.text import escape_json, escape_line, harmless_traceback

PANEL = "Logging"


class Color(Enum):
    """When stdout is colored; auto is on a terminal, as NO_COLOR and FORCE_COLOR allow."""

    auto = "auto"
    always = "always"
    never = "never"


@dataclass(frozen=True)
class Runtime:
    """Streams and clock of one run: data goes to ``stdout``, by way of `output`, and whatever is
    said about the run to ``stderr``."""

    stdout: TextIO
    stderr: TextIO
    environ: Mapping[str, str] = field(default_factory=dict)
    monotonic: Callable[[], float] = time.monotonic
    """Seconds, for durations."""
    stdin: TextIO = field(default_factory=lambda: sys.stdin)
    quiet: bool = False
    """Only errors are printed: no progress, no summaries."""
    arguments: Sequence[str] = ()
    """The command line."""
    color: Color = Color.auto
    is_json: bool = False
    """Errors are lines of JSON: a program reads them."""

    @classmethod
    def of_process(cls, arguments: Sequence[str] = ()) -> Runtime:
        """The runtime of this process, which runs a command line.

        The auth secret leaves the process's environment: programs that a command starts do not
        need it, but for Spark's where a job talks to NSQ, which gets it back.
        """
        environ = dict(os.environ)
        os.environ.pop("NSQ_AUTH_SECRET", None)
        is_json = asks_for_json(arguments)
        return cls(sys.stdout, sys.stderr, environ, arguments=arguments, is_json=is_json)

    @property
    def stdout_is_tty(self) -> bool:
        return self.stdout.isatty()

    @property
    def stderr_is_tty(self) -> bool:
        return self.stderr.isatty()

    @property
    def colour(self) -> bool:
        """Whether stdout may be coloured."""
        if self.color is not Color.auto:
            return self.color is Color.always
        return wants_colour(self.environ, is_tty=self.stdout_is_tty)

    @property
    def width(self) -> int:
        """Columns of stdout; 100 if it is not a terminal."""
        return terminal_width(self.stdout)

    def tell(self, line: str) -> None:
        """Say something about the run on stderr, unless ``--quiet``."""
        if not self.quiet:
            self.insist(line)

    def insist(self, line: str) -> None:
        """Say something on stderr even with ``--quiet``: a failure, or part of a question."""
        self.stderr.write(f"{escape_line(line)}\n")
        self.stderr.flush()

    def report(self, error: Exception) -> None:
        """Report an error that does not end the run, in the form of the one that would."""
        from nsqtools.cli.running.ends import report_error

        report_error(error, self.stderr, json=self.is_json)

    def complain(self, line: str) -> None:
        """Say what is wrong with the cluster, which ``--quiet`` does not hide."""
        if self.is_json:
            self.report(NsqError(line))
        else:
            self.insist(f"nsq: {line}")

    def require_terminal(self) -> None:
        """Raise `ConfigurationError` where no user can be asked."""
        if not (self.stdin.isatty() and self.stderr_is_tty):
            raise ConfigurationError(
                "this cannot be undone, and there is no terminal to ask on",
                hint="Give --yes to go on, or --dry-run to see what would be done.",
            )

    def confirm(self, question: str) -> bool:
        """Ask on the terminal before something that cannot be undone; whatever is not yes is no.

        Raises `ConfigurationError` where no user can be asked.
        """
        self.require_terminal()
        self.stderr.write(f"{escape_line(question)} [y/N] ")
        self.stderr.flush()
        return self.stdin.readline().strip().lower() in ("y", "yes")


def asks_for_json(arguments: Sequence[str]) -> bool:
    """Whether a command line asks for JSON, be it one that cannot be parsed."""
    pairs = zip(("", *arguments), arguments, strict=False)
    return any(
        argument == "--json"
        or argument.startswith(("--output=json", "-ojson"))
        or (option in ("--output", "-o") and argument in ("json", "jsonl"))
        for option, argument in pairs
    )


class LogFormat(Enum):
    """How a log line looks."""

    text = "text"
    json = "json"


def session(
    context: Context,
    quiet: bool = opt("-q", "Print errors only.", PANEL),
    verbose: int = opt("-v", "Log more; -vv logs everything.", PANEL, 0, count=True),
    log_format: LogFormat = opt("", "Format of log lines on stderr.", PANEL, LogFormat.text),
    color: Color = opt(
        "", "Color the output; auto: on a terminal, unless NO_COLOR is set.", PANEL, Color.auto
    ),
    debug: bool = opt("", "Log everything, and show tracebacks of errors.", PANEL),
) -> Runtime:
    """The run's `Runtime`, with logging set up as the options say."""
    runtime: Runtime = replace(context.obj, quiet=quiet, color=color)
    configure_logging(
        level(quiet=quiet, verbose=2 if debug else verbose),
        runtime.stderr,
        json=log_format is LogFormat.json,
    )
    return runtime


Session = Annotated[Runtime, From(session)]


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
