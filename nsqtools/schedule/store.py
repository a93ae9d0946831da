"""The entries of a scheduler, in SQLite: committed and synced before a request is finished.

One process holds the lock of the directory and writes; any other may read meanwhile (WAL).

An entry that was published or cancelled leaves a row without a due time for `REMEMBERED_NS`. So a
request that nsqd delivers again, because its FIN was lost, is recognized as handled, and a request
that is older than the one that replaced it does not come back. The rank of a request is the time at
which nsqd received it, and its id, which one nsqd assigns in rising order.
"""

from __future__ import annotations

import os
import sqlite3
import time
from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import NamedTuple

from nsqtools.errors import ConfigurationError, NotFoundError, OutputError
from nsqtools.files.opening import lock_file
from nsqtools.protocol.text import NS
from nsqtools.schedule.request import Cancellation, CatchUp, Cron, Entry, Interval, Recurrence

FILE_NAME = "schedule.db"
LOCK_NAME = ".schedule.lock"
VERSION = 1
LOCK_POLL_S = 0.5  # a second scheduler takes over this long after the first has ended

REMEMBERED_NS = 86_400 * NS
"""nsqd redelivers a request within its -max-msg-timeout, 15 minutes by default, and a consumer that
was stopped for a night receives it the next day."""

_SCHEMA = f"""
CREATE TABLE entries (
    key TEXT PRIMARY KEY,
    asked_ns INTEGER NOT NULL,  -- the rank of the request, with its id
    asked_id BLOB NOT NULL,
    due_ns INTEGER,             -- NULL: published, cancelled or refused
    ended_ns INTEGER,           -- when that was
    tries INTEGER NOT NULL DEFAULT 0,  -- publishes of this occurrence that were begun
    topic TEXT NOT NULL,
    body BLOB NOT NULL,
    start_ns INTEGER,           -- of an interval
    interval_ns INTEGER,
    cron TEXT,
    timezone TEXT,
    catch_up TEXT NOT NULL,
    envelope INTEGER NOT NULL,
    error TEXT NOT NULL DEFAULT ''     -- why nsqd refused it for good
);
CREATE INDEX entries_by_due ON entries (due_ns) WHERE due_ns IS NOT NULL;
CREATE INDEX entries_by_end ON entries (ended_ns) WHERE ended_ns IS NOT NULL AND error = '';
CREATE INDEX refused_entries ON entries (ended_ns) WHERE ended_ns IS NOT NULL AND error != '';
PRAGMA user_version = {VERSION};
"""

_COLUMNS = """key, due_ns, topic, body, start_ns, interval_ns, cron, timezone, catch_up, envelope,
tries, error"""


class Rank(NamedTuple):
    """The place of a request in the order of requests."""

    asked_ns: int
    asked_id: bytes


class StoredEntry(NamedTuple):
    """An entry with its publishes and its error. ``entry.due_ns`` is 0 after a refusal."""

    entry: Entry
    tries: int
    error: str


class Advance(NamedTuple):
    """The next state of an entry: a new due time, the end (None), or the error of a refusal."""

    entry: Entry
    due_ns: int | None = None
    error: str = ""


