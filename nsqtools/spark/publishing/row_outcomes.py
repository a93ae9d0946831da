"""The outcome of rows: counts of a task and of a job, dead letters, and the ledger.

**Dead letters** are rows that could not be published, with the reason.

    dead-<job>-00003-000000000421-<attempt>.jsonl    {"topic": ..., "reason": "...", "row": 421}

A line is an envelope with two more keys, so ``nsq pub --format jsonl`` publishes the file once the
cause is fixed. Columns that the rows lack are empty. A task writes a file at its end, or several
for many rows; each is replaced atomically. A task with a ledger writes its dead letters before the
ledger counts their rows as finished, and a retry keeps those of finished rows. A task without a
ledger replaces the dead letters of earlier attempts when it ends, and removes its own when it
fails, because another attempt may run at the same time (``spark.speculation``).

**The ledger** records the progress of the tasks of a job, so that a retried task continues where
the last attempt stopped.

It is a directory with one file for each partition. Before rows are sent, a line is appended: how
many rows from the beginning are finished, and how many may have been sent. The last complete line
counts. A line cut by a kill is ignored, because the previous line is still true. So no row is lost,
and a kill can duplicate only the window of unconfirmed batches: rows that were sent and not yet
recorded as finished. These are counted as ``repeated`` when they are sent again.

This requires that the rows of a partition always come in the same order, without a shuffle before
the writer. Each line has a checksum of the finished rows, which is verified before they are
skipped.

A lock on the file of a partition excludes other tasks, and a lock on the directory other replays.
The system releases the locks of a killed process.

An object store has no append, sync or lock:

    LEDGER/part-00003/000000000017.json          the last state of a partition, see `lease`

Writing an object takes as long as publishing a few thousand rows. So the ledger records in advance
that `AHEAD_ROWS` more may have been sent, and is written again when they have been. A kill repeats
at most that many rows of a partition, and the window of unconfirmed batches. A task that begins
writes the next number of its partition. An earlier attempt that still runs (as the workers of a
killed driver do for a moment) then fails to write that number, and ends.
"""

from __future__ import annotations

import json
import os
import time
import uuid
from collections.abc import Iterable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass, field, replace
from typing import Annotated, Self

from nsqtools.archive.lease import NumberedObjects
from nsqtools.archive.place import Place, translating_errors
from nsqtools.errors import ConfigurationError, NsqError
from nsqtools.files.durable import sync_folder, write_all
from nsqtools.files.opening import open_to_write, try_lock
from nsqtools.protocol.text import load_json
from nsqtools.records.envelope import Envelope, encode_many

MAX_REASONS = 5


@dataclass(slots=True)
class RowCounts:
    """Rows by outcome.

    ``rejected`` rows were refused by nsqd or are invalid. ``unknown`` rows have no answer of nsqd.
    ``dead_lettered`` counts the dead letters among both.
    """

    topics: Annotated[dict[str, int], "Messages confirmed, by topic."] = field(default_factory=dict)
    rejected: int = 0
    unknown: int = 0
    dead_lettered: int = 0

    def add(self, other: RowCounts) -> None:
        """Add the counts of another."""
        for topic, count in other.topics.items():
            self.topics[topic] = self.topics.get(topic, 0) + count
        self.rejected += other.rejected
        self.unknown += other.unknown
        self.dead_lettered += other.dead_lettered


@dataclass(slots=True)
class PublishReport(RowCounts):
    """The counts of a task, or of a job.

    ``retried`` rows were sent again, and ``repeated`` rows may have arrived twice. An earlier run
    or attempt finished ``before`` of the rows, according to the ledger. ``reasons`` are the first
    few reasons of refusals, and ``seconds`` is the time of the slowest task.
    """

    retried: int = 0
    repeated: int = 0
    before: int = 0
    seconds: float = 0.0
    reasons: list[str] = field(default_factory=list)

    @property
    def confirmed(self) -> int:
        return sum(self.topics.values())

    @property
    def left(self) -> int:
        """Rows that were neither confirmed nor dead-lettered."""
        return self.rejected + self.unknown - self.dead_lettered


