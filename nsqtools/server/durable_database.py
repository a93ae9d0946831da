"""The database of ``--durable``: three tables, one writer, pages for readers, no event loop.

A row is a message of one queue, which is that of a topic or a channel. A waiting message has
``due`` 0, and ``turn``, a sequence number, gives the order. ``due`` of a deferred message is the
time in ns at which it is due. Each row has a CRC of queue and frame, because SQLite does not detect
a flipped bit. The table of queues has the counts, so that a start reads no messages.

The body of a long message is not in its row. One row of the table of bodies has the long bodies of
a transaction, up to `_BODY_BYTES`, for the messages of all channels. So nearly every page is full,
and SQLite copies long rows only once. A trigger deletes the bodies with their last message. A short
message is in its row, once for each channel, because a shared body would cost more than the copy.

A statement runs once for all rows of its kind, which are passed as JSON. After each call of SQLite
a thread has to acquire the interpreter's lock again, and next to a busy loop that costs more than
the row. To extract the columns of a row from an array costs twice as much as to insert it, so the
most frequent rows are objects of integers: queue -> turn -> the rest.

Three weaknesses of SQLite are handled here:

- After a flipped bit it silently discards the rest of a write-ahead log. `wal_damage` checks the
  log before it is opened.
- After a failed sync the content of the disk is unknown. `create_database` writes a new file with
  all intact rows.
- It reports a failed read as damage, although the next read may succeed. `ReadRetry` distinguishes
  the two.
"""

from __future__ import annotations

import json
import os
import shutil
import sqlite3
import sys
import time
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import closing, suppress
from dataclasses import dataclass, field
from pathlib import Path
from struct import iter_unpack, pack, unpack_from
from types import MappingProxyType
from typing import NamedTuple, TypeVar
from zlib import crc32

from nsqtools.errors import ConfigurationError
from nsqtools.files.durable import NEW, sync_folder
from nsqtools.files.opening import data_offsets, open_to_read
from nsqtools.protocol.frames import ID_LENGTH
from nsqtools.records.envelope import bounded_batches
from nsqtools.server.queues.message_buffer import BackendError
from nsqtools.server.queues.queued_message import BODY_AT, with_attempts

_SCHEMA = """
CREATE TABLE queue (number INTEGER PRIMARY KEY, name TEXT UNIQUE, paused INTEGER, crc INTEGER,
    waiting INTEGER, deferred INTEGER, total INTEGER);
CREATE TABLE message (queue INTEGER, due INTEGER, turn INTEGER, attempts INTEGER, crc INTEGER,
    frame BLOB, body INTEGER, PRIMARY KEY (queue, due, turn)) WITHOUT ROWID;
"""
_BODIES = """
CREATE TABLE body (number INTEGER PRIMARY KEY, data BLOB);
CREATE INDEX message_body ON message (body) WHERE body IS NOT NULL;
CREATE TRIGGER delete_body AFTER DELETE ON message
    WHEN OLD.body IS NOT NULL AND NOT EXISTS (SELECT 1 FROM message WHERE body=OLD.body)
    BEGIN DELETE FROM body WHERE number=OLD.body; END;
"""
_PAGE_BYTES = 16384
# Fixed when a database is created.
_LAYOUT = f"PRAGMA page_size={_PAGE_BYTES}; PRAGMA auto_vacuum=incremental;"
_SETTINGS = (
    ("journal_mode", "wal"),
    ("synchronous", 2),  # FULL: a commit returns after its sync
    ("fullfsync", 1),  # macOS: flush the cache of the drive, too
    ("checkpoint_fullfsync", 1),
    ("wal_autocheckpoint", 0),  # `checkpoint_if_due` reports a failure, and this would not
    ("journal_size_limit", 0),  # truncate the log, so that its size shows its content
    ("temp_store", 2),  # MEMORY: a file in /var/tmp would be on another disk, which may be full
    ("cell_size_check", 1),
    ("cache_size", -8192),  # in KiB: the pages of one transaction
)
_APPLICATION_ID = int.from_bytes(b"nsqd", "big")
# user_version. nsqtools 0.3.0 left it and application_id 0: whole frames in pages of 4096 bytes, of
# which a message of more than 960 bytes has one for itself, in a file that never shrinks.
_FORMAT = 1
_QUEUE_COLUMNS = "number,name,paused,crc,waiting,deferred,total"
_COLUMNS_0_3 = "queue,due,turn,attempts,crc,frame"
_COLUMNS = f"{_COLUMNS_0_3},body"
_TABLES = (
    {"queue": _QUEUE_COLUMNS, "message": _COLUMNS_0_3},
    {"queue": _QUEUE_COLUMNS, "message": _COLUMNS, "body": "number,data"},
)
_STAMP = f"PRAGMA application_id={_APPLICATION_ID}; PRAGMA user_version={_FORMAT};"
_ADD_BODIES = f"""BEGIN IMMEDIATE;
    ALTER TABLE message ADD COLUMN body INTEGER; {_BODIES} {_STAMP} COMMIT;"""
