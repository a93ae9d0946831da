"""The database of ``--durable``: two tables, one writer, pages for readers. It knows no loop.

A row is a message of one queue, a topic's or a channel's. What waits has ``due`` 0 and is read in
the order of ``turn``; what is deferred has the time in ns at which it is due. Each row carries a
CRC of queue and frame, because SQLite delivers a flipped bit. A table of queues has the counts, so
that a start reads no message. n channels keep n copies, as the queue files of nsqd do: one tree,
and so one insert and one delete for a message, against three of each for a shared body.

A statement runs once for all rows of its kind, which go in as JSON: between two calls of SQLite a
thread takes the interpreter's lock again, and with a busy loop that costs more than the row.

What SQLite does not do by itself: it drops all of a write-ahead log after a flipped bit without a
word (`wal_damage` looks before it is opened), after a failed sync it is unknown what a disk has
(`create` makes a new file out of all rows that are whole), and a read that fails is reported as
damage, although the next one may succeed (`ReadRetry` tells the two apart).
"""

from __future__ import annotations

import json
import os
import sqlite3
import sys
import time
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import closing, suppress
from dataclasses import dataclass, field
from itertools import islice
from pathlib import Path
from struct import iter_unpack, pack, unpack_from
from types import MappingProxyType
from typing import NamedTuple, TypeVar
from zlib import crc32

from nsqtools.errors import ConfigurationError
from nsqtools.files.durable import NEW, sync_folder
from nsqtools.files.opening import data_offsets, open_to_read
from nsqtools.protocol.frames import ID_LENGTH
from nsqtools.server.queues.message_buffer import BackendError
from nsqtools.server.queues.queued_message import with_attempts

_SCHEMA = """
CREATE TABLE queue (number INTEGER PRIMARY KEY, name TEXT UNIQUE, paused INTEGER, crc INTEGER,
    waiting INTEGER, deferred INTEGER, total INTEGER);
CREATE TABLE message (queue INTEGER, due INTEGER, turn INTEGER, attempts INTEGER, crc INTEGER,
    frame BLOB, PRIMARY KEY (queue, due, turn)) WITHOUT ROWID;
"""
_SETTINGS = (
    ("journal_mode", "wal"),
    ("synchronous", 2),  # FULL: a commit returns after its sync
    ("fullfsync", 1),  # of macOS
    ("checkpoint_fullfsync", 1),
    ("wal_autocheckpoint", 0),  # `Database.checkpoint` says when it fails
    ("journal_size_limit", 0),  # so that the size of the file shows what is in it
    ("cell_size_check", 1),
    ("cache_size", -8192),
)
_APPLICATION_ID = int.from_bytes(b"nsqd", "big")
_FORMAT = 1  # user_version; nsqtools 0.3.0 left both 0
_TABLES = {
    "queue": "number,name,paused,crc,waiting,deferred,total",
    "message": "queue,due,turn,attempts,crc,frame",
}
_STAMP = f"PRAGMA application_id={_APPLICATION_ID}; PRAGMA user_version={_FORMAT};"
_ADD_QUEUE = "INSERT INTO queue VALUES (?,?,?,?,0,0,0)"
_RECOUNT = """UPDATE queue SET
    waiting=(SELECT count(*) FROM message WHERE queue=number AND due=0),
    deferred=(SELECT count(*) FROM message WHERE queue=number AND due>0)"""
_INSERT = "INSERT OR IGNORE INTO message VALUES (?,?,?,?,?,?)"
UNFINISHED = ".new"
_PIECE_COUNT = 4000  # rows of one statement, whose JSON is made in one go: 6 ms
COME_DUE_AT_ONCE = 1000  # at most, of a queue in one transaction
_WAL_BYTES = 8 << 20


def _columns(count: int) -> str:
    """The elements of the arrays in a JSON array, as columns a, b, c ... of j."""
    names = (f"json_extract(value,'$[{at}]') AS {chr(97 + at)}" for at in range(count))
    return f"(SELECT {', '.join(names)} FROM json_each(?1)) j"


_PUBLISH = f"INSERT INTO message SELECT a, b, c, d, e, substr(?2, f, g) FROM {_columns(7)}"
_FINISH = f"DELETE FROM message WHERE (queue, due, turn) IN (SELECT a, b, c FROM {_columns(3)})"
_ROW = "queue = j.a AND message.due = 0 AND message.turn = j.b"
_MOVE = f"UPDATE message SET due = j.c, turn = j.d, attempts = j.e FROM {_columns(5)} WHERE {_ROW}"
_DELIVER = f"UPDATE message SET attempts = j.c FROM {_columns(3)} WHERE {_ROW}"
_COUNT = f"""UPDATE queue SET waiting = waiting + j.b, deferred = deferred + j.c,
    total = total + j.b + j.c FROM {_columns(3)} WHERE number = j.a"""