def sum_of_reports(reports: Iterable[PublishReport]) -> PublishReport:
    """Return the sum of reports."""
    result = PublishReport()
    for report in reports:
        result.add(report)
        result.retried += report.retried
        result.repeated += report.repeated
        result.before += report.before
        result.seconds = max(result.seconds, report.seconds)
        result.reasons = [*result.reasons, *report.reasons][:MAX_REASONS]
    return result


def summary(report: PublishReport) -> str:
    """Return the counts in a line; the last three are omitted if they are 0."""
    line = f"{report.confirmed} confirmed, {report.rejected} rejected, {report.unknown} unknown"
    line += f", {report.dead_lettered} dead-lettered"
    line += f", {report.before} done before" if report.before else ""
    line += f", {report.retried} retried" if report.retried else ""
    return line + (f", up to {report.repeated} twice" if report.repeated else "")


def report_document(report: PublishReport, *, is_complete: bool) -> dict[str, object]:
    """Return the counts as a JSON document; ``is_complete`` is whether all tasks ended."""
    return {"confirmed": report.confirmed, **asdict(report), "is_complete": is_complete}


def require_all(report: PublishReport) -> None:
    """Raise `NsqError` if rows were neither published nor dead-lettered."""
    if not report.left:
        return
    first = report.reasons[0] if report.reasons else "all of them by an earlier run"
    kind = "rows were refused" if report.rejected else "rows have an unknown fate"
    raise NsqError(
        f"{report.left} {kind} ({summary(report)}): {first}",
        hint='.option("deadLetterPath", DIRECTORY) writes them there, and the job succeeds.',
    )


NO_ID = b"0" * 16
OBJECT_BYTES = 1 << 20  # `sync` rewrites the current file, so files are small.


class RowDeadLetters:
    """The dead letters of one partition; ``name`` is the name of the job.

    An earlier attempt finished ``done`` rows, according to the ledger; None without a ledger.
    Methods raise `OutputError`.
    """

    def __init__(self, folder: Place, name: str, partition: int, *, done: int | None) -> None:
        self._folder = folder
        self._prefix = f"dead-{name}-{partition:05d}"
        # Another attempt may still run, with its rows in another order, so names must differ.
        self._attempt = uuid.uuid4().hex[:8]
        self._lines: list[bytes] = []
        self._size = 0
        self._first_row = 0
        self._replaced = self._names() if done is None else None
        if done is not None:
            self._remove_unfinished(done)

    def write(self, row: int, message: Envelope, reason: str) -> None:
        """Add a dead letter for a row, given by its number in the partition."""
        if not self._lines:
            self._first_row = row
        self._lines.append(dead_letter(row, message, reason))
        self._size += len(self._lines[-1])
        if self._size >= OBJECT_BYTES:
            self.sync()
            self._lines, self._size = [], 0

    def sync(self) -> None:
        """Make the dead letters durable; the current file is rewritten until it is full."""
        if self._lines:
            with translating_errors("write", self._folder):
                name = f"{self._prefix}-{self._first_row:012d}-{self._attempt}.jsonl"
                self._folder.put(name, b"".join(self._lines))

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        if self._replaced is None:
            return
        if kind is not None:
            self._replaced = [name for name in self._names() if self._attempt in name]
        with translating_errors("write", self._folder):
            for name in self._replaced:
                self._folder.delete(name)

    def _names(self) -> list[str]:
        with translating_errors("write", self._folder):
            names = [entry.name for entry in self._folder.list()]
        return [name for name in names if name.startswith(f"{self._prefix}-")]

    def _remove_unfinished(self, done: int) -> None:
        """Remove the dead letters of an earlier attempt, except those of finished rows.

        Up to version 0.2 a local file had only the name of its partition, and was hidden until the
        task ended.
        """
        with translating_errors("write", self._folder):
            for entry in list(self._folder.list()):
                name = entry.name.removeprefix(".").removesuffix(".part")
                if not name.startswith((f"{self._prefix}-", f"{self._prefix}.")):
                    continue
                lines = self._folder.read(entry.name).splitlines(keepends=True) if done else []
                finished = [line for line in lines if row_of(line) < done]
                if finished and (len(finished) < len(lines) or name != entry.name):
                    self._folder.put(name, b"".join(finished))
                if not finished or name != entry.name:
                    self._folder.delete(entry.name)