# The body of a longer frame is in the table of bodies. At 900 bytes that costs more CPU than a
# whole frame in the row, and a quarter less at 4,000 bytes. Below 1 << _OFFSET_SHIFT.
_LONG_BYTES = 1000
# Long bodies in a row. More of them leave less of the last page empty (4 % at this bound), but one
# message that is not finished keeps them all.
_BODY_BYTES = 1 << 16
# A row has a long frame up to its body, and then the position of the body in the row of bodies. A
# column for the position would make the JSON of new rows more than one integer a row.
_POSITION_BYTES = 4
_ADD_QUEUE = "INSERT INTO queue VALUES (?,?,?,?,0,0,0)"
_RECOUNT = """UPDATE queue SET
    waiting=(SELECT count(*) FROM message WHERE queue=number AND due=0),
    deferred=(SELECT count(*) FROM message WHERE queue=number AND due>0)"""
UNFINISHED = ".new"
# Rows of one statement. The thread encodes their JSON without releasing the interpreter's lock, so
# this bounds a pause of the loop: 3 ms. Their frames have less than `_MAX_OFFSET` bytes.
_INSERT_COUNT = 2000
# Rows of a queue that one transaction moves when they are due, or drops: a bound on its duration.
BATCH_COUNT = 1000
# The size of the log at which it is brought into the file. A start reads the whole log.
_WAL_BYTES = 8 << 20
# Free pages that the file keeps for the next messages, 8 MiB: a short backlog does not resize it.
_SPARE_COUNT = 512
# How long to wait while another program writes.
_TIMEOUT_S = 30.0
# Pages that `Database.shrink` moves at a time, 1 MiB: a publish may have to wait for that.
_SHRINK_COUNT = 64


def _columns(count: int) -> str:
    """Return a subquery j of a JSON array of arrays, with the elements as columns a, b, c ..."""
    names = (f"json_extract(value,'$[{at}]') AS {chr(97 + at)}" for at in range(count))
    return f"(SELECT {', '.join(names)} FROM json_each(:rows)) j"


_BY_QUEUE = """(SELECT CAST(q.key AS INTEGER) AS a, CAST(m.key AS INTEGER) AS b, m.value AS c
    FROM json_each(:rows) q, json_each(q.value) m) j"""
# c has the CRC, and in the lower bits offset and size of the frame.
_CRC_SHIFT, _OFFSET_SHIFT = 31, 10
_MAX_OFFSET = 1 << _CRC_SHIFT - _OFFSET_SHIFT
_ADD_NEW = f"""INTO message SELECT CAST(q.key AS INTEGER), 0, CAST(m.key AS INTEGER), 0,
    m.value >> {_CRC_SHIFT}, substr(:frames, m.value >> {_OFFSET_SHIFT} & {_MAX_OFFSET - 1},
    m.value & {(1 << _OFFSET_SHIFT) - 1}), nullif(CAST(b.key AS INTEGER), 0)
    FROM json_each(:rows) q, json_each(q.value) b, json_each(b.value) m"""
_INSERT_NEW = "INSERT OR IGNORE"  # a damaged key may be that of another message
_ADD_OTHERS = f"INTO message SELECT a, b, c, d, e, substr(:frames, f, g), h FROM {_columns(8)}"
_ADD_BODY = "INSERT INTO body VALUES (?,?)"
_FINISH = f"DELETE FROM message WHERE (queue, due, turn) IN (SELECT a, 0, c FROM {_BY_QUEUE})"
_DELETE = f"DELETE FROM message WHERE (queue, due, turn) IN (SELECT a, b, c FROM {_columns(3)})"
_ROW = "queue = j.a AND message.due = 0 AND message.turn = j.b"
_MOVE = f"UPDATE message SET due = j.c, turn = j.d, attempts = j.e FROM {_columns(5)} WHERE {_ROW}"
# LIMIT keeps SQLite from joining all messages of a queue with the rows of ``m``.
_DELIVER = f"""UPDATE message SET attempts = j.c FROM (SELECT * FROM {_BY_QUEUE} LIMIT -1) j
    WHERE {_ROW}"""
_COUNT = f"""UPDATE queue SET waiting = waiting + j.b, deferred = deferred + j.c,
    total = total + j.b + j.c FROM {_columns(3)} WHERE number = j.a"""
_DUE = f"""FROM message WHERE queue=:queue AND due BETWEEN 1 AND :until_ns
    ORDER BY due, turn LIMIT {BATCH_COUNT}"""
_COME_DUE = f"""INSERT INTO message SELECT queue, 0, :turn + row_number() OVER (ORDER BY due, turn),
    attempts, crc, frame, body FROM (SELECT * {_DUE})"""
_NOT_DEFERRED = f"DELETE FROM message WHERE (queue,due,turn) IN (SELECT queue,due,turn {_DUE})"
_DROP = f"""DELETE FROM message WHERE (queue, due, turn) IN
    (SELECT queue, due, turn FROM message WHERE queue=? LIMIT {BATCH_COUNT})"""
