"""Where finished archives are kept: a directory or an object store, through one interface.

A `Storage` is a place with named objects below it: `LocalStorage`, or what `storage_objects` opens.
Names are relative and separated by ``/``. It keeps no listing and no position, is used from any
thread, and is pickled by its URL, so that an executor of Spark opens the same place with its own
credentials.

All methods raise ``OSError``, whose ``filename`` names the object: `FileNotFoundError`,
`FileExistsError`, `DeniedError`, `UnreachableError`, `ChangedError` for an object that was replaced
while it was read, and ``OSError`` itself for whatever else a store says. `failure_of` makes of them
what a command ends with.

Trap: an unknown scheme must never be taken for a relative path. ``s3n://bucket/lake`` would be a
directory named ``s3n:``, and what was verified there would justify deleting the only other copy.
"""

from __future__ import annotations

import errno
import hashlib
import json
import os
import re
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from itertools import islice
from pathlib import Path, PurePosixPath
from typing import Any, BinaryIO, NamedTuple, Protocol, TypeVar
from urllib.parse import unquote

from nsqtools.errors import (
    ConfigurationError,
    ConnectionFailed,
    NotFoundError,
    NsqError,
    OutputError,
    RefusedError,
)
from nsqtools.files.durable import (
    TEMPORARY,
    copy_file,
    make_folders,
    place,
    remove_temporaries,
    replace_file,
    sync_folder,
    temporary_beside,
    written_beside,
)
from nsqtools.files.opening import open_to_read, status_of, walk

OBJECT_SCHEMES = ("s3", "s3a", "gs", "az", "abfss")
HDFS_SCHEMES = ("hdfs", "webhdfs")
LOCAL_HOSTS = ("", "localhost")
COMPARED_SIZE = 8 << 20
FILE_MODE, FOLDER_MODE = 0o640, 0o750
LEFT_AFTER_S = 86_400.0  # since it was written to: its writer was killed
AT_A_TIME = 32

_SCHEME = re.compile(r"([A-Za-z][A-Za-z0-9+.-]*):/")


class ChangedError(OSError):
    """An object is not the one any more that it was when reading began."""


class UnreachableError(OSError):
    """No connection to a store, or no answer in time."""


class DeniedError(PermissionError):
    """A store refuses what was asked to this user."""


class Entry(NamedTuple):
    """An object: its name, size in bytes, and when it was written, in nanoseconds since 1970.

    ``version`` changes with the content (the ETag of an object store); "" where there is none.
    """

    name: str
    size: int
    modified_ns: int
    version: str = ""


class Storage(Protocol):
    """A place for objects. ``url`` names it, and opens the same place in another process."""

    url: str

    def check(self) -> None:
        """Raise ``OSError`` where nothing can be written, as far as one request tells."""

    def where(self, name: str) -> str:
        """Return an object's whole path or URL, to show it to people."""

    def list(self, prefix: str = "") -> Iterator[Entry]:
        """Iterate over everything below the folder ``prefix``, hidden names included.

        In no particular order. A place that is not there is empty, as on an object store.
        """

    def children(self, prefix: str) -> tuple[Sequence[Entry], Sequence[str]]:
        """Return the objects directly in a folder, and the folders in it, by their whole names."""

    def stat(self, name: str) -> Entry:
        """Return what there is to know of an object."""

    def open(self, name: str, entry: Entry | None = None) -> BinaryIO:
        """Open an object for reading; close it in the end.

        With an ``entry`` of a listing, raises `ChangedError` when the object is another one now.
        """

    def read_range(self, name: str, start: int, length: int, version: str = "") -> bytes:
        """Return the bytes from ``start``, fewer than ``length`` where the object ends.

        With a ``version``, raises `ChangedError` when the object has another one.
        """

    def read(self, name: str) -> bytes:
        """Return all of a small object."""

    def put(self, name: str, data: bytes) -> str:
        """Write a small object in one piece, durably; one that is there is replaced.

        This and the next two return the version that the store says it has received, "" if it
        does not say: see `verify`.
        """

    def put_file(self, name: str, path: Path) -> str:
        """Write a file of any size, in parts, durably; it appears whole."""

    def put_if_absent(self, name: str, data: bytes) -> str:
        """Write a small object. Raises `FileExistsError` when there is one, of any writer."""

    def delete(self, name: str) -> None:
        """Remove an object; one that is not there is fine."""

    def verify(self, name: str, path: Path, version: str = "") -> None:
        """Compare an object with the file that it should be; raise `ChangedError` if it differs.

        ``version`` is what its put returned. Where the store gives no checksum of the content, all
        of it is read back, a range at a time.
        """
        size = path.stat().st_size
        if self.stat(name).size != size or self.digest(name, size) != hash_of(path):
            raise self._differs(name)

    def verify_data(self, name: str, data: bytes, version: str) -> None:
        """Compare a small object with what it should be, as `verify` does."""
        if self.read(name) != data:
            raise self._differs(name)

    def _differs(self, name: str) -> ChangedError:
        return ChangedError(errno.EIO, "what is stored differs from the file", self.where(name))

    def digest(self, name: str, size: int) -> str:
        """Return the SHA-256 of the first bytes of an object, in hex."""
        content = hashlib.sha256()
        for start in range(0, size, COMPARED_SIZE):
            content.update(self.read_range(name, start, min(COMPARED_SIZE, size - start)))
        return content.hexdigest()


