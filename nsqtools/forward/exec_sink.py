"""Messages to commands: one run for each message or batch, or commands that keep running.

Standard input of a run is a file in memory that holds the bodies, so nothing has to be fed to it. A
persistent command is fed over a pipe, with lines of JSON (as ``nsq tail --json`` prints them), and
answers a line for each, in their order.

Commands are started and read on a thread of its own, which never waits for one.

Traps. A background process that a command left may hold its output open: the end of a command is
its exit, never the end of its output; what it has printed is in the pipe by then. An answer of a
persistent command belongs to the oldest message it was given, so one that makes no sense ends the
command: the next lines may answer for other messages than we think. Each has pipes of its own, or
what its predecessor left would be taken for its answers.
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
from collections.abc import Callable, Sequence
from typing import IO, Any, NamedTuple

from nsqtools.client.connecting import RetryDelays
from nsqtools.client.message import max_attempts_of
from nsqtools.errors import OutputError
from nsqtools.forward.command_starter import EndedCommand, Starter
from nsqtools.forward.parcel import DELIVERED, Fate, Outcome, Parcel, Report, as_sent
from nsqtools.protocol.text import escape_line
from nsqtools.records.envelope import encode_many
from nsqtools.records.units import parse_span

log = logging.getLogger("nsqtools")

TEMPORARY_FAILURE = 75  # EX_TEMPFAIL of sysexits.h
KILL_AFTER_S = 5.0  # from TERM to KILL
GRACE_S = 2.0  # from the end of its input to TERM
MAX_GIVEN = 512  # messages that a persistent command has not answered
MAX_LINE = 1 << 20  # of what is printed; longer ones are broken
MAX_READS = 16  # at a time; as much as a pipe of a user may hold
RESTART_BASE_S, RESTART_MAX_S = 0.1, 10.0
PLACE = b"{}"
TAKEN_BACK = Outcome(Fate.FAILED, "taken back by nsqd")

Write = Callable[[int, bytes], None]
"""Writes whole lines to stream 1 or 2. Raises `OutputError`."""


class ExecSettings(NamedTuple):
    """What is run. ``program`` is the path, ``words`` the command as it was given, with ``{}`` for
    the body where ``takes_argument``. ``timeout_s`` 0 is without limit; ``fatal`` are the statuses
    after which a message is not tried again."""

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
"""What one run answers for."""


class ExecSink:
    """Runs commands. ``write`` is given what they print, line by line.

    What is public beside the methods of a sink is for the thread, and what has no value yet begins
    with the first message, as does the thread.
    """

    loop: asyncio.AbstractEventLoop
    starter: Starter

    def __init__(self, settings: ExecSettings, write: Write) -> None:
        self.settings = settings
        self.write = write
        self.failure: Exception | None = None
        self.waiting: collections.deque[_Work] = collections.deque()  # for a command
        self.is_stopping = False
        self.running: dict[int, _Worker] = {}  # by token
        self.tokens = itertools.count(1)
        self.words = [os.fsencode(settings.program), *map(os.fsencode, settings.words[1:])]
        self._submitted: collections.deque[Parcel] = collections.deque()
        self._is_woken = False
        self._gathered: dict[str, list[Parcel]] = {}
        self._gathers_for_s = settings.batch_wait_s
        self.report: Report
        self._workers: list[_Worker] = []
        self._thread: threading.Thread | None = None

    # -- the forwarder's thread

    def parts(self, parcel: Parcel) -> list[Parcel]:
        """A part for each message: the batches are made here."""
        return [parcel.part(at, at + 1) for at in range(len(parcel))]

    def submit(self, parcel: Parcel, report: Report) -> None:
        """Have a command run for one part."""
        if self._thread is None:
            self._thread = self._begin()
        self.report = report  # the forwarder's, for all of them
        self._submitted.append(parcel)
        if not self._is_woken:
            self._is_woken = True
            self.loop.call_soon_threadsafe(self._take)

    def check(self) -> None:
        """Raise `OutputError` where output has nowhere to go, ``RuntimeError`` for a defect."""
        if isinstance(self.failure, OutputError):
            raise self.failure
        if self.failure is not None:
            raise RuntimeError("the thread of the commands failed") from self.failure

    def flush(self) -> None:
        """Run commands for what waits for a batch, and for what comes."""
        if self._thread is not None:
            self.loop.call_soon_threadsafe(self._give_out_gathered)

    def is_stuck(self, now: float, after_s: float) -> bool:
        """Tell whether each worker has been at one run or message for longer than ``after_s``."""
        workers = self._workers
        return bool(workers) and all(w.work and w.since < now - after_s for w in workers)

    def stop(self, timeout_s: float) -> None:
        """End the commands that still run; their messages are not reported."""
        if self._thread is None:
            return
        self.loop.call_soon_threadsafe(self._begin_stop)
        self._thread.join(KILL_AFTER_S)
        with contextlib.suppress(RuntimeError):  # it has ended
            self.loop.call_soon_threadsafe(self.loop.stop)
        self._thread.join()
        self.starter.close()

    def _begin(self) -> threading.Thread:
        self.loop = asyncio.new_event_loop()
        self.loop.set_exception_handler(self._fail)
        self._begin_starter()
        kind = _Kept if self.settings.is_persistent else _Run
        self._workers = [kind(self) for _ in range(self.settings.workers)]
        thread = threading.Thread(target=self._run, name="nsq-exec", daemon=True)
        thread.start()
        return thread

    # -- the thread

    def _run(self) -> None:
        """Until the loop is stopped."""
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
        self.go_on()

    def _gather(self, parcel: Parcel) -> None:
        """Batches are of one topic, from whichever nsqd."""
        topic = parcel.messages.topic
        gathered = self._gathered.setdefault(topic, [])
        gathered.append(parcel)
        if len(gathered) == self.settings.batch:
            self.waiting.append(self._gathered.pop(topic))
        elif len(gathered) == 1:
            self.loop.call_later(self._gathers_for_s, self._batch_is_due, topic, parcel)

    def _batch_is_due(self, topic: str, first: Parcel) -> None:
        if self._gathered.get(topic, [None])[0] is first:
            self.waiting.append(self._gathered.pop(topic))
            self.go_on()

    def _give_out_gathered(self) -> None:
        self._gathers_for_s = 0.0
        self.waiting += self._gathered.values()
        self._gathered.clear()
        self.go_on()

    def go_on(self) -> None:
        """Give out what waits, as far as a command is free for it."""
        now = time.monotonic()
        while self.waiting and not self.is_stopping and self.failure is None:
            worker = min(self._workers, key=lambda each: (not each.is_able(now), len(each.work)))
            if not worker.is_able(now):
                return
            work = self.waiting.popleft()
            if gone := [parcel for parcel in work if parcel.messages[0].is_answered]:
                self.report(gone, TAKEN_BACK)
            if work := [parcel for parcel in work if parcel not in gone]:
                worker.give(work, now)

    def _begin_stop(self) -> None:
        """End all commands, and the loop after them."""
        self.is_stopping = True
        for worker in self.running.values():
            worker.begin_stop()
        if not self.running:
            self.loop.stop()

    def _begin_starter(self) -> None:
        self.starter = Starter()
        self.loop.add_reader(self.starter.replies, self._collect)

    def _collect(self) -> None:
        """Act on the ends of commands."""
        ended = self.starter.read()
        if ended is None:  # it was killed, and they with it
            self.loop.remove_reader(self.starter.replies)
            self.starter.lost()
            self._begin_starter()
            ended = [EndedCommand(token, -signal.SIGKILL, 0) for token in self.running]
        for token, status, error in ended:
            if (worker := self.running.pop(token, None)) is not None:
                worker.has_ended(status, error)


class _Worker(ABC):
    """Where one command runs at a time: its pipes, and the work that it has not answered."""

    def __init__(self, sink: ExecSink) -> None:
        self.sink = sink
        self.settings = sink.settings
        self.token = 0  # of the command that runs
        self.work: collections.deque[_Work] = collections.deque()
        self.since = 0.0  # when the first of these began
        self.error = ""  # why we have ended it
        self.fds: dict[int, int] = {}  # our end of its stdin, stdout and stderr
        self.theirs: list[int] = []  # kept open, so that a pipe never ends
        self._timer: asyncio.TimerHandle | None = None
        self._rests = {1: b"", 2: b""}  # begun lines

    @abstractmethod
    def is_able(self, now: float) -> bool:
        """Tell whether it may be given work."""

    @abstractmethod
    def give(self, work: _Work, now: float) -> None:
        """Have a command do some work, or report that none can."""

    @abstractmethod
    def settle(self, status: int, error: int) -> None:
        """Report what the end of the command means."""

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
        """Have a command started. Raises ``OSError``."""
        token = next(self.sink.tokens)
        added = [f"NSQ_{name}={value}".encode() for name, value in environ.items()]
        self.sink.starter.start(token, words, added, fds)
        self.token, self.error, self.since = token, "", time.monotonic()
        self.sink.running[token] = self
        self.watch()

    def has_ended(self, status: int, error: int) -> None:
        """Act on the end of the command: what it has printed is in the pipes."""
        for stream in (1, 2):
            self._read(stream)
            self._lines(stream, is_end=True)
        self.token = 0
        self.settle(status, error)
        if self.sink.is_stopping and not self.sink.running:
            self.sink.loop.stop()
        self.sink.go_on()

    def watch(self) -> None:
        """See that the first work is done in time."""
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
        """End the command; ``error`` says why."""
        self.error = error
        token, starter = self.token, self.sink.starter
        starter.signal(token, signal.SIGTERM)
        self.sink.loop.call_later(KILL_AFTER_S, starter.signal, token, signal.SIGKILL)

    def begin_stop(self) -> None:
        """End the command because all ends."""
        self.sink.starter.signal(self.token, signal.SIGTERM)

    def cannot_start(self, error: int | None) -> Outcome:
        reason = os.strerror(error or 0)
        return Outcome(Fate.UNREACHABLE, f"cannot start {self.settings.words[0]} ({reason})")

    def failed_with(self, status: int, error: int) -> Outcome:
        """Return what the end of the command means, where it was no success."""
        if self.error:
            return Outcome(Fate.FAILED, self.error)
        if error == errno.E2BIG:
            return Outcome(Fate.REFUSED, "its body is too long for an argument")
        if error:
            return self.cannot_start(error)
        said = f"{self.settings.words[0]} {_ended(status)}"
        if status in self.settings.fatal:
            return Outcome(Fate.REFUSED, said, may_split=True)
        if status == TEMPORARY_FAILURE:
            return Outcome(Fate.BUSY, said)
        return Outcome(Fate.FAILED, said, may_split=status > 0)

    # -- what it prints

    def _has_printed(self, stream: int) -> None:
        self._read(stream)
        self.sink.go_on()  # where it has answered

    def _read(self, stream: int) -> None:
        """Read what is there. A command that prints faster than we pass on must not keep us."""
        with contextlib.suppress(BlockingIOError):
            for _ in range(MAX_READS if stream in self.fds else 0):
                data = os.read(self.fds[stream], 1 << 16)
                self._rests[stream] += data
                self._lines(stream)
                if len(data) < 1 << 16:
                    return

    def _lines(self, stream: int, *, is_end: bool = False) -> None:
        is_answer = stream == 1 and self.settings.is_persistent
        *lines, rest = self._rests[stream].split(b"\n")
        if len(rest) > MAX_LINE or (rest and is_end and not is_answer):
            lines.append(rest)
            rest = b""
        self._rests[stream] = b"" if is_end else rest
        if lines:
            self.printed(stream, lines)

    def printed(self, stream: int, lines: Sequence[bytes]) -> None:
        """Pass on what the command has printed."""
        try:
            self.sink.write(stream, b"".join(line + b"\n" for line in lines))
        except OutputError as exc:
            self.sink.failure = self.sink.failure or exc


class _Run(_Worker):
    """A command for each message, or for each batch."""

    def is_able(self, now: float) -> bool:
        return not self.token

    def give(self, work: _Work, now: float) -> None:
        """Run a command, unless it cannot be given the bodies."""
        settings, words = self.settings, self.sink.words
        bodies = [parcel.bodies[0] for parcel in work]
        messages = [parcel.messages[0] for parcel in work]
        if fault := _fault(settings, bodies):
            self._answer(work, Outcome(Fate.REFUSED, fault, may_split=True))
            return
        environ = {"TOPIC": messages[0].topic, "CHANNEL": settings.channel}
        environ["ATTEMPTS"] = str(max_attempts_of(messages))
        if settings.batch == 1:
            message_id = messages[0].id.decode("latin-1")
            environ["MESSAGE_ID"] = message_id.replace("\0", "")  # which begins another variable
            environ["TIMESTAMP"] = str(messages[0].timestamp_ns)
            given = bodies[0]
        else:
            given = b"".join(body + b"\n" for body in bodies)
        if settings.takes_argument:
            words = [words[0], *(word.replace(PLACE, bodies[0]) for word in words[1:])]
            given = b""
        self.since = now
        self.work.append(work)
        try:
            with _held(given) as stdin:
                if not self.fds:
                    self.open()
                self.start(words, environ, [stdin.fileno(), *self.theirs])
        except OSError as exc:
            self.sink.report(self.work.popleft(), self.cannot_start(exc.errno))

    def settle(self, status: int, error: int) -> None:
        if self.sink.is_stopping and (status or error):
            return
        if self.sink.failure is not None:  # what it has printed is lost
            return
        has_worked = not (status or error or self.error)
        outcome = DELIVERED if has_worked else self.failed_with(status, error)
        self._answer(self.work.popleft(), outcome)

    def _answer(self, work: _Work, outcome: Outcome) -> None:
        """A batch in which a message may be to blame for the others is run again in halves."""
        middle = len(work) // 2
        if outcome.may_split and middle:
            self.sink.waiting.extendleft((work[middle:], work[:middle]))
        else:
            self.sink.report(work, outcome)


class _Kept(_Worker):
    """A command that keeps running."""

    def __init__(self, sink: ExecSink) -> None:
        super().__init__(sink)
        self._unwritten = bytearray()
        self._delays = RetryDelays(RESTART_BASE_S, RESTART_MAX_S)
        self._retry_at = 0.0

    def is_able(self, now: float) -> bool:
        return now >= self._retry_at and not self.error and len(self.work) < MAX_GIVEN

    def give(self, work: _Work, now: float) -> None:
        """Give it a message, which is written with those that come at the same time."""
        if not self.token:
            try:
                self.open(has_stdin=True)
                self.start(self.sink.words, {"CHANNEL": self.settings.channel}, self.theirs)
            except OSError as exc:
                self.close()
                self.work.append(work)
                self._rest(self.cannot_start(exc.errno))
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
        """Write what it is given, as far as its pipe takes it."""
        if (fd := self.fds.get(0)) is None:
            return
        try:
            while self._unwritten:
                del self._unwritten[: os.write(fd, self._unwritten)]
        except BlockingIOError:
            self.sink.loop.add_writer(fd, self._write)
            return
        except OSError:  # it reads no more: its end says why
            self._unwritten.clear()
        self.sink.loop.remove_writer(fd)

    def printed(self, stream: int, lines: Sequence[bytes]) -> None:
        """Take answers from standard output."""
        if stream != 1:
            super().printed(stream, lines)
            return
        for line in lines if not self.error else ():
            outcome = _outcome(line)
            if outcome is None or not self.work:
                said = escape_line(line[:100].decode("utf-8", "replace"))
                self.end(f"{self.settings.words[0]} gave no answer but '{said}'")
                return
            self.sink.report(self.work.popleft(), outcome)
        self.since = time.monotonic()
        self._delays.reset()

    def settle(self, status: int, error: int) -> None:
        """The oldest message may have ended it; the others are given to the next one."""
        self.close()
        self._unwritten.clear()
        if self.sink.is_stopping:
            return
        outcome = self.failed_with(status, error)
        if self.work:
            self._rest(outcome)
        elif status or self.error:
            self.error = ""
            log.warning("%s", outcome.error)

    def _rest(self, outcome: Outcome) -> None:
        delay_s = self._delays.next_delay_s()
        self._retry_at = time.monotonic() + delay_s
        self.sink.loop.call_later(delay_s, self.sink.go_on)
        self.error = ""
        self.sink.report(self.work.popleft(), outcome)
        self.sink.waiting.extendleft(reversed(self.work))
        self.work.clear()

    def begin_stop(self) -> None:
        if self.work or 0 not in self.fds:
            super().begin_stop()
            return
        self.sink.loop.remove_writer(self.fds[0])
        os.close(self.fds.pop(0))  # it has a moment to end by itself
        self.sink.loop.call_later(GRACE_S, super().begin_stop)


def _fault(settings: ExecSettings, bodies: Sequence[bytes]) -> str:
    if settings.takes_argument and b"\0" in bodies[0]:
        return "its body has a NUL, which an argument cannot have"
    if settings.batch > 1 and any(b"\n" in body for body in bodies):
        return "its body has a line break, and a batch is a line for each message"
    return ""


def _held(data: bytes) -> IO[bytes]:
    """A file of these bytes, read from the beginning, that goes when it is closed."""
    if hasattr(os, "memfd_create"):
        file: IO[bytes] = os.fdopen(os.memfd_create("message"), "r+b", buffering=0)
    else:
        file = tempfile.TemporaryFile(buffering=0)  # noqa: SIM115
    file.write(data)
    file.seek(0)
    return file


def _outcome(line: bytes) -> Outcome | None:
    """What an answer of a persistent command means; None: nothing."""
    if line == b"ok":
        return DELIVERED
    word, _, rest = line.decode("utf-8", "replace").strip().partition(" ")
    match word:
        case "ok" if not rest:
            return DELIVERED
        case "requeue":
            with contextlib.suppress(ValueError):
                delay_s = parse_span(rest) if rest else None
                return Outcome(Fate.FAILED, "requeued by the command", delay_s)
        case "dead":
            return Outcome(Fate.REFUSED, rest or "given up by the command")
    return None


def _ended(status: int) -> str:
    if status >= 0:
        return f"ended with status {status}"
    with contextlib.suppress(ValueError):
        return f"was ended by {signal.Signals(-status).name}"
    return f"was ended by signal {-status}"
