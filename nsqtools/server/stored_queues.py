"""Read the queues in the data directory of an nsqd, the Go nsqd's or ours, without writing to it.

The nsqd may be running or stopped. A database of ``--durable`` is copied together with its log and
read from the copy, because SQLite creates files next to a database that it only reads.

Each queue has parts in four states. nsqd will deliver a ``good`` part. Neither nsqd.dat nor a meta
file refers to an ``orphaned`` file or database. Files that nsqd renamed to ``.bad``, and copies of
databases that lost messages, are ``set aside``. Files below the read position are ``read``.
Messages in the memory of nsqd are in no part.

Traps:

- Files change during the read. A file that vanished was read by its nsqd. An incomplete record
  beyond the write position is being written, or was when nsqd was killed, and no client got an OK
  for it. Neither is damage.
- A running nsqd has not yet synced the metadata of a queue that is younger than two seconds. Where
  it cannot be seen to run (in another container, or not on Linux), such a queue is reported as
  orphaned.
- A path may be a pipe, or a sparse file of a terabyte. Only regular files are read, without holes.
"""

from __future__ import annotations

import json
import os
import sqlite3
from collections.abc import Callable, Iterator
from contextlib import ExitStack, suppress
from dataclasses import dataclass, replace
from hashlib import blake2b
from itertools import count
from pathlib import Path
from typing import NamedTuple, Self

from nsqtools.errors import ConfigurationError, NotFoundError, NsqError
from nsqtools.files.opening import closing_fd, data_offsets, descriptor_to_read, open_to_read
from nsqtools.files.scratch import scratch_directory
from nsqtools.server.durable_database import all_rows, read_queues, wal_damage
from nsqtools.server.durable_path import databases_in, named_database
from nsqtools.server.queues.data_path import FILE_NAME, Queues, decode_metadata, read_metadata
from nsqtools.server.queues.queue_files import QUEUE_FILE, Positions, QueueFile, Record
from nsqtools.server.queues.queued_message import BODY_AT, ID_AT, timestamp_ns

_BODY_IN_RECORD = 26  # after timestamp, attempts and id
# Attempts to copy a database. A copy fails when nsqd writes 8 MiB of log during it, because nsqd
# then brings the log into the file and begins a new one.
_COPIES = 5
_COPY_BYTES = 1 << 20
# A JSON object that `recovery` writes: when the deferred messages in files are due, in ns, by queue
# and id. The files have no place for it.
DUE_FILE = "nsqd.deferred"

GOOD, ORPHANED, SET_ASIDE, READ = "good", "orphaned", "set aside", "read"
"""The states of a part; nsqd delivers only the `GOOD` ones."""

OnNote = Callable[[str, str], None]
"""Called with a path and the problem there."""


class StoredMessage(NamedTuple):
    """A message of a queue.

    ``attempts`` counts the attempts made so far and ``size`` the bytes in the file. ``due_ns`` is
    0, except for a deferred message in a database.
    """

    id: bytes
    timestamp_ns: int
    attempts: int
    body: bytes
    size: int
    due_ns: int = 0


@dataclass(frozen=True, slots=True)
class StoredFile:
    """A data file, read from ``start``. ``written`` is the write position in the metadata."""

    path: Path
    state: str = GOOD
    start: int = 0
    written: int | None = None

    def messages(self, note: OnNote, *, bodies: bool = True) -> Iterator[StoredMessage]:
        """Yield the intact messages. Without ``bodies`` these are empty, which is faster."""
        try:
            with QueueFile(self.path) as file:
                if (self.written or 0) > file.size or self.start > file.size:
                    expected = max(self.written or 0, self.start)
                    note(str(self.path), f"has {file.size} bytes, and {expected} in its metadata")
                # A read position beyond the file is wrong, so it cannot exclude any message.
                for span in file.scan(self.start if self.start <= file.size else 0):
                    if isinstance(span, Record):
                        if self.written is not None and span.at < self.written < span.end:
                            problem = f"its metadata ends at {self.written}, in the message"
                            note(str(self.path), f"{problem} at byte {span.at}")
                        body = file.content(span)[_BODY_IN_RECORD:] if bodies else b""
                        _, size, sent_ns, attempts, message_id = span
                        yield StoredMessage(message_id, sent_ns, attempts, body, size)
                    elif self.written is None or not (
                        span.at >= self.written and file.is_being_written(span)
                    ):
                        note(str(self.path), f"bytes {span.at} to {span.end} cannot be read")
        except FileNotFoundError:
            pass
        except OSError as exc:
            # The disk may fail for this file only, so the other files are still read.
            note(str(self.path), f"cannot be read ({exc.strerror})")


