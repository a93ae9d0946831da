"""Which files of an archive there are now, and what kind of lines each holds.

A file is identified by its head (writer and number), wherever it is: it moves from ``.NAME.part``
to NAME, to another directory, maybe to another rev. A listing may therefore meet it twice or, if
only one place is looked at, not at all. So files in progress are listed first and finished ones
after them, and of two with one head one is taken. What a file holds is decided by its bytes, never
by its name.

What was learned is kept for the next listing, because a stream lists ten times a second. Of a file
in progress only the new lines of the index are read. A directory is read again when its
modification time has changed, or is so recent that another change could have the same one.

Who plans does not read members of files that cannot have what is asked for. A folder ``topic=x`` is
not entered for other topics. Then the commit record of a file decides, which has its times: locally
the total at the end of its index, in an object store its manifest. Only then is an index read.

In an object store are finished files, each with index and manifest beside it; files in progress
stay on the disk of their archiver. A listing brings names, sizes and versions in a few requests.
Manifests are read many at a time, once for each version; what many of them said is kept in a
`CATALOG` object of their topic's folder for the next reader, if this one may write there. It is a
cache: each of its lines counts for one version of one object, and who finds no line reads the
manifest.

Trap: a listing is no snapshot. Between its pages a file may be uploaded, index first, and be listed
while its index is not: the names of indexes come before those of data. By its name it would not be
the file any more that the next listing finds by its head. So whether there is an index is asked of
the index itself, after the listing; and a file that is deleted meanwhile is not listed.
"""

from __future__ import annotations

import errno
import json
import os
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import suppress
from pathlib import Path
from typing import BinaryIO, NamedTuple
from urllib.parse import unquote

from nsqtools.archive.finding import ArchiveFile, is_shown, read_index
from nsqtools.archive.form import ZSTD_BLOCK_SIZE, LineKind, form_of_text, text_of, why_foreign
from nsqtools.archive.layout import (
    EVER,
    INDEX,
    LONGEST_TOTAL,
    MANIFEST,
    PART,
    Head,
    Member,
    TimeRange,
    Total,
    aside,
    decode_index,
    decode_total,
    encode_members,
    end_of,
    index_of,
    is_hidden,
    owner_of,
    split_head,
)
from nsqtools.archive.members import codec_of
from nsqtools.archive.place import Entry, LocalPlace, Place, map_concurrently, translating_errors
from nsqtools.archive.reader import form_of
from nsqtools.errors import NotFoundError
from nsqtools.files.opening import (
    LOST,
    NotRegularError,
    open_to_read,
    status_of,
    warn_of_links,
)
from nsqtools.records.naming import Codec
from nsqtools.spark.archives.damage import ArchiveDamage
from nsqtools.spark.archives.read_settings import ReadSettings

SETTLED_NS = 2_000_000_000


def is_for(folder: str, topics: frozenset[str] | None) -> bool:
    """Whether a folder may hold messages of some topics (None: of any), by its name."""
    name, equals, value = folder.partition("=")
    return topics is None or name != "topic" or not equals or unquote(value) in topics


class Folder(NamedTuple):
    """What is in a directory, all in order. ``is_settled``: it can be relied on while ``state``,
    its device, number and time of change, is the same."""

    state: tuple[int, int, int]
    is_settled: bool
    folders: list[Path]
    in_progress: list[Path]
    finished: list[Path]


LOOK_SIZE = 1 << 12


class FileContent(NamedTuple):
    """The `FileForm` of a file and its compression.

    ``foreign`` may be what the system says as well.
    """

    kind: LineKind
    codec: Codec
    topic: str = ""
    foreign: str = ""


Key = Head | str
"""Identifies a file in an offset: its head, or without one its path below the archive."""

UNKNOWN = -1  # as a member's count of messages

OnDamage = Callable[[ArchiveDamage], None]


class Recorded(NamedTuple):
    """What an index, a manifest, or a line of a catalog says of a file as a whole.

    ``total`` is its commit record; None where only its members are known.
    """

    head: Head | None
    total: Total | None


