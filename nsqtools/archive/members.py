"""Compression of archives: gzip, zstd, Arrow or none, one member at a time.

Each flush ends a *member*: a gzip member, a frame of zstd with a checksum, or columns of Arrow with
a checksum (`arrow_member`). A member is readable
without the others and costs a few bytes. All tools read files of many members: ``zcat`` and
``zstdcat`` print them all. The bytes of a file determine its compression, never its name.

python-isal compresses and decompresses gzip several times as fast as zlib; its files are about a
tenth larger. It is used if it can be imported, and for writing only if the user chose no level,
because levels are those of zlib.

Files are read member by member with exact positions, so an index can be rebuilt from the data. The
modules for gzip and zstd read all members as one stream and do not return where a member begins.
Here the last piece of a member's text comes with the offset after the member. Zeros between and
after members are padding and are skipped.

The text of a member is returned after its checksum has been verified, so that bytes that changed on
disk are not taken for messages. Only the text of very large members is returned earlier. A member
that is cut off returns all of the text that can be decompressed, which is correct as far as it
goes.
"""

from __future__ import annotations

import re
import zlib
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, BinaryIO, NamedTuple, TypeAlias

from nsqtools.archive.arrow_member import (
    MAGIC,
    ArrowMember,
    ArrowMemberError,
    ArrowTextMember,
    MemberDecoder,
    read_member_batches,
)
from nsqtools.archive.layout import Member, end_of
from nsqtools.errors import NsqError
from nsqtools.files.opening import NotRegularError, open_to_read
from nsqtools.records.envelope import decode
from nsqtools.records.naming import Codec

if TYPE_CHECKING:
    import bz2
    import lzma

    import pyarrow

# 15 bits of window, plus 16 for the gzip header: see zlib.
GZIP_WINDOW = 31
# The default levels of gzip, python-isal and zstd.
GZIP_LEVEL = 6
ISAL_LEVEL = 2
ZSTD_LEVEL = 3
MAGIC_SIZE = 10
"""The number of first bytes that determine the compression of a file."""

_MAGIC = {
    # It begins like gzip, so it comes first.
    Codec.ARROW: re.compile(re.escape(MAGIC)),
    Codec.GZIP: re.compile(rb"\x1f\x8b"),
    # The second form is a skippable frame, with which files of pzstd begin.
    Codec.ZSTD: re.compile(rb"\x28\xb5\x2f\xfd|[\x50-\x5f]\x2a\x4d\x18"),
    Codec.XZ: re.compile(rb"\xfd7zXZ\0"),
    Codec.BZIP2: re.compile(rb"BZh[1-9](1AY&SY|\x17rE8P\x90)"),
}


def codec_of(beginning: bytes) -> Codec:
    """Return the compression of a file, by its first `MAGIC_SIZE` bytes."""
    matches = (codec for codec, magic in _MAGIC.items() if magic.match(beginning))
    return next(matches, Codec.NONE)


# -- writing ------------------------------------------------------------------------------------


Compressor: TypeAlias = (
    "zlib._Compress | lzma.LZMACompressor | bz2.BZ2Compressor | ArrowMember | Plain"
)
"""Compresses one member. The classes of isal and zstd have the same methods."""

CompressorFactory = Callable[[], "Compressor"]
# A file may demand a dictionary of 4 GiB; `xz -9` writes files that need 64 MiB.
MAX_XZ_MEMORY = 256 << 20


class Plain:
    """A compressor that does not change the text."""

    def compress(self, data: bytes, /) -> bytes:
        return data

    def flush(self) -> bytes:
        return b""


def members_of(codec: Codec, level: int | None = None) -> CompressorFactory:
    """Return the factory of compressors; ``level`` None is the default level.

    Raises `NsqError` if the package for zstd is missing.
    """
    if codec is Codec.GZIP and level is None and (isal := _isal()) is not None:
        return lambda: isal.compressobj(ISAL_LEVEL, isal.DEFLATED, GZIP_WINDOW)
    if codec is Codec.GZIP:
        gzip_level = GZIP_LEVEL if level is None else level
        return lambda: zlib.compressobj(gzip_level, zlib.DEFLATED, GZIP_WINDOW)
    if codec is Codec.NONE:
        return Plain
    if codec is Codec.ARROW:
        return lambda: ArrowTextMember(crc32)
    if codec is Codec.XZ:
        # Python may be built without lzma and bz2.
        import lzma

        return lzma.LZMACompressor
    if codec is Codec.BZIP2:
        import bz2

        return bz2.BZ2Compressor
    zstd = _zstd()
    options = {
        zstd.CompressionParameter.compression_level: ZSTD_LEVEL if level is None else level,
        zstd.CompressionParameter.checksum_flag: 1,
    }
    return lambda: zstd.ZstdCompressor(options=options)


