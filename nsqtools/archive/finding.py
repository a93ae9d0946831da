"""Find the files of archives, in directories and in object stores, each with its index.

In all places, files in progress are listed before finished files. Otherwise a file that is finished
between the two listings, perhaps into another place, would be missed. If a file is listed twice,
the finished one counts. An object store has finished files only. Their indexes are read
concurrently, because each read costs a round trip.

Trap: a listing is no snapshot. It may contain a file but not its index, whose name is on an earlier
page. So the index is requested by name: it is stored before its file is.

Tables are found as well: each Parquet file of a directory or bucket. Of a Delta table, and of a
directory with the log of Spark's file sink, only the files in the log count. A place with only
Parquet may contain files of other programs below ``_`` and ``.``.

A file without an index may contain bare bodies in any format. A file of a known other format is
refused, because its lines would be published as bodies.
"""

from __future__ import annotations

import errno
import logging
import os
import re
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from functools import cache, partial
from itertools import chain
from operator import attrgetter
from pathlib import Path, PurePosixPath
from typing import BinaryIO, TypeVar

from nsqtools.archive.delta import (
    LOG,
    SINK_LOG,
    DeltaCatalog,
    PartitionValues,
    TableFile,
    is_table,
)
from nsqtools.archive.form import BEGINNING_SIZE, PARQUET_MAGIC, why_foreign
from nsqtools.archive.layout import (
    ERASED_FROM,
    INDEX,
    MANIFEST,
    PART,
    Head,
    Index,
    Member,
    TimeRange,
    decode_index,
    end_of,
    hidden_name,
    is_hidden,
    owner_of,
    partition_of,
    split_head,
)
from nsqtools.archive.place import (
    ChangedError,
    DeniedError,
    LocalPlace,
    Place,
    StoredObject,
    map_concurrently,
    translating_errors,
)
from nsqtools.archive.place_url import parse_place
from nsqtools.archive.replacements import superseded_names
from nsqtools.archive.table_places import has_table, tables_below
from nsqtools.errors import ConfigurationError, NotFoundError, OutputError
from nsqtools.files.opening import NotRegularError, walk
from nsqtools.protocol.text import load_json

log = logging.getLogger("nsqtools")

Result = TypeVar("Result")


