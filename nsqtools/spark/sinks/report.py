"""What became of the rows of a task, and of all tasks of a job."""

from __future__ import annotations

import json
from collections.abc import Iterable
from dataclasses import asdict, dataclass, field
from pathlib import Path

from nsqtools.errors import NsqError, OutputError
from nsqtools.files.durable import replace_file

MAX_REASONS = 5


@dataclass(slots=True)
class Report:
    """Counts of rows. ``topics`` has those confirmed, by topic.

    ``rejected`` were refused by nsqd or could not be sent at all, the fate of ``unknown`` is not
    known; ``dead_lettered`` of both were put aside. ``retried`` were sent again, and ``repeated``
    may have arrived twice. ``before`` of all were done with by an earlier run or attempt, which the
    ledger knows. ``reasons`` has the first few of why a row was refused.
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
        """Rows that were neither confirmed nor put aside."""
        return self.rejected + self.unknown - self.dead_lettered

    def add(self, other: Report) -> None:
        """Add the counts of another; ``seconds`` is that of the slowest."""
        for topic, count in other.topics.items():
            self.topics[topic] = self.topics.get(topic, 0) + count
        for name in ("rejected", "unknown", "dead_lettered", "retried", "repeated", "before"):
            setattr(self, name, getattr(self, name) + getattr(other, name))
        self.seconds = max(self.seconds, other.seconds)
        self.reasons = [*self.reasons, *other.reasons][:MAX_REASONS]


def total(reports: Iterable[Report]) -> Report:
    """The sum of reports."""
    sum_ = Report()
    for report in reports:
        sum_.add(report)
    return sum_


def summary(report: Report) -> str:
    """The counts in a line: those that are always said, and the others where there are any."""
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


def document(report: Report, *, is_complete: bool) -> dict[str, object]:
    """The counts for a program; ``is_complete`` is whether all tasks ended."""
    return {"confirmed": report.confirmed, **asdict(report), "is_complete": is_complete}


def write_document(path: Path, report: Report, *, is_complete: bool) -> None:
    """Write the counts to a file, whole or not at all. Raises `OutputError`."""
    try:
        content = json.dumps(document(report, is_complete=is_complete), indent=1) + "\n"
        replace_file(path, content.encode())
    except OSError as exc:
        raise OutputError(f"cannot write {path} ({exc.strerror})") from exc


def require_all(report: Report) -> None:
    """Raise `NsqError` when rows were neither published nor put aside."""
    if not report.left:
        return
    first = report.reasons[0] if report.reasons else "all of them by an earlier run"
    kind = "rows were refused" if report.rejected else "rows have an unknown fate"
    raise NsqError(
        f"{report.left} {kind} ({summary(report)}): {first}",
        hint='.option("deadLetterPath", DIRECTORY) puts them aside and goes on.',
    )
