"""The outcome of rows: counts of a task and of a job, dead letters, and the ledger.

**Dead letters** are rows that could not be published, with the reason.

    dead-<job>-00003-000000000421-<attempt>.jsonl    {"topic": ..., "reason": "...", "row": 421}

A line is the envelope that all of nsqtools reads, with two more keys: ``nsq pub --format jsonl``
publishes the file once the cause is fixed. Columns that the rows did not have are empty. A task
writes a file at its end, and several where the rows are many; a file is whole at any moment. A task
with a ledger writes before the ledger counts the rows as done, and when it is tried again keeps the
dead letters of what is done. Any other replaces those of attempts that began earlier when it ends,
and removes its own when it fails: another attempt may run beside it (``spark.speculation``).

**The ledger** is the progress of the tasks of a job, so that a retried task continues where it
stopped.

A directory with one file for each partition. A line is appended before rows are sent: how many rows
from the beginning are done, and how many may have been sent. The last whole line counts; a line cut
by a kill is ignored, because the one before it is true too, only older. So nothing is left out, and
a kill can duplicate only what had been sent and was not yet noted as done: the window of
unconfirmed batches. Those rows are counted as ``repeated`` when they are sent again.

This holds only if the rows of a partition come in the same order each time: no shuffle before the
writer. It is verified: each line has a checksum of the rows done, which is compared before anything
is skipped.

One task at a time holds the lock of a partition's file, and one replay at a time that of the
directory. A process that is killed loses its locks at once.

In an object store nothing can be appended to, synced or locked:

    LEDGER/part-00003/000000000017.json          the last state of a partition, see `lease`

An object takes as long to write as some thousand rows take to publish. So the ledger notes ahead
that `AHEAD_ROWS` more may have been sent, and writes again when these are used up: a kill repeats
at most that many rows of a partition, and the window of unconfirmed batches. A task that begins
writes the next number of its partition. An attempt of it that still runs (the workers of a driver
that was killed do, for a moment) cannot write that number any more, and ends.
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
from nsqtools.records.envelope import Envelope, encode_many

MAX_REASONS = 5


@dataclass(slots=True)
class RowCounts:
    """Rows by what became of them.

    ``rejected`` were refused by nsqd or could not be sent at all, the fate of ``unknown`` is not
    known; ``dead_lettered`` of both are dead letters.
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
    """Counts of a task, or of a job.

    ``retried`` were sent again, and ``repeated`` may have arrived twice. ``before`` of all were
    done by an earlier run or attempt, by the ledger. ``reasons`` has the first few reasons of
    refusals, and ``seconds`` is that of the slowest task.
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


def total(reports: Iterable[PublishReport]) -> PublishReport:
    """The sum of reports."""
    found = PublishReport()
    for each in reports:
        found.add(each)
        found.retried += each.retried
        found.repeated += each.repeated
        found.before += each.before
        found.seconds = max(found.seconds, each.seconds)
        found.reasons = [*found.reasons, *each.reasons][:MAX_REASONS]
    return found


def summary(report: PublishReport) -> str:
    """The counts in a line; those after the first four only where there are any."""
    line = f"{report.confirmed} confirmed, {report.rejected} rejected, {report.unknown} unknown"
    line += f", {report.dead_lettered} dead-lettered"
    before, retried, repeated = report.before, report.retried, report.repeated
    line += f", {before} done before" if before else ""
    line += f", {retried} retried" if retried else ""
    return line + (f", up to {repeated} twice" if repeated else "")


def document(report: PublishReport, *, is_complete: bool) -> dict[str, object]:
    """The counts for a program; ``is_complete`` is whether all tasks ended."""
    return {"confirmed": report.confirmed, **asdict(report), "is_complete": is_complete}


def require_all(report: PublishReport) -> None:
    """Raise `NsqError` when rows were neither published nor dead-lettered."""
    if not report.left:
        return
    first = report.reasons[0] if report.reasons else "all of them by an earlier run"
    kind = "rows were refused" if report.rejected else "rows have an unknown fate"
    raise NsqError(
        f"{report.left} {kind} ({summary(report)}): {first}",
        hint='.option("deadLetterPath", DIRECTORY) writes them there, and the job succeeds.',
    )


NO_ID = b"0" * 16
OBJECT_BYTES = 1 << 20


class RowDeadLetters:
    """The dead letters of one partition; ``name`` is that of the job.

    ``done`` rows from the beginning are those of an earlier attempt, by the ledger; None without
    one. Raises `OutputError` for whatever cannot be written.
    """

    def __init__(self, folder: Place, name: str, partition: int, *, done: int | None) -> None:
        self._folder = folder
        self._prefix = f"dead-{name}-{partition:05d}"
        self._attempt = uuid.uuid4().hex[:8]  # another one may still run, with rows in other order
        self._lines: list[bytes] = []
        self._size = 0
        self._first_row = 0
        self._replaced = self._names() if done is None else None
        if done is not None:
            self._keep(done)

    def write(self, row: int, message: Envelope, reason: str) -> None:
        """Add a row, given by its number in the partition."""
        if not self._lines:
            self._first_row = row
        self._lines.append(dead_letter(row, message, reason))
        self._size += len(self._lines[-1])
        if self._size >= OBJECT_BYTES:
            self.sync()
            self._lines, self._size = [], 0

    def sync(self) -> None:
        """Make what was written durable: a file that is not full is written again."""
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

    def _keep(self, done: int) -> None:
        """Keep what an earlier attempt wrote of rows that are done.

        Up to version 0.2 a local file had the name of its partition alone, and was hidden until the
        task ended.
        """
        with translating_errors("write", self._folder):
            for entry in list(self._folder.list()):
                shown = entry.name.removeprefix(".").removesuffix(".part")
                if not shown.startswith((f"{self._prefix}-", f"{self._prefix}.")):
                    continue
                lines = self._folder.read(entry.name).splitlines(keepends=True) if done else []
                kept = [line for line in lines if row_of(line) < done]
                if kept and (len(kept) < len(lines) or shown != entry.name):
                    self._folder.put(shown, b"".join(kept))
                if not kept or shown != entry.name:
                    self._folder.delete(entry.name)


def dead_letter(row: int, message: Envelope, reason: str) -> bytes:
    """The line of a row."""
    line = encode_many(message.topic, message.nsqd, [message])
    more = json.dumps({"reason": reason, "row": row})[1:]
    return line.rstrip(b"\n}") + b", " + more.encode() + b"\n"


def row_of(line: bytes) -> float:
    """The number of the row; a line cut by a kill belongs to one that is not done."""
    try:
        return int(json.loads(line)["row"])
    except (ValueError, KeyError, TypeError):
        return float("inf")


# -- the ledger ----------------------------------------------------------------------------------

VERSION = 1
JOB, LOCK = "job.json", "lock"

LOCK_WAIT_S = 10.0  # workers of a driver that was killed end a moment after it
POLL_S = 0.05
SYNC_INTERVAL_S = 1.0


@dataclass(slots=True)
class LedgerEntry(RowCounts):
    """A line: ``done`` rows from the beginning, with ``checksum`` over their bodies, and what
    became of them; ``sent`` rows may have reached nsqd, and ``repeated`` of them more than once."""

    done: int = 0
    sent: int = 0
    checksum: int = 0
    repeated: int = 0


def prepare_ledger(folder: Place, job: str) -> None:
    """Make the place for ``job``, a text that is the same only for the same job.

    Raises `ConfigurationError` where it belongs to another job.
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
        found = folder.read(JOB)
    if found != content:
        raise ConfigurationError(
            f"{folder} is the ledger of another job",
            hint="Give another directory; everything is published again then.",
        )