_NOT_LATER = """UPDATE message SET due = :latest_ns - later FROM
    (SELECT due AS d, turn AS t, row_number() OVER (ORDER BY due DESC, turn DESC) AS later
    FROM message WHERE queue=:queue AND due>:latest_ns) WHERE queue=:queue AND due=d AND turn=t"""
_LAST_BODY = "SELECT coalesce(max(number), 0) FROM body"
_READ_BODY = "SELECT data FROM body WHERE number=?"
_ID = f"substr(frame, 19, {ID_LENGTH})"
_TIMESTAMPS = f"""SELECT {_ID}, substr(frame, 9, 8) FROM message
    WHERE +queue=? AND {_ID} IN (SELECT CAST(value AS BLOB) FROM json_each(?))"""
_PAGE = f"""SELECT {_COLUMNS} FROM message
    WHERE queue=? AND due=0 AND turn>? ORDER BY turn LIMIT ?"""
_DEFERRED = f"SELECT {_COLUMNS} FROM message WHERE queue=? AND due>0 ORDER BY due LIMIT ?"

Committed = Callable[[BackendError | None], None]


class DurableQueue(NamedTuple):
    """A row of the table of queues. A queue without a name has been dropped."""

    number: int
    name: str | None
    is_paused: bool
    waiting: int
    deferred: int
    last_turn: int = 0


MessageRow = tuple[int, int, int, int, bytes]
"""A message of a queue: (queue, due time in ns or 0, turn, attempts made, frame)."""


class StoredRow(NamedTuple):
    """A message with the row of its body, if that is in the table of bodies."""

    row: MessageRow
    body: int | None = None
    head: bytes = b""
    """The column of the frame"""
    data: bytes = b""
    """All bodies in the row of the body"""


class _NewBodies:
    """The bodies in each row of long bodies that a transaction adds, by the number of the row."""

    def __init__(self, next_number: Callable[[], int]) -> None:
        self.rows: dict[int, list[memoryview]] = {}
        self._next_number = next_number
        self._number = self._size = 0  # of the last row

    def add(self, frame: bytes) -> tuple[int, bytes]:
        """Add the body of a frame; return the number, and what the row of the message has."""
        part = memoryview(frame)[BODY_AT:]
        if not self.rows or self._size + len(part) > _BODY_BYTES:
            self._number, self._size = self._next_number(), 0
            self.rows[self._number] = []
        position = self._size.to_bytes(_POSITION_BYTES, "big")
        self._size += len(part)
        self.rows[self._number].append(part)
        return self._number, frame[:BODY_AT] + position


class Publish(NamedTuple):
    """New messages, all or none.

    ``replaced`` are rows to delete, as (queue, due, turn). ``is_admitted`` publishes are stored
    even while the disk is nearly full. The thread calls ``make_rows`` for the rows of a large
    publish, and ``counts`` has their number by queue.
    """

    rows: list[MessageRow]
    replaced: list[tuple[int, int, int]]
    on_committed: Committed
    is_admitted: bool
    make_rows: Callable[[], Iterable[list[MessageRow]]] = tuple
    counts: Mapping[int, int] = MappingProxyType({})


@dataclass(slots=True)
class Changes:
    """The changes of one transaction, which are written in the order of the fields."""

    queues: list[tuple[int, str | None, bool]] = field(default_factory=list)
    """(queue, name or None when it is dropped, is paused)"""
    publishes: list[Publish] = field(default_factory=list)
    moved: list[tuple[int, int, int, int, int]] = field(default_factory=list)
    """(queue, turn, due, new turn, attempts)"""
    delivered: dict[tuple[int, int], int] = field(default_factory=dict)
    """(queue, turn) -> attempts"""
    finished: list[tuple[int, int, int]] = field(default_factory=list)
    """(queue, due, turn)"""
    come_due: list[tuple[int, int, int]] = field(default_factory=list)
    """(queue, latest due time in ns, the last used turn: `BATCH_COUNT` turns after it are free)"""
    size: int = 0
    """Bytes of the publishes"""


