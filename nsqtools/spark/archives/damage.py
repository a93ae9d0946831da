"""Report unreadable data: fail the query, or write a report that commands count.

Reports are JSON lines, ``{"file": .., "pos": .., "problem": ..}``. The file of a report is named
after the member or the file that is damaged. A retried task or a repeated batch replaces the
report, so no damage is counted twice.
"""

from __future__ import annotations

import hashlib
import json
import logging
from collections.abc import Sequence
from typing import NamedTuple

from nsqtools.archive.place import Place, translating_errors
from nsqtools.errors import NsqError

log = logging.getLogger("nsqtools")

MAX_LINES = 1000  # A file of bare text may have a problem in each of a million lines.
SUFFIX = ".jsonl"

REPAIR = "Repair it with `nsq archive repair`"
MOVE_AWAY = "Move it out of the archive"


class ArchiveDamage(NamedTuple):
    """One problem, and where: the file's path, and the byte where the member or line begins."""

    file: str
    pos: int
    problem: str


def report_damage(
    folder: Place | None, identity: str, damages: Sequence[ArchiveDamage], remedy: str = REPAIR
) -> None:
    """Report the damages of a member or file, whose ``identity`` never changes, in a ``folder``.

    Without a folder, raises `NsqError` with the first problem and a hint with the ``remedy``.
    Raises `OutputError` if the report cannot be written.
    """
    first = damages[0]
    if folder is None:
        skip = "skip and report it with the options onDamage=report and damagePath"
        problem = f"cannot read {first.file}: {first.problem}"
        raise NsqError(problem, hint=f"{remedy}, or {skip}.")
    log.warning("%s: %s", first.file, first.problem)
    if len(damages) > MAX_LINES:
        last = ArchiveDamage(first.file, first.pos, f"and {len(damages) - MAX_LINES} more lines")
        damages = [*damages[:MAX_LINES], last]
    name = hashlib.sha256(identity.encode(errors="backslashreplace")).hexdigest()[:32]
    text = "".join(json.dumps(damage._asdict()) + "\n" for damage in damages)
    with translating_errors("write", folder):
        folder.put(name + SUFFIX, text.encode())


def read_damage(folder: Place) -> list[ArchiveDamage]:
    """Return the reports in a ``damagePath``, sorted by file and position. Raises `NsqError`."""
    reports = folder
    with translating_errors("read", folder):
        names = [entry.name for entry in reports.list() if entry.name.endswith(SUFFIX)]
        lines = [line for name in names for line in reports.read(name).decode().splitlines()]
    return sorted(ArchiveDamage(**json.loads(line)) for line in lines)
