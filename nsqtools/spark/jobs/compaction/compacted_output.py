"""The layout of the output, the manifests in it, and how one partition replaces another.

    topic=clicks/date=2026-11-21/           a partition, named as Hive and Spark do
        part-00000-....zstd.parquet
        _manifest.json                      what it was made from and what it holds
    _compaction/2026-11-21.json             the manifests of a day, for people and programs
    _compaction/lock                        held while a compaction runs
    _staging/topic=clicks/date=2026-11-21/  a partition in the making, or one that was replaced

Spark does not read names that begin with ``_``. The manifest is the last file written into a
partition in the making: one that has it is whole and verified. Two directories are exchanged in one
step where the system can do that (Linux, most local file systems). Elsewhere the old one is moved
away first, and `recover` completes that if it was interrupted.

The manifest in the partition's directory is authoritative; the files in ``_compaction`` are derived
from them, and may be removed.
"""

from __future__ import annotations

import ctypes
import errno
import json
import os
import shutil
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from datetime import date
from pathlib import Path
from typing import Any

from nsqtools.errors import ConfigurationError, OutputError
from nsqtools.files.durable import replace_file, sync_folder
from nsqtools.files.opening import lock_file
from nsqtools.spark.jobs.compaction.inventory import CountedFile, Slot
from nsqtools.spark.packages import DELTA_LOG

SUMMARIES = "_compaction"
STAGING = "_staging"
MANIFEST = "_manifest.json"
LOCK = "lock"
NULL = "__HIVE_DEFAULT_PARTITION__"
REPLACED = ".replaced"

_ESCAPED = set("\"#%'*/:=?\\\x7f{[]^") | {chr(code) for code in range(1, 32)}
_RENAME_EXCHANGE = 2
_AT_FDCWD = -100
_CANNOT_EXCHANGE = {errno.ENOSYS, errno.EINVAL, errno.EOPNOTSUPP}


def folder_of(slot: Slot) -> Path:
    """Return the partition's directory, relative to the output, with Spark's escapes."""
    topic = NULL if slot.topic is None else "".join(map(_escape, slot.topic))
    day = NULL if slot.day is None else slot.day.isoformat()
    return Path(f"topic={topic}", f"date={day}")


def _escape(character: str) -> str:
    return f"%{ord(character):02X}" if character in _ESCAPED else character


def data_files(folder: Path) -> list[Path]:
    """Return the files of a partition that Spark reads, in order."""
    return sorted(path for path in folder.glob("*.parquet") if path.name[0] not in "._")


