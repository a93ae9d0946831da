"""Erase messages from archives and tables, and verify that they are gone.

All messages are judged before anything changes. Then each file with a match is written again
without it:

    an archive               the file is replaced as a whole, then its index and manifest. A record
                             next to it, ``.NAME.erase``, has these until they are stored, so that
                             the next run stores them after a kill. Without a head, ``.NAME.erased``
                             keeps the identity that the file had
    a folder of Parquet      `replacements`
    a Delta table            one commit. Then the history of the table is deleted, also the files
                             that an earlier run or a compaction removed or did not commit

The first time in the index of an archive stays, because it belongs to the identity of the file.
"""

from __future__ import annotations

import hashlib
import json
import os
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field, replace
from pathlib import Path, PurePosixPath
from typing import Any
from uuid import uuid4

import pyarrow

from nsqtools.archive.delta import DeltaCatalog, TableFile
from nsqtools.archive.finding import (
    ArchiveFile,
    Inputs,
    check_whole_folder,
    find_archives,
    is_table_file,
)
from nsqtools.archive.form import LineKind
from nsqtools.archive.layout import (
    ERASED_FROM,
    INDEX,
    MANIFEST,
    PART,
    Index,
    Member,
    hidden_name,
    is_hidden,
    names_of_archive,
    total_of,
)
from nsqtools.archive.members import codec_at
from nsqtools.archive.parquet import (
    ParquetWriter,
    manifest_of,
    open_parquet,
    plain_schema,
    read,
)
from nsqtools.archive.place import Place, PlaceLock, hash_of, translating_errors
from nsqtools.archive.reader import (
    form_of,
    read_lines,
    read_messages,
    why_written,
    write_members,
)
from nsqtools.archive.replacements import (
    ERASED,
    LOCK,
    STAGING,
    Staged,
    locked_table,
    replace_files,
)
from nsqtools.archive.slices import draft_for, publish_file
from nsqtools.archive.vacuum import Vacuum
from nsqtools.errors import NsqError, OutputError
from nsqtools.files.durable import NEW, make_alike, replace_file, sync_folder, temporary_path
from nsqtools.files.scratch import scratch_directory
from nsqtools.records.envelope import Envelope

RECORD = ".erase"
COPIES = (".damaged", ".bad")
"""Endings of files that repairs and nsqd keep, and that no reader lists."""
LINES_PER_MEMBER = 10_000
MAX_CLOCK_SKEW_S = 86_400.0
"""The history includes what other clocks date up to a day after this one."""


@dataclass(slots=True)
class Matches:
    """A file with messages to erase: their numbers in the file, and the number of all."""

    archive: ArchiveFile
    rows: set[int]
    messages: int


