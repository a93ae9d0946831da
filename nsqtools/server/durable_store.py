"""The loop's side of ``--durable``: what happens in a turn of the loop becomes one transaction.

A publish is confirmed when its transaction is committed, and only then is it in a queue.
Deliveries, answers and delays are written with the next publish, or within `_DELAY_S`, and not
waited for: a kill before that only delivers a message again.

A queue has at most ``--mem-queue-size`` messages in memory, the older ones; the others are counted,
and read by page when those are gone. The order is that of their *turns*: the number that is a
message's id, or, where that is not above all before (it was put together early, or came back), the
next one. Turns are given in the order of the transactions, so what a page may read was committed.
What is deferred is in the database only, until its time has come.

When the disk is full publishes are refused, and what else happened is kept and tried again. After
any other failure of the database it is rewritten, whole, and publishes are refused until then.
Trap: what is written must be in memory in one piece with its commit, moved messages first, or a
page could take a message for another one.
"""

from __future__ import annotations

import errno
import sqlite3
import sys
import time
from asyncio import AbstractEventLoop, Future, TimerHandle
from collections import Counter, deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from itertools import groupby, repeat
from operator import itemgetter
from typing import Any, TypeVar

from nsqtools.server.daemon_log import DaemonLog
from nsqtools.server.durable_database import (
    COME_DUE_AT_ONCE,
    Changes,
    Database,
    Done,
    Publish,
    Row,
    remove,
)
from nsqtools.server.durable_path import DurablePath
from nsqtools.server.options import NsqdOptions
from nsqtools.server.queues.data_path import Queues
from nsqtools.server.queues.message_buffer import BackendError, DiskHealth, QueueBacklog, Undo
from nsqtools.server.queues.queue_files import Block, one_thread
from nsqtools.server.queues.queued_message import (
    BODY_AT,
    ID_AT,
    LargePublish,
    attempts_of,
    with_attempts,
)

_DELAY_S = 0.02  # for what no publisher waits for
_RETRY_S = 0.5
_STEP_BYTES = 4 << 20
_ROW_BYTES = 100  # that a message counts besides its frame: what it costs in a turn of the loop
_STEP_COUNT = 300  # publishes: their answers are one turn
_PAGE_COUNT = 256
_AGAIN_NS = 20_000_000
_FULL = "the disk is full; consume, or make room"

T = TypeVar("T")

Moved = Callable[[BackendError | None, list[bytes], list[float]], None]
"""Gets messages, and the delay that each has left."""


