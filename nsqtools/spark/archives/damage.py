"""What cannot be read: it fails the query, or is written where commands count it.

Reports are JSON lines, ``{"file": .., "pos": .., "problem": ..}``, in files named after what they
are about: a member of a file, or a file. What is read again (a retried task, a repeated batch)
replaces its report, so nothing is counted twice.
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

MOST_LINES = 1000  # of one report
SUFFIX = ".jsonl"

REPAIR = "Repair it with `nsq archive repair`"
MOVE_AWAY = "Move it out of the archive"


class ArchiveDamage(NamedTuple):
    """One problem, and where: the file's path, and the byte where the member or line begins."""

    file: str
    pos: int
    problem: str


def report_damage(
    folder: Place | None, identity: str, found: Sequence[ArchiveDamage], remedy: str = REPAIR
) -> None:
    """Report all that is wrong with a member or file, whose ``identity`` never changes.

    That is into a file of ``folder``, or without one by raising an error, with the first problem
    and with the ``remedy``: what can be done about it. Raises `NsqError`, and `OutputError`.
    """
    first = found[0]
    if folder is None:
        skip = "skip and report it with the options onDamage=report and damagePath"
        problem = f"cannot read {first.file}: {first.problem}"
        raise NsqError(problem, hint=f"{remedy}, or {skip}.")
    log.warning("%s: %s", first.file, first.problem)
    if len(found) > MOST_LINES:
        more = ArchiveDamage(first.file, first.pos, f"and {len(found) - MOST_LINES} more lines")
        found = [*found[:MOST_LINES], more]
    name = hashlib.sha256(identity.encode()).hexdigest()[:32]
    text = "".join(json.dumps(damage._asdict()) + "\n" for damage in found)
    with translating_errors("write", folder):
        folder.put(name + SUFFIX, text.encode())


def read_damage(folder: Place) -> list[ArchiveDamage]:
    """Return all that is reported in a ``damagePath``, by file and position. Raises `NsqError`."""
    with translating_errors("read", folder):
        names = [each.name for each in folder.list() if each.name.endswith(SUFFIX)]
        lines = [line for name in names for line in folder.read(name).decode().splitlines()]
    return sorted(ArchiveDamage(**json.loads(line)) for line in lines)
