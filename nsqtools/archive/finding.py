"""Find the files of archives, in directories and in object stores, each with its index.

Files in progress are listed before finished ones, in all places, because one that is finished in
between, into another place perhaps, would else be missed; of a file that is listed twice the
finished one counts. An object store has finished files only, and their indexes are read several at
a time, because each costs a round trip.

Trap: a listing is no snapshot. It may show a file and, from an earlier page, not yet its index. So
the index of what is listed is asked for by its name: it is there before its file is.

Tables are found, too: every Parquet file of a directory or a bucket; of a Delta table, and where
Spark's file sink keeps a log, those that the log names. A place of Parquet alone may have notes of
other programs, below ``_`` and ``.``.

A file without an index may be of bare bodies, in any form. It is refused where it is known to be
something else, which would be published as bodies.
"""

from __future__ import annotations

import errno
import json
import logging
import re
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from functools import cache, partial
from itertools import chain
from pathlib import Path, PurePosixPath
from typing import BinaryIO, TypeVar

from nsqtools.archive.delta import SINK_LOG, DeltaCatalog, Partition, TableFile, is_table
from nsqtools.archive.form import BEGINNING_SIZE, PARQUET_MAGIC, why_foreign
from nsqtools.archive.layout import (
    INDEX,
    MANIFEST,
    PART,
    Head,
    Index,
    Member,
    TimeRange,
    aside,
    decode_index,
    end_of,
    is_hidden,
    owner_of,
    partition_of,
    split_head,
)
from nsqtools.archive.place import (
    ChangedError,
    DeniedError,
    Entry,
    LocalPlace,
    Place,
    map_concurrently,
    translating_errors,
)
from nsqtools.archive.place_url import parse_place
from nsqtools.errors import ConfigurationError, NotFoundError, OutputError
from nsqtools.files.opening import NotRegularError, walk
from nsqtools.records.naming import EXTENSIONS

log = logging.getLogger("nsqtools")

Seen = TypeVar("Seen")