class CompactionOutput:
    """The directory that compaction writes. Methods raise `OutputError`."""

    def __init__(self, root: Path) -> None:
        self.root = root.absolute()

    def final(self, slot: Slot) -> Path:
        """Where a partition is."""
        return self.root / folder_of(slot)

    def staged(self, slot: Slot) -> Path:
        """Where a partition is made."""
        return self.root / STAGING / folder_of(slot)

    def check(self) -> None:
        """Refuse a directory that holds something else. Raises `ConfigurationError`."""
        if not self.root.exists():
            return
        if not self.root.is_dir():
            raise ConfigurationError(f"{self.root} is not a directory")
        names = {path.name for path in self.root.iterdir() if not path.name.startswith(".")}
        if DELTA_LOG in names:
            raise ConfigurationError(f"{self.root} is a Delta table", hint="Add --format delta.")
        if not names or SUMMARIES in names:
            return
        hint = "Give a directory of its own, or one that nsq spark compact has written."
        if "_spark_metadata" in names:
            hint = "It is the output of nsq spark ingest (or another stream). " + hint
        raise ConfigurationError(
            f"{self.root} holds files that compaction did not write", hint=hint
        )

    @contextmanager
    def locked(self) -> Iterator[None]:
        """Make the directory, and keep other compactions out of it."""
        with naming_path(self.root):
            (self.root / SUMMARIES).mkdir(parents=True, exist_ok=True)
            descriptor = lock_file(self.root / SUMMARIES / LOCK)
        if descriptor is None:
            raise OutputError(f"another compaction writes to {self.root}")
        try:
            yield
        finally:
            os.close(descriptor)

    def manifests(self) -> dict[Slot, Manifest]:
        """Read those of all partitions."""
        return read_manifests(self)

    def missing(self, manifest: Manifest) -> list[str]:
        """Return the files of a partition that are gone, or are not what was verified."""
        return missing_files(self, manifest)

    def summarise(self, manifests: Iterable[Manifest]) -> None:
        """Write the manifest of each day that is not up to date."""
        summarise(self, manifests)

    def recover(self) -> None:
        """Complete, or remove, what an interrupted run left."""
        with naming_path(self.root):
            left = sorted((self.root / STAGING).glob("topic=*/date=*"))
            for staged in left:
                if not staged.name.endswith(REPLACED):
                    self._complete(staged, staged.name, is_whole=(staged / MANIFEST).exists())
            for replaced in left:
                if replaced.name.endswith(REPLACED):
                    self._complete(replaced, replaced.name.removesuffix(REPLACED), is_whole=True)

    def _complete(self, left: Path, name: str, *, is_whole: bool) -> None:
        final = self.root / left.parent.name / name
        if is_whole and not final.exists():
            _move(left, final)
        else:
            shutil.rmtree(left)

    def tidy(self) -> None:
        """Remove empty staging directories."""
        for folder, _, _ in os.walk(self.root / STAGING, topdown=False):
            try:
                Path(folder).rmdir()
            except OSError:  # what could not be completed waits there for `recover`
                pass

    def take_place(self, slot: Slot) -> None:
        """Put a staged partition, which must be whole, in place of the one that is there."""
        staged, final = self.staged(slot), self.final(slot)
        with naming_path(staged):
            _sync(staged)
            if not final.exists():
                _move(staged, final)
                return
            if not exchange(staged, final):
                replaced = staged.with_name(staged.name + REPLACED)
                final.rename(replaced)
                _move(staged, final)
                staged = replaced
            sync_folder(final.parent)
            shutil.rmtree(staged)


def exchange(one: Path, other: Path) -> bool:
    """Exchange two directories in one step; return False where that is not supported."""
    rename = getattr(ctypes.CDLL(None, use_errno=True), "renameat2", None)
    if rename is None:
        return False
    if not rename(_AT_FDCWD, bytes(one), _AT_FDCWD, bytes(other), _RENAME_EXCHANGE):
        return True
    if ctypes.get_errno() in _CANNOT_EXCHANGE:
        return False
    raise OSError(ctypes.get_errno(), os.strerror(ctypes.get_errno()), str(other))


def _move(source: Path, target: Path) -> None:
    target.parent.mkdir(parents=True, exist_ok=True)
    source.rename(target)
    sync_folder(target.parent)
    sync_folder(target.parent.parent)


def _sync(folder: Path) -> None:
    """Make files durable that Spark has written: archives are deleted because of them."""
    for path in folder.iterdir():
        descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
        try:
            os.fsync(descriptor)
        finally:
            os.close(descriptor)
    sync_folder(folder)


@contextmanager
def naming_path(path: Path) -> Iterator[None]:
    """Turn an ``OSError`` into an `OutputError` that names a path."""
    try:
        yield
    except OSError as exc:
        raise OutputError(f"cannot write {exc.filename or path} ({exc.strerror})") from exc


VERSION = 1
UNDATED_NAME = "undated"


@dataclass(frozen=True, slots=True)
class Input:
    """An archive as it was when it was read, and what of it is in the partition.

    ``messages`` is None where only reading counts them. One that ``is_damaged`` may have lost some.
    """

    file: str
    key: str
    """See `CountedFile`."""
    size: int
    mtime_ns: int
    members: int
    messages: int | None
    is_damaged: bool = False

    def is_of(self, content: CountedFile) -> bool:
        """Whether it is this file, unchanged; one with a head may have moved."""
        has_moved = self.file != str(content.path)
        return (self.key, self.size) == (content.key, content.size) and (
            has_moved or self.mtime_ns == content.mtime_ns
        )