def being_published(partition: int, where: str) -> NsqError:
    """The error of a task that another one is in the way of."""
    problem = f"partition {partition} is being published by another task, which {where}"
    return NsqError(problem, hint="Set spark.speculation=false, and run a job once at a time.")


class LedgerPart:
    """The file of one partition, locked. ``entry`` is its last line.

    Raises `NsqError` when another task has it, `ConfigurationError` when it is not a ledger.
    """

    def __init__(self, folder: Place, partition: int, *, wait_s: float = LOCK_WAIT_S) -> None:
        self.path = folder.path / f"part-{partition:05d}.jsonl"
        self.partition = partition
        self._synced_at = time.monotonic()
        with translating_errors("write", self.path):
            flags = os.O_RDWR | os.O_CREAT | os.O_APPEND
            self._descriptor = open_to_write(self.path, flags, 0o640)
            sync_folder(folder.path)  # or the file may be nameless after a power failure
        try:
            self._lock(time.monotonic() + wait_s)
            self.entry = self._read()
        except BaseException:
            os.close(self._descriptor)
            raise

    is_due = True
    """Whether `note` will write."""

    def note(self, *, is_last: bool = False) -> None:
        """Append ``entry``; the last one survives a power failure. Raises `OutputError`."""
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
                    raise being_published(self.partition, f"has {self.path} locked")
                time.sleep(POLL_S)

    def _read(self) -> LedgerEntry:
        """The last whole line; a torn one after it is cut off, or it would corrupt the next."""
        with translating_errors("read", self.path):
            content = self.path.read_bytes()
            os.ftruncate(self._descriptor, content.rfind(b"\n") + 1)
        return last_entry(content, self.path)