@dataclass(frozen=True, slots=True)
class ArchiveFile:
    """A file to read: where its bytes are, and its index if it has one.

    ``entry`` is what a listing said of a finished file: what is read must still be that.
    """

    storage: Place
    name: str
    members: list[Member] | None
    head: Head | None = None
    entry: Entry | None = None
    table: TableFile | None = None
    """Of Parquet: what a log or a manifest says of it."""
    problem: str = ""
    """Why nothing of it can be read, as of a directory without permission."""

    @classmethod
    def at(cls, path: Path, index: Index) -> ArchiveFile:
        """Return the file at a local path."""
        return cls(LocalPlace(path.parent), path.name, index.members, index.head)

    @property
    def shown(self) -> str:
        """Its path or URL."""
        return str(self.storage / self.name)

    @property
    def path(self) -> Path:
        """Its path. Raises `ConfigurationError` for one in an object store."""
        return (self.storage / self.name).path

    @property
    def is_remote(self) -> bool:
        return self.storage.is_remote

    @property
    def is_in_progress(self) -> bool:
        return is_hidden(PurePosixPath(self.name).name, PART)

    @property
    def begin(self) -> tuple[Head, Member] | None:
        """What it shares with no other file; of two machines of one image some have one head."""
        return (self.head, self.members[0]) if self.head and self.members else None

    @property
    def messages(self) -> int | None:
        """How many messages it has, if its index or its table says so."""
        if self.table is not None:
            return self.table.rows
        return None if self.members is None else sum(m.messages for m in self.members)

    @property
    def begins_ns(self) -> int | None:
        """The lowest time of its messages, if that is known; 0 where they have none."""
        if self.table is not None:
            return self.table.min_ts_ns
        if self.members and self.members[0].max_ts:
            return min(member.min_ts for member in self.members)
        return None

    def may_have(self, within: TimeRange) -> bool:
        """Return whether some message of a range may be in it, by what is known of it."""
        if self.table is not None:
            least, most = self.table.min_ts_ns, self.table.max_ts_ns
            return least is None or most is None or within.meets(least, most)
        if self.members is None:
            return True
        # what is behind its index is read too
        has_more = self.entry is not None and self.entry.size > end_of(self.members)
        return has_more or any(map(within.may_have, self.members))

    def open(self) -> BinaryIO:
        """Open it for reading: one in progress under its final name if it was finished meanwhile.

        Raises `ChangedError` if it is another one than was listed, `NotRegularError` if it has a
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
        """Return its size now, in bytes. Raises ``OSError``."""
        return self.storage.stat(self.name).size


Wanted = Callable[[Partition], bool]
"""Says whether a file in a partition has to be looked at."""


def all_of(_: Partition) -> bool:
    """Want every file."""
    return True


def of_each(look: Callable[[ArchiveFile], Seen], found: Sequence[ArchiveFile]) -> Iterator[Seen]:
    """Look at files, at many in a store at a time."""
    return map_concurrently(look, found, is_remote=any(archive.is_remote for archive in found))


@contextmanager
def _looking_at(place: object) -> Iterator[None]:
    """Raise `NotFoundError` for what is not there, and else as `failure_of` says."""
    with translating_errors("read", place):
        try:
            yield
        except FileNotFoundError as exc:
            raise NotFoundError(f"there is no {exc.filename or place}") from None


def find_archives(places: Sequence[Path | str], wanted: Wanted = all_of) -> list[ArchiveFile]:
    """Return the files at paths and URLs; of a directory all below it, those in progress last.

    Of tables there are those in ``wanted`` partitions.
    Raises `NotFoundError` for a place that is not there, `ConfigurationError` for a file of another
    program, and as `failure_of` says.
    """
    found: dict[str, ArchiveFile] = {}
    for place, in_progress in [(str(place), _in_progress(str(place))) for place in places]:
        with _looking_at(place):
            for archive in _find(place, in_progress, wanted):
                found.setdefault(archive.shown, archive)
    archives = list(found.values())
    finished = {each.begin for each in archives if not each.is_in_progress} - {None}
    return [each for each in archives if not (each.is_in_progress and each.begin in finished)]


def _in_progress(place: str) -> list[Entry]:
    """Return the files in progress of a directory. Raises as `find_archives`."""
    storage, found = parse_place(place), list[Entry]()
    if not storage.is_remote:
        for folder, names in walk(storage.path):
            for path in (folder / name for name in names if is_hidden(name, PART)):
                with _looking_at(place), suppress(FileNotFoundError):  # finished in this moment
                    found.append(storage.stat(path.relative_to(storage.path).as_posix()))
    return list(filter(_is_in_progress, found))


def _find(place: str, in_progress: Sequence[Entry], wanted: Wanted) -> list[ArchiveFile]:
    storage = parse_place(place)
    root, in_table = files_in_table(place, wanted)
    if in_table is not None:
        return in_table
    if not storage.may_be_folder():
        return [_named(storage)]
    unreadable, listed = list[ArchiveFile](), list[Entry]()
    for entry, error in storage.list_readable():
        if error is None:
            listed.append(entry)
        elif is_shown(entry.name):
            reason = f"cannot be read ({error.strerror})"
            unreadable.append(ArchiveFile(storage, entry.name, None, problem=reason))
    listed.sort(key=_order)
    if not listed and _may_be_object(storage):
        return [_named(storage)]
    if _is_of_parquet(listed):
        return files_in_folder(root, storage, listed, wanted)
    names = {entry.name for entry in listed}
    files = [*(entry for entry in listed if is_shown(entry.name)), *in_progress]
    indexed = partial(_with_index, storage, names=names)
    return [*map_concurrently(indexed, files, is_remote=storage.is_remote), *unreadable]


def _may_be_object(place: Place) -> bool:
    """Return whether a place without objects below it may be an object: a bucket is none."""
    return place.is_remote and bool(place.name)


def _named(place: Place) -> ArchiveFile:
    return _with_index(place.parent, place.parent.stat(place.name), is_named=True)


def _is_in_progress(entry: Entry) -> bool:
    """Whether it is a file in progress, and not of a table's log: its messages come as rows."""
    folder, _, name = entry.name.rpartition("/")
    return is_hidden(name, PART) and is_shown(folder)


def _order(entry: Entry) -> list[tuple[bool, str]]:
    """As a directory is walked: the files of a folder, then its folders."""
    *folders, name = entry.name.split("/")
    return [*((True, folder) for folder in folders), (False, name)]


def is_shown(name: str) -> bool:
    """Whether neither a file nor a folder above it is hidden."""
    return not any(part.startswith(".") for part in name.split("/"))


def _with_index(
    storage: Place, entry: Entry, names: Collection[str] = (), *, is_named: bool = False
) -> ArchiveFile:
    """Return a file with its index, if it has one: among the listed ``names``, or since.

    Raises `ConfigurationError` for a file of another program, and ``OSError``.
    """
    is_in_progress = is_hidden(entry.name.rpartition("/")[2], PART)
    known = None if is_in_progress else entry
    name = str(owner_of(PurePosixPath(entry.name))) if is_in_progress else entry.name
    index = aside(name, INDEX)
    if (data := read_index(storage, index, is_listed=index in names)) is not None:
        return ArchiveFile(storage, entry.name, decode_index(data), split_head(data)[0], known)
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
    return ArchiveFile(storage, entry.name, None, entry=known, table=table)