def dead_letter(row: int, message: Envelope, reason: str) -> bytes:
    """Return the line of a row."""
    line = encode_many(message.topic, message.nsqd, [message])
    suffix = json.dumps({"reason": reason, "row": row})[1:]
    return line.rstrip(b"\n}") + b", " + suffix.encode() + b"\n"


def row_of(line: bytes) -> float:
    """Return the number of a row; a line cut by a kill has infinity, as an unfinished row."""
    try:
        return int(load_json(line)["row"])
    except (ValueError, KeyError, TypeError):
        return float("inf")


# -- the ledger ----------------------------------------------------------------------------------

VERSION = 1
JOB, LOCK = "job.json", "lock"

LOCK_WAIT_S = 10.0  # The workers of a killed driver end within seconds after it.
POLL_S = 0.05
# Lines are synced at most this often, so a power failure may repeat the rows of one second.
SYNC_INTERVAL_S = 1.0


@dataclass(slots=True)
class LedgerEntry(RowCounts):
    """A line of the ledger.

    ``done`` rows from the beginning are finished, with the ``checksum`` of their bodies and their
    outcomes. ``sent`` rows may have reached nsqd, and ``repeated`` of them more than once.
    """

    done: int = 0
    sent: int = 0
    checksum: int = 0
    repeated: int = 0


def prepare_ledger(folder: Place, job: str) -> None:
    """Create the ledger of ``job``, a text that identifies the job.

    Raises `ConfigurationError` if the place belongs to another job.
    """
    content = (json.dumps({"version": VERSION, "job": job}, indent=1) + "\n").encode()
    with translating_errors("write the ledger", folder):
        names = [entry.name for entry in folder.list()]
        if JOB not in names and any(name.startswith("part-") for name in names):
            raise ConfigurationError(
                f"{folder} has parts of a ledger and no {JOB}", hint="Give another directory."
            )
        with suppress(FileExistsError):
            folder.put_if_absent(JOB, content)
        stored = folder.read(JOB)
    if stored != content:
        raise ConfigurationError(
            f"{folder} is the ledger of another job",
            hint="Give another directory; everything is published again then.",
        )


def conflict_error(partition: int, conflict: str) -> NsqError:
    """Return the error of a task whose partition another task publishes."""
    problem = f"partition {partition} is being published by another task, which {conflict}"
    return NsqError(problem, hint="Set spark.speculation=false, and run a job once at a time.")


class LedgerPart:
    """The locked file of one partition; ``entry`` is its last line.

    Raises `NsqError` if another task has the lock, and `ConfigurationError` if it is no ledger.
    """

    def __init__(self, folder: Place, partition: int, *, wait_s: float = LOCK_WAIT_S) -> None:
        self.path = folder.path / f"part-{partition:05d}.jsonl"
        self.partition = partition
        self._synced_at = time.monotonic()
        with translating_errors("write", self.path):
            flags = os.O_RDWR | os.O_CREAT | os.O_APPEND
            self._descriptor = open_to_write(self.path, flags, 0o640)
            sync_folder(folder.path)  # Without it, a power failure may remove the name of the file.
        try:
            self._lock(time.monotonic() + wait_s)
            self.entry = self._read()
        except BaseException:
            os.close(self._descriptor)
            raise

    is_due = True
    """Whether `note` will write."""

    def note(self, *, is_last: bool = False) -> None:
        """Append ``entry``, and sync it if it is the last. Raises `OutputError`."""
        with translating_errors("write", self.path):
            write_all(self._descriptor, json.dumps(asdict(self.entry)).encode() + b"\n")
            if is_last or time.monotonic() - self._synced_at > SYNC_INTERVAL_S:
                os.fsync(self._descriptor)
                self._synced_at = time.monotonic()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        os.close(self._descriptor)

    def _lock(self, until: float) -> None:
        with translating_errors("lock", self.path):
            while not try_lock(self._descriptor):
                if time.monotonic() >= until:
                    raise conflict_error(self.partition, f"has {self.path} locked")
                time.sleep(POLL_S)

    def _read(self) -> LedgerEntry:
        """Return the last complete line, and truncate a torn one after it."""
        with translating_errors("read", self.path):
            content = self.path.read_bytes()
            # A torn line would become part of the next line that is appended.
            os.ftruncate(self._descriptor, content.rfind(b"\n") + 1)
        return last_entry(content, self.path)


