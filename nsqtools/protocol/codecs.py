"""Stream compression: bytes in, bytes out, one codec object per connection and for its life.

deflate is raw (no zlib header, RFC 1951) with a sync flush after every write, and the stream is
never finished. snappy is the framing format with masked CRC-32C (both directions independent).

Traps: plaintext that comes out empty from input that was not is normal, never an end of stream;
python-snappy reports damage as a bare ``OSError``, which a socket's caller would mistake for a
network failure, so both codecs raise `ProtocolError`.
"""

from __future__ import annotations

import zlib
from typing import Protocol

from nsqtools.errors import ConfigurationError, ProtocolError

_RAW_DEFLATE = -zlib.MAX_WBITS


class Codec(Protocol):
    """What a compressed connection needs."""

    def compress(self, data: bytes) -> bytes:
        """Return the bytes for the wire, flushed: the peer can decode all of ``data`` from them."""

    def decompress(self, data: bytes) -> bytes:
        """Return what the bytes decode to, possibly nothing yet. Raises `ProtocolError`."""


class DeflateCodec:
    """``deflate`` at a level from 1 to 9: use the level of nsqd's IDENTIFY reply."""

    def __init__(self, level: int = 6) -> None:
        self._compressor = zlib.compressobj(level, zlib.DEFLATED, _RAW_DEFLATE)
        self._decompressor = zlib.decompressobj(_RAW_DEFLATE)

    def compress(self, data: bytes) -> bytes:
        return self._compressor.compress(data) + self._compressor.flush(zlib.Z_SYNC_FLUSH)

    def decompress(self, data: bytes) -> bytes:
        try:
            plain = self._decompressor.decompress(data)
        except zlib.error as exc:
            raise ProtocolError(f"damaged deflate stream ({exc})") from exc
        if self._decompressor.eof:
            raise ProtocolError("the peer ended its deflate stream")
        return plain


class SnappyCodec:
    """``snappy``: the framing format. Raises `ConfigurationError` without python-snappy."""

    def __init__(self) -> None:
        try:
            import snappy
        except ImportError as exc:
            raise ConfigurationError(
                "snappy compression needs the python-snappy package",
                hint="Install it with: pip install python-snappy",
            ) from exc
        self._compressor = snappy.StreamCompressor()
        self._decompressor = snappy.StreamDecompressor()

    def compress(self, data: bytes) -> bytes:
        compressed: bytes = self._compressor.add_chunk(data)
        return compressed

    def decompress(self, data: bytes) -> bytes:
        try:
            plain: bytes = self._decompressor.decompress(data)
        except Exception as exc:  # OSError from cramjam, UncompressError from older versions
            raise ProtocolError(f"damaged snappy stream ({exc})") from exc
        return plain
