"""The lock on a topic and channel in a directory: only one archiver of them works there.

The locked file also counts the files that were ever begun there, ``pid writer <32 hex> <number>``:
each file carries its number in the head of its index, so that whoever reads the archive as a stream
can tell files apart by a few bytes, whatever they are called and wherever they are moved. The
writer is made up at random with the file: when that is lost, counting begins again under another
one. Numbers are never used twice; one may be left out.
"""

from __future__ import annotations

import os
import re
import uuid
from pathlib import Path

from nsqtools.archive.layout import Head
from nsqtools.errors import ConfigurationError
from nsqtools.files.durable import blaming, sync_folder
from nsqtools.files.locks import try_lock
from nsqtools.files.opening import open_to_write

# Of fixed width: it is replaced in place, within one sector, which no crash tears.
_LINE = "{pid:<10} writer {writer} {number:020d}\n"
_PATTERN = re.compile(r"\d+ +writer ([0-9a-f]{32}) (\d{20})\n")


class TopicLock:
    """Held until `release`. Raises `ConfigurationError` when it is taken, and ``OSError``."""

    def __init__(self, folder: Path, topic: str, channel: str) -> None:
        self._path = folder / f".{topic}@{channel}.lock"
        self._descriptor = open_to_write(self._path, os.O_RDWR | os.O_CREAT)
        if not try_lock(self._descriptor):
            holder = self._text().split()[:1]
            os.close(self._descriptor)
            raise ConfigurationError(
                f"process {''.join(holder) or 'unknown'} archives channel {channel} of topic "
                f"{topic} in {folder} already",
                hint="One archiver does for a channel; give another one its own --work-dir.",
            )
        match = _PATTERN.fullmatch(self._text())
        self._last = Head(match[1], int(match[2])) if match else Head(uuid.uuid4().hex, 0)
        try:
            if match is None:
                os.ftruncate(self._descriptor, 0)
            self._write(self._last)
            sync_folder(folder)
        except OSError:
            os.close(self._descriptor)
            raise

    def next_head(self) -> Head:
        """Return the head of a new file; its number is durable. Raises ``OSError``."""
        head = Head(self._last.writer, self._last.number + 1)
        self._write(head)
        self._last = head
        return head

    def release(self) -> None:
        """Let others have it."""
        os.close(self._descriptor)

    def _text(self) -> str:
        return os.pread(self._descriptor, 200, 0).decode("ascii", "replace")

    def _write(self, head: Head) -> None:
        line = _LINE.format(pid=os.getpid(), writer=head.writer, number=head.number)
        with blaming(self._path):
            os.pwrite(self._descriptor, line.encode(), 0)
            os.fdatasync(self._descriptor)
