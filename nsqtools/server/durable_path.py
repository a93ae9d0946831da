"""The files of ``--durable`` in a data path.

``nsqd.dat`` names the database. It is not JSON, so the Go nsqd refuses to start in such a
directory. It is replaced atomically when a database has been rewritten. It never decides which file
is removed: a database that it does not name is kept as an orphan while it has messages, because
nsqd.dat may be the damaged file. Only two kinds of files are removed: one that ends in ``.new`` is
incomplete, and one that nsqd.dat calls a copy has no other messages. During a rewrite that is first
the new one, and then the old one, so that a kill leaves no orphan.
"""

from __future__ import annotations

import errno
import os
import re
import shutil
import sqlite3
import sys
from collections.abc import Iterable
from contextlib import ExitStack, suppress
from pathlib import Path

from nsqtools.errors import ConfigurationError, OutputError
from nsqtools.files.durable import (
    copy_file,
    link_file,
    numbered_name,
    replace_file,
    sync_folder,
    unused_name,
)
from nsqtools.protocol.text import counted
from nsqtools.server.daemon_log import DaemonLog
from nsqtools.server.durable_database import (
    UNFINISHED,
    Database,
    DurableQueue,
    MessageRow,
    StoredRow,
    copy_readable,
    create_database,
    read_patiently,
    read_queues,
    remove_database,
    stored_rows,
    wal_damage,
)
from nsqtools.server.queues.data_path import FILE_NAME, decode_metadata, read_metadata
from nsqtools.server.queues.queue_files import queues_with_files

_NAMED = re.compile(
    rb"nsq nsqd --durable keeps its messages in (nsqd\.durable\.\d+\.db)\n"
    rb"(?:(nsqd\.durable\.\d+\.db) is a copy\n)?"
)
_DATABASE = re.compile(r"nsqd\.durable\.\d+\.db(?:\.(orphan|damaged)\.\d+)?")
_UNFINISHED = re.compile(rf"nsqd\.durable\.\d+(?:\.log)?{re.escape(UNFINISHED)}(?:-\w+)?")
_NUMBER = re.compile(r"nsqd\.durable\.(\d+)\..*")
_MAX_COPIES = 5  # damaged databases to keep: each copy may be large
# Linux takes the times of files from the last timer tick, which is up to 10 ms old at 100 Hz.
_MTIME_LAG_NS = 20_000_000


def databases_in(data_path: Path) -> dict[Path, str]:
    """Return all databases with their kind. Raises ``OSError``.

    The kind is ``orphan`` for a database that nsqd.dat did not name, ``damaged`` for a copy of a
    database that had lost messages, ``copy`` for the source or the result of an unfinished rewrite,
    and ``""`` for a database that an nsqd may use.
    """
    copy = _copy_in(data_path)
    matches = {path: _DATABASE.fullmatch(path.name) for path in data_path.iterdir()}
    return {
        path: "copy" if path == copy else match[1] or "" for path, match in matches.items() if match
    }


def _content_in(data_path: Path) -> bytes:
    with suppress(FileNotFoundError, ValueError):
        return read_metadata(data_path / FILE_NAME)
    return b""


def _copy_in(data_path: Path) -> Path | None:
    """Return the database that nsqd.dat calls a copy."""
    with suppress(OSError):
        named = _NAMED.fullmatch(_content_in(data_path))
        if named and named[2]:
            return data_path / named[2].decode()
    return None


