"""Messages to commands: one run for each message or batch, or commands that keep running.

Standard input of a run is a file in memory that holds the bodies, so nothing has to be fed to it. A
persistent command is fed over a pipe, with lines of JSON (as ``nsq tail --json`` prints them), and
answers a line for each, in their order.

Everything but `parts` and `submit` runs on a thread of its own, which never waits for a command.

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
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import IO, Any

from nsqtools.client.message import most_attempts
from nsqtools.client.reconnect import RetryDelays
from nsqtools.errors import OutputError
from nsqtools.forward.command_starter import Starter
from nsqtools.forward.parcel import DELIVERED, Fate, Outcome, Parcel, Report
from nsqtools.protocol.text import escape_line
from nsqtools.records.envelope import Envelope, encode_many
from nsqtools.records.units import parse_span

log = logging.getLogger("nsqtools")

TEMPORARY_FAILURE = 75  # EX_TEMPFAIL of sysexits.h
KILL_AFTER_S = 5.0  # from TERM to KILL
GRACE_S = 2.0  # from the end of its input to TERM
MAX_GIVEN = 512  # messages that a persistent command has not answered
MAX_LINE = 1 << 20  # of what is printed; longer ones are broken
RESTART_BASE_S, RESTART_MAX_S = 0.1, 10.0
PLACE = b"{}"
TAKEN_BACK = Outcome(Fate.FAILED, "taken back by nsqd")

Write = Callable[[int, bytes], None]
"""Writes whole lines to stream 1 or 2. Raises `OutputError`."""


@dataclass(frozen=True, slots=True)
class ExecSettings:
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
    is_tagged: bool = False


@dataclass(slots=True, eq=False)
class _Work:
    """Parcels that one run answers for."""

    parcels: Sequence[Parcel]
    reports: Sequence[Report]

    def report(self, outcome: Outcome) -> None:
        for parcel, report in zip(self.parcels, self.reports, strict=True):
            report(parcel, outcome)


class _Worker:
    """Where one command runs at a time: its pipes, and the work that it has not answered."""

    def __init__(self) -> None:
        self.token = 0  # of the command that runs
        self.work: collections.deque[_Work] = collections.deque()
        self.since = 0.0  # when the first of these began
        self.timer: asyncio.TimerHandle | None = None
        self.fds: dict[int, int] = {}  # our end of its stdin, stdout and stderr
        self.theirs: list[int] = []  # kept open, so that a pipe never ends
        self.rests = {1: b"", 2: b""}  # begun lines
        self.unwritten = b""
        self.error = ""  # why we have ended it
        self.delays = RetryDelays(RESTART_BASE_S, RESTART_MAX_S)
        self.retry_at = 0.0

    def is_able(self, now: float) -> bool:
        """Tell whether a persistent command may be given messages, or started."""
        return now >= self.retry_at and not self.error

    def close(self) -> None:
        for fd in (*self.fds.values(), *self.theirs):
            os.close(fd)
        self.fds, self.theirs, self.unwritten = {}, [], b""


class ExecSink:
    """Runs commands. ``write`` is given what they print, line by line."""

    def __init__(self, settings: ExecSettings, write: Write) -> None:
        self._settings = settings
        self._write = write
        self._failure: Exception | None = None
        self._submitted: collections.deque[_Work] = collections.deque()
        self._is_woken = False
        self._gathered: dict[str, list[_Work]] = {}
        self._waiting: collections.deque[_Work] = collections.deque()
        self._workers = [_Worker() for _ in range(settings.workers)]
        self._running: dict[int, _Worker] = {}  # by token
        self._tokens = itertools.count(1)
        self._is_stopping = False
        self._words = [os.fsencode(settings.program), *map(os.fsencode, settings.words[1:])]
        self._thread: threading.Thread | None = None
        self._loop: asyncio.AbstractEventLoop  # these two with the first message
        self._starter: Starter

    def _begin(self) -> None:
        self._loop = asyncio.new_event_loop()
        self._loop.set_exception_handler(self._fail)
        self._starter = Starter()
        self._loop.add_reader(self._starter.replies, self._collect)
        self._thread = threading.Thread(target=self._run, name="nsq-exec", daemon=True)
        self._thread.start()

    def _run(self) -> None:
        try:
            self._loop.run_forever()
        finally:
            for worker in self._workers:
                self._close(worker)
            self._loop.close()

    def _fail(self, loop: asyncio.AbstractEventLoop, context: dict[str, Any]) -> None:
        self._failure = context.get("exception") or RuntimeError(context["message"])

    # -- the forwarder's thread -----------------------------------------------------------------

    def parts(self, parcel: Parcel) -> list[Parcel]:
        """A part for each message: the batches are made here."""
        return [parcel.part(at, at + 1) for at in range(len(parcel))]

    def submit(self, parcel: Parcel, report: Report) -> None:
        """Have a command run for one part."""
        if self._thread is None:
            self._begin()
        self._submitted.append(_Work((parcel,), (report,)))
        if not self._is_woken:
            self._is_woken = True
            self._loop.call_soon_threadsafe(self._take)

    def check(self) -> None:
        """Raise `OutputError` where output has nowhere to go, ``RuntimeError`` for a defect."""
        if isinstance(self._failure, OutputError):
            raise self._failure
        if self._failure is not None:
            raise RuntimeError("the thread of the commands failed") from self._failure

    def stop(self, timeout_s: float) -> None:
        """End the commands that still run; their messages are not reported."""
        if self._thread is None:
            return
        self._loop.call_soon_threadsafe(self._begin_stop)
        self._thread.join(KILL_AFTER_S)
        with contextlib.suppress(RuntimeError):  # it has ended
            self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join()
        self._starter.close()

    # -- what is to be done ---------------------------------------------------------------------

    def _take(self) -> None:
        self._is_woken = False
        while self._submitted:
            work = self._submitted.popleft()
            if self._settings.batch > 1:
                self._gather(work)
            else:
                self._waiting.append(work)
        self._go_on()

    def _gather(self, work: _Work) -> None:
        """Batches are of one topic, from whichever nsqd."""
        topic = work.parcels[0].messages.topic
        gathered = self._gathered.setdefault(topic, [])
        gathered.append(work)
        if len(gathered) == self._settings.batch:
            self._close_batch(topic)
        elif len(gathered) == 1:
            self._loop.call_later(self._settings.batch_wait_s, self._batch_is_due, topic, work)

    def _batch_is_due(self, topic: str, first: _Work) -> None:
        if self._gathered.get(topic, [None])[0] is first:
            self._close_batch(topic)
            self._go_on()

    def _close_batch(self, topic: str) -> None:
        batch = self._gathered.pop(topic)
        parcels = [parcel for work in batch for parcel in work.parcels]
        self._waiting.append(_Work(parcels, [report for work in batch for report in work.reports]))

    def _go_on(self) -> None:
        if self._is_stopping:
            return
        if self._settings.is_persistent:
            self._feed()
            return
        for worker in self._workers:
            while self._waiting and not worker.token:
                self._run_once(worker, self._waiting.popleft())

    # -- one run for each -----------------------------------------------------------------------

    def _run_once(self, worker: _Worker, work: _Work) -> None:
        live = [parcel for parcel in work.parcels if not parcel.messages[0].is_answered]
        bodies = [parcel.bodies[0] for parcel in live]
        messages = [parcel.messages[0] for parcel in live]
        if not messages:
            work.report(TAKEN_BACK)
            return
        words = self._words
        if self._settings.takes_argument:
            words = [word.replace(PLACE, bodies[0]) for word in words[1:]]
            words.insert(0, self._words[0])
        if fault := self._fault(bodies):
            self._settle_run(work, Outcome(Fate.REFUSED, fault, may_split=True))
            return
        environ = [("TOPIC", messages[0].topic), ("CHANNEL", self._settings.channel)]
        environ.append(("ATTEMPTS", str(most_attempts(messages))))
        if self._settings.batch == 1:
            environ.append(("MESSAGE_ID", messages[0].id.decode("latin-1")))
            environ.append(("TIMESTAMP", str(messages[0].timestamp_ns)))
        worker.work.append(work)
        try:
            with _held(b"" if self._settings.takes_argument else self._input(bodies)) as stdin:
                if not worker.fds:
                    self._open(worker)
                self._start(worker, words, environ, [stdin.fileno(), *worker.theirs])
        except OSError as exc:
            worker.work.popleft().report(Outcome(Fate.UNREACHABLE, self._cannot_start(exc)))

    def _fault(self, bodies: Sequence[bytes]) -> str:
        if self._settings.takes_argument and b"\0" in bodies[0]:
            return "its body has a NUL, which an argument cannot have"
        if self._settings.batch > 1 and any(b"\n" in body for body in bodies):
            return "its body has a line break, and a batch is a line for each message"
        return ""

    def _input(self, bodies: Sequence[bytes]) -> bytes:
        return bodies[0] if self._settings.batch == 1 else b"".join(body + b"\n" for body in bodies)

    def _run_ended(self, worker: _Worker, status: int, error: int) -> None:
        program = self._settings.words[0]
        if worker.error:
            outcome = Outcome(Fate.FAILED, worker.error)
        elif error == errno.E2BIG:
            outcome = Outcome(Fate.REFUSED, "its body is too long for an argument")
        elif error:
            outcome = Outcome(
                Fate.UNREACHABLE, self._cannot_start(OSError(error, os.strerror(error)))
            )
        elif status == 0:
            outcome = DELIVERED
        elif status == TEMPORARY_FAILURE:
            outcome = Outcome(Fate.BUSY, f"{program} ended with status {status}")
        elif status in self._settings.fatal:
            outcome = Outcome(Fate.REFUSED, f"{program} ended with status {status}", may_split=True)
        else:
            outcome = Outcome(Fate.FAILED, f"{program} {_ended(status)}", may_split=status > 0)
        self._settle_run(worker.work.popleft(), outcome)
        self._go_on()

    def _settle_run(self, work: _Work, outcome: Outcome) -> None:
        """A batch in which a message may be to blame for the others is run again in halves."""
        middle = len(work.parcels) // 2
        if outcome.may_split and middle:
            for half in (slice(middle, None), slice(middle)):
                self._waiting.appendleft(_Work(work.parcels[half], work.reports[half]))
        else:
            work.report(outcome)

    # -- commands that keep running -------------------------------------------------------------

    def _feed(self) -> None:
        now = time.monotonic()
        lines: dict[_Worker, list[bytes]] = {}
        while self._waiting:
            worker = min(self._workers, key=lambda each: (not each.is_able(now), len(each.work)))
            if not worker.is_able(now) or len(worker.work) >= MAX_GIVEN:
                break
            if not worker.token and not self._keep_running(worker):
                continue
            work = self._waiting.popleft()
            if work.parcels[0].messages[0].is_answered:
                work.report(TAKEN_BACK)
                continue
            if not worker.work:
                worker.since = now
                self._watch(worker)
            worker.work.append(work)
            lines.setdefault(worker, []).append(_line(work.parcels[0]))
        for worker, each in lines.items():
            worker.unwritten += b"".join(each)
            self._write_on(worker)

    def _keep_running(self, worker: _Worker) -> bool:
        self._close(worker)
        try:
            self._open(worker, has_stdin=True)
            self._start(worker, self._words, [("CHANNEL", self._settings.channel)], worker.theirs)
        except OSError as exc:
            worker.work.append(self._waiting.popleft())
            self._rest(worker, Outcome(Fate.UNREACHABLE, self._cannot_start(exc)))
            return False
        return True

    def _write_on(self, worker: _Worker) -> None:
        fd = worker.fds.get(0)
        if fd is None:
            return
        try:
            while worker.unwritten:
                worker.unwritten = worker.unwritten[os.write(fd, worker.unwritten) :]
        except BlockingIOError:
            self._loop.add_writer(fd, self._write_on, worker)
        except OSError:  # it reads no more: its end says why
            worker.unwritten = b""
            self._loop.remove_writer(fd)
        else:
            self._loop.remove_writer(fd)

    def _answered(self, worker: _Worker, lines: Sequence[bytes]) -> None:
        for line in lines:
            outcome = _outcome(line)
            if outcome is None or not worker.work:
                said = escape_line(line[:100].decode("utf-8", "replace"))
                self._end(worker, f"{self._settings.words[0]} gave no answer but '{said}'")
                return
            worker.work.popleft().report(outcome)
        worker.since = time.monotonic()
        worker.delays.reset()

    def _stopped_running(self, worker: _Worker, status: int, error: int) -> None:
        """The oldest message may have ended it; the others are given to the next one."""
        why, fate = worker.error or f"{self._settings.words[0]} {_ended(status)}", Fate.FAILED
        if error:
            why, fate = self._cannot_start(OSError(error, os.strerror(error))), Fate.UNREACHABLE
        elif status == TEMPORARY_FAILURE:
            fate = Fate.BUSY
        if worker.work:
            self._rest(worker, Outcome(fate, why))
        elif status or worker.error:
            worker.error = ""
            log.warning("%s", why)
        self._go_on()

    def _rest(self, worker: _Worker, outcome: Outcome) -> None:
        delay_s = worker.delays.next_delay_s()
        worker.retry_at = time.monotonic() + delay_s
        self._loop.call_later(delay_s, self._go_on)
        worker.error = ""
        worker.work.popleft().report(outcome)
        self._waiting.extendleft(reversed(worker.work))
        worker.work.clear()

    # -- processes ------------------------------------------------------------------------------

    def _open(self, worker: _Worker, *, has_stdin: bool = False) -> None:
        if has_stdin:
            theirs, ours = os.pipe()
            os.set_blocking(ours, False)
            worker.fds[0] = ours
            worker.theirs.append(theirs)
        for stream in (1, 2):
            ours, theirs = os.pipe()
            os.set_blocking(ours, False)
            worker.fds[stream] = ours
            worker.theirs.append(theirs)
            self._loop.add_reader(ours, self._has_printed, worker, stream)

    def _close(self, worker: _Worker) -> None:
        for stream, fd in worker.fds.items():
            (self._loop.remove_reader if stream else self._loop.remove_writer)(fd)
        worker.close()

    def _start(
        self,
        worker: _Worker,
        words: Sequence[bytes],
        environ: Sequence[tuple[str, str]],
        fds: Sequence[int],
    ) -> None:
        token = next(self._tokens)
        added = [f"NSQ_{name}={value}".encode() for name, value in environ]
        self._starter.start(token, words, added, fds)
        worker.token, worker.error, worker.since = token, "", time.monotonic()
        self._running[token] = worker
        self._watch(worker)

    def _cannot_start(self, exc: OSError) -> str:
        return f"cannot start {self._settings.words[0]} ({exc.strerror})"

    def _collect(self) -> None:
        """Act on the ends of commands."""
        ended = self._starter.read()
        if ended is None:
            self._start_again()
            return
        for token, status, error in ended:
            worker = self._running.pop(token, None)
            if worker is not None:
                self._ended(worker, status, error)

    def _ended(self, worker: _Worker, status: int, error: int) -> None:
        for stream in (1, 2):
            self._read(worker, stream)
            self._lines(worker, stream, is_end=True)
        worker.token = 0
        if self._settings.is_persistent:
            self._close(worker)
        if self._is_stopping:
            if worker.work and not status and not self._settings.is_persistent:
                worker.work.popleft().report(DELIVERED)
            if not self._running:
                self._loop.stop()
        elif self._settings.is_persistent:
            self._stopped_running(worker, status, error)
        else:
            self._run_ended(worker, status, error)

    def _start_again(self) -> None:
        """The process that starts commands was killed, and they with it."""
        self._loop.remove_reader(self._starter.replies)
        self._starter.lost()
        self._starter = Starter()
        self._loop.add_reader(self._starter.replies, self._collect)
        running, self._running = self._running, {}
        for worker in running.values():
            self._ended(worker, -signal.SIGKILL, 0)

    def _watch(self, worker: _Worker) -> None:
        if self._settings.timeout_s and worker.timer is None:
            self._check_time(worker)

    def _check_time(self, worker: _Worker) -> None:
        worker.timer = None
        if not worker.token or not worker.work or worker.error:
            return
        left_s = worker.since + self._settings.timeout_s - time.monotonic()
        if left_s <= 0:
            limit = f"{self._settings.timeout_s:g} s"
            self._end(worker, f"{self._settings.words[0]} took longer than {limit}")
        else:
            worker.timer = self._loop.call_later(left_s, self._check_time, worker)

    def _end(self, worker: _Worker, error: str) -> None:
        worker.error = error
        self._starter.signal(worker.token, signal.SIGTERM)
        self._loop.call_later(KILL_AFTER_S, self._starter.signal, worker.token, signal.SIGKILL)

    def _begin_stop(self) -> None:
        self._is_stopping = True
        for token, worker in self._running.items():
            if 0 in worker.fds and not worker.work:  # it has a moment to end by itself
                self._loop.remove_writer(worker.fds[0])
                os.close(worker.fds.pop(0))
                self._loop.call_later(GRACE_S, self._starter.signal, token, signal.SIGTERM)
            else:
                self._starter.signal(token, signal.SIGTERM)
        if not self._running:
            self._loop.stop()

    # -- what they print ------------------------------------------------------------------------

    def _has_printed(self, worker: _Worker, stream: int) -> None:
        self._read(worker, stream)
        self._go_on()  # where it has answered

    def _read(self, worker: _Worker, stream: int) -> None:
        with contextlib.suppress(BlockingIOError):
            while stream in worker.fds:
                data = os.read(worker.fds[stream], 1 << 16)
                worker.rests[stream] += data
                self._lines(worker, stream)
                if len(data) < 1 << 16:
                    return

    def _lines(self, worker: _Worker, stream: int, *, is_end: bool = False) -> None:
        is_answer = stream == 1 and self._settings.is_persistent
        *lines, rest = worker.rests[stream].split(b"\n")
        if len(rest) > MAX_LINE or (rest and is_end and not is_answer):
            lines.append(rest)
            rest = b""
        worker.rests[stream] = b"" if is_end else rest
        if is_answer and not worker.error:
            self._answered(worker, lines)
        if is_answer or not lines:
            return
        try:
            self._write(stream, b"".join(b"%b%b\n" % (self._tag(worker), line) for line in lines))
        except OutputError as exc:
            self._failure = self._failure or exc

    def _tag(self, worker: _Worker) -> bytes:
        if not self._settings.is_tagged or not worker.work:
            return b""
        messages = worker.work[0].parcels[0].messages
        what = messages.topic.encode()
        return b"%b | " % (what if self._settings.batch > 1 else what + b" " + messages[0].id)


def _held(data: bytes) -> IO[bytes]:
    """A file of these bytes, read from the beginning, that goes when it is closed."""
    if hasattr(os, "memfd_create"):
        file: IO[bytes] = os.fdopen(os.memfd_create("message"), "r+b", buffering=0)
    else:
        file = tempfile.TemporaryFile(buffering=0)  # noqa: SIM115
    file.write(data)
    file.seek(0)
    return file


def _line(parcel: Parcel) -> bytes:
    messages, [body] = parcel.messages, parcel.bodies
    [message] = messages
    if body is not message.body:
        where = messages.topic, messages.nsqd
        changed = Envelope(*where, message.id, message.timestamp_ns, message.attempts, body)
        return encode_many(*where, (changed,))
    return encode_many(messages.topic, messages.nsqd, messages)


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
