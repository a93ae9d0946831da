"""How a run ends: exit statuses, the signals that stop it, and errors in words.

A command that runs until it is stopped runs inside `stopping`. The first INT or TERM asks it to
stop, which drains what is in flight; the second exits at once. The exit status says which signal it
was: 130 or 143.

    with stopping(consumer.stop) as signals:
        for message in consumer: ...
    return signals.status(otherwise=ExitStatus.DONE)

Our own errors bring a category, which picks the status (the parser's usage errors are among them,
see `app`). Everything else is a bug and is reported as one, except what the operating system could
not do. Commands never print errors themselves.
"""

from __future__ import annotations

import os
import re
import signal
import threading
import traceback
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from enum import IntEnum
from types import FrameType
from typing import TextIO

from nsqtools.errors import NsqError
from nsqtools.protocol.text import escape_json, escape_line, harmless_traceback

SIGNALS = (signal.SIGINT, signal.SIGTERM)


class ExitStatus(IntEnum):
    """What a script learns from ``$?``; ``meaning`` is its line in the manual and README.md."""

    meaning: str

    def __new__(cls, value: int, meaning: str) -> ExitStatus:
        status = int.__new__(cls, value)
        status._value_ = value
        status.meaning = meaning
        return status

    DONE = 0, "done"
    FAILED = 1, "failed, or a threshold of `nsq stat` was exceeded"
    USAGE = 2, "the command line cannot work"
    NOT_FOUND = 3, "topic, channel or node not found"
    UNREACHABLE = 4, "cannot connect, or no answer in time"
    REFUSED = 5, "refused: TLS, authorization or permission"
    PARTLY_DONE = 6, "partly done"
    LIMIT_NOT_REACHED = (
        7,
        "a limit was not reached, such as `-n 10 --for 1m` that saw four messages",
    )
    INTERRUPTED = 130, "interrupted (SIGINT), after draining; a second signal exits at once"
    READER_GONE = 141, "the reader of the output went away"
    TERMINATED = 143, "terminated (SIGTERM), after draining; a second signal exits at once"


# our errors name the address in their message
# What commands import that is not in the base installation, and which extra brings it.
EXTRA_OF = {
    "ddsketch": "server",
    "httptools": "server",
    "jinja2": "web",
    "pycurl": "http",
    "starlette": "web",
    "textual": "top",
    "uvicorn": "web",
}

ADDRESS = re.compile(r"https?://[^\s()'\",]+|\[[0-9a-fA-F:.]+\]:\d+|[\w.-]+:\d{1,5}\b")

DEFAULT_ADDRESSES = ("127.0.0.1:4150", "127.0.0.1:4151")
NOTHING_RUNS = (
    "Is an nsqd running? nsq demo shows everything without one, nsq nsqd runs one here, and "
    "NSQ_NSQD_TCP_ADDRESS or NSQ_LOOKUPD_HTTP_ADDRESS name one elsewhere."
)

STATUS_OF_CATEGORY = {
    "failed": ExitStatus.FAILED,
    "usage": ExitStatus.USAGE,
    "not_found": ExitStatus.NOT_FOUND,
    "connect": ExitStatus.UNREACHABLE,
    "refused": ExitStatus.REFUSED,
}


# -- signals ------------------------------------------------------------------------------------


class StopSignals:
    """The signals that arrived; ``received`` is the first one's number, or None."""

    def __init__(self, stop: Callable[[], object], at_once: Callable[[], object] | None = None):
        self._stop = stop
        self._at_once = at_once
        self.received: int | None = None

    def status(self, *, otherwise: int = 0) -> int:
        """128 and the number of the signal that stopped the command, else ``otherwise``."""
        return otherwise if self.received is None else 128 + self.received

    def handle(self, number: int, _frame: FrameType | None) -> None:
        """The signal handler."""
        if self.received is not None:
            if self._at_once is not None:
                self._at_once()
            os._exit(128 + number)
        self.received = number
        # On a thread of its own, for the code that was interrupted may hold the lock that `stop`
        # takes: called from here, it would wait for itself.
        threading.Thread(target=self._stop, name="stop", daemon=True).start()


@contextmanager
def stopping(
    stop: Callable[[], object],
    *,
    at_once: Callable[[], object] | None = None,
    also: Iterable[signal.Signals] = (),
) -> Iterator[StopSignals]:
    """Inside, the first INT or TERM calls ``stop`` (on another thread), the second exits at once.

    ``at_once`` is called before that exit, in the handler; ``also`` are more signals. Used on the
    main thread; the previous handlers are restored at the end.
    """
    signals = StopSignals(stop, at_once)
    before = {number: signal.signal(number, signals.handle) for number in (*SIGNALS, *also)}
    try:
        yield signals
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


# -- errors -------------------------------------------------------------------------------------


def report_error(
    error: Exception, stderr: TextIO, *, debug: bool = False, json: bool = False
) -> ExitStatus:
    """Write the line that says what is wrong, and the hint if there is one; return the status.

    With ``json`` that is an `error_document` on one line. ``debug`` adds the traceback.
    """
    if debug:
        stderr.write(harmless_traceback("".join(traceback.format_exception(error))) + "\n")
    message, hint = explain(error)
    if json:
        from json import dumps

        stderr.write(escape_json(dumps(error_document(error))) + "\n")
        stderr.flush()
        return status_of(error)
    stderr.write(f"nsq: error: {_one_line(message)}\n")
    if hint:
        stderr.write(f"hint: {_one_line(hint)}\n")
    stderr.flush()
    return status_of(error)


def status_of(error: Exception | None) -> ExitStatus:
    """The exit status of ``error``; FAILED where the reason is not known."""
    if isinstance(error, NsqError):
        return STATUS_OF_CATEGORY[error.category]
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


def explain(error: Exception) -> tuple[str, str]:
    """What to say about ``error``, and what to advise."""
    if isinstance(error, NsqError):
        message = str(error)
        return message, NOTHING_RUNS if _is_about_default(error, message) else error.hint
    if isinstance(error, ModuleNotFoundError) and (extra := EXTRA_OF.get(error.name or "")):
        return (
            f"the package {error.name} is not installed, which this command needs",
            f"Install it with: pip install 'nsqtools[{extra}]'",
        )
    if isinstance(error, OSError):  # the operating system's: a full disk under stdout, say
        place = f": {error.filename}" if error.filename else ""
        return f"{error.strerror or error}{place}", ""
    return (
        f"unexpected {type(error).__name__}: {error}",
        "This is a bug: run it again with --debug (or NSQ_DEBUG=1) and report what it prints.",
    )


def _is_about_default(error: NsqError, message: str) -> bool:
    """Tell whether nothing answers where nsqd is by default, most likely because nothing runs."""
    return (
        error.category == "connect"
        and "cannot connect to " in message
        and any(address in message for address in DEFAULT_ADDRESSES)
    )


def error_document(error: Exception) -> dict[str, str | int | None]:
    """The error as ``--json`` has it: the schema ``error``."""
    message, hint = explain(error)
    address = ADDRESS.search(message) if isinstance(error, NsqError) else None
    return {
        "code": code_of(error),
        "message": message,
        "hint": hint or None,
        "address": address.group() if address else None,
        "status": int(status_of(error)),
    }


def code_of(error: Exception) -> str:
    """The kind of error in a word: our categories, ``system`` and ``bug``."""
    if isinstance(error, NsqError):
        return error.category
    return "system" if isinstance(error, OSError) else "bug"


def _one_line(text: str) -> str:
    """Messages may quote what a server or a file said: none of it reaches the terminal raw."""
    return escape_line(" ".join(text.splitlines()))