class ListedFile:
    """A finished file, read as far as it is asked for. Methods raise ``OSError``.

    ``lines`` are those of its index, where they were read; without a ``record`` it has none.
    ``entry`` is what a store said of an object.
    """

    is_finished = True

    def __init__(
        self,
        place: Place,
        name: str,
        record: Recorded | None,
        lines: bytes | None = None,
        entry: Entry | None = None,
    ) -> None:
        self.place = place
        self.shown = str(place)
        """Its path once it is finished, as far as is known."""
        self.name = name or place.name
        """Its path below the listed directory, as it is or will be when finished."""
        self.entry = entry
        self.has_index = record is not None
        self.head, self.total = record or Recorded(None, None)
        self._lines = lines
        self.first_ts = self.total.min_ts if self.total else _first_ts(lines or b"")
        self._content: FileContent | None = None
        self._beginning = b""
        self._is_named = name in ("", str(place))
        self.stamp, self.is_settled = (0, 0), False  # as it was when it was last found

    @property
    def key(self) -> Key:
        return self.head or self.name

    def members(self) -> list[Member]:
        """Return the durable members, in order."""
        if not self.has_index:
            return []
        if self._lines is None:
            index = self.place.parent.read(aside(self.place.name, INDEX))
            self._lines = split_head(index)[1]
        return decode_index(self._lines)

    def forget_members(self) -> None:
        """Release the memory: the file was read."""
        self._lines = None

    def size(self) -> int:
        """Return how many bytes it has now."""
        return os.stat(str(self.place)).st_size if self.entry is None else self.entry.size

    def end(self) -> int:
        """Return how far it can be read: of a file in progress, to the last durable member."""
        return self.size()

    def readable(self) -> list[Member]:
        """Return all that can be read: the members, and of a finished file what follows them.

        That rest is a member with a count that is `UNKNOWN`; in a file without an index it is all.
        """
        members = self.members()
        end = end_of(members)
        if (size := self.size()) > end:
            return [*members, Member(end, size - end, UNKNOWN, 0, 0)]
        return members

    def has_none_within(self, within: TimeRange) -> bool:
        """Whether its commit record says that no message is in a range of time."""
        total = self.total
        if total is None or within == EVER or within.may_have(Member(0, 0, 0, *total[-2:])):
            return False
        return self.size() == total.end  # else something was added to it

    def amount(self, begin: int, end: int) -> tuple[int, int, int]:
        """Return messages and bytes between two positions, and about the time of the oldest."""
        if not begin and self.total is not None and self.total.end == end:
            return self.total.messages, end, self.total.min_ts
        members = [each for each in self.members() if begin <= each.offset and each.end <= end]
        oldest_ns = min((each.min_ts for each in members if each.min_ts), default=0)
        rows = sum(max(0, each.messages) for each in members)
        return rows, sum(each.length for each in members), oldest_ns

    def content(self) -> FileContent:
        """Return what kind of lines it holds. Raises `OutputError`."""
        if self._content is None or self._content.kind is LineKind.nothing:
            self._content = self._read_content()
        return self._content

    def _read_content(self) -> FileContent:
        try:
            data = self.beginning()
        except (NotRegularError, PermissionError) as exc:
            if self.entry is not None:  # in a store all are refused, not this one
                raise
            return FileContent(LineKind.nothing, Codec.NONE, foreign=exc.strerror or str(exc))
        codec = codec_of(data)
        name = "" if self._is_named or not self.is_finished else self.name
        if not self.has_index and (foreign := why_foreign(name, data)).reason:
            return FileContent(LineKind.bodies, codec, foreign=str(foreign))
        text = text_of(data)
        form = form_of_text(text)
        if form.kind is not LineKind.messages:
            members = self.members() if self.has_index else None
            archive, problems = (
                ArchiveFile(self.place.parent, self.place.name, members, self.head),
                list[str](),
            )
            form = form_of(archive, lambda path, problem: problems.append(problem))
            # A file with text is not empty: zero bytes alone are damage, which reading reports.
            if form.kind is LineKind.nothing and (problems or text):
                is_bare = problems and not members
                form = form._replace(kind=LineKind.bodies if is_bare else LineKind.messages)
        return FileContent(form.kind, codec, form.topic, form.foreign)

    def beginning(self) -> bytes:
        """Return the first bytes."""
        if not self._beginning or not self.is_finished:  # it may have been empty
            version = self.entry.version if self.entry else ""
            data = self.place.read_range("", 0, LOOK_SIZE, version)
            if codec_of(data) is Codec.ZSTD:
                data = self.place.read_range("", 0, LOOK_SIZE + ZSTD_BLOCK_SIZE, version)
            self._beginning = data
        return self._beginning


