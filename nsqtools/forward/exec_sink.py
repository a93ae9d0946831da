"""Deliver messages to commands: one run per message or batch, or persistent commands.

Standard input of a run is a file in memory with the bodies, so that no pipe has to be fed. A
persistent command reads lines of JSON (the format of ``nsq tail --json``) from a pipe and answers
one line for each message, in order.

One thread starts the commands and reads their output. It never waits for a command.

Traps. A background process of a command may keep its output open, so the exit of a command is its
end, not the end of its output; everything that it printed is in the pipe by then. An answer of a
persistent command belongs to its oldest message. An invalid answer ends the command, because the
next lines may belong to other messages than expected. Each persistent command has new pipes, or
output left by its predecessor would be taken for answers.
"""

from __future__ import annotations

import asyncio
import collections
import contextlib
import errno
import itertools
import logging
import os
import signal
import tempfile
import threading
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Sequence
from typing import IO, Any, NamedTuple

from nsqtools.client.connecting import RetryDelays
from nsqtools.client.message import max_attempts_of
from nsqtools.errors import OutputError
from nsqtools.files.durable import write_all
from nsqtools.forward.command_starter import EndedCommand, Starter
from nsqtools.forward.parcel import DELIVERED, Fate, Outcome, Parcel, Report, as_sent
from nsqtools.protocol.text import escape_line
from nsqtools.records.envelope import encode_many
from nsqtools.records.units import parse_span

log = logging.getLogger("nsqtools")

TEMPORARY_FAILURE = 75  # EX_TEMPFAIL of sysexits.h
KILL_AFTER_S = 5.0  # from TERM to KILL
GRACE_S = 2.0  # from the end of the input of an idle persistent command to TERM
# Unanswered messages of a persistent command. Together they should fit into msg_timeout, and the
# lines of small messages into a pipe.
MAX_UNANSWERED = 512
MAX_LINE = 1 << 20  # longer lines of output are split, so that memory is bounded
# 16 reads of 64 KiB are 1 MiB, the largest pipe that Linux allows an unprivileged user.
MAX_READS = 16
RESTART_BASE_S, RESTART_MAX_S = 0.1, 10.0
PLACE = b"{}"
TAKEN_BACK = Outcome(Fate.FAILED, "taken back by nsqd")

Write = Callable[[int, bytes], None]
"""Writes whole lines to stream 1 or 2. Raises `OutputError`."""


class ExecSettings(NamedTuple):
    """The command and how to run it.

    ``program`` is the path and ``words`` the command line, where ``{}`` is replaced by the body if
    ``takes_argument``. ``timeout_s`` 0 is without limit. After an exit status in ``fatal`` the
    message is refused.
    """

    program: str
    words: tuple[str, ...]
    channel: str
    workers: int = 1
    batch: int = 1
    batch_wait_s: float = 1.0
    is_persistent: bool = False
    takes_argument: bool = False
    timeout_s: float = 0.0
    fatal: frozenset[int] = frozenset()


_Work = Sequence[Parcel]
"""The parcels of one run, each with one message."""