def arrow_members() -> ArrowMember:
    """Return a compressor of record batches instead of text."""
    return ArrowMember(crc32)


# -- reading ------------------------------------------------------------------------------------


class CorruptError(ValueError):
    """The bytes of a member have changed since it was written."""


class Unpacker:
    """Decompresses one member.

    Call `unpack` with data until ``is_over``; while ``has_more``, call it with no data. At the end,
    ``unused`` is the data after the member. Raises `NsqError` if the package for zstd is missing.
    """

    def __init__(self, codec: Codec) -> None:
        self.has_more = self.is_over = False
        self.unused = b""
        self._keeps_input = codec is not Codec.GZIP
        # Input that zlib has not consumed. The other modules keep it themselves.
        self._unconsumed = b""
        self._errors: tuple[type[Exception], ...]
        self._member: Any
        if codec is Codec.ZSTD:
            zstd = _zstd()
            self._errors, self._member = (zstd.ZstdError,), zstd.ZstdDecompressor()
        elif codec is Codec.XZ:
            import lzma

            self._errors = (lzma.LZMAError,)
            self._member = lzma.LZMADecompressor(lzma.FORMAT_XZ, memlimit=MAX_XZ_MEMORY)
        elif codec is Codec.BZIP2:
            import bz2

            self._errors, self._member = (OSError,), bz2.BZ2Decompressor()
        elif codec is Codec.ARROW:
            self._errors, self._member = (ArrowMemberError,), MemberDecoder(crc32)
        else:
            module = _isal() or zlib
            self._errors = (module.error, zlib.error)
            self._member = module.decompressobj(GZIP_WINDOW)

    def unpack(self, data: bytes, limit: int) -> bytes:
        """Return the next piece of text, of at most ``limit`` bytes. Raises `CorruptError`."""
        member = self._member
        try:
            text: bytes = member.decompress(self._unconsumed + data, limit)
        except self._errors as exc:
            raise CorruptError(str(exc).partition("\n")[0]) from None
        self.is_over = member.eof
        self.unused = member.unused_data if self.is_over else b""
        if self._keeps_input:
            has_more = not member.needs_input
        else:
            self._unconsumed = member.unconsumed_tail
            # If the text reaches the limit, more of it may be buffered without input.
            has_more = bool(self._unconsumed or len(text) >= limit)
        self.has_more = has_more and not self.is_over
        return text


def unpack_columns(data: bytes) -> list[pyarrow.RecordBatch]:
    """Return the columns of a whole member of Arrow. Raises `CorruptError`."""
    try:
        return read_member_batches(data, crc32)
    except ArrowMemberError as exc:
        raise CorruptError(str(exc).partition("\n")[0]) from None


def crc32(data: bytes | memoryview, value: int = 0) -> int:
    """Return the CRC-32 of data. python-isal computes it several times as fast as zlib."""
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


READ_SIZE = 1 << 18
# Text of one step of decompression, because a few bytes can decompress to gigabytes.
MAX_PIECE_SIZE = 1 << 20
# The text of a larger member is returned before its checksum is verified.
MAX_VERIFIED_SIZE = 16 << 20
# A longer line is not a message.
MAX_LINE_SIZE = 1 << 28


class MemberText(NamedTuple):
    """A piece of text. The last piece of a member has the offset after the member, others None."""

    text: bytes
    member_end: int | None


class DamagedError(NsqError):
    """A member is cut off or corrupt. It begins at ``offset``; the data before it is correct."""

    def __init__(self, message: str, offset: int) -> None:
        super().__init__(message)
        self.offset = offset


def unpack_members(file: BinaryIO, codec: Codec, offset: int = 0) -> Iterator[MemberText]:
    """Iterate over the text of all members, the first of which begins at ``offset``.

    Raises ``OSError``, and `DamagedError` after the last correct piece.
    """
    file.seek(offset)
    # The begin of the member, and the position after the consumed data.
    begin = position = offset
    member: Unpacker | None = None
    pieces: list[bytes] = []
    data = b""
    while data or (member and member.has_more) or (data := file.read(READ_SIZE)):
        if member is None:
            padded_size = len(data)
            data = data.lstrip(b"\0")
            position += padded_size - len(data)
            if not data:
                continue
            begin, member, pieces = position, Unpacker(codec), []
        try:
            pieces.append(member.unpack(data, MAX_PIECE_SIZE))
        except CorruptError as exc:
            raise DamagedError(f"corrupt at byte {begin} ({exc})", begin) from None
        position += len(data) - len(member.unused)
        data = member.unused
        if member.is_over:
            yield MemberText(b"".join(pieces), position)
            member = None
        elif sum(map(len, pieces)) > MAX_VERIFIED_SIZE:
            yield MemberText(b"".join(pieces), None)
            pieces = []
    if member is not None:
        yield MemberText(b"".join(pieces), None)
        raise DamagedError(f"cut off in the member at byte {begin}", begin)


