"""How a command's failure reads and what it exits with: one line, one hint, one status.

Our own errors bring a category, which picks the status (the parser's usage errors are among them,
see `app`). Everything else is a bug and is said to be one, but for what the machine could not do.
Commands never print errors themselves.
"""

from __future__ import annotations

import traceback
from typing import TextIO

from nsqtools.cli.running.exit_status import ExitStatus
from nsqtools.errors import NsqError

STATUS_OF_CATEGORY = {
    "failed": ExitStatus.FAILED,
    "usage": ExitStatus.USAGE,
    "not_found": ExitStatus.NOT_FOUND,
    "connect": ExitStatus.UNREACHABLE,
    "refused": ExitStatus.REFUSED,
}


def report(error: Exception, stderr: TextIO, *, debug: bool) -> ExitStatus:
    """Tell ``error`` on ``stderr`` and return the exit status; ``debug`` adds the traceback."""
    if debug:
        traceback.print_exception(error, file=stderr)
    tell(error, stderr)
    return status_of(error)


def tell(error: Exception, stderr: TextIO) -> None:
    """Write the line that says what is wrong, and the hint if there is one."""
    message, hint = explain(error)
    stderr.write(f"nsq: error: {_one_line(message)}\n")
    if hint:
        stderr.write(f"hint: {_one_line(hint)}\n")
    stderr.flush()


def status_of(error: Exception | None) -> ExitStatus:
    """The exit status that ``error`` stands for; FAILED where the reason is not known."""
    if isinstance(error, NsqError):
        return STATUS_OF_CATEGORY[error.category]
    return ExitStatus.FAILED


def explain(error: Exception) -> tuple[str, str]:
    """What to say about ``error``, and what to advise."""
    if isinstance(error, NsqError):
        return str(error), error.hint
    if isinstance(error, OSError):  # the machine's fault: a full disk under stdout, say
        place = f": {error.filename}" if error.filename else ""
        return f"{error.strerror or error}{place}", ""
    return (
        f"unexpected {type(error).__name__}: {error}",
        "This is a bug: run it again with --debug (or NSQ_DEBUG=1) and report what it prints.",
    )


def _one_line(text: str) -> str:
    """Messages may quote what a server or a file said: nothing of it reaches the terminal raw."""
    line = " ".join(text.splitlines())
    return "".join(c if c.isprintable() else repr(c)[1:-1] for c in line)