_DUE = f"""FROM message WHERE queue=?1 AND due BETWEEN 1 AND ?2
    ORDER BY due, turn LIMIT {COME_DUE_AT_ONCE}"""
_COME_DUE = f"""INSERT INTO message SELECT queue, 0, ?3 + row_number() OVER (ORDER BY due, turn),
    attempts, crc, frame FROM (SELECT * {_DUE})"""
_NOT_DEFERRED = f"DELETE FROM message WHERE (queue,due,turn) IN (SELECT queue,due,turn {_DUE})"
_DROP = f"""DELETE FROM message WHERE (queue, due, turn) IN
    (SELECT queue, due, turn FROM message WHERE queue=? LIMIT {COME_DUE_AT_ONCE})"""
_NOT_LATER = """UPDATE message SET due = ?1 - later FROM
    (SELECT due AS d, turn AS t, row_number() OVER (ORDER BY due DESC, turn DESC) AS later
    FROM message WHERE queue=?2 AND due>?1) WHERE queue=?2 AND due=d AND turn=t"""
_ID = f"substr(frame, 19, {ID_LENGTH})"
_HELD = f"""SELECT {_ID}, substr(frame, 9, 8) FROM message
    WHERE +queue=? AND {_ID} IN (SELECT CAST(value AS BLOB) FROM json_each(?))"""
_PAGE = """SELECT turn, attempts, crc, frame FROM message
    WHERE queue=? AND due=0 AND turn>? ORDER BY turn LIMIT ?"""

Done = Callable[[BackendError | None], None]


class DurableQueue(NamedTuple):
    """A row of the table of queues; one without a name has been dropped."""

    number: int
    name: str | None
    is_paused: bool
    waiting: int
    deferred: int
    last_turn: int = 0


Row = tuple[int, int, int, int, bytes]
"""A message of a queue: (queue, when it is due in ns or 0, turn, attempts made, frame)."""


class Publish(NamedTuple):
    """New messages, all or none; ``takes`` are rows that they replace, as (queue, due, turn)."""

    rows: list[Row]
    takes: list[tuple[int, int, int]]
    done: Done
    is_admitted: bool  # also while the disk is nearly full
    make_rows: Callable[[], Iterable[list[Row]]] = tuple  # of a large one, made by the thread
    counts: Mapping[int, int] = MappingProxyType({})  # of those rows, by queue


@dataclass(slots=True)
class Changes:
    """What happened in a moment. It is written in the order of the fields."""

    queues: list[tuple[int, str | None, bool]] = field(default_factory=list)  # name, is paused
    publishes: list[Publish] = field(default_factory=list)
    moved: list[tuple[int, int, int, int, int]] = field(default_factory=list)
    """(queue, turn, due, new turn, attempts)"""
    delivered: dict[tuple[int, int], int] = field(default_factory=dict)
    """(queue, turn) -> attempts"""
    finished: list[tuple[int, int, int]] = field(default_factory=list)  # queue, due, turn
    come_due: list[tuple[int, int, int]] = field(default_factory=list)
    """(queue, until when in ns, the turn before those that are free for the messages)"""
    size: int = 0  # bytes to publish


