"""HDFS as storage, over WebHDFS.

What is written is put together under a hidden name and appears whole by a rename, which HDFS does
in one step. `HDFSStorage.list` leaves such names out, and those that ``hdfs dfs -put`` has while it
copies.

A rename whose answer is lost is asked for again, and then finds its work done. So the file's inode
number, which no other file ever has, decides who has the name: two writers never both believe that
they were first.

A version is the inode with size and time of the last change. WebHDFS has no conditional read: the
version is looked at after each range, so what was read in between is that of the version.
"""

from __future__ import annotations

import errno
import os
import weakref
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

from nsqtools.archive.hdfs_settings import hdfs_settings, parse_hdfs
from nsqtools.archive.storage import (
    ChangedError,
    DeniedError,
    Draft,
    Entry,
    Storage,
    StoredFile,
    UnreachableError,
    name_of_draft,
)
from nsqtools.archive.storage_ranges import RangeFile
from nsqtools.errors import ConnectionFailed, HTTPError, NsqError
from nsqtools.files.opening import open_to_read

if TYPE_CHECKING:
    from nsqtools.http.webhdfs import FileStatus, WebHDFS

COPYING = "._COPYING_"
PART_SIZE = 1 << 20
MOST_DEEP = 1000
MISSING = {"FileNotFoundException", "PathNotFoundException"}
BELOW_A_FILE = "ParentNotDirectoryException"
THERE = {"FileAlreadyExistsException"}
FORBIDDEN = {"AccessControlException", "SecurityException", "AuthorizationException"}