class Database:
    """An open database. Raises ``sqlite3.Error``, `ConfigurationError`."""

    def __init__(self, path: Path, *, is_new: bool = False) -> None:
        self.path = path
        self.transactions = 0
        self._wal = Path(f"{path}-wal")
        if is_new:
            os.close(os.open(path, os.O_CREAT | os.O_EXCL | os.O_WRONLY | os.O_CLOEXEC, 0o600))
        self._writer = _connect(path, _LAYOUT if is_new else "")
        try:
            if is_new:
                self._writer.executescript(_SCHEMA + _BODIES + _STAMP)
            self.is_current = self._writer.execute("PRAGMA page_size").fetchone() == (_PAGE_BYTES,)
            self._reader = _connect(path)
            self._reader.execute("PRAGMA query_only=1")
            self.queues = _queues_of(self._reader)
        except BaseException:
            self._writer.close()
            raise
        self.dropped = [queue.number for queue in self.queues if queue.name is None]
        self._last_body = -1  # unknown

    # -- writing, on one thread ------------------------------------------------------------------

    def commit(self, step: Changes, publishes: Iterable[Publish]) -> Counter[int]:
        """Write all of a step or nothing, with ``publishes`` in place of its own.

        Return how many deferred messages have come due, by queue.
        """
        run = self._writer.execute
        come_due: Counter[int] = Counter()
        run("BEGIN IMMEDIATE")
        try:
            self._write(step, publishes, come_due)
            # Each transaction removes a batch of rows of one dropped queue, and finally the queue.
            oldest = self.dropped[:1]
            is_gone = bool(oldest) and not run(_DROP, oldest).rowcount
            if is_gone:
                run("DELETE FROM queue WHERE number=?", oldest)
            run("COMMIT")
        except BaseException:
            with suppress(sqlite3.Error):
                run("ROLLBACK")
            raise
        if is_gone:
            del self.dropped[0]
        self.dropped += [number for number, name, _ in step.queues if not name]
        self.transactions += 1
        return come_due

    def _write(self, step: Changes, publishes: Iterable[Publish], come_due: Counter[int]) -> None:
        run = self._writer.execute
        waiting: Counter[int] = Counter()
        deferred: Counter[int] = Counter()
        for number, name, is_paused in step.queues:
            run(
                f"{_ADD_QUEUE} ON CONFLICT (number) DO UPDATE SET name=excluded.name, "
                "paused=excluded.paused, crc=excluded.crc",
                (number, name, is_paused, _name_crc(number, name)),
            )
        finished = list(step.finished)
        rows: list[MessageRow] = []
        for publish in publishes:
            finished += publish.replaced
            rows += publish.rows
            for made_rows in publish.make_rows():
                self._insert(made_rows)
            # The rows of a large publish are not in memory, so they are counted by the publisher.
            waiting.update(publish.counts)
        for start in range(0, len(rows), _INSERT_COUNT):
            self._insert(rows[start : start + _INSERT_COUNT])
        for queue, due_ns, *_ in rows:
            (deferred if due_ns else waiting)[queue] += 1
        newly_deferred = Counter(queue for queue, _, due_ns, *_ in step.moved if due_ns)
        waiting.subtract(newly_deferred)
        deferred.update(newly_deferred)
        finished_turns: dict[int, list[int]] = {}
        for queue, due_ns, turn in finished:
            (deferred if due_ns else waiting)[queue] -= 1
            if not due_ns:
                finished_turns.setdefault(queue, []).append(turn)
        delivered: dict[int, dict[int, int]] = {}
        for (queue, turn), attempts in step.delivered.items():
            delivered.setdefault(queue, {})[turn] = attempts
        for statement, values in (
            (_MOVE, step.moved),
            (_DELIVER, delivered),
            (_FINISH, finished_turns),
            (_DELETE, [key for key in finished if key[1]]),
        ):
            if values:
                run(statement, {"rows": json.dumps(values)})
        for number, until_ns, turn in step.come_due:
            due = {"queue": number, "until_ns": until_ns}
            run(_COME_DUE, due | {"turn": turn})
            count = run(_NOT_DEFERRED, due).rowcount
            come_due[number] += count
            waiting[number] += count
            deferred[number] -= count
        counts = [(queue, waiting[queue], deferred[queue]) for queue in {*waiting, *deferred}]
        if counts:
            run(_COUNT, {"rows": json.dumps(counts)})

    def _insert(self, rows: Iterable[MessageRow], verb: str = "INSERT") -> None:
        """Insert messages. A frame that is in several queues is passed to SQLite once."""
        # By queue, row of bodies or 0, and turn.
        new: dict[int, dict[int, dict[int, int]]] = {}
        others: list[tuple[int | None, ...]] = []
        places: dict[int, tuple[int, int, int | None]] = {}
        heads: list[bytes] = []
        bodies = _NewBodies(self._next_body)
        end = 1  # offsets of SQL begin with 1
        for queue, due_ns, turn, attempts, frame in rows:
            place = places.get(id(frame))
            if place is None:
                head, number = frame, None
                if len(frame) > _LONG_BYTES:
                    number, head = bodies.add(frame)
                places[id(frame)] = place = (end, len(head), number)
                heads.append(head)
                end += len(head)
            offset, size, number = place
            crc = crc32(frame, queue)
            new_rows = new.setdefault(queue, {}).setdefault(number or 0, {})
            if due_ns or attempts or offset >= _MAX_OFFSET or turn in new_rows:
                others.append((queue, due_ns, turn, attempts, crc, *place))
            else:
                new_rows[turn] = crc << _CRC_SHIFT | offset << _OFFSET_SHIFT | size
        for statement, values in ((_ADD_NEW, new), (_ADD_OTHERS, others)):
            if values:
                parameters = {"rows": json.dumps(values), "frames": b"".join(heads)}
                self._writer.execute(f"{verb} {statement}", parameters)
        # A statement for each row: to join and to divide the bodies of a transaction, which exceed
        # the caches of a processor, takes more than to wait for the lock again.
        for number, parts in bodies.rows.items():
            self._writer.execute(_ADD_BODY, (number, b"".join(parts)))

    def _next_body(self) -> int:
        if self._last_body < 0:
            [self._last_body] = self._writer.execute(_LAST_BODY).fetchone()
        self._last_body += 1
        return self._last_body

    def fill(self, queues: Iterable[DurableQueue], rows: Iterable[StoredRow]) -> None:
        """Write all queues and messages of a new database. Raises ``sqlite3.Error``."""
        run = self._writer.execute
        self._writer.executemany(
            _ADD_QUEUE, [(n, name, p, _name_crc(n, name)) for n, name, p, *_ in queues]
        )
        numbers: dict[int, int] = {}  # of bodies, by that in the old file
        for batch in bounded_batches(rows, lambda stored: len(stored.row[4])):
            run("BEGIN")
            self._insert([stored.row for stored in batch if stored.body is None], _INSERT_NEW)
            for (*key, frame), body, head, data in batch:
                if body is None:
                    continue
                # The channels still share the body. With a copy for each, the file might outgrow
                # the disk.
                if body not in numbers:
                    numbers[body] = self._next_body()
                    run(_ADD_BODY, (numbers[body], data))
                values = (*key, crc32(frame, key[0]), head, numbers[body])
                run(f"{_INSERT_NEW} INTO message VALUES (?,?,?,?,?,?,?)", values)
            run("COMMIT")
            run("PRAGMA wal_checkpoint(PASSIVE)").fetchone()
        run(_RECOUNT)
        run("UPDATE queue SET total=waiting+deferred")
        blocked, *_ = run("PRAGMA wal_checkpoint(TRUNCATE)").fetchone()
        if blocked:
            raise sqlite3.OperationalError("the checkpoint of the new file did not end")

    def add_bodies(self) -> None:
        """Add what the format of nsqtools 0.3.0 lacks. Its messages stay as they are.

        Raises ``sqlite3.Error``.
        """
        if _stamp_of(self._writer)[1] == 0:
            self._writer.executescript(_ADD_BODIES)

    def checkpoint_if_due(self) -> None:
        """Bring a large log into the file. Raises ``sqlite3.Error``.

        The file may grow by the size of the log. On a disk without room for that, the log would
        stay, and refuse every change, until another program makes room.
        """
        with suppress(OSError):
            free = shutil.disk_usage(self.path.parent).free
            if self._wal.stat().st_size >= min(_WAL_BYTES, free):
                self._writer.execute("PRAGMA wal_checkpoint(PASSIVE)").fetchone()

    def shrink(self) -> bool:
        """Give a few free pages back to the file system; return whether that made a difference.

        On a nearly full disk, give all of them back, and the log. Raises ``sqlite3.Error``.
        """
        run = self._writer.execute
        is_low = False
        with suppress(OSError):
            is_low = shutil.disk_usage(self.path.parent).free < _WAL_BYTES
        if is_low:
            # Without a wait for readers, which would delay publishes. The next call tries again.
            self._writer.executescript("PRAGMA busy_timeout=0; PRAGMA wal_checkpoint(TRUNCATE)")
            self._writer.executescript(f"PRAGMA busy_timeout={_TIMEOUT_S * 1000:.0f}")
        [free_count] = run("PRAGMA freelist_count").fetchone()
        if free_count <= (0 if is_low else _SPARE_COUNT):
            return False
        # `execute` would stop after the first page.
        self._writer.executescript(f"PRAGMA incremental_vacuum({_SHRINK_COUNT})")
        run("PRAGMA wal_checkpoint(PASSIVE)").fetchone()  # this truncates the file
        return bool(run("PRAGMA freelist_count").fetchone()[0] < free_count)

    def defer_until(self, latest_ns: int) -> None:
        """Make no message due later than ``latest_ns``: the clock may have been set back.

        The messages keep their order, and no two get the same time: the turns of deferred messages
        repeat after a restart, so the due time must make the key unique.
        """
        for queue in self.queues:
            if queue.deferred:
                parameters = {"latest_ns": latest_ns, "queue": queue.number}
                self._writer.execute(_NOT_LATER, parameters)

    # -- reading, on the thread of the loop ------------------------------------------------------

    def page(self, queue: int, after: int, count: int, max_bytes: int) -> list[tuple[int, bytes]]:
        """Return up to ``count`` waiting messages after a turn, as (turn, frame).

        The queue must have ``count`` messages. Fewer are returned when the next one is damaged or
        ``max_bytes`` are reached. Raises ``sqlite3.Error`` when the first one is damaged.
        """
        page: list[tuple[int, bytes]] = []
        try:
            rows = _stored_rows(self._reader, _PAGE, (queue, after, count))
            for (_, _, turn, attempts, frame), *_ in rows:
                if not frame:
                    break
                if page and turn <= page[-1][0]:
                    page.pop()  # one of the two turns is damaged
                    break
                page.append((turn, with_attempts(frame, attempts)))
                max_bytes -= len(frame)
                if max_bytes <= 0:
                    break
        except sqlite3.Error:
            if not page:
                raise
        if not page:
            raise sqlite3.DatabaseError("messages that were counted are missing or damaged")
        return page

    def deferred(self, queue: int, count: int, max_bytes: int) -> list[tuple[int, int, bytes]]:
        """Return the first deferred messages as (due, turn, frame). Raises ``sqlite3.Error``.

        They are up to ``count``, and fewer when ``max_bytes`` are reached.
        """
        deferred: list[tuple[int, int, bytes]] = []
        rows = _stored_rows(self._reader, _DEFERRED, (queue, count))
        for (_, due, turn, attempts, frame), *_ in rows:
            if frame:
                deferred.append((due, turn, with_attempts(frame, attempts)))
                max_bytes -= len(frame)
                if max_bytes <= 0:
                    break
        return deferred

    def next_due_ns(self, queue: int) -> int | None:
        """Return when the first deferred message is due. Raises ``sqlite3.Error``."""
        select = "SELECT due FROM message WHERE queue=? AND due>0 ORDER BY due LIMIT 1"
        row: tuple[int] | None = self._reader.execute(select, (queue,)).fetchone()
        return row[0] if row else None

    def aggregate(self, expression: str, queue: int, after: int = 0) -> int:
        """Aggregate the waiting messages after a turn. Raises ``sqlite3.Error``."""
        select = f"SELECT {expression} FROM message WHERE queue=? AND due=0 AND turn>?"
        return self._reader.execute(select, (queue, after)).fetchone()[0] or 0

    def index_ids(self) -> None:
        """Create the index without which `timestamps` reads all messages.

        Raises ``sqlite3.Error``.
        """
        self._writer.execute(f"CREATE INDEX IF NOT EXISTS id ON message ({_ID})")

    def timestamps(self, queue: int, ids: Iterable[bytes]) -> dict[bytes, int]:
        """Return the timestamps of the messages of a queue whose id is in ``ids``, by id.

        They include messages in flight and deferred ones. Raises ``sqlite3.Error``.
        """
        id_list = json.dumps([id_.decode("latin-1") for id_ in ids])
        rows = self._reader.execute(_TIMESTAMPS, (queue, id_list))
        return {id_: int.from_bytes(stamp, "big", signed=True) for id_, stamp in rows}

    def spare_bytes(self) -> int:
        """Return the bytes in free pages of the file."""
        select = "SELECT freelist_count * page_size FROM pragma_freelist_count, pragma_page_size"
        try:
            return int(self._reader.execute(select).fetchone()[0])
        except sqlite3.Error:
            return 0

    def close(self) -> None:
        """Close, and bring the log into the file if that succeeds."""
        for connection in (self._reader, self._writer):
            with suppress(sqlite3.Error):
                connection.close()