@dataclass(slots=True)
class Erasure:
    """One erasure: call `finish_earlier`, `plan` and `run`. Methods raise `NsqError`.

    ``is_match`` raises ``ValueError`` for a message that it cannot judge.
    """

    inputs: Inputs
    is_match: Callable[[Envelope], bool]
    delimiter: bytes = b"\n"
    matches: list[Matches] = field(default_factory=list)
    messages: int = 0
    unreachable: dict[str, str] = field(default_factory=dict)
    """Files that keep messages, or may, and the reasons."""

    def __post_init__(self) -> None:
        """Refuse tables that cannot be changed."""
        for place in self.inputs.parquet:
            with translating_errors("read", place):
                check_whole_folder(place)
        for place in self.inputs.delta:
            DeltaCatalog(str(place)).check_writable(removes=True)

    def finish_earlier(self) -> None:
        """Finish what a killed run began."""
        for place in self.inputs.places:
            if place in self.inputs.archives:
                with translating_errors("use", place):
                    _finish_archives(place)
            else:
                with locked_table(place):  # which finishes it
                    pass

    def plan(self) -> None:
        """Judge all messages.

        Raises `NsqError` for a message that cannot be judged, and for a damaged file.
        """
        self.matches, self.messages = [], 0
        judged = set[str]()
        for archive in find_archives([str(place) for place in self.inputs.places]):
            judged.add(archive.shown)
            matches = self._judge(archive)
            self.messages += matches.messages
            if not matches.rows:
                continue
            if reason := self._why_unreachable(archive):
                self.unreachable[archive.shown] = reason
            else:
                self.matches.append(matches)
        for place in self.inputs.places:
            with translating_errors("read", place):
                unread = _unread_files(place)
            self.unreachable |= {path: unread[path] for path in unread.keys() - judged}

    def _judge(self, archive: ArchiveFile) -> Matches:
        rows, count = set[int](), 0
        for message in read_messages(archive, _refuse_damage, delimiter=self.delimiter):
            try:
                if self.is_match(message):
                    rows.add(count)
            except ValueError as exc:
                name = f"message {count + 1} {message.id.decode('latin-1')}".rstrip()
                raise NsqError(
                    f"cannot judge {name} of {archive.shown}: {exc}",
                    hint="Nothing was erased. Select topics with --topic, or write a --where that "
                    "can judge it.",
                ) from None
            count += 1
        return Matches(archive, rows, count)

    def _why_unreachable(self, archive: ArchiveFile) -> str:
        if archive.is_in_progress:
            return "it is in progress: run it again when it is finished"
        if archive.table is None:
            with translating_errors("read", archive.shown):
                return why_written(archive)
        if archive.storage.absolute() not in (*self.inputs.delta, *self.inputs.parquet):
            return "it is a part of a table, or Parquet among archives: give the table"
        return ""

    def run(self) -> None:
        """Erase, delete the history of Delta tables, and verify.

        Raises `OutputError` if messages to erase are left.
        """
        expected = self.messages - sum(len(matches.rows) for matches in self.matches)
        by_place: dict[Place, list[Matches]] = {}
        for matches in self.matches:
            by_place.setdefault(matches.archive.storage.absolute(), []).append(matches)
        for place in (*by_place, *(table for table in self.inputs.delta if table not in by_place)):
            group = by_place.get(place, ())
            with translating_errors("erase from", place):
                if place not in (*self.inputs.delta, *self.inputs.parquet):
                    for matches in group:
                        self._erase_from_archive(matches)
                    continue
                # A compaction since the plan has replaced files, and so ends this run.
                with place.lock(LOCK) as lock:
                    if place in self.inputs.delta:
                        _erase_from_delta(place, group, lock)
                    else:
                        _erase_from_folder(place, group, lock)
        erased = self.matches
        removed = {m.archive.shown for m in erased if len(m.rows) == m.messages}
        left = (place for place in self.inputs.archives if str(place) not in removed)
        self.inputs = replace(self.inputs, archives=tuple(left))
        self.plan()
        for table in self.inputs.delta:
            with translating_errors("read", table):
                self.unreachable |= _uncommitted_files(table)
        remaining, self.matches = self.matches, erased
        if remaining or self.messages < expected:
            raise OutputError(
                f"{sum(len(m.rows) for m in remaining)} messages to erase and {self.messages} of "
                f"{expected} others are there now",
                hint="Did a program write at the same time? Run it again.",
            )

    def _erase_from_archive(self, matches: Matches) -> None:
        archive = matches.archive
        place, name = archive.storage, archive.name
        if len(matches.rows) == matches.messages:
            for path in names_of_archive(name):
                place.delete(path)
            return
        if place.is_remote:
            with scratch_directory("nsq-erase-") as folder:
                draft = folder / "draft"
                self._write(matches, draft)
                place.verify(name, draft, place.put_file(name, draft))
        else:
            with temporary_path(archive.path) as draft:
                self._write(matches, draft)
                # The open fails if the file has been replaced in the meantime.
                archive.open().close()
                draft.rename(archive.path)
                sync_folder(archive.path.parent)
        _finish_archive(place, name)

    def _write(self, matches: Matches, draft: Path) -> None:
        """Write an archive without the matches, and the record of its index and manifest."""
        archive = matches.archive
        is_bare = form_of(archive).kind is LineKind.bodies
        delimiter = self.delimiter if is_bare else b"\n"
        texts = _texts_without(archive, matches.rows, delimiter)
        with archive.open() as file, os.fdopen(os.open(draft, NEW | os.O_RDWR), "w+b") as copy:
            if not archive.is_remote:
                make_alike(copy.fileno(), os.fstat(file.fileno()))
            members = write_members(copy, codec_at(file), texts, delimiter)
        if archive.members and members:
            members[0] = members[0]._replace(min_ts=archive.members[0].min_ts)
        record: dict[str, Any] = {"sha256": hash_of(draft), "index": None}
        if archive.head is None:
            digest, size = archive.content()
            record |= {"original_sha256": digest, "original_size": size}
        if archive.members is not None:
            index = Index(archive.head, members).encode() + total_of(members).encode()
            record |= {"index": index.decode(), "totals": _totals(members, draft, index)}
        archive.storage.put(hidden_name(archive.name, RECORD), json.dumps(record).encode())


def _unread_files(place: Place) -> dict[str, str]:
    """Return the files below a place that may have messages and that no reader lists."""
    unread = {}
    for entry in place.list() if place.may_be_folder() else ():
        *folders, base = entry.name.split("/")
        if base.endswith(COPIES):
            unread[str(place / entry.name)] = "it is a copy that no reader lists"
        elif entry.size and any(folder.startswith(".") for folder in folders):
            is_data = is_hidden(base, PART) or not base.startswith(".")
            if is_data and not base.endswith(".json"):
                unread[str(place / entry.name)] = "it may land in a table: run it again afterwards"
    return unread


def _uncommitted_files(place: Place) -> dict[str, str]:
    """Return the files in a Delta table that no version has, after its history was deleted."""
    current = {file.path for file in DeltaCatalog(str(place)).files()}
    return {
        str(place / entry.name): "a writer may commit it to the table: run it again afterwards"
        for entry in place.list()
        if is_table_file(entry.name) and entry.name not in current
    }


