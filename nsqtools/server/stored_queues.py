"""What the data directory of an nsqd holds, the Go nsqd's or ours, read and never written to.

The nsqd may be running, or dead. A database of ``--durable`` is copied with its log and read there,
because SQLite writes beside a file that it only reads.

Each queue has parts: what its nsqd will deliver; ``orphaned`` files, which no nsqd.dat or no meta
file knows; ``set aside`` files, renamed to ``.bad``; and those that are ``read``, left over below
the read position. What nsqd holds in memory is in none of them.

Trap: files change while they are looked at. One that has gone was read by its nsqd, and the
beginning of a record behind the write position is being written, or was when nsqd was killed: no
client was told that this message is there. Neither is damage. A running nsqd has not yet synced
the metadata of a queue that is two seconds old; where it is not seen to run (in another container,
or not on Linux) such a queue is called orphaned.
"""

from __future__ import annotations

import json
import os
import shutil
import sqlite3
from collections.abc import Callable, Iterator
from contextlib import ExitStack, suppress
from dataclasses import dataclass, replace
from hashlib import blake2b
from itertools import count
from pathlib import Path
from typing import NamedTuple, Self

from nsqtools.errors import NotFoundError, NsqError
from nsqtools.files.scratch import scratch_directory
from nsqtools.server.durable_database import all_rows, read_queues, wal_damage
from nsqtools.server.durable_path import named_database
from nsqtools.server.queues.data_path import FILE_NAME, Queues, decode_metadata
from nsqtools.server.queues.queue_files import QUEUE_FILE, Positions, QueueFile, Record
from nsqtools.server.queues.queued_message import BODY_AT, ID_AT, timestamp_ns

_BODY_IN_RECORD = 26
_COPIES = 5
DUE_FILE = "nsqd.deferred"  # when messages in files are due, in ns by queue and id

GOOD, ORPHANED, SET_ASIDE, READ = "good", "orphaned", "set aside", "read"
"""What a part is; `GOOD` is what nsqd delivers."""

Note = Callable[[str, str], None]
"""Called with a path and what is wrong there."""


class StoredMessage(NamedTuple):
    """A message as a queue has it: ``attempts`` are those made, ``size`` is in bytes of the file.

    ``due_ns`` is 0 unless it is deferred in a database.
    """

    id: bytes
    timestamp_ns: int
    attempts: int
    body: bytes
    size: int
    due_ns: int = 0


@dataclass(frozen=True, slots=True)
class StoredFile:
    """A data file from ``start`` on. ``written`` is how far metadata says that it is written."""

    path: Path
    state: str = GOOD
    start: int = 0
    written: int | None = None

    def messages(self, note: Note, *, bodies: bool = True) -> Iterator[StoredMessage]:
        """Yield the messages around what is damaged; empty bodies are quicker."""
        try:
            with QueueFile(self.path) as file:
                if (self.written or 0) > file.size or self.start > file.size:
                    wanted = max(self.written or 0, self.start)
                    note(str(self.path), f"has {file.size} bytes, and {wanted} in its metadata")
                for found in file.scan(self.start):
                    if isinstance(found, Record):
                        if self.written is not None and found.at < self.written < found.end:
                            problem = f"its metadata ends at {self.written}, in the message"
                            note(str(self.path), f"{problem} at byte {found.at}")
                        body = file.content(found)[_BODY_IN_RECORD:] if bodies else b""
                        _, size, sent_ns, attempts, message_id = found
                        yield StoredMessage(message_id, sent_ns, attempts, body, size)
                    elif self.written is None or not (
                        found.at >= self.written and file.is_being_written(found)
                    ):
                        note(str(self.path), f"bytes {found.at} to {found.end} cannot be read")
        except FileNotFoundError:
            pass
        except OSError as exc:  # of a disk that fails, say: other files are whole
            note(str(self.path), f"cannot be read ({exc.strerror})")


@dataclass(frozen=True, slots=True)
class StoredRows:
    """The rows of a queue in a database at ``path``, read in a copy of it."""

    path: Path
    copy: Path
    number: int
    expected: int
    state: str = GOOD

    def messages(self, note: Note, *, bodies: bool = True) -> Iterator[StoredMessage]:
        """Yield the messages that are whole. Raises ``NsqError``."""
        found = 0
        try:
            for _, due_ns, _, made, frame in all_rows(self.copy, self.number):
                found += 1
                message_id, body = frame[ID_AT:BODY_AT], frame[BODY_AT:]
                sent_ns, size = timestamp_ns(frame), len(frame)
                yield StoredMessage(message_id, sent_ns, made, body, size, due_ns)
        except sqlite3.Error as exc:
            raise _unreadable(self.path, exc) from exc
        if found < self.expected:
            lost = self.expected - found
            note(str(self.path), f"{lost} of {self.expected} messages cannot be read")