@dataclass(frozen=True, slots=True)
class PartitionTotals:
    """The content of a partition. ``checksum`` is the XOR of the hashes of all rows."""

    rows: int = 0
    body_bytes: int = 0
    checksum: int = 0


@dataclass(frozen=True, slots=True)
class Manifest:
    """A partition: all archives that went into it, over all runs, and what it holds."""

    topic: str | None
    date: str | None
    compacted_at: str
    inputs: tuple[Input, ...]
    rows_read: int
    duplicates_removed: int
    rows_written: int
    body_bytes: int
    checksum: str
    files: Mapping[str, int]
    """Name and size of each Parquet file."""
    version: int = VERSION

    @property
    def slot(self) -> Slot:
        return Slot(self.topic, date.fromisoformat(self.date) if self.date else None)

    @property
    def known(self) -> dict[str, Input]:
        """The inputs by their keys."""
        return {each.key: each for each in self.inputs}


def encode_manifest(manifest: Manifest) -> str:
    """Return it as text."""
    return _text(asdict(manifest))


def decode_manifest(document: dict[str, Any]) -> Manifest:
    """Read what `encode_manifest` made. Raises ``ValueError``, ``KeyError`` and ``TypeError``."""
    if document["version"] != VERSION:
        raise ValueError(f"it is of version {document['version']}, not {VERSION}")
    inputs = tuple(Input(**each) for each in document.pop("inputs"))
    return Manifest(inputs=inputs, **document)


def write_manifest(folder: Path, manifest: Manifest) -> None:
    """Write it into a partition's directory. Raises `OutputError`."""
    _write(folder / MANIFEST, asdict(manifest))


def read_manifest(folder: Path) -> Manifest | None:
    """Read a partition's manifest; None where there is no partition.

    Raises `OutputError` when it cannot be read, or files are there without one.
    """
    path = folder / MANIFEST
    try:
        return decode_manifest(json.loads(path.read_text("utf-8")))
    except FileNotFoundError:
        if not folder.exists():
            return None
        raise OutputError(
            f"{folder} has no {MANIFEST}: compaction did not write it",
            hint="Move it away, or give another --output.",
        ) from None
    except (OSError, ValueError, TypeError, KeyError) as exc:
        raise OutputError(f"cannot read {path} ({exc})") from exc


def read_manifests(output: CompactionOutput) -> dict[Slot, Manifest]:
    """Read those of all partitions. Raises `OutputError`."""
    manifests = (read_manifest(folder) for folder in output.root.glob("topic=*/date=*"))
    return {manifest.slot: manifest for manifest in manifests if manifest is not None}


def missing_files(output: CompactionOutput, manifest: Manifest) -> list[str]:
    """Return the files of a partition that are gone, or are not what was verified."""
    folder = output.final(manifest.slot)
    found = {path.name: path.stat().st_size for path in data_files(folder)}
    return [str(folder / name) for name, size in manifest.files.items() if found.get(name) != size]


def summarise(output: CompactionOutput, manifests: Iterable[Manifest]) -> None:
    """Write the manifest of each day that is not up to date. Raises `OutputError`."""
    days: dict[str, list[dict[str, Any]]] = {}
    for manifest in manifests:
        days.setdefault(manifest.date or UNDATED_NAME, []).append(asdict(manifest))
    for name, partitions in days.items():
        partitions.sort(key=lambda each: each["topic"] or "")
        document = {"version": VERSION, "date": name, "partitions": partitions}
        path = output.root / SUMMARIES / f"{name}.json"
        if not path.exists() or path.read_text("utf-8") != _text(document):
            _write(path, document)


def _write(path: Path, document: Mapping[str, Any]) -> None:
    with naming_path(path):
        replace_file(path, _text(document).encode(), 0o666)


def _text(document: Mapping[str, Any]) -> str:
    return json.dumps(document, indent=2, ensure_ascii=False) + "\n"
