"""List the files of an archive, and detect the kind of lines in each.

A file is identified by its head (writer and number), independent of its place: it moves from
``.NAME.part`` to NAME, to another directory, and possibly to another rev. A listing may therefore
contain it twice or, in only one of the places, not at all. So files in progress are listed before
finished ones, and only one of two files with the same head is kept. The kind of a file is decided
by its bytes, never by its name.

A stream lists ten times a second, so results are kept for the next listing. Only new lines are read
from the index of a file in progress. A directory is read again if its modification time has
changed, or is so recent that a later change could have the same time.

Planning reads no members of files that cannot contain selected messages. A folder ``topic=x`` is
skipped for other topics. Next, the commit record of a file has its range of times: for local files
the total at the end of the index, in an object store the manifest. Only then is an index read.

An object store has finished files, each with an index and a manifest; files in progress stay on the
disk of their archiver. A listing returns names, sizes and versions in a few requests. Manifests are
read concurrently, once for each version. If this process may write there, their content is stored
in a `CATALOG` object in the folder of the topic for the next reader. The catalog is a cache: a line
is valid for one version of one object, and without a line the manifest is read.

Trap: a listing is no snapshot. Between two pages a file may be uploaded, index first, and be listed
without its index, because names of indexes sort before those of data. The file would be identified
by its name, and by its head in the next listing. So the index itself is requested after the
listing, and a file that was deleted in the meantime is omitted.
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

from nsqtools.archive.finding import ArchiveFile, is_visible, read_index
from nsqtools.archive.form import (
    ZSTD_BLOCK_SIZE,
    FileForm,
    LineKind,
    form_of_text,
    text_of,
    why_foreign,
)
from nsqtools.archive.layout import (
    ALL_TIMES,
    INDEX,
    LONGEST_TOTAL,
    MANIFEST,
    PART,
    Head,
    Member,
    TimeRange,
    Total,
    decode_index,
    decode_total,
    encode_members,
    end_of,
    hidden_name,
    index_of,
    is_hidden,
    owner_of,
    split_head,
)
from nsqtools.archive.members import codec_of
from nsqtools.archive.place import (
    LocalPlace,
    Place,
    StoredObject,
    map_concurrently,
    translating_errors,
)
from nsqtools.archive.reader import form_of
from nsqtools.errors import NotFoundError
from nsqtools.files.opening import (
    LOST_AND_FOUND,
    NotRegularError,
    open_to_read,
    status_of,
    warn_of_links,
)
from nsqtools.protocol.text import load_json
from nsqtools.records.naming import Codec
from nsqtools.spark.archives.damage import ArchiveDamage
from nsqtools.spark.archives.read_settings import ReadSettings

# File systems have timestamps of up to 2 s (FAT). A directory that is older has changed since its
# listing only if its modification time differs.
SETTLED_NS = 2_000_000_000


def may_contain_topics(folder: str, topics: frozenset[str] | None) -> bool:
    """Return whether a folder may contain messages of the topics (None: any), by its name."""
    name, equals, value = folder.partition("=")
    return topics is None or name != "topic" or not equals or unquote(value) in topics


class Folder(NamedTuple):
    """The sorted content of a directory.

    If it ``is_settled``, it is valid for as long as ``state`` (device, inode and modification time)
    is the same.
    """

    state: tuple[int, int, int]
    is_settled: bool
    folders: list[Path]
    in_progress: list[Path]
    finished: list[Path]


BEGINNING_SIZE = 1 << 12  # One block of a file system, which holds the first lines of any archive.


FileKey = Head | str
"""Identifies a file in an offset: its head, or without one its path below the archive."""

UNKNOWN = -1  # The count of messages in a member without an index.

OnArchiveDamage = Callable[[ArchiveDamage], None]


class FileRecord(NamedTuple):
    """The data about a whole file in an index, a manifest, or a line of a catalog.

    ``total`` is its commit record, None if only its members are known.
    """

    head: Head | None
    total: Total | None


class ListedFile:
    """A finished file, which is read lazily. Methods raise ``OSError``.

    ``lines`` are the lines of its index if they have been read. A file without a ``record`` has no
    index. ``entry`` is the listed entry of an object in a store.
    """

    is_finished = True

    def __init__(
        self,
        place: Place,
        name: str,
        record: FileRecord | None,
        lines: bytes | None = None,
        entry: StoredObject | None = None,
    ) -> None:
        self.place = place
        self.shown = str(place)
        """Its path when it is finished, as far as it is known."""
        self.name = name or place.name
        """Its path below the listed directory when it is finished."""
        self.entry = entry
        self.has_index = record is not None
        self.head, self.total = record or FileRecord(None, None)
        self._lines = lines
        self.first_ts = self.total.min_ts if self.total else _first_ts(lines or b"")
        self._content: FileForm | None = None
        self._beginning = b""
        self._is_named = name in ("", str(place))
        self.stamp, self.is_settled = (0, 0), False  # The state of the last listing.

    @property
    def key(self) -> FileKey:
        return self.head or self.name

    def members(self) -> list[Member]:
        """Return the durable members, in order."""
        if not self.has_index:
            return []
        if self._lines is None:
            index = self.place.parent.read(hidden_name(self.place.name, INDEX))
            self._lines = split_head(index)[1]
        return decode_index(self._lines)

    def forget_members(self) -> None:
        """Release the memory of the members, after the file has been read."""
        self._lines = None

    def size(self) -> int:
        """Return its current size in bytes."""
        return os.stat(str(self.place)).st_size if self.entry is None else self.entry.size

    def end(self) -> int:
        """Return its readable size, which for a file in progress is that of the durable members."""
        return self.size()

    def readable(self) -> list[Member]:
        """Return the members, and the bytes after them as a member with an `UNKNOWN` count.

        A file without an index is one such member. A file in progress has no bytes after them.
        """
        members = self.members()
        end = end_of(members)
        if (size := self.size()) > end:
            return [*members, Member(end, size - end, UNKNOWN, 0, 0)]
        return members

    def has_none_within(self, within: TimeRange) -> bool:
        """Return whether, by its commit record, no message is in a range of times."""
        total = self.total
        if total is None or within == ALL_TIMES or within.may_contain(Member(0, 0, 0, *total[-2:])):
            return False
        return self.size() == total.end  # Otherwise messages were appended after the record.

    def amount(self, begin: int, end: int) -> tuple[int, int, int]:
        """Return messages and bytes between two positions, and the time of the oldest message."""
        if not begin and self.total is not None and self.total.end == end:
            return self.total.messages, end, self.total.min_ts
        members = [m for m in self.members() if begin <= m.offset and m.end <= end]
        oldest_ns = min((member.min_ts for member in members if member.min_ts), default=0)
        rows = sum(max(0, member.messages) for member in members)
        return rows, sum(member.length for member in members), oldest_ns

    def content(self) -> FileForm:
        """Return its form; ``foreign`` may be an error of the system. Raises `OutputError`."""
        if self._content is None or self._content.kind is LineKind.nothing:
            self._content = self._read_content()
        return self._content

    def _read_content(self) -> FileForm:
        try:
            data = self.beginning()
        except (NotRegularError, PermissionError) as exc:
            if self.entry is not None:  # A store refuses all objects, not only this one.
                raise
            return FileForm(LineKind.nothing, foreign=exc.strerror or str(exc))
        codec = codec_of(data)
        name = "" if self._is_named or not self.is_finished else self.name
        if not self.has_index and (foreign := why_foreign(name, data)).reason:
            return FileForm(LineKind.bodies, foreign=str(foreign), codec=codec)
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
        return form._replace(codec=codec)

    def beginning(self) -> bytes:
        """Return the first bytes."""
        if not self._beginning or not self.is_finished:  # It may have been empty before.
            version = self.entry.version if self.entry else ""
            data = self.place.read_range("", 0, BEGINNING_SIZE, version)
            if codec_of(data) is Codec.ZSTD:
                data = self.place.read_range("", 0, BEGINNING_SIZE + ZSTD_BLOCK_SIZE, version)
            self._beginning = data
        return self._beginning


class GrowingFile(ListedFile):
    """A file in progress, with the members of its index, from which only new lines are read."""

    is_finished = False

    def __init__(self, path: Path, name: str, shown: str) -> None:
        self._index = index_of(owner_of(path))
        record, lines = _read_local_record(self._index)
        super().__init__(LocalPlace(path), name, record and record._replace(total=None), lines)
        self.shown = shown
        self._index_read = 0
        self._members: list[Member] = []

    def members(self) -> list[Member]:
        """Return the durable members, in order, as a list that grows."""
        if not self.has_index:
            return []
        with open_to_read(self._index) as file:
            if split_head(file.readline(100))[0] != self.head:
                raise FileNotFoundError(errno.ENOENT, "it has moved", str(self.place))
            if not self._read_new_lines(file):  # A failed flush has removed lines.
                self.forget_members()
                self._read_new_lines(file)
        return self._members

    def _read_new_lines(self, file: BinaryIO) -> bool:
        """Read the new lines; return whether they continue the earlier ones."""
        begin = self._index_read or (len(self.head.encode()) if self.head else 0)
        if file.seek(0, os.SEEK_END) < begin:
            return False
        file.seek(begin)
        lines = file.read()
        members = decode_index(lines, end_of(self._members))
        self._members += members
        self._index_read = begin + len(encode_members(members))
        return bool(members) or b"\n" not in lines

    def forget_members(self) -> None:
        self._members, self._index_read = [], 0

    def end(self) -> int:
        return end_of(self.members())

    def readable(self) -> list[Member]:
        return self.members()


def _first_ts(lines: bytes) -> int:
    """Return the time of the first member in lines of an index, 0 if it is unknown."""
    first = decode_index(lines[: lines.find(b"\n") + 1])
    return first[0].min_ts if first else 0


def _read_local_record(path: Path) -> tuple[FileRecord | None, bytes | None]:
    """Return the record in an index, and its lines unless the total of a long index is enough."""
    try:
        with open_to_read(path) as file:
            text = file.read(BEGINNING_SIZE)
            if len(text) == BEGINNING_SIZE:
                file.seek(-LONGEST_TOTAL, os.SEEK_END)
                if total := decode_total(file.read()):
                    return FileRecord(split_head(text)[0], total), None
                file.seek(len(text))
                text += file.read()
    except (FileNotFoundError, NotRegularError, PermissionError):
        return None, None
    return _parsed_index(text)


def _parsed_index(text: bytes) -> tuple[FileRecord, bytes]:
    head, lines = split_head(text)
    return FileRecord(head, decode_total(text)), lines


class Listing:
    """Lists archives in directories, and their files in progress in other directories.

    The content of directories and files is cached for the next listing.
    """

    def __init__(self, settings: ReadSettings) -> None:
        self._settings = settings
        self._topics = settings.wanted_topics
        self._folders: dict[Path, Folder] = {}
        self._cache: dict[Path, ListedFile] = {}

    def files(self, on_damage: OnArchiveDamage) -> dict[FileKey, ListedFile]:
        """Return the current files, sorted by name.

        Raises `NotFoundError` for a missing place, and `OutputError` for an unreadable one.
        Unreadable directories below a place are reported.
        """
        roots = self._settings.roots()
        all_roots = [*roots, *filter(None, [self._settings.work_dir])]
        cache, self._folders = self._folders, {}  # Folders that are gone leave the cache.
        # A pattern may match a path that is removed before it is listed.
        required = {*map(Path, self._settings.paths), self._settings.work_dir}
        for root in all_roots:
            if root in required and not root.exists():
                raise NotFoundError(f"there is no {root}")
        with translating_errors("read", ""):
            in_progress = [
                _ListedPath(root, path, is_settled=False)
                for root in all_roots
                for folder in self._walk(root, cache, on_damage)
                for path in folder.in_progress
            ]
            finished = [
                _ListedPath(root, path, folder.is_settled)
                for root in roots
                for folder in self._walk(root, cache, on_damage)
                for path in folder.finished
            ]
            files = self._unite((*finished, *in_progress), on_damage)
        return dict(sorted(files.items(), key=lambda item: item[1].name))

    def _walk(
        self, root: Path, cache: Mapping[Path, Folder], on_damage: OnArchiveDamage
    ) -> Iterator[Folder]:
        """Yield a directory and those below it that are not hidden, each once; or a single file."""
        if not root.is_dir():
            is_part = is_hidden(root.name, PART)
            files = ([root], []) if is_part else ([], [root])
            yield Folder((0, 0, 0), False, [], *files)
            return
        visited: set[tuple[int, int]] = set()
        stack = [root]
        while stack:
            path = stack.pop()
            try:
                folder = self._folders[path] = self._folder(path, cache)
            except FileNotFoundError:
                continue
            except OSError as exc:
                problem = f"cannot be listed ({exc.strerror or exc})"
                on_damage(ArchiveDamage(str(path), 0, problem))
                continue
            if folder.state[:2] not in visited:  # A bind mount may be below itself.
                visited.add(folder.state[:2])
                selected = [p for p in folder.folders if may_contain_topics(p.name, self._topics)]
                stack += selected[::-1]
                yield folder

    def _folder(self, path: Path, cache: Mapping[Path, Folder]) -> Folder:
        now_ns = time.time_ns()
        status = path.stat()
        state = (status.st_dev, status.st_ino, status.st_mtime_ns)
        cached = self._folders.get(path) or cache.get(path)
        if cached is not None and cached.is_settled and cached.state == state:
            return cached
        folder = Folder(state, now_ns - status.st_mtime_ns > SETTLED_NS, [], [], [])
        links: list[str] = []
        with os.scandir(path) as entries:
            for entry in sorted(entries, key=lambda entry: entry.name):
                paths = folder.finished
                if entry.is_symlink():
                    links.append(entry.name)
                    continue
                if is_hidden(entry.name, PART):
                    paths = folder.in_progress
                elif entry.name.startswith(".") or entry.name == LOST_AND_FOUND:
                    continue
                elif entry.is_dir():
                    paths = folder.folders
                paths.append(path / entry.name)
        warn_of_links(path, links)
        return folder

    def _unite(
        self, paths: Iterable[_ListedPath], on_damage: OnArchiveDamage
    ) -> dict[FileKey, ListedFile]:
        files: dict[FileKey, ListedFile] = {}
        cache, self._cache = self._cache, {}
        for listed in paths:
            if listed.path in self._cache:  # Another root contains it as well.
                continue
            with suppress(FileNotFoundError):  # It was finished or removed in the meantime.
                _add(files, self._file(cache.get(listed.path), listed), on_damage)
        return files

    def _file(self, file: ListedFile | None, listed: _ListedPath) -> ListedFile:
        """Return the file at a path: the cached one, or a new one if it has changed."""
        path = listed.path
        if file is None or not (listed.is_settled and file.is_settled):
            stat = status_of(path)
            is_growing = is_hidden(path.name, PART)
            stamp = (stat.st_ino, 0 if is_growing else stat.st_mtime_ns)
            # A finished file moves away, and a new one in progress may reuse its inode.
            is_other = is_growing and file and head_at(index_of(owner_of(path))) != file.head
            if file is None or file.stamp != stamp or is_other:
                name = str(path) if path == listed.root else str(path.relative_to(listed.root))
                if is_growing:
                    name = str(owner_of(Path(name)))
                    file = GrowingFile(path, name, self._final_path(path, name))
                else:
                    record = _read_local_record(index_of(path))
                    file = ListedFile(LocalPlace(path), name, *record)
            file.stamp, file.is_settled = stamp, listed.is_settled
        self._cache[path] = file
        return file

    def _final_path(self, path: Path, name: str) -> str:
        roots, work_dir = list(filter(Path.is_dir, self._settings.roots())), self._settings.work_dir
        if work_dir is not None and path.is_relative_to(work_dir) and len(roots) == 1:
            return str(roots[0] / name)
        return str(owner_of(path))


class _ListedPath(NamedTuple):
    """A path below a root; if it ``is_settled``, its name still belongs to the same file."""

    root: Path
    path: Path
    is_settled: bool


def head_at(index: Path) -> Head | None:
    """Read the head of an index. Raises ``OSError``."""
    with open_to_read(index) as file:
        return split_head(file.readline(100))[0]


def _add(files: dict[FileKey, ListedFile], file: ListedFile, on_damage: OnArchiveDamage) -> None:
    """Add a file. Of two files with one identity, keep the one whose members include the other's.

    A file that is being moved is listed twice. Raises ``OSError``.
    """
    other = files.setdefault(file.key, file)
    if other is file:
        return
    shorter, longer = sorted((other, file), key=lambda f: (len(f.members()), f is other))
    members = shorter.members()
    if shorter.has_index and longer.members()[: len(members)] == members:
        files[file.key] = longer
    else:
        problem = f"not read: {other.place} has the same identity and other data"
        on_damage(ArchiveDamage(str(file.place), 0, problem))


CATALOG = ".nsq-catalog"
MIN_NEW_MANIFESTS = 16
"""With fewer manifests than this, reading them costs hardly more than reading a catalog."""


class StoredListing:
    """Lists archives in object stores, with a cache for the next listing.

    Files whose record is outside of the range of times are not cached, as there may be a million.
    """

    def __init__(self, settings: ReadSettings, within: TimeRange = ALL_TIMES) -> None:
        self._within = within
        self._places = settings.stored()
        self._topics = settings.wanted_topics
        self._cache: dict[Place, ListedFile] = {}

    def files(self, on_damage: OnArchiveDamage) -> dict[FileKey, ListedFile]:
        """Return the current files, sorted by name.

        Raises `NotFoundError` for an empty place that is not a whole bucket, and `OutputError`.
        """
        files: list[ListedFile] = []
        with translating_errors("read", ""):
            for place in self._places:
                for folder, entries in self._folders(place):
                    listed = self._files_in(place, folder, entries)
                    files += (file for file in listed if not file.has_none_within(self._within))
        self._cache = {file.place: file for file in files}
        unique: dict[FileKey, ListedFile] = {}
        for file in sorted(files, key=lambda file: file.name):
            _add(unique, file, on_damage)
        return unique

    def _folders(self, place: Place) -> Iterator[tuple[str, dict[str, StoredObject]]]:
        """Yield the entries of each folder of a topic, and all others as one folder."""
        direct, folders = place.children()
        if place.name and not direct and not folders:
            try:
                direct = [place.stat()._replace(name="")]
            except FileNotFoundError:
                raise NotFoundError(f"there is no archive in {place}") from None
        others = {entry.name: entry for entry in direct}
        for folder in folders:
            if folder.startswith(".") or not may_contain_topics(folder, self._topics):
                continue
            entries = {entry.name: entry for entry in place.list(folder)}
            if folder.startswith("topic="):
                yield f"{folder}/", entries
            else:
                others |= entries
        yield "", others

    def _files_in(
        self, place: Place, folder: str, entries: Mapping[str, StoredObject]
    ) -> list[ListedFile]:
        """Return the files among some entries, with records from cache, catalog and manifests."""
        names = list(filter(is_visible, entries))
        files: dict[str, ListedFile | None] = {
            name: file
            for name in names
            if (file := self._cache.get(place / name))
            and file.entry == entries[name]
            and (file.has_index or hidden_name(name, INDEX) not in entries)
        }
        new = [name for name in names if name not in files]
        catalog = place / f"{folder}{CATALOG}"
        has_catalog = len(new) >= MIN_NEW_MANIFESTS and f"{folder}{CATALOG}" in entries
        records = _read_catalog(catalog, folder, entries) if has_catalog else {}

        def read_file(name: str) -> ListedFile | None:
            entry, path = entries[name], place / name
            record, lines = records.get(name), None
            try:
                if record is None and hidden_name(name, MANIFEST) in entries:
                    record = _read_manifest(path, entry)
                if record is None:
                    is_listed = hidden_name(name, INDEX) in entries
                    index = read_index(
                        path.parent, hidden_name(path.name, INDEX), is_listed=is_listed
                    )
                    if index is not None:
                        record, lines = _parsed_index(index)
                file = ListedFile(path, name, record, lines, entry)
                if lines is not None or record is None:
                    file.beginning()  # Raises if the file was deleted after the listing.
                return file
            except FileNotFoundError:
                return None

        unrecorded = [name for name in new if name not in records]
        files |= {name: read_file(name) for name in new if name in records}
        files |= zip(unrecorded, map_concurrently(read_file, unrecorded), strict=True)
        existing = [file for name in names if (file := files[name]) is not None]
        manifests = [file for name in unrecorded if (file := files[name]) and file.total]
        if len(manifests) >= MIN_NEW_MANIFESTS:
            _write_catalog(catalog, folder, existing)
        return existing


def _read_manifest(place: Place, entry: StoredObject) -> FileRecord | None:
    """Return the record in a manifest, None if it belongs to another file. Raises ``OSError``."""
    try:
        document = load_json(place.parent.read(hidden_name(place.name, MANIFEST)))
        if document["size"] != entry.size:
            return None
        writer, times = document["writer"], (document["min_ts"] or 0, document["max_ts"] or 0)
        head = Head(writer, int(document["number"])) if writer else None
        total = Total(0, int(document["messages"]), entry.size, *times)
        return FileRecord(head, total)
    except (ValueError, KeyError, TypeError):
        return None


def _read_catalog(
    place: Place, folder: str, entries: Mapping[str, StoredObject]
) -> dict[str, FileRecord]:
    """Return the records of the listed objects in a catalog, none if it is damaged."""
    try:
        rows = [load_json(line) for line in place.read().splitlines()]
        return {
            f"{folder}{name}": FileRecord(Head(*head) if head else None, Total(*total))
            for name, version, head, total in rows
            if (entry := entries.get(f"{folder}{name}")) and entry.version == version
        }
    except (OSError, ValueError, TypeError):
        return {}


def _write_catalog(place: Place, folder: str, files: Iterable[ListedFile]) -> None:
    lines = [
        json.dumps([file.name.removeprefix(folder), file.entry.version, file.head, file.total])
        for file in files
        if file.entry is not None and file.total is not None
    ]
    with suppress(OSError):  # The reader may lack the permission to write.
        place.parent.put(place.name, "\n".join(lines).encode())


class ArchiveListing:
    """Lists the archives in directories and object stores, for a stream or for one range of times.

    A file in a directory takes precedence over its copy in a bucket.
    """

    def __init__(self, settings: ReadSettings, within: TimeRange = ALL_TIMES) -> None:
        self._listings = Listing(settings), StoredListing(settings, within)

    def files(self, on_damage: OnArchiveDamage) -> dict[FileKey, ListedFile]:
        """Return the current files. Raises `NotFoundError` and `OutputError`."""
        directories, stores = self._listings
        # Directories come first, because a file may be uploaded and deleted between the listings.
        files = directories.files(on_damage)
        return stores.files(on_damage) | files