def _connect(path: Path, layout: str = "") -> sqlite3.Connection:
    connection = sqlite3.connect(
        f"{path.absolute().as_uri()}?mode=rw",
        uri=True,
        isolation_level=None,
        check_same_thread=False,
        timeout=_TIMEOUT_S,
    )
    try:
        connection.executescript(f"PRAGMA secure_delete=0; {layout}")
        _check_format(connection, path)  # first: a setting may change the file
        for name, value in _SETTINGS:
            connection.execute(f"PRAGMA {name}={value}").fetchone()
            row = connection.execute(f"PRAGMA {name}").fetchone()
            if row != (value,):
                raise ConfigurationError(
                    f"cannot keep messages in {path}: SQLite has {name} {row and row[0]}",
                    hint="--durable needs a local file system, on which a sync is a sync.",
                )
    except BaseException:
        connection.close()
        raise
    return connection


def _stamp_of(connection: sqlite3.Connection) -> tuple[int, int]:
    select = "SELECT application_id, user_version FROM pragma_application_id, pragma_user_version"
    stamp: tuple[int, int] = connection.execute(select).fetchone()
    return stamp


def _check_format(connection: sqlite3.Connection, path: Path) -> None:
    """Raise `ConfigurationError` for a database of another program, or of a later version."""
    application_id, version = _stamp_of(connection)
    columns = "(SELECT group_concat(name) FROM pragma_table_info(m.name))"
    user_tables = "type='table' AND name NOT GLOB 'sqlite_*'"
    select = f"SELECT name, {columns} FROM sqlite_master m WHERE {user_tables}"
    tables = dict(connection.execute(select).fetchall())
    expected = _TABLES[1 if version else 0]
    if application_id not in (0, _APPLICATION_ID) or tables not in ({}, expected):
        stamp = f"application_id {application_id}, user_version {version}"
        raise ConfigurationError(
            f"{path} is a database of another program, or of another version ({stamp}, "
            f"tables {', '.join(sorted(tables)) or 'none'})",
            hint="Open it with the program that wrote it; this one does not change it.",
        )
    if version > _FORMAT:
        raise ConfigurationError(
            f"{path} has format {version} of --durable, of a later version of nsqtools "
            f"(this one reads up to {_FORMAT})",
            hint="Use the version of nsqtools that wrote it.",
        )