class GrowingFile(ListedFile):
    """A file in progress: it has what its index names, of which only new lines are read."""

    is_finished = False

    def __init__(self, path: Path, name: str, shown: str) -> None:
        self._index = index_of(owner_of(path))
        record, lines = _look_at_index(self._index)
        super().__init__(LocalPlace(path), name, record and record._replace(total=None), lines)
        self.shown = shown
        self._index_read = 0
        self._members: list[Member] = []

    def members(self) -> list[Member]:
        """Return the durable members, in order. The list is the file's own, and grows."""
        if not self.has_index:
            return []
        with open_to_read(self._index) as file:
            if split_head(file.readline(100))[0] != self.head:
                raise FileNotFoundError(errno.ENOENT, "it has moved", str(self.place))
            if not self._read_on(file):  # lines were taken back after a failed flush
                self.forget_members()
                self._read_on(file)
        return self._members

    def _read_on(self, file: BinaryIO) -> bool:
        """Read the new lines; return whether they continue those before."""
        begin = self._index_read or (len(self.head.encode()) if self.head else 0)
        if file.seek(0, os.SEEK_END) < begin:
            return False
        file.seek(begin)
        lines = file.read()
        found = decode_index(lines, end_of(self._members))
        self._members += found
        self._index_read = begin + len(encode_members(found))
        return bool(found) or b"\n" not in lines

    def forget_members(self) -> None:
        self._members, self._index_read = [], 0

    def end(self) -> int:
        return end_of(self.members())

    def readable(self) -> list[Member]:
        return self.members()


def _first_ts(lines: bytes) -> int:
    """Return the time of the first member in lines of an index, 0 if it is not known."""
    first = decode_index(lines[: lines.find(b"\n") + 1])
    return first[0].min_ts if first else 0


def _look_at_index(path: Path) -> tuple[Recorded | None, bytes | None]:
    """Return what an index says of its file, and its lines unless they are many."""
    try:
        with open_to_read(path) as file:
            text = file.read(LOOK_SIZE)
            if len(text) == LOOK_SIZE:
                file.seek(-LONGEST_TOTAL, os.SEEK_END)
                if total := decode_total(file.read()):
                    return Recorded(split_head(text)[0], total), None
                file.seek(len(text))
                text += file.read()
    except (FileNotFoundError, NotRegularError, PermissionError):
        return None, None
    return _parsed_index(text)


def _parsed_index(text: bytes) -> tuple[Recorded, bytes]:
    head, lines = split_head(text)
    return Recorded(head, decode_total(text)), lines


