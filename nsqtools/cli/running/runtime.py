"""Streams, signals, errors and exit statuses of a command.

`Runtime` is built once per run by `Runtime.of_process` and passed down. Tests build their own, with
buffers and a clock. A command that declares ``runtime: Session`` also gets the options of every
command: log level, log format, color.

stdout has no buffer: `Runtime.write` returns when the operating system has the bytes, so a message
may be finished right after it. If the reader closed the pipe, `ReaderGone` ends the program
silently with status 141.

A long-running command runs inside `stop_on_signals`. The first INT or TERM asks it to stop, which
drains messages in flight. The second exits immediately. The exit status shows the signal: 130 or
143.

    with stop_on_signals(consumer.stop) as signals:
        for message in consumer: ...
    return signals.status(otherwise=ExitStatus.DONE)

Our own errors have a category that determines the status; usage errors of the parser are converted
to them (see `app`). Errors of the operating system are reported as such. Any other exception is
reported as a bug. Commands never print errors themselves.
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

from nsqtools.cli.parsing.binding import Provided, opt
from nsqtools.cli.parsing.help import terminal_width, wants_color
from nsqtools.cli.registry import OUTPUT_PLACES
from nsqtools.errors import ConfigurationError, NsqError, OutputError, is_limit
from nsqtools.protocol.text import escape_json, escape_line, harmless_traceback, utc_text

SIGNALS = (signal.SIGINT, signal.SIGTERM)
# timeout(1) sends a signal to the process and immediately to its process group, which is one
# request to stop. A user cannot press Ctrl-C twice in this time.
SIGNAL_DEBOUNCE_S = 0.2


class ExitStatus(IntEnum):
    """Exit statuses; ``meaning`` is the line in the manual.

    A status of errors has the name of their category.
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
    INTERRUPTED = 130, "interrupted (SIGINT), after draining; a second signal exits immediately"
    READER_GONE = 141, "the reader of the output closed it"
    TERMINATED = 143, "terminated (SIGTERM), after draining; a second signal exits immediately"


# Modules that are not in the base installation, with the extra that installs them.
EXTRA_OF = {"deltalake": "delta", "pyarrow": "parquet", "textual": "top"}
EXTRA_OF |= dict.fromkeys(("ddsketch", "httptools"), "server")
EXTRA_OF |= dict.fromkeys(("jinja2", "starlette"), "web")
EXTRA_OF |= dict.fromkeys(("cryptography", "jwt"), "authd")
EXTRA_OF |= {"cronsim": "schedule"}
EXTRA_OF |= dict.fromkeys(("jsonschema", "mcp", "mcp_types"), "mcp")

# Our errors contain the address in their message.
ADDRESS = re.compile(r"https?://[^\s()'\",]+|\[[0-9a-fA-F:.]+\]:\d+|[\w.-]+:\d{1,5}\b")

DEFAULT_ADDRESS = re.compile(r"cannot connect to (http://)?127\.0\.0\.1:415[01]\b")
NO_NSQD_HINT = (
    "Is an nsqd running? nsq demo shows everything without one, nsq nsqd runs one here, and "
    "NSQ_NSQD_TCP_ADDRESS or NSQ_LOOKUPD_HTTP_ADDRESS name one elsewhere."
)

# -- output -------------------------------------------------------------------------------------


class ReaderGone(OutputError, BrokenPipeError):
    """The program that read our output closed it. Unwritten messages are not finished."""


def write_whole(descriptor: int, data: bytes, name: str = "stdout") -> None:
    """Write all of ``data`` without a buffer.

    Raises `ReaderGone` if the reader closed its end, else `OutputError`.
    """
    unwritten = memoryview(data)
    while unwritten:
        try:
            unwritten = unwritten[os.write(descriptor, unwritten) :]
        except BlockingIOError:
            # Another program made the shared pipe or terminal non-blocking.
            from select import select

            select([], [descriptor], [])
        except BrokenPipeError as error:
            raise ReaderGone(f"{name} was closed by its reader") from error
        except OSError as error:
            raise OutputError(f"cannot write to {name} ({error.strerror})") from error


# -- signals ------------------------------------------------------------------------------------