Part = StoredFile | StoredRows


@dataclass(frozen=True, slots=True)
class StoredQueue:
    """A queue of a topic, or of a channel unless that is "".

    ``problems`` are about its metadata. ``depth`` is what that says of the messages, None where it
    is not up to date, as while nsqd runs and after a kill.
    """

    topic: str
    channel: str
    parts: tuple[Part, ...] = ()
    problems: tuple[tuple[str, str], ...] = ()
    depth: int | None = None
    is_paused: bool = False

    @property
    def name(self) -> str:
        """What the names of its files begin with."""
        return f"{self.topic}:{self.channel}" if self.channel else self.topic


class StoredQueues:
    """The queues in a data path, as long as it is open. A context manager.

    ``problems`` are about the directory; ``due`` is when messages are due that are in files, in ns
    by queue and id. Raises `NsqError`, ``OSError``.
    """

    def __init__(self, data_path: Path) -> None:
        self._path = data_path
        self.problems: list[tuple[str, str]] = []
        self.is_durable = False
        self.due = _due_times(data_path)
        self.queues: list[StoredQueue] = []
        if not data_path.is_dir():
            raise NotFoundError(f"there is no directory {data_path}")
        with ExitStack() as self._copies:
            self._look()
            self._copies = self._copies.pop_all()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._copies.close()

    def _look(self) -> None:
        self._is_in_use = _is_locked(self._path)
        found = self._files()
        database, is_named = named_database(self._path)
        rows: dict[str, StoredQueue] = {}
        if database is not None:
            self.is_durable = True
            if not is_named:
                self._note(FILE_NAME, "does not name the database")
            rows = {each.name: each for each in self._of_database(database)}
            listed: Queues | None = {}
        elif not found and not (self._path / FILE_NAME).exists():
            raise NotFoundError(
                f"{self._path} has no queues",
                hint=f"It is the --data-path of an nsqd, which has {FILE_NAME}.",
            )
        else:
            listed = self._listed()
        for name in sorted({*rows, *found, *(listed or ())}):
            queue = self._of_files(name, found.get(name, []), listed)
            if name in rows:
                parts = (*rows[name].parts, *queue.parts)
                queue = replace(rows[name], parts=parts)
            self.queues.append(queue)

    def _note(self, name: str, problem: str) -> None:
        self.problems.append((str(self._path / name), problem))

    def _files(self) -> dict[str, list[tuple[int, bool]]]:
        """Return the numbers of the files of each queue, and whether each is set aside."""
        found: dict[str, list[tuple[int, bool]]] = {}
        for name in os.listdir(self._path):
            if match := QUEUE_FILE.fullmatch(name):
                numbers = found.setdefault(match[1], [])
                if match[2]:
                    numbers.append((int(match[2]), bool(match[3])))
        return found

    def _listed(self) -> Queues | None:
        """Return the queues that nsqd.dat lists, or what it was before; None when it is damaged."""
        for name in (FILE_NAME, f"{FILE_NAME}.previous"):
            try:
                return decode_metadata((self._path / name).read_bytes())
            except FileNotFoundError:
                if name == FILE_NAME:
                    self._note(name, "is not there: no nsqd finds these queues")
            except (ValueError, RecursionError) as exc:
                self._note(name, f"cannot be read ({exc})")
        return None

    def _of_files(
        self, name: str, files: list[tuple[int, bool]], listed: Queues | None
    ) -> StoredQueue:
        """Return a queue of files; ``listed`` are those that its nsqd knows, None for all."""
        meta = self._path / f"{name}.diskqueue.meta.dat"
        parts, problems = [], []
        positions = depth = None
        try:
            positions = Positions.read(meta)
        except FileNotFoundError:
            pass
        except ValueError as exc:
            problems.append((str(meta), f"cannot be read ({exc})"))
        unknown = GOOD if self._is_in_use else ORPHANED  # it has not synced the metadata yet
        is_listed = listed is None or name in listed
        live = GOOD if positions is not None and is_listed else unknown
        for number, is_bad in sorted(files):
            path = self._path / f"{name}.diskqueue.{number:06d}.dat{'.bad' if is_bad else ''}"
            if is_bad:
                parts.append(StoredFile(path, SET_ASIDE))
            elif positions is None:
                parts.append(StoredFile(path, live, written=0 if self._is_in_use else None))
            elif number > positions.write_file:
                parts.append(StoredFile(path, unknown))
            elif number < positions.read_file:
                parts.append(StoredFile(path, READ))
            else:
                is_last = number == positions.write_file
                written = positions.write_position if is_last else None
                start = positions.read_position if number == positions.read_file else 0
                parts.append(StoredFile(path, live, start, written))
                with suppress(FileNotFoundError):
                    if is_last and path.stat().st_size == written:
                        depth = positions.depth
        if positions is not None:
            there = {number for number, is_bad in files if not is_bad}
            first = next(each for each in count(positions.read_file) if each not in there)
            missing = self._path / f"{name}.diskqueue.{first:06d}.dat"
            is_wanted = (first, 0) < positions[3:]
            with suppress(OSError, ValueError):  # unless nsqd has gone on
                if is_wanted and not missing.exists() and Positions.read(meta) == positions:
                    problems.append((str(missing), "is not there, and in the metadata"))
        topic, _, channel = name.partition(":")
        is_paused = bool(listed and listed.get(name))
        return StoredQueue(topic, channel, tuple(parts), tuple(problems), depth, is_paused)

    def _of_database(self, path: Path) -> Iterator[StoredQueue]:
        """Yield the queues of a database, after it was copied."""
        copy = self._copies.enter_context(scratch_directory("nsq-queue-")) / path.name
        wal, copied_wal = Path(f"{path}-wal"), Path(f"{copy}-wal")
        for _ in range(_COPIES):
            # of one time if the log was not begun again: it then has all that the file may lack
            before = _head_of(wal)
            shutil.copyfile(path, copy)
            with suppress(FileNotFoundError):
                shutil.copyfile(wal, copied_wal)
            if _head_of(wal) == before:
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
        try:
            queues = read_queues(copy)
        except sqlite3.Error as exc:
            raise _unreadable(path, exc) from exc
        for number, name, _, waiting, deferred, _ in queues:
            if name is not None:
                topic, _, channel = name.partition(":")
                rows = StoredRows(path, copy, number, waiting + deferred)
                yield StoredQueue(topic, channel, (rows,), problems)