@dataclass(frozen=True, slots=True)
class ArchiveFile:
    """A file to read: its place, and its index if it has one.

    ``entry`` is the listed entry of a finished file. A file that has changed since is not read.
    """

    storage: Place
    name: str
    members: list[Member] | None
    head: Head | None = None
    entry: StoredObject | None = None
    table: TableFile | None = None
    """The record of a Parquet file in a log or a manifest."""
    problem: str = ""
    """The reason why the file cannot be read, such as missing permission for a directory."""

    @classmethod
    def at(cls, path: Path, index: Index) -> ArchiveFile:
        """Return the file at a local path."""
        return cls(LocalPlace(path.parent), path.name, index.members, index.head)

    @property
    def shown(self) -> str:
        """The path or URL."""
        return str(self.storage / self.name)

    @property
    def path(self) -> Path:
        """The local path. Raises `ConfigurationError` for a file in an object store."""
        return (self.storage / self.name).path

    @property
    def is_remote(self) -> bool:
        return self.storage.is_remote

    @property
    def is_in_progress(self) -> bool:
        return is_hidden(PurePosixPath(self.name).name, PART)

    @property
    def begin(self) -> tuple[Head, Member] | None:
        """The identity: machines cloned from one image may write files with the same head."""
        return (self.head, self.members[0]) if self.head and self.members else None

    @property
    def messages(self) -> int | None:
        """The number of messages, if the index or the table has it."""
        if self.table is not None:
            return self.table.rows
        return None if self.members is None else sum(m.messages for m in self.members)

    @property
    def begins_ns(self) -> int | None:
        """The earliest time of the messages, if known; 0 if they have no times."""
        if self.table is not None:
            return self.table.min_ts_ns
        if self.members and self.members[0].max_ts:
            return min(member.min_ts for member in self.members)
        return None

    def may_have(self, within: TimeRange) -> bool:
        """Return whether it may contain messages of a range, according to its index or table."""
        if self.table is not None:
            begin_ns, end_ns = self.table.min_ts_ns, self.table.max_ts_ns
            return begin_ns is None or end_ns is None or within.overlaps(begin_ns, end_ns)
        if self.members is None:
            return True
        # Readers also read the bytes after the last member of the index.
        has_tail = self.entry is not None and self.entry.size > end_of(self.members)
        return has_tail or any(map(within.may_contain, self.members))

    def open(self) -> BinaryIO:
        """Open the file to read it. A file that was in progress may have its final name now.

        Raises `ChangedError` if it has changed since the listing, `NotRegularError` if it has a
        ``problem``, and ``OSError``.
        """
        if self.problem:
            raise NotRegularError(errno.EACCES, self.problem, self.shown)
        try:
            return self.storage.open(self.name, self.entry)
        except FileNotFoundError:
            if not self.is_in_progress:
                raise
            return self.storage.open(str(owner_of(PurePosixPath(self.name))))

    def size(self) -> int:
        """Return the current size in bytes. Raises ``OSError``."""
        return self.storage.stat(self.name).size

    def content(self, size: int | None = None) -> tuple[str, int]:
        """Return the hash and the size of the content, which identify a file without a head.

        With a ``size``, only so many bytes count. After an erasure the result is that of the
        content before it, so that the messages that are left do not count as new. Raises
        ``OSError`` and `OutputError`.
        """
        size = self.size() if size is None else size
        digest = self.storage.digest(self.name, size)
        with suppress(DeniedError):  # See `read_index`.
            erased = self.storage.read_json(hidden_name(self.name, ERASED_FROM))
            if erased is not None and erased["sha256"] == digest:
                return erased["original_sha256"], erased["original_size"]
        return digest, size


PartitionFilter = Callable[[PartitionValues], bool]
"""Returns whether the files of a partition are needed."""


def any_partition(_: PartitionValues) -> bool:
    """Select every file."""
    return True


def map_archives(
    function: Callable[[ArchiveFile], Result], archives: Sequence[ArchiveFile]
) -> Iterator[Result]:
    """Apply a function to files, in an object store concurrently; return the results in order."""
    is_remote = any(archive.is_remote for archive in archives)
    return map_concurrently(function, archives, is_remote=is_remote)


@contextmanager
def _raising_not_found(place: object) -> Iterator[None]:
    """Raise `NotFoundError` for a missing file, and the errors of `failure_of` for others."""
    with translating_errors("read", place):
        try:
            yield
        except FileNotFoundError as exc:
            raise NotFoundError(f"there is no {exc.filename or place}") from None


def find_archives(
    places: Sequence[Path | str], is_selected: PartitionFilter = any_partition
) -> list[ArchiveFile]:
    """Return the files at paths and URLs, of directories recursively, with files in progress last.

    A file that several places have, also through links, is returned once.
    Of a table, only files in partitions for which ``is_selected`` is true are returned. Raises
    `NotFoundError` for a missing place, `ConfigurationError` for a file of another program, and the
    errors of `failure_of`.
    """
    archives: dict[str, ArchiveFile] = {}
    for place, in_progress in [(str(at), _in_progress(str(at), is_selected)) for at in places]:
        with _raising_not_found(place):
            for archive in _find(place, in_progress, is_selected):
                archives.setdefault(_real_path(archive.storage / archive.name), archive)
    finished = {archive.begin for archive in archives.values() if not archive.is_in_progress}
    finished.discard(None)
    return [
        archive
        for archive in archives.values()
        if not (archive.is_in_progress and archive.begin in finished)
    ]


