"""Read gzip a member at a time, and say exactly where it is damaged.

The gzip module reads members as one stream and cannot tell where one begins; here each piece of
text comes with the offset behind its member when it is the member's last. Padding with zeros
between or behind members is passed over.

A member's text is held back until its checksum has been seen, so that what was changed on disk is
not taken for messages; only of very large members it is handed out before. Of a member that is cut
off all that there is is handed out: what is there is right.
"""

from __future__ import annotations

import zlib
from collections.abc import Iterator
from typing import NamedTuple, Protocol

from nsqtools.errors import NsqError

READ_SIZE = 1 << 18
TEXT_SIZE = 1 << 20  # of one step: a few bytes can unpack to gigabytes
HELD_SIZE = 16 << 20
GZIP_WINDOW = 31


class Piece(NamedTuple):
    """Text, and the offset in the file behind the member that it completes (else None)."""

    text: bytes
    member_end: int | None


class Readable(Protocol):
    """A binary file, or a part of one."""

    def seek(self, offset: int, /) -> int: ...
    def read(self, size: int, /) -> bytes: ...


class DamagedError(NsqError):
    """A member is cut off or corrupt. ``offset`` is where it begins: what is before it is good."""

    def __init__(self, message: str, offset: int) -> None:
        super().__init__(message)
        self.offset = offset


def gunzip(file: Readable, offset: int = 0) -> Iterator[Piece]:
    """Iterate over the text of all members from the one that begins at ``offset``.

    Raises `DamagedError` behind the last good piece, ``OSError``.
    """
    file.seek(offset)
    begin = position = offset  # of the member, and behind what was read
    member = None
    held: list[bytes] = []
    data = b""
    while data or (data := file.read(READ_SIZE)):
        if member is None:
            before = len(data)
            data = data.lstrip(b"\0")
            position += before - len(data)
            if not data:
                continue
            begin, member, held = position, zlib.decompressobj(GZIP_WINDOW), []
        try:
            held.append(member.decompress(data, TEXT_SIZE))
        except zlib.error as exc:
            raise DamagedError(f"corrupt at byte {begin} ({exc})", begin) from None
        rest = member.unused_data if member.eof else member.unconsumed_tail
        position += len(data) - len(rest)
        data = rest
        if member.eof:
            yield Piece(b"".join(held), position)
            member = None
        elif sum(map(len, held)) > HELD_SIZE:
            yield Piece(b"".join(held), None)
            held = []
    if member is not None:
        yield Piece(b"".join(held), None)
        raise DamagedError(f"cut off in the member at byte {begin}", begin)