class CommandSignals:
    """A signal handler that stops at the first signal, and exits at the second.

    ``received`` is the number of the first signal, None before. ``on_first`` is called with it, and
    ``on_second`` without arguments before the exit, both in the handler.
    """

    def __init__(
        self, on_first: Callable[[int], object], on_second: Callable[[], object] | None = None
    ):
        self._on_first = on_first
        self._on_second = on_second
        self._received_at = 0.0
        self.received: int | None = None

    def status(self, *, otherwise: int = 0) -> int:
        """Return 128 plus the number of the signal that stopped the command, else ``otherwise``."""
        return otherwise if self.received is None else 128 + self.received

    def handle(self, number: int, _frame: FrameType | None) -> None:
        """Handle a signal; the parameters are those of `signal.signal`."""
        if self.received is not None:
            # The same request, sent to the process and to its group.
            if time.monotonic() - self._received_at < SIGNAL_DEBOUNCE_S:
                return
            if self._on_second is not None:
                self._on_second()
            os._exit(128 + number)
        self._received_at, self.received = time.monotonic(), number
        self._on_first(number)


@contextmanager
def stop_on_signals(
    stop: Callable[[], object],
    *,
    on_second: Callable[[], object] | None = None,
    additional: Iterable[signal.Signals] = (),
) -> Iterator[CommandSignals]:
    """Call ``stop`` on another thread at the first INT or TERM, and exit at the second.

    ``on_second`` is called in the handler before that exit. ``additional`` signals act like INT.
    Use it on the main thread. The previous handlers are restored at the end.
    """

    def start_stop(_: int) -> None:
        # The interrupted code may hold a lock that `stop` takes. In the handler `stop` would wait
        # for the code that it interrupts.
        threading.Thread(target=stop, name="stop", daemon=True).start()

    signals = CommandSignals(start_stop, on_second)
    with signal_handlers((*SIGNALS, *additional), signals.handle):
        yield signals


def hangup_signals() -> list[signal.Signals]:
    """Return SIGHUP, the end of a terminal, unless nohup ignores it."""
    is_ignored = signal.getsignal(signal.SIGHUP) is signal.SIG_IGN
    return [] if is_ignored else [signal.SIGHUP]


@contextmanager
def signal_handlers(
    numbers: Iterable[signal.Signals], handle: Callable[[int, FrameType | None], object]
) -> Iterator[None]:
    """Handle these signals with ``handle``; restore the previous handlers at the end."""
    previous = {number: signal.signal(number, handle) for number in numbers}
    try:
        yield
    finally:
        for number, handler in previous.items():
            signal.signal(number, handler)


@contextmanager
def serving(
    runtime: Runtime, stop: Callable[[], object]
) -> Iterator[tuple[Callable[[], None], CommandSignals]]:
    """Call ``stop`` on signals, and report a server to systemd.

    HUP ends a server on a terminal only. What it asks a daemon for is done anyway: the files of a
    server are read when they change. Yields the function that the server has to call every few
    seconds, and the signals.
    """
    from nsqtools.http.service import service

    with (
        service(None, runtime.environ, metrics=tuple, health=lambda: (True, "")) as supervised,
        stop_on_signals(stop) as signals,
    ):
        if not runtime.stdin.isatty():
            signal.signal(signal.SIGHUP, lambda number, frame: None)

        def turn() -> None:
            supervised.ready()
            supervised.alive()

        yield turn, signals
        supervised.stopping()


def _raise_exit(number: int) -> None:
    raise SystemExit(128 + number)


@contextmanager
def exit_on_signals(on_first: Callable[[int], object] = _raise_exit) -> Iterator[None]:
    """Raise ``SystemExit`` at the first INT, TERM or HUP, and exit immediately at the second.

    The exception lets the command clean up. HUP stays ignored under nohup. Another ``on_first`` is
    called in the handler with the number of the first signal, and need not raise.
    """
    with signal_handlers((*SIGNALS, *hangup_signals()), CommandSignals(on_first).handle):
        yield


