"""Progress of the tasks of a job, so that a retried task continues where it stopped.

A directory with one file for each partition. A line is appended before rows are sent: how many rows
from the beginning are done, and how many may have been sent. The last whole line counts; a line cut
by a kill is ignored, because the one before it is true too, only older. So nothing is left out, and
a kill can duplicate only what had been sent and was not yet noted as done: the window of
unconfirmed batches. Those rows are counted as ``repeated`` when they are sent again.

This holds only if the rows of a partition come in the same order each time: no shuffle before the
writer. It is verified: each line has a checksum of the rows done, which is compared before anything
is skipped.

One task at a time holds the lock of a partition's file, and one replay at a time that of the
directory. A process that is killed loses its locks at once.

In an object store nothing can be appended to, synced or locked:

    LEDGER/part-00003/000000000017.json          the last state of a partition, see `lease`
    DEAD/dead-<job>-00003-000000000421.jsonl     refused rows from row 421 on

An object takes as long to write as some thousand rows take to publish. So the ledger notes ahead
that `AHEAD_ROWS` more may have been sent, and writes again when these are used up: a kill repeats
at most that many rows of a partition, and the window of unconfirmed batches. A task that begins
writes the next number of its partition. An attempt of it that still runs (the workers of a driver
that was killed do, for a moment) cannot write that number any more, and ends.
"""

from __future__ import annotations

import json
import os
import time
import zlib
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Self

from nsqtools.archive.lease import StoredNumbers
from nsqtools.archive.location import Location, StoredPlace
from nsqtools.archive.storage import failing
from nsqtools.archive.storage_objects import open_storage
from nsqtools.errors import ConfigurationError, NsqError
from nsqtools.files.durable import sync_folder, write_all
from nsqtools.files.opening import open_to_write, try_lock
from nsqtools.records.envelope import Envelope
from nsqtools.spark.publishing.row_outcomes import LocalDeadLetters, dead_letter, row_of

VERSION = 1
JOB, LOCK = "job.json", "lock"

LOCK_WAIT_S = 10.0  # workers of a driver that was killed end a moment after it
POLL_S = 0.05
SYNC_INTERVAL_S = 1.0


@dataclass(slots=True)
class LedgerEntry:
    """A line: ``done`` rows from the beginning, with ``checksum`` over their bodies; ``sent`` rows
    may have reached nsqd, and ``repeated`` of them more than once. The counts are of what is done
    with: confirmed by topic, and the refused, of which ``dead_lettered`` were put aside."""

    done: int = 0
    sent: int = 0
    checksum: int = 0
    repeated: int = 0
    rejected: int = 0
    unknown: int = 0
    dead_lettered: int = 0
    topics: dict[str, int] = field(default_factory=dict)


def prepare_ledger(folder: Location, job: str) -> None:
    """Make the place for ``job``, a text that is the same only for the same job.

    Raises `ConfigurationError` where it belongs to another job.
    """
    content = (json.dumps({"version": VERSION, "job": job}, indent=1) + "\n").encode()
    place = open_storage(str(folder))
    with failing("write the ledger", folder):
        names = [entry.name for entry in place.list()]
        if JOB not in names and any(name.startswith("part-") for name in names):
            raise ConfigurationError(
                f"{folder} has parts of a ledger and no {JOB}", hint="Give another directory."
            )
        try:
            place.put_if_absent(JOB, content)
        except FileExistsError:
            pass
        found = place.read(JOB)
    if found != content:
        raise ConfigurationError(
            f"{folder} is the ledger of another job",
            hint="Give another directory; everything is published again then.",
        )


def part_path(folder: Path, partition: int) -> Path:
    """Where the lines of a partition stand."""
    return folder / f"part-{partition:05d}.jsonl"


