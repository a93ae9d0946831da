"""Remove what a table no longer needs: days that are too old, replaced files, and old log entries.

In a Delta table, days are removed by a commit, and their files later with those of other commits: a
file is deleted once it was removed for ``keep_s``, by the log. A file that no entry of the log
mentions may be of a commit that is still to come, so it must also be older than `UNKNOWN_AGE_S`,
unless only the holder of the lock could commit it: then it is of a run that was killed.
Then the log gets a checkpoint, and entries before it that are older than ``keep_s`` are deleted,
the oldest first, so that after a kill the rest is a log. In a folder of Parquet, old days are
deleted and recorded as replaced, so that no archiver stores them again.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterable
from dataclasses import dataclass, field
from datetime import UTC, date, datetime, timedelta
from pathlib import PurePosixPath
from typing import Any
from urllib.parse import unquote
from uuid import uuid4

from nsqtools.archive.delta import LOG, DeltaCatalog, TableFile, is_table
from nsqtools.archive.finding import (
    check_whole_folder,
    files_in_folder,
    is_table_file,
)
from nsqtools.archive.place import Place, StoredObject, map_concurrently, translating_errors
from nsqtools.archive.replacements import COMPACTED, ERASED, locked_table, replace_files
from nsqtools.errors import ConfigurationError, OutputError

# A week, as in Delta: a writer may store a file long before its commit.
UNKNOWN_AGE_S = 7 * 86_400.0
_LOG_ENTRY = re.compile(rf"{LOG}/(\d{{20}})\.(?:json|crc|checkpoint\.[\w.-]*parquet)")


@dataclass(slots=True)
class Vacuum:
    """The vacuum of one table: call `plan`, which `run` repeats under a lock. Raises `NsqError`."""

    place: Place
    keep_s: float
    now_s: float
    first_day: date | None = None
    """Earlier days are dropped."""
    dropped: list[TableFile] = field(default_factory=list)
    deletable: list[StoredObject] = field(default_factory=list)
    """Files that are no longer in the table."""
    log: list[StoredObject] = field(default_factory=list)
    """Entries of the log before the next checkpoint."""
    _catalog: DeltaCatalog | None = None

    def plan(self) -> None:
        """Find what can be removed."""
        with translating_errors("read", self.place):
            if not is_table(self.place):
                check_whole_folder(self.place)
                files = self._files_of_folder()
            else:
                self._catalog = DeltaCatalog(str(self.place))
                self._catalog.check_writable(removes=self.first_day is not None)
                files = self._catalog.files()
                self._plan_history({file.path for file in files})
        if self.first_day is not None:
            self.dropped = [file for file in files if self._is_too_old(file)]
            if files and not any("date" in file.partition for file in files):
                raise ConfigurationError(f"{self.place} has no partitions of days")

    def _is_too_old(self, file: TableFile) -> bool:
        day = file.partition.get("date")
        return day is not None and self.first_day is not None and day < self.first_day.isoformat()

    def _files_of_folder(self) -> list[TableFile]:
        listed = files_in_folder(self.place, self.place, list(self.place.list()), lambda _: True)
        return [file.table for file in listed if file.table is not None]

    def _plan_history(self, current: set[str]) -> None:
        entries = list(self.place.list())
        log = {entry: match for entry in entries if (match := _LOG_ENTRY.fullmatch(entry.name))}
        numbers = {entry: int(match[1]) for entry, match in log.items()}
        newest = max(numbers.values())
        keep_ns = int((self.now_s - self.keep_s) * 10**9)
        self.log = sorted(
            entry
            for entry, number in numbers.items()
            if number < newest and entry.modified_ns <= keep_ns
        )
        removals = self._removals(entry.name for entry in log if entry.name.endswith(".json"))
        # Names that are written in another way would make current files look like old ones.
        if missing := current - {entry.name for entry in entries}:
            raise OutputError(f"{self.place} lacks the file {min(missing)} of its log")
        age_s = max(self.keep_s, UNKNOWN_AGE_S)
        unknown_ns = int((self.now_s - age_s) * 10**9)

        def is_old(entry: StoredObject) -> bool:
            if entry.name in removals:
                return removals[entry.name] <= keep_ns
            is_of_killed_run = PurePosixPath(entry.name).name.startswith((COMPACTED, ERASED))
            return entry.modified_ns <= (keep_ns if is_of_killed_run else unknown_ns)

        self.deletable = [
            entry
            for entry in entries
            if is_table_file(entry.name) and entry.name not in current and is_old(entry)
        ]

    def _removals(self, names: Iterable[str]) -> dict[str, int]:
        """Return the files that the log removes, with the time in ns since 1970."""
        removals: dict[str, int] = {}
        texts = map_concurrently(self.place.read, list(names), is_remote=self.place.is_remote)
        for line in (line for text in texts for line in text.splitlines() if b'"remove"' in line):
            action: dict[str, Any] = json.loads(line).get("remove") or {}
            if "path" in action:
                name = unquote(action["path"])
                time_ns = int(action.get("deletionTimestamp") or 0) * 10**6
                removals[name] = max(removals.get(name, 0), time_ns)
        return removals

    def run(self) -> None:
        """Lock the table against compactions, and remove what a new plan finds."""
        with locked_table(self.place) as lock:
            self.plan()
            lock.check()
            self.remove()

    def remove(self) -> None:
        """Remove what was planned. The table must be locked."""
        catalog = self._catalog
        with translating_errors("vacuum", self.place):
            if catalog is None:
                if self.dropped:
                    rows = {file.path: file.rows or 0 for file in self.dropped}
                    replace_files(self.place, {}, rows)
                return
            if self.dropped:
                catalog.commit((), self.dropped, app_id=f"nsq-vacuum-{uuid4().hex}", number=1)
            # Another program may have restored an earlier version since the plan.
            current = {file.path for file in catalog.files()} if self.deletable else set()
            for entry in self.deletable:
                if entry.name not in current:
                    self.place.delete(entry.name)
            if self.log:
                catalog.add_checkpoint()
                for entry in self.log:
                    self.place.delete(entry.name)


def day_before(now_s: float, age_s: float) -> date:
    """Return the first day that is not older than ``age_s``, in UTC."""
    return (datetime.fromtimestamp(now_s, UTC) - timedelta(seconds=age_s)).date()