class ScheduleStore:
    """The entries in a directory. Raises `OutputError` for a file that cannot be used."""

    def __init__(self, folder: Path, *, read_only: bool = False) -> None:
        self._path = folder / FILE_NAME
        if read_only and not self._path.exists():
            raise NotFoundError(
                f"{self._path} does not exist",
                hint="Give --data-path of a scheduler: nsq schedule serve.",
            )
        with self.translating_errors(), ExitStack() as undo:
            mode = "ro" if read_only else "rwc"
            self._database = sqlite3.connect(
                f"file:{_quoted(self._path)}?mode={mode}", uri=True, isolation_level=None, timeout=5
            )
            undo.callback(self._database.close)
            if not read_only:
                os.chmod(self._path, 0o600)  # bodies are for nobody else
                self._database.execute("PRAGMA journal_mode=WAL")
                self._database.execute("PRAGMA synchronous=FULL")
            version = self._database.execute("PRAGMA user_version").fetchone()[0]
            if version == 0 and not read_only:
                self._database.executescript(f"BEGIN IMMEDIATE; {_SCHEMA} COMMIT;")
            elif version != VERSION:
                raise ConfigurationError(
                    f"{self._path} has version {version}, and this nsqtools reads {VERSION}",
                    hint="Use the nsqtools that wrote it, or a newer one.",
                )
            undo.pop_all()

    def close(self) -> None:
        self._database.close()

    @contextmanager
    def translating_errors(self) -> Iterator[None]:
        """Raise `OutputError` for an error of SQLite."""
        try:
            yield
        except sqlite3.Error as error:
            raise OutputError(
                f"cannot use {self._path} ({error})",
                hint="Make room on its disk, or restore the file from a backup.",
            ) from error

    @contextmanager
    def _transaction(self) -> Iterator[sqlite3.Connection]:
        with self.translating_errors():
            self._database.execute("BEGIN IMMEDIATE")
            try:
                yield self._database
                self._database.execute("COMMIT")
            except BaseException:
                if self._database.in_transaction:
                    self._database.execute("ROLLBACK")
                raise

    # -- requests ------------------------------------------------------------------------------

    def apply(self, requests: Sequence[tuple[Rank, Entry | Cancellation]], now_ns: int) -> None:
        """Commit requests. A request that is not newer than the stored one changes nothing."""
        with self._transaction() as database:
            for rank, request in requests:
                row = database.execute(
                    "SELECT asked_ns, asked_id FROM entries WHERE key = ?", (request.key,)
                ).fetchone()
                if row is None or Rank(*row) < rank:
                    ended_ns = now_ns if isinstance(request, Cancellation) else None
                    database.execute(
                        "INSERT OR REPLACE INTO entries (asked_ns, asked_id, ended_ns, key, due_ns,"
                        " topic, body, start_ns, interval_ns, cron, timezone, catch_up, envelope)"
                        " VALUES (?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?)",
                        (*rank, ended_ns, *_values(request)),
                    )

    def forget_ended(self, now_ns: int) -> None:
        """Delete the rows of entries that ended long ago."""
        with self._transaction() as database:
            database.execute(
                "DELETE FROM entries WHERE ended_ns < ? AND error = ''", (now_ns - REMEMBERED_NS,)
            )

    # -- due entries ---------------------------------------------------------------------------

    def next_due_ns(self, without: Collection[str] = ()) -> int | None:
        """Return the earliest due time, or None without entries. See `due_entries`."""
        with self.translating_errors():
            row = self._database.execute(
                "SELECT min(due_ns) FROM entries"
                f" WHERE due_ns IS NOT NULL AND topic NOT IN ({_marks(without)})",
                tuple(without),
            )
            due_ns: int | None = row.fetchone()[0]
            return due_ns

    def due_entries(
        self, now_ns: int, limit: int, without: Collection[str] = ()
    ) -> list[StoredEntry]:
        """Return due entries, the earliest first, except those of the topics ``without``."""
        with self.translating_errors():
            return self._select(
                f"WHERE due_ns <= ? AND topic NOT IN ({_marks(without)})"
                " ORDER BY due_ns, rowid LIMIT ?",
                now_ns,
                *without,
                limit,
            )

    def record_tries(self, entries: Sequence[Entry]) -> None:
        """Commit that these occurrences are about to be published.

        After a kill they may be published a second time, and `StoredEntry.tries` shows it.
        """
        with self._transaction() as database:
            database.executemany(
                "UPDATE entries SET tries = tries + 1 WHERE key = ?",
                [(entry.key,) for entry in entries],
            )

    def advance(self, advances: Sequence[Advance], now_ns: int) -> None:
        """Commit what follows for entries that were published, skipped or refused."""
        with self._transaction() as database:
            for entry, due_ns, error in advances:
                # the scheduler is the only writer, and takes requests between two calls, so the
                # entry is the one that was published
                database.execute(
                    "UPDATE entries SET due_ns = ?, ended_ns = ?, tries = 0, error = ?,"
                    " body = CASE WHEN ? THEN x'' ELSE body END WHERE key = ?",
                    (
                        due_ns,
                        None if due_ns is not None else now_ns,
                        error,
                        due_ns is None and not error,
                        entry.key,
                    ),
                )

    # -- readers -------------------------------------------------------------------------------

    def counts(self) -> tuple[int, int]:
        """Return the number of entries that wait, and of entries that nsqd refused."""
        with self.translating_errors():
            conditions = "due_ns IS NOT NULL", "ended_ns IS NOT NULL AND error != ''"
            waiting, refused = (
                self._database.execute(
                    f"SELECT count(*) FROM entries WHERE {condition}"
                ).fetchone()[0]
                for condition in conditions
            )
            return waiting, refused

    def entries(self, limit: int) -> list[StoredEntry]:
        """Return the entries that wait or were refused, the earliest first."""
        with self.translating_errors():
            return self._select(
                "WHERE due_ns IS NOT NULL OR error != '' ORDER BY due_ns, rowid LIMIT ?", limit
            )

    def entry(self, key: str) -> StoredEntry | None:
        """Return the entry of a key, if it waits or was refused."""
        with self.translating_errors():
            rows = self._select("WHERE key = ? AND (due_ns IS NOT NULL OR error != '')", key)
        return rows[0] if rows else None

    def _select(self, condition: str, *values: object) -> list[StoredEntry]:
        rows = self._database.execute(f"SELECT {_COLUMNS} FROM entries {condition}", values)
        return [_stored_entry(row) for row in rows]