Item = TypeVar("Item")
Result = TypeVar("Result")


def side_by_side(
    work: Callable[[Item], Result], items: Iterable[Item], *, is_remote: bool = True
) -> Iterator[Result]:
    """Iterate over what ``work`` makes of each item, in their order, many at a time: each request
    to a store costs a round trip. Few results wait for their turn. Of local files one at a time."""
    if not is_remote:
        yield from map(work, items)
        return
    left = iter(items)
    with ThreadPoolExecutor(AT_A_TIME, "nsq-storage") as threads:
        while some := list(islice(left, 4 * AT_A_TIME)):
            yield from threads.map(work, some)


def failure_of(exc: OSError, doing: str, where: object) -> NsqError:
    """Return the error that a command ends with: "cannot read s3://b/x (no answer in time)".

    ``where`` is the place, in case that the error does not name the object.
    """
    kinds = {UnreachableError: ConnectionFailed, DeniedError: RefusedError}
    kind = kinds.get(type(exc), OutputError)
    return kind(f"cannot {doing} {exc.filename or where} ({exc.strerror or exc})")


@contextmanager
def failing(doing: str, where: object) -> Iterator[None]:
    """Raise what a system or a store refuses as `failure_of` says."""
    try:
        yield
    except OSError as exc:
        raise failure_of(exc, doing, where) from exc


def require(storage: Storage) -> None:
    """Raise the error of a place that cannot be used: `NotFoundError`, `RefusedError`,
    `ConnectionFailed` or `OutputError`. Who needs it only later learns it before the work."""
    with failing("use", storage.url):
        try:
            storage.check()
        except FileNotFoundError as exc:
            raise NotFoundError(f"cannot use {storage.url} ({exc.strerror})") from exc


def read_json(storage: Storage, name: str) -> Any:
    """Return what a small object says, None where there is none. Raises `OutputError` for what is
    not JSON, and ``OSError``."""
    try:
        return json.loads(storage.read(name))
    except FileNotFoundError:
        return None
    except ValueError as exc:
        raise OutputError(f"cannot read {storage.where(name)} ({exc})") from exc


def hash_of(path: Path) -> str:
    """Return the SHA-256 of a file, in hex. Raises ``OSError``."""
    with open_to_read(path) as file:
        return hashlib.file_digest(file, "sha256").hexdigest()  # type: ignore[arg-type]


def scheme_of(text: str) -> str:
    """Return the scheme of a URL in lower case, "" for a path."""
    match = _SCHEME.match(text)
    return match[1].lower() if match else ""


def local_path(text: str) -> Path:
    """Return the path that a local path or ``file:`` URL names. Raises `ConfigurationError`."""
    if not text:
        raise ConfigurationError("an empty path names no file or directory")
    match = _SCHEME.match(text)
    if match is None:
        return Path(text)
    rest = text[len(match[0]) - 1 :]
    host, slash, below = rest[2:].partition("/") if rest.startswith("//") else ("", "/", rest[1:])
    if match[1].lower() != "file" or host not in LOCAL_HOSTS or not slash:
        known = ", ".join(f"{scheme}://" for scheme in ("file", *OBJECT_SCHEMES))
        hint = f"Give a local path or one of {known}."
        if match[1].lower() in HDFS_SCHEMES:
            hint = "Copy it with `hdfs dfs -get`, mount it, or give an object store (s3://...)."
        raise ConfigurationError(f"{text} is not supported as storage", hint=hint)
    return Path("/" + unquote(below))


