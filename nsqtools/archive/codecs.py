"""Compression of archives: gzip, zstd or none, a member at a time.

Each flush ends a *member*: a gzip member, or a frame of zstd with a checksum. It is readable by
itself, costs a few bytes, and what follows it is read on by every tool: ``zcat`` and ``zstdcat``
print all members of a file. The compression of a file is read from its bytes, never from its name.

python-isal does gzip several times as fast as zlib, both ways, to files about a tenth larger. It is
used when it can be imported; for writing only if no level was asked for, because levels are zlib's.
"""

from __future__ import annotations

import zlib
from collections.abc import Callable
from enum import Enum
from typing import Any, Protocol, TypeAlias

from nsqtools.errors import NsqError

GZIP_WINDOW = 31  # 15 bits of window, and 16 for the gzip header
GZIP_LEVEL = 6
ISAL_LEVEL = 2
ZSTD_LEVEL = 3
LOOK_SIZE = 4
"""As many bytes tell what a file is compressed with."""

_GZIP_MAGIC = b"\x1f\x8b"
_ZSTD_MAGIC = b"\x28\xb5\x2f\xfd"
_ZSTD_SKIPPED = b"\x2a\x4d\x18"  # after a byte from 50 to 5f: pzstd begins so


class Codec(Enum):
    """What a file is compressed with; the value is the extension of its name."""

    NONE = ""
    GZIP = ".gz"
    ZSTD = ".zst"

    @property
    def is_compressed(self) -> bool:
        """Whether the bytes alone show where a member begins and ends."""
        return self is not Codec.NONE


def codec_of(beginning: bytes) -> Codec:
    """Return what a file is compressed with, by its first `LOOK_SIZE` bytes."""
    if beginning.startswith(_GZIP_MAGIC):
        return Codec.GZIP
    is_skipped = 0x50 <= beginning[0] <= 0x5F if beginning else False
    if beginning.startswith(_ZSTD_MAGIC) or (is_skipped and beginning[1:4] == _ZSTD_SKIPPED):
        return Codec.ZSTD
    return Codec.NONE


# -- writing ------------------------------------------------------------------------------------


Compressor: TypeAlias = "zlib._Compress | Plain"
"""Of one member: fed, then flushed once. Those of isal and zstd are alike."""

CompressorFactory = Callable[[], "Compressor"]


class Plain:
    """Leaves text as it is."""

    def compress(self, data: bytes, /) -> bytes:
        return data

    def flush(self) -> bytes:
        return b""


def members_of(codec: Codec, level: int | None = None) -> CompressorFactory:
    """Return what begins a member; ``level`` None is a good one. Raises `NsqError`."""
    if codec is Codec.GZIP:
        return gzip_members(level)
    if codec is Codec.ZSTD:
        return zstd_members(level)
    return Plain


def gzip_members(level: int | None) -> CompressorFactory:
    """Return what begins a gzip member; ``level`` is 1 to 9."""
    if level is None and (isal := _isal()) is not None:
        return lambda: isal.compressobj(ISAL_LEVEL, isal.DEFLATED, GZIP_WINDOW)
    wanted = GZIP_LEVEL if level is None else level
    return lambda: zlib.compressobj(wanted, zlib.DEFLATED, GZIP_WINDOW)


def zstd_members(level: int | None) -> CompressorFactory:
    """Return what begins a frame of zstd; ``level`` is 1 to 19. Raises `NsqError`."""
    zstd = _zstd()
    options = {
        zstd.CompressionParameter.compression_level: ZSTD_LEVEL if level is None else level,
        zstd.CompressionParameter.checksum_flag: 1,
    }
    return lambda: zstd.ZstdCompressor(options=options)


# -- reading ------------------------------------------------------------------------------------


class CorruptError(ValueError):
    """A member is not what it was when it was written."""


class Unpacker(Protocol):
    """Of one member. Call `unpack` with more data, with none while ``has_more``, until ``is_over``.

    Then ``unused`` is what follows the member in the data. Raises `CorruptError`.
    """

    has_more: bool
    is_over: bool
    unused: bytes

    def unpack(self, data: bytes, limit: int) -> bytes: ...


def unpacker(codec: Codec) -> Unpacker:
    """Return what unpacks a member of a compressed file. Raises `NsqError`."""
    return _Zstd() if codec is Codec.ZSTD else _Inflate()


def unpack_whole(codec: Codec, data: bytes, limit: int) -> bytes | None:
    """Return the text of exactly one member; None if it is damaged or longer than ``limit``."""
    one = unpacker(codec)
    try:
        text = one.unpack(data, limit)
    except CorruptError:
        return None
    return text if one.is_over and not one.unused else None


class _Inflate:
    def __init__(self) -> None:
        self.has_more = self.is_over = False
        self.unused = b""
        module = _isal() or zlib
        self._errors: tuple[type[Exception], ...] = (module.error, zlib.error)
        self._inflate = module.decompressobj(GZIP_WINDOW)
        self._rest = b""

    def unpack(self, data: bytes, limit: int) -> bytes:
        try:
            text: bytes = self._inflate.decompress(self._rest + data, limit)
        except self._errors as exc:
            raise CorruptError(_first_line(exc)) from None
        self._rest = self._inflate.unconsumed_tail
        self.is_over = self._inflate.eof
        # A full buffer may hide text that needs no more data.
        self.has_more = not self.is_over and bool(self._rest or len(text) >= limit)
        self.unused = self._inflate.unused_data if self.is_over else b""
        return text


class _Zstd:
    def __init__(self) -> None:
        self.has_more = self.is_over = False
        self.unused = b""
        zstd = _zstd()
        self._error = zstd.ZstdError
        self._frame = zstd.ZstdDecompressor()

    def unpack(self, data: bytes, limit: int) -> bytes:
        try:
            text: bytes = self._frame.decompress(data, limit)
        except self._error as exc:
            raise CorruptError(_first_line(exc)) from None
        self.is_over = self._frame.eof
        self.has_more = not self.is_over and not self._frame.needs_input
        self.unused = self._frame.unused_data if self.is_over else b""
        return text


def _first_line(exc: Exception) -> str:
    return str(exc).partition("\n")[0]


def crc32(data: bytes | memoryview, value: int = 0) -> int:
    """Return the checksum of gzip, several times as fast with python-isal."""
    checksum: int = (_isal() or zlib).crc32(data, value)
    return checksum


def _isal() -> Any:
    try:
        from isal import isal_zlib
    except ImportError:
        return None
    return isal_zlib


def _zstd() -> Any:
    try:
        from compression import zstd  # type: ignore[import-not-found,unused-ignore]
    except ImportError:
        try:
            from backports import zstd
        except ImportError:
            raise NsqError("zstd needs Python 3.14 or the package backports.zstd") from None
    return zstd