class HDFSStorage(Storage):
    """A folder of an HDFS. ``options`` are those of `hdfs_settings`."""

    def __init__(self, url: str, options: Mapping[str, str]) -> None:
        place = parse_hdfs(url)
        self.root = place.path
        self.url = f"{place.root}/{place.path}" if place.path else place.root
        self.options = dict(options)
        self._settings = hdfs_settings(place, self.options)
        self._opened: WebHDFS | None = None

    def __reduce__(self) -> tuple[type[HDFSStorage], tuple[str, dict[str, str]]]:
        return HDFSStorage, (self.url, self.options)

    def where(self, name: str) -> str:
        return f"{self.url}/{name}" if name else self.url

    @property
    def _hdfs(self) -> WebHDFS:
        if self._opened is None:
            from nsqtools.http.webhdfs import WebHDFS

            settings, tls = self._settings, None
            if any(url.startswith("https:") for url in settings.namenodes):
                from nsqtools.transport.tls import TLSOptions, make_context

                tls = make_context(TLSOptions(ca_file=settings.ca_file))
            self._opened = opened = WebHDFS(settings.namenodes, settings.user, tls=tls)
            weakref.finalize(self, opened.close)
        return self._opened

    def _path(self, name: str) -> str:
        if ".." in name.split("/"):
            raise OSError(errno.EINVAL, "it is not a name below the directory", self.where(name))
        return "/" + "/".join(filter(None, (self.root, name)))

    def list(self, prefix: str = "") -> Iterator[Entry]:
        for name, status in self._files(prefix):
            if not _is_unfinished(status.name):
                yield _entry(name, status)

    def _files(self, prefix: str, deepest: int = MOST_DEEP) -> Iterator[tuple[str, FileStatus]]:
        folders = [(prefix.strip("/"), 0)]
        while folders:
            folder, depth = folders.pop()
            with self._blaming(folder):
                try:
                    for status in self._hdfs.list(self._path(folder)):
                        name = f"{folder}/{status.name}" if folder else status.name
                        if not status.name:  # a file has no objects below it
                            continue
                        if status.is_folder and depth < deepest:
                            folders.append((name, depth + 1))
                        elif status.is_file:
                            yield name, status
                except HTTPError as exc:
                    if exc.code not in {*MISSING, BELOW_A_FILE}:  # or removed meanwhile
                        raise

    def stat(self, name: str) -> Entry:
        with self._blaming(name):
            status = self._hdfs.status(self._path(name))
        if not status.is_file:
            raise self._missing(name)
        return _entry(name, status)

    def open(self, name: str, entry: Entry | None = None) -> StoredFile:
        entry = entry or self.stat(name)
        return RangeFile(self, name, entry.size, entry.version)

    def read(self, name: str) -> bytes:
        from nsqtools.http.webhdfs import MOST_DATA

        with self._blaming(name):
            data = self._hdfs.read(self._path(name), 0, MOST_DATA)
        if len(data) < MOST_DATA:
            return data
        entry = self.stat(name)
        return self.read_range(name, 0, entry.size, entry.version)

    def read_range(self, name: str, start: int, length: int, version: str = "") -> bytes:
        path, data = self._path(name), bytearray()
        with self._blaming(name):
            while len(data) < length:
                try:
                    part = self._hdfs.read(path, start + len(data), length - len(data))
                except HTTPError as exc:
                    if "out of the range" not in str(exc):
                        raise
                    part = b""
                data += part
                if not part or len(data) == length:
                    break
        if version and self.stat(name).version != version:
            raise ChangedError(errno.ESTALE, "it changed while it was read", self.where(name))
        return bytes(data)

    def put(self, name: str, data: bytes) -> str:
        return self._put(name, lambda: iter([data]), len(data), replaces=True)

    def put_file(self, name: str, path: Path) -> str:
        def parts() -> Iterator[bytes]:
            with open_to_read(path) as file:
                while part := file.read(PART_SIZE):
                    yield part

        return self._put(name, parts, path.stat().st_size, replaces=True)

    def put_if_absent(self, name: str, data: bytes) -> str:
        return self._put(name, lambda: iter([data]), len(data), replaces=False)

    def _put(
        self, name: str, parts: Callable[[], Iterator[bytes]], size: int, *, replaces: bool
    ) -> str:
        target = self._path(name)
        folder, _, base = target.rpartition("/")
        beside = f"{folder}/.{base}.{os.urandom(8).hex()}.tmp"
        is_there = False
        with self._blaming(name):
            try:
                self._hdfs.create(beside, parts, size)
                written = self._hdfs.status(beside)
                if written.size != size:
                    raise NsqError(f"{written.size} of {size} bytes were written")
                self._take_place(written, beside, target, replaces=replaces)
                is_there = True
            finally:
                if not is_there:
                    self._remove(beside)
        return _entry(name, written).version

    def _take_place(self, written: FileStatus, beside: str, target: str, *, replaces: bool) -> None:
        try:
            self._hdfs.rename(beside, target, replaces=replaces)
        except HTTPError as exc:
            if exc.code not in MISSING | THERE:
                raise
            try:
                is_ours = self._hdfs.status(target).inode == written.inode
            except NsqError:
                is_ours = False
            if not is_ours:
                raise

    def _remove(self, path: str) -> None:
        try:
            self._hdfs.delete(path)
        except NsqError:  # what failed before is what is said
            pass

    def delete(self, name: str) -> None:
        with self._blaming(name):
            self._hdfs.delete(self._path(name))

    def drafts(self, name: str) -> Iterator[Draft]:
        folder = name.rpartition("/")[0]
        return (
            draft for draft in self._drafts(self._files(folder, deepest=0)) if draft.name == name
        )

    def drafts_below(self, prefix: str = "") -> Iterator[Draft]:
        return self._drafts(self._files(prefix))

    def _drafts(self, files: Iterable[tuple[str, FileStatus]]) -> Iterator[Draft]:
        for key, status in files:
            if (base := name_of_draft(status.name)) is not None:
                name = f"{key.removesuffix(status.name)}{base}"
                yield Draft(name, key, status.modified_ms * 1_000_000)

    def remove_draft(self, draft: Draft) -> None:
        self.delete(draft.key)

    def _missing(self, name: str) -> FileNotFoundError:
        return FileNotFoundError(errno.ENOENT, "it is not there", self.where(name))

    @contextmanager
    def _blaming(self, name: str) -> Iterator[None]:
        """Raise the errors of WebHDFS as ``OSError`` with the URL."""
        where = self.where(name)
        try:
            yield
        except HTTPError as exc:
            if exc.code in MISSING:
                raise self._missing(name) from None
            if exc.code == BELOW_A_FILE:
                raise FileNotFoundError(errno.ENOENT, "it is below a file", where) from None
            if exc.code in THERE:
                raise FileExistsError(errno.EEXIST, "it is there already", where) from None
            if exc.code in FORBIDDEN or exc.status == 401:
                raise DeniedError(errno.EACCES, _said(exc), where) from None
            raise OSError(errno.EIO, _said(exc), where) from None
        except ConnectionFailed as exc:
            raise UnreachableError(errno.EIO, _said(exc), where) from None
        except NsqError as exc:
            raise OSError(errno.EIO, _said(exc), where) from None


def _said(exc: NsqError) -> str:
    """Return an error, and what to do about it, in one line."""
    return f"{exc}. {exc.hint}".rstrip(". ") if exc.hint else str(exc)


def _entry(name: str, status: FileStatus) -> Entry:
    version = f"{status.inode}-{status.modified_ms}-{status.size}"
    return Entry(name, status.size, status.modified_ms * 1_000_000, version)


def _is_unfinished(name: str) -> bool:
    return name.endswith(COPYING) or name_of_draft(name) is not None