def _due_times(data_path: Path) -> dict[str, dict[str, int]]:
    try:
        found = json.loads((data_path / DUE_FILE).read_bytes()).items()
        return {name: {each: int(due) for each, due in times.items()} for name, times in found}
    except (OSError, ValueError, TypeError, AttributeError):
        return {}


def _is_locked(folder: Path) -> bool:
    """Whether an nsqd works there, as far as Linux tells: a lock of ours would keep one away."""
    status = folder.stat()
    device = f"{os.major(status.st_dev):02x}:{os.minor(status.st_dev):02x}"
    try:
        return f" {device}:{status.st_ino} " in Path("/proc/locks").read_text("ascii")
    except OSError:
        return False


def _head_of(wal: Path) -> bytes:
    try:
        with wal.open("rb") as file:
            return file.read(32)
    except FileNotFoundError:
        return b""


def _unreadable(path: Path, error: sqlite3.Error) -> NsqError:
    return NsqError(
        f"{path} cannot be read ({error})",
        hint="On a copy of it, `sqlite3 COPY .recover` may read messages out of it.",
    )


def digest(topic: str, message: StoredMessage) -> bytes:
    """Return what is the same for all copies of a message, and for no other message."""
    head = b"%b:%b%d:" % (topic.encode(), message.id, message.timestamp_ns)
    return blake2b(head + message.body, digest_size=16).digest()


def _is_damaged(queue: StoredQueue, part: Part) -> bool:
    found: list[str] = []
    return (
        (isinstance(part, StoredRows) and bool(queue.problems))
        or any(found for _ in part.messages(lambda *at: found.extend(at), bodies=False))
        or bool(found)
    )


def recovered(
    queues: list[StoredQueue], note: Note, *, everything: bool = False
) -> Iterator[tuple[str, StoredMessage]]:
    """Yield each message of damaged, orphaned and set aside parts once, with its topic.

    What is also in a good part of the same queue is left out: nsqd delivers it. With ``everything``
    good parts and those that are read count too. Raises ``OSError``, `NsqError`.
    """
    written: set[bytes] = set()
    for queue in queues:
        wanted, good = [], []
        for part in queue.parts:
            is_wanted = everything or part.state in (ORPHANED, SET_ASIDE)
            if is_wanted or (part.state == GOOD and _is_damaged(queue, part)):
                wanted.append(part)
            elif part.state == GOOD:
                good.append(part)
        if not wanted:
            continue
        there = {
            digest(queue.topic, message)
            for part in good
            for message in part.messages(lambda *_: None)
        }
        for part in wanted:
            for message in part.messages(note):
                key = digest(queue.topic, message)
                if key not in there and key not in written:
                    written.add(key)
                    yield queue.topic, message