@dataclass(frozen=True, slots=True)
class StoredRows:
    """The rows of a queue in the database at ``path``, read from the copy at ``copy``."""

    path: Path
    copy: Path
    number: int
    expected: int
    state: str = GOOD

    def messages(self, note: OnNote, *, bodies: bool = True) -> Iterator[StoredMessage]:
        """Yield the intact messages."""
        intact = 0
        try:
            for _, due_ns, _, made, frame in all_rows(self.copy, self.number):
                intact += 1
                message_id, body = frame[ID_AT:BODY_AT], frame[BODY_AT:]
                sent_ns, size = timestamp_ns(frame), len(frame)
                yield StoredMessage(message_id, sent_ns, made, body, size, due_ns)
        except sqlite3.Error as exc:
            note(str(self.path), _unreadable(exc))
            return
        if intact < self.expected:
            lost = self.expected - intact
            note(str(self.path), f"{lost} of {self.expected} messages cannot be read")


StoredPart = StoredFile | StoredRows


@dataclass(frozen=True, slots=True)
class StoredQueue:
    """The queue of a channel, or of a topic if ``channel`` is ``""``.

    ``problems`` and ``depth`` are those of its metadata; see `StoredQueues.depth_of`.
    """

    topic: str
    channel: str
    parts: tuple[StoredPart, ...] = ()
    problems: tuple[tuple[str, str], ...] = ()
    depth: int | None = None
    is_paused: bool = False

    @property
    def name(self) -> str:
        """The prefix of the names of its files."""
        return f"{self.topic}:{self.channel}" if self.channel else self.topic


