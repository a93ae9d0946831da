"""A directory as storage: a local disk, or one that several hosts have mounted.

What is written appears whole under its name and is durable: it is put together under a hidden
temporary name, which `LocalStorage.list` leaves out.
"""

from __future__ import annotations

import errno
import glob
import os
import shutil
from collections.abc import Iterator
from pathlib import Path, PurePosixPath

from nsqtools.archive.storage import ChangedError, Draft, Entry, Storage, StoredFile, name_of_draft
from nsqtools.files.durable import (
    NEW,
    TEMPORARY,
    blaming,
    make_folders,
    replace_file,
    sync_folder,
    write_all,
)
from nsqtools.files.opening import open_to_read

FILE_MODE, FOLDER_MODE = 0o640, 0o750


class LocalStorage(Storage):
    """The directory ``root``, made when something is first written."""

    def __init__(self, root: Path) -> None:
        self.root = root
        self.url = str(root)

    def __reduce__(self) -> tuple[type[LocalStorage], tuple[Path]]:
        return LocalStorage, (self.root,)

    def where(self, name: str) -> str:
        return str(self._path(name))

    def _path(self, name: str) -> Path:
        parts = PurePosixPath(name)
        if parts.is_absolute() or ".." in parts.parts:
            raise OSError(errno.EINVAL, "it is not a name below the directory", name)
        return self.root / parts

    def list(self, prefix: str = "") -> Iterator[Entry]:
        def fail(exc: OSError) -> None:
            if not isinstance(exc, FileNotFoundError):
                raise exc

        for folder, folders, names in os.walk(self._path(prefix), onerror=fail):
            folders.sort()
            for name in sorted(names):
                if TEMPORARY.fullmatch(name):
                    continue
                path = Path(folder, name)
                try:
                    yield self._entry(path.relative_to(self.root).as_posix(), path)
                except FileNotFoundError:  # removed meanwhile
                    continue

    @staticmethod
    def _entry(name: str, path: Path) -> Entry:
        stat = path.stat()
        return Entry(name, stat.st_size, stat.st_mtime_ns, _version(stat))

    def stat(self, name: str) -> Entry:
        return self._entry(name, self._path(name))

    def open(self, name: str, entry: Entry | None = None) -> StoredFile:
        file = open_to_read(self._path(name))
        if entry is not None and _version(os.fstat(file.fileno())) != entry.version:
            file.close()
            raise _changed(self._path(name))
        return file

    def read(self, name: str) -> bytes:
        with open_to_read(self._path(name)) as file:
            return file.read()

    def read_range(self, name: str, start: int, length: int, version: str = "") -> bytes:
        path = self._path(name)
        with open_to_read(path) as file:
            stat = os.fstat(file.fileno())
            if version and version != _version(stat):
                raise _changed(path)
            return os.pread(file.fileno(), max(0, min(length, stat.st_size - start)), start)

    def put(self, name: str, data: bytes) -> str:
        replace_file(self._make_room(name), data, FILE_MODE)
        return ""

    def put_file(self, name: str, path: Path) -> str:
        target = self._make_room(name)
        beside = _temporary(target)
        try:
            with open_to_read(path) as source, blaming(target):
                with os.fdopen(os.open(beside, NEW | os.O_WRONLY, FILE_MODE), "wb") as copy:
                    shutil.copyfileobj(source, copy, 1 << 20)
                    copy.flush()
                    os.fsync(copy.fileno())
                beside.replace(target)
        finally:
            beside.unlink(missing_ok=True)
        sync_folder(target.parent)
        return ""

    def put_if_absent(self, name: str, data: bytes) -> str:
        target = self._make_room(name)
        beside = _temporary(target)
        descriptor = os.open(beside, NEW | os.O_WRONLY, FILE_MODE)
        try:
            try:
                with blaming(target):
                    write_all(descriptor, data)
                    os.fsync(descriptor)
            finally:
                os.close(descriptor)
            try:
                os.link(beside, target)
            except FileExistsError:
                raise FileExistsError(errno.EEXIST, "it is there already", str(target)) from None
        finally:
            beside.unlink(missing_ok=True)
        sync_folder(target.parent)
        return ""

    def delete(self, name: str) -> None:
        path = self._path(name)
        try:
            path.unlink()
        except FileNotFoundError:
            return
        sync_folder(path.parent)

    def drafts(self, name: str) -> Iterator[Draft]:
        path = self._path(name)
        return self._drafts(path.parent.glob(f"{glob.escape(f'.{path.name}.')}*.tmp"))

    def drafts_below(self, prefix: str = "") -> Iterator[Draft]:
        return self._drafts(self._path(prefix).rglob(".*.tmp"))

    def _drafts(self, found: Iterator[Path]) -> Iterator[Draft]:
        for path in found:
            if (name := name_of_draft(path.name)) is None:
                continue
            try:
                stat = path.lstat()
            except FileNotFoundError:  # it is finished now
                continue
            object_path = path.with_name(name).relative_to(self.root)
            key = path.relative_to(self.root).as_posix()
            yield Draft(object_path.as_posix(), key, stat.st_mtime_ns)

    def remove_draft(self, draft: Draft) -> None:
        self.delete(draft.key)

    def _make_room(self, name: str) -> Path:
        """Return the path for a new object, with its folder."""
        target = self._path(name)
        self.root.mkdir(FOLDER_MODE, parents=True, exist_ok=True)
        make_folders(self.root, target.parent, FOLDER_MODE)
        return target


def _version(stat: os.stat_result) -> str:
    return f"{stat.st_ino}-{stat.st_mtime_ns}"


def _changed(path: Path) -> ChangedError:
    return ChangedError(errno.ESTALE, "it changed while it was read", str(path))


def _temporary(target: Path) -> Path:
    return target.with_name(f".{target.name}.{os.urandom(8).hex()}.tmp")