def _texts_without(archive: ArchiveFile, rows: set[int], delimiter: bytes) -> Iterator[bytes]:
    number, pending = 0, list[bytes]()
    for lines in read_lines(archive, _refuse_damage, delimiter=delimiter):
        for line in lines:
            if number not in rows:
                pending.append(line)
            number += 1
        if len(pending) >= LINES_PER_MEMBER:
            yield delimiter.join([*pending, b""])
            pending = []
    if pending:
        yield delimiter.join([*pending, b""])


def _totals(members: list[Member], draft: Path, index: bytes) -> dict[str, Any]:
    """Return the fields of a manifest that change."""
    total = total_of(members)
    return {
        "size": draft.stat().st_size,
        "sha256": hash_of(draft),
        "index_sha256": hashlib.sha256(index).hexdigest(),
        "messages": total.messages,
        "min_ts": total.min_ts or None,
        "max_ts": total.max_ts or None,
    }


def _finish_archives(place: Place) -> None:
    if not place.may_be_folder():
        _finish_archive(place.parent, place.name)
        return
    for entry in place.list():
        folder, slash, base = entry.name.rpartition("/")
        if is_hidden(base, RECORD):
            _finish_archive(place, f"{folder}{slash}{base[1 : -len(RECORD)]}")


def _finish_archive(place: Place, name: str) -> None:
    """Store the index and manifest of an archive that was replaced, by its record."""
    if (record := place.read_json(hidden_name(name, RECORD))) is None:
        return
    with suppress(FileNotFoundError):
        is_replaced = place.digest(name, place.stat(name).size) == record["sha256"]
        if is_replaced and "original_sha256" in record:
            erased = {key: record[key] for key in ("sha256", "original_sha256", "original_size")}
            _put_alike(place, name, ERASED_FROM, json.dumps(erased).encode())
        if is_replaced and record["index"] is not None:
            _put_alike(place, name, INDEX, record["index"].encode())
            manifest = place.read_json(hidden_name(name, MANIFEST))
            if manifest is not None:
                data = json.dumps(manifest | record["totals"], indent=1).encode() + b"\n"
                _put_alike(place, name, MANIFEST, data)
    place.delete(hidden_name(name, RECORD))


def _put_alike(place: Place, name: str, suffix: str, data: bytes) -> None:
    """Store a hidden file of an archive, on a disk with the owner and the mode of the archive."""
    hidden = hidden_name(name, suffix)
    if place.is_remote:
        place.put(hidden, data)
    else:
        replace_file(place.path / hidden, data, (place.path / name).stat())


def _refuse_damage(shown: str, problem: str) -> None:
    raise OutputError(
        f"cannot read {shown}: {problem}",
        hint="Nothing was erased. Repair it first: nsq archive repair.",
    )


# -- tables -------------------------------------------------------------------------------------


def _erase_from_delta(place: Place, group: Sequence[Matches], lock: PlaceLock) -> None:
    adds, removes = [], []
    for matches in group:
        with _written(place, matches) as (draft, file):
            if file is not None:
                publish_file(draft, place, file.path)
                adds.append(file)
        assert matches.archive.table is not None
        removes.append(matches.archive.table)
    lock.check()
    if group:
        app_id = f"nsq-erase-{uuid4().hex}"
        DeltaCatalog(str(place)).commit(adds, removes, app_id=app_id, number=1)
    vacuum = Vacuum(place, -MAX_CLOCK_SKEW_S, time.time())
    vacuum.plan()
    lock.check()
    vacuum.remove()


def _erase_from_folder(place: Place, group: Sequence[Matches], lock: PlaceLock) -> None:
    for matches in group:
        staged: dict[str, Staged] = {}
        with _written(place, matches) as (draft, file):
            if file is not None:
                name = f"{STAGING}/{PurePosixPath(file.path).name}"
                manifest = manifest_of(file, draft).decode()
                staged[file.path] = Staged(name, file.bytes, manifest)
                publish_file(draft, place, name)
        lock.check()
        replace_files(place, staged, {matches.archive.name: matches.messages})


@contextmanager
def _written(place: Place, matches: Matches) -> Iterator[tuple[Path, TableFile | None]]:
    """Write a Parquet file without the matches; yield its path, and None if no row is left."""
    archive = matches.archive
    assert archive.table is not None
    with draft_for(place) as draft:
        if len(matches.rows) == matches.messages:
            yield draft, None
            return
        with archive.open() as source, open_parquet(source) as opened:
            schema = plain_schema(opened)
        with archive.open() as source, ParquetWriter(draft, schema) as writer:
            for batch in _without(read(source), matches.rows):
                writer.add(batch)
            file = writer.close()
        identity = repr((archive.name, sorted(matches.rows)))
        digest = hashlib.sha256(identity.encode()).hexdigest()[:20]
        name = str(PurePosixPath(archive.name).with_name(f"{ERASED}{digest}.parquet"))
        yield draft, replace(file, path=name, partition=archive.table.partition)


def _without(batches: Iterable[Any], rows: set[int]) -> Iterator[Any]:
    begin = 0
    for batch in batches:
        mask = [begin + offset not in rows for offset in range(batch.num_rows)]
        begin += batch.num_rows
        yield batch.filter(pyarrow.array(mask, pyarrow.bool_()))