class Database:
    """An open file. Raises ``sqlite3.Error``, `ConfigurationError`."""

    def __init__(self, path: Path, *, is_new: bool = False) -> None:
        self.path = path
        self.transactions = 0
        self._wal = Path(f"{path}-wal")
        if is_new:
            os.close(os.open(path, os.O_CREAT | os.O_EXCL | os.O_WRONLY | os.O_CLOEXEC, 0o600))
        self._writer = _connect(path)
        try:
            if is_new:
                self._writer.executescript(_SCHEMA + _STAMP)
            elif _stamp_of(self._writer) != (_APPLICATION_ID, _FORMAT):
                with suppress(sqlite3.Error):  # a full disk must not keep it from starting
                    self._writer.executescript(_STAMP)
            self._reader = _connect(path)
            self._reader.execute("PRAGMA query_only=1")
            self.queues = _queues_of(self._reader)
        except BaseException:
            self._writer.close()
            raise
        self.dropped = [queue.number for queue in self.queues if queue.name is None]

    # writing, on one thread

    def commit(self, step: Changes, publishes: Iterable[Publish]) -> Counter[int]:
        """Write all or nothing, of its publishes only these; return how many messages of which
        queue are not deferred now."""
        run = self._writer.execute
        come_due: Counter[int] = Counter()
        run("BEGIN IMMEDIATE")
        try:
            self._write(step, publishes, come_due)
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
        rows: list[Row] = []
        for publish in publishes:
            finished += publish.takes
            rows += publish.rows
            for piece in publish.make_rows():
                self._insert(piece)
            waiting.update(publish.counts)
        for start in range(0, len(rows), _PIECE_COUNT):
            self._insert(rows[start : start + _PIECE_COUNT])
        for queue, due_ns, *_ in rows:
            (deferred if due_ns else waiting)[queue] += 1
        put_off = Counter(queue for queue, _, due_ns, *_ in step.moved if due_ns)
        waiting.subtract(put_off)
        deferred.update(put_off)
        for queue, due_ns, _ in finished:
            (deferred if due_ns else waiting)[queue] -= 1
        delivered = [(*key, attempts) for key, attempts in step.delivered.items()]
        for statement, values in ((_MOVE, step.moved), (_DELIVER, delivered), (_FINISH, finished)):
            if values:
                run(statement, (json.dumps(values),))
        for number, until_ns, turn in step.come_due:
            run(_COME_DUE, (number, until_ns, turn))
            count = run(_NOT_DEFERRED, (number, until_ns)).rowcount
            come_due[number] += count
            waiting[number] += count
            deferred[number] -= count
        counts = [(each, waiting[each], deferred[each]) for each in {*waiting, *deferred}]
        if counts:
            run(_COUNT, (json.dumps(counts),))

    def _insert(self, rows: Iterable[Row]) -> None:
        """Insert messages; a frame that several queues have goes in once."""
        values: list[tuple[int, ...]] = []
        places: dict[int, int] = {}
        frames: list[bytes] = []
        end = 1
        for queue, due_ns, turn, attempts, frame in rows:
            at = places.get(id(frame))
            if at is None:
                places[id(frame)] = at = end
                frames.append(frame)
                end += len(frame)
            values.append((queue, due_ns, turn, attempts, crc32(frame, queue), at, len(frame)))
        if values:
            self._writer.execute(_PUBLISH, (json.dumps(values), b"".join(frames)))

    def checkpoint_if_due(self) -> None:
        """Bring the log into the file when it has grown. Raises ``sqlite3.Error``."""
        with suppress(OSError):
            if self._wal.stat().st_size >= _WAL_BYTES:
                self._writer.execute("PRAGMA wal_checkpoint(PASSIVE)").fetchone()

    def defer_until(self, latest_ns: int) -> None:
        """Let no message be due later: the clock may have gone back. Their order stays.

        No two get the same time: turns of what is deferred repeat after a restart.
        """
        for queue in self.queues:
            if queue.deferred:
                self._writer.execute(_NOT_LATER, (latest_ns, queue.number))

    # reading, on another

    def page(self, queue: int, after: int, count: int, max_bytes: int) -> list[tuple[int, bytes]]:
        """Return up to ``count`` waiting messages with their turns; there must be as many.

        Raises ``sqlite3.Error``, also when there are none.
        """
        found: list[tuple[int, bytes]] = []
        try:
            for turn, attempts, crc, frame in self._reader.execute(_PAGE, (queue, after, count)):
                if not _is_whole(queue, crc, frame):
                    break
                if found and turn <= found[-1][0]:
                    found.pop()  # one of the two is not what it was
                    break
                found.append((turn, with_attempts(frame, attempts)))
                max_bytes -= len(frame)
                if max_bytes <= 0:
                    break
        except sqlite3.Error:
            if not found:
                raise
        if not found:
            raise sqlite3.DatabaseError("messages that were counted are not there, or changed")
        return found

    def deferred(self, queue: int, count: int) -> list[tuple[int, int, bytes]]:
        """Return the first deferred messages as (due, turn, frame). Raises ``sqlite3.Error``."""
        select = "SELECT * FROM message WHERE queue=? AND due>0 ORDER BY due LIMIT ?"
        return [
            (due, turn, with_attempts(frame, attempts))
            for _, due, turn, attempts, crc, frame in self._reader.execute(select, (queue, count))
            if _is_whole(queue, crc, frame)
        ]

    def next_due_ns(self, queue: int) -> int | None:
        """Return when the first deferred message is due. Raises ``sqlite3.Error``."""
        select = "SELECT due FROM message WHERE queue=? AND due>0 ORDER BY due LIMIT 1"
        found: tuple[int] | None = self._reader.execute(select, (queue,)).fetchone()
        return found[0] if found else None

    def number(self, what: str, queue: int, after: int = 0) -> int:
        """Return a number of the messages of a queue that wait. Raises ``sqlite3.Error``."""
        select = f"SELECT {what} FROM message WHERE queue=? AND due=0 AND turn>?"
        return self._reader.execute(select, (queue, after)).fetchone()[0] or 0

    def index_ids(self) -> None:
        """Have `held` look ids up: without that it reads all messages. Raises ``sqlite3.Error``."""
        self._writer.execute(f"CREATE INDEX IF NOT EXISTS id ON message ({_ID})")

    def held(self, queue: int, ids: Iterable[bytes]) -> dict[bytes, int]:
        """Return those of some ids that messages of a queue have, with their times in ns.

        Messages in flight and deferred count. Raises ``sqlite3.Error``.
        """
        wanted = json.dumps([each.decode("latin-1") for each in ids])
        found = self._reader.execute(_HELD, (queue, wanted))
        return {id_: int.from_bytes(stamp, "big", signed=True) for id_, stamp in found}

    def spare_bytes(self) -> int:
        """Return how much of the file is free."""
        select = "SELECT freelist_count * page_size FROM pragma_freelist_count, pragma_page_size"
        try:
            return int(self._reader.execute(select).fetchone()[0])
        except sqlite3.Error:
            return 0

    def close(self) -> None:
        """Close; the log goes into the file, unless that fails."""
        for connection in (self._reader, self._writer):
            with suppress(sqlite3.Error):
                connection.close()