class StoredQueues:
    """The queues in a data path, which can be read until the ``with`` block ends.

    Attributes:
        problems: Those of the directory, as (path, problem).
        due: When deferred messages in files are due, in ns, by queue and id.
        is_in_use: Whether an nsqd runs there. Its metadata is then not up to date.

    With ``has_files_only`` databases are ignored. Raises `NsqError`, ``OSError``.
    """

    def __init__(self, data_path: Path, *, has_files_only: bool = False) -> None:
        self._path = data_path
        self._has_files_only = has_files_only
        self.problems: list[tuple[str, str]] = []
        self.is_durable = False
        self.due = _due_times(data_path)
        self.queues: list[StoredQueue] = []
        if not data_path.is_dir():
            raise NotFoundError(f"there is no directory {data_path}")
        with ExitStack() as self._copies:
            self._read_directory()
            self._copies = self._copies.pop_all()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._copies.close()

    def _read_directory(self) -> None:
        self.is_in_use = _is_locked(self._path)
        files = self._files()
        rows: dict[str, StoredQueue] = {}
        database, is_unclear = None, False
        if not self._has_files_only:
            try:
                database, is_named = named_database(self._path)
                if database is not None and not is_named:
                    self._note(FILE_NAME, "does not name the database")
            except ConfigurationError as exc:
                self._note(FILE_NAME, str(exc))
                is_unclear = True
            except OSError as exc:
                self._note(FILE_NAME, _unreadable(exc))
                is_unclear = True
            for path, state in self._databases(database):
                for queue in self._of_database(path, state):
                    merged = rows.get(queue.name, StoredQueue(queue.topic, queue.channel))
                    rows[queue.name] = replace(
                        merged,
                        parts=merged.parts + queue.parts,
                        problems=merged.problems + queue.problems,
                    )
        self.is_durable = database is not None
        if self.is_durable or is_unclear:
            listed: Queues | None = {}
        elif not (files or rows or (self._path / FILE_NAME).exists()):
            raise NotFoundError(
                f"{self._path} has no queues",
                hint=f"It is the --data-path of an nsqd, which has {FILE_NAME}.",
            )
        else:
            listed = self._listed()
        for name in sorted({*rows, *files, *(listed or ())}):
            queue = self._of_files(name, files.get(name, []), listed)
            if name in rows:
                parts = (*rows[name].parts, *queue.parts)
                problems = rows[name].problems + queue.problems
                queue = replace(queue, parts=parts, problems=problems)
            self.queues.append(queue)

    def depth_of(self, queue: StoredQueue) -> int | None:
        """Return the depth in the metadata of a queue, None if it is not up to date."""
        if self.is_in_use or queue.depth is None:
            return None
        with suppress(OSError, ValueError):
            positions = Positions.read(self._meta(queue.name))
            if self._depth(queue.name, positions) == queue.depth:
                return queue.depth
        return None

    def _meta(self, name: str) -> Path:
        return self._path / f"{name}.diskqueue.meta.dat"

    def _data(self, name: str, number: int) -> Path:
        return self._path / f"{name}.diskqueue.{number:06d}.dat"

    def _depth(self, name: str, positions: Positions) -> int | None:
        """Return the depth, None if the file was written afterwards, as before a kill."""
        size = 0
        with suppress(FileNotFoundError):
            size = self._data(name, positions.write_file).stat().st_size
        return positions.depth if size == positions.write_position else None

    def _note(self, name: str, problem: str) -> None:
        self.problems.append((str(self._path / name), problem))

    def _files(self) -> dict[str, list[tuple[int, str]]]:
        """Return the files of each queue as (number, suffix of a file that is set aside)."""
        files: dict[str, list[tuple[int, str]]] = {}
        for name in os.listdir(self._path):
            if match := QUEUE_FILE.fullmatch(name):
                numbers = files.setdefault(match[1], [])
                if match[2]:
                    numbers.append((int(match[2]), match[3] or ""))
        return files

    def _databases(self, named: Path | None) -> Iterator[tuple[Path, str]]:
        """Yield the databases with their states, first the one that nsqd.dat names."""
        if named is not None:
            yield named, GOOD
        for path, kind in sorted(databases_in(self._path).items()):
            if path == named or kind == "copy":
                continue
            # A running nsqd may be writing a new database, which has no kind either.
            if kind or not (named and self.is_in_use):
                yield path, SET_ASIDE if kind == "damaged" else ORPHANED

    def _listed(self) -> Queues | None:
        """Return the queues that nsqd.dat or its previous version lists, None if both fail."""
        for name in (FILE_NAME, f"{FILE_NAME}.previous"):
            try:
                return decode_metadata(read_metadata(self._path / name))
            except FileNotFoundError:
                if name == FILE_NAME:
                    self._note(name, "is not there: no nsqd finds these queues")
            except (OSError, ValueError, RecursionError) as exc:
                self._note(name, f"cannot be read ({exc})")
        return None

    def _of_files(
        self, name: str, files: list[tuple[int, str]], listed: Queues | None
    ) -> StoredQueue:
        """Return a queue of files; ``listed`` are the queues of nsqd.dat, None for all queues."""
        meta = self._meta(name)
        parts, problems = [], []
        positions = depth = None
        try:
            positions = Positions.read(meta)
            depth = self._depth(name, positions)
        except FileNotFoundError:
            pass
        except (OSError, ValueError) as exc:
            reason = exc.strerror if isinstance(exc, OSError) else exc
            problems.append((str(meta), f"cannot be read ({reason})"))
        # A running nsqd may not have synced the metadata yet.
        unknown = GOOD if self.is_in_use else ORPHANED
        is_listed = listed is None or name in listed
        live = GOOD if positions is not None and is_listed else unknown
        for number, suffix in sorted(files):
            path = self._data(name, number)
            if suffix:
                parts.append(StoredFile(path.with_name(path.name + suffix), SET_ASIDE))
            elif positions is None:
                parts.append(StoredFile(path, live, written=0 if self.is_in_use else None))
            elif number > positions.write_file:
                parts.append(StoredFile(path, unknown))
            elif number < positions.read_file:
                parts.append(StoredFile(path, READ))
            else:
                is_last = number == positions.write_file
                written = positions.write_position if is_last else None
                start = positions.read_position if number == positions.read_file else 0
                parts.append(StoredFile(path, live, start, written))
        if positions is not None and not self.is_in_use:
            numbers = {number for number, suffix in files if not suffix}
            first = next(number for number in count(positions.read_file) if number not in numbers)
            missing = self._data(name, first)
            is_unread = (first, 0) < positions[3:]
            # The metadata is read again: nsqd may have started and read the file meanwhile.
            with suppress(OSError, ValueError):
                if is_unread and not missing.exists() and Positions.read(meta) == positions:
                    problems.append((str(missing), "is not there, and in the metadata"))
        topic, _, channel = name.partition(":")
        is_paused = bool(listed and listed.get(name))
        return StoredQueue(topic, channel, tuple(parts), tuple(problems), depth, is_paused)

    def _of_database(self, path: Path, state: str) -> Iterator[StoredQueue]:
        """Copy a database and yield its queues."""
        copy = self._copies.enter_context(scratch_directory("nsq-queue-")) / path.name
        try:
            yield from self._of_copy(path, copy, state)
        except ConfigurationError as exc:
            refusal = str(exc).replace(str(copy), str(path))
            if state == GOOD:
                raise ConfigurationError(refusal, hint=exc.hint) from exc
            self.problems.append((str(path), refusal))
        except (OSError, sqlite3.Error) as exc:
            self.problems.append((str(path), _unreadable(exc)))

    def _of_copy(self, path: Path, copy: Path, state: str) -> Iterator[StoredQueue]:
        wal, copied_wal = Path(f"{path}-wal"), Path(f"{copy}-wal")
        for _ in range(_COPIES):
            # The log contains every change that the copy of the file may lack, unless nsqd started
            # the log again in between. A new log has another header.
            header = _wal_header(wal)
            _copy_data(path, copy)
            with suppress(FileNotFoundError):
                _copy_data(wal, copied_wal)
            if _wal_header(wal) == header:
                break
            copied_wal.unlink(missing_ok=True)
        else:
            raise NsqError(
                f"{path} changes more quickly than it can be copied",
                hint="Try again when its nsqd has less to do, or is stopped.",
            )
        damage, saved = wal_damage(copied_wal)
        problems = ((str(wal), damage),) if damage else ()
        if saved:
            copied_wal.write_bytes(saved)
        for number, name, _, waiting, deferred, _ in read_queues(copy):
            if name is not None:
                topic, _, channel = name.partition(":")
                rows = StoredRows(path, copy, number, waiting + deferred, state)
                yield StoredQueue(topic, channel, (rows,), problems)


