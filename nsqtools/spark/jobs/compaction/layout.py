"""Where things are in the output, and how one partition takes the place of another.

    topic=clicks/date=2026-11-21/           a partition, as Hive and Spark name them
        part-00000-....zstd.parquet
        _manifest.json                      what it was made from (see `manifest`)
    _compaction/2026-11-21.json             the manifests of a day, for people and programs
    _compaction/lock                        held while a compaction runs
    _staging/topic=clicks/date=2026-11-21/  a partition in the making, or the one that was replaced

Whatever begins with ``_`` Spark does not read. The manifest is written last into a partition in the
making: one that has it is whole and verified. Two directories change places in one step where the
system can do that (Linux, most local file systems). Elsewhere the old one is moved away first, and
`recover` finishes that when it was interrupted.
"""

from __future__ import annotations

import ctypes
import errno
import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from nsqtools.errors import ConfigurationError, OutputError
from nsqtools.files.durable import sync_folder
from nsqtools.files.locks import try_lock
from nsqtools.spark.jobs.compaction.inventory import Slot

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


class Output:
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
            raise ConfigurationError(f"{self.root} is no directory")
        names = {path.name for path in self.root.iterdir() if not path.name.startswith(".")}
        if not names or SUMMARIES in names:
            return
        hint = "Give a directory of its own, or one that nsq spark compact has written."
        if "_spark_metadata" in names:
            hint = "It is the output of nsq spark ingest (or another stream). " + hint
        raise ConfigurationError(f"{self.root} holds files that no compaction wrote", hint=hint)

    @contextmanager
    def locked(self) -> Iterator[None]:
        """Make the directory, and keep other compactions out of it."""
        with blaming(self.root):
            (self.root / SUMMARIES).mkdir(parents=True, exist_ok=True)
            with (self.root / SUMMARIES / LOCK).open("a") as file:
                if not try_lock(file.fileno()):
                    raise OutputError(f"another compaction writes to {self.root}")
                yield

    def recover(self) -> None:
        """Finish, or throw away, what an interrupted run left."""
        with blaming(self.root):
            left = sorted((self.root / STAGING).glob("topic=*/date=*"))
            for staged in left:
                if not staged.name.endswith(REPLACED):
                    self._settle(staged, staged.name, is_whole=(staged / MANIFEST).exists())
            for replaced in left:
                if replaced.name.endswith(REPLACED):
                    self._settle(replaced, replaced.name.removesuffix(REPLACED), is_whole=True)

    def _settle(self, left: Path, name: str, *, is_whole: bool) -> None:
        final = self.root / left.parent.name / name
        if is_whole and not final.exists():
            _move(left, final)
        else:
            shutil.rmtree(left)

    def tidy(self) -> None:
        """Remove the directories for staging that are empty."""
        for folder, _, _ in os.walk(self.root / STAGING, topdown=False):
            try:
                Path(folder).rmdir()
            except OSError:  # what could not be finished waits there for `recover`
                pass

    def take_place(self, slot: Slot) -> None:
        """Put a staged partition, which must be whole, in place of the one that is there."""
        staged, final = self.staged(slot), self.final(slot)
        with blaming(staged):
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
    """Let two directories change places in one step; return False where that cannot be done."""
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
    """Make files durable that others have written: archives are deleted because of them."""
    for path in folder.iterdir():
        descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
        try:
            os.fsync(descriptor)
        finally:
            os.close(descriptor)
    sync_folder(folder)


@contextmanager
def blaming(path: Path) -> Iterator[None]:
    """Turn an ``OSError`` into an `OutputError` that names a path."""
    try:
        yield
    except OSError as exc:
        raise OutputError(f"cannot write {exc.filename or path} ({exc.strerror})") from exc
