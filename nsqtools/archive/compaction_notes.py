"""Record the inputs of each compacted partition, and delete archives that are in Parquet.

The note of a partition is ``_compaction/topic=x/date=y.json``.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from contextlib import suppress
from itertools import chain
from typing import Any

from nsqtools.archive.catalog import PartitionKey, Source
from nsqtools.archive.compaction_plan import Selection
from nsqtools.archive.delta import TableFile
from nsqtools.archive.layout import names_of_archive
from nsqtools.archive.place import Place, translating_errors
from nsqtools.archive.reader import why_unfinished
from nsqtools.archive.replacements import NOTES

CompactionNote = dict[str, Any]


class Notes:
    """The notes of an output. Methods raise `NsqError`."""

    def __init__(self, output: Place) -> None:
        self.output = output

    def read(self, key: PartitionKey) -> CompactionNote:
        """Return the note of a partition, empty without one."""
        with translating_errors("read", self.output):
            return dict(self.output.read_json(_name_of(key)) or {})

    def add(self, key: PartitionKey, sources: Iterable[Source], files: Iterable[TableFile]) -> None:
        """Record inputs that were compacted, and the files that have their messages."""
        note = self.read(key)
        additions = {
            "sources": {source.key: source.size for source in sources},
            "files": {file.path: file.bytes for file in files},
            "begins": {source.key: source.begin for source in sources},
        }
        document = {name: note.get(name, {}) | values for name, values in additions.items()}
        with translating_errors("write", self.output):
            self.output.put(_name_of(key), json.dumps({"version": 1, **document}).encode())

    def deletable(
        self, sources: Iterable[Source], selection: Selection, *, is_delta: bool
    ) -> tuple[list[Source], dict[str, str]]:
        """Return the archives whose messages are all in Parquet, and the reasons to keep others."""
        notes: dict[PartitionKey, CompactionNote] = {}
        deletable: list[Source] = []
        reasons_to_keep: dict[str, str] = {}
        by_file: dict[str, list[Source]] = {}
        for source in sources:
            if not source.is_parquet:
                by_file.setdefault(source.key, []).append(source)
        for of_file in by_file.values():
            first = of_file[0]
            keys = [key for source in of_file for key in source.partitions]
            if not all(map(selection.has, keys)):
                continue
            notes |= {key: self.read(key) for key in keys if key not in notes}
            reasons = [first.damage]
            if first.file.head is None and first.topic is None:
                reasons.append("it has neither messages nor an index, so it may not be an archive")
            with translating_errors("read", first.shown):
                reasons.append(why_unfinished(first.file))
            of_partitions = (
                self._reason_to_keep(first, key, notes[key], is_delta=is_delta) for key in keys
            )
            if reason := next(filter(None, chain(reasons, of_partitions)), ""):
                reasons_to_keep[first.shown] = reason
            else:
                deletable.append(first)
        return deletable, reasons_to_keep

    def _reason_to_keep(
        self, source: Source, key: PartitionKey, note: CompactionNote, *, is_delta: bool
    ) -> str:
        if compacted_size(note, source) != source.size:
            return f"not all of it is compacted: {key.topic} on {key.day}"
        for name, size in () if is_delta else note["files"].items():
            try:
                if self.output.stat(name).size != size:
                    return f"{self.output / name} has changed"
            except FileNotFoundError:
                return f"{self.output / name} is missing"
        return ""


def _name_of(key: PartitionKey) -> str:
    return f"{NOTES}/{key.folder}.json"


def compacted_size(note: Mapping[str, Any], source: Source) -> int | None:
    """Return the size of a file when it was compacted, None if it was not."""
    size: int | None = note.get("sources", {}).get(source.key)
    begin = note.get("begins", {}).get(source.key) or source.begin
    if size is None or begin == source.begin:
        return size
    if source.damage or source.file.head is not None:
        return None
    # A file without a head has another hash after it has grown. The old part is compared.
    with translating_errors("read", source.shown):
        return size if source.file.storage.digest(source.file.name, size) == begin else None


def delete_archive(source: Source) -> bool:
    """Delete an archive file with its index and manifest.

    Returns False, and deletes nothing, if it has changed since the listing or has a writer now.
    Raises the errors of `failure_of`.
    """
    storage, name, listed = source.file.storage, source.file.name, source.file.entry
    with translating_errors("delete", source.shown), suppress(FileNotFoundError):
        if source.is_parquet or listed is None or why_unfinished(source.file):
            return False
        if storage.stat(name).version == listed.version:
            for path in names_of_archive(name):
                storage.delete(path)
            return True
    return False
