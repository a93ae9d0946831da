"""Every whole record of a queue file, around what is damaged in it.

A record has no checksum and no mark, so it is believed when it looks like one (its length is
within the file, its time is possible, its id is 16 hexadecimal digits) and what follows it does, or
is the end. Where that fails, the next place that looks like a record is searched. If it is within
the record before, that one has a wrong length; else that one is whole, and its neighbor is not.

Traps: a changed byte in a body cannot be seen. A record whose length shrank is believed, cut short,
before a gap.
"""

from __future__ import annotations

import os
import re
import time
from collections.abc import Iterator
from pathlib import Path
from struct import Struct
from typing import NamedTuple, Self

from nsqtools.files.opening import descriptor_to_read
from nsqtools.protocol.frames import MIN_MESSAGE_SIZE
from nsqtools.protocol.text import NS
from nsqtools.server.queues.queue_files import LENGTH_SIZE

_HEAD = Struct(">iqH16s")  # length, timestamp, attempts, id
# the first byte of a time is below 0x2f until 2077: text, which is above it, costs no second look
_LIKE_A_HEAD = re.compile(rb"(?=[\0-\x7f].{3}[\0-\x2f].{9}[0-9a-f]{16})", re.DOTALL)
_AHEAD_NS = 10 * 365 * 86400 * NS
_WINDOW = 1 << 20


class Record(NamedTuple):
    """Where a message is, with its length, and what is in front of its body."""

    at: int
    size: int
    timestamp_ns: int
    attempts: int
    id: bytes

    @property
    def end(self) -> int:
        """The offset after it."""
        return self.at + self.size


class NoRecord(NamedTuple):
    """Bytes that are no record."""

    at: int
    end: int


class QueueFile:
    """An open data file, as long as it is now. Raises ``OSError``."""

    def __init__(self, path: Path) -> None:
        self._descriptor = descriptor_to_read(path)
        self.size = os.fstat(self._descriptor).st_size
        self._latest_ns = time.time_ns() + _AHEAD_NS

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        os.close(self._descriptor)

    def scan(self, start: int = 0) -> Iterator[Record | NoRecord]:
        """Yield what there is from an offset on."""
        at, record = start, self._record(start, self.size)
        while at < self.size:
            if record is None:
                found = self._search(at + 1)
                yield NoRecord(at, found)
            else:
                following = self._record(record.end, self.size)
                if following is not None or record.end == self.size:
                    yield record
                    at, record = record.end, following
                    continue
                found = self._search(at + 1)
                if found < record.end:
                    yield NoRecord(at, found)
                else:
                    yield record
                    yield NoRecord(record.end, found)
            at, record = found, self._record(found, self.size)

    def content(self, record: Record) -> bytes:
        """Return timestamp, attempts, id and body, as they are in the file."""
        return os.pread(self._descriptor, record.size - LENGTH_SIZE, record.at + LENGTH_SIZE)

    def is_being_written(self, gap: NoRecord) -> bool:
        """Whether it can be the beginning of a record, at the end of the file."""
        is_short = gap.end - gap.at < _HEAD.size
        return gap.end == self.size and (is_short or self._record(gap.at, 1 << 31) is not None)

    def _record(self, at: int, end: int) -> Record | None:
        head = os.pread(self._descriptor, _HEAD.size, at)
        if len(head) < _HEAD.size:
            return None
        length, timestamp_ns, attempts, message_id = _HEAD.unpack(head)
        if (
            MIN_MESSAGE_SIZE <= length <= end - at - LENGTH_SIZE
            and 0 < timestamp_ns < self._latest_ns
            and not message_id.translate(None, b"0123456789abcdef")
        ):
            return Record(at, LENGTH_SIZE + length, timestamp_ns, attempts, message_id)
        return None

    def _search(self, at: int) -> int:
        """Return where the next record is, else the end."""
        while at < self.size:
            some = os.pread(self._descriptor, _WINDOW + _HEAD.size, at)
            for match in _LIKE_A_HEAD.finditer(some):
                if self._record(at + match.start(), self.size) is not None:
                    return at + match.start()
            at += _WINDOW
        return self.size