def _real_path(place: Place) -> str:
    """Return the path or URL that a place has without links."""
    return str(place) if place.is_remote else os.path.realpath(place.path)


def _in_progress(place: str, is_selected: PartitionFilter) -> list[StoredObject]:
    """Return the files in progress of a directory. Raises the errors of `find_archives`."""
    storage, entries = parse_place(place), list[StoredObject]()
    if not storage.is_remote:
        folders = _selected_folders(storage, is_selected)
        walks = chain.from_iterable(walk(storage.path / folder) for folder in folders)
        top = [] if "" in folders else [(storage.path, os.listdir(storage.path))]
        for folder, names in chain(top, walks):
            for path in (folder / name for name in names if is_hidden(name, PART)):
                # The archiver may finish the file, and so rename it, after the walk has seen it.
                with _raising_not_found(place), suppress(FileNotFoundError):
                    entries.append(storage.stat(path.relative_to(storage.path).as_posix()))
    return list(filter(_is_in_progress, entries))


def _find(
    place: str, in_progress: Sequence[StoredObject], is_selected: PartitionFilter
) -> list[ArchiveFile]:
    storage = parse_place(place)
    root, in_table = files_in_table(place, is_selected)
    if in_table is not None:
        return in_table
    if not storage.may_be_folder():
        return [_single_file(storage)]
    unreadable, entries = list[ArchiveFile](), list[StoredObject]()
    for entry, error in _list_selected(storage, is_selected):
        if error is None:
            entries.append(entry)
        elif is_visible(entry.name):
            reason = f"cannot be read ({error.strerror})"
            unreadable.append(ArchiveFile(storage, entry.name, None, problem=reason))
    tables = _tables_in(storage, entries, is_selected)
    entries = [entry for entry in entries if not _is_inside(entry.name, tables)]
    in_tables = list(chain.from_iterable(tables.values()))
    if in_tables and not any(_is_data(entry) for entry in entries):
        return in_tables
    entries.sort(key=_walk_order)
    if not entries and _may_be_object(storage):
        return [_single_file(storage)]
    if _has_only_parquet(entries):
        return [*files_in_folder(root, storage, entries, is_selected), *in_tables]
    names = {entry.name for entry in entries}
    files = [*(entry for entry in entries if is_visible(entry.name)), *in_progress]
    add_index = partial(_with_index, storage, names=names)
    archives = map_concurrently(add_index, files, is_remote=storage.is_remote)
    return [*archives, *in_tables, *unreadable]


def _list_selected(
    place: Place, is_selected: PartitionFilter
) -> Iterator[tuple[StoredObject, OSError | None]]:
    """Iterate over the objects of a place, without folders of topics that are not selected."""
    folders = _selected_folders(place, is_selected)
    for name in folders:
        yield from place.list_readable(name)
    if "" not in folders:
        yield from ((entry, None) for entry in place.children("")[0])


def _selected_folders(place: Place, is_selected: PartitionFilter) -> Sequence[str]:
    """Return the folders without those of topics that are not selected; "" if all are selected."""
    folders = place.children("")[1]
    names = {name: partition_of(f"{name}/") for name in folders if name.startswith("topic=")}
    if all(map(is_selected, names.values())):
        return [""]
    return [name for name in folders if name not in names or is_selected(names[name])]


def _tables_in(
    place: Place, entries: Iterable[StoredObject], is_selected: PartitionFilter
) -> dict[str, list[ArchiveFile]]:
    """Return the valid files of the Delta tables in a listing, by the folder of the table."""
    marker = f"/{LOG}/"
    folders = {entry.name.partition(marker)[0] for entry in entries if marker in entry.name}
    tables = {}
    for folder in sorted(filter(is_visible, folders)):
        _, files = files_in_table(str(place / folder), is_selected)
        if files is not None:
            tables[folder] = files
    return tables


