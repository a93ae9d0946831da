"""Stream compression: one codec object for each connection, for as long as it lives.

deflate is raw (no zlib header, RFC 1951) with a sync flush after every write, and the stream is
never finished. snappy is the framing format with masked CRC-32C, independent in each direction.

``compress`` returns flushed bytes for the wire, from which the peer can decode all of the data.
``decompress`` returns the decoded bytes, possibly none yet, or raises `ProtocolError`. Because a
few bytes can decode to gigabytes, a ``limit`` bounds the result to that many bytes, or to one chunk
of the format beyond it. While ``has_more`` is true, call ``decompress`` again with ``b""``.

Data before a damaged byte or the end of the stream is returned first, with ``has_more``, and the
next call raises. A client may publish, end its stream and close within one read.

Traps: input that decodes to nothing is normal and no end of stream. python-snappy reports damage
as a bare ``OSError``, which callers of a socket would mistake for a network failure; both codecs
raise `ProtocolError` instead.
"""

from __future__ import annotations

import zlib

from nsqtools.errors import ConfigurationError, ProtocolError

_RAW_DEFLATE = -zlib.MAX_WBITS
_SNAPPY_HEAD = 4  # type and length
_SNAPPY_PLAIN = 65_536  # the largest decoded size of a chunk, by the framing format
_SNAPPY_CHUNK = 76_490 + 4  # its largest encoded size with the checksum; Go refuses larger ones


class DeflateCodec:
    """``deflate`` at a level from 1 to 9. Use the level of nsqd's IDENTIFY reply."""

    def __init__(self, level: int = 6) -> None:
        self._compressor = zlib.compressobj(level, zlib.DEFLATED, _RAW_DEFLATE)
        self._decompressor = zlib.decompressobj(_RAW_DEFLATE)
        self._failure: ProtocolError | None = None
        self.has_more = False

    def compress(self, data: bytes) -> bytes:
        return self._compressor.compress(data) + self._compressor.flush(zlib.Z_SYNC_FLUSH)

    def decompress(self, data: bytes, limit: int = 0) -> bytes:
        if self._failure is not None:
            raise self._failure
        decompressor = self._decompressor
        data = decompressor.unconsumed_tail + data
        # zlib drops the bytes that it decoded before damage, so a copy keeps the state (3 us).
        snapshot = decompressor.copy()
        try:
            plain = decompressor.decompress(data, limit)
            if decompressor.eof:
                self._failure = ProtocolError("the peer ended its deflate stream")
        except zlib.error as exc:
            plain = _inflate_undamaged(snapshot, data, limit)
            self._failure = ProtocolError(f"damaged deflate stream ({exc})")
        if self._failure is not None and not plain:
            raise self._failure
        # zlib may hold back decoded bytes although it has consumed all of the input.
        is_cut = bool(decompressor.unconsumed_tail) or 0 < limit <= len(plain)
        self.has_more = is_cut or self._failure is not None
        return plain


def _inflate_undamaged(decompressor: zlib._Decompress, data: bytes, limit: int) -> bytes:
    """Decode the bytes before the first damaged one, which is found by bisection."""
    plain = b""
    intact, damaged = 0, len(data)
    while damaged - intact > 1:
        middle = (intact + damaged) // 2
        try:
            plain = decompressor.copy().decompress(data[:middle], limit)
            intact = middle
        except zlib.error:
            damaged = middle
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
        self._failure: ProtocolError | None = None
        self.has_more = False

    def compress(self, data: bytes) -> bytes:
        compressed: bytes = self._compressor.add_chunk(data)
        return compressed

    def decompress(self, data: bytes, limit: int = 0) -> bytes:
        if self._failure is not None:
            raise self._failure
        received = self._received + data if self._received else data
        plain: list[bytes] = []
        end = max_plain = 0
        try:
            while (chunk := _chunk_size(received, end)) and (not limit or max_plain < limit):
                plain.append(self._decompressor.decompress(received[end : end + chunk]))
                end += chunk
                max_plain += _SNAPPY_PLAIN
            self.has_more = chunk > 0
        except Exception as exc:  # OSError from cramjam, UncompressError from older versions
            self._failure = ProtocolError(f"damaged snappy stream ({exc})")
            self.has_more = True
            if not any(plain):
                raise self._failure from exc
        self._received = received[end:]
        return b"".join(plain)


def _chunk_size(data: bytes, position: int) -> int:
    """Return the size of the chunk at a position, 0 while it is incomplete.

    Raises ``ValueError`` for a chunk that is too long.
    """
    if len(data) - position < _SNAPPY_HEAD:
        return 0
    length = int.from_bytes(data[position + 1 : position + _SNAPPY_HEAD], "little")
    if length > _SNAPPY_CHUNK:
        raise ValueError(f"a chunk of {length} bytes")
    size = _SNAPPY_HEAD + length
    return size if len(data) - position >= size else 0


StreamCodec = DeflateCodec | SnappyCodec