def _stored_rows(
    connection: sqlite3.Connection, select: str, values: Sequence[int]
) -> Iterator[StoredRow]:
    """Yield the rows of a statement that selects `_COLUMNS`, with an empty frame if damaged.

    Bodies are read once for successive messages that have the same ones.
    """
    number, data = None, b""
    for *key, crc, head, body in connection.execute(select, values):
        if body is not None and body != number:
            [data] = connection.execute(_READ_BODY, (body,)).fetchone() or (b"",)
            number = body
        frame = head
        try:
            if body is not None:
                start = int.from_bytes(head[BODY_AT:], "big")
                end = start + int.from_bytes(head[:4], "big") + 4 - BODY_AT
                frame = head[:BODY_AT] + data[start:end]
            is_intact = crc32(frame, key[0]) == crc and len(frame) >= BODY_AT
        except TypeError:  # damage may change the type of a value
            is_intact = False
        yield StoredRow((*key, frame if is_intact else b""), body, head, data)


def _name_crc(number: int, name: str | None) -> int:
    return crc32((name or "").encode(), number)


def _queues_of(connection: sqlite3.Connection) -> list[DurableQueue]:
    queues = []
    for number, name, is_paused, crc, *counts in connection.execute("SELECT * FROM queue"):
        if crc != _name_crc(number, name):
            raise sqlite3.DatabaseError("the name of a topic or channel is not what was written")
        waiting, deferred, total = counts
        if waiting + deferred != total:
            waiting, deferred = connection.execute(
                "SELECT count(*) FILTER (WHERE due=0), count(*) FILTER (WHERE due>0) "
                "FROM message WHERE queue=?",
                (number,),
            ).fetchone()
        select = "SELECT max(turn) FROM message WHERE queue=? AND due=0"
        last_turn = connection.execute(select, (number,)).fetchone()[0] or 0
        queues.append(DurableQueue(number, name, bool(is_paused), waiting, deferred, last_turn))
    return queues


