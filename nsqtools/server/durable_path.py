"""The files of ``--durable`` in a data path, and their way to the files of Go's nsqd and back.

``nsqd.dat`` names the database. It is no JSON, so the Go nsqd ends at once in such a directory, and
it is replaced in one step: when a database was rewritten, and by `export` and `adopt`, which
lose nothing when they are killed: what is not named is removed, or written again, by the next one.
"""

from __future__ import annotations

import json
import re
import sqlite3
import sys
from collections.abc import Iterator
from contextlib import suppress
from itertools import count, islice
from pathlib import Path

from nsqtools.errors import ConfigurationError
from nsqtools.files.durable import copy_file, replace_file, sync_folder
from nsqtools.protocol.frames import MIN_MESSAGE_SIZE
from nsqtools.server.daemon_log import DaemonLog
from nsqtools.server.durable_database import (
    Database,
    DurableQueue,
    Row,
    all_rows,
    create,
    read_queues,
    remove,
    wal_damage,
)
from nsqtools.server.queues.backlog import encoded
from nsqtools.server.queues.data_path import (
    FILE_NAME,
    Queues,
    decode_metadata,
    encode_metadata,
    encode_topic,
)
from nsqtools.server.queues.disk_queue import DiskQueue
from nsqtools.server.queues.queue_files import (
    DiskWork,
    Positions,
    QueueFile,
    QueueFiles,
    Record,
    queues_with_files,
)
from nsqtools.server.queues.queued_message import (
    BODY_AT,
    ID_AT,
    from_record,
    with_attempts,
)

_NAMED = re.compile(rb"nsq nsqd --durable keeps its messages in (nsqd\.durable\.\d+\.db)\n")
_DATABASE = re.compile(r"nsqd\.durable\.(\d+)\.db")
DUE_FILE = "nsqd.deferred"
_MESSAGE_LIMIT = (1 << 31) - 1 - MIN_MESSAGE_SIZE
_AT_ONCE = 1000
_MTIME_BEHIND_NS = 20_000_000  # the clock of files is as coarse as the kernel's ticks


def times_kept(data_path: Path) -> int:
    """Count the messages in files of Go's nsqd of which it is known when they are due."""
    try:
        return sum(map(len, json.loads((data_path / DUE_FILE).read_bytes()).values()))
    except (OSError, ValueError, TypeError, AttributeError):
        return 0


def named_database(data_path: Path) -> tuple[Path | None, bool]:
    """Return the database of a data path, None without one, and whether nsqd.dat names it.

    Nothing is written. Raises `ConfigurationError` for the log of an earlier version, or when it is
    not known which one it is, ``OSError``.
    """
    if any(data_path.glob("nsqd.durable.*.log")):
        raise ConfigurationError(
            f"{data_path} has a log of --durable that nsqtools 0.2 wrote. "
            "Run `nsq nsqd --recover-only` of nsqtools 0.2 on it, and then "
            "`nsq nsqd --recover-only --durable` of this one.",
        )
    found = sorted(each for each in data_path.iterdir() if _DATABASE.fullmatch(each.name))
    try:
        content = (data_path / FILE_NAME).read_bytes()
    except FileNotFoundError:
        content = b""
    named = _NAMED.fullmatch(content)
    if named:
        path = data_path / named[1].decode()
    else:
        with suppress(ValueError, RecursionError):
            decode_metadata(content)
            return None, False
        if not found:
            return None, False
        path = found[0]
        if len(found) > 1:
            raise ConfigurationError(
                f"{data_path / FILE_NAME} does not say which database has the messages. "
                f"Keep one of {', '.join(each.name for each in found)} in {data_path}.",
            )
    if not path.exists():
        raise ConfigurationError(
            f"{path} is not there, which has the messages. "
            f"Bring it back, or remove {data_path / FILE_NAME} to begin without any.",
        )
    return path, named is not None


