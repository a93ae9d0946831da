"""Text that is made once and sent to many, compressed once: pages, streams of events, metrics.

Each piece is compressed for itself and ends at a byte, so that pieces can follow one another in any
gzip stream, whatever was in it before. No secret may be in such a text beside what a reader chose:
its compressed size would tell.
"""

from __future__ import annotations

import struct
import zlib
from collections.abc import Sequence

from starlette.requests import Request
from starlette.responses import Response

HEAD = b"\x1f\x8b\x08\0\0\0\0\0\0\xff"  # of a gzip stream, without time and name
_END = b"\x03\0"  # an empty block that is the last one
_LEVEL = 3


class Packed:
    """A piece of text, as it is and compressed."""

    def __init__(self, text: str) -> None:
        # a hostile nsqd may send what is not text
        self.plain = text.encode("utf-8", "backslashreplace")
        packer = zlib.compressobj(_LEVEL, wbits=-zlib.MAX_WBITS)
        self.deflated = packer.compress(self.plain) + packer.flush(zlib.Z_SYNC_FLUSH)
        self.crc = zlib.crc32(self.plain)


def takes_gzip(request: Request) -> bool:
    """Tell whether an answer may be compressed."""
    return "gzip" in request.headers.get("accept-encoding", "").lower()


def packed_response(request: Request, pieces: Sequence[Packed], media_type: str) -> Response:
    """Answer with pieces, compressed where the client takes that. The first is the longest."""
    headers = {"Vary": "Accept-Encoding"}
    if not takes_gzip(request):
        return Response(b"".join(each.plain for each in pieces), 200, headers, media_type)
    crc = pieces[0].crc
    for each in pieces[1:]:
        crc = zlib.crc32(each.plain, crc)
    size = sum(len(each.plain) for each in pieces)
    body = b"".join(each.deflated for each in pieces)
    end = _END + struct.pack("<II", crc, size & 0xFFFFFFFF)
    headers["Content-Encoding"] = "gzip"
    return Response(HEAD + body + end, 200, headers, media_type)