class LocalStorage(Storage):
    """The directory ``root``, made when something is first written.

    What is written appears whole under its name and is durable: it is put together under a hidden
    temporary name, which `list` leaves out. Those of killed writers go when something is written
    beside them a day later.
    """

    def __init__(self, root: Path) -> None:
        self.root = root
        self.url = str(root)
        self._cleared: set[Path] = set()

    def __reduce__(self) -> tuple[type[LocalStorage], tuple[Path]]:
        return LocalStorage, (self.root,)

    def check(self) -> None:
        self.root.mkdir(FOLDER_MODE, parents=True, exist_ok=True)
        if not os.access(self.root, os.W_OK | os.X_OK):
            raise DeniedError(errno.EACCES, os.strerror(errno.EACCES), self.url)

    def where(self, name: str) -> str:
        return str(self._path(name))

    def _path(self, name: str) -> Path:
        parts = PurePosixPath(name)
        if parts.is_absolute() or ".." in parts.parts:
            raise OSError(errno.EINVAL, "it is not a name below the directory", name)
        return self.root / parts

    def list(self, prefix: str = "") -> Iterator[Entry]:
        for entry, error in self.list_readable(prefix):
            if error is not None:
                raise error
            yield entry

    def list_readable(self, prefix: str = "") -> Iterator[tuple[Entry, OSError | None]]:
        """Iterate as `list` does, but over directories and files that cannot be looked at as well.

        Each of these has its error.
        """
        failed: list[OSError] = []
        for folder, names in walk(self._path(prefix), failed.append):
            for path in (folder / name for name in names if not TEMPORARY.fullmatch(name)):
                try:
                    yield self._entry(path.relative_to(self.root).as_posix(), path), None
                except OSError as exc:
                    failed.append(exc)
        for error in failed:
            if not isinstance(error, FileNotFoundError):  # removed meanwhile
                yield Entry(os.path.relpath(error.filename, self.root), 0, 0), error

    def children(self, prefix: str) -> tuple[Sequence[Entry], Sequence[str]]:
        path = self._path(prefix)
        names = sorted(os.listdir(path)) if path.is_dir() else []
        found = [(str(PurePosixPath(prefix, name)), path / name) for name in names]
        entries = [self._entry(*each) for each in found if each[1].is_file()]
        return entries, [name for name, each in found if each.is_dir()]

    @staticmethod
    def _entry(name: str, path: Path) -> Entry:
        stat = status_of(path)
        return Entry(name, stat.st_size, stat.st_mtime_ns, _version(stat))

    def stat(self, name: str) -> Entry:
        return self._entry(name, self._path(name))

    def open(self, name: str, entry: Entry | None = None) -> BinaryIO:
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
        with temporary_beside(target) as beside:
            copy_file(path, beside, FILE_MODE)
            beside.replace(target)
        sync_folder(target.parent)
        return ""

    def put_if_absent(self, name: str, data: bytes) -> str:
        target = self._make_room(name)
        with written_beside(target, data, FILE_MODE) as beside:
            place(beside, target)
        sync_folder(target.parent)
        return ""

    def delete(self, name: str) -> None:
        path = self._path(name)
        with suppress(FileNotFoundError):
            path.unlink()
            sync_folder(path.parent)

    def _make_room(self, name: str) -> Path:
        """Return the path for a new object, with its folder."""
        target = self._path(name)
        self.root.mkdir(FOLDER_MODE, parents=True, exist_ok=True)
        make_folders(self.root, target.parent, FOLDER_MODE)
        if target.parent not in self._cleared:
            self._cleared.add(target.parent)
            with suppress(OSError):  # they are in nobody's way
                remove_temporaries(target.parent, time.time() - LEFT_AFTER_S)
        return target


def _version(stat: os.stat_result) -> str:
    return f"{stat.st_dev}-{stat.st_ino}-{stat.st_mtime_ns}"


def _changed(path: Path) -> ChangedError:
    return ChangedError(errno.ESTALE, "it changed while it was read", str(path))