def read_index(storage: Place, name: str, *, is_listed: bool) -> bytes | None:
    """Return what an index holds, None where there is none. Raises ``OSError``."""
    try:
        return storage.read(name)
    except FileNotFoundError:
        return None
    except DeniedError:  # S3 says so of what is not there to who may not list the whole bucket
        if is_listed:
            raise
        return None
    except (NotRegularError, PermissionError) as exc:  # on a disk: as one that is cut off
        log.warning("cannot read %s (%s)", exc.filename, exc.strerror)
        return b""


def _parquet(storage: Place, entry: Entry, names: Collection[str]) -> TableFile:
    """Return what its manifest says of a file, and its folders. Raises ``OSError``."""
    manifest = aside(entry.name, MANIFEST)
    said: dict[str, int] = {}
    if not names or manifest in names:
        with suppress(FileNotFoundError, DeniedError, ValueError):
            said = json.loads(storage.read(manifest))
    rows, least, most = (said.get(key) for key in ("messages", "min_ts", "max_ts"))
    above = partition_of(str(storage / entry.name))  # a place may lead into partitions
    at = {key: above[key] for key in ("topic", "date") if key in above} | partition_of(entry.name)
    return TableFile(entry.name, entry.size, rows, least, most, at)


def _beginning(storage: Place, entry: Entry) -> bytes:
    """Return the first bytes of a file, none of what reading it will report."""
    with suppress(FileNotFoundError, ChangedError, NotRegularError, PermissionError):
        return storage.read_range(entry.name, 0, BEGINNING_SIZE) if entry.size else b""
    return b""


# -- the files of tables ------------------------------------------------------------------------

SINK_LOG_VERSION = "v1"
_BATCH = re.compile(r"\d+(\.compact)?")


def _is_of_others(name: str) -> bool:
    """Whether a name is none of data: tables of all programs keep theirs below ``_`` and ``.``."""
    return any(part[:1] in "._" for part in name.split("/"))


def files_in_folder(
    root: Place, storage: Place, listed: Sequence[Entry], wanted: Wanted
) -> list[ArchiveFile]:
    """Return the files that count of a place of Parquet, in order.

    The ``root`` is above its partitions. Raises `OutputError` and ``OSError``.
    """
    names = {entry.name for entry in listed}
    found = _parquet_entries(root, listed, wanted)
    tables = map_concurrently(
        partial(_parquet, storage, names=names), found, is_remote=storage.is_remote
    )
    return [
        ArchiveFile(storage, entry.name, None, entry=entry, table=table)
        for entry, table in zip(found, tables, strict=True)
    ]


def _has_log(place: Place, is_given: bool) -> bool:
    if not place.may_be_folder():
        return False
    try:
        return is_table(place)
    except DeniedError:  # who may list the given folder only
        if is_given:
            raise
        return False


def _is_file(place: Place) -> bool:
    """Whether a place that is called like a file is one: Spark's folders may be, too."""
    if not place.is_remote:
        return not place.may_be_folder()
    with suppress(DeniedError):  # to who may read the file alone
        return next(place.list(), None) is None
    return True


def _all_in(url: str) -> list[TableFile]:
    return DeltaCatalog(url).files()


def files_in_table(
    place: str,
    wanted: Wanted = all_of,
    has_log: Callable[[Place, bool], bool] = _has_log,
    all_in: Callable[[str], list[TableFile]] = _all_in,
) -> tuple[Place, list[ArchiveFile] | None]:
    """Return the place above the partitions that a place leads into; of a lone file its folder.

    If that is a Delta table, whatever the folders that it lies in are called, then also the files
    that count in it of the place, else None. Raises `NsqError` and ``OSError``.
    """
    at = parse_place(place).absolute()
    folder = at.parent if at.name.endswith(".parquet") and _is_file(at) else at
    above: list[Place] = [folder, *folder.parents]
    ends = [number for number, each in enumerate(above) if "=" in each.name]
    nearest = above[: ends[-1] + 2 if ends else 1]
    root = next((each for each in nearest if has_log(each, each == at)), None)
    if root is None:
        return nearest[-1], None
    inside = "" if root == at else str(at)[len(str(root)) + 1 :]
    if inside and _is_of_others(inside):  # logs that have not landed yet
        return root, None
    storage = parse_place(str(root) if inside else place)
    if not inside:
        files = DeltaCatalog(storage.url).files(wanted=wanted)
    else:
        files = [e for e in all_in(storage.url) if f"{e.path}/".startswith(f"{inside}/")]
        if not files and inside.endswith(".parquet"):
            raise ConfigurationError(
                f"{place} does not count in the Delta table {root}",
                hint="Give the table; --topic takes a part of it.",
            )
        files = [each for each in files if wanted(each.partition)]
    files.sort(key=lambda each: each.path)
    return root, [ArchiveFile(storage, each.path, None, table=each) for each in files]


