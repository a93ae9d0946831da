"""The outcome of rows: counts of a task and of a job, and dead letters with the reason.

    dead-<job>-00003.jsonl    {"topic": ..., "body": ..., "reason": "...", "row": 17}

A dead letter is the envelope that all of nsqtools reads, with two more keys: ``nsq pub --format
jsonl`` publishes the file once the cause is fixed. Columns that the rows did not have are empty.

The file of a partition appears whole, when its task ends, and replaces that of another attempt: its
content does not depend on how often the task was tried. A task with a ledger skips the rows that
are done, so it continues the file of its earlier attempt.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterable
from contextlib import suppress
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import IO, Self

from nsqtools.archive.storage import failing
from nsqtools.errors import NsqError
from nsqtools.files.durable import replace_file, sync_folder
from nsqtools.files.opening import open_to_append
from nsqtools.records.envelope import Envelope, encode_many

MAX_REASONS = 5


@dataclass(slots=True)
class PublishReport:
    """Counts of rows. ``topics`` has those confirmed, by topic.

    ``rejected`` were refused by nsqd or could not be sent at all, the fate of ``unknown`` is not
    known; ``dead_lettered`` of both are dead letters. ``retried`` were sent again, and ``repeated``
    may have arrived twice. ``before`` of all were done by an earlier run or attempt, by the ledger.
    ``reasons`` has the first few reasons of refusals.
    """

    topics: dict[str, int] = field(default_factory=dict)
    rejected: int = 0
    unknown: int = 0
    dead_lettered: int = 0
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

    def add(self, other: PublishReport) -> None:
        """Add the counts of another; ``seconds`` is that of the slowest."""
        for topic, count in other.topics.items():
            self.topics[topic] = self.topics.get(topic, 0) + count
        for name in ("rejected", "unknown", "dead_lettered", "retried", "repeated", "before"):
            setattr(self, name, getattr(self, name) + getattr(other, name))
        self.seconds = max(self.seconds, other.seconds)
        self.reasons = [*self.reasons, *other.reasons][:MAX_REASONS]


def total(reports: Iterable[PublishReport]) -> PublishReport:
    """The sum of reports."""
    sum_ = PublishReport()
    for report in reports:
        sum_.add(report)
    return sum_


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


def write_document(path: Path, report: PublishReport, *, is_complete: bool) -> None:
    """Write the counts to a file, whole or not at all. Raises `OutputError`."""
    with failing("write", path):
        content = json.dumps(document(report, is_complete=is_complete), indent=1) + "\n"
        replace_file(path, content.encode())


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


class LocalDeadLetters:
    """The file of one partition. ``name`` is that of the job, ``attempt`` separates attempts that
    start over; with ``done`` the lines of that many rows from the beginning are kept.

    Raises `OutputError` for whatever cannot be written.
    """

    def __init__(
        self, folder: Path, name: str, partition: int, *, attempt: int = 0, done: int | None = None
    ) -> None:
        self.path = folder / f"dead-{name}-{partition:05d}.jsonl"
        suffix = "part" if done is not None else f"{attempt}.part"
        self._part = folder / f".{self.path.name}.{suffix}"
        self._file: IO[bytes] | None = None
        self._is_named = False  # durably
        self._is_kept = done is not None
        if done is not None:
            self._keep(done)

    def write(self, row: int, message: Envelope, reason: str) -> None:
        """Add a row, given by its number in the partition."""
        with failing("write", self.path):
            if self._file is None:
                self._part.parent.mkdir(parents=True, exist_ok=True)
                self._part.unlink(missing_ok=True)
                self._file = open_to_append(self._part, 0o640)
            self._file.write(dead_letter(row, message, reason))

    def sync(self) -> None:
        """Make what was written durable."""
        if self._file is not None:
            with failing("write", self.path):
                self._file.flush()
                os.fsync(self._file.fileno())
                if not self._is_named:
                    sync_folder(self._part.parent)
                    self._is_named = True

    def finish(self) -> None:
        """Give the file its name, if there is anything in it."""
        if self._file is None:
            return
        self.sync()
        with failing("write", self.path):
            self._part.replace(self.path)
            sync_folder(self.path.parent)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        if self._file is None:
            return
        self._file.close()
        if kind is not None and not self._is_kept:
            self._part.unlink(missing_ok=True)

    def _keep(self, done: int) -> None:
        """Keep what an earlier attempt wrote of rows that are done."""
        source = self._part if self._part.exists() else self.path
        with failing("write", self.path), suppress(FileNotFoundError):
            lines = source.read_bytes().splitlines(keepends=True)
            kept = [line for line in lines if row_of(line) < done]
            if kept:
                replace_file(self._part, b"".join(kept))
                self._file = open_to_append(self._part, 0o640)
            else:
                self._part.unlink(missing_ok=True)


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