def last_entry(lines: bytes, path: object) -> LedgerEntry:
    """Decode the last complete line, or return an empty entry. Raises `ConfigurationError`."""
    complete = lines.rpartition(b"\n")[0]
    return decode_entry(complete.rpartition(b"\n")[2], path) if complete else LedgerEntry()


def decode_entry(line: bytes, path: object) -> LedgerEntry:
    """Decode a line. Raises `ConfigurationError`."""
    try:
        entry = LedgerEntry(**load_json(line))
        counts = asdict(entry)
        if min(*counts.pop("topics").values(), *counts.values()) >= 0:
            return entry
    except (ValueError, TypeError, AttributeError):
        pass
    raise ConfigurationError(f"{path} is not the ledger of a job", hint="Give another directory.")


def read_entries(ledger: Place) -> dict[int, LedgerEntry]:
    """Read the entries of all partitions by number, without locks, for a report.

    Raises ``OSError``, and `ConfigurationError` for a place that is no ledger.
    """
    if ledger.is_remote:
        parts = (name for name in ledger.children()[1] if name.startswith("part-"))
        return {int(part[5:]): latest_entry(NumberedObjects(ledger / part)) for part in parts}
    paths = ledger.path.glob("part-*.jsonl")
    return {int(path.stem[5:]): last_entry(path.read_bytes(), path) for path in paths}


AHEAD_ROWS = 10_000  # A few times the rows that a task publishes while it writes one object.


def latest_entry(numbers: NumberedObjects) -> LedgerEntry:
    """Read the last object, after which ``numbers`` continue.

    Raises ``OSError`` and `ConfigurationError`.
    """
    numbers.number = numbers.latest()
    if not numbers.number:
        return LedgerEntry()
    return decode_entry(numbers.read(numbers.number), numbers.place)


class StoredLedgerPart:
    """The progress of one partition in an object store, with the interface of `LedgerPart`."""

    def __init__(self, folder: Place, partition: int) -> None:
        self.partition = partition
        self._numbers = NumberedObjects(folder / f"part-{partition:05d}")
        with self._errors():
            self.entry = latest_entry(self._numbers)
        self._write(self.entry)

    @property
    def is_due(self) -> bool:
        """Whether `note` will write."""
        return self.entry.sent > self._recorded_sent

    def note(self, *, is_last: bool = False) -> None:
        """Record ``entry``, and in advance that more rows may be sent. Raises `OutputError`."""
        if is_last:
            self._write(self.entry)
        elif self.is_due:
            self._write(replace(self.entry, sent=self.entry.sent + AHEAD_ROWS))

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        pass

    def _write(self, entry: LedgerEntry) -> None:
        with self._errors():
            self._numbers.append(json.dumps(asdict(entry)).encode())
        self._recorded_sent = entry.sent

    @contextmanager
    def _errors(self) -> Iterator[None]:
        with translating_errors("use", self._numbers.place):
            try:
                yield
            except FileExistsError:
                conflict = f"writes to {self._numbers.place}"
                raise conflict_error(self.partition, conflict) from None
