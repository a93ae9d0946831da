"""The lock on a topic and channel in a directory, and the numbers of its files.

Only one archiver of a topic and channel works in a directory. Its lock is one of the directory's
`FolderLocks`, which need one descriptor for all topics.

A small file counts the files that were ever begun there, ``pid writer <32 hex> <number>``: each
file carries its number in the head of its index, so that whoever reads the archive as a stream can
tell files apart by a few bytes, whatever they are called and wherever they are moved. The writer is
made up at random with the first file: when the count is lost, counting begins again under another
one. Numbers are never used twice; one may be left out.

Versions before 0.2 locked the count itself, so it is looked at whether it is locked.
"""

from __future__ import annotations

import os
import re
import uuid
from pathlib import Path

from nsqtools.archive.layout import Head
from nsqtools.errors import ConfigurationError
from nsqtools.files.durable import blaming, sync_folder
from nsqtools.files.locks import FolderLocks, try_lock
from nsqtools.files.opening import open_to_write

# Of fixed width: it is replaced in place, within one sector, which no crash tears.
_LINE = "{pid:<10} writer {writer} {number:020d}\n"
_PATTERN = re.compile(r"(\d+) +writer ([0-9a-f]{32}) (\d{20})\n")


class TopicLock:
    """Held until `release`. Raises `ConfigurationError` when it is taken, and ``OSError``."""

    def __init__(self, locks: FolderLocks, folder: Path, topic: str, channel: str) -> None:
        self._path = folder / f".{topic}@{channel}.lock"
        self._locks = locks
        self._name = f"{topic}@{channel}"
        self._last: Head | None = None
        is_free = locks.take(self._name)
        try:
            if not is_free or self._is_locked_by_an_early_version():
                raise ConfigurationError(
                    f"{self._holder()} archives channel {channel} of topic {topic} in {folder} "
                    "already",
                    hint="One archiver does for a channel; give another one its own --work-dir.",
                )
        except BaseException:
            if is_free:
                self.release()
            raise

    def next_head(self) -> Head:
        """Return the head of a new file; its number is durable. Raises ``OSError``."""
        descriptor = open_to_write(self._path, os.O_RDWR | os.O_CREAT)
        try:
            with blaming(self._path):
                last = self._last or _read(descriptor)
                is_new = last is None
                last = last or Head(uuid.uuid4().hex, 0)
                head = Head(last.writer, last.number + 1)
                if is_new:
                    os.ftruncate(descriptor, 0)
                line = _LINE.format(pid=os.getpid(), writer=head.writer, number=head.number)
                os.pwrite(descriptor, line.encode(), 0)
                os.fdatasync(descriptor)
        finally:
            os.close(descriptor)
        if self._last is None:
            sync_folder(self._path.parent)
        self._last = head
        return head

    def release(self) -> None:
        """Let others have it."""
        self._locks.release(self._name)

    def _is_locked_by_an_early_version(self) -> bool:
        try:
            descriptor = open_to_write(self._path, os.O_RDWR)
        except FileNotFoundError:
            return False
        try:
            return not try_lock(descriptor)
        finally:
            os.close(descriptor)

    def _holder(self) -> str:
        """Name the process that began the last file, if it still runs."""
        try:
            match = _PATTERN.fullmatch(self._path.read_text("ascii", "replace"))
            if match is not None:
                os.kill(int(match[1]), 0)
                return f"process {match[1]}"
        except OSError:
            pass
        return "another process"


def _read(descriptor: int) -> Head | None:
    match = _PATTERN.fullmatch(os.pread(descriptor, 200, 0).decode("ascii", "replace"))
    return Head(match[2], int(match[3])) if match else None
