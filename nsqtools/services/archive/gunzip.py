"""Read gzip a member at a time, and say exactly where it is damaged.

The gzip module reads members as one stream and cannot tell where one begins; here each piece of
text comes with the offset behind its member when it is the member's last. Padding with zeros
between or behind members is passed over.
"""

from __future__ import annotations

import zlib
from collections.abc import Iterator
from typing import BinaryIO, NamedTuple

from nsqtools.errors import NsqError

READ_SIZE = 1 << 18
TEXT_SIZE = 1 << 20  # of a piece: a few bytes can unpack to gigabytes
GZIP_WINDOW = 31


class Piece(NamedTuple):
    """Text, and the offset in the file behind the member that it completes (else None)."""

    text: bytes
    member_end: int | None


class DamagedError(NsqError):
    """A member is cut off or corrupt. ``offset`` is where it begins: what is before it is good."""

    def __init__(self, message: str, offset: int) -> None:
        super().__init__(message)
        self.offset = offset


def gunzip(file: BinaryIO, offset: int = 0) -> Iterator[Piece]:
    """Iterate over the text of all members from the one that begins at ``offset``.

    Raises `DamagedError` behind the last good piece, ``OSError``.
    """
    file.seek(offset)
    begin = position = offset  # of the member, and behind what was read
    member = None
    data = b""
    while data or (data := file.read(READ_SIZE)):
        if member is None:
            before = len(data)
            data = data.lstrip(b"\0")
            offset += before - len(data)
            if not data:
                continue
            begin, position, member = offset, offset, zlib.decompressobj(GZIP_WINDOW)
        try:
            text = member.decompress(data, TEXT_SIZE)
        except zlib.error as exc:
            raise DamagedError(f"corrupt at byte {begin} ({exc})", begin) from None
        if member.eof:
            rest = member.unused_data
        else:
            rest = member.unconsumed_tail
        position += len(data) - len(rest)
        data = rest
        if member.eof:
            member, offset = None, position
            yield Piece(text, position)
        elif text:
            yield Piece(text, None)
    if member is not None:
        raise DamagedError(f"cut off in the member at byte {begin}", begin)
