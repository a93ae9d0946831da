"""Places: a local directory or a prefix of an object store, behind one interface.

`place_url.parse_place` makes one from a path or URL. `LocalPlace` is here, `BucketPlace` in
`storage_objects`. A place has named objects below it. Names are relative and separated by ``/``;
the name "" is the object at the place itself, which can be read but not written. A place keeps no
listing and no position, can be used from any thread, and is pickled by its URL, so that an executor
of Spark opens it with its own credentials.

All methods raise ``OSError``, whose ``filename`` is the path or URL of the object:
`FileNotFoundError`, `FileExistsError`, `DeniedError`, `UnreachableError`, `ChangedError` for an
object that was replaced while it was read, and ``OSError`` for any other failure.
`translating_errors` turns them into the errors of commands.
"""

from __future__ import annotations

import errno
import hashlib
import os
import stat
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractContextManager, contextmanager, suppress
from itertools import islice
from pathlib import Path, PurePosixPath
from typing import Any, BinaryIO, ClassVar, NamedTuple, Self, TypeVar

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
    link_file,
    make_folders,
    remove_temporaries,
    replace_file,
    sync_folder,
    temporary_file,
    temporary_path,
)
from nsqtools.files.opening import closing_fd, lock_file, open_to_read, status_of, walk
from nsqtools.protocol.text import load_json

SHARED = "Give a directory that this machine and the executors have mounted under one path."

# Bytes of an object in memory while its digest is computed: one part of an upload.
DIGEST_CHUNK_SIZE = 8 << 20
FILE_MODE, FOLDER_MODE = 0o640, 0o750
# A temporary file that nobody has written to for a day belongs to a killed writer.
ABANDONED_AFTER_S = 86_400.0
# Requests to a store that run at the same time. Each costs a round trip of tens of milliseconds.
CONCURRENT_REQUESTS = 32


class ChangedError(OSError):
    """An object was replaced after reading began."""


class UnreachableError(OSError):
    """A store refused the connection or did not respond in time."""


class DeniedError(PermissionError):
    """A store denied the user a request."""


class StoredObject(NamedTuple):
    """An object: its name, size in bytes, and modification time in nanoseconds since 1970.

    ``version`` changes with the content (the ETag of an object store); "" if the store has none.
    """

    name: str
    size: int
    modified_ns: int
    version: str = ""


class PlaceLock:
    """The lock of a place. A child process may inherit the locked ``descriptors``."""

    def __init__(self, *descriptors: int) -> None:
        self.descriptors = descriptors

    def check(self) -> None:
        """Raise `OutputError` if another run has taken the place: nothing may be published then."""

    def raise_if_lost(self) -> None:
        """Raise the error with which the lock was lost, if it is known; cheaper than `check`."""