# -- all messages ----------------------------------------------------------------------------------


_READ_ATTEMPTS = 5  # without a pause; afterwards the file itself is read
_READ_PAUSE_S = 0.2
# How long a disk may fail. A bus reset or a failover to another path takes less.
_READ_PATIENCE_S = 20.0
_TRANSIENT = (sqlite3.SQLITE_IOERR, sqlite3.SQLITE_CORRUPT, sqlite3.SQLITE_NOTADB)
_SECTORS = 4096

T = TypeVar("T")


class ReadRetry:
    """Decides whether to repeat a failed read.

    SQLite reports some I/O errors as damage. So a failed read is repeated, and while the file
    itself cannot be read page by page either, it is repeated after a pause, for `_READ_PATIENCE_S`.
    It is damage when the read fails although the whole file was readable before and after it.
    """

    def __init__(self, path: Path) -> None:
        self._path = path
        self._failures = 0
        self._until_s = 0.0
        self._was_readable = False

    def succeeded(self) -> None:
        """Start counting again: the next failure is at another place of the file."""
        self._failures = 0
        self._was_readable = False

    def is_due(self, error: sqlite3.DatabaseError) -> bool:
        """Return whether to repeat the read now. Pauses before that while the disk fails."""
        if getattr(error, "sqlite_errorcode", 0) & 0xFF not in _TRANSIENT:
            return False
        self._failures += 1
        if self._failures < _READ_ATTEMPTS:
            return True
        now_s = time.monotonic()
        if self._failures == _READ_ATTEMPTS:
            self._until_s = now_s + _READ_PATIENCE_S
        if now_s >= self._until_s:
            return False
        if _is_readable(self._path):
            is_damage, self._was_readable = self._was_readable, True
            return not is_damage
        self._was_readable = False
        time.sleep(_READ_PAUSE_S)
        return True


def read_patiently(path: Path, read: Callable[[], T]) -> T:
    """Return ``read()``, repeated as long as `ReadRetry` allows. Raises the last error."""
    retry = ReadRetry(path)
    while True:
        try:
            return read()
        except sqlite3.DatabaseError as exc:
            if not retry.is_due(exc):
                raise


def _is_readable(path: Path) -> bool:
    try:
        for suffix in ("", "-wal"):
            with suppress(FileNotFoundError), open_to_read(Path(f"{path}{suffix}")) as file:
                for at in data_offsets(file.fileno(), _SECTORS):
                    os.pread(file.fileno(), _SECTORS, at)
    except OSError:
        return False
    return True


def copy_readable(source: Path, target: Path) -> None:
    """Copy a file durably to a new one, with zeros for unreadable sectors. Raises ``OSError``."""
    descriptor = os.open(target, NEW | os.O_WRONLY, 0o600)
    with os.fdopen(descriptor, "wb") as copy, open_to_read(source) as file:
        for at in data_offsets(file.fileno(), _SECTORS):
            try:
                data = os.pread(file.fileno(), _SECTORS, at)
            except OSError:
                continue
            copy.seek(at)
            copy.write(data)
        copy.truncate(os.fstat(file.fileno()).st_size)
        copy.flush()
        os.fsync(copy.fileno())


def read_queues(path: Path) -> list[DurableQueue]:
    """Return the queues. Raises ``sqlite3.Error``, `ConfigurationError`."""

    def read() -> list[DurableQueue]:
        with closing(_connect(path)) as connection:
            return _queues_of(connection)

    return read_patiently(path, read)