# Members of a plain file without an index end at the first line end after this size.
PLAIN_MEMBER_SIZE = 1 << 20

_HEAD = re.compile(
    rb'^\{"topic": "([^"\n]*)", "nsqd": "[^"\n]*", "id": "[^"\n]*", "ts": (-?\d{1,19}),',
    re.MULTILINE,
)


@dataclass(slots=True)
class Scan:
    """The members and topics of a file, and the damage after the last member ("" for none).

    A file without topics has bare bodies.
    """

    members: list[Member] = field(default_factory=list)
    damage: str = ""
    topics: set[str] = field(default_factory=set)
    codec: Codec = Codec.NONE
    size: int = 0
    """The size of the whole file, in bytes."""
    is_cut: bool = False
    """Whether lines continue after the end of a compressed frame, as in files of pzstd. All frames
    are one member then, which is too large to be read as a whole."""

    def note(self, problem: str) -> None:
        """Record a problem, if it is the first one."""
        self.damage = self.damage or problem


def codec_at(file: BinaryIO) -> Codec:
    """Return the compression of an open file, by its content."""
    file.seek(0)
    return codec_of(file.read(MAGIC_SIZE))


def scan_members(path: Path) -> list[Member]:
    """Return the complete members of a regular file, none of any other. Raises ``OSError``."""
    scan = Scan()
    with suppress(NotRegularError), open_to_read(path) as file:
        scan_file(file, scan)
    return scan.members


def scan_file(file: BinaryIO, scan: Scan) -> None:
    """Read a whole open file into ``scan``. Raises ``OSError``."""
    scan.codec = codec_at(file)
    is_plain = not scan.codec.is_compressed
    tally, is_in_line = Tally(scan.topics), False
    try:
        for text, end in _plain_members(file) if is_plain else unpack_members(file, scan.codec):
            scan.is_cut |= is_in_line
            tally.add(text)
            is_in_line = end is not None and bool(tally.partial_line and scan.topics)
            if end is not None and not is_in_line:
                scan.members.append(tally.member(end_of(scan.members), end))
                tally = Tally(scan.topics)
    except DamagedError as exc:
        scan.damage = str(exc)
    if is_in_line and end is not None:
        scan.members.append(tally.member(end_of(scan.members), end))
        if is_plain and not is_decodable(tally.partial_line):
            scan.damage = f"cut off in the line at byte {end - len(tally.partial_line)}"


def _plain_members(file: BinaryIO) -> Iterator[MemberText]:
    """Divide a plain file at line ends, so that each byte is in a member."""
    file.seek(0)
    while text := file.read(PLAIN_MEMBER_SIZE) + file.readline(MAX_VERIFIED_SIZE):
        yield MemberText(text, file.tell())


def is_decodable(line: bytes) -> bool:
    """Return whether a line is a complete message."""
    try:
        decode(line)
    except ValueError:
        return False
    return True


def _heads_in(text: bytes) -> list[tuple[bytes, bytes]]:
    """Return topic and time of each message in complete lines.

    The last line may lack its newline. Lines that other programs wrote may order the fields
    differently, so a line that does not match is decoded.
    """
    heads: list[tuple[bytes, bytes]] = _HEAD.findall(text)
    if len(heads) < text.count(b"\n") + (not text.endswith(b"\n")):
        for line in text.split(b"\n"):
            if b'"nsqd"' in line and not _HEAD.match(line):
                with suppress(ValueError):
                    message = decode(line)
                    heads.append((message.topic.encode(), b"%d" % message.timestamp_ns))
    return heads


class Tally:
    """Counts lines, and collects topics and times of the lines that are messages.

    Topics are added to the set ``topics``. A bare body has neither topic nor time.
    """

    def __init__(self, topics: set[str]) -> None:
        self._topics = topics
        self._lines = 0
        self.partial_line = b""
        # The lowest and the highest time, after the first message.
        self._times: list[int] = []

    def add(self, text: bytes) -> None:
        """Add a piece of text, which may end within a line."""
        if end := text.rfind(b"\n") + 1:
            self.count(self.partial_line + text[:end])
            self.partial_line = text[end:]
        elif len(self.partial_line) <= MAX_LINE_SIZE:
            self.partial_line += text

    def count(self, text: bytes) -> None:
        """Add complete lines."""
        self._lines += text.count(b"\n")
        if heads := _heads_in(text):
            times = [*self._times, *[int(time) for _, time in heads]]
            self._times = [min(times), max(times)]
            self._topics.update(topic.decode("ascii", "replace") for topic, _ in heads)

    def member(self, begin: int, end: int) -> Member:
        """Return the member from ``begin`` to ``end`` that consists of the added text."""
        if self.partial_line:
            self.count(self.partial_line)
            self._lines += 1
        low, high = self._times or (0, 0)
        return Member(begin, end - begin, self._lines, low, high)