class Place(ABC):
    """A local directory or a prefix of an object store. Two places with one ``url`` are equal."""

    url: str
    is_remote: ClassVar[bool]

    def __str__(self) -> str:
        return self.url

    def __repr__(self) -> str:
        return f"{type(self).__name__}({self.url!r})"

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Place) and self.url == other.url

    def __hash__(self) -> int:
        return hash(self.url)

    @abstractmethod
    def __truediv__(self, name: str) -> Self:
        """Return the place below this one."""

    @property
    @abstractmethod
    def name(self) -> str:
        """The last part of the path; "" at the root of a bucket."""

    @property
    @abstractmethod
    def parent(self) -> Self:
        """The folder above; at the root, the root."""

    @property
    def parents(self) -> Sequence[Self]:
        """The folders above, the nearest first."""
        parent = self.parent
        return [] if parent == self else [parent, *parent.parents]

    def absolute(self) -> Place:
        """Return the place in a form that does not depend on the working directory."""
        return self

    @property
    def path(self) -> Path:
        """The local path. Raises `ConfigurationError` for a place in an object store."""
        raise ConfigurationError(f"{self.url} is not a local file or directory")

    @property
    @abstractmethod
    def hadoop_url(self) -> str:
        """The URL for Hadoop, which Spark uses: a path without a scheme may mean HDFS."""

    def for_delta_rs(self) -> dict[str, str]:
        """Return the settings of the store under the names of delta-rs."""
        return {}

    @abstractmethod
    def check(self) -> None:
        """Raise ``OSError`` if nothing can be written here, as far as one request shows."""

    def require(self) -> None:
        """Raise the command's error for a place that cannot be used, before any work is done:
        `NotFoundError`, `RefusedError`, `ConnectionFailed` or `OutputError`."""
        with translating_errors("use", self.url):
            try:
                self.check()
            except FileNotFoundError as exc:
                raise NotFoundError(f"cannot use {self.url} ({exc.strerror})") from exc

    @abstractmethod
    def list(self, prefix: str = "") -> Iterator[StoredObject]:
        """Iterate over all objects below the folder ``prefix``, including hidden ones.

        The order is not defined. A folder that does not exist is empty, as in an object store.
        """

    def list_readable(self, prefix: str = "") -> Iterator[tuple[StoredObject, OSError | None]]:
        """Iterate over all objects, and over unreadable directories and files with their errors."""
        for entry in self.list(prefix):
            yield entry, None

    @abstractmethod
    def children(self, prefix: str = "") -> tuple[Sequence[StoredObject], Sequence[str]]:
        """Return the objects directly in a folder, and the names of the folders in it."""

    @abstractmethod
    def may_be_folder(self) -> bool:
        """Return whether the place may be a folder: in a store any prefix, on disk a directory."""

    @abstractmethod
    def stat(self, name: str = "") -> StoredObject:
        """Return size, time and version of an object."""

    @abstractmethod
    def open(self, name: str = "", entry: StoredObject | None = None) -> BinaryIO:
        """Open an object for reading. The caller closes it.

        With the ``entry`` of a listing, raises `ChangedError` if the object was replaced since.
        """

    @abstractmethod
    def read_range(self, name: str, start: int, length: int, version: str = "") -> bytes:
        """Return ``length`` bytes from ``start``, or fewer at the end of the object.

        With a ``version``, raises `ChangedError` if the object has a different one.
        """

    @abstractmethod
    def read(self, name: str = "") -> bytes:
        """Return a small object."""

    def read_json(self, name: str, kind: type[Any] = dict) -> Any:
        """Return the content of a small file of JSON, None if the file does not exist.

        Raises `OutputError` for anything but JSON of this kind and of version 1, and ``OSError``.
        """
        try:
            document = load_json(self.read(name))
            if not isinstance(document, kind):
                raise ValueError("it has JSON of another kind")
            if kind is dict and document.get("version", 1) != 1:
                raise ValueError(f"it is of version {document['version']}")
            return document
        except FileNotFoundError:
            return None
        except ValueError as exc:
            raise OutputError(f"cannot read {self / name} ({exc})") from exc

    @abstractmethod
    def put(self, name: str, data: bytes) -> str:
        """Write or replace a small object as a whole, durably.

        `put`, `put_file` and `put_if_absent` return the version that the store reports for the
        content, "" if it reports none: see `verify`.
        """

    @abstractmethod
    def put_file(self, name: str, path: Path) -> str:
        """Write a file of any size, in parts, durably. It appears as a whole."""

    @abstractmethod
    def put_if_absent(self, name: str, data: bytes) -> str:
        """Write a small object. Raises `FileExistsError` if any writer has created it before."""

    @abstractmethod
    def delete(self, name: str) -> None:
        """Delete an object, if it exists."""

    @abstractmethod
    def move(self, name: str, target: str) -> None:
        """Give an object another name, durably. It replaces an object of this name as a whole."""

    @abstractmethod
    def lock(self, name: str) -> AbstractContextManager[PlaceLock]:
        """Lock the place: a directory by a lock on the file ``name``, a bucket by a lease.

        Raises `OutputError` if another run holds the lock, and as `failure_of`.
        """

    def verify(self, name: str, path: Path, version: str = "") -> None:
        """Compare an object with the local file that was put; raise `ChangedError` if they differ.

        ``version`` is the result of the put. Without a checksum of the content from the store, the
        object is read back in ranges.
        """
        size = path.stat().st_size
        if self.stat(name).size != size or self.digest(name, size) != hash_of(path):
            raise self._differs(name)

    def verify_data(self, name: str, data: bytes, version: str) -> None:
        """Compare a small object with the data that was put, as `verify` does."""
        if self.read(name) != data:
            raise self._differs(name)

    def _differs(self, name: str) -> ChangedError:
        return ChangedError(errno.EIO, "the stored object differs from the file", str(self / name))

    def digest(self, name: str, size: int) -> str:
        """Return the SHA-256 of the first ``size`` bytes of an object, in hex."""
        content = hashlib.sha256()
        for start in range(0, size, DIGEST_CHUNK_SIZE):
            content.update(self.read_range(name, start, min(DIGEST_CHUNK_SIZE, size - start)))
        return content.hexdigest()


