"""The outcome of rows: counts of a task and of a job, and dead letters with the reason.

    dead-<job>-00003-000000000421-<attempt>.jsonl    {"topic": ..., "reason": "...", "row": 421}

A dead letter is the envelope that all of nsqtools reads, with two more keys: ``nsq pub --format
jsonl`` publishes the file once the cause is fixed. Columns that the rows did not have are empty.

A task writes a file at its end, and several where the rows are many; a file is whole at any moment.
A task with a ledger writes before the ledger counts the rows as done, and when it is tried again
keeps the dead letters of what is done. Any other begins by removing those of its earlier attempts.
"""

from __future__ import annotations

import json
import uuid
from collections.abc import Iterable
from dataclasses import asdict, dataclass, field
from typing import Self

from nsqtools.archive.location import Location
from nsqtools.archive.storage import failing
from nsqtools.archive.storage_objects import open_storage
from nsqtools.errors import NsqError
from nsqtools.records.envelope import Envelope, encode_many

MAX_REASONS = 5


@dataclass(slots=True)
class RowCounts:
    """Rows by what became of them. ``topics`` has those confirmed, by topic.

    ``rejected`` were refused by nsqd or could not be sent at all, the fate of ``unknown`` is not
    known; ``dead_lettered`` of both are dead letters.
    """

    topics: dict[str, int] = field(default_factory=dict)
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
    line = (
        f"{report.confirmed} confirmed, {report.rejected} rejected, {report.unknown} unknown, "
        f"{report.dead_lettered} dead-lettered"
    )
    if report.before:
        line += f", {report.before} done before"
    if report.retried:
        line += f", {report.retried} retried"
    if report.repeated:
        line += f", up to {report.repeated} twice"
    return line


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


class DeadLetters:
    """The dead letters of one partition; ``name`` is that of the job.

    ``done`` rows from the beginning are those of an earlier attempt, by the ledger; None without
    one. Raises `OutputError` for whatever cannot be written.
    """

    def __init__(self, folder: Location, name: str, partition: int, *, done: int | None) -> None:
        self._folder = folder
        self._storage = open_storage(str(folder))
        self._prefix = f"dead-{name}-{partition:05d}"
        self._attempt = uuid.uuid4().hex[:8]  # another one may still run, with rows in other order
        self._is_kept = done is not None
        self._lines: list[bytes] = []
        self._size = 0
        self._first_row = 0
        self._keep(done or 0)

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
            with failing("write", self._folder):
                name = f"{self._prefix}-{self._first_row:012d}-{self._attempt}.jsonl"
                self._storage.put(name, b"".join(self._lines))

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        if kind is not None and not self._is_kept:
            self._keep(0)

    def _keep(self, done: int) -> None:
        """Keep what an earlier attempt wrote of rows that are done.

        Up to version 0.2 a local file had the name of its partition alone, and was hidden until the
        task ended.
        """
        with failing("write", self._folder):
            for entry in list(self._storage.list()):
                shown = entry.name.removeprefix(".").removesuffix(".part")
                if not shown.startswith((f"{self._prefix}-", f"{self._prefix}.")):
                    continue
                lines = self._storage.read(entry.name).splitlines(keepends=True) if done else []
                kept = [line for line in lines if row_of(line) < done]
                if kept and (len(kept) < len(lines) or shown != entry.name):
                    self._storage.put(shown, b"".join(kept))
                if not kept or shown != entry.name:
                    self._storage.delete(entry.name)


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