def _due_times(data_path: Path) -> dict[str, dict[str, int]]:
    try:
        queues = json.loads(read_metadata(data_path / DUE_FILE)).items()
        return {name: {id_: int(due) for id_, due in times.items()} for name, times in queues}
    except (OSError, ValueError, TypeError, AttributeError):
        return {}


def _is_locked(folder: Path) -> bool:
    """Return whether a process has locked the folder, as far as Linux shows it.

    To try the lock would keep an nsqd that starts at this moment from starting.
    """
    status = folder.stat()
    device = f"{os.major(status.st_dev):02x}:{os.minor(status.st_dev):02x}"
    try:
        return f" {device}:{status.st_ino} " in Path("/proc/locks").read_text("ascii")
    except OSError:
        return False


def _wal_header(wal: Path) -> bytes:
    with suppress(FileNotFoundError), open_to_read(wal) as file:
        return file.read(32)
    return b""


def _copy_data(source: Path, target: Path) -> None:
    """Copy a regular file with its holes. Raises ``OSError``."""
    with closing_fd(descriptor_to_read(source)) as descriptor, target.open("wb") as copy:
        for at in data_offsets(descriptor, _COPY_BYTES):
            copy.seek(at)
            copy.write(os.pread(descriptor, _COPY_BYTES, at))
        copy.truncate(os.fstat(descriptor).st_size)


def _unreadable(error: sqlite3.Error | OSError) -> str:
    if isinstance(error, OSError):
        return f"cannot be read ({error.strerror})"
    return f"cannot be read ({error}); on a copy of it, `sqlite3 COPY .recover` may find messages"


def digest(topic: str, message: StoredMessage) -> bytes:
    """Return a digest that is equal for all copies of a message, and different for others."""
    head = b"%b:%b%d:" % (topic.encode(), message.id, message.timestamp_ns)
    return blake2b(head + message.body, digest_size=16).digest()


def _is_damaged(queue: StoredQueue, part: StoredPart) -> bool:
    problems: list[str] = []
    return (
        (isinstance(part, StoredRows) and bool(queue.problems))
        or any(problems for _ in part.messages(lambda *note: problems.extend(note), bodies=False))
        or bool(problems)
    )


def recovered(
    queues: list[StoredQueue], note: OnNote, *, everything: bool = False
) -> Iterator[tuple[str, StoredMessage]]:
    """Yield each message of damaged, orphaned and set aside parts once, with its topic.

    A message that is also in a good part of the same queue is skipped, because nsqd delivers it.
    With ``everything`` the good and the read parts are included. Raises ``OSError``, `NsqError`.
    """
    written: set[bytes] = set()
    for queue in queues:
        sources, good = [], []
        for part in queue.parts:
            is_source = everything or part.state in (ORPHANED, SET_ASIDE)
            if is_source or (part.state == GOOD and _is_damaged(queue, part)):
                sources.append(part)
            elif part.state == GOOD:
                good.append(part)
        if not sources:
            continue
        deliverable = {
            digest(queue.topic, message)
            for part in good
            for message in part.messages(lambda *_: None)
        }
        for part in sources:
            for message in part.messages(note):
                key = digest(queue.topic, message)
                if key not in deliverable and key not in written:
                    written.add(key)
                    yield queue.topic, message
