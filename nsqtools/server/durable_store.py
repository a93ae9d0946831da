"""The event loop's part of ``--durable``: the changes of a loop iteration become one transaction.

A publish is confirmed when its transaction is committed, and only then are its messages in a queue.
Deliveries, answers and delays are written with the next publish, or within `_WRITE_DELAY_S`.
Nothing waits for them, because a kill before the write only causes a redelivery.

A queue has at most ``--mem-queue-size`` messages in memory, the oldest ones. The others are only
counted, and read page by page when memory is empty. The order is that of their *turns*. The turn of
a message is its id as a number, or the next free number if the id is not larger than all turns
before it, because the id was generated early or the message was requeued. Turns are assigned in the
order of the transactions, so a page contains committed messages only. Deferred messages are in the
database only, until they are due.

When the disk is full, publishes are refused and all other changes are kept and tried again. After
any other failure the whole database is rewritten, and publishes are refused until then.

Trap: after a commit the counts and the memory must change in one step of the loop, moved messages
first. Otherwise a page could contain messages that are not counted.
"""

from __future__ import annotations

import errno
import sqlite3
import sys
import time
from asyncio import AbstractEventLoop, Future, TimerHandle
from collections import Counter, deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from itertools import groupby, repeat
from operator import itemgetter
from typing import Any, TypeVar

from nsqtools.server.daemon_log import DaemonLog
from nsqtools.server.durable_database import (
    BATCH_COUNT,
    Changes,
    Committed,
    Database,
    MessageRow,
    Publish,
)
from nsqtools.server.durable_path import DurablePath
from nsqtools.server.options import NsqdOptions
from nsqtools.server.queues.data_path import Queues
from nsqtools.server.queues.message_buffer import (
    BackendError,
    ChannelCallbacks,
    DiskHealth,
    QueueBacklog,
    Undo,
)
from nsqtools.server.queues.queue_files import Block, one_thread
from nsqtools.server.queues.queued_message import (
    BODY_AT,
    ID_AT,
    LargePublish,
    attempts_of,
    with_attempts,
)

# Changes that no publisher waits for share a transaction, and so a sync, within this time.
_WRITE_DELAY_S = 0.02
_RETRY_S = 0.5  # after a failed transaction
# Between two steps of giving free pages back, which take some ms each while a publish may wait.
_SHRINK_PAUSE_S = 0.05
# The limits of one transaction. Its size bounds the latency of its publishes and the memory. Its
# publishes are answered in one iteration of the loop.
_STEP_BYTES = 4 << 20
_STEP_COUNT = 300
# Bytes that a message counts in addition to its frame: the cost of a small message in the loop.
_ROW_BYTES = 100
_PAGE_COUNT = 256  # messages that a page reads ahead, unless the memory is smaller
# Nothing was due although it should have been: the clocks differ a little, so look again later.
_RECHECK_NS = 20_000_000
_FULL = "the disk is full; consume, or make room"

T = TypeVar("T")

Moved = Callable[[BackendError | None, list[bytes], list[float]], None]
"""Called with an error or None, messages, and the remaining delay of each."""