def last_entry(lines: bytes, path: object) -> LedgerEntry:
    """Read the last whole line; nothing is done without one. Raises `ConfigurationError`."""
    whole = lines.rpartition(b"\n")[0]
    return decode_entry(whole.rpartition(b"\n")[2], path) if whole else LedgerEntry()


def decode_entry(line: bytes, path: object) -> LedgerEntry:
    """Read a line. Raises `ConfigurationError`."""
    try:
        entry = LedgerEntry(**json.loads(line))
        counts = asdict(entry)
        if min(*counts.pop("topics").values(), *counts.values()) >= 0:
            return entry
    except (ValueError, TypeError, AttributeError):
        pass
    raise ConfigurationError(f"{path} is not the ledger of a job", hint="Give another directory.")


def read_entries(ledger: Place) -> dict[int, LedgerEntry]:
    """The entries of all partitions by their number, without locking, for a report.

    Raises ``OSError``, and `ConfigurationError` for what is not a ledger.
    """
    if ledger.is_remote:
        parts = (name for name in ledger.children()[1] if name.startswith("part-"))
        return {int(part[5:]): latest_entry(NumberedObjects(ledger / part)) for part in parts}
    found = ledger.path.glob("part-*.jsonl")
    return {int(path.stem[5:]): last_entry(path.read_bytes(), path) for path in found}


AHEAD_ROWS = 10_000


def latest_entry(numbers: NumberedObjects) -> LedgerEntry:
    """Read the last object, from which ``numbers`` go on.

    Raises ``OSError`` and `ConfigurationError`.
    """
    numbers.number = numbers.latest()
    if not numbers.number:
        return LedgerEntry()
    return decode_entry(numbers.read(numbers.number), numbers.place)


class StoredLedgerPart:
    """The progress of one partition; as `LedgerPart`."""

    def __init__(self, folder: Place, partition: int) -> None:
        self.partition = partition
        self._numbers = NumberedObjects(folder / f"part-{partition:05d}")
        with self._errors():
            self.entry = latest_entry(self._numbers)
        self._write(self.entry)

    @property
    def is_due(self) -> bool:
        """Whether `note` will write."""
        return self.entry.sent > self._noted_sent

    def note(self, *, is_last: bool = False) -> None:
        """Note ``entry``, and ahead that more may be sent. Raises `OutputError`."""
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
        self._noted_sent = entry.sent

    @contextmanager
    def _errors(self) -> Iterator[None]:
        with translating_errors("use", self._numbers.place):
            try:
                yield
            except FileExistsError:
                where = f"writes to {self._numbers.place}"
                raise being_published(self.partition, where) from None
