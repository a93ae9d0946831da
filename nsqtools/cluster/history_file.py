"""The history in a file, for days: SQLite, written by one process, once a minute.

Frames of a minute are kept for two days, and means of them over 10 minutes for 30 days; what is
older is deleted. A file that is damaged, or not one of these, is refused when it is opened. Later a
write that fails (a full disk) is reported once, and the points are lost; the work goes on.

Trap: the place of a series in the columns is in the file too, so the two are written together.
"""

from __future__ import annotations

import logging
import sqlite3
import threading
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path

from nsqtools.cluster.history_frames import Frame, Place, average
from nsqtools.cluster.history_values import QUANTITIES
from nsqtools.cluster.queue_rows import Key
from nsqtools.errors import ConfigurationError
from nsqtools.protocol.escaping import escape_line

log = logging.getLogger("nsqtools")

APPLICATION_ID = 0x4E535148  # NSQH
VERSION = 1
FINE_S, FINE_KEEP_S = 60, 2 * 86400
COARSE_S, COARSE_KEEP_S = 600, 30 * 86400

_MAGIC = b"SQLite format 3\0"
_SCHEMA = f"""
PRAGMA application_id = {APPLICATION_ID};
PRAGMA user_version = {VERSION};
CREATE TABLE series (
    place INTEGER PRIMARY KEY, node TEXT NOT NULL, topic TEXT NOT NULL, channel TEXT NOT NULL,
    since_s REAL NOT NULL
);
CREATE TABLE points (
    step_s INTEGER NOT NULL, quantity TEXT NOT NULL, at_s REAL NOT NULL, packed BLOB NOT NULL,
    PRIMARY KEY (step_s, quantity, at_s)
) WITHOUT ROWID;
"""


