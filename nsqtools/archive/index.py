"""The index of a file: one line a member, ``offset length count min_ts max_ts``, below its head.

Offset and length are bytes of the file as it is on disk, the count is of messages, the timestamps
are the lowest and highest time of publishing, in nanoseconds since 1970 (0 where that is unknown).
A member is durable when its line ends in a newline: the data was fsynced before. Members follow
each other without a gap, and `read_index` stops at the first line for which that is not so.

The *head* is the first line, ``writer <32 hex digits> <number>``: the file's name for as long as
it exists, whatever it is called, and wherever it is. Files of early archivers have none.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from pathlib import Path
from typing import NamedTuple

_LINE = re.compile(rb"(\d+) (\d+) (\d+) (-?\d+) (-?\d+)")
_HEAD = re.compile(rb"writer ([0-9a-f]{32}) (\d+)\n")


class Head(NamedTuple):
    """Who wrote a file, and the how manieth of that writer it is. See `topic_lock`."""

    writer: str
    number: int

    def encode(self) -> bytes:
        """Return the line."""
        return b"writer %s %d\n" % (self.writer.encode(), self.number)


class Member(NamedTuple):
    """A range of a file that can be read by itself."""

    offset: int
    length: int
    messages: int
    min_ts: int
    max_ts: int

    @property
    def end(self) -> int:
        """The offset behind it."""
        return self.offset + self.length

    def encode(self) -> bytes:
        """Return the member's line."""
        return b"%d %d %d %d %d\n" % self


class Index(NamedTuple):
    """All that an index says."""

    head: Head | None
    members: list[Member]

    def encode(self) -> bytes:
        """Return all lines."""
        return (self.head.encode() if self.head else b"") + encode_members(self.members)


def split_head(data: bytes) -> tuple[Head | None, bytes]:
    """Return the head, None without one, and the lines of members."""
    match = _HEAD.match(data)
    if match is None:
        return None, data
    return Head(match[1].decode(), int(match[2])), data[match.end() :]


def decode_index(data: bytes, end: int = 0) -> list[Member]:
    """Read lines whose first member begins at offset ``end``, up to the first that is not whole.

    A head before them is passed over.
    """
    members = []
    *lines, _torn = split_head(data)[1].split(b"\n")
    for line in lines:
        match = _LINE.fullmatch(line)
        if match is None:
            break
        member = Member(*map(int, match.groups()))
        if member.offset != end:
            break
        members.append(member)
        end = member.end
    return members


def encode_members(members: Iterable[Member]) -> bytes:
    """Return their lines."""
    return b"".join(map(Member.encode, members))


def load_index(path: Path) -> Index | None:
    """Read an index file; None when there is none. Raises ``OSError``."""
    try:
        data = path.read_bytes()
    except FileNotFoundError:
        return None
    return Index(split_head(data)[0], decode_index(data))


def read_index(path: Path) -> list[Member] | None:
    """Return the members of an index file; None when there is none. Raises ``OSError``."""
    index = load_index(path)
    return None if index is None else index.members