class ExecSink:
    """Run commands. ``write`` receives their output, line by line.

    Public attributes and the methods that `Sink` does not have are for the thread of the commands.
    The thread, ``loop``, ``starter`` and ``report`` exist from the first message on.
    """

    loop: asyncio.AbstractEventLoop
    starter: Starter

    def __init__(self, settings: ExecSettings, write: Write) -> None:
        self.settings = settings
        self.write = write
        self.failure: Exception | None = None
        self.waiting: collections.deque[_Work] = collections.deque()  # for a free command
        self.is_stopping = False
        self.running: dict[int, _Worker] = {}  # by token
        self.tokens = itertools.count(1)
        self.words = [os.fsencode(settings.program), *map(os.fsencode, settings.words[1:])]
        self._submitted: collections.deque[Parcel] = collections.deque()
        self._is_woken = False
        self._gathered: dict[str, list[Parcel]] = {}
        self._batch_wait_s = settings.batch_wait_s
        self.report: Report
        self._workers: list[_Worker] = []
        self._thread: threading.Thread | None = None

    # -- the forwarder's thread

    def parts(self, parcel: Parcel) -> list[Parcel]:
        """Return a part for each message, because batches are formed here."""
        return [parcel.part(at, at + 1) for at in range(len(parcel))]

    def submit(self, parcel: Parcel, report: Report) -> None:
        """Queue one part for the commands."""
        if self._thread is None:
            self._thread = self._begin()
        self.report = report  # the same function for all parts
        self._submitted.append(parcel)
        if not self._is_woken:
            self._is_woken = True
            self.loop.call_soon_threadsafe(self._take)

    def check(self) -> None:
        """Raise `OutputError` if output cannot be written, ``RuntimeError`` for a defect."""
        if isinstance(self.failure, OutputError):
            raise self.failure
        if self.failure is not None:
            raise RuntimeError("the thread of the commands failed") from self.failure

    def flush(self) -> None:
        """Run commands for incomplete batches, and for later messages without waiting."""
        if self._thread is not None:
            self.loop.call_soon_threadsafe(self._give_out_gathered)

    def is_stuck(self, now: float, after_s: float) -> bool:
        """Return whether every worker has spent more than ``after_s`` on one run or message."""
        workers = self._workers
        return bool(workers) and all(w.work and w.since < now - after_s for w in workers)

    def stop(self, timeout_s: float) -> None:
        """End running commands. Their messages are not reported, so that they are requeued."""
        if self._thread is None:
            return
        self.loop.call_soon_threadsafe(self._begin_stop)
        self._thread.join(KILL_AFTER_S)
        with contextlib.suppress(RuntimeError):  # the loop is closed
            self.loop.call_soon_threadsafe(self.loop.stop)
        self._thread.join()
        self.starter.close()

    def _begin(self) -> threading.Thread:
        self.loop = asyncio.new_event_loop()
        self.loop.set_exception_handler(self._fail)
        self._begin_starter()
        kind = _Persistent if self.settings.is_persistent else _Run
        self._workers = [kind(self) for _ in range(self.settings.workers)]
        thread = threading.Thread(target=self._run, name="nsq-exec", daemon=True)
        thread.start()
        return thread

    # -- the thread

    def _run(self) -> None:
        """Run the loop until it is stopped."""
        try:
            self.loop.run_forever()
        finally:
            for worker in self._workers:
                worker.close()
            self.loop.close()

    def _fail(self, loop: asyncio.AbstractEventLoop, context: dict[str, Any]) -> None:
        self.failure = context.get("exception") or RuntimeError(context["message"])

    def _take(self) -> None:
        self._is_woken = False
        while self._submitted:
            parcel = self._submitted.popleft()
            if self.settings.batch > 1:
                self._gather(parcel)
            else:
                self.waiting.append((parcel,))
        self.assign_work()

    def _gather(self, parcel: Parcel) -> None:
        """Add a message to the batch of its topic, from any nsqd."""
        topic = parcel.messages.topic
        gathered = self._gathered.setdefault(topic, [])
        gathered.append(parcel)
        if len(gathered) == self.settings.batch:
            self.waiting.append(self._gathered.pop(topic))
        elif len(gathered) == 1:
            self.loop.call_later(self._batch_wait_s, self._batch_is_due, topic, parcel)

    def _batch_is_due(self, topic: str, first: Parcel) -> None:
        if self._gathered.get(topic, [None])[0] is first:
            self.waiting.append(self._gathered.pop(topic))
            self.assign_work()

    def _give_out_gathered(self) -> None:
        self._batch_wait_s = 0.0
        self.waiting += self._gathered.values()
        self._gathered.clear()
        self.assign_work()

    def assign_work(self) -> None:
        """Assign waiting work to free workers."""
        now = time.monotonic()
        while self.waiting and not self.is_stopping and self.failure is None:
            worker = min(self._workers, key=lambda w: (not w.is_able(now), len(w.work)))
            if not worker.is_able(now):
                return
            work = self.waiting.popleft()
            # nsqd takes a message back after msg_timeout; another consumer may have it now.
            if taken_back := [parcel for parcel in work if parcel.messages[0].is_answered]:
                self.report(taken_back, TAKEN_BACK)
            if work := [parcel for parcel in work if parcel not in taken_back]:
                worker.give(work, now)

    def _begin_stop(self) -> None:
        """End all commands, then the loop."""
        self.is_stopping = True
        for worker in self.running.values():
            worker.begin_stop()
        if not self.running:
            self.loop.stop()

    def _begin_starter(self) -> None:
        self.starter = Starter()
        self.loop.add_reader(self.starter.replies, self._collect)

    def _collect(self) -> None:
        """Process the commands that have ended."""
        ended = self.starter.read()
        if ended is None:  # the starter was killed, and its commands with it
            self.loop.remove_reader(self.starter.replies)
            self.starter.lost()
            self._begin_starter()
            ended = [EndedCommand(token, -signal.SIGKILL, 0) for token in self.running]
        for token, status, error in ended:
            if (worker := self.running.pop(token, None)) is not None:
                worker.has_ended(status, error)