class DurableStore:
    """The database of a running nsqd.

    With ``is_strict`` a finished message counts as in flight until its row is deleted, so that a
    kill redelivers few messages, and `Database.timestamps` is fast.
    """

    def __init__(
        self,
        files: DurablePath,
        options: NsqdOptions,
        health: DiskHealth,
        loop: AbstractEventLoop,
        log: DaemonLog,
        *,
        is_strict: bool = False,
    ) -> None:
        self._executor = one_thread("nsqd-durable")
        # New ids start after this time. Otherwise they would repeat the ids of stored messages if
        # the clock was set back.
        self.written_ns = files.written_ns()
        # Due times are wall-clock times that do not follow a jump of the wall clock.
        self._clock_ns = time.time_ns() - time.monotonic_ns()
        self.database = files.migrate(files.open(self.due_ns(options.max_req_timeout)))
        self.is_strict = is_strict
        if is_strict:
            self.database.index_ids()
        self._files = files
        self.health = health
        self.loop = loop
        self._log = log
        self._steps = [Changes()]  # not written yet; the last one collects changes
        self._is_writing = self._is_scheduled = self._is_closed = False
        self._damage = ""  # the reason to rewrite the file
        self._timer: TimerHandle | None = None
        self._shrink_timer: TimerHandle | None = None
        self._flushes: list[Future[None]] = []
        # The queues of the file that no backlog has claimed yet.
        self._stored_queues = {queue.name: queue for queue in self.database.queues if queue.name}
        self._last_number = max((queue.number for queue in self.database.queues), default=0)
        self._backlogs: dict[int, DurableBacklog] = {}
        self.write_soon()  # continues what the last run did when it was idle

    @property
    def now_ns(self) -> int:
        """The current time on the clock of due times."""
        return self._clock_ns + time.monotonic_ns()

    def due_ns(self, delay_s: float) -> int:
        """Return the due time after a delay, at most the largest integer of the database."""
        return min(sys.maxsize, self.now_ns + int(delay_s * 1_000_000_000))

    # queues

    def listed(self) -> Queues:
        """Return the topics and channels of the database."""
        return {name: queue.is_paused for name, queue in self._stored_queues.items()}

    def register(self, backlog: DurableBacklog) -> None:
        """Set number and counts of a backlog from the stored queue, or give it a new number."""
        queue = self._stored_queues.pop(backlog.name, None)
        if queue is not None:
            backlog.number, backlog.is_paused = queue.number, queue.is_paused
            backlog.unread, backlog.deferred_count = queue.waiting, queue.deferred
            backlog.last_turn = queue.last_turn
        else:
            self._last_number += 1
            backlog.number = self._last_number
            self.note_queue(backlog)
        self._backlogs[backlog.number] = backlog

    def note_queue(self, backlog: DurableBacklog) -> None:
        """Write that a queue exists, and whether it is paused."""
        self.changes.queues.append((backlog.number, backlog.name, backlog.is_paused))
        self.write_soon()

    def drop(self, backlog: DurableBacklog) -> None:
        """Write that a queue is deleted. Later transactions remove its rows in batches."""
        del self._backlogs[backlog.number]
        self.changes.queues.append((backlog.number, None, False))
        self.write_soon()

    # changes

    @property
    def changes(self) -> Changes:
        """The changes to write next. Call `write_soon` after adding to them."""
        return self._steps[-1]

    def write_soon(self) -> None:
        """Write the changes within `_WRITE_DELAY_S`."""
        if not (self._timer or self._is_writing or self._is_closed):
            self._timer = self.loop.call_later(_WRITE_DELAY_S, self._write)

    def publish(
        self,
        backlogs: Sequence[QueueBacklog],
        messages: Sequence[bytes],
        dues_ns: Iterable[int],
        on_committed: Committed,
        replaced: Sequence[tuple[int, int, int]] = (),
        rows: Sequence[MessageRow] = (),
        *,
        is_admitted: bool = False,
    ) -> None:
        """Store messages in those queues that are in the database, in one transaction.

        Args:
            on_committed: Called with None after the commit, or with the error.
            replaced: Rows to delete in the same transaction, as (queue, due, turn).
            rows: Rows to add in the same transaction.
            is_admitted: Store them even while the disk is nearly full.
        """
        rows = list(rows)
        # A row has the attempts in a column, and the frame of a new message, which queues share.
        made = [attempts_of(message) - 1 for message in messages]
        if any(made):
            messages = [
                with_attempts(message, -attempts)
                for message, attempts in zip(messages, made, strict=True)
            ]
        stored = [backlog for backlog in backlogs if isinstance(backlog, DurableBacklog)]
        for backlog in stored:
            number = backlog.number
            turns = backlog.new_turns(messages)
            rows += zip(repeat(number), dues_ns, turns, made, messages, strict=False)
        size = sum(map(len, messages)) + _ROW_BYTES * len(messages)
        self._add(Publish(rows, list(replaced), on_committed, is_admitted), size * len(stored))

    def publish_large(
        self, backlogs: Sequence[QueueBacklog], large: LargePublish, on_committed: Committed
    ) -> None:
        """Store the messages of a large publish, as `publish` does.

        The thread creates their rows in groups, within one transaction. No message stays in memory:
        the queues read them page by page.
        """
        count = large.count
        stored = [backlog for backlog in backlogs if isinstance(backlog, DurableBacklog)]
        starts = {backlog.number: backlog.reserve_turns(count) for backlog in stored}

        def make_rows() -> Iterator[list[MessageRow]]:
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
        self._add(Publish([], [], on_committed, False, make_rows, counts), size)

    def _add(self, publish: Publish, size: int) -> None:
        changes = self.changes
        changes.publishes.append(publish)
        changes.size += size
        if changes.size >= _STEP_BYTES or len(changes.publishes) >= _STEP_COUNT:
            self._steps.append(Changes())
        self.write_now()

    def write_now(self) -> None:
        """Write the changes at the end of this iteration of the loop."""
        if self._damage:
            self.write_soon()  # the next write rewrites the file, so let several changes share it
        elif not self._is_scheduled:
            self._is_scheduled = True
            self.loop.call_soon(self._write)

    def move(
        self,
        source: QueueBacklog,
        targets: Sequence[QueueBacklog],
        count: int,
        max_bytes: int,
        on_moved: Moved,
    ) -> bool:
        """Move messages of a topic to its channels; return whether it has any.

        ``on_moved`` is called with the messages. After an error they stay in the topic. While the
        disk is nearly full only empty channels get messages, because consuming them frees space.
        """
        stored = source if isinstance(source, DurableBacklog) else None
        number = 0 if stored is None else stored.number  # not `if stored`: an empty one is false
        messages = source.get(count, max_bytes)
        replaced = [] if stored is None else stored.row_keys(messages)
        deferred: list[tuple[int, int, bytes]] = []
        if stored is not None and not messages:
            deferred = self.read(lambda database: database.deferred(number, count, max_bytes), [])
        for due_ns, turn, message in deferred:
            messages.append(message)
            replaced.append((number, due_ns, turn))
        if not messages:
            return False
        if stored is not None and not deferred:
            stored.moving += len(messages)
        dues_ns = [due_ns for _, due_ns, _ in replaced] or [0] * len(messages)

        def on_committed(error: BackendError | None) -> None:
            is_same = stored is None or stored.number == number  # emptying changes the number
            if stored is not None and is_same and not deferred:
                stored.moving -= len(messages)
            if error is not None and is_same and not deferred:
                source.put_back(messages)
            elif error is None and is_same and deferred:
                source.deferred_count -= len(messages)
            elif error is None and stored is not None:
                stored.forget(messages)
            delays_ns = (due_ns and due_ns - self.now_ns for due_ns in dues_ns)
            delays_s = [max(0.0, delay_ns / 1_000_000_000) for delay_ns in delays_ns]
            on_moved(error, messages, delays_s)

        is_admitted = not any(map(len, targets))
        self.publish(targets, messages, dues_ns, on_committed, replaced, is_admitted=is_admitted)
        return True

    # transactions

    def _write(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        if self._is_writing or self._is_closed:
            return  # the end of the current transaction starts the next one
        self._is_scheduled = False
        pending = [step for step in self._steps if step != Changes()]
        if not (pending or self._flushes or self._damage or self.database.dropped):
            if self._shrink_timer is None:
                self._shrink_timer = self.loop.call_later(_SHRINK_PAUSE_S, self._shrink)
            return
        step = pending[0] if pending else Changes()
        self._steps = pending[1:] or [Changes()]
        if step.publishes:
            self.health.check_free_space()
        self._is_writing = True
        flushes, self._flushes = ([], self._flushes) if pending[1:] else (self._flushes, [])
        low = self.health.low
        admitted = [publish for publish in step.publishes if publish.is_admitted or not low]
        transaction = _Transaction(self.database, step, admitted, self._damage, low, flushes)
        self._executor.submit(self._commit, transaction)

    def _commit(self, transaction: _Transaction) -> None:
        """Write changes, on the thread. A checkpoint follows after the publishers' answers."""
        try:
            if transaction.damage:
                transaction.database = self._files.renew(transaction.database, transaction.damage)
                transaction.damage = ""
                if self.is_strict:
                    transaction.database.index_ids()
            commit = transaction.database.commit
            try:
                transaction.come_due = commit(transaction.step, transaction.written)
            except sqlite3.Error as exc:
                if not (transaction.written and _is_full(exc)):
                    raise
                # The other changes need less space, and finished messages free some.
                transaction.refusal, transaction.written = _FULL, []
                transaction.come_due = commit(transaction.step, [])
        except Exception as exc:
            transaction.written = []
            transaction.failure = _FULL if _is_full(exc) else str(exc) or repr(exc)
            if not (transaction.damage or _is_full(exc)):
                transaction.damage = transaction.failure
        self.loop.call_soon_threadsafe(self._after_commit, transaction)
        # Under load nsqd is never idle. Without room for the next transaction, it would then keep a
        # log of up to 8 MiB for good.
        is_short = bool(transaction.refusal) or transaction.failure == _FULL
        if is_short or not transaction.failure:
            self._tidy(transaction.database, may_shrink=is_short)

    def _shrink(self) -> None:
        self._shrink_timer = None
        if not (self._is_writing or self._is_scheduled or self._timer or self._is_closed):
            self._executor.submit(self._tidy, self.database, may_shrink=True)

    def _tidy(self, database: Database, *, may_shrink: bool) -> None:
        """Bring a large log into the file, and shrink the file if nsqd is idle or needs room."""
        try:
            database.checkpoint_if_due()
            if may_shrink and database.shrink():
                self.loop.call_soon_threadsafe(self._write)  # which calls `_shrink` after a pause
        except sqlite3.Error as exc:
            if not _is_full(exc):
                self.loop.call_soon_threadsafe(self.report_damage, str(exc))

    def _after_commit(self, transaction: _Transaction) -> None:
        if self._is_closed:
            return
        self._is_writing = False
        step, health = transaction.step, self.health
        is_new = transaction.database is not self.database
        if is_new:
            old, self.database = self.database, transaction.database
            old.close()
        if is_new or not self._damage:
            self._damage = transaction.damage
        publishes = step.publishes
        reason = transaction.failure or transaction.refusal
        if transaction.failure:
            text = self._files.describe(transaction.failure)
            if health.error != text:
                self._log.error(f"DURABLE: {text}; publishes are refused until that is over")
            health.error = reason = text
            self._steps.insert(0, step)
            publishes = [publish for pending in self._steps for publish in pending.publishes]
            for pending in self._steps:  # the other changes are tried again, in their order
                pending.publishes, pending.size = [], 0
            # A flush that began during this transaction fails as well.
            transaction.flushes += self._flushes
            self._flushes = []
            self._timer = self.loop.call_later(_RETRY_S, self._write)
        else:
            if publishes or is_new:
                health.error = reason if reason == _FULL else ""
            self._apply(transaction)
        if is_new:  # even if the changes failed
            self._log.info(f"DURABLE: {self.database.path} was rewritten, and is used now")
            for backlog in self._backlogs.values():
                backlog.recount()
        for future in transaction.flushes:
            if transaction.failure and not future.done():
                future.set_exception(OSError(reason))
            elif not future.done():
                future.set_result(None)
        if not transaction.failure:
            # Scheduled before the callbacks below, which may fail.
            self.loop.call_soon(self._write)
        written = set(map(id, transaction.written))
        for publish in publishes:
            try:
                publish.on_committed(None if id(publish) in written else BackendError(reason))
            except Exception as exc:  # one client's: the others still get their answers
                self._log.error(f"DURABLE: failed to answer a publish - {exc!r}")

    def _apply(self, transaction: _Transaction) -> None:
        # A queue that was emptied meanwhile is not in `_backlogs`: it has a new number.
        backlogs, step = self._backlogs, transaction.step
        for number, _, due_ns, _, _ in step.moved:
            if not due_ns and number in backlogs:
                backlogs[number].move_written()
        for number, _, _ in step.come_due:
            if number in backlogs:
                backlogs[number].due_written(transaction.come_due[number])
        for number, _, _ in step.finished if self.is_strict else ():
            if number in backlogs:
                backlogs[number].finish_written()
        for publish in transaction.written:
            for number, count in publish.counts.items():
                if number in backlogs:
                    backlogs[number].unread += count
            for number, rows in groupby(publish.rows, itemgetter(0)):
                if number in backlogs:
                    backlogs[number].publish_written(list(rows))

    def read(self, read: Callable[[Database], T], default: T) -> T:
        """Return ``read(database)``. After two errors return ``default``, rewrite the database."""
        for is_first in (True, False):
            try:
                return read(self.database)
            except sqlite3.Error as exc:
                if not is_first:
                    self.report_damage(str(exc))
        return default

    def report_damage(self, reason: str) -> None:
        """Rewrite the database with the next transaction: a read or a sync has failed."""
        self._log.error(f"DURABLE: {self._files.describe(reason)}; it will be rewritten")
        self._damage = reason
        self.write_soon()

    # the end

    async def flush(self) -> None:
        """Wait until all changes are committed. Raises ``OSError``."""
        flush: Future[None] = self.loop.create_future()
        self._flushes.append(flush)
        self._write()
        await flush

    def close(self) -> None:
        """Write the remaining changes and close."""
        self._end()
        try:
            for step in self._steps:
                self.database.commit(step, [])
        except sqlite3.Error as exc:
            self._log.error(f"DURABLE: {self._files.describe(str(exc))}; messages come again")
        self.database.close()

    def abandon(self) -> None:
        """Close without writing anything, as after a kill."""
        self._end()
        self.database.close()

    def _end(self) -> None:
        self._is_closed = True
        for timer in (self._timer, self._shrink_timer):
            if timer is not None:
                timer.cancel()
        self._executor.shutdown()


@dataclass(slots=True)
class _Transaction:
    """Changes and the result of writing them."""

    database: Database  # a new one after a rewrite
    step: Changes
    written: list[Publish]  # the publishes that are stored
    damage: str  # the reason to rewrite the database
    refusal: str  # the error of the other publishes
    flushes: list[Future[None]]
    failure: str = ""  # the error when nothing was written
    come_due: Counter[int] = field(default_factory=Counter)


def _is_full(exc: Exception) -> bool:
    return getattr(exc, "sqlite_errorcode", 0) & 0xFF == sqlite3.SQLITE_FULL or (
        isinstance(exc, OSError) and exc.errno in (errno.ENOSPC, errno.EDQUOT)
    )


class DurableBacklog(QueueBacklog):
    """The waiting messages of a topic or a channel, and the number of deferred ones.

    ``name`` is ``TOPIC`` or ``TOPIC:CHANNEL``. ``unread`` counts the waiting messages that are only
    in the database.
    """

    def __init__(
        self, mem_queue_size: int, store: DurableStore, name: str, callbacks: ChannelCallbacks
    ) -> None:
        super().__init__(mem_queue_size, None, store.health, callbacks)
        self.name = name
        self.number = self.last_turn = self.unread = 0
        self.is_paused = False
        self._store = store
        self._cursor = 0  # the turn up to which waiting messages have been read
        # Messages on their way to the end of the queue, or to channels, until it is committed.
        self.moving = 0
        self._turns: dict[bytes, int] = {}  # by id, where the turn is not the id as a number
        self._next_due_s: float | None = 0.0  # at first unknown, so ask the database
        self._is_coming_due = self._is_unreadable = False
        store.register(self)

    @property
    def disk_depth(self) -> int:
        """The number of messages that are not in memory."""
        return self.unread + self.moving

    @property
    def has_messages(self) -> bool:
        """Whether `get` has memory or rows to read."""
        return bool(self._memory) or (self.unread > 0 and not self._is_unreadable)

    @property
    def exceeds_memory(self) -> bool:
        """False: a message is read from the database only when memory has room for it."""
        return False

    # -- incoming messages -----------------------------------------------------------------------

    def new_turns(self, messages: Sequence[bytes]) -> list[int]:
        """Assign turns to new messages."""
        turns = [int(message[ID_AT:BODY_AT], 16) for message in messages]
        if turns[0] <= self.last_turn or turns != sorted(set(turns)):
            start = max(self.last_turn, *turns) + 1
            turns = list(range(start, start + len(turns)))
        self.last_turn = turns[-1]
        return turns

    def reserve_turns(self, count: int) -> int:
        """Reserve ``count`` turns; return the first one."""
        start = self.last_turn + 1
        self.last_turn += count
        return start

    def publish_written(self, rows: list[MessageRow]) -> None:
        """Add messages that have been committed, to memory as far as it has room."""
        if rows[0][1]:
            self.deferred_count += len(rows)
            self._watch(min(due_ns for _, due_ns, *_ in rows))
            return
        fits = 0
        # Unread messages are older. While there are any, new ones stay in the database as well.
        if not self.unread:
            fits = self.mem_queue_size - self._memory.count
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
        """Queue delivered messages again, in memory if it has room, or at the end of the queue."""
        # Messages behind these must not overtake them, so memory is only for a queue without any.
        fits = 0 if self.unread or self.moving else self.mem_queue_size + self._room()
        fits = max(0, min(len(messages), fits - self._memory.count))
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
        self._store.write_soon()

    def _turn(self, message_id: bytes) -> int:
        return self._turns.pop(message_id, 0) or int(message_id, 16)

    def move_written(self) -> None:
        """Count a message that has been moved to the end of the queue."""
        self.moving -= 1
        self.unread += 1
        self._wake()

    # -- deliveries and answers ------------------------------------------------------------------

    def get(self, count: int, max_bytes: int) -> list[bytes]:
        """Remove and return the oldest messages: at least one, unless the database fails."""
        if not self._memory and self.has_messages:
            self._read(count, max_bytes)
        return super().get(count, max_bytes)

    def _read(self, count: int, max_bytes: int) -> None:
        count = min(self.unread, max(count, min(self.mem_queue_size, _PAGE_COUNT)))
        rows: list[tuple[int, bytes]] = self._store.read(
            lambda database: database.page(self.number, self._cursor, count, max_bytes), []
        )
        self._is_unreadable = not rows  # until `recount`
        self.unread -= len(rows)
        for turn, message in rows:
            self._load(turn, message)
        self.last_turn = max(self.last_turn, self._cursor)

    def delivered(self, messages: Sequence[bytes]) -> None:
        """Write the attempts of delivered messages."""
        turns, number = self._turns, self.number
        attempts_by_row = self._store.changes.delivered
        for message in messages:
            message_id = message[ID_AT:BODY_AT]
            turn = turns.get(message_id) or int(message_id, 16)
            attempts_by_row[number, turn] = attempts_of(message)
        self._store.write_soon()

    def finished(self, message_ids: Iterable[bytes]) -> None:
        """Delete finished messages."""
        changes, number = self._store.changes, self.number
        forget = changes.delivered.pop
        for message_id in message_ids:
            turn = self._turn(message_id)
            forget((number, turn), None)
            changes.finished.append((number, 0, turn))
            self.unwritten_finishes += self._store.is_strict
        if self.unwritten_finishes:
            self._store.write_now()
        else:
            self._store.write_soon()

    def finish_written(self) -> None:
        """Count a finished message whose row has been deleted."""
        self.unwritten_finishes -= 1
        self._wake()

    def row_keys(self, messages: Sequence[bytes]) -> list[tuple[int, int, int]]:
        """Return the keys of messages, as (queue, due, turn)."""
        ids = [message[ID_AT:BODY_AT] for message in messages]
        return [(self.number, 0, self._turns.get(id_) or int(id_, 16)) for id_ in ids]

    def forget(self, messages: Sequence[bytes]) -> None:
        """Forget the turns of messages that have been moved to other queues."""
        for message in messages:
            self._turns.pop(message[ID_AT:BODY_AT], None)

    def empty(self) -> deque[Any]:
        """Drop everything; return the messages of the memory, which take a while to free."""
        self._store.drop(self)
        self.unread = self.moving = self._cursor = self.unwritten_finishes = 0
        self._turns.clear()
        self._next_due_s, self._is_coming_due = None, False
        self._store.register(self)
        return super().empty()

    def delete(self) -> deque[Any]:
        """Drop everything before the queue is deleted."""
        self._store.drop(self)
        return super().delete()

    def recount(self) -> None:
        """Count the unread messages again, after the file was rewritten."""
        unread = self._store.read(
            lambda database: database.aggregate("count(*)", self.number, self._cursor), None
        )
        if unread is not None:
            self.unread, self._is_unreadable = unread, False
        self._next_due_s = 0.0
        self._watch_at(0.0)  # also wakes the channel

    # -- deferred messages -----------------------------------------------------------------------

    def _watch(self, due_ns: int) -> None:
        store = self._store
        due_s = store.loop.time() + (due_ns - store.now_ns) / 1_000_000_000
        self._next_due_s = due_s if self._next_due_s is None else min(self._next_due_s, due_s)
        self._watch_at(due_s)

    def defer(self, message: bytes, due_s: float) -> None:
        """Defer a delivered message until ``due_s``."""
        store = self._store
        due_ns = store.due_ns(due_s - store.loop.time())
        self._move(message, max(1, due_ns))
        self.deferred_count += 1
        self._watch(due_ns)

    def next_due_s(self) -> float | None:
        """Return when to call `take_due`, None while the database moves due messages."""
        return None if self._is_coming_due or not self.deferred_count else self._next_due_s

    def take_due(self, now_s: float, limit: int) -> list[bytes]:
        """Let the database queue the messages that are due. Returns none: `due_written` follows."""
        due_s = self.next_due_s()
        if due_s is not None and due_s <= now_s:
            self._is_coming_due, self._next_due_s = True, None
            store = self._store
            store.changes.come_due.append((self.number, store.now_ns, self.last_turn))
            self.last_turn += BATCH_COUNT
            store.write_soon()
        return []

    def due_written(self, count: int) -> None:
        """Count deferred messages that have been queued."""
        self._is_coming_due = False
        self.deferred_count -= count
        self.unread += count
        next_ns = self._store.read(lambda database: database.next_due_ns(self.number), None)
        if next_ns is not None:
            self._watch(next_ns if count else max(next_ns, self._store.now_ns + _RECHECK_NS))
        # It may be the due time of a message that is not written yet.
        if self._next_due_s is not None:
            self._watch_at(self._next_due_s)
        self._wake()