class DurablePath:
    """The data path of an nsqd that has its lock."""

    def __init__(self, data_path: Path, log: DaemonLog) -> None:
        self._path = data_path
        self._log = log

    def describe(self, reason: str) -> str:
        """Return what is wrong with the database, and where."""
        return f"{self._path}/nsqd.durable: {reason}"

    # which file

    def current(self) -> Path | None:
        """Return the database, None without one, and name it where a damaged file does not.

        Raises as `named_database` does.
        """
        path, is_named = named_database(self._path)
        if path is not None and not is_named:
            self._log.error(f"DURABLE: {self._path / FILE_NAME} was damaged; {path} is used")
            self._name(path)
        return path

    def refuse(self) -> None:
        """Raise `ConfigurationError` when the messages are in a database."""
        if self.current() is not None:
            raise ConfigurationError(
                f"the messages in {self._path} are those of an nsqd with --durable. "
                "Start it with --durable, or run `nsq nsqd --recover-only --data-path="
                f"{self._path}` first, which writes the files of Go's nsqd.",
            )

    def _name(self, path: Path) -> None:
        content = f"nsq nsqd --durable keeps its messages in {path.name}\n"
        replace_file(self._path / FILE_NAME, content.encode(), 0o600)

    def _next(self) -> Path:
        found = (_DATABASE.fullmatch(each.name) for each in self._path.iterdir())
        return self._path / f"nsqd.durable.{max((int(m[1]) for m in found if m), default=0) + 1}.db"

    # opening

    def written_ns(self) -> int:
        """Return when a database was last written at the latest, 0 without one."""
        files = self._path.glob("nsqd.durable.*.db*")
        written_ns = max((each.stat().st_mtime_ns for each in files), default=0)
        return written_ns + _MTIME_BEHIND_NS

    def open(self, latest_ns: int = sys.maxsize) -> Database:
        """Open the database, or begin one; nothing is deferred for longer than ``latest_ns``.

        Raises `ConfigurationError`, ``OSError``."""
        path = self.current()
        if path is None:
            if self._listed() or queues_with_files(self._path):
                raise ConfigurationError(
                    f"the messages in {self._path} are those of an nsqd without --durable. "
                    "Run `nsq nsqd --recover-only --durable --data-path="
                    f"{self._path}` first, which brings them into the database.",
                )
            path = self._next()
            create(path, [], [])
            self._name(path)
        self._remove_others(path)
        wal = Path(f"{path}-wal")
        damage, saved = wal_damage(wal)
        if damage:
            kept = self._keep(path)
            self._log.error(
                f"DURABLE: {wal}: {damage}: what was published in some transactions may be "
                f"missing, and what was finished comes again; {kept} and -wal are as they were"
            )
        try:
            if saved:  # pages that belong together may be of different times
                wal.write_bytes(saved)
                database = self._write_anew(path, "")
            else:
                database = Database(path)
        except sqlite3.Error as exc:
            try:
                database = self._write_anew(path, f"cannot be opened ({exc})")
            except sqlite3.Error:
                raise ConfigurationError(
                    f"{path} is damaged: {exc}. "
                    f"`sqlite3 {path} .recover` may read messages out of it. Move it and "
                    f"{FILE_NAME} away to begin without them.",
                ) from exc
        self._remove_others(database.path)
        database.defer_until(latest_ns)
        return database

    def renew(self, database: Database, reason: str) -> Database:
        """Rewrite a database while it is open. Raises ``sqlite3.Error``, ``OSError``."""
        return self._write_anew(database.path, "" if "I/O" in reason else f"is damaged ({reason})")

    def _write_anew(self, old: Path, why: str) -> Database:
        new = self._next()
        queues = read_queues(old)
        create(new, queues, all_rows(old))
        database = Database(new)
        expected = sum(each.waiting + each.deferred for each in queues if each.name)
        found = sum(each.waiting + each.deferred for each in database.queues if each.name)
        if why or found < expected:
            kept = self._keep(old)
            self._log.error(
                f"DURABLE: {old} {why or 'is damaged'}: {max(0, expected - found)} of {expected} "
                f"messages cannot be read; {kept} is a copy of it"
            )
        self._name(new)
        return database

    def close_old(self, database: Database) -> None:
        """Close a database that was rewritten, and remove it."""
        database.close()
        remove(database.path)

    def _keep(self, path: Path) -> Path:
        kept = next(
            each
            for number in count(1)
            if not (each := path.with_name(f"{path.name}.damaged.{number}")).exists()
        )
        for suffix in ("", "-wal"):
            with suppress(FileNotFoundError):
                copy_file(Path(f"{path}{suffix}"), Path(f"{kept}{suffix}"))
        return kept

    def _remove_others(self, path: Path | None) -> None:
        """Remove what was being written when it was killed."""
        for each in self._path.iterdir():
            if _DATABASE.fullmatch(each.name) and each != path:
                remove(each)

    def _listed(self) -> Queues:
        try:
            return decode_metadata((self._path / FILE_NAME).read_bytes(), self._log.warn)
        except FileNotFoundError:
            return {}
        except (ValueError, RecursionError) as exc:
            raise ConfigurationError(
                f"failed to parse metadata in {self._path / FILE_NAME} - {exc}"
            ) from exc

    # Go's files

    def export(self, max_bytes_per_file: int) -> None:
        """Write the messages to the files of Go's nsqd, if there is a database.

        Raises `ConfigurationError`, ``OSError``.
        """
        if self.current() is None:
            return
        database = self.open()
        path, queues = database.path, [each for each in database.queues if each.name]
        database.close()
        self._remove_queue_files()  # of an export that was killed
        due: dict[str, dict[str, int]] = {}
        written = 0
        for queue in queues:
            name = queue.name or ""
            disk = DiskQueue(
                name,
                self._path,
                max_bytes_per_file=max_bytes_per_file,
                max_msg_size=_MESSAGE_LIMIT,
                sync_every=1 << 62,  # at the end
                log=self._log,
                may_have_files=False,
            )
            rows = all_rows(path, queue.number)
            while some := list(islice(rows, _AT_ONCE)):
                disk.put([encoded(with_attempts(frame, made) for _, _, _, made, frame in some)])
                written += len(some)
                for _, due_ns, _, _, frame in some:
                    if due_ns:
                        message_id = frame[ID_AT:BODY_AT].decode("latin-1")
                        due.setdefault(name, {})[message_id] = due_ns
            disk.close()
        replace_file(self._path / DUE_FILE, json.dumps(due).encode(), 0o600)
        sync_folder(self._path)
        topics = _encoded_topics({each.name: each.is_paused for each in queues if each.name})
        replace_file(self._path / FILE_NAME, encode_metadata(topics), 0o600)
        remove(path)
        self._log.info(f"DURABLE: wrote {written} messages of {len(queues)} queues to files")

    def adopt(self) -> None:
        """Bring what is in the files of Go's nsqd into a database, if there is none.

        Raises `ConfigurationError`, ``OSError``.
        """
        if self.current() is not None:
            self.open().close()
            return
        listed = self._listed()
        names = listed.keys() | queues_with_files(self._path, with_meta=True)
        queues = [
            DurableQueue(number, name, listed.get(name, False), 0, 0)
            for number, name in enumerate(sorted(names), 1)
        ]
        path = self._next()
        create(path, queues, (row for queue in queues for row in self._rows(queue)))
        self._name(path)
        self._remove_queue_files()
        self._log.info(f"DURABLE: brought {len(queues)} queues from files into {path}")

    def _rows(self, queue: DurableQueue) -> Iterator[Row]:
        try:
            due = json.loads((self._path / DUE_FILE).read_bytes()).get(queue.name, {})
        except (OSError, ValueError, AttributeError):
            due = {}
        for turn, record in enumerate(self._records(queue.name or ""), 1):
            attempts = int.from_bytes(record[8:10], "big")
            frame = from_record(record[:8] + b"\0\0" + record[10:])
            due_ns = due.get(record[10:26].decode("latin-1"), 0)
            yield queue.number, int(due_ns), turn, attempts, frame

    def _records(self, name: str) -> Iterator[bytes]:
        """Yield the unread records of a queue. Nothing is removed."""
        files = QueueFiles(self._path, name, DiskWork(), self._log)
        positions = files.positions() or Positions(0, 0, 0, 0, 0)
        for number in files.numbers():
            if number < positions.read_file:
                continue
            path = files.data(number)
            with QueueFile(path) as file:
                for found in file.scan(positions.start_of(number)):
                    if isinstance(found, Record):
                        yield file.content(found)
                        continue
                    self._log.error(
                        f"DISKQUEUE({name}) reading {path} - bytes {found.at} to {found.end} are "
                        f"no messages; {path}.bad is a copy of it"
                    )
                    copy_file(path, Path(f"{path}.bad"))

    def _remove_queue_files(self) -> None:
        for name in queues_with_files(self._path, with_meta=True):
            files = QueueFiles(self._path, name, DiskWork(), self._log)
            files.remove(files.numbers())
            files.meta.unlink(missing_ok=True)
        (self._path / DUE_FILE).unlink(missing_ok=True)


def _encoded_topics(queues: Queues) -> Iterator[bytes]:
    channels: dict[str, list[tuple[str, bool]]] = {}
    for name in sorted(queues):
        topic, _, channel = name.partition(":")
        found = channels.setdefault(topic, [])
        if channel:
            found.append((channel, queues[name]))
    return (encode_topic(each, queues.get(each, False), channels[each]) for each in channels)