class _Worker(ABC):
    """Runs one command at a time: its pipes and the unanswered work."""

    def __init__(self, sink: ExecSink) -> None:
        self.sink = sink
        self.settings = sink.settings
        self.token = 0  # of the running command
        self.work: collections.deque[_Work] = collections.deque()
        self.since = 0.0  # start of the oldest work
        self.error = ""  # why this sink ended the command
        self.fds: dict[int, int] = {}  # our ends of stdin, stdout and stderr
        self.theirs: list[int] = []  # the command's ends, kept open so that a pipe never ends
        self._timer: asyncio.TimerHandle | None = None
        self._partial_lines = {1: b"", 2: b""}

    @abstractmethod
    def is_able(self, now: float) -> bool:
        """Return whether the worker accepts work."""

    @abstractmethod
    def give(self, work: _Work, now: float) -> None:
        """Run a command for some work, or report that none can start."""

    @abstractmethod
    def settle(self, status: int, error: int) -> None:
        """Report the outcome of the ended command."""

    def open(self, *, has_stdin: bool = False) -> None:
        """Make the pipes. Raises ``OSError``."""
        try:
            if has_stdin:
                theirs, self.fds[0] = os.pipe()
                self.theirs.append(theirs)
            for stream in (1, 2):
                self.fds[stream], theirs = os.pipe()
                self.theirs.append(theirs)
                self.sink.loop.add_reader(self.fds[stream], self._has_printed, stream)
        except OSError:
            self.close()
            raise
        for fd in self.fds.values():
            os.set_blocking(fd, False)

    def close(self) -> None:
        """Close the pipes."""
        for stream, fd in self.fds.items():
            loop = self.sink.loop
            (loop.remove_reader if stream else loop.remove_writer)(fd)
        for fd in (*self.fds.values(), *self.theirs):
            os.close(fd)
        self.fds, self.theirs = {}, []

    def start(self, words: Sequence[bytes], environ: dict[str, str], fds: Sequence[int]) -> None:
        """Start a command. Raises ``OSError``."""
        token = next(self.sink.tokens)
        added = [f"NSQ_{name}={value}".encode() for name, value in environ.items()]
        self.sink.starter.start(token, words, added, fds)
        self.token, self.error, self.since = token, "", time.monotonic()
        self.sink.running[token] = self
        self.watch()

    def has_ended(self, status: int, error: int) -> None:
        """Process the end of the command, after the output that is left in the pipes."""
        for stream in (1, 2):
            self._read(stream)
            self._lines(stream, is_end=True)
        self.token = 0
        self.settle(status, error)
        if self.sink.is_stopping and not self.sink.running:
            self.sink.loop.stop()
        self.sink.assign_work()

    def watch(self) -> None:
        """Enforce the timeout of the oldest work."""
        if self.settings.timeout_s and self._timer is None:
            self._check_time()

    def _check_time(self) -> None:
        self._timer = None
        if not self.token or not self.work or self.error:
            return
        left_s = self.since + self.settings.timeout_s - time.monotonic()
        if left_s <= 0:
            self.end(f"{self.settings.words[0]} took longer than {self.settings.timeout_s:g} s")
        else:
            self._timer = self.sink.loop.call_later(left_s, self._check_time)

    def end(self, error: str) -> None:
        """End the command; ``error`` is the reason."""
        self.error = error
        token, starter = self.token, self.sink.starter
        starter.signal(token, signal.SIGTERM)
        self.sink.loop.call_later(KILL_AFTER_S, starter.signal, token, signal.SIGKILL)

    def begin_stop(self) -> None:
        """End the command because the sink stops."""
        self.sink.starter.signal(self.token, signal.SIGTERM)

    def cannot_start(self, error: int | None) -> Outcome:
        reason = os.strerror(error or 0)
        return Outcome(Fate.UNREACHABLE, f"cannot start {self.settings.words[0]} ({reason})")

    def failed_with(self, status: int, error: int) -> Outcome:
        """Return the outcome of a command that did not succeed."""
        if self.error:
            return Outcome(Fate.FAILED, self.error)
        if error == errno.E2BIG:
            return Outcome(Fate.REFUSED, "its body is too long for an argument")
        if error:
            return self.cannot_start(error)
        reason = f"{self.settings.words[0]} {_describe_status(status)}"
        if status in self.settings.fatal:
            return Outcome(Fate.REFUSED, reason, may_split=True)
        if status == TEMPORARY_FAILURE:
            return Outcome(Fate.BUSY, reason)
        return Outcome(Fate.FAILED, reason, may_split=status > 0)

    # -- output

    def _has_printed(self, stream: int) -> None:
        self._read(stream)
        self.sink.assign_work()  # an answer makes room

    def _read(self, stream: int) -> None:
        """Read the available output, at most `MAX_READS` times.

        A command that prints faster than its output is written must not block the thread.
        """
        with contextlib.suppress(BlockingIOError):
            for _ in range(MAX_READS if stream in self.fds else 0):
                data = os.read(self.fds[stream], 1 << 16)
                self._partial_lines[stream] += data
                self._lines(stream)
                if len(data) < 1 << 16:
                    return

    def _lines(self, stream: int, *, is_end: bool = False) -> None:
        is_answer = stream == 1 and self.settings.is_persistent
        *lines, partial = self._partial_lines[stream].split(b"\n")
        if len(partial) > MAX_LINE or (partial and is_end and not is_answer):
            lines.append(partial)
            partial = b""
        self._partial_lines[stream] = b"" if is_end else partial
        if lines:
            self.printed(stream, lines)

    def printed(self, stream: int, lines: Sequence[bytes]) -> None:
        """Write output of the command to our streams."""
        try:
            self.sink.write(stream, b"".join(line + b"\n" for line in lines))
        except OutputError as exc:
            self.sink.failure = self.sink.failure or exc


