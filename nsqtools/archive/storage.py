"""Where finished archives are kept: a directory, an object store or HDFS, through one interface.

A `Storage` is a place with named objects below it. Names are relative and separated by ``/``. It
keeps no listing and no position, is used from any thread, and is pickled by its URL, so that an
executor of Spark opens the same place with its own credentials.

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
import re
from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import NamedTuple, Protocol
from urllib.parse import unquote

from nsqtools.errors import (
    ConfigurationError,
    ConnectionFailed,
    NsqError,
    OutputError,
    RefusedError,
)
from nsqtools.files.durable import TEMPORARY
from nsqtools.files.opening import open_to_read

OBJECT_SCHEMES = ("s3", "s3a", "gs", "az", "abfss")
HDFS = "hdfs"
REMOTE_SCHEMES = (*OBJECT_SCHEMES, HDFS)
LOCAL_HOSTS = ("", "localhost")
COMPARED_SIZE = 8 << 20
DRAFT_ENDING = len(".0123456789abcdef.tmp")

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


class Draft(NamedTuple):
    """A part of the object ``name`` that is not there yet: its writer is at it, or was killed.

    ``key`` is how the store finds it; ``modified_ns`` is when it was begun or last written to.
    """

    name: str
    key: str
    modified_ns: int


class StoredFile(Protocol):
    """An object that is open for reading, at any position."""

    def seek(self, offset: int, whence: int = 0, /) -> int: ...
    def read(self, size: int = -1, /) -> bytes: ...
    def readlines(self, hint: int = -1, /) -> list[bytes]: ...
    def tell(self) -> int: ...
    def close(self) -> None: ...


class Storage(ABC):
    """A place for objects. ``url`` names it, and opens the same place in another process."""

    url: str

    @abstractmethod
    def where(self, name: str) -> str:
        """Return an object's whole path or URL, to show it to people."""

    @abstractmethod
    def list(self, prefix: str = "") -> Iterator[Entry]:
        """Iterate over everything below the folder ``prefix``, hidden names included.

        In no particular order. A place that is not there is empty, as on an object store.
        """

    @abstractmethod
    def stat(self, name: str) -> Entry:
        """Return what there is to know of an object."""

    @abstractmethod
    def open(self, name: str, entry: Entry | None = None) -> StoredFile:
        """Open an object for reading; close it in the end.

        With an ``entry`` of a listing, raises `ChangedError` when the object is another one now.
        """

    @abstractmethod
    def read_range(self, name: str, start: int, length: int, version: str = "") -> bytes:
        """Return the bytes from ``start``, fewer than ``length`` where the object ends.

        With a ``version``, raises `ChangedError` when the object has another one.
        """

    @abstractmethod
    def read(self, name: str) -> bytes:
        """Return all of a small object."""

    @abstractmethod
    def put(self, name: str, data: bytes) -> str:
        """Write a small object in one piece, durably; one that is there is replaced.

        This and the next two return the version that the store says it has received, "" if it
        does not say: see `verify`.
        """

    @abstractmethod
    def put_file(self, name: str, path: Path) -> str:
        """Write a file of any size, in parts, durably; it appears whole."""

    @abstractmethod
    def put_if_absent(self, name: str, data: bytes) -> str:
        """Write a small object. Raises `FileExistsError` when there is one, whoever wrote it."""

    @abstractmethod
    def delete(self, name: str) -> None:
        """Remove an object; one that is not there is fine."""

    @abstractmethod
    def drafts(self, name: str) -> Iterator[Draft]:
        """Iterate over the drafts of one object. Nothing where the store does not show them."""

    @abstractmethod
    def drafts_below(self, prefix: str = "") -> Iterator[Draft]:
        """Iterate over the drafts of all objects below a folder."""

    @abstractmethod
    def remove_draft(self, draft: Draft) -> None:
        """Remove a draft. A writer that is still at it fails, and has to write it again."""

    def verify(self, name: str, path: Path, version: str = "") -> None:
        """Compare an object with the file that it should be; raise `ChangedError` if it differs.

        ``version`` is what its put returned. Where the store gives no checksum of the content, all
        of it is read back, a range at a time.
        """
        size = path.stat().st_size
        if self.stat(name).size != size or self._hash(name, size) != hash_of(path):
            raise self._differs(name)

    def verify_data(self, name: str, data: bytes, version: str) -> None:
        """Compare a small object with what it should be, as `verify` does."""
        if self.read(name) != data:
            raise self._differs(name)

    def _differs(self, name: str) -> ChangedError:
        return ChangedError(errno.EIO, "what is stored differs from the file", self.where(name))

    def _hash(self, name: str, size: int) -> str:
        content = hashlib.sha256()
        for start in range(0, size, COMPARED_SIZE):
            content.update(self.read_range(name, start, min(COMPARED_SIZE, size - start)))
        return content.hexdigest()


def failure_of(exc: OSError, doing: str, where: object) -> NsqError:
    """Return the error that a command ends with: "cannot read s3://b/x (no answer in time)".

    ``where`` is the place, in case that the error does not name the object.
    """
    kind: type[NsqError] = OutputError
    if isinstance(exc, UnreachableError):
        kind = ConnectionFailed
    elif isinstance(exc, DeniedError):
        kind = RefusedError
    return kind(f"cannot {doing} {exc.filename or where} ({exc.strerror})")


def hash_of(path: Path) -> str:
    """Return the SHA-256 of a file, in hex. Raises ``OSError``."""
    content = hashlib.sha256()
    with open_to_read(path) as file:
        while data := file.read(COMPARED_SIZE):
            content.update(data)
    return content.hexdigest()


def name_of_draft(name: str) -> str | None:
    """Return the name of the file that a hidden one is a draft of; None for any other file."""
    return name[1:-DRAFT_ENDING] if TEMPORARY.fullmatch(name) else None


def scheme_of(text: str) -> str:
    """Return the scheme of a URL in lower case, "" for a path."""
    match = _SCHEME.match(text)
    return match[1].lower() if match else ""


def open_storage(url: str, options: Mapping[str, str] | None = None) -> Storage:
    """Return the storage at a local path or URL; nothing is looked at or asked yet.

    ``options`` are settings of the object store, by obstore's names, or of HDFS (`hdfs_settings`),
    beside those of the environment. Raises `ConfigurationError` for what names no storage, and when
    the package for object stores is not installed.
    """
    scheme = scheme_of(url)
    if scheme in OBJECT_SCHEMES:
        from nsqtools.archive.storage_objects import ObjectStorage

        return ObjectStorage(url, dict(options or {}))
    if scheme == HDFS:
        from nsqtools.archive.storage_hdfs import HDFSStorage

        return HDFSStorage(url, dict(options or {}))
    if options:
        raise ConfigurationError(f"{url} is not an object store and takes no storage options")
    from nsqtools.archive.storage_local import LocalStorage

    return LocalStorage(local_path(url))


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
        known = ", ".join(f"{scheme}://" for scheme in ("file", *REMOTE_SCHEMES))
        raise ConfigurationError(
            f"{text} is not supported as storage", hint=f"Give a local path or one of {known}."
        )
    return Path("/" + unquote(below))