def named_database(data_path: Path) -> tuple[Path | None, bool]:
    """Return the database of a data path or None, and whether nsqd.dat names it.

    Nothing is written. Raises ``OSError``, and `ConfigurationError` for the log of an earlier
    version or when several databases are possible.
    """
    if any(data_path.glob("nsqd.durable.*.log")):
        raise ConfigurationError(
            f"{data_path} has a log of --durable that nsqtools 0.2 wrote. "
            "Run `nsq nsqd --recover-only` of nsqtools 0.2 on it, and then "
            "`nsq nsqd --recover-only --durable` of this one."
        )
    candidates = sorted(path for path, kind in databases_in(data_path).items() if not kind)
    content = _content_in(data_path)
    named = _NAMED.fullmatch(content)
    if named:
        path = data_path / named[1].decode()
    else:
        if _is_go_metadata(content) or not candidates:
            return None, False
        path = candidates[0]
        if len(candidates) > 1:
            names = ", ".join(candidate.name for candidate in candidates)
            raise ConfigurationError(
                f"{data_path / FILE_NAME} does not name the database with the messages. "
                f"Keep one of {names} in {data_path}."
            )
    if not path.exists():
        action = f"continue with {candidates[0].name}" if candidates else "start without messages"
        raise ConfigurationError(
            f"the database {path} does not exist. "
            f"Restore it, or remove {data_path / FILE_NAME} to {action}."
        )
    return path, named is not None