class _Run(_Worker):
    """Runs a command for each message or batch."""

    def is_able(self, now: float) -> bool:
        return not self.token

    def give(self, work: _Work, now: float) -> None:
        """Run a command, or refuse bodies that cannot be passed to it."""
        settings, words = self.settings, self.sink.words
        bodies = [parcel.bodies[0] for parcel in work]
        messages = [parcel.messages[0] for parcel in work]
        if fault := _find_fault(settings, bodies):
            self._answer(work, Outcome(Fate.REFUSED, fault, may_split=True))
            return
        environ = {"TOPIC": messages[0].topic, "CHANNEL": settings.channel}
        environ["ATTEMPTS"] = str(max_attempts_of(messages))
        if settings.batch == 1:
            message_id = messages[0].id.decode("latin-1")
            environ["MESSAGE_ID"] = message_id.replace("\0", "")  # NUL would begin a variable
            environ["TIMESTAMP"] = str(messages[0].timestamp_ns)
            stdin_data = bodies[0]
        else:
            stdin_data = b"".join(body + b"\n" for body in bodies)
        if settings.takes_argument:
            words = [words[0], *(word.replace(PLACE, bodies[0]) for word in words[1:])]
            stdin_data = b""
        self.since = now
        self.work.append(work)
        try:
            with _memory_file(stdin_data) as stdin:
                if not self.fds:
                    self.open()
                self.start(words, environ, [stdin, *self.theirs])
        except OSError as exc:
            outcome = self.cannot_start(exc.errno)
            if exc.errno == errno.EFBIG:  # `ulimit -f` excludes this body, but not others
                outcome = outcome._replace(fate=Fate.FAILED, may_split=True)
            self._answer(self.work.popleft(), outcome)

    def settle(self, status: int, error: int) -> None:
        if self.sink.is_stopping and (status or error):
            return
        if self.sink.failure is not None:  # its output may be lost, so it is not delivered
            return
        has_worked = not (status or error or self.error)
        outcome = DELIVERED if has_worked else self.failed_with(status, error)
        self._answer(self.work.popleft(), outcome)

    def _answer(self, work: _Work, outcome: Outcome) -> None:
        """Report the outcome, or run a failed batch again in halves to isolate the bad message."""
        middle = len(work) // 2
        if outcome.may_split and middle:
            self.sink.waiting.extendleft((work[middle:], work[:middle]))
        else:
            self.sink.report(work, outcome)


