"""What a command knows of the world, and how its run ends: streams, exit statuses, signals, errors.

`Runtime` is built once per run by `Runtime.of_process` and handed down; tests build their own with
buffers and a clock they move. A command that declares ``runtime: Session`` also gets the options
that every command has: how much to log, and in what form.

Nothing is kept back: `Runtime.write` returns when the bytes are with the system, so a message may
be FINished right after it. A reader that went away is `ReaderGone`, which ends the program quietly
with status 141.

A command that runs until it is stopped runs inside `stop_on_signals`. The first INT or TERM asks
it to stop, which drains messages in flight; the second exits immediately. The exit status shows
which signal it was: 130 or 143.

    with stop_on_signals(consumer.stop) as signals:
        for message in consumer: ...
    return signals.status(otherwise=ExitStatus.DONE)

Our own errors bring a category, which picks the status (the parser's usage errors are among them,
see `app`). Everything else is a bug and is reported as one, except what the operating system could
not do. Commands never print errors themselves.
"""

from __future__ import annotations

import logging
import os
import re
import signal
import sys
import threading
import time
import traceback
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field, replace
from enum import Enum, IntEnum
from itertools import takewhile
from types import FrameType
from typing import Annotated, TextIO

from typer import Context

from nsqtools.cli.parsing.binding import From, opt
from nsqtools.cli.parsing.help import terminal_width, wants_color
from nsqtools.errors import ConfigurationError, NsqError, OutputError, is_limit
from nsqtools.protocol.text import escape_json, escape_line, harmless_traceback, utc_text

SIGNALS = (signal.SIGINT, signal.SIGTERM)
SIGNAL_DEBOUNCE_S = (
    0.2  # timeout(1) sends a signal to the process, and at once to its process group as well
)


class ExitStatus(IntEnum):
    """What a script learns from ``$?``; ``meaning`` is its line in the manual.

    Those of errors have the names of the errors' categories.
    """

    meaning: str

    def __new__(cls, value: int, meaning: str) -> ExitStatus:
        status = int.__new__(cls, value)
        status._value_ = value
        status.meaning = meaning
        return status

    DONE = 0, "done"
    FAILED = 1, "failed"
    USAGE = 2, "the command line cannot work"
    NOT_FOUND = 3, "topic, channel or node not found"
    CONNECT = 4, "cannot connect, or no answer in time"
    REFUSED = 5, "refused: TLS, authorization or permission"
    PARTLY_DONE = 6, "partly done"
    LIMIT_NOT_REACHED = (
        7,
        "a limit was not reached, such as `-n 10 --for 1m` that saw four messages",
    )
    INTERRUPTED = 130, "interrupted (SIGINT), after draining; a second signal exits at once"
    READER_GONE = 141, "the reader of the output went away"
    TERMINATED = 143, "terminated (SIGTERM), after draining; a second signal exits at once"


# What commands import that is not in the base installation, and which extra brings it.
EXTRA_OF = {"deltalake": "delta", "pyarrow": "parquet", "pycurl": "http", "textual": "top"}
EXTRA_OF |= dict.fromkeys(("ddsketch", "httptools"), "server")
EXTRA_OF |= dict.fromkeys(("jinja2", "starlette"), "web")
EXTRA_OF |= dict.fromkeys(("cryptography", "jwt", "re2"), "authd")

# our errors name the address in their message
ADDRESS = re.compile(r"https?://[^\s()'\",]+|\[[0-9a-fA-F:.]+\]:\d+|[\w.-]+:\d{1,5}\b")

DEFAULT_ADDRESS = re.compile(r"cannot connect to (https?://)?127\.0\.0\.1:415[01]\b")
NOTHING_RUNS = (
    "Is an nsqd running? nsq demo shows everything without one, nsq nsqd runs one here, and "
    "NSQ_NSQD_TCP_ADDRESS or NSQ_LOOKUPD_HTTP_ADDRESS name one elsewhere."
)

# -- data ---------------------------------------------------------------------------------------


class ReaderGone(OutputError, BrokenPipeError):
    """The program that read our output closed it; what was not written is not handled."""