class Listing:
    """Lists the archives in directories, and the files in progress that are elsewhere.

    It remembers the directories and the files that it has seen.
    """

    def __init__(self, settings: ReadSettings) -> None:
        self._settings = settings
        self._topics = settings.wanted_topics
        self._folders: dict[Path, Folder] = {}
        self._known: dict[Path, ListedFile] = {}

    def files(self, on_damage: OnDamage) -> dict[Key, ListedFile]:
        """Return the files there are, in order of their names.

        Raises `NotFoundError` for a place that is not there, `OutputError` for one that cannot be
        read. Directories below that cannot be listed are reported.
        """
        roots = self._settings.roots()
        works = [*roots, *filter(None, [self._settings.work_dir])]
        before, self._folders = self._folders, {}  # those that are gone are forgotten
        given = {*map(Path, self._settings.paths), self._settings.work_dir}
        for root in works:
            if root in given and not root.exists():  # not what a pattern matched a moment ago
                raise NotFoundError(f"there is no {root}")
        with translating_errors("read", ""):
            in_progress = [
                _Found(root, path, is_settled=False)
                for root in works
                for folder in self._walk(root, before, on_damage)
                for path in folder.in_progress
            ]
            finished = [
                _Found(root, path, folder.is_settled)
                for root in roots
                for folder in self._walk(root, before, on_damage)
                for path in folder.finished
            ]
            files = self._unite((*finished, *in_progress), on_damage)
        return dict(sorted(files.items(), key=lambda item: item[1].name))

    def _walk(
        self, root: Path, before: Mapping[Path, Folder], on_damage: OnDamage
    ) -> Iterator[Folder]:
        """Iterate over a directory and those below that are not hidden, each once. Or over a single
        file."""
        if not root.is_dir():
            is_part = is_hidden(root.name, PART)
            found = ([root], []) if is_part else ([], [root])
            yield Folder((0, 0, 0), False, [], *found)
            return
        seen: set[tuple[int, int]] = set()
        waiting = [root]
        while waiting:
            path = waiting.pop()
            try:
                folder = self._folders[path] = self._folder(path, before)
            except FileNotFoundError:
                continue
            except OSError as exc:
                problem = f"cannot be listed ({exc.strerror or exc})"
                on_damage(ArchiveDamage(str(path), 0, problem))
                continue
            if folder.state[:2] not in seen:
                seen.add(folder.state[:2])
                wanted = [each for each in folder.folders if is_for(each.name, self._topics)]
                waiting += wanted[::-1]
                yield folder

    def _folder(self, path: Path, before: Mapping[Path, Folder]) -> Folder:
        now_ns = time.time_ns()
        status = path.stat()
        state = (status.st_dev, status.st_ino, status.st_mtime_ns)
        known = self._folders.get(path) or before.get(path)
        if known is not None and known.is_settled and known.state == state:
            return known
        folder = Folder(state, now_ns - status.st_mtime_ns > SETTLED_NS, [], [], [])
        links: list[str] = []
        with os.scandir(path) as entries:
            for entry in sorted(entries, key=lambda entry: entry.name):
                kind = folder.finished
                if entry.is_symlink():
                    links.append(entry.name)
                    continue
                if is_hidden(entry.name, PART):
                    kind = folder.in_progress
                elif entry.name.startswith(".") or entry.name == LOST:
                    continue
                elif entry.is_dir():
                    kind = folder.folders
                kind.append(path / entry.name)
        warn_of_links(path, links)
        return folder

    def _unite(self, found: Iterable[_Found], on_damage: OnDamage) -> dict[Key, ListedFile]:
        files: dict[Key, ListedFile] = {}
        known, self._known = self._known, {}
        for each in found:
            if each.path in self._known:  # by way of another root
                continue
            with suppress(FileNotFoundError):  # it was finished or removed meanwhile
                _add(files, self._learn(known.get(each.path), each), on_damage)
        return files

    def _learn(self, file: ListedFile | None, found: _Found) -> ListedFile:
        path = found.path
        if file is None or not (found.is_settled and file.is_settled):
            stat = status_of(path)
            is_growing = is_hidden(path.name, PART)
            stamp = (stat.st_ino, 0 if is_growing else stat.st_mtime_ns)
            # one in progress moves when it is finished, and another one may have its number then
            is_other = is_growing and file and head_at(index_of(owner_of(path))) != file.head
            if file is None or file.stamp != stamp or is_other:
                name = str(path) if path == found.root else str(path.relative_to(found.root))
                if is_growing:
                    name = str(owner_of(Path(name)))
                    file = GrowingFile(path, name, self._shown(path, name))
                else:
                    file = ListedFile(LocalPlace(path), name, *_look_at_index(index_of(path)))
            file.stamp, file.is_settled = stamp, found.is_settled
        self._known[path] = file
        return file

    def _shown(self, path: Path, name: str) -> str:
        roots, work_dir = list(filter(Path.is_dir, self._settings.roots())), self._settings.work_dir
        if work_dir is not None and path.is_relative_to(work_dir) and len(roots) == 1:
            return str(roots[0] / name)
        return str(owner_of(path))


class _Found(NamedTuple):
    """A path below a root, and whether its name is the same file's as when it was last found."""

    root: Path
    path: Path
    is_settled: bool


def head_at(index: Path) -> Head | None:
    """Read the head of an index. Raises ``OSError``."""
    with open_to_read(index) as file:
        return split_head(file.readline(100))[0]


def _add(files: dict[Key, ListedFile], file: ListedFile, on_damage: OnDamage) -> None:
    """Add a file; of two with one identity, as of one that is being moved, keep the one that holds
    the other. Raises ``OSError``."""
    other = files.setdefault(file.key, file)
    if other is file:
        return
    shorter, longer = sorted((other, file), key=lambda each: (len(each.members()), each is other))
    members = shorter.members()
    if shorter.has_index and longer.members()[: len(members)] == members:
        files[file.key] = longer
    else:
        problem = f"not read: {other.place} has the same identity and other data"
        on_damage(ArchiveDamage(str(file.place), 0, problem))


CATALOG = ".nsq-catalog"
LEAST_NEW = 16
"""This many manifests that no catalog had are worth an object that has them."""


