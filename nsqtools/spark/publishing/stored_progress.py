"""Ledger and dead letters in an object store, where nothing can be appended to, synced or locked.

    LEDGER/part-00003/000000000017.json          the last state of a partition, see `stored_numbers`
    DEAD/dead-<job>-00003-000000000421.jsonl     refused rows from row 421 on

An object takes as long to write as some thousand rows take to publish. So the ledger notes ahead
that `AHEAD_ROWS` more may have been sent, and writes again when these are used up: a kill repeats
at most so many rows of a partition, and the window of unconfirmed batches, instead of the window.

A task that begins writes the next number of its partition. An attempt of it that still runs (the
workers of a driver that was killed do, for a moment) cannot write that number any more, and ends.
"""

from __future__ import annotations

import json
import zlib
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict, replace
from types import TracebackType
from typing import Self

from nsqtools.errors import NsqError, OutputError
from nsqtools.records.envelope import Envelope
from nsqtools.spark.location import Location, StoredPlace
from nsqtools.spark.publishing.ledger import LOCK_WAIT_S, LedgerEntry, LedgerPart, decode_entry
from nsqtools.spark.publishing.row_outcomes import DeadLetters, dead_letter, row_of
from nsqtools.spark.stored_numbers import StoredNumbers

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

    def __exit__(
        self,
        kind: type[BaseException] | None,
        value: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        pass

    def _write(self, entry: LedgerEntry) -> None:
        with self._errors():
            self._numbers.append(json.dumps(asdict(entry)).encode())
        self._noted_sent = entry.sent

    @contextmanager
    def _errors(self) -> Iterator[None]:
        try:
            yield
        except FileExistsError:
            raise NsqError(
                f"partition {self.partition} is being published by another task, "
                f"which writes to {self._numbers.place}",
                hint="Set spark.speculation=false, and run a job once at a time.",
            ) from None
        except OSError as exc:
            raise OutputError(f"cannot use {self._numbers.place} ({exc.strerror})") from exc


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
    """The dead letters of one partition; as `DeadLetters`.

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
        with self._errors():
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
        with self._errors():
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

    def __exit__(
        self,
        kind: type[BaseException] | None,
        value: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        if kind is not None and not self._is_kept:
            with self._errors():
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

    @contextmanager
    def _errors(self) -> Iterator[None]:
        try:
            yield
        except OSError as exc:
            raise OutputError(f"cannot write into {self._folder} ({exc.strerror})") from exc


def open_ledger_part(
    folder: Location, partition: int, *, wait_s: float = LOCK_WAIT_S
) -> LedgerPart | StoredLedgerPart:
    """Open the progress of a partition. Raises as `LedgerPart`."""
    if isinstance(folder, StoredPlace):
        return StoredLedgerPart(folder, partition)
    return LedgerPart(folder, partition, wait_s=wait_s)


def open_dead_letters(
    folder: Location, name: str, partition: int, *, attempt: int, done: int | None
) -> DeadLetters | StoredDeadLetters:
    """Open the dead letters of a partition. Raises `OutputError`."""
    if isinstance(folder, StoredPlace):
        return StoredDeadLetters(folder, name, partition, done=done)
    return DeadLetters(folder, name, partition, attempt=attempt, done=done)