def _is_inside(name: str, folders: Collection[str]) -> bool:
    return any(str(folder) in folders for folder in PurePosixPath(name).parents)


def _may_be_object(place: Place) -> bool:
    """Return whether a place without objects below it may be an object; a bucket is not."""
    return place.is_remote and bool(place.name)


def _single_file(place: Place) -> ArchiveFile:
    return _with_index(place.parent, place.parent.stat(place.name), is_named=True)


def _is_in_progress(entry: StoredObject) -> bool:
    """Return whether it is a file in progress, but not of a log that is landing in a table.

    The messages of such a log are read as rows of the table.
    """
    folder, _, name = entry.name.rpartition("/")
    return is_hidden(name, PART) and is_visible(folder)


def _walk_order(entry: StoredObject) -> list[tuple[bool, str]]:
    """Return a sort key with which the files of a folder come before its folders."""
    *folders, name = entry.name.split("/")
    return [*((True, folder) for folder in folders), (False, name)]


def is_visible(name: str) -> bool:
    """Return whether neither the file nor a folder above it is hidden."""
    return not any(part.startswith(".") for part in name.split("/"))


def _with_index(
    storage: Place, entry: StoredObject, names: Collection[str] = (), *, is_named: bool = False
) -> ArchiveFile:
    """Return a file with its index, if it has one.

    ``names`` are the listed names; an index may also have been stored since the listing. Raises
    `ConfigurationError` for a file of another program, and ``OSError``.
    """
    is_in_progress = is_hidden(entry.name.rpartition("/")[2], PART)
    listed = None if is_in_progress else entry
    name = str(owner_of(PurePosixPath(entry.name))) if is_in_progress else entry.name
    index = hidden_name(name, INDEX)
    if (data := read_index(storage, index, is_listed=index in names)) is not None:
        return ArchiveFile(storage, entry.name, decode_index(data), split_head(data)[0], listed)
    table = None
    if not is_in_progress:
        beginning = _beginning(storage, entry)
        if beginning.startswith(PARQUET_MAGIC):
            table = _parquet(storage, entry, names)
        elif (foreign := why_foreign("" if is_named else entry.name, beginning)).reason:
            raise ConfigurationError(
                f"cannot read {storage / entry.name} as an archive ({foreign.reason})",
                hint=foreign.remedy,
            )
    return ArchiveFile(storage, entry.name, None, entry=listed, table=table)


def read_index(storage: Place, name: str, *, is_listed: bool) -> bytes | None:
    """Return the content of an index; None if it does not exist. Raises ``OSError``."""
    try:
        return storage.read(name)
    except FileNotFoundError:
        return None
    except DeniedError:
        # S3 returns 403 for a missing object to a user who may not list the bucket.
        if is_listed:
            raise
        return None
    except (NotRegularError, PermissionError) as exc:
        # An unreadable index on a disk counts as a truncated one, so the file itself is read.
        log.warning("cannot read %s (%s)", exc.filename, exc.strerror)
        return b""


def _parquet(storage: Place, entry: StoredObject, names: Collection[str]) -> TableFile:
    """Return the record of a Parquet file by its manifest and folders. Raises ``OSError``."""
    manifest = hidden_name(entry.name, MANIFEST)
    counts: dict[str, int] = {}
    if not names or manifest in names:
        # A damaged manifest counts as missing.
        with suppress(FileNotFoundError, DeniedError, ValueError, TypeError):
            content = dict(load_json(storage.read(manifest)))
            counts = {key: value for key, value in content.items() if type(value) is int}
    rows, min_ts, max_ts = (counts.get(key) for key in ("messages", "min_ts", "max_ts"))
    # The place itself may be below partition folders.
    outer = partition_of(str(storage / entry.name))
    outer = {key: outer[key] for key in ("topic", "date") if key in outer}
    return TableFile(entry.name, entry.size, rows, min_ts, max_ts, outer | partition_of(entry.name))