class LocalPlace(Place):
    """A directory, which is created by the first write.

    An object appears as a whole under its name and is durable. Until then it has a hidden temporary
    name, which `list` leaves out. The next writer deletes the temporary files of killed writers
    after a day.
    """

    is_remote = False

    def __init__(self, path: Path) -> None:
        self._root = path
        self.url = str(path)
        self._cleaned: set[Path] = set()

    def __reduce__(self) -> tuple[type[LocalPlace], tuple[Path]]:
        return LocalPlace, (self._root,)

    def __truediv__(self, name: str) -> LocalPlace:
        return LocalPlace(self._root / name)

    @property
    def path(self) -> Path:
        return self._root

    @property
    def name(self) -> str:
        return self._root.name

    @property
    def parent(self) -> LocalPlace:
        return LocalPlace(self._root.parent)

    @property
    def hadoop_url(self) -> str:
        # Hadoop takes the text after file:// literally, so nothing is escaped.
        return f"file://{self._root.absolute()}"

    def absolute(self) -> LocalPlace:
        return LocalPlace(self._root.absolute())

    def check(self) -> None:
        self._root.mkdir(FOLDER_MODE, parents=True, exist_ok=True)
        if not os.access(self._root, os.W_OK | os.X_OK):
            raise DeniedError(errno.EACCES, os.strerror(errno.EACCES), self.url)

    def _path(self, name: str) -> Path:
        parts = PurePosixPath(name)
        if parts.is_absolute() or ".." in parts.parts:
            raise OSError(errno.EINVAL, "it is not a name below the directory", name)
        return self._root / parts

    def list(self, prefix: str = "") -> Iterator[StoredObject]:
        for entry, error in self._walk(prefix):
            if error is not None:
                raise error
            yield entry

    def list_readable(self, prefix: str = "") -> Iterator[tuple[StoredObject, OSError | None]]:
        return self._walk(prefix)

    def _walk(self, prefix: str) -> Iterator[tuple[StoredObject, OSError | None]]:
        failures: list[OSError] = []
        for folder, names in walk(self._path(prefix), failures.append):
            for path in (folder / name for name in names if not TEMPORARY.fullmatch(name)):
                try:
                    yield _entry(path.relative_to(self._root).as_posix(), status_of(path)), None
                except OSError as exc:
                    failures.append(exc)
        for error in failures:
            # A file that was deleted after its folder was read is not listed.
            if not isinstance(error, FileNotFoundError):
                yield StoredObject(os.path.relpath(error.filename, self._root), 0, 0), error

    def children(self, prefix: str = "") -> tuple[Sequence[StoredObject], Sequence[str]]:
        folder = self._path(prefix)
        entries, folders = list[StoredObject](), list[str]()
        for name in sorted(os.listdir(folder)) if folder.is_dir() else ():
            child = str(PurePosixPath(prefix, name))
            # A file may be removed, or a link lead nowhere.
            with suppress(FileNotFoundError):
                status = status_of(folder / name)
                if stat.S_ISDIR(status.st_mode):
                    folders.append(child)
                elif stat.S_ISREG(status.st_mode):
                    entries.append(_entry(child, status))
        return entries, folders

    def may_be_folder(self) -> bool:
        return self._root.is_dir()

    def stat(self, name: str = "") -> StoredObject:
        return _entry(name, status_of(self._path(name)))

    def open(self, name: str = "", entry: StoredObject | None = None) -> BinaryIO:
        file = open_to_read(self._path(name))
        if entry is not None and _version(os.fstat(file.fileno())) != entry.version:
            file.close()
            raise _changed(self._path(name))
        return file

    def read(self, name: str = "") -> bytes:
        with open_to_read(self._path(name)) as file:
            return file.read()

    def read_range(self, name: str, start: int, length: int, version: str = "") -> bytes:
        path = self._path(name)
        with open_to_read(path) as file:
            status = os.fstat(file.fileno())
            if version and version != _version(status):
                raise _changed(path)
            return os.pread(file.fileno(), max(0, min(length, status.st_size - start)), start)

    def put(self, name: str, data: bytes) -> str:
        replace_file(self._prepare(name), data, FILE_MODE)
        return ""

    def put_file(self, name: str, path: Path) -> str:
        target = self._prepare(name)
        with temporary_path(target) as temporary:
            copy_file(path, temporary, FILE_MODE)
            temporary.replace(target)
        sync_folder(target.parent)
        return ""

    def put_if_absent(self, name: str, data: bytes) -> str:
        target = self._prepare(name)
        with temporary_file(target, data, FILE_MODE) as temporary:
            link_file(temporary, target)
        sync_folder(target.parent)
        return ""

    def delete(self, name: str) -> None:
        path = self._path(name)
        with suppress(FileNotFoundError):
            path.unlink()
            sync_folder(path.parent)

    def move(self, name: str, target: str) -> None:
        source, path = self._path(name), self._prepare(target)
        source.replace(path)
        sync_folder(path.parent)
        sync_folder(source.parent)

    def _prepare(self, name: str) -> Path:
        """Return the path of a new object after creating its folder."""
        target = self._path(name)
        self._root.mkdir(FOLDER_MODE, parents=True, exist_ok=True)
        make_folders(self._root, target.parent, FOLDER_MODE)
        if target.parent not in self._cleaned:
            self._cleaned.add(target.parent)
            with suppress(OSError):  # Temporary files of killed writers do no harm.
                remove_temporaries(target.parent, time.time() - ABANDONED_AFTER_S)
        return target

    @contextmanager
    def lock(self, name: str) -> Iterator[PlaceLock]:
        path = self._root / name
        with translating_errors("write", path):
            path.parent.mkdir(FOLDER_MODE, parents=True, exist_ok=True)
            descriptor = lock_file(path)
        if descriptor is None:
            raise locked_error(self)
        with closing_fd(descriptor):
            yield PlaceLock(descriptor)