class _Persistent(_Worker):
    """Feeds messages to a command that keeps running."""

    def __init__(self, sink: ExecSink) -> None:
        super().__init__(sink)
        self._unwritten = bytearray()
        self._delays = RetryDelays(RESTART_BASE_S, RESTART_MAX_S)
        self._retry_at = 0.0

    def is_able(self, now: float) -> bool:
        return now >= self._retry_at and not self.error and len(self.work) < MAX_UNANSWERED

    def give(self, work: _Work, now: float) -> None:
        """Queue a message for the command; one write has all messages of a loop iteration."""
        if not self.token:
            try:
                self.open(has_stdin=True)
                self.start(self.sink.words, {"CHANNEL": self.settings.channel}, self.theirs)
            except OSError as exc:
                self.close()
                self.work.append(work)
                self._pause(self.cannot_start(exc.errno))
                return
        if not self.work:
            self.since = now
        self.work.append(work)
        self.watch()
        if not self._unwritten:
            self.sink.loop.call_soon(self._write)
        message = work[0].messages[0]
        sent = as_sent(message, work[0].bodies[0])
        self._unwritten += encode_many(message.topic, message.nsqd, [sent])

    def _write(self) -> None:
        """Write queued messages as far as the pipe has room."""
        if (fd := self.fds.get(0)) is None:
            return
        try:
            while self._unwritten:
                del self._unwritten[: os.write(fd, self._unwritten)]
        except BlockingIOError:
            self.sink.loop.add_writer(fd, self._write)
            return
        except OSError:  # closed by the command: its exit status has the reason
            self._unwritten.clear()
        self.sink.loop.remove_writer(fd)

    def printed(self, stream: int, lines: Sequence[bytes]) -> None:
        """Read answers from standard output."""
        if stream != 1:
            super().printed(stream, lines)
            return
        for line in lines if not self.error else ():
            outcome = _parse_answer(line)
            if outcome is None or not self.work:
                answer = escape_line(line[:100].decode("utf-8", "replace"))
                self.end(f"{self.settings.words[0]} gave no answer but '{answer}'")
                return
            self.sink.report(self.work.popleft(), outcome)
        self.since = time.monotonic()
        self._delays.reset()

    def settle(self, status: int, error: int) -> None:
        """Report the oldest message, which may be the cause; the next command gets the others."""
        self.close()
        self._unwritten.clear()
        if self.sink.is_stopping:
            return
        outcome = self.failed_with(status, error)
        if self.work:
            self._pause(outcome)
        elif status or self.error:
            self.error = ""
            log.warning("%s", outcome.error)

    def _pause(self, outcome: Outcome) -> None:
        delay_s = self._delays.next_delay_s()
        self._retry_at = time.monotonic() + delay_s
        self.sink.loop.call_later(delay_s, self.sink.assign_work)
        self.error = ""
        self.sink.report(self.work.popleft(), outcome)
        self.sink.waiting.extendleft(reversed(self.work))
        self.work.clear()

    def begin_stop(self) -> None:
        if self.work or 0 not in self.fds:
            super().begin_stop()
            return
        self.sink.loop.remove_writer(self.fds[0])
        os.close(self.fds.pop(0))  # an idle command may exit by itself
        self.sink.loop.call_later(GRACE_S, super().begin_stop)


def _find_fault(settings: ExecSettings, bodies: Sequence[bytes]) -> str:
    if settings.takes_argument and b"\0" in bodies[0]:
        return "its body has a NUL, which an argument cannot have"
    if settings.batch > 1 and any(b"\n" in body for body in bodies):
        return "its body has a line break, and a batch is a line for each message"
    return ""


@contextlib.contextmanager
def _memory_file(data: bytes) -> Iterator[int]:
    """Open an anonymous file with these bytes, positioned at the beginning. Raises ``OSError``."""
    if hasattr(os, "memfd_create"):
        file: IO[bytes] = os.fdopen(os.memfd_create("message"), "r+b", buffering=0)
    else:
        file = tempfile.TemporaryFile(buffering=0)  # noqa: SIM115
    with file:
        write_all(file.fileno(), data)  # a write may end early, for example at `ulimit -f`
        file.seek(0)
        yield file.fileno()


def _parse_answer(line: bytes) -> Outcome | None:
    """Return the outcome for an answer of a persistent command, or None for an invalid one."""
    if line == b"ok":
        return DELIVERED
    word, _, argument = line.decode("utf-8", "replace").strip().partition(" ")
    match word:
        case "ok" if not argument:
            return DELIVERED
        case "requeue":
            with contextlib.suppress(ValueError):
                delay_s = parse_span(argument) if argument else None
                return Outcome(Fate.FAILED, "requeued by the command", delay_s)
        case "dead":
            return Outcome(Fate.REFUSED, argument or "given up by the command")
    return None


def _describe_status(status: int) -> str:
    if status >= 0:
        return f"ended with status {status}"
    with contextlib.suppress(ValueError):
        return f"was ended by {signal.Signals(-status).name}"
    return f"was ended by signal {-status}"