def write_whole(descriptor: int, data: bytes, name: str = "stdout") -> None:
    """Write all of ``data``, without a buffer; it is with the system when this returns.

    Raises `ReaderGone` when the reader closed its end, else `OutputError`.
    """
    rest = memoryview(data)
    while rest:
        try:
            rest = rest[os.write(descriptor, rest) :]
        except BlockingIOError:  # another program made the pipe or terminal that we share so
            from select import select

            select([], [descriptor], [])
        except BrokenPipeError as error:
            raise ReaderGone(f"{name} was closed by its reader") from error
        except OSError as error:
            raise OutputError(f"cannot write to {name} ({error.strerror})") from error


# -- signals ------------------------------------------------------------------------------------


class StopSignals:
    """The signals that arrived; ``received`` is the first one's number, or None.

    That one is what ``begin`` gets, in the handler.
    """

    def __init__(self, begin: Callable[[int], object], at_once: Callable[[], object] | None = None):
        self._begin = begin
        self._at_once = at_once
        self._received_at = 0.0
        self.received: int | None = None

    def status(self, *, otherwise: int = 0) -> int:
        """128 and the number of the signal that stopped the command, else ``otherwise``."""
        return otherwise if self.received is None else 128 + self.received

    def handle(self, number: int, _frame: FrameType | None) -> None:
        """The signal handler."""
        if self.received is not None:
            if time.monotonic() - self._received_at < SIGNAL_DEBOUNCE_S:  # it is the same one
                return
            if self._at_once is not None:
                self._at_once()
            os._exit(128 + number)
        self._received_at, self.received = time.monotonic(), number
        self._begin(number)


@contextmanager
def stop_on_signals(
    stop: Callable[[], object],
    *,
    at_once: Callable[[], object] | None = None,
    also: Iterable[signal.Signals] = (),
) -> Iterator[StopSignals]:
    """Inside, the first INT or TERM calls ``stop`` (on another thread), the second exits at once.

    ``at_once`` is called before that exit, in the handler; ``also`` are more signals. Used on the
    main thread; the previous handlers are restored at the end.
    """

    def begin(_: int) -> None:
        # on a thread of its own, for the code that was interrupted may hold the lock that `stop`
        # takes: called from here, it would wait for itself
        threading.Thread(target=stop, name="stop", daemon=True).start()

    signals = StopSignals(begin, at_once)
    with signal_handlers((*SIGNALS, *also), signals.handle):
        yield signals


@contextmanager
def signal_handlers(
    numbers: Iterable[signal.Signals], handle: Callable[[int, FrameType | None], object]
) -> Iterator[None]:
    """Inside, ``handle`` gets these signals."""
    before = {number: signal.signal(number, handle) for number in numbers}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def _leave(number: int) -> None:
    raise SystemExit(128 + number)


@contextmanager
def exit_on_signals(leave: Callable[[int], object] = _leave) -> Iterator[None]:
    """Inside, the first INT, TERM or HUP leaves by ``SystemExit``, so that all is cleaned up on the
    way; the second exits at once. HUP is ignored still where nohup had it so. ``leave`` gets the
    number of the first, in the handler, and need not raise."""
    is_ignored = signal.getsignal(signal.SIGHUP) is signal.SIG_IGN
    with signal_handlers(
        SIGNALS if is_ignored else (*SIGNALS, signal.SIGHUP), StopSignals(leave).handle
    ):
        yield


@contextmanager
def background_thread(
    name: str, work: Callable[[threading.Event], object], wait_s: float | None = None
) -> Iterator[None]:
    """Inside, ``work`` goes on in a thread, until the event that it gets is set.

    At the end that thread is waited for, but for ``wait_s`` at most.
    """
    ended = threading.Event()
    thread = threading.Thread(target=work, args=(ended,), name=name, daemon=True)
    thread.start()
    try:
        yield
    finally:
        ended.set()
        thread.join(wait_s)


# -- errors -------------------------------------------------------------------------------------


