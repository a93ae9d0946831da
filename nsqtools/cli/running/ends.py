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
import signal
import threading
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from enum import IntEnum
from types import FrameType
from typing import TextIO

from nsqtools.errors import NsqError

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

    def __init__(self, stop: Callable[[], object]):
        self._stop = stop
        self.received: int | None = None

    def status(self, *, otherwise: int = 0) -> int:
        """128 and the number of the signal that stopped the command, else ``otherwise``."""
        return otherwise if self.received is None else 128 + self.received

    def handle(self, number: int, _frame: FrameType | None) -> None:
        """The signal handler."""
        if self.received is not None:
            os._exit(128 + number)
        self.received = number
        # On a thread of its own, for the code that was interrupted may hold the lock that `stop`
        # takes: called from here, it would wait for itself.
        threading.Thread(target=self._stop, name="stop", daemon=True).start()


@contextmanager
def stopping(stop: Callable[[], object]) -> Iterator[StopSignals]:
    """Inside, the first INT or TERM calls ``stop`` (on another thread), the second exits at once.

    Used on the main thread; the previous handlers are restored at the end.
    """
    signals = StopSignals(stop)
    before = {number: signal.signal(number, signals.handle) for number in SIGNALS}
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

    With ``json`` that is an object on one line. ``debug`` adds the traceback.
    """
    if debug:
        traceback.print_exception(error, file=stderr)
    message, hint = explain(error)
    if json:
        from json import dumps

        fields = {"error": message, "hint": hint or None, "status": int(status_of(error))}
        stderr.write(dumps(fields) + "\n")
        stderr.flush()
        return status_of(error)
    stderr.write(f"nsq: error: {_one_line(message)}\n")
    if hint:
        stderr.write(f"hint: {_one_line(hint)}\n")
    stderr.flush()
    return status_of(error)


def status_of(error: Exception | None) -> ExitStatus:
    """The exit status that ``error`` stands for; FAILED where the reason is not known."""
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
        return str(error), error.hint
    if isinstance(error, OSError):  # the operating system's: a full disk under stdout, say
        place = f": {error.filename}" if error.filename else ""
        return f"{error.strerror or error}{place}", ""
    return (
        f"unexpected {type(error).__name__}: {error}",
        "This is a bug: run it again with --debug (or NSQ_DEBUG=1) and report what it prints.",
    )


def _one_line(text: str) -> str:
    """Messages may quote what a server or a file said: none of it reaches the terminal raw."""
    line = " ".join(text.splitlines())
    return "".join(c if c.isprintable() else repr(c)[1:-1] for c in line)
