"""Where data is: the paths of all commands and data sources, parsed in one place.

A location is a path of a mounted file system (or a ``file:`` URL), or a place in an object store
(``s3://``, ``s3a://``, ``gs://``, ``az://``, ``abfss://``). Any other scheme is refused before
anything runs. Taken for a relative path, ``s3n://bucket/lake`` would be a local directory named
``s3n:``, and what was verified there would justify deleting the only other copy.

What is in a store is reached in two ways: by Python through `archive.storage`, on the driver and on
executors, and by Spark through Hadoop's file systems, which want ``s3a`` for ``s3``.

Trap: `pathlib.Path` joins the slashes of a URL, so text is parsed before it becomes a path; what
already is one is recognized all the same.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from functools import cache
from pathlib import Path

from nsqtools.archive.storage import (
    OBJECT_SCHEMES,
    Entry,
    LocalStorage,
    Storage,
    local_path,
    scheme_of,
)
from nsqtools.archive.storage_objects import open_storage, parts_of
from nsqtools.errors import ConfigurationError

SHARED = "Give a directory that this machine and the executors have mounted under one path."
SPARKS_SCHEMES = {"s3": "s3a", "az": "abfss"}


@dataclass(frozen=True, slots=True)
class StoredPlace:
    """An object, or all below a prefix, in an object store. ``key`` is relative to the bucket."""

    bucket: str
    """With its scheme: ``s3://bucket``."""
    key: str

    def __str__(self) -> str:
        return f"{self.bucket}/{self.key}" if self.key else self.bucket

    def __truediv__(self, name: str) -> StoredPlace:
        return StoredPlace(self.bucket, "/".join(filter(None, (self.key, name))))

    @property
    def name(self) -> str:
        return self.key.rpartition("/")[2]

    @property
    def storage(self) -> Storage:
        """The bucket, as it is open in this process."""
        return _bucket(self.bucket)

    @property
    def parent(self) -> StoredPlace:
        return StoredPlace(self.bucket, self.key.rpartition("/")[0])

    @property
    def parents(self) -> list[StoredPlace]:
        """The folders above it, the next one first."""
        return [self.parent, *self.parent.parents] if self.key else []

    def children(self) -> tuple[list[Entry], list[str]]:
        """Return the objects directly below this prefix, and the names of the folders."""
        entries, folders = self.storage.children(self.key)
        return list(map(self._below, entries)), [each[self._begin :] for each in folders]

    def below(self) -> Iterable[Entry]:
        """Iterate over the objects below this prefix, their names relative to it."""
        return map(self._below, self.storage.list(self.key))

    @property
    def _begin(self) -> int:
        return len(self.key) + 1 if self.key else 0

    def _below(self, entry: Entry) -> Entry:
        return entry._replace(name=entry.name[self._begin :])


Location = Path | StoredPlace


@cache
def _bucket(url: str) -> Storage:
    return open_storage(url)


def parse_place(text: str) -> Location:
    """Return the path, or the place in an object store, that a location names.

    Raises ``ValueError`` for any other.
    """
    try:
        if scheme_of(text) not in OBJECT_SCHEMES:
            return local_path(text)
        scheme, bucket, key = parts_of(text)
        return StoredPlace(f"{scheme}://{bucket}", key)
    except ConfigurationError as exc:
        raise ValueError(f"{exc}. {exc.hint}".rstrip(". ")) from None


def file_at(place: Location) -> tuple[Storage, str]:
    """Return the storage that has a file, as it is open in this process, and its name there."""
    if isinstance(place, Path):
        return LocalStorage(place.parent), place.name
    return place.storage, place.key


def absolute(place: Location) -> Location:
    """Return a place that means the same whatever the working directory is."""
    return place.absolute() if isinstance(place, Path) else place


def spark_url(place: Location) -> str:
    """Return how to name a place to Spark: without a scheme it may mean another file system.

    Hadoop takes what follows ``file://`` as it is, so nothing is escaped.
    """
    if isinstance(place, Path):
        return f"file://{place.absolute()}"
    scheme, _, rest = str(place).partition("://")
    return f"{SPARKS_SCHEMES.get(scheme, scheme)}://{rest}"


def refuse_nested(option: str, output: Location, other: Location) -> None:
    """Refuse an output in what is read, or the other way round: it would be taken for a part of it.

    Raises `ConfigurationError`.
    """
    real = (each.resolve() if isinstance(each, Path) else each for each in (output, other))
    one, two = (f"{spark_url(each)}/".replace("//", "/") for each in real)
    if one.startswith(two) or two.startswith(one):
        raise ConfigurationError(
            f"{option} {output} and {other} must not contain each other",
            hint="Give a place beside it.",
        )