def _beginning(storage: Place, entry: StoredObject) -> bytes:
    """Return the first bytes of a file, or b"" after an error that its reader will report."""
    with suppress(FileNotFoundError, ChangedError, NotRegularError, PermissionError):
        return storage.read_range(entry.name, 0, BEGINNING_SIZE) if entry.size else b""
    return b""


# -- the files of tables ------------------------------------------------------------------------

SINK_LOG_VERSION = "v1"
_BATCH = re.compile(r"\d+(\.compact)?")


def is_metadata(name: str) -> bool:
    """Return whether a file has no data: programs keep their metadata below ``_`` and ``.``."""
    return any(part[:1] in "._" for part in name.split("/"))


def is_table_file(name: str) -> bool:
    """Return whether a name is that of a data file of a table."""
    return name.endswith(".parquet") and not is_metadata(name)


def _is_data(entry: StoredObject) -> bool:
    return bool(entry.size) and not is_metadata(entry.name)


def files_in_folder(
    root: Place, storage: Place, listed: Sequence[StoredObject], is_selected: PartitionFilter
) -> list[ArchiveFile]:
    """Return the valid files of a Parquet directory, in order.

    ``root`` is the directory above the partitions. Raises `OutputError` and ``OSError``.
    """
    names = {entry.name for entry in listed}
    entries = _parquet_entries(root, storage, listed, is_selected)
    tables = map_concurrently(
        partial(_parquet, storage, names=names), entries, is_remote=storage.is_remote
    )
    return [
        ArchiveFile(storage, entry.name, None, entry=entry, table=table)
        for entry, table in zip(entries, tables, strict=True)
    ]


def _has_log(place: Place, is_input: bool) -> bool:
    """Return whether a place has the log of a Delta table.

    A user may have no right to list a folder above the input, which ``is_input`` false means.
    """
    if not place.may_be_folder():
        return False
    try:
        return is_table(place)
    except DeniedError:
        if is_input:
            raise
        return False


def _is_file(place: Place) -> bool:
    """Return whether a place is a file: Spark also makes folders whose names end in .parquet."""
    if not place.is_remote:
        return not place.may_be_folder()
    # A user who may only read the file may not list it as a folder.
    with suppress(DeniedError):
        return next(place.list(), None) is None
    return True


def _files_of_table(url: str) -> list[TableFile]:
    return DeltaCatalog(url).files()


def files_in_table(
    place: str,
    is_selected: PartitionFilter = any_partition,
    has_log: Callable[[Place, bool], bool] = _has_log,
    files_of_table: Callable[[str], list[TableFile]] = _files_of_table,
) -> tuple[Place, list[ArchiveFile] | None]:
    """Find the root of a table and, of a Delta table, the valid files at a place.

    A caller with many places in one table passes cached versions of ``has_log`` and
    ``files_of_table``.

    Returns the place above the partition folders (for a single file, its folder) and the files,
    which are None unless that place is a Delta table. The folders above the table may have names of
    partitions as well. Raises `NsqError` and ``OSError``.
    """
    target = parse_place(place).absolute()
    folder = target.parent if target.name.endswith(".parquet") and _is_file(target) else target
    ancestors: list[Place] = [folder, *folder.parents]
    partitions = [number for number, place_above in enumerate(ancestors) if "=" in place_above.name]
    candidates = ancestors[: partitions[-1] + 2 if partitions else 1]
    root = next((place for place in candidates if has_log(place, place == target)), None)
    if root is None:
        return candidates[-1], None
    inside = "" if root == target else str(target)[len(str(root)) + 1 :]
    # Logs that wait for their conversion are below a hidden folder of the table.
    if inside and is_metadata(inside):
        return root, None
    storage = parse_place(str(root) if inside else place)
    if not inside:
        return root, files_of_catalog(DeltaCatalog(storage.url), is_selected)
    files = [
        file for file in files_of_table(storage.url) if f"{file.path}/".startswith(f"{inside}/")
    ]
    if not files and inside.endswith(".parquet"):
        raise ConfigurationError(
            f"{place} is not a current file of the Delta table {root}",
            hint="Give the table; --topic selects a part of it.",
        )
    return root, _in_order(storage, (file for file in files if is_selected(file.partition)))