class DurablePath:
    """The data path of an nsqd, which has locked it."""

    def __init__(self, data_path: Path, log: DaemonLog) -> None:
        self._path = data_path
        self._log = log

    def describe(self, reason: str) -> str:
        """Return a failure of the database with its path."""
        return f"{self._path}/nsqd.durable: {reason}"

    # which file

    def refuse(self) -> None:
        """Raise `ConfigurationError` when the messages are in a database."""
        if named_database(self._path)[0] is not None:
            raise ConfigurationError(
                f"the messages in {self._path} are those of an nsqd with --durable. "
                "Start it with --durable, or run `nsq nsqd --recover-only --data-path="
                f"{self._path}` first, which writes the files of Go's nsqd."
            )
        for path, count in self._unnamed().items():
            if count != 0:
                self._log.warn(f"DURABLE: {self._describe_unnamed(path, count)}, and stays there")

    def _unnamed(self, named: Path | None = None) -> dict[Path, int | None]:
        """Return the databases that nsqd.dat does not name, with their number of messages."""
        others = sorted(path for path, kind in databases_in(self._path).items() if not kind)
        return {path: _count(path) for path in others if path != named}

    def _describe_unnamed(self, path: Path, count: int | None) -> str:
        messages = "messages" if count is None else counted(count, "message")
        return f"{path} has {messages}, and {self._path / FILE_NAME} does not name it"

    def _name(self, path: Path, copy: Path | None = None) -> None:
        text = f"nsq nsqd --durable keeps its messages in {path.name}\n"
        content = (text if copy is None else f"{text}{copy.name} is a copy\n").encode()
        name_file = self._path / FILE_NAME
        with suppress(FileNotFoundError):
            # A damaged nsqd.dat is kept: it may name another database that has messages.
            content_before = read_metadata(name_file)
            if not (_NAMED.fullmatch(content_before) or _is_go_metadata(content_before)):
                copy_file(name_file, unused_name(name_file.with_name(f"{FILE_NAME}.broken")))
        replace_file(name_file, content, 0o600)

    def _next(self) -> Path:
        """Return a name with a number that no file has, not even a log without its database."""
        matches = (_NUMBER.fullmatch(path.name) for path in self._path.iterdir())
        last = max((int(match[1]) for match in matches if match), default=0)
        return self._path / f"nsqd.durable.{last + 1}.db"

    # opening

    def written_ns(self) -> int:
        """Return an upper bound of the time of the last write to any database."""
        files = self._path.glob("nsqd.durable.*.db*")
        written_ns = max((path.stat().st_mtime_ns for path in files), default=0)
        return written_ns + _MTIME_LAG_NS

    def begin(self, queues: Iterable[DurableQueue], rows: Iterable[MessageRow]) -> Path:
        """Write a new database and name it. Raises `OutputError`, ``OSError``."""
        path = self._next()
        try:
            create_database(path, queues, map(StoredRow, rows))
        except sqlite3.Error as exc:
            raise self._unusable(path, exc) from exc
        self._name(path)
        return path

    def _has_queues(self) -> bool:
        try:
            listed = decode_metadata(read_metadata(self._path / FILE_NAME))
        except FileNotFoundError:
            listed = {}
        except (ValueError, RecursionError):
            return True
        return bool(listed or queues_with_files(self._path))

    def open(self, latest_ns: int = sys.maxsize) -> Database:
        """Open the database or create one. No message is then due later than ``latest_ns``.

        Raises `ConfigurationError`, `OutputError`, ``OSError``.
        """
        path, is_named = named_database(self._path)
        if path is None:
            self._refuse_unnamed()
            if self._has_queues():
                raise ConfigurationError(
                    f"the messages in {self._path} are those of an nsqd without --durable. "
                    "Run `nsq nsqd --recover-only --durable --data-path="
                    f"{self._path}` first, which brings them into the database."
                )
            path, is_named = self.begin([], []), True
        # A read-only database would look damaged below, so let it fail here.
        os.close(os.open(path, os.O_RDWR | os.O_CLOEXEC))
        self.remove_others(path)
        wal = Path(f"{path}-wal")
        damage, saved = wal_damage(wal)
        kept = mixed = None
        if damage:
            kept, where = self._keep(path)
            self._log.error(
                f"DURABLE: {wal}: {damage}: messages of some transactions may be missing, and "
                f"finished messages may be delivered again; {where}"
            )
        try:
            if saved:
                # Pages of different transactions may not fit together, so use a copy and write its
                # intact rows to a new database.
                mixed = self._next().with_suffix(f".log{UNFINISHED}")
                copy_file(path, mixed)
                Path(f"{mixed}-wal").write_bytes(saved)
                database = self._rewrite(mixed, path, "", kept)
            else:
                database = read_patiently(path, lambda: Database(path))
        except sqlite3.Error as exc:
            try:
                database = self._rewrite(path, path, f"cannot be opened ({exc})", kept)
            except (sqlite3.Error, OSError):
                raise self._unusable(
                    path,
                    exc,
                    f". If that is enough, the file is damaged: `sqlite3 {path} .recover` may read "
                    f"messages from it. Move it and {FILE_NAME} away to start without them.",
                ) from exc
        if not is_named:
            self._log.error(f"DURABLE: {self._path / FILE_NAME} was damaged; {path} is used")
            if database.path == path:
                self._name(path)
        if mixed is not None:
            remove_database(mixed)
        database.defer_until(latest_ns)
        return database

    def _refuse_unnamed(self) -> None:
        for path, count in self._unnamed().items():
            if count != 0:
                raise ConfigurationError(
                    f"{self._describe_unnamed(path, count)}. To continue with them, move "
                    f"{FILE_NAME} away. To start without them, run `nsq nsqd --recover-only "
                    f"--durable --data-path={self._path}`, which renames the database. "
                    "`nsq queue recover` can still read it."
                )

    def _unusable(self, path: Path, exc: sqlite3.Error, advice: str = "") -> OutputError:
        free = shutil.disk_usage(self._path).free  # SQLite may call a full disk an I/O error
        return OutputError(
            f"{path} cannot be used: {exc}, with {free} bytes free on the disk{advice}"
        )

    def renew(self, database: Database, reason: str) -> Database:
        """Rewrite a database while it is open. Raises ``sqlite3.Error``, ``OSError``."""
        damage = "" if "I/O" in reason else f"is damaged ({reason})"
        return self._rewrite(database.path, database.path, damage)

    def migrate(self, old: Database) -> Database:
        """Return the database, rewritten if nsqtools 0.3.0 wrote it, unless that fails.

        Raises ``OSError`` if it is uncertain which one nsqd.dat names.
        """
        path = old.path
        if old.is_current:
            return old
        self._log.info(f"DURABLE: rewriting {path}, which nsqtools 0.3.0 wrote, in a newer format")
        try:
            if shutil.disk_usage(self._path).free < path.stat().st_size:
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
            new = self._rewrite(path, path, "")
        except (sqlite3.Error, OSError) as exc:
            if named_database(self._path)[0] != path:
                raise
            self._log.warn(
                f"DURABLE: {path} keeps the pages of nsqtools 0.3.0, in which messages of more "
                f"than 960 bytes take 4.7 KB or more: {exc}. The next start tries again"
            )
            try:
                old.add_bodies()
            except sqlite3.Error as exc:
                raise self._unusable(path, exc) from exc
            return old
        old.close()
        return new

    def _rewrite(self, old: Path, named: Path, damage: str, kept: Path | None = None) -> Database:
        """Write the readable rows of ``old`` to a new database, and name it instead of ``named``.

        ``kept`` is a copy of the old database. Without it, one is created if messages are lost.
        """
        new = self._next()
        self._name(named, new)
        queues = read_queues(old)
        create_database(new, queues, stored_rows(old))
        with ExitStack() as undo:
            undo.callback(remove_database, new)
            database = read_patiently(new, lambda: Database(new))
            undo.callback(database.close)
            expected = sum(queue.waiting + queue.deferred for queue in queues if queue.name)
            copied = sum(queue.waiting + queue.deferred for queue in database.queues if queue.name)
            lost = max(0, expected - copied)
            where = f"{kept} is a copy of it" if kept else "nothing is lost"
            if lost and kept is None:
                kept, where = self._keep(old)
            undo.pop_all()
        if lost or damage:
            self._log.error(
                f"DURABLE: {old} {damage or 'is damaged'}: {lost} of {expected} messages cannot be "
                f"read; {where}"
            )
        try:
            self._name(new, named)
        except OSError:
            database.close()
            # If only the sync failed, nsqd.dat names the new database already.
            if named_database(self._path)[0] != named:
                self._name(named, new)
            remove_database(new)
            raise
        with suppress(OSError):  # the next start removes it
            remove_database(named)
            self._name(new)
        return database

    def _keep(self, path: Path) -> tuple[Path | None, str]:
        """Copy a database that loses messages; return the copy, or None, and a text about it."""
        copies = [kind for kind in databases_in(self._path).values() if kind == "damaged"]
        if len(copies) >= _MAX_COPIES:
            return None, (
                f"no copy is kept, because {self._path} has {len(copies)} older ones: run "
                "`nsq queue recover`, and remove them"
            )
        kept = numbered_name(path.with_name(f"{path.name}.damaged"))
        try:
            for suffix in ("", "-wal"):
                with suppress(FileNotFoundError):
                    copy_readable(Path(f"{path}{suffix}"), Path(f"{kept}{suffix}"))
        except OSError:
            remove_database(kept)
            raise
        return kept, f"{kept} is a copy of it"

    # others

    def remove_others(self, path: Path | None) -> None:
        """Remove incomplete files and empty databases; rename other databases than ``path``."""
        for other, count in self._unnamed(path).items():
            if count == 0:
                remove_database(other)
            else:
                orphan = self.set_aside(other, "orphan")
                self._log.error(
                    f"DURABLE: {self._describe_unnamed(other, count)}: it is {orphan} now, which "
                    "`nsq queue` reads"
                )
        if path is not None and (copy := _copy_in(self._path)) is not None:
            with suppress(OSError):  # neither is needed, so a full disk does not matter
                remove_database(copy)
                self._name(path)
        # The pattern is exact, because the name of a topic, and of its files, may begin like this.
        for unfinished in self._path.iterdir():
            if _UNFINISHED.fullmatch(unfinished.name):
                unfinished.unlink()

    def set_aside(self, path: Path, kind: str) -> Path:
        """Rename a closed database and its log; return the new name."""
        aside = numbered_name(path.with_name(f"{path.name}.{kind}"))
        # The log first: a kill in between must not leave a database without its log.
        with suppress(FileNotFoundError):
            link_file(Path(f"{path}-wal"), Path(f"{aside}-wal"))
        path.rename(aside)
        remove_database(path)
        sync_folder(self._path)
        return aside


def _is_go_metadata(content: bytes) -> bool:
    with suppress(ValueError, RecursionError):
        decode_metadata(content)
        return True
    return False


def _count(path: Path) -> int | None:
    """Return the number of messages in a database, None when it cannot be read."""
    try:
        if wal_damage(Path(f"{path}-wal"))[0]:
            return None  # SQLite would discard the log
        return sum(queue.waiting + queue.deferred for queue in read_queues(path) if queue.name)
    except (sqlite3.Error, OSError, ConfigurationError):
        return None