def _connect(path: Path) -> sqlite3.Connection:
    connection = sqlite3.connect(
        f"{path.absolute().as_uri()}?mode=rw",
        uri=True,
        isolation_level=None,
        check_same_thread=False,
        timeout=30.0,  # while another program writes
    )
    try:
        connection.execute("PRAGMA secure_delete=0")
        for name, wanted in _SETTINGS:
            connection.execute(f"PRAGMA {name}={wanted}").fetchone()
            found = connection.execute(f"PRAGMA {name}").fetchone()
            if found != (wanted,):
                raise ConfigurationError(
                    f"cannot keep messages in {path}: SQLite has {name} {found and found[0]}",
                    hint="--durable needs a local file system, on which a sync is a sync.",
                )
        _check_format(connection, path)
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
    own = "type='table' AND name NOT GLOB 'sqlite_*'"
    select = f"SELECT name, {columns} FROM sqlite_master m WHERE {own}"
    tables = dict(connection.execute(select).fetchall())
    if application_id not in (0, _APPLICATION_ID) or tables not in ({}, _TABLES):
        what = f"application_id {application_id}, user_version {version}"
        raise ConfigurationError(
            f"{path} is a database of another program, or of another version ({what}, "
            f"tables {', '.join(sorted(tables)) or 'none'})",
            hint="Open it with the program that wrote it; this one does not change it.",
        )
    if version > _FORMAT:
        raise ConfigurationError(
            f"{path} has format {version} of --durable, of a later version of nsqtools "
            f"(this one reads up to {_FORMAT})",
            hint="Use the version of nsqtools that wrote it.",
        )


def _is_whole(queue: int, crc: object, frame: object) -> bool:
    return type(frame) is bytes and len(frame) >= _SMALLEST and crc32(frame, queue) == crc


_SMALLEST = 34  # bytes of a frame with an empty body


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


_READ_ATTEMPTS = 5
_READ_PAUSE_S = 0.2
_READ_PATIENCE_S = 20.0  # of a disk that fails; above what a bus reset or a path failover takes
_MAY_PASS = (sqlite3.SQLITE_IOERR, sqlite3.SQLITE_CORRUPT, sqlite3.SQLITE_NOTADB)
_SECTORS = 4096

T = TypeVar("T")


class ReadRetry:
    """Decides whether to read again what could not be read.

    SQLite reports an I/O error as damage, too. So what fails is tried again, and while the file,
    read page by page, fails as well, again after a pause, for `_READ_PATIENCE_S`. Damage is what
    still fails between two times at which the whole file could be read.
    """

    def __init__(self, path: Path) -> None:
        self._path = path
        self._failures = 0
        self._until_s = 0.0
        self._was_readable = False

    def succeeded(self) -> None:
        """Begin to count again: the next failure is at another place."""
        self._failures = 0
        self._was_readable = False

    def is_due(self, error: sqlite3.DatabaseError) -> bool:
        """Return whether to try again now; wait before that if the disk fails."""
        if getattr(error, "sqlite_errorcode", 0) & 0xFF not in _MAY_PASS:
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
    """Return what ``read`` returns, tried again as `ReadRetry` says. Raises what it raises."""
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
    """Copy a file durably to a new one, with zeros for what cannot be read. Raises ``OSError``."""
    made = os.open(target, NEW | os.O_WRONLY, 0o600)
    with os.fdopen(made, "wb") as copy, open_to_read(source) as file:
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