@contextmanager
def wait_for_lock(
    folder: Path, is_stopped: Callable[[], bool], tell: Callable[[str], None]
) -> Iterator[bool]:
    """Become the one scheduler of a directory, made if missing; False inside if stopped before.

    The lock ends with the process that has it, by `kill -9` too. Raises `OutputError`.
    """
    descriptor, is_reported = None, False
    try:
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        while (descriptor := lock_file(folder / LOCK_NAME)) is None and not is_stopped():
            if not is_reported:
                tell(f"nsq: waiting for the scheduler that uses {folder}")
                is_reported = True
            time.sleep(LOCK_POLL_S)
    except OSError as error:
        raise OutputError(f"cannot use {folder} ({error.strerror})") from error
    try:
        yield descriptor is not None
    finally:
        if descriptor is not None:
            os.close(descriptor)


def _marks(values: Collection[str]) -> str:
    return ", ".join("?" * len(values))


def _quoted(path: Path) -> str:
    """Return a path for a URI of SQLite."""
    from urllib.parse import quote

    return quote(os.fspath(path.absolute()))


def _values(request: Entry | Cancellation) -> tuple[object, ...]:
    if isinstance(request, Cancellation):
        return (request.key, None, "", b"", None, None, None, None, CatchUp.last.value, False)
    interval = request.recurrence if isinstance(request.recurrence, Interval) else None
    cron = request.recurrence if isinstance(request.recurrence, Cron) else None
    return (
        request.key,
        request.due_ns,
        request.topic,
        request.body,
        interval and interval.start_ns,
        interval and interval.interval_ns,
        cron and cron.expression,
        cron and cron.timezone,
        request.catch_up.value,
        request.has_envelope,
    )


def _stored_entry(row: tuple[object, ...]) -> StoredEntry:
    key, due_ns, topic, body, start_ns, interval_ns, cron, timezone, catch_up, envelope = row[:10]
    recurrence: Recurrence | None = None
    if interval_ns is not None:
        recurrence = Interval(start_ns, interval_ns)  # type: ignore[arg-type]
    elif cron is not None:
        recurrence = Cron(cron, timezone)  # type: ignore[arg-type]
    entry = Entry(key, due_ns or 0, topic, body, recurrence, CatchUp(catch_up), bool(envelope))  # type: ignore[arg-type]
    return StoredEntry(entry, row[10], row[11])  # type: ignore[arg-type]
