"""Compression of archives: gzip, zstd or none, a member at a time.

Each flush ends a *member*: a gzip member, or a frame of zstd with a checksum. It is readable by
itself, costs a few bytes, and what follows it is read on by every tool: ``zcat`` and ``zstdcat``
print all members of a file. The compression of a file is read from its bytes, never from its name.

python-isal does gzip several times as fast as zlib, both ways, to files about a tenth larger. It is
used when it can be imported; for writing only if no level was asked for, because levels are zlib's.

Files are read member by member with exact positions, and an index is rebuilt from the data. The
modules for gzip and zstd read members as one stream and cannot tell where one begins; here each
piece of text comes with the offset after its member when it is the member's last. Padding with
zeros between or after members is skipped.

A member's text is held back until its checksum has been seen, so that bytes changed on disk are not
taken for messages; only the text of very large members is returned earlier. Of a member that is cut
off, everything that can be decompressed is returned: what is there is right.
"""

from __future__ import annotations

import re
import zlib
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, BinaryIO, NamedTuple, TypeAlias

from nsqtools.archive.layout import Member, end_of
from nsqtools.errors import NsqError
from nsqtools.files.opening import NotRegularError, open_to_read
from nsqtools.records.envelope import decode
from nsqtools.records.naming import Codec

if TYPE_CHECKING:
    import bz2
    import lzma

GZIP_WINDOW = 31  # 15 bits of window, and 16 for the gzip header
GZIP_LEVEL = 6
ISAL_LEVEL = 2
ZSTD_LEVEL = 3
LOOK_SIZE = 10
"""As many bytes tell what a file is compressed with."""

_MAGIC = {
    Codec.GZIP: re.compile(rb"\x1f\x8b"),
    Codec.ZSTD: re.compile(rb"\x28\xb5\x2f\xfd|[\x50-\x5f]\x2a\x4d\x18"),  # the latter of pzstd
    Codec.XZ: re.compile(rb"\xfd7zXZ\0"),
    Codec.BZIP2: re.compile(rb"BZh[1-9](1AY&SY|\x17rE8P\x90)"),
}


def codec_of(beginning: bytes) -> Codec:
    """Return what a file is compressed with, by its first `LOOK_SIZE` bytes."""
    matches = (codec for codec, magic in _MAGIC.items() if magic.match(beginning))
    return next(matches, Codec.NONE)


# -- writing ------------------------------------------------------------------------------------


Compressor: TypeAlias = "zlib._Compress | lzma.LZMACompressor | bz2.BZ2Compressor | Plain"
"""Of one member: fed, then flushed once. Those of isal and zstd are alike."""

CompressorFactory = Callable[[], "Compressor"]
XZ_MEMORY = 256 << 20
"""A file may claim a dictionary of 4 GiB; `xz -9` makes one of 64 MiB."""


class Plain:
    """Leaves text as it is."""

    def compress(self, data: bytes, /) -> bytes:
        return data

    def flush(self) -> bytes:
        return b""


def members_of(codec: Codec, level: int | None = None) -> CompressorFactory:
    """Return what begins a member; ``level`` None is a good one. Raises `NsqError`."""
    if codec is Codec.GZIP and level is None and (isal := _isal()) is not None:
        return lambda: isal.compressobj(ISAL_LEVEL, isal.DEFLATED, GZIP_WINDOW)
    if codec is Codec.GZIP:
        wanted = GZIP_LEVEL if level is None else level
        return lambda: zlib.compressobj(wanted, zlib.DEFLATED, GZIP_WINDOW)
    if codec is Codec.NONE:
        return Plain
    if codec is Codec.XZ:
        import lzma  # not every Python has it, nor bz2

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


# -- reading ------------------------------------------------------------------------------------


class CorruptError(ValueError):
    """A member is not what it was when it was written."""


class Unpacker:
    """Of one member. Call `unpack` with more data, with none while ``has_more``, until ``is_over``.

    Then ``unused`` is what follows the member in the data. Raises `NsqError` where the package is
    missing.
    """

    def __init__(self, codec: Codec) -> None:
        self.has_more = self.is_over = False
        self.unused = b""
        self._keeps_input = codec is not Codec.GZIP
        self._rest = b""  # which zlib has not read
        self._errors: tuple[type[Exception], ...]
        self._member: Any
        if codec is Codec.ZSTD:
            zstd = _zstd()
            self._errors, self._member = (zstd.ZstdError,), zstd.ZstdDecompressor()
        elif codec is Codec.XZ:
            import lzma

            self._errors = (lzma.LZMAError,)
            self._member = lzma.LZMADecompressor(lzma.FORMAT_XZ, memlimit=XZ_MEMORY)
        elif codec is Codec.BZIP2:
            import bz2

            self._errors, self._member = (OSError,), bz2.BZ2Decompressor()
        else:
            module = _isal() or zlib
            self._errors = (module.error, zlib.error)
            self._member = module.decompressobj(GZIP_WINDOW)

    def unpack(self, data: bytes, limit: int) -> bytes:
        """Return some of the text, ``limit`` bytes at most. Raises `CorruptError`."""
        member = self._member
        try:
            text: bytes = member.decompress(self._rest + data, limit)
        except self._errors as exc:
            raise CorruptError(str(exc).partition("\n")[0]) from None
        self.is_over = member.eof
        self.unused = member.unused_data if self.is_over else b""
        if self._keeps_input:
            has_more = not member.needs_input
        else:
            self._rest = member.unconsumed_tail
            has_more = bool(self._rest or len(text) >= limit)  # a full buffer may hide text
        self.has_more = has_more and not self.is_over
        return text


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