@contextmanager
def background_thread(
    name: str, work: Callable[[threading.Event], object], wait_s: float | None = None
) -> Iterator[None]:
    """Run ``work`` in a thread. It gets an event that is set at the end of the block.

    The end of the block waits for the thread, at most ``wait_s``.
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
    """Write the error in one line, and its hint if any; return the exit status.

    With ``json`` the line is an `error_document`. ``debug`` adds the traceback. ``status``
    overrides the status of the error.
    """
    if status is None:
        status = exit_status_of(error)
    text = f"{harmless_traceback(''.join(traceback.format_exception(error)))}\n" if debug else ""
    message, hint = message_and_hint(error)
    if json:
        from json import dumps

        text += escape_json(dumps({**error_document(error), "status": status})) + "\n"
    else:
        text += f"nsq: error: {_one_line(message)}\n"
        text += f"hint: {_one_line(hint)}\n" if hint else ""
    write_stderr(stderr, text)
    return status


def write_stderr(stderr: TextIO, text: str) -> None:
    """Write to stderr, ignoring errors: a full disk or a closed terminal must not end the work."""
    with suppress(OSError):
        stderr.write(text)
        stderr.flush()


def exit_status_of(error: Exception | None) -> ExitStatus:
    """Return the exit status of ``error``, FAILED for other exceptions than ours."""
    if isinstance(error, NsqError):
        return ExitStatus[error.category.upper()]
    return ExitStatus.FAILED


def status_of_work(
    error: Exception | None = None, *, is_whole: bool, is_anything_done: bool
) -> ExitStatus:
    """Return the exit status of work that may be partly done; the rule of status 6.

    It is 0 for complete work, 6 for partly done work, and the status of the error if nothing was
    done. Work that skipped damage is partly done.
    """
    if is_whole:
        return ExitStatus.DONE
    return ExitStatus.PARTLY_DONE if is_anything_done else exit_status_of(error)


BUG_HINT = "This is a bug: run it again with --debug (or NSQ_DEBUG=1) and report what it prints."


def message_and_hint(error: Exception) -> tuple[str, str]:
    """Return the message and the hint for an error."""
    if isinstance(error, NsqError):
        message = str(error)
        # If nothing answers at the default address, most likely no nsqd runs.
        is_default = error.category == "connect" and DEFAULT_ADDRESS.search(message)
        return message, NO_NSQD_HINT if is_default else error.hint
    if isinstance(error, ModuleNotFoundError) and (extra := EXTRA_OF.get(error.name or "")):
        return (
            f"the package {error.name} is not installed, which this command needs",
            f"Install it with: pip install 'nsqtools[{extra}]'",
        )
    if isinstance(error, OSError):
        # Only a deleted working directory raises FileNotFoundError without a name.
        default = "working directory" if isinstance(error, FileNotFoundError) else ""
        place = f": {error.filename or default}".removesuffix(": ")
        return f"{error.strerror or error}{place}", ""
    if is_limit(error):
        return str(error) or "out of memory", ""
    return f"unexpected {type(error).__name__}: {error}", BUG_HINT


def error_document(error: Exception) -> dict[str, str | int | None]:
    """Return the error as ``--json`` prints it, by the schema ``error``."""
    message, hint = message_and_hint(error)
    address = ADDRESS.search(message) if isinstance(error, NsqError) else None
    other_code = "bug" if hint == BUG_HINT else "system"
    return {
        "code": error.category if isinstance(error, NsqError) else other_code,
        "message": message,
        "hint": hint or None,
        "address": address.group() if address else None,
        "status": int(exit_status_of(error)),
    }


def _one_line(text: str) -> str:
    """Escape a message, which may quote a server or a file, and join its lines."""
    return escape_line(" ".join(text.splitlines()))


PANEL = "Logging"


class Color(Enum):
    """When stdout is colored. ``auto`` depends on the terminal, NO_COLOR and FORCE_COLOR."""

    auto = "auto"
    always = "always"
    never = "never"


@dataclass(frozen=True)
class Runtime:
    """Streams and clock of one run. Data goes to ``stdout``, messages about the run to ``stderr``.

    ``monotonic`` returns seconds for durations. With ``quiet`` only errors are printed. With
    ``is_json`` errors are lines of JSON. ``arguments`` are the command line. ``json_filters`` has
    the program of ``--jq``, applied to each JSON document that is printed.
    """

    stdout: TextIO
    stderr: TextIO
    environ: Mapping[str, str] = field(default_factory=dict)
    monotonic: Callable[[], float] = time.monotonic
    stdin: TextIO = field(default_factory=lambda: sys.stdin)
    quiet: bool = False
    arguments: Sequence[str] = ()
    color: Color = Color.auto
    is_json: bool = False
    json_filters: list[Callable[[bytes], bytes | None]] = field(default_factory=list)  # one or none

    @classmethod
    def of_process(cls, arguments: Sequence[str] = ()) -> Runtime:
        """Return the runtime of this process.

        The auth secret is removed from the process's environment, because programs that a command
        starts do not need it. Only a Spark job that connects to NSQ gets it back.
        """
        environ = dict(os.environ)
        os.environ.pop("NSQ_AUTH_SECRET", None)
        is_json = asks_for_json(arguments)
        return cls(sys.stdout, sys.stderr, environ, arguments=arguments, is_json=is_json)

    @property
    def json_filter(self) -> Callable[[bytes], bytes | None] | None:
        """The program of ``--jq``, which becomes known after this object was made."""
        return self.json_filters[0] if self.json_filters else None

    @property
    def stdout_is_tty(self) -> bool:
        return self.stdout.isatty()

    @property
    def stderr_is_tty(self) -> bool:
        return self.stderr.isatty()

    @property
    def shows_progress(self) -> bool:
        """Whether a line on stderr can be shown and erased again."""
        return self.stderr_is_tty and not self.quiet and self.environ.get("TERM") != "dumb"

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
        """Write data to stdout. Raises as `write_whole`."""
        write_whole(self.stdout.fileno(), data)

    def info(self, line: str) -> None:
        """Print a line about the run on stderr, unless ``--quiet``."""
        if not self.quiet:
            self.print_error(line)

    def print_error(self, line: str) -> None:
        """Print a line on stderr even with ``--quiet``: a failure, or part of a question."""
        write_stderr(self.stderr, f"{escape_line(line)}\n")

    def report(self, error: Exception) -> None:
        """Report an error that does not end the run, in the format of a final error."""
        report_error(error, self.stderr, json=self.is_json)

    def report_failure(self, error: Exception, line: str = "") -> None:
        """Report a failure even with ``--quiet``: as an error in JSON, or as a line."""
        if self.is_json:
            self.report(error)
        else:
            self.print_error(f"nsq: {line or error}")

    def require_terminal(self) -> None:
        """Raise `ConfigurationError` if no user can be asked."""
        if not (self.stdin.isatty() and self.stderr_is_tty):
            raise ConfigurationError(
                "this cannot be undone, and there is no terminal to ask on",
                hint="Give --yes to continue, or --dry-run to see the plan.",
            )

    def confirm(self, plan: Iterable[str], question: str, *, yes: bool) -> bool:
        """Print a plan and ask whether to carry it out. With ``yes`` do not ask.

        Any answer except yes is a no, after which a command ends with `ExitStatus.FAILED`. Raises
        `ConfigurationError` if no user can be asked.
        """
        for line in plan:
            (self.info if yes else self.print_error)(line)
        if yes:
            return True
        self.require_terminal()
        write_stderr(self.stderr, f"{escape_line(question)} [y/N] ")
        with suppress(UnicodeDecodeError):  # of a terminal with another encoding
            if self.stdin.readline().strip().lower() in ("y", "yes"):
                return True
        self.info("nsq: nothing was changed")
        return False


def before_dashes(arguments: Sequence[str]) -> list[str]:
    """Return the words before ``--``. The words behind it are for another program."""
    return list(takewhile(lambda argument: argument != "--", arguments))


def asks_for_json(arguments: Sequence[str]) -> bool:
    """Return whether a command line, even an invalid one, asks for JSON."""
    words = before_dashes(arguments)
    if " ".join(words[:2]) not in OUTPUT_PLACES:
        words = with_json(words)
    return any(word.partition("=")[0] in ("--json", "--jq") for word in words)


def with_json(words: Sequence[str]) -> list[str]:
    """Replace ``-o json`` and ``-o jsonl`` by ``--json``."""
    text = "\0".join(["", *words, ""])
    text = re.sub("\0(-o\0?|--output[\0=])jsonl?(?=\0)", "\0--json", text)
    return text.split("\0")[1:-1]


class LogFormat(Enum):
    """The format of log lines."""

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
    """Return the `Runtime` of the run, and set up logging by the options."""
    runtime: Runtime = replace(context.obj, quiet=quiet, color=color)
    level = logging.ERROR if quiet else LEVELS[2 if debug else min(verbose, 2)]
    configure_logging(level, runtime.stderr, json=log_format is LogFormat.json)
    return runtime


Session = Annotated[Runtime, Provided(session)]


# The parent of all loggers of this package.
LOGGER = logging.getLogger("nsqtools")
# By the number of ``-v``.
LEVELS = (logging.WARNING, logging.INFO, logging.DEBUG)


def configure_logging(level: int, stderr: TextIO, *, json: bool = False) -> None:
    """Write log records of this package at ``level`` and above to ``stderr``."""
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