class DurableStore:
    """The database of a running nsqd."""

    def __init__(
        self,
        files: DurablePath,
        options: NsqdOptions,
        health: DiskHealth,
        loop: AbstractEventLoop,
        log: DaemonLog,
    ) -> None:
        self._executor = one_thread("nsqd-durable")
        # a clock that was set back must not give new messages the ids of those that are there
        self.written_ns = files.written_ns()
        self._clock_ns = time.time_ns() - time.monotonic_ns()  # jumps of the wall clock do nothing
        self.database = files.open(self.due_ns(options.max_req_timeout))
        self._files = files
        self.health = health
        self.loop = loop
        self._log = log
        self._steps = [Changes()]  # not written yet; the last one is open
        self._is_writing = self._is_due = self._is_over = False
        self.is_strict = False  # what was finished counts as in flight until it is written
        self._broken = ""  # why the file has to be rewritten
        self._timer: TimerHandle | None = None
        self._flushed: list[Future[None]] = []
        self._found = {queue.name: queue for queue in self.database.queues if queue.name}
        self._last_number = max((queue.number for queue in self.database.queues), default=0)
        self._backlogs: dict[int, DurableBacklog] = {}

    @property
    def now_ns(self) -> int:
        """The time that due times are on."""
        return self._clock_ns + time.monotonic_ns()

    def due_ns(self, delay_s: float) -> int:
        """Return when a delay is over, or the last time that a database can hold."""
        return min(sys.maxsize, self.now_ns + int(delay_s * 1_000_000_000))

    # queues

    def listed(self) -> Queues:
        """Return the topics and channels that were there."""
        return {name: queue.is_paused for name, queue in self._found.items()}

    def register(self, backlog: DurableBacklog) -> None:
        """Give a backlog its number, and its counts."""
        found = self._found.pop(backlog.name, None)
        if found is not None:
            backlog.number, backlog.is_paused = found.number, found.is_paused
            backlog.unread, backlog.deferred_count = found.waiting, found.deferred
            backlog.last_turn = found.last_turn
        else:
            self._last_number += 1
            backlog.number = self._last_number
            self.note_queue(backlog)
        self._backlogs[backlog.number] = backlog

    def note_queue(self, backlog: DurableBacklog) -> None:
        """Write that a queue is there, and whether it is paused."""
        self.changes.queues.append((backlog.number, backlog.name, backlog.is_paused))
        self.soon()

    def drop(self, backlog: DurableBacklog) -> None:
        """Write that all of a queue is gone; its rows are removed bit by bit."""
        del self._backlogs[backlog.number]
        self.changes.queues.append((backlog.number, None, False))
        self.soon()

    # changes

    @property
    def changes(self) -> Changes:
        """What is being collected; call `soon` after adding to it."""
        return self._steps[-1]

    def soon(self) -> None:
        """Write what was collected after a moment."""
        if not (self._timer or self._is_writing or self._is_over):
            self._timer = self.loop.call_later(_DELAY_S, self._write)

    def publish(
        self,
        backlogs: Sequence[QueueBacklog],
        messages: Sequence[bytes],
        dues_ns: Iterable[int],
        done: Done,
        takes: Sequence[tuple[int, int, int]] = (),
        adds: Sequence[Row] = (),
        *,
        is_admitted: bool = False,
    ) -> None:
        """Put messages into the queues that are stored, and call back when they are there, or not.

        ``takes`` are rows that go with it, as (queue, due, turn), and ``adds`` rows that come. Only
        what ``is_admitted`` is not refused while the disk is nearly full.
        """
        rows: list[Row] = [*adds]
        made = [attempts_of(message) - 1 for message in messages]
        if any(made):
            messages = [with_attempts(each, -n) for each, n in zip(messages, made, strict=True)]
        stored = [each for each in backlogs if isinstance(each, DurableBacklog)]
        for backlog in stored:
            number = backlog.number
            turns = backlog.new_sequence(messages)
            rows += zip(repeat(number), dues_ns, turns, made, messages, strict=False)
        size = sum(map(len, messages)) + _ROW_BYTES * len(messages)
        self._add(Publish(rows, list(takes), done, is_admitted), size * len(stored))

    def publish_large(
        self, backlogs: Sequence[QueueBacklog], large: LargePublish, done: Done
    ) -> None:
        """Put the messages of a large publish into queues, as `publish` does.

        The thread makes their rows, some at a time and in one transaction, and nothing of them
        stays in memory: the queues read them by page.
        """
        count = large.count
        stored = [backlog for backlog in backlogs if isinstance(backlog, DurableBacklog)]
        starts = {backlog.number: backlog.reserve_turns(count) for backlog in stored}

        def make_rows() -> Iterator[list[Row]]:
            made = 0
            for messages in large.make_messages():
                yield [
                    (number, 0, turn, 0, message)
                    for number, start in starts.items()
                    for turn, message in enumerate(messages, start + made)
                ]
                made += len(messages)

        counts = dict.fromkeys(starts, count)
        size = (large.size + _ROW_BYTES * count) * len(stored)
        self._add(Publish([], [], done, False, make_rows, counts), size)

    def _add(self, publish: Publish, size: int) -> None:
        changes = self.changes
        changes.publishes.append(publish)
        changes.size += size
        if changes.size >= _STEP_BYTES or len(changes.publishes) >= _STEP_COUNT:
            self._steps.append(Changes())
        self.at_once()

    def at_once(self) -> None:
        """Write what was collected at the end of this turn of the loop."""
        if self._broken:
            self.soon()  # not at once: a file is not to be rewritten for each
        elif not self._is_due:
            self._is_due = True
            self.loop.call_soon(self._write)

    def move(
        self,
        source: QueueBacklog,
        targets: Sequence[QueueBacklog],
        count: int,
        max_bytes: int,
        moved: Moved,
    ) -> bool:
        """Put messages of a topic into its channels; return whether there are any.

        ``moved`` gets them back. What fails stays where it was. On a disk that is nearly full only
        queues that are empty get any: consuming makes room.
        """
        stored = source if isinstance(source, DurableBacklog) else None
        number = 0 if stored is None else stored.number  # one that is empty is false
        messages = source.get(count, max_bytes)
        takes = [] if stored is None else stored.places(messages)
        deferred: list[tuple[int, int, bytes]] = []
        if stored is not None and not messages:
            deferred = self.look(lambda database: database.deferred(number, count), [])
        for due_ns, turn, message in deferred:
            messages.append(message)
            takes.append((number, due_ns, turn))
        if not messages:
            return False
        if stored is not None and not deferred:
            stored.moving += len(messages)
        dues_ns = [due_ns for _, due_ns, _ in takes] or [0] * len(messages)

        def done(error: BackendError | None) -> None:
            is_there = stored is None or stored.number == number  # not emptied meanwhile
            if stored is not None and is_there and not deferred:
                stored.moving -= len(messages)
            if error is not None and is_there and not deferred:
                source.put_back(messages)
            elif error is None and is_there and deferred:
                source.deferred_count -= len(messages)
            elif error is None and stored is not None:
                stored.forget(messages)
            left_ns = (due_ns and due_ns - self.now_ns for due_ns in dues_ns)
            moved(error, messages, [max(0.0, each / 1_000_000_000) for each in left_ns])

        is_admitted = not any(map(len, targets))
        self.publish(targets, messages, dues_ns, done, takes, is_admitted=is_admitted)
        return True

    # transactions

    def _write(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        if self._is_writing or self._is_over:
            return  # what is pending is written next
        self._is_due = False
        pending = [step for step in self._steps if step != Changes()]
        if not (pending or self._flushed or self._broken or self.database.dropped):
            return
        step = pending[0] if pending else Changes()
        self._steps = pending[1:] or [Changes()]
        if step.publishes:
            self.health.check_free_space()
        self._is_writing = True
        flushed, self._flushed = ([], self._flushed) if pending[1:] else (self._flushed, [])
        low = self.health.low
        written = [each for each in step.publishes if each.is_admitted or not low]
        work = _Transaction(self.database, step, written, self._broken, low, flushed)
        self._executor.submit(self._commit, work)

    def _commit(self, work: _Transaction) -> None:
        """Write changes, on the thread; a checkpoint comes after the answers."""
        try:
            if work.broken:
                work.database = self._files.renew(work.database, work.broken)
                work.broken = ""
            commit = work.database.commit
            try:
                work.come_due = commit(work.step, work.written)
            except sqlite3.Error as exc:
                if not (work.written and _is_full(exc)):
                    raise
                work.refusal, work.written = _FULL, []
                work.come_due = commit(work.step, [])
        except Exception as exc:
            work.written = []
            work.failure = _FULL if _is_full(exc) else str(exc) or repr(exc)
            work.broken = work.broken or ("" if _is_full(exc) else work.failure)
        self.loop.call_soon_threadsafe(self._committed, work)
        if not work.failure:
            try:
                work.database.checkpoint_if_due()
            except sqlite3.Error as exc:
                if not _is_full(exc):
                    self.loop.call_soon_threadsafe(self.damaged, str(exc))

    def _committed(self, work: _Transaction) -> None:
        if self._is_over:
            return
        self._is_writing = False
        step, health = work.step, self.health
        is_new = work.database is not self.database
        if is_new:
            old, self.database = self.database, work.database
            old.close()
            with suppress(OSError):  # the next start removes it
                remove(old.path)
        if is_new or not self._broken:
            self._broken = work.broken
        publishes = step.publishes
        reason = work.failure or work.refusal
        if work.failure:
            text = self._files.describe(work.failure)
            if health.error != text:
                self._log.error(f"DURABLE: {text}; publishes are refused until that is over")
            health.error = reason = text
            self._steps.insert(0, step)
            publishes = [publish for each in self._steps for publish in each.publishes]
            for each in self._steps:  # what else happened is tried again, in its order
                each.publishes, each.size = [], 0
            work.flushed += self._flushed  # they wait for this one, too
            self._flushed = []
            self._timer = self.loop.call_later(_RETRY_S, self._write)
        else:
            if publishes or is_new:
                health.error = reason if reason == _FULL else ""
            self._apply(work)
        if is_new:  # whatever became of the changes
            self._log.info(f"DURABLE: {self.database.path} was rewritten, and is used now")
            for backlog in self._backlogs.values():
                backlog.recount()
        for future in work.flushed:
            if work.failure and not future.done():
                future.set_exception(OSError(reason))
            elif not future.done():
                future.set_result(None)
        if not work.failure:
            self.loop.call_soon(self._write)  # whatever the publishers do
        written = set(map(id, work.written))
        for publish in publishes:
            try:
                publish.done(None if id(publish) in written else BackendError(reason))
            except Exception as exc:  # of one client: the others are waiting
                self._log.error(f"DURABLE: failed to answer a publish - {exc!r}")

    def _apply(self, work: _Transaction) -> None:
        backlogs, step = self._backlogs, work.step
        for number, _, due_ns, _, _ in step.moved:
            if not due_ns and number in backlogs:
                backlogs[number].moved()
        for number, _, _ in step.come_due:
            if number in backlogs:
                backlogs[number].came_due(work.come_due[number])
        for number, _, _ in step.finished if self.is_strict else ():
            if number in backlogs:
                backlogs[number].finish_written()
        for publish in work.written:
            for number, count in publish.counts.items():
                if number in backlogs:  # else it was emptied meanwhile
                    backlogs[number].unread += count
            for number, rows in groupby(publish.rows, itemgetter(0)):
                if number in backlogs:  # else it was emptied meanwhile
                    backlogs[number].committed(list(rows))

    def look(self, read: Callable[[Database], T], otherwise: T) -> T:
        """Return what is read; ``otherwise`` when that fails, and have the database rewritten."""
        try:
            return read(self.database)
        except sqlite3.Error as exc:
            self.damaged(str(exc))
            return otherwise

    def damaged(self, reason: str) -> None:
        """Have the database rewritten: it cannot be read, or a sync failed."""
        self._log.error(f"DURABLE: {self._files.describe(reason)}; it will be rewritten")
        self._broken = reason
        self.soon()

    # the end

    async def flush(self) -> None:
        """Wait until all that was collected is committed. Raises ``OSError``."""
        done: Future[None] = self.loop.create_future()
        self._flushed.append(done)
        self._write()
        await done

    def close(self) -> None:
        """Write what is left, and close."""
        self._end()
        try:
            for step in self._steps:
                self.database.commit(step, [])
        except sqlite3.Error as exc:
            self._log.error(f"DURABLE: {self._files.describe(str(exc))}; messages come again")
        self.database.close()

    def abandon(self) -> None:
        """Close, and write nothing, as after a kill."""
        self._end()
        self.database.close()

    def _end(self) -> None:
        self._is_over = True
        if self._timer is not None:
            self._timer.cancel()
        self._executor.shutdown()


@dataclass(slots=True)
class _Transaction:
    """Changes, and what became of them."""

    database: Database  # another one when it was rewritten
    step: Changes
    written: list[Publish]  # of its publishes
    broken: str  # why it has to be
    refusal: str  # of other publishes
    flushed: list[Future[None]]
    failure: str = ""  # of everything
    come_due: Counter[int] = field(default_factory=Counter)


def _is_full(exc: Exception) -> bool:
    return getattr(exc, "sqlite_errorcode", 0) & 0xFF == sqlite3.SQLITE_FULL or (
        isinstance(exc, OSError) and exc.errno in (errno.ENOSPC, errno.EDQUOT)
    )


class DurableBacklog(QueueBacklog):
    """What waits in a topic or a channel, and how many messages of it are deferred.

    ``name`` is ``TOPIC`` or ``TOPIC:CHANNEL``.
    """

    def __init__(self, mem_queue_size: int, store: DurableStore, name: str) -> None:
        super().__init__(mem_queue_size, None, store.health)
        self.name = name
        self.number = self.last_turn = self.unread = 0
        self.is_paused = False
        self._store = store
        self._cursor = 0  # what waits with a turn up to here has been read
        self.moving = 0  # to the end of the queue, or to channels, and not committed
        self._turns: dict[bytes, int] = {}  # by id, of messages whose number it is not
        self._next_due_s: float | None = 0.0  # unknown
        self._is_coming_due = self._is_unreadable = False
        store.register(self)

    @property
    def disk_depth(self) -> int:
        """How many messages are not in memory."""
        return self.unread + self.moving

    @property
    def has_messages(self) -> bool:
        """Whether `get` has anything to try."""
        return bool(self._memory) or (self.unread > 0 and not self._is_unreadable)

    @property
    def exceeds_memory(self) -> bool:
        """False: a message is read from the database only when memory has room for it."""
        return False

    # in

    def new_sequence(self, messages: Sequence[bytes]) -> list[int]:
        """Return the turns of new messages."""
        turns = [int(message[ID_AT:BODY_AT], 16) for message in messages]
        if turns[0] <= self.last_turn or turns != sorted(set(turns)):
            start = max(self.last_turn, *turns) + 1
            turns = list(range(start, start + len(turns)))
        self.last_turn = turns[-1]
        return turns

    def reserve_turns(self, count: int) -> int:
        """Return the first of as many turns, which no other message gets."""
        start = self.last_turn + 1
        self.last_turn += count
        return start

    def committed(self, rows: list[Row]) -> None:
        """Take messages that are in the database now."""
        if rows[0][1]:
            self.deferred_count += len(rows)
            self._watch(min(due_ns for _, due_ns, *_ in rows))
            return
        fits = 0
        if not self.unread:
            fits = self.mem_queue_size - len(self._memory)
            if fits < len(rows):
                fits += self._room()
            fits = max(0, min(fits, len(rows)))
        for _, _, turn, made, message in rows[:fits]:
            self._load(turn, with_attempts(message, made))
        self.unread += len(rows) - fits

    def _load(self, turn: int, message: bytes) -> None:
        message_id = message[ID_AT:BODY_AT]
        if turn != int(message_id, 16):
            self._turns[message_id] = turn
        self._memory.append(message)
        self._cursor = turn

    def put(self, messages: Sequence[bytes], blocks: Sequence[Block] = ()) -> Undo:
        """Take back messages that were delivered: in memory, or else at the end of the queue."""
        fits = 0 if self.unread or self.moving else self.mem_queue_size + self._room()
        fits = max(0, min(len(messages), fits - len(self._memory)))
        self.put_in_memory(messages[:fits])
        for message in messages[fits:]:
            self._move(message, 0)
            self.moving += 1
        return Undo(fits, None)

    def _move(self, message: bytes, due_ns: int) -> None:
        turn = self._turn(message[ID_AT:BODY_AT])
        self.last_turn += 1
        changes = self._store.changes
        changes.delivered.pop((self.number, turn), None)
        made = attempts_of(message) - 1 & 0xFFFF
        changes.moved.append((self.number, turn, due_ns, self.last_turn, made))
        self._store.soon()

    def _turn(self, message_id: bytes) -> int:
        return self._turns.pop(message_id, 0) or int(message_id, 16)

    def moved(self) -> None:
        """A message is at the end of the queue now."""
        self.moving -= 1
        self.unread += 1
        self._wake()

    # out

    def get(self, count: int, max_bytes: int) -> list[bytes]:
        """Remove and return the oldest messages: at least one, unless the database fails."""
        if not self._memory and self.has_messages:
            self._read(count, max_bytes)
        return super().get(count, max_bytes)

    def _read(self, count: int, max_bytes: int) -> None:
        count = min(self.unread, max(count, min(self.mem_queue_size, _PAGE_COUNT)))
        rows: list[tuple[int, bytes]] = self._store.look(
            lambda database: database.page(self.number, self._cursor, count, max_bytes), []
        )
        self._is_unreadable = not rows  # until it is counted again
        self.unread -= len(rows)
        for turn, message in rows:
            self._load(turn, message)
        self.last_turn = max(self.last_turn, self._cursor)

    def delivered(self, messages: Sequence[bytes]) -> None:
        """Note the attempts of messages that were delivered."""
        turns, number = self._turns, self.number
        noted = self._store.changes.delivered
        for message in messages:
            message_id = message[ID_AT:BODY_AT]
            turn = turns.get(message_id) or int(message_id, 16)
            noted[number, turn] = attempts_of(message)
        self._store.soon()

    def finished(self, message_ids: Iterable[bytes]) -> None:
        """Remove messages for good."""
        changes, number = self._store.changes, self.number
        forget = changes.delivered.pop
        for message_id in message_ids:
            turn = self._turn(message_id)
            forget((number, turn), None)
            changes.finished.append((number, 0, turn))
            self.unwritten_finishes += self._store.is_strict
        if self.unwritten_finishes:
            self._store.at_once()
        else:
            self._store.soon()

    def finish_written(self) -> None:
        """It is written that a message was finished."""
        self.unwritten_finishes -= 1
        self._wake()

    def places(self, messages: Sequence[bytes]) -> list[tuple[int, int, int]]:
        """Return the rows of messages, as (queue, due, turn)."""
        ids = [message[ID_AT:BODY_AT] for message in messages]
        return [(self.number, 0, self._turns.get(each) or int(each, 16)) for each in ids]

    def forget(self, messages: Sequence[bytes]) -> None:
        """Forget the turns of messages that are in other queues now."""
        for message in messages:
            self._turns.pop(message[ID_AT:BODY_AT], None)

    def empty(self) -> deque[Any]:
        """Drop everything; return what was in memory, which takes a while to free."""
        self._store.drop(self)
        self.unread = self.moving = self._cursor = self.unwritten_finishes = 0
        self._turns.clear()
        self._next_due_s, self._is_coming_due = None, False
        self._store.register(self)
        return super().empty()

    def delete(self) -> deque[Any]:
        """Drop everything, for good."""
        self._store.drop(self)
        return super().delete()

    def recount(self) -> None:
        """Count again what a file that was rewritten has."""
        unread = self._store.look(
            lambda database: database.number("count(*)", self.number, self._cursor), None
        )
        if unread is not None:
            self.unread, self._is_unreadable = unread, False
        self._next_due_s = 0.0
        self._watch_at(0.0)  # which wakes it, too

    # deferred

    def _watch(self, due_ns: int) -> None:
        store = self._store
        due_s = store.loop.time() + (due_ns - store.now_ns) / 1_000_000_000
        self._next_due_s = due_s if self._next_due_s is None else min(self._next_due_s, due_s)
        self._watch_at(due_s)

    def defer(self, message: bytes, due_s: float) -> None:
        """Keep a message that was delivered until ``due_s``."""
        store = self._store
        due_ns = store.due_ns(due_s - store.loop.time())
        self._move(message, max(1, due_ns))
        self.deferred_count += 1
        self._watch(due_ns)

    def next_due_s(self) -> float | None:
        """Return when to look at what is deferred, None when that comes by itself."""
        return None if self._is_coming_due or not self.deferred_count else self._next_due_s

    def take_due(self, now_s: float, limit: int) -> list[bytes]:
        """Have messages wait, soon, whose time has come; none are returned."""
        due_s = self.next_due_s()
        if due_s is not None and due_s <= now_s:
            self._is_coming_due, self._next_due_s = True, None
            store = self._store
            store.changes.come_due.append((self.number, store.now_ns, self.last_turn))
            self.last_turn += COME_DUE_AT_ONCE
            store.soon()
        return []

    def came_due(self, count: int) -> None:
        """Messages wait now that were deferred."""
        self._is_coming_due = False
        self.deferred_count -= count
        self.unread += count
        next_ns = self._store.look(lambda database: database.next_due_ns(self.number), None)
        if next_ns is not None:
            self._watch(next_ns if count else max(next_ns, self._store.now_ns + _AGAIN_NS))
        if self._next_due_s is not None:  # it may be that of one that is not written yet
            self._watch_at(self._next_due_s)
        self._wake()
