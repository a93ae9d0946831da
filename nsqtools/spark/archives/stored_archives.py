"""The archives in an object store: finished files, each with its index beside it.

A listing brings names, sizes and versions of everything in a few requests. What is learned of a
file takes two more, of its index and of its beginning: they are made for many files at a time, and
once for each version. Files in progress stay on the disk of their archiver.

Trap: a listing is no snapshot. Between its pages a file may be uploaded, index first, and be listed
while its index is not: the names of indexes come before those of data. By its name it would not be
the file any more that the next listing finds by its head. So whether there is an index is asked of
the index itself, after the listing; and a file that is deleted meanwhile is not listed.
"""

from __future__ import annotations

from collections.abc import Iterable
from concurrent.futures import ThreadPoolExecutor
from pathlib import PurePosixPath

from nsqtools.archive.codecs import Codec, codec_of
from nsqtools.archive.finding import why_foreign
from nsqtools.archive.layout import INDEX, Member, decode_index, split_head
from nsqtools.archive.reader import is_message
from nsqtools.archive.storage import DeniedError, Entry
from nsqtools.errors import NotFoundError, OutputError
from nsqtools.spark.archives.archive_files import (
    LOOK_SIZE,
    ZSTD_BLOCK_SIZE,
    FileContent,
    Key,
    LineKind,
    ListedFile,
    Listing,
    OnDamage,
    beginning_of,
    message_content,
)
from nsqtools.spark.archives.damage import ArchiveDamage
from nsqtools.spark.archives.read_settings import ReadSettings
from nsqtools.spark.location import StoredPlace

AT_A_TIME = 32


class StoredArchive(ListedFile):
    """A finished file in an object store, with all of its index and its first bytes."""

    def __init__(
        self, place: StoredPlace, name: str, entry: Entry, *, is_indexed: bool, is_named: bool
    ) -> None:
        self.place = place
        self.entry = entry
        self.shown = str(place)
        self.name = name
        self.is_finished = True
        index = _read_index(place, is_indexed=is_indexed)
        self.has_index = index is not None
        self.head, self._lines = split_head(index or b"")
        members = self.members()
        self.first_ts = members[0].min_ts if members else 0
        self._beginning = place.storage.read_range(place.key, 0, LOOK_SIZE, entry.version)
        if codec_of(self._beginning) is Codec.ZSTD:
            size = LOOK_SIZE + ZSTD_BLOCK_SIZE
            self._beginning = place.storage.read_range(place.key, 0, size, entry.version)
        self._foreign = ""
        if not self.has_index:
            self._foreign = why_foreign("" if is_named else name, self._beginning)

    @property
    def location(self) -> str:
        return str(self.place)

    def is_current(self) -> bool:
        return True

    def members(self) -> list[Member]:
        return decode_index(self._lines)

    def forget_members(self) -> None:
        """Its index lines are all that is kept."""

    def size(self) -> int:
        return self.entry.size

    def content(self, delimiter: bytes) -> FileContent:
        codec, text = beginning_of(self._beginning)
        if self._foreign:
            return FileContent(LineKind.bodies, codec, foreign=self._foreign)
        if found := message_content(text, codec):
            return found
        if not text:
            kind = LineKind.messages if self.members() else LineKind.nothing
        else:
            first = text.partition(delimiter)[0]
            kind = LineKind.messages if is_message(first) else LineKind.bodies
        return FileContent(kind, codec)


class StoredListing:
    """Lists the archives at some places of object stores; remembers what it has seen."""

    def __init__(self, places: Iterable[StoredPlace]) -> None:
        self._places = list(places)
        self._known: dict[StoredPlace, StoredArchive] = {}

    def files(self, on_damage: OnDamage) -> dict[Key, ListedFile]:
        """Return the files there are, in order of their names.

        Raises `NotFoundError` for a place with nothing below it, and `OutputError`.
        """
        found: dict[Key, ListedFile] = {}
        try:
            with ThreadPoolExecutor(AT_A_TIME, "archive-index") as threads:
                wanted = [each for place in self._places for each in _finished(place)]
                learned = list(filter(None, threads.map(lambda each: self._learn(*each), wanted)))
        except OSError as exc:
            raise OutputError(f"cannot read {exc.filename} ({exc.strerror})") from exc
        self._known = {file.place: file for file in learned}
        for file in sorted(learned, key=lambda each: each.name):
            if (other := found.setdefault(file.key, file)) is file:
                continue
            if other.members() != file.members():
                problem = f"not read: {other.location} has the same identity and other data"
                on_damage(ArchiveDamage(file.location, 0, problem))
        return found

    def _learn(
        self, place: StoredPlace, name: str, entry: Entry, is_indexed: bool
    ) -> StoredArchive | None:
        known = self._known.get(place)
        if known is not None and known.entry == entry and (known.has_index or not is_indexed):
            return known
        is_named = place in self._places
        try:
            return StoredArchive(place, name, entry, is_indexed=is_indexed, is_named=is_named)
        except FileNotFoundError:
            return None


def _finished(place: StoredPlace) -> list[tuple[StoredPlace, str, Entry, bool]]:
    """Return each finished file at a place: where, its name below the place, and whether an index
    is listed."""
    entries = {entry.name: entry for entry in place.below()}
    if not entries:
        try:
            entries = {"": place.entry()} if place.key else {}
        except FileNotFoundError:
            pass
    if not entries:
        raise NotFoundError(f"there is no archive in {place}")
    if "" in entries:  # the place is a file itself
        return [(place, place.name, entries[""], False)]
    return [
        (place / name, name, entry, _index_name(name) in entries)
        for name, entry in entries.items()
        if not any(part.startswith(".") for part in PurePosixPath(name).parts)
    ]


def _index_name(name: str) -> str:
    folder, slash, base = name.rpartition("/")
    return f"{folder}{slash}.{base}{INDEX}"


def _read_index(place: StoredPlace, *, is_indexed: bool) -> bytes | None:
    """Return the index of a file; None without one. Raises ``OSError``."""
    try:
        return place.storage.read(place.beside(f".{place.name}{INDEX}").key)
    except FileNotFoundError:
        return None
    except DeniedError:  # S3 says so of what is not there to who may not list the whole bucket
        if is_indexed:
            raise
        return None


class UnitedListing:
    """The files of several listings."""

    def __init__(self, listings: list[Listing | StoredListing]) -> None:
        self._listings = listings

    def files(self, on_damage: OnDamage) -> dict[Key, ListedFile]:
        """Return the files of all, those of the first listing where two have one."""
        found: dict[Key, ListedFile] = {}
        for listing in self._listings:
            found = {**listing.files(on_damage), **found}
        return found


def listing_of(settings: ReadSettings) -> Listing | StoredListing | UnitedListing:
    """Return what lists the archives that are to be read."""
    stored = settings.stored()
    if not stored:
        return Listing(settings.roots, settings.work_dir)
    if len(stored) == len(settings.paths):
        return StoredListing(stored)
    return UnitedListing([Listing(settings.roots, settings.work_dir), StoredListing(stored)])