def files_of_catalog(catalog: DeltaCatalog, is_selected: PartitionFilter) -> list[ArchiveFile]:
    """Return the selected files of a Delta table, in order. Raises `NsqError`."""
    return _in_order(catalog.storage, catalog.files(is_selected=is_selected))


def _in_order(storage: Place, files: Iterable[TableFile]) -> list[ArchiveFile]:
    files = sorted(files, key=attrgetter("path"))
    return [ArchiveFile(storage, file.path, None, table=file) for file in files]


def _parquet_entries(
    root: Place, storage: Place, listed: Iterable[StoredObject], is_selected: PartitionFilter
) -> list[StoredObject]:
    """Return the selected and valid Parquet files of a listing of ``storage``, in order.

    If the ``root`` has the log of Spark's file sink, only files in the log are valid. Files that
    are being replaced are left out. Raises ``OSError`` and `OutputError`.
    """
    committed = committed_names(root)
    inside = str(storage.absolute())[len(str(root.absolute())) + 1 :]
    prefix = f"{inside}/" if inside else ""
    entries = [
        entry
        for entry in sorted(listed, key=attrgetter("name"))
        if is_table_file(entry.name)
        and (committed is None or entry.name.rpartition("/")[2] in committed)
        and is_selected(partition_of(entry.name))
    ]
    superseded = superseded_names(
        root,
        {prefix + entry.name for entry in entries},
        lambda name: name.startswith(prefix) and is_selected(partition_of(name[len(prefix) :])),
    )
    return [entry for entry in entries if prefix + entry.name not in superseded]


# Other programs name files of Arrow `.arrow`, too.
_ARCHIVE_EXTENSIONS = (".log", ".jsonl", ".xz", ".bz2", ".gz", ".zst", ".log.arrow")


def _has_only_parquet(listed: Iterable[StoredObject]) -> bool:
    """Return whether a place has Parquet files and no archives.

    In such a place a file is an archive only if its name ends like one: other programs may keep
    any other file next to Parquet.
    """
    has_parquet = False
    for entry in listed:
        if _is_in_progress(entry):
            return False
        if _is_data(entry):
            if entry.name.endswith(_ARCHIVE_EXTENSIONS):
                return False
            has_parquet |= entry.name.endswith(".parquet")
    return has_parquet


def check_whole_folder(place: Place) -> None:
    """Refuse a part of a folder of Parquet, and a folder whose files Spark lists in a log.

    Raises `ConfigurationError` and ``OSError``.
    """
    root, _ = files_in_table(str(place))
    if root != place.absolute() or not place.may_be_folder():
        raise ConfigurationError(
            f"{place} is a part of {root}",
            hint="Give the whole folder; --topic and --day of compact select a part of it.",
        )
    if SINK_LOG in place.children("")[1]:
        raise ConfigurationError(
            f"{place} is written by Spark, whose log has its files",
            hint="Use Spark to change it; an output of nsq spark ingest of an earlier version "
            "needs one run of this version.",
        )


def committed_names(output: Place) -> set[str] | None:
    """Return the names of the files in the log of Spark's file sink; None without a log.

    Spark makes unique names, so they identify a file without its directory. Raises ``OSError`` and
    `OutputError`.
    """
    logs = [entry.name for entry in output.list(SINK_LOG)]
    if not logs:
        return None
    committed: set[str] = set()
    for name in logs:
        if _BATCH.fullmatch(name.removeprefix(f"{SINK_LOG}/")):
            data = output.read(name)
            try:
                version, *lines = data.decode().splitlines()
                if version != SINK_LOG_VERSION:
                    raise ValueError(f"it is of version {version}")
                committed |= {load_json(line)["path"].rpartition("/")[2] for line in lines}
            except (ValueError, KeyError, TypeError, AttributeError) as exc:
                raise OutputError(f"cannot read {output / name} ({exc})") from exc
    return committed