class LedgerPart:
    """The file of one partition, locked. ``entry`` is its last line.

    Raises `NsqError` when another task has it, `ConfigurationError` when it is not a ledger.
    """

    def __init__(self, folder: Path, partition: int, *, wait_s: float = LOCK_WAIT_S) -> None:
        self.path = part_path(folder, partition)
        self.partition = partition
        self._synced_at = time.monotonic()
        with failing("write", self.path):
            flags = os.O_RDWR | os.O_CREAT | os.O_APPEND
            self._descriptor = open_to_write(self.path, flags, 0o640)
            sync_folder(folder)  # or the file may be nameless after a power failure
        try:
            self._lock(time.monotonic() + wait_s)
            self.entry = self._read()
        except BaseException:
            os.close(self._descriptor)
            raise

    def note(self) -> None:
        """Append ``entry`` as it is now. Raises `OutputError`."""
        line = json.dumps(asdict(self.entry)).encode() + b"\n"
        with failing("write", self.path):
            write_all(self._descriptor, line)
            if time.monotonic() - self._synced_at > SYNC_INTERVAL_S:
                self.sync()

    @property
    def is_due(self) -> bool:
        """Whether `note` will write."""
        return True

    def finish(self) -> None:
        """Append ``entry`` as it is now, and make it survive a power failure."""
        self.note()
        self.sync()

    def sync(self) -> None:
        """Make what was noted survive a power failure."""
        os.fsync(self._descriptor)
        self._synced_at = time.monotonic()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        os.close(self._descriptor)

    def _lock(self, until: float) -> None:
        with failing("lock", self.path):
            while not try_lock(self._descriptor):
                if time.monotonic() >= until:
                    raise NsqError(
                        f"partition {self.partition} is being published by another task, "
                        f"which has {self.path} locked",
                        hint="Set spark.speculation=false, and run a job once at a time.",
                    )
                time.sleep(POLL_S)

    def _read(self) -> LedgerEntry:
        """The last whole line; a torn one after it is cut off, or it would corrupt the next."""
        with failing("read", self.path):
            os.lseek(self._descriptor, 0, os.SEEK_SET)
            with open(self._descriptor, "rb", closefd=False) as file:
                content = file.read()
            whole = content.rpartition(b"\n")[0]
            if len(whole) + 1 < len(content):
                os.ftruncate(self._descriptor, len(whole) + 1 if whole else 0)
        if not whole:
            return LedgerEntry()
        return decode_entry(whole.rpartition(b"\n")[2], self.path)


def decode_entry(line: bytes, path: Location) -> LedgerEntry:
    """Read a line. Raises `ConfigurationError`."""
    try:
        entry = LedgerEntry(**json.loads(line))
        numbers = [getattr(entry, name) for name in LedgerEntry.__slots__ if name != "topics"]
        if min(numbers) >= 0 and all(count >= 0 for count in entry.topics.values()):
            return entry
    except (ValueError, TypeError, AttributeError):
        pass
    raise ConfigurationError(f"{path} is not the ledger of a job", hint="Give another directory.")


def read_entries(folder: Path) -> list[LedgerEntry]:
    """The entries of all partitions, without locking, for a report. Raises as `LedgerPart`."""
    entries = []
    for path in sorted(folder.glob("part-*.jsonl")):
        whole = path.read_bytes().rpartition(b"\n")[0]
        if whole:
            entries.append(decode_entry(whole.rpartition(b"\n")[2], path))
    return entries


AHEAD_ROWS = 10_000
OBJECT_BYTES = 8 << 20


class StoredLedgerPart:
    """The progress of one partition; as `LedgerPart`."""

    def __init__(self, folder: StoredPlace, partition: int) -> None:
        self.partition = partition
        self._numbers = StoredNumbers(folder / f"part-{partition:05d}")
        with self._errors():
            self._numbers.number = self._numbers.latest()
            self.entry = LedgerEntry()
            if self._numbers.number:
                line = self._numbers.read(self._numbers.number)
                self.entry = decode_entry(line, self._numbers.place)
        self._noted_sent = self.entry.sent
        self._write(self.entry)

    @property
    def is_due(self) -> bool:
        """Whether `note` will write."""
        return self.entry.sent > self._noted_sent

    def note(self) -> None:
        """Note that the rows sent, and some more, may have been. Raises `OutputError`."""
        if self.is_due:
            self._write(replace(self.entry, sent=self.entry.sent + AHEAD_ROWS))

    def finish(self) -> None:
        """Note ``entry`` as it is now. Raises `OutputError`."""
        self._write(self.entry)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        pass

    def _write(self, entry: LedgerEntry) -> None:
        with self._errors():
            self._numbers.append(json.dumps(asdict(entry)).encode())
        self._noted_sent = entry.sent

    @contextmanager
    def _errors(self) -> Iterator[None]:
        with failing("use", self._numbers.place):
            try:
                yield
            except FileExistsError:
                raise NsqError(
                    f"partition {self.partition} is being published by another task, "
                    f"which writes to {self._numbers.place}",
                    hint="Set spark.speculation=false, and run a job once at a time.",
                ) from None