def report_error(
    error: Exception,
    stderr: TextIO,
    *,
    debug: bool = False,
    json: bool = False,
    status: int | None = None,
) -> int:
    """Write the line that says what is wrong, and the hint if there is one; return the status.

    With ``json`` that is an `error_document` on one line. ``debug`` adds the traceback. ``status``
    takes the place of that of the error.
    """
    if status is None:
        status = status_of(error)
    text = f"{harmless_traceback(''.join(traceback.format_exception(error)))}\n" if debug else ""
    message, hint = explain(error)
    if json:
        from json import dumps

        text += escape_json(dumps({**error_document(error), "status": status})) + "\n"
    else:
        text += f"nsq: error: {_one_line(message)}\n"
        text += f"hint: {_one_line(hint)}\n" if hint else ""
    write_stderr(stderr, text)
    return status


def write_stderr(stderr: TextIO, text: str) -> None:
    """That stderr takes nothing (a full disk, a terminal that is gone) ends no work, and changes no
    status."""
    with suppress(OSError):
        stderr.write(text)
        stderr.flush()


def status_of(error: Exception | None) -> ExitStatus:
    """The exit status of ``error``; FAILED where the reason is not known."""
    if isinstance(error, NsqError):
        return ExitStatus[error.category.upper()]
    return ExitStatus.FAILED


def status_of_work(
    error: Exception | None = None, *, is_whole: bool, is_anything_done: bool
) -> ExitStatus:
    """The exit status of work that may have ended in part; the rule of status 6.

    0 when everything was done, 6 when something was and something was not, and the status of the
    error when nothing was done at all. Damage that was skipped is work that was done in part.
    """
    if is_whole:
        return ExitStatus.DONE
    return ExitStatus.PARTLY_DONE if is_anything_done else status_of(error)


OUR_BUG = "This is a bug: run it again with --debug (or NSQ_DEBUG=1) and report what it prints."


def explain(error: Exception) -> tuple[str, str]:
    """What to say about ``error``, and what to advise."""
    if isinstance(error, NsqError):
        message = str(error)
        # where nothing answers at the address of nsqd by default, most likely nothing runs
        is_nothing_there = error.category == "connect" and DEFAULT_ADDRESS.search(message)
        return message, NOTHING_RUNS if is_nothing_there else error.hint
    if isinstance(error, ModuleNotFoundError) and (extra := EXTRA_OF.get(error.name or "")):
        return (
            f"the package {error.name} is not installed, which this command needs",
            f"Install it with: pip install 'nsqtools[{extra}]'",
        )
    if isinstance(error, OSError):  # the operating system's: a full disk under stdout, say
        # nothing else is missing and has no name
        nameless = "working directory" if isinstance(error, FileNotFoundError) else ""
        place = f": {error.filename or nameless}".removesuffix(": ")
        return f"{error.strerror or error}{place}", ""
    if is_limit(error):
        return str(error) or "out of memory", ""
    return f"unexpected {type(error).__name__}: {error}", OUR_BUG


def error_document(error: Exception) -> dict[str, str | int | None]:
    """The error as ``--json`` has it: the schema ``error``."""
    message, hint = explain(error)
    address = ADDRESS.search(message) if isinstance(error, NsqError) else None
    own = "bug" if hint == OUR_BUG else "system"
    return {
        "code": error.category if isinstance(error, NsqError) else own,
        "message": message,
        "hint": hint or None,
        "address": address.group() if address else None,
        "status": int(status_of(error)),
    }


def _one_line(text: str) -> str:
    """Messages may quote what a server or a file said: none of it reaches the terminal raw."""
    return escape_line(" ".join(text.splitlines()))


PANEL = "Logging"


class Color(Enum):
    """When stdout is colored; auto is on a terminal, as NO_COLOR and FORCE_COLOR allow."""

    auto = "auto"
    always = "always"
    never = "never"


