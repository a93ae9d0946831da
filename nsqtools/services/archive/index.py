"""The index of a file: one line a member, ``offset length count min_ts max_ts``.

Offset and length are bytes of the file as it is on disk, the count is of messages, the timestamps
are the lowest and highest time of publishing, in nanoseconds since 1970 (0 where that is unknown).
A member is durable when its line ends in a newline: the data was fsynced before. Members follow
each other without a gap, and `read_index` stops at the first line for which that is not so.
"""

from __future__ import annotations

import re
from pathlib import Path
from typing import NamedTuple

_LINE = re.compile(rb"(\d+) (\d+) (\d+) (-?\d+) (-?\d+)")


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


def decode_index(data: bytes, end: int = 0) -> list[Member]:
    """Read lines whose first member begins at offset ``end``, up to the first that is not whole."""
    members = []
    *lines, _torn = data.split(b"\n")
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


def encode_index(members: list[Member]) -> bytes:
    """Return all lines."""
    return b"".join(member.encode() for member in members)


def read_index(path: Path) -> list[Member] | None:
    """Read an index file; None when there is none. Raises ``OSError``."""
    try:
        return decode_index(path.read_bytes())
    except FileNotFoundError:
        return None