def read_stored_entries(folder: StoredPlace) -> list[LedgerEntry]:
    """The entries of all partitions, for a report. Raises ``OSError``, `ConfigurationError`."""
    parts = {entry.name.partition("/")[0] for entry in folder.below()}
    entries = []
    for part in sorted(name for name in parts if name.startswith("part-")):
        numbers = StoredNumbers(folder / part)
        if latest := numbers.latest():
            entries.append(decode_entry(numbers.read(latest), numbers.place))
    return entries


class StoredDeadLetters:
    """The dead letters of one partition; as `LocalDeadLetters`.

    They are written as they come, in several objects where they are many. ``done`` is 0 without a
    ledger: what an earlier attempt wrote is removed.
    """

    def __init__(self, folder: StoredPlace, name: str, partition: int, *, done: int | None) -> None:
        self._folder = folder
        self._prefix = f"dead-{name}-{partition:05d}-"
        self._is_kept = done is not None
        self._lines: list[bytes] = []
        self._size = 0
        self._first_row = 0
        with failing("write into", self._folder):
            self._keep(done or 0)

    def write(self, row: int, message: Envelope, reason: str) -> None:
        """Add a row, given by its number in the partition."""
        if not self._lines:
            self._first_row = row
        self._lines.append(dead_letter(row, message, reason))
        self._size += len(self._lines[-1])
        if self._size >= OBJECT_BYTES:
            self.sync()

    def sync(self) -> None:
        """Write what there is."""
        if not self._lines:
            return
        content = b"".join(self._lines)
        with failing("write into", self._folder):
            # one attempt's rows may be in another order than another's, and must not be replaced
            name = f"{self._prefix}{self._first_row:012d}-{zlib.crc32(content):08x}.jsonl"
            object = self._folder / name
            object.storage.put(object.key, content)
        self._lines, self._size = [], 0

    def finish(self) -> None:
        """Write what is left."""
        self.sync()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        if kind is not None and not self._is_kept:
            with failing("write into", self._folder):
                self._keep(0)

    def _keep(self, done: int) -> None:
        """Keep what an earlier attempt wrote of rows that are done."""
        for entry in list(self._folder.below()):
            if not entry.name.startswith(self._prefix):
                continue
            object = self._folder / entry.name
            lines = object.storage.read(object.key).splitlines(keepends=True) if done else []
            kept = [line for line in lines if row_of(line) < done]
            if not kept:
                object.storage.delete(object.key)
            elif len(kept) < len(lines):
                object.storage.put(object.key, b"".join(kept))


def open_ledger_part(
    folder: Location, partition: int, *, wait_s: float = LOCK_WAIT_S
) -> LedgerPart | StoredLedgerPart:
    """Open the progress of a partition. Raises as `LedgerPart`."""
    if isinstance(folder, StoredPlace):
        return StoredLedgerPart(folder, partition)
    return LedgerPart(folder, partition, wait_s=wait_s)


def open_dead_letters(
    folder: Location, name: str, partition: int, *, attempt: int, done: int | None
) -> LocalDeadLetters | StoredDeadLetters:
    """Open the dead letters of a partition. Raises `OutputError`."""
    if isinstance(folder, StoredPlace):
        return StoredDeadLetters(folder, name, partition, done=done)
    return LocalDeadLetters(folder, name, partition, attempt=attempt, done=done)
