"""Stream compression: bytes in, bytes out, one codec object per connection and for its life.

deflate is raw (no zlib header, RFC 1951) with a sync flush after every write, and the stream is
never finished. snappy is the framing format with masked CRC-32C (both directions independent).

``compress`` returns the bytes for the wire, flushed: the peer can decode all of the data from them.
``decompress`` returns what the bytes decode to, possibly nothing yet, or raises `ProtocolError`.
A few bytes can decode to gigabytes: with a ``limit`` in bytes it returns no more than that, or one
chunk of the format above it, and ``has_more`` says to call it again, without bytes.

Traps: plaintext that comes out empty from input that was not is normal, never an end of stream;
python-snappy reports damage as a bare ``OSError``, which a socket's caller would mistake for a
network failure, so both codecs raise `ProtocolError`.
"""

from __future__ import annotations

import zlib

from nsqtools.errors import ConfigurationError, ProtocolError

_RAW_DEFLATE = -zlib.MAX_WBITS
_SNAPPY_HEAD = 4  # type and length
_SNAPPY_PLAIN = 65_536  # the most that a chunk decodes to
_SNAPPY_CHUNK = 76_490 + 4  # the most that it can take with its checksum; Go refuses larger ones


class DeflateCodec:
    """``deflate`` at a level from 1 to 9: use the level of nsqd's IDENTIFY reply."""

    def __init__(self, level: int = 6) -> None:
        self._compressor = zlib.compressobj(level, zlib.DEFLATED, _RAW_DEFLATE)
        self._decompressor = zlib.decompressobj(_RAW_DEFLATE)
        self.has_more = False

    def compress(self, data: bytes) -> bytes:
        return self._compressor.compress(data) + self._compressor.flush(zlib.Z_SYNC_FLUSH)

    def decompress(self, data: bytes, limit: int = 0) -> bytes:
        decompressor = self._decompressor
        try:
            plain = decompressor.decompress(decompressor.unconsumed_tail + data, limit)
        except zlib.error as exc:
            raise ProtocolError(f"damaged deflate stream ({exc})") from exc
        # zlib may hold back the end of a copy although it has taken all of the bytes
        self.has_more = bool(decompressor.unconsumed_tail) or 0 < limit <= len(plain)
        if decompressor.eof:
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
        self._received = b""

    @property
    def has_more(self) -> bool:
        return self._chunks_end(1) > 0

    def compress(self, data: bytes) -> bytes:
        compressed: bytes = self._compressor.add_chunk(data)
        return compressed

    def decompress(self, data: bytes, limit: int = 0) -> bytes:
        received = self._received = self._received + data if self._received else data
        end = self._chunks_end(limit)
        if not end:
            return b""
        self._received = received[end:]
        try:
            plain: bytes = self._decompressor.decompress(received[:end])
        except Exception as exc:  # OSError from cramjam, UncompressError from older versions
            raise ProtocolError(f"damaged snappy stream ({exc})") from exc
        return plain

    def _chunks_end(self, limit: int) -> int:
        """Return the end of the chunks that decode to at most ``limit`` bytes (0: no limit)."""
        received = self._received
        end = size = 0
        while len(received) - end >= _SNAPPY_HEAD and (not limit or size < limit):
            length = int.from_bytes(received[end + 1 : end + _SNAPPY_HEAD], "little")
            if length > _SNAPPY_CHUNK:
                raise ProtocolError(f"damaged snappy stream (a chunk of {length} bytes)")
            if len(received) - end < _SNAPPY_HEAD + length:
                break
            end += _SNAPPY_HEAD + length
            size += _SNAPPY_PLAIN
        return end


StreamCodec = DeflateCodec | SnappyCodec
