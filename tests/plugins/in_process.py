"""Run ``nsq ARGS`` inside the tests' process, as if it had its own process.

It gets its own standard streams (pipes on descriptors 0, 1 and 2, since commands and the programs
they start write there directly) and its own environment. Signal handlers, logging, the collector's
thresholds and the time zone are restored afterwards.
"""

import gc
import io
import logging
import os
import pty
import signal
import sys
import termios
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, suppress
from typing import NamedTuple, NoReturn

from nsqtools.cli.main import main


class Result(NamedTuple):
    """The result of a run: exit status, stdout as bytes, stderr as text."""

    status: int
    out: bytes
    err: str


class RanTooLong(BaseException):
    """The command had not ended in time. The command line would catch an `Exception`."""


def run_in_process(
    arguments: Sequence[str],
    stdin: bytes,
    env: Mapping[str, str],
    timeout_s: float,
    *,
    terminal: bool = False,
    columns: int = 0,
) -> Result:
    """Run to the end, on the main thread, whose signals the command handles.

    On a ``terminal`` stderr is in ``out`` as well, as on a screen, which is ``columns`` wide (0:
    the terminal does not report its width).
    """
    with ExitStack() as stack:
        stack.enter_context(own_logging())
        stack.enter_context(_own_process(env))
        out, err = stack.enter_context(_terminal(stdin, columns) if terminal else _streams(stdin))
        stack.enter_context(_deadline(timeout_s, arguments))
        try:
            status = main(list(arguments))
        except SystemExit as end:
            status = end.code if isinstance(end.code, int) else 1
        finally:
            for stream in (sys.stdout, sys.stderr):
                # a reader that has closed the pipe, which the command has reported
                with suppress(OSError):
                    stream.flush()
    return Result(status, bytes(out), err.decode())


@contextmanager
def _streams(stdin: bytes) -> Iterator[tuple[bytearray, bytearray]]:
    """Replace the standard streams by pipes; the output is complete after the block."""
    out, err = bytearray(), bytearray()
    with ExitStack() as stack:
        (their_in, our_in), (our_out, their_out), (our_err, their_err) = (os.pipe() for _ in "012")
        ends = (_feed, our_in, stdin), (_drain, our_out, out), (_drain, our_err, err)
        threads = [threading.Thread(target=do, args=args, daemon=True) for do, *args in ends]
        stack.callback(lambda: [thread.join() for thread in threads])
        stack.enter_context(_standard([their_in, their_out, their_err]))
        for thread in threads:
            thread.start()
        yield out, err


@contextmanager
def _terminal(stdin: bytes, columns: int) -> Iterator[tuple[bytearray, bytearray]]:
    """Replace the standard streams by a terminal that does not change the output."""
    screen = bytearray()
    with ExitStack() as stack:
        ours, theirs = pty.openpty()
        settings = termios.tcgetattr(theirs)
        settings[1] &= ~termios.OPOST
        settings[3] &= ~termios.ECHO
        termios.tcsetattr(theirs, termios.TCSANOW, settings)
        if columns:
            termios.tcsetwinsize(theirs, (24, columns))
        thread = threading.Thread(target=_drain, args=(ours, screen), daemon=True)
        stack.callback(thread.join)
        stack.enter_context(_standard([theirs, os.dup(theirs), os.dup(theirs)]))
        os.write(ours, stdin + b"\x04")  # Ctrl-D
        thread.start()
        yield screen, bytearray()


def _replace(descriptors: Sequence[int]) -> None:
    """Close the files of descriptors 0, 1 and 2, and replace them."""
    for number, descriptor in enumerate(descriptors):
        os.dup2(descriptor, number)
        os.close(descriptor)


@contextmanager
def _standard(descriptors: Sequence[int]) -> Iterator[None]:
    """Replace the files of descriptors 0, 1 and 2, with text streams like those of a new process.

    stdout has a buffer, and stderr is line-buffered.
    """
    before, streams = [os.dup(number) for number in range(3)], (sys.stdin, sys.stdout, sys.stderr)
    _replace(descriptors)
    ours = (
        open(0, encoding="utf-8", closefd=False),  # noqa: SIM115
        open(1, "w", encoding="utf-8", closefd=False),  # noqa: SIM115
        open(2, "w", 1, errors="backslashreplace", closefd=False),  # noqa: SIM115
    )
    sys.stdin, sys.stdout, sys.stderr = ours
    try:
        yield
    finally:
        sys.stdin, sys.stdout, sys.stderr = streams
        for stream in ours:
            with suppress(OSError, io.UnsupportedOperation):  # nobody reads its buffer any more
                stream.close()
        _replace(before)


def _feed(descriptor: int, data: bytes) -> None:
    with open(descriptor, "wb", 0) as pipe, suppress(BrokenPipeError):
        pipe.write(data)  # the command may not read all input


def _drain(descriptor: int, into: bytearray) -> None:
    with open(descriptor, "rb", 0) as pipe, suppress(OSError):  # a closed terminal fails with EIO
        while data := pipe.read(1 << 16):
            into += data


@contextmanager
def own_logging() -> Iterator[None]:
    """Restore the package's logger after a command line has configured it."""
    logger = logging.getLogger("nsqtools")
    earlier = [*logger.handlers], logger.level, logger.propagate
    try:
        yield
    finally:
        logger.handlers, logger.propagate = earlier[0], earlier[2]
        logger.setLevel(earlier[1])


@contextmanager
def _own_process(env: Mapping[str, str]) -> Iterator[None]:
    """Run with an environment; restore it, signal handlers and the collector's thresholds."""
    numbers = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGWINCH, signal.SIGPIPE)
    handlers = {number: signal.getsignal(number) for number in numbers}
    environ, thresholds = dict(os.environ), gc.get_threshold()
    try:
        os.environ.clear()
        os.environ.update(env)
        time.tzset()
        yield
    finally:
        os.environ.clear()
        os.environ.update(environ)
        time.tzset()
        gc.set_threshold(*thresholds)
        for number, handler in handlers.items():
            signal.signal(number, handler)


@contextmanager
def _deadline(timeout_s: float, arguments: Sequence[str]) -> Iterator[None]:
    def give_up(*_: object) -> NoReturn:
        raise RanTooLong(f"nsq {' '.join(arguments)}: not within {timeout_s:g} s")

    handler = signal.signal(signal.SIGALRM, give_up)
    signal.setitimer(signal.ITIMER_REAL, timeout_s)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, handler)