class HistoryFile:
    """One file. Thread-safe; close it. Raises `ConfigurationError` when it cannot be used."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._lock = threading.Lock()
        self._fresh: dict[Key, Place] = {}
        self._has_failed = False
        _check_kind(path)
        with _refused(path):
            self._database = sqlite3.connect(
                path, timeout=1.0, isolation_level=None, check_same_thread=False
            )
            try:
                self._prepare()
            except BaseException:
                self._database.close()
                raise

    def _prepare(self) -> None:
        run = self._database.execute
        run("PRAGMA locking_mode = EXCLUSIVE")
        run("PRAGMA journal_mode = WAL")
        run("PRAGMA synchronous = NORMAL")
        run("BEGIN IMMEDIATE")
        has_tables = run("SELECT count(*) FROM sqlite_master").fetchone()[0]
        run("COMMIT")
        if not has_tables:
            self._database.executescript(f"BEGIN;{_SCHEMA}COMMIT;")
        identity = run("PRAGMA application_id").fetchone()[0]
        version = run("PRAGMA user_version").fetchone()[0]
        if identity != APPLICATION_ID:
            raise ConfigurationError(
                f"{self._path} is a database of another program",
                hint="Give --history a file of its own.",
            )
        if version != VERSION:
            raise ConfigurationError(
                f"{self._path} has version {version} of the history; this nsq knows {VERSION}",
                hint="Give --history another file.",
            )
        fault = run("PRAGMA quick_check(1)").fetchone()[0]
        if fault != "ok":
            raise sqlite3.DatabaseError(str(fault))
        names = {name for (name,) in run("SELECT name FROM sqlite_master WHERE type = 'table'")}
        if not {"series", "points"} <= names:
            raise sqlite3.DatabaseError("a table is missing")

    def places(self) -> list[tuple[Key, Place]]:
        """Return where each series stands, in the order of the place."""
        with _refused(self._path), self._lock:
            rows = self._database.execute(
                "SELECT node, topic, channel, place, since_s FROM series ORDER BY place"
            ).fetchall()
        found = [
            ((node, topic, channel), Place(at, since)) for node, topic, channel, at, since in rows
        ]
        if [place.number for _, place in found] != list(range(len(found))):
            raise _damaged(self._path, "a series is missing")
        return found

    def add_places(self, places: Iterable[tuple[Key, Place]]) -> None:
        """Remember series; they are written with the next frame."""
        with self._lock:
            self._fresh.update(places)

    def add(self, frame: Frame) -> None:
        """Write the frame of a minute, and every 10 minutes their mean. Deletes what is too old."""
        with self._lock, self._trying():
            run = self._database.execute
            run("BEGIN IMMEDIATE")
            try:
                self._write_places()
                self._write(FINE_S, frame)
                self._write_mean(frame.at_s)
                for step_s, keep_s in ((FINE_S, FINE_KEEP_S), (COARSE_S, COARSE_KEEP_S)):
                    for quantity in QUANTITIES:
                        run(
                            "DELETE FROM points WHERE step_s = ? AND quantity = ? AND at_s < ?",
                            (step_s, quantity, frame.at_s - keep_s),
                        )
                run("COMMIT")
            except BaseException:
                if self._database.in_transaction:
                    run("ROLLBACK")
                raise
            self._fresh.clear()

    def columns(
        self, column: int, since_s: float, until_s: float
    ) -> tuple[list[tuple[float, bytes]], float]:
        """Return (time, column) of a quantity, and how far apart they are at most.

        Minutes for less than two days, else 10 minutes and the minutes since the last of them.
        """
        found: list[tuple[float, bytes]] = []
        step_s = FINE_S if until_s - since_s <= FINE_KEEP_S else COARSE_S
        with self._lock, self._trying():
            if step_s == COARSE_S:
                found = self._read(COARSE_S, column, since_s, until_s)
                since_s = found[-1][0] + COARSE_S / 2 if found else since_s
            found += self._read(FINE_S, column, since_s, until_s)
        return found, step_s

    def close(self) -> None:
        """Close the file."""
        with self._lock, self._trying():
            self._database.close()

    def _write_places(self) -> None:
        self._database.executemany(
            "INSERT OR REPLACE INTO series (node, topic, channel, place, since_s)"
            " VALUES (?, ?, ?, ?, ?)",
            # a hostile nsqd may send what is not text
            [(*map(escape_line, key), *place) for key, place in self._fresh.items()],
        )

    def _write(self, step_s: int, frame: Frame) -> None:
        self._database.executemany(
            "INSERT OR REPLACE INTO points (step_s, quantity, at_s, packed) VALUES (?, ?, ?, ?)",
            [
                (step_s, quantity, frame.at_s, packed)
                for quantity, packed in zip(QUANTITIES, frame.columns, strict=True)
            ],
        )

    def _write_mean(self, at_s: float) -> None:
        """Write the mean of the last 10 minutes that are over, if it is not there."""
        end_s = at_s // COARSE_S * COARSE_S
        middle_s = end_s - COARSE_S / 2
        is_there = self._database.execute(
            "SELECT 1 FROM points WHERE step_s = ? AND at_s = ? AND quantity = ?",
            (COARSE_S, middle_s, QUANTITIES[0]),
        ).fetchone()
        if is_there:
            return
        parts = [
            [packed for _, packed in self._read(FINE_S, column, end_s - COARSE_S, end_s)]
            for column in range(len(QUANTITIES))
        ]
        if parts[0]:
            self._write(COARSE_S, Frame(middle_s, tuple(map(average, parts))))

    def _read(
        self, step_s: int, column: int, since_s: float, until_s: float
    ) -> list[tuple[float, bytes]]:
        return self._database.execute(
            "SELECT at_s, packed FROM points"
            " WHERE step_s = ? AND quantity = ? AND at_s >= ? AND at_s < ? ORDER BY at_s",
            (step_s, QUANTITIES[column], since_s, until_s),
        ).fetchall()

    @contextmanager
    def _trying(self) -> Iterator[None]:
        """Report the first failure in a row."""
        try:
            yield
        except sqlite3.Error as exc:
            if not self._has_failed:
                log.warning("the history in %s cannot be used (%s)", self._path, exc)
            self._has_failed = True
        else:
            self._has_failed = False


def _check_kind(path: Path) -> None:
    """Refuse what SQLite would overwrite because it is too short to be a database."""
    try:
        if not path.is_file():
            return
        with path.open("rb") as file:
            begin = file.read(len(_MAGIC))
    except OSError as exc:
        raise ConfigurationError(f"{path}: {exc.strerror}") from exc
    if begin and begin != _MAGIC:
        raise _damaged(path, "not a database")


@contextmanager
def _refused(path: Path) -> Iterator[None]:
    try:
        yield
    except sqlite3.OperationalError as exc:
        if "locked" in str(exc):
            raise ConfigurationError(
                f"{path} is in use by another process", hint="Give --history a file of its own."
            ) from exc
        raise ConfigurationError(f"{path}: {exc}", hint="Check the path of --history.") from exc
    except sqlite3.DatabaseError as exc:
        raise _damaged(path, str(exc)) from exc


def _damaged(path: Path, fault: str) -> ConfigurationError:
    return ConfigurationError(
        f"{path} is damaged, or not a history of nsq ({fault})",
        hint="Move it away; a new one is made.",
    )