def _entry(name: str, status: os.stat_result) -> StoredObject:
    return StoredObject(name, status.st_size, status.st_mtime_ns, _version(status))


def _version(status: os.stat_result) -> str:
    return f"{status.st_dev}-{status.st_ino}-{status.st_mtime_ns}"


def _changed(path: Path) -> ChangedError:
    return ChangedError(errno.ESTALE, "it changed while it was read", str(path))


def locked_error(place: Place) -> OutputError:
    """Return the error of a run that finds a place locked by another one."""
    return OutputError(
        f"another run writes to {place}",
        hint="Wait until it has ended. The lock of a killed run expires after a few seconds.",
    )


Item = TypeVar("Item")
Result = TypeVar("Result")


def map_concurrently(
    function: Callable[[Item], Result], items: Iterable[Item], *, is_remote: bool = True
) -> Iterator[Result]:
    """Iterate over the results of a function in the order of the items.

    For remote places many calls run at the same time, because each costs a round trip; for local
    files one call at a time. At most ``4 * CONCURRENT_REQUESTS`` results wait to be consumed.
    """
    if not is_remote:
        yield from map(function, items)
        return
    iterator = iter(items)
    with ThreadPoolExecutor(CONCURRENT_REQUESTS, "nsq-storage") as threads:
        while batch := list(islice(iterator, 4 * CONCURRENT_REQUESTS)):
            yield from threads.map(function, batch)


def failure_of(exc: OSError, doing: str, subject: object) -> NsqError:
    """Return the error with which a command ends: "cannot read s3://b/x (no answer in time)".

    ``subject`` is the place, in case the error does not name the object.
    """
    kinds = {UnreachableError: ConnectionFailed, DeniedError: RefusedError}
    kind = kinds.get(type(exc), OutputError)
    return kind(f"cannot {doing} {exc.filename or subject} ({exc.strerror or exc})")


@contextmanager
def translating_errors(doing: str, subject: object) -> Iterator[None]:
    """Raise the failures of a file system or store as `failure_of` returns them."""
    try:
        yield
    except OSError as exc:
        raise failure_of(exc, doing, subject) from exc


def hash_of(path: Path) -> str:
    """Return the SHA-256 of a file, in hex. Raises ``OSError``."""
    with open_to_read(path) as file:
        return hashlib.file_digest(file, "sha256").hexdigest()  # type: ignore[arg-type]


def refuse_nested(option: str, output: Place, other: Place) -> None:
    """Refuse an output inside the input or the reverse: the output would be read as input.

    Raises `ConfigurationError`.
    """
    places = [p if p.is_remote else LocalPlace(p.path.resolve()) for p in (output, other)]
    # A local root is "file:////" with the slash that ends a folder's name.
    outer, inner = (f"{place.hadoop_url}/".replace("//", "/") for place in places)
    if outer.startswith(inner) or inner.startswith(outer):
        raise ConfigurationError(
            f"{option} {output} and {other} must not contain each other",
            hint="Give a place beside it.",
        )