def _parquet_entries(root: Place, listed: Iterable[Entry], wanted: Wanted) -> list[Entry]:
    """Return the ``wanted`` Parquet files that count, of a listing, in order.

    Where Spark's file sink has a log, at the ``root``, they are those that it names. Raises
    ``OSError`` and `OutputError`.
    """
    counting = committed(root)
    return [
        entry
        for entry in sorted(listed, key=lambda each: each.name)
        if entry.name.endswith(".parquet")
        and not _is_of_others(entry.name)
        and (counting is None or entry.name.rpartition("/")[2] in counting)
        and wanted(partition_of(entry.name))
    ]


_OF_ARCHIVES = (".log", ".jsonl", ".xz", ".bz2", *EXTENSIONS.values())


def _is_of_parquet(listed: Iterable[Entry]) -> bool:
    """Whether a place is one of Parquet: beside it only what is named as an archive is taken for
    one, and any other file may be a note of somebody's."""
    has_some = False
    for entry in listed:
        if _is_in_progress(entry):
            return False
        if entry.size and not _is_of_others(entry.name):
            if entry.name.endswith(_OF_ARCHIVES):
                return False
            has_some |= entry.name.endswith(".parquet")
    return has_some


def committed(output: Place) -> set[str] | None:
    """Return the names of the files that count; None where Spark's sink keeps no log.

    That of a file is made up by Spark, so that it is enough without its directory. Raises
    ``OSError``, and `OutputError`.
    """
    logs = [entry.name for entry in output.list(SINK_LOG)]
    if not logs:
        return None
    known: set[str] = set()
    for name in logs:
        if _BATCH.fullmatch(name.removeprefix(f"{SINK_LOG}/")):
            data = output.read(name)
            try:
                version, *lines = data.decode().splitlines()
                if version != SINK_LOG_VERSION:
                    raise ValueError(f"it is of version {version}")
                known |= {json.loads(line)["path"].rpartition("/")[2] for line in lines}
            except (ValueError, KeyError, TypeError) as exc:
                raise OutputError(f"cannot read {output / name} ({exc})") from exc
    return known


def table_files(places: Iterable[Place], wanted: Wanted = all_of) -> dict[Place, list[str]]:
    """Return the files that count of Parquet and Delta tables, by the root that they are below.

    A place may lead into partitions, or be a file. Raises `NsqError`.
    """
    found: dict[Place, list[str]] = {}
    has_log, all_in = cache(_has_log), cache(_all_in)  # of a thousand files of one table
    for place in (place.absolute() for place in places):
        with translating_errors("read", place):
            root, in_table = files_in_table(str(place), wanted, has_log, all_in)
            inside = "" if root == place else str(place)[len(str(root)) + 1 :]
            names = found.setdefault(root, [])
            if in_table is not None:
                names += [each.name for each in in_table]
            elif inside.endswith(".parquet"):
                names += [inside] if wanted(partition_of(inside)) else []
            else:
                listed = root.list(inside)
                names += [each.name for each in _parquet_entries(root, listed, wanted)]
    return {root: list(dict.fromkeys(names)) for root, names in found.items()}


# -- of what kind a place is --------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Inputs:
    """Where messages are. Made by `find_inputs`."""

    archives: tuple[Place, ...] = ()
    parquet: tuple[Place, ...] = ()
    delta: tuple[Place, ...] = ()

    @property
    def places(self) -> tuple[Place, ...]:
        """All of them."""
        return (*self.archives, *self.parquet, *self.delta)


def find_inputs(paths: Sequence[Place]) -> Inputs:
    """Separate archives from Parquet and Delta; a place of both is read as archives are.

    Raises `NotFoundError`, and as `failure_of` says.
    """
    found: dict[str, list[Place]] = {"archives": [], "parquet": [], "delta": []}
    for path in (path.absolute() for path in paths):
        with _looking_at(path):
            found[_kind(path)].append(path)
    return Inputs(**{kind: tuple(places) for kind, places in found.items()})


def _kind(place: Place) -> str:
    """Return of what kind a place is. Raises ``OSError``."""
    is_folder = place.may_be_folder()
    if is_folder and is_table(place):
        return "delta"
    listed = place.list() if is_folder else iter(())
    if (first := next(listed, None)) is not None:
        return "parquet" if _is_of_parquet(chain([first], listed)) else "archives"
    if is_folder and not _may_be_object(place):
        return "archives"
    beginning = place.read_range("", 0, len(PARQUET_MAGIC))
    return "parquet" if beginning == PARQUET_MAGIC else "archives"