def all_rows(path: Path, queue: int | None = None) -> Iterator[MessageRow]:
    """Yield every intact message, as `stored_rows` does."""
    return (stored.row for stored in stored_rows(path, queue))


def stored_rows(path: Path, queue: int | None = None) -> Iterator[StoredRow]:
    """Yield every intact message, of one queue or all.

    The rows are read forward to the first damage, and then backward from the end to the last one.
    Raises ``sqlite3.Error``, `ConfigurationError`.
    """
    key = "queue,due,turn"
    of_queue = "" if queue is None else f"queue={queue} AND "
    backward = " ORDER BY queue DESC, due DESC, turn DESC"
    columns = 3
    if queue is not None:
        # SQLite would read the queue from its start for a comparison of all three columns.
        key, columns = "due,turn", 2
    first, end = (-1,) * columns, (sys.maxsize,) * columns
    with closing(read_patiently(path, lambda: _connect(path))) as connection:
        is_0_3 = read_patiently(path, lambda: _stamp_of(connection)[1] == 0)
        selected = f"{_COLUMNS_0_3}, NULL" if is_0_3 else _COLUMNS
        for last, sign, order in ((first, ">", ""), (end, "<", backward)):
            marks = ",".join("?" * columns)
            select = f"SELECT {selected} FROM message WHERE {of_queue}({key}){sign}({marks}){order}"
            retry, is_whole = ReadRetry(path), False
            while not is_whole:
                try:
                    for stored in _stored_rows(connection, select, last):
                        *key_values, frame = stored.row
                        if not frame or any(type(value) is not int for value in key_values):
                            continue
                        yield stored
                        position = stored.row[:3][-columns:]
                        # A damaged key may be out of order. Continuing from it would repeat rows.
                        if (position > last) == (sign == ">"):
                            last = position
                            retry.succeeded()
                    is_whole = True
                except sqlite3.DatabaseError as exc:
                    if not retry.is_due(exc):
                        break  # continue from the other end
            if is_whole:
                return


def remove_database(path: Path) -> None:
    """Remove a closed database with its log."""
    for suffix in ("", "-wal", "-shm"):
        Path(f"{path}{suffix}").unlink(missing_ok=True)


def create_database(path: Path, queues: Iterable[DurableQueue], rows: Iterable[StoredRow]) -> None:
    """Write a new database, atomically. Raises ``sqlite3.Error``, ``OSError``.

    A kill leaves a file with the suffix `UNFINISHED`.
    """
    unfinished = path.with_suffix(UNFINISHED)
    remove_database(unfinished)
    try:
        with closing(Database(unfinished, is_new=True)) as database:
            database.fill(queues, rows)
        unfinished.replace(path)
    finally:
        remove_database(unfinished)
    sync_folder(path.parent)


# -- the log that a kill left ----------------------------------------------------------------------

_HEADER = 32
_FRAME = 24
_BIG = 0x377F0683
_WORD = 0xFFFFFFFF


def wal_damage(path: Path) -> tuple[str, bytes]:
    """Return the damage of a write-ahead log and a log of its intact frames, or two empty values.

    A kill leaves an incomplete transaction at the end, and a power failure may leave holes in it.
    No client got an OK for that transaction, so it is not damage and must not be read. A commit
    after the first bad frame has another cause. When there are several, the transactions between
    them were confirmed, and their intact frames are worth saving. Raises ``OSError``.
    """
    content = b""
    with suppress(FileNotFoundError), open_to_read(path) as file:
        content = file.read(_HEADER)
        if any(content):  # otherwise SQLite ignores the log, which may be a hole
            content += file.read()
    if len(content) <= _HEADER:
        return "", b""
    magic, _, page_size = unpack_from(">III", content)
    order = ">" if magic == _BIG else "<"
    stored = seed = unpack_from(">II", content, 24)
    if _checksum(content[:24], (0, 0), order) != stored or page_size < 512:
        return "the header is damaged", b""
    saved = [content[:_HEADER]]
    bad = commits = 0
    size = _FRAME + page_size
    for number, at in enumerate(range(_HEADER, len(content) - size + 1, size), 1):
        head, page = content[at : at + 16], content[at + _FRAME : at + size]
        previous, stored = stored, unpack_from(">II", content, at + 16)
        if head[8:] != content[16:24]:  # a frame of an earlier log that this one overwrites
            bad = bad or number
            continue
        is_good = _checksum(head[:8] + page, previous, order) == stored
        bad = bad or (0 if is_good else number)
        if bad and head[4:8] != bytes(4) and (is_good or bad == number):
            commits += 1
        if is_good:
            seed = _checksum(head[:8] + page, seed, order)
            saved.append(head + pack(">II", *seed) + page)
    if not commits:
        return "", b""
    return f"frame {bad} is damaged", b"".join(saved) if commits > 1 else b""


def _checksum(data: bytes, seed: tuple[int, int], order: str) -> tuple[int, int]:
    first, second = seed
    for a, b in iter_unpack(f"{order}II", data):
        first = first + a + second & _WORD
        second = second + b + first & _WORD
    return first, second