def all_rows(path: Path, queue: int | None = None) -> Iterator[Row]:
    """Yield every message that is whole, of one queue or all, around what is damaged.

    Raises ``sqlite3.Error``, `ConfigurationError`.
    """
    key = "queue,due,turn"
    of_queue = "" if queue is None else f"queue={queue} AND "
    backward = " ORDER BY queue DESC, due DESC, turn DESC"
    columns = 3
    if queue is not None:  # a comparison of all three would read the queue from its beginning
        key, columns = "due,turn", 2
    first, end = (-1,) * columns, (sys.maxsize,) * columns
    with closing(read_patiently(path, lambda: _connect(path))) as connection:
        for last, sign, order in ((first, ">", ""), (end, "<", backward)):
            marks = ",".join("?" * columns)
            select = f"SELECT * FROM message WHERE {of_queue}({key}){sign}({marks}){order}"
            retry, is_whole = ReadRetry(path), False
            while not is_whole:
                try:
                    for row in connection.execute(select, last):
                        number, due_ns, turn, attempts, crc, frame = row
                        if any(type(value) is not int for value in row[:5]):
                            continue
                        if not _is_whole(number, crc, frame):
                            continue
                        yield number, due_ns, turn, attempts, frame
                        place = row[3 - columns : 3]
                        if (place > last) == (sign == ">"):  # a damaged key is not gone back to
                            last = place
                            retry.succeeded()
                    is_whole = True
                except sqlite3.DatabaseError as exc:
                    if not retry.is_due(exc):
                        break  # from the other end
            if is_whole:
                return


def remove(path: Path) -> None:
    """Remove a file that is not open, with its log."""
    for suffix in ("", "-wal", "-shm"):
        Path(f"{path}{suffix}").unlink(missing_ok=True)


def create(path: Path, queues: Iterable[DurableQueue], rows: Iterable[Row]) -> None:
    """Write a new file, which is there whole or not at all. Raises ``sqlite3.Error``, ``OSError``.

    A kill leaves one that ends in `UNFINISHED`.
    """
    beside = path.with_suffix(UNFINISHED)
    remove(beside)
    try:
        _fill(beside, queues, rows)
        beside.replace(path)
    finally:
        remove(beside)
    sync_folder(path.parent)


def _fill(path: Path, queues: Iterable[DurableQueue], rows: Iterable[Row]) -> None:
    Database(path, is_new=True).close()
    with closing(_connect(path)) as target:
        target.executemany(
            _ADD_QUEUE, [(n, name, p, _name_crc(n, name)) for n, name, p, *_ in queues]
        )
        values = ((*row[:4], crc32(row[4], row[0]), row[4]) for row in rows)
        while some := list(islice(values, COME_DUE_AT_ONCE)):
            target.execute("BEGIN")
            target.executemany(_INSERT, some)
            target.execute("COMMIT")
            target.execute("PRAGMA wal_checkpoint(PASSIVE)").fetchone()
        target.execute(_RECOUNT)
        target.execute("UPDATE queue SET total=waiting+deferred")
        blocked, *_ = target.execute("PRAGMA wal_checkpoint(TRUNCATE)").fetchone()
        if blocked:
            raise sqlite3.OperationalError("the checkpoint of the new file did not end")


# -- the log that a kill left ----------------------------------------------------------------------

_HEADER = 32
_FRAME = 24
_BIG = 0x377F0683
_WORD = 0xFFFFFFFF


def wal_damage(path: Path) -> tuple[str, bytes]:
    """Return what is wrong with a write-ahead log, and one of its good frames; else nothing.

    A kill leaves a transaction without its end, a power failure one with holes, which nobody was
    told of: it must not be read. A whole commit after the first bad frame is neither; more than
    one says that what follows was confirmed, and there is something to save. Raises ``OSError``.
    """
    try:
        content = path.read_bytes()
    except FileNotFoundError:
        return "", b""
    if len(content) <= _HEADER or not any(content[:_HEADER]):
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
        before, stored = stored, unpack_from(">II", content, at + 16)
        if head[8:] != content[16:24]:  # of an earlier log, which this one overwrites
            bad = bad or number
            continue
        is_good = _checksum(head[:8] + page, before, order) == stored
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