class StoredListing:
    """Lists the archives at some places of object stores; remembers what it has seen.

    What its record says is out of a range is not kept: there may be a million files.
    """

    def __init__(self, settings: ReadSettings, within: TimeRange = EVER) -> None:
        self._within = within
        self._places = settings.stored()
        self._topics = settings.wanted_topics
        self._known: dict[Place, ListedFile] = {}

    def files(self, on_damage: OnDamage) -> dict[Key, ListedFile]:
        """Return the files there are, in order of their names.

        Raises `NotFoundError` for a place, but not a bucket, with nothing below it, and
        `OutputError`.
        """
        found: dict[Key, ListedFile] = {}
        learned: list[ListedFile] = []
        with translating_errors("read", ""):
            for place in self._places:
                for folder, entries in self._folders(place):
                    files = self._learn(place, folder, entries)
                    learned += (each for each in files if not each.has_none_within(self._within))
        self._known = {file.place: file for file in learned}
        for file in sorted(learned, key=lambda each: each.name):
            _add(found, file, on_damage)
        return found

    def _folders(self, place: Place) -> Iterator[tuple[str, dict[str, Entry]]]:
        """Iterate over the folders of topics at a place, and all else as one: names are whole."""
        direct, folders = place.children()
        if place.name and not direct and not folders:
            try:
                direct = [place.stat()._replace(name="")]
            except FileNotFoundError:
                raise NotFoundError(f"there is no archive in {place}") from None
        rest = {entry.name: entry for entry in direct}
        for folder in folders:
            if folder.startswith(".") or not is_for(folder, self._topics):
                continue
            below = {entry.name: entry for entry in place.list(folder)}
            if folder.startswith("topic="):
                yield f"{folder}/", below
            else:
                rest |= below
        yield "", rest

    def _learn(self, place: Place, folder: str, entries: Mapping[str, Entry]) -> list[ListedFile]:
        wanted = list(filter(is_shown, entries))
        known = {
            name: file
            for name in wanted
            if (file := self._known.get(place / name))
            and file.entry == entries[name]
            and (file.has_index or aside(name, INDEX) not in entries)
        }
        new = [name for name in wanted if name not in known]
        catalog = place / f"{folder}{CATALOG}"
        has_catalog = len(new) >= LEAST_NEW and f"{folder}{CATALOG}" in entries
        noted = _read_catalog(catalog, folder, entries) if has_catalog else {}

        def learn(name: str) -> ListedFile | None:
            entry, at = entries[name], place / name
            record, lines = noted.get(name), None
            try:
                if record is None and aside(name, MANIFEST) in entries:
                    record = _read_manifest(at, entry)
                if record is None:
                    is_listed = aside(name, INDEX) in entries
                    index = read_index(at.parent, aside(at.name, INDEX), is_listed=is_listed)
                    if index is not None:
                        record, lines = _parsed_index(index)
                file = ListedFile(at, name, record, lines, entry)
                if lines is not None or record is None:
                    file.beginning()  # of what is listed and deleted nothing is known
                return file
            except FileNotFoundError:
                return None

        asked = [name for name in new if name not in noted]
        found = known | {name: learn(name) for name in new if name in noted}
        found |= zip(asked, map_concurrently(learn, asked), strict=True)
        files = [file for name in wanted if (file := found[name]) is not None]
        told = [each for name in asked if (each := found[name]) and each.total]
        if len(told) >= LEAST_NEW:
            _write_catalog(catalog, folder, files)
        return files


def _read_manifest(place: Place, entry: Entry) -> Recorded | None:
    """Return what a file's manifest says; None when it is of another file. Raises ``OSError``."""
    try:
        document = json.loads(place.parent.read(aside(place.name, MANIFEST)))
        if document["size"] != entry.size:
            return None
        writer, times = document["writer"], (document["min_ts"] or 0, document["max_ts"] or 0)
        head = Head(writer, int(document["number"])) if writer else None
        total = Total(0, int(document["messages"]), entry.size, *times)
        return Recorded(head, total)
    except (ValueError, KeyError, TypeError):
        return None


def _read_catalog(place: Place, folder: str, entries: Mapping[str, Entry]) -> dict[str, Recorded]:
    """Return what a catalog says of the listed objects; nothing for one that is not whole."""
    try:
        rows = [json.loads(line) for line in place.read().splitlines()]
        return {
            f"{folder}{name}": Recorded(Head(*head) if head else None, Total(*total))
            for name, version, head, total in rows
            if (entry := entries.get(f"{folder}{name}")) and entry.version == version
        }
    except (OSError, ValueError, TypeError):
        return {}


def _write_catalog(place: Place, folder: str, files: Iterable[ListedFile]) -> None:
    lines = [
        json.dumps([each.name.removeprefix(folder), each.entry.version, each.head, each.total])
        for each in files
        if each.entry is not None and each.total is not None
    ]
    with suppress(OSError):  # this reader may not write there
        place.parent.put(place.name, "\n".join(lines).encode())


class ArchiveListing:
    """Lists the archives that are to be read, for a stream or for one range.

    Of a file that is in a directory and in a bucket that in the directory counts.
    """

    def __init__(self, settings: ReadSettings, within: TimeRange = EVER) -> None:
        self._listings = Listing(settings), StoredListing(settings, within)

    def files(self, on_damage: OnDamage) -> dict[Key, ListedFile]:
        found: dict[Key, ListedFile] = {}
        for listing in self._listings:
            found = listing.files(on_damage) | found
        return found
