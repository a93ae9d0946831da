"""The files of ``--durable`` in a data path.

``nsqd.dat`` names the database. It is no JSON, so the Go nsqd ends at once in such a directory, and
it is replaced in one step, as when a database was rewritten: what is not named is removed.
"""

from __future__ import annotations

import os
import re
import shutil
import sqlite3
import sys
from collections.abc import Iterable
from contextlib import suppress
from itertools import count
from pathlib import Path

from nsqtools.errors import ConfigurationError, OutputError
from nsqtools.files.durable import copy_file, replace_file
from nsqtools.server.daemon_log import DaemonLog
from nsqtools.server.durable_database import (
    UNFINISHED,
    Database,
    DurableQueue,
    Row,
    all_rows,
    create,
    read_queues,
    remove,
    wal_damage,
)
from nsqtools.server.queues.data_path import FILE_NAME, decode_metadata
from nsqtools.server.queues.queue_files import queues_with_files

_NAMED = re.compile(rb"nsq nsqd --durable keeps its messages in (nsqd\.durable\.\d+\.db)\n")
_DATABASE = re.compile(r"nsqd\.durable\.(\d+)\.db")
_MTIME_BEHIND_NS = 20_000_000  # the clock of files is as coarse as the kernel's ticks


def named_database(data_path: Path) -> tuple[Path | None, bool]:
    """Return the database of a data path, None without one, and whether nsqd.dat names it.

    Nothing is written. Raises `ConfigurationError` for the log of an earlier version, or when it is
    not known which one it is, ``OSError``.
    """
    if any(data_path.glob("nsqd.durable.*.log")):
        raise ConfigurationError(
            f"{data_path} has a log of --durable that nsqtools 0.2 wrote. "
            "Run `nsq nsqd --recover-only` of nsqtools 0.2 on it, and then "
            "`nsq nsqd --recover-only --durable` of this one."
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
                f"Keep one of {', '.join(each.name for each in found)} in {data_path}."
            )
    if not path.exists():
        raise ConfigurationError(
            f"{path} is not there, which has the messages. "
            f"Bring it back, or remove {data_path / FILE_NAME} to begin without any."
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
                f"{self._path}` first, which writes the files of Go's nsqd."
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

    def begin(self, queues: Iterable[DurableQueue], rows: Iterable[Row]) -> Path:
        """Write a new database and name it. Raises `OutputError`, ``OSError``."""
        path = self._next()
        try:
            create(path, queues, rows)
        except sqlite3.Error as exc:
            raise self._unusable(path, exc) from exc
        self._name(path)
        return path

    def _has_queues(self) -> bool:
        try:
            listed = decode_metadata((self._path / FILE_NAME).read_bytes())
        except FileNotFoundError:
            listed = {}
        except (ValueError, RecursionError):
            return True
        return bool(listed or queues_with_files(self._path))

    def open(self, latest_ns: int = sys.maxsize) -> Database:
        """Open the database, or begin one; nothing is deferred for longer than ``latest_ns``.

        Raises `ConfigurationError`, `OutputError`, ``OSError``."""
        path = self.current()
        if path is None:
            if self._has_queues():
                raise ConfigurationError(
                    f"the messages in {self._path} are those of an nsqd without --durable. "
                    "Run `nsq nsqd --recover-only --durable --data-path="
                    f"{self._path}` first, which brings them into the database."
                )
            path = self.begin([], [])
        os.close(os.open(path, os.O_RDWR | os.O_CLOEXEC))  # one that is read-only is not damaged
        self.remove_others(path)
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
                mixed = self._next()  # beside the original, in case they fit nothing
                copy_file(path, mixed)
                Path(f"{mixed}-wal").write_bytes(saved)
                database = self._write_anew(mixed, "")
            else:
                database = Database(path)
        except sqlite3.Error as exc:
            try:
                database = self._write_anew(path, f"cannot be opened ({exc})")
            except sqlite3.Error:
                raise self._unusable(
                    path,
                    exc,
                    f". If that is room enough it is damaged: `sqlite3 {path} .recover` may read "
                    f"messages out of it. Move it and {FILE_NAME} away to begin without them.",
                ) from exc
        self.remove_others(database.path)
        database.defer_until(latest_ns)
        return database

    def _unusable(self, path: Path, exc: sqlite3.Error, advice: str = "") -> OutputError:
        free = shutil.disk_usage(self._path).free  # SQLite calls it an I/O error, too
        return OutputError(
            f"{path} cannot be used: {exc}, with {free} bytes free on the disk{advice}"
        )

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
            try:
                kept = self._keep(old)
            except OSError:
                database.close()
                remove(new)
                raise
            self._log.error(
                f"DURABLE: {old} {why or 'is damaged'}: {max(0, expected - found)} of {expected} "
                f"messages cannot be read; {kept} is a copy of it"
            )
        self._name(new)
        return database

    def _keep(self, path: Path) -> Path:
        kept = next(
            each
            for number in count(1)
            if not (each := path.with_name(f"{path.name}.damaged.{number}")).exists()
        )
        try:
            for suffix in ("", "-wal"):
                with suppress(FileNotFoundError):
                    copy_file(Path(f"{path}{suffix}"), Path(f"{kept}{suffix}"))
        except OSError:
            remove(kept)
            raise
        return kept

    def remove_others(self, path: Path | None) -> None:
        """Remove what was being written when it was killed."""
        for each in self._path.glob("nsqd.durable.*"):
            if (_DATABASE.fullmatch(each.name) and each != path) or each.suffix == UNFINISHED:
                remove(each)
