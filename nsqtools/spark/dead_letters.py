"""Rows that were not published, with the reason, in a file for each partition.

    dead-<job>-00003.jsonl    {"topic": ..., "body": ..., "reason": "...", "row": 17}

A line is the envelope that all of nsqtools reads, with two keys more: ``nsq pub --format jsonl``
publishes the file when the cause is mended. Columns that the rows did not have are empty there.

The file appears whole, when its task ends, and replaces that of another attempt of the task: what
is in it does not depend on how often the task was tried. A task with a ledger does not see again
the rows it is done with, so it goes on with the file that its earlier attempt left.
"""

from __future__ import annotations

import json
import os
from pathlib import Path
from types import TracebackType
from typing import IO, Self

from nsqtools.errors import OutputError
from nsqtools.files.durable import replace_file, sync_folder
from nsqtools.records.envelope import Envelope, encode_many

NO_ID = b"0" * 16


class DeadLetters:
    """The file of one partition. ``name`` is that of the job, ``attempt`` sets apart attempts that
    begin anew; with ``done`` the lines of that many rows from the beginning are kept.

    Raises `OutputError` for whatever cannot be written.
    """

    def __init__(
        self, folder: Path, name: str, partition: int, *, attempt: int = 0, done: int | None = None
    ) -> None:
        self.path = folder / f"dead-{name}-{partition:05d}.jsonl"
        suffix = "part" if done is not None else f"{attempt}.part"
        self._part = folder / f".{self.path.name}.{suffix}"
        self._file: IO[bytes] | None = None
        self._is_kept = done is not None
        if done is not None:
            self._keep(done)

    def write(self, row: int, message: Envelope, reason: str) -> None:
        """Add a row, given by its number in the partition."""
        line = encode_many(message.topic, message.nsqd, [message])
        more = json.dumps({"reason": reason, "row": row})[1:]
        self._write(line.rstrip(b"\n}") + b", " + more.encode() + b"\n")

    def sync(self) -> None:
        """Make what was written durable."""
        if self._file is not None:
            try:
                self._file.flush()
                os.fsync(self._file.fileno())
            except OSError as exc:
                raise self._error(exc) from exc

    def finish(self) -> None:
        """Give the file its name, if there is anything in it."""
        if self._file is None:
            return
        self.sync()
        try:
            self._part.replace(self.path)
            sync_folder(self.path.parent)
        except OSError as exc:
            raise self._error(exc) from exc

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        value: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        if self._file is None:
            return
        self._file.close()
        if kind is not None and not self._is_kept:
            self._part.unlink(missing_ok=True)

    def _keep(self, done: int) -> None:
        """Take over what an earlier attempt wrote of rows that are done with."""
        source = self._part if self._part.exists() else self.path
        try:
            lines = source.read_bytes().splitlines(keepends=True)
            kept = [line for line in lines if _row_of(line) < done]
            if kept:
                replace_file(self._part, b"".join(kept))
                self._file = self._part.open("ab")
            else:
                self._part.unlink(missing_ok=True)
        except FileNotFoundError:
            pass
        except OSError as exc:
            raise self._error(exc) from exc

    def _write(self, line: bytes) -> None:
        try:
            if self._file is None:
                self._part.parent.mkdir(parents=True, exist_ok=True)
                self._file = self._part.open("wb")
            self._file.write(line)
        except OSError as exc:
            raise self._error(exc) from exc

    def _error(self, exc: OSError) -> OutputError:
        return OutputError(f"cannot write {self.path} ({exc.strerror})")


def _row_of(line: bytes) -> float:
    """The number of the row; a line cut by a kill belongs to one that is not done with."""
    try:
        return int(json.loads(line)["row"])
    except (ValueError, KeyError, TypeError):
        return float("inf")