READ_SIZE = 1 << 18
TEXT_SIZE = 1 << 20  # of one step: a few bytes can unpack to gigabytes
HELD_SIZE = 16 << 20
LONGEST_LINE = 1 << 28


class MemberText(NamedTuple):
    """Text, and the offset after the member that it completes (else None)."""

    text: bytes
    member_end: int | None


class DamagedError(NsqError):
    """A member is cut off or corrupt. ``offset`` is where it begins: what is before it is good."""

    def __init__(self, message: str, offset: int) -> None:
        super().__init__(message)
        self.offset = offset


def unpack_members(file: BinaryIO, codec: Codec, offset: int = 0) -> Iterator[MemberText]:
    """Iterate over the text of all members from the one that begins at ``offset``.

    Raises `DamagedError` after the last good piece, ``OSError``.
    """
    file.seek(offset)
    begin = position = offset  # of the member, and after what was read
    member: Unpacker | None = None
    held: list[bytes] = []
    data = b""
    while data or (member and member.has_more) or (data := file.read(READ_SIZE)):
        if member is None:
            before = len(data)
            data = data.lstrip(b"\0")
            position += before - len(data)
            if not data:
                continue
            begin, member, held = position, Unpacker(codec), []
        try:
            held.append(member.unpack(data, TEXT_SIZE))
        except CorruptError as exc:
            raise DamagedError(f"corrupt at byte {begin} ({exc})", begin) from None
        position += len(data) - len(member.unused)
        data = member.unused
        if member.is_over:
            yield MemberText(b"".join(held), position)
            member = None
        elif sum(map(len, held)) > HELD_SIZE:
            yield MemberText(b"".join(held), None)
            held = []
    if member is not None:
        yield MemberText(b"".join(held), None)
        raise DamagedError(f"cut off in the member at byte {begin}", begin)


PLAIN_MEMBER_SIZE = 1 << 20

_HEAD = re.compile(
    rb'^\{"topic": "([^"\n]*)", "nsqd": "[^"\n]*", "id": "[^"\n]*", "ts": (-?\d{1,19}),',
    re.MULTILINE,
)


@dataclass(slots=True)
class Scan:
    """The members of a file, what is wrong after them (empty: nothing), and the topics in it.

    Without topics it is a file of bare bodies.
    """

    members: list[Member] = field(default_factory=list)
    damage: str = ""
    topics: set[str] = field(default_factory=set)
    codec: Codec = Codec.NONE
    size: int = 0
    """Of the whole file, in bytes."""
    is_cut: bool = False
    """Whether lines go on where compression begins again, as with pzstd: all of it is one member,
    which is too large to be read as one."""

    def note(self, problem: str) -> None:
        """Keep the first problem."""
        self.damage = self.damage or problem


def codec_at(file: BinaryIO) -> Codec:
    """Return what an open file is compressed with, whatever it is called."""
    file.seek(0)
    return codec_of(file.read(LOOK_SIZE))


def scan_members(path: Path) -> list[Member]:
    """Return the whole members of a file; none if it is not a regular one. Raises ``OSError``."""
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
        for text, end in _cut(file) if is_plain else unpack_members(file, scan.codec):
            scan.is_cut |= is_in_line
            tally.add(text)
            is_in_line = end is not None and bool(tally.rest and scan.topics)
            if end is not None and not is_in_line:
                scan.members.append(tally.member(end_of(scan.members), end))
                tally = Tally(scan.topics)
    except DamagedError as exc:
        scan.damage = str(exc)
    if is_in_line and end is not None:
        scan.members.append(tally.member(end_of(scan.members), end))
        if is_plain and not is_whole(tally.rest):
            scan.damage = f"cut off in the line at byte {end - len(tally.rest)}"


def _cut(file: BinaryIO) -> Iterator[MemberText]:
    """Cut a plain file at line ends; all of its bytes are in some member."""
    file.seek(0)
    while text := file.read(PLAIN_MEMBER_SIZE) + file.readline(HELD_SIZE):
        yield MemberText(text, file.tell())


def is_whole(line: bytes) -> bool:
    """Return whether a line is all of a message."""
    try:
        decode(line)
    except ValueError:
        return False
    return True


def _heads_in(text: bytes) -> list[tuple[bytes, bytes]]:
    """Return topic and time of each message in whole lines, of those of other programs too.

    The last line may lack its newline.
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
    """Counts lines, and looks at topics and times in those that are messages, not in bare bodies.

    The ``topics`` are added to a set.
    """

    def __init__(self, topics: set[str]) -> None:
        self._topics = topics
        self._lines = 0
        self.rest = b""
        self._times: list[int] = []

    def add(self, text: bytes) -> None:
        """Take a piece of text, which may end within a line."""
        if end := text.rfind(b"\n") + 1:
            self.count(self.rest + text[:end])
            self.rest = text[end:]
        elif len(self.rest) <= LONGEST_LINE:  # a longer line is not a message
            self.rest += text

    def count(self, text: bytes) -> None:
        """Take whole lines."""
        self._lines += text.count(b"\n")
        if heads := _heads_in(text):
            times = [*self._times, *[int(time) for _, time in heads]]
            self._times = [min(times), max(times)]
            self._topics.update(topic.decode("ascii", "replace") for topic, _ in heads)

    def member(self, begin: int, end: int) -> Member:
        """Return what was taken as the member from one offset to another."""
        if self.rest:
            self.count(self.rest)
            self._lines += 1
        low, high = self._times or (0, 0)
        return Member(begin, end - begin, self._lines, low, high)