def table_files(
    places: Iterable[Place], is_selected: PartitionFilter = any_partition
) -> dict[Place, list[str]]:
    """Return the valid files of Parquet and Delta tables, by the root of the table.

    A place may be below partition folders, or a file. Raises `NsqError`.
    """
    names_by_root: dict[Place, list[str]] = {}
    # The places may be a thousand files of one table.
    has_log, files_of_table = cache(_has_log), cache(_files_of_table)
    for place in (place.absolute() for place in places):
        with translating_errors("read", place):
            root, in_table = files_in_table(str(place), is_selected, has_log, files_of_table)
            inside = "" if root == place else str(place)[len(str(root)) + 1 :]
            names = names_by_root.setdefault(root, [])
            if in_table is not None:
                names += [file.name for file in in_table]
            elif inside.endswith(".parquet"):
                names += [inside] if is_selected(partition_of(inside)) else []
            else:
                listed = root.list(inside)
                names += [entry.name for entry in _parquet_entries(root, root, listed, is_selected)]
    return {root: list(dict.fromkeys(names)) for root, names in names_by_root.items()}


# -- archives, Parquet or Delta -----------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Inputs:
    """Places with messages, by format; see `find_inputs`."""

    archives: tuple[Place, ...] = ()
    parquet: tuple[Place, ...] = ()
    delta: tuple[Place, ...] = ()

    @property
    def places(self) -> tuple[Place, ...]:
        """The places of all formats."""
        return (*self.archives, *self.parquet, *self.delta)


def find_inputs(paths: Sequence[Place]) -> Inputs:
    """Separate archives, Parquet and Delta tables; a mixed place counts as archives.

    A place that is named twice, also through links, counts once. Raises `NotFoundError` and the
    errors of `failure_of`.
    """
    inputs: dict[str, list[Place]] = {"archives": [], "parquet": [], "delta": []}
    unique: dict[str, Place] = {}
    for path in paths:
        unique.setdefault(_real_path(path), path.absolute())
    for path in unique.values():
        with _raising_not_found(path):
            # A place with tables of topics and nothing else is read as its tables.
            for place in _tables_of_topics(path) or [path]:
                inputs[_format_of(place)].append(place)
    return Inputs(**{name: tuple(places) for name, places in inputs.items()})


def _tables_of_topics(place: Place) -> list[Place]:
    """Return the tables below a place, which it must contain alone. Raises ``OSError``.

    Raises `ConfigurationError` if there are other files, which would be read twice or not at all.
    """
    if not place.may_be_folder() or has_table(place) or not (tables := tables_below(place)):
        return []
    inside = {table.name for table in tables}
    entries, folders = place.children("")
    other = [entry.name for entry in entries if _is_data(entry)]
    other += [name for name in folders if name not in inside and not is_metadata(name)]
    if other:
        raise ConfigurationError(
            f"{place} has both tables ({min(inside)}) and other files ({min(other)})",
            hint="Give the tables, and the places of the other files.",
        )
    return tables


def _format_of(place: Place) -> str:
    """Return the field of `Inputs` for a place. Raises ``OSError``."""
    is_folder = place.may_be_folder()
    if is_folder and is_table(place):
        return "delta"
    listed = place.list() if is_folder else iter(())
    if (first := next(listed, None)) is not None:
        return "parquet" if _has_only_parquet(chain([first], listed)) else "archives"
    if is_folder and not _may_be_object(place):
        return "archives"
    beginning = place.read_range("", 0, len(PARQUET_MAGIC))
    return "parquet" if beginning == PARQUET_MAGIC else "archives"
