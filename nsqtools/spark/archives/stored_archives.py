"""The archives in an object store: finished files, each with its index beside it.

A listing brings names, sizes and versions of everything in a few requests. What is learned of a
file takes two more, of its index and of its beginning: they are made for many files at a time, and
once for each version. Files in progress stay on the disk of their archiver.
"""

from __future__ import annotations

from collections.abc import Iterable
from concurrent.futures import ThreadPoolExecutor
from pathlib import PurePosixPath

from nsqtools.archive.codecs import Codec, codec_of
from nsqtools.archive.layout import INDEX, Member, decode_index, split_head
from nsqtools.archive.reader import is_message
from nsqtools.archive.storage import Entry
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

    def __init__(self, place: StoredPlace, name: str, entry: Entry, has_index: bool) -> None:
        self.place = place
        self.entry = entry
        self.shown = str(place)
        self.name = name
        self.is_finished = True
        index = place.beside(f".{place.name}{INDEX}")
        text = index.storage.read(index.key) if has_index else b""
        self.head, self._lines = split_head(text)
        self.has_index = has_index
        members = self.members()
        self.first_ts = members[0].min_ts if members else 0
        self._beginning = place.storage.read_range(place.key, 0, LOOK_SIZE, entry.version)
        if codec_of(self._beginning) is Codec.ZSTD:
            size = LOOK_SIZE + ZSTD_BLOCK_SIZE
            self._beginning = place.storage.read_range(place.key, 0, size, entry.version)

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
                learned = list(threads.map(lambda each: self._learn(*each), wanted))
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

    def _learn(self, place: StoredPlace, name: str, entry: Entry, has_index: bool) -> StoredArchive:
        known = self._known.get(place)
        if known is not None and known.entry == entry and known.has_index == has_index:
            return known
        return StoredArchive(place, name, entry, has_index)


def _finished(place: StoredPlace) -> list[tuple[StoredPlace, str, Entry, bool]]:
    """Return each finished file at a place: where, its name below the place, and its index."""
    entries = {entry.name: entry for entry in place.below()}
    if not entries:
        try:
            entries = {"": place.entry()} if place.key else {}
        except FileNotFoundError:
            pass
    if not entries:
        raise NotFoundError(f"there is no archive in {place}")
    if "" in entries:  # the place is a file itself
        index = place.beside(f".{place.name}{INDEX}")
        has_index = any(entry.name == index.key for entry in place.storage.list(_folder(index.key)))
        return [(place, place.name, entries[""], has_index)]
    return [
        (place / name, name, entry, _index_name(name) in entries)
        for name, entry in entries.items()
        if not any(part.startswith(".") for part in PurePosixPath(name).parts)
    ]


def _folder(key: str) -> str:
    return key.rpartition("/")[0]


def _index_name(name: str) -> str:
    folder, slash, base = name.rpartition("/")
    return f"{folder}{slash}.{base}{INDEX}"


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