@dataclass(frozen=True)
class Runtime:
    """Streams and clock of one run: data goes to ``stdout``, and whatever is said about the run to
    ``stderr``."""

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
    def has_color(self) -> bool:
        """Whether stdout may be colored."""
        if self.color is not Color.auto:
            return self.color is Color.always
        return wants_color(self.environ, is_tty=self.stdout_is_tty)

    @property
    def width(self) -> int:
        """Columns of stdout; 100 if it is not a terminal."""
        return terminal_width(self.stdout)

    def write(self, data: bytes) -> None:
        """Write data to stdout, as `write_whole` does."""
        write_whole(self.stdout.fileno(), data)

    def info(self, line: str) -> None:
        """Say something about the run on stderr, unless ``--quiet``."""
        if not self.quiet:
            self.print_error(line)

    def print_error(self, line: str) -> None:
        """Say something on stderr even with ``--quiet``: a failure, or part of a question."""
        write_stderr(self.stderr, f"{escape_line(line)}\n")

    def report(self, error: Exception) -> None:
        """Report an error that does not end the run, in the form of the one that would."""
        report_error(error, self.stderr, json=self.is_json)

    def report_failure(self, error: Exception, line: str = "") -> None:
        """Say what is wrong, which ``--quiet`` does not hide: an error as JSON, or a line."""
        if self.is_json:
            self.report(error)
        else:
            self.print_error(f"nsq: {line or error}")

    def require_terminal(self) -> None:
        """Raise `ConfigurationError` where no user can be asked."""
        if not (self.stdin.isatty() and self.stderr_is_tty):
            raise ConfigurationError(
                "this cannot be undone, and there is no terminal to ask on",
                hint="Give --yes to go on, or --dry-run to see what would be done.",
            )

    def confirm(self, plan: Iterable[str], question: str, *, yes: bool) -> bool:
        """Show a plan, and with ``yes`` carry it out, else ask first; whatever is not yes is no.

        Raises `ConfigurationError` where no user can be asked.
        """
        for line in plan:
            (self.info if yes else self.print_error)(line)
        if yes:
            return True
        self.require_terminal()
        write_stderr(self.stderr, f"{escape_line(question)} [y/N] ")
        if self.stdin.readline().strip().lower() in ("y", "yes"):
            return True
        self.info("nsq: nothing was changed")
        return False


def before_dashes(arguments: Sequence[str]) -> list[str]:
    """The words before ``--``: what follows is another program's."""
    return list(takewhile(lambda argument: argument != "--", arguments))


def asks_for_json(arguments: Sequence[str]) -> bool:
    """Whether a command line asks for JSON, be it one that cannot be parsed."""
    return "--json" in with_json(before_dashes(arguments))


def with_json(own: Sequence[str]) -> list[str]:
    """Write --json for ``-o json`` and ``-o jsonl``."""
    text = "\0".join(["", *own, ""])
    text = re.sub("\0(-o\0?|--output[\0=])jsonl?(?=\0)", "\0--json", text)
    return text.split("\0")[1:-1]


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
    level = logging.ERROR if quiet else LEVELS[2 if debug else min(verbose, 2)]
    configure_logging(level, runtime.stderr, json=log_format is LogFormat.json)
    return runtime


Session = Annotated[Runtime, From(session)]


LOGGER = logging.getLogger("nsqtools")  # above all loggers of this package
LEVELS = (logging.WARNING, logging.INFO, logging.DEBUG)
"""By the number of ``-v``."""


def configure_logging(level: int, stderr: TextIO, *, json: bool = False) -> None:
    """Send what the ``nsqtools`` loggers say at ``level`` and above to ``stderr``."""
    handler = logging.StreamHandler(stderr)
    handler.setFormatter(JsonLines() if json else TextLines())
    LOGGER.handlers = [handler]
    LOGGER.setLevel(level)
    LOGGER.propagate = False


class TextLines(logging.Formatter):
    """``2026-11-21T08:00:00.123Z warning: connection to 127.0.0.1:4150 lost``"""

    def format(self, record: logging.LogRecord) -> str:
        message = escape_line(record.getMessage())
        line = f"{utc_text(record.created)} {record.levelname.lower()}: {message}"
        if record.exc_info:
            line += f"\n{harmless_traceback(self.formatException(record.exc_info))}"
        return line


class JsonLines(logging.Formatter):
    """One object a line: ``time``, ``level``, ``logger``, ``message``, and ``exception`` if any."""

    def format(self, record: logging.LogRecord) -> str:
        import json

        fields = {
            "time": utc_text(record.created),
            "level": record.levelname.lower(),
            "logger": record.name,
            "message": record.getMessage(),
        }
        if record.exc_info:
            fields["exception"] = self.formatException(record.exc_info)
        return escape_json(json.dumps(fields, ensure_ascii=False))
