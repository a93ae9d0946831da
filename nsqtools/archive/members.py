"""Read a file member by member with exact positions, and rebuild an index from the data.

The modules for gzip and zstd read members as one stream and cannot tell where one begins; here each
piece of text comes with the offset after its member when it is the member's last. Padding with
zeros between or after members is skipped.

A member's text is held back until its checksum has been seen, so that bytes changed on disk are not
taken for messages; only the text of very large members is returned earlier. Of a member that is cut
off, everything that can be decompressed is returned: what is there is right.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import BinaryIO, NamedTuple, Protocol

from nsqtools.archive.codecs import LOOK_SIZE, Codec, CorruptError, Unpacker, codec_of, unpacker
from nsqtools.archive.layout import Member
from nsqtools.errors import NsqError
from nsqtools.files.opening import NotRegularError, open_to_read

READ_SIZE = 1 << 18
TEXT_SIZE = 1 << 20  # of one step: a few bytes can unpack to gigabytes
HELD_SIZE = 16 << 20


class MemberText(NamedTuple):
    """Text, and the offset after the member that it completes (else None)."""

    text: bytes
    member_end: int | None


class SeekableFile(Protocol):
    """A binary file, or a part of one."""

    def seek(self, offset: int, /) -> int: ...
    def read(self, size: int, /) -> bytes: ...


class DamagedError(NsqError):
    """A member is cut off or corrupt. ``offset`` is where it begins: what is before it is good."""

    def __init__(self, message: str, offset: int) -> None:
        super().__init__(message)
        self.offset = offset


def unpack_members(file: SeekableFile, codec: Codec, offset: int = 0) -> Iterator[MemberText]:
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
            begin, member, held = position, unpacker(codec), []
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
    rb'^\{"topic": "([^"\n]*)", "nsqd": "[^"\n]*", "id": "[^"\n]*", "ts": (-?\d+),', re.MULTILINE
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

    def note(self, problem: str) -> None:
        """Keep the first problem."""
        self.damage = self.damage or problem

    @property
    def end(self) -> int:
        """The offset after the last member."""
        return self.members[-1].end if self.members else 0


def codec_at(file: SeekableFile) -> Codec:
    """Return what an open file is compressed with, whatever it is called."""
    file.seek(0)
    return codec_of(file.read(LOOK_SIZE))


def scan_members(path: Path) -> Scan:
    """Read a whole file. Raises ``OSError``; damage is in the result."""
    scan = Scan()
    try:
        with open_to_read(path) as file:
            scan_file(file, scan)
    except NotRegularError as exc:
        scan.damage = str(exc.strerror)
    return scan


def scan_file(file: BinaryIO, scan: Scan) -> None:
    """Read a whole open file into ``scan``. Raises ``OSError``."""
    scan.codec = codec_at(file)
    if scan.codec.is_compressed:
        _scan_compressed(file, scan)
    else:
        _scan_plain(file, scan)


def _scan_compressed(file: BinaryIO, scan: Scan) -> None:
    tally = _Tally(scan.topics)
    try:
        for piece in unpack_members(file, scan.codec):
            tally.add(piece.text)
            if piece.member_end is not None:
                scan.members.append(tally.member(scan.end, piece.member_end))
                tally = _Tally(scan.topics)
    except DamagedError as exc:
        scan.damage = str(exc)


def _scan_plain(file: BinaryIO, scan: Scan) -> None:
    """Cut a plain file at line ends; all of its bytes are in some member."""
    file.seek(0)
    while lines := file.readlines(PLAIN_MEMBER_SIZE):
        tally = _Tally(scan.topics)
        for line in lines:
            tally.add(line)
        scan.members.append(tally.member(scan.end, file.tell()))
        if not lines[-1].endswith(b"\n") and scan.topics:
            scan.damage = f"cut off in the line at byte {file.tell() - len(lines[-1])}"


def topics_in(text: bytes) -> set[str]:
    """Return the topics of the messages in a text; none in one of bare bodies."""
    return _names(_HEAD.findall(text))


def _names(heads: list[tuple[bytes, bytes]]) -> set[str]:
    return {topic.decode("ascii", "replace") for topic, _ in heads}


class _Tally:
    """Counts lines, and looks at topics and times in those that are messages."""

    def __init__(self, topics: set[str]) -> None:
        self._topics = topics
        self._lines = 0
        self._rest = b""
        self._times: list[int] = []

    def add(self, text: bytes) -> None:
        text = self._rest + text
        end = text.rfind(b"\n") + 1
        self._rest = text[end:]
        self._count(text[:end])

    def _count(self, text: bytes) -> None:
        self._lines += text.count(b"\n")
        if heads := _HEAD.findall(text):
            times = [*self._times, *[int(time) for _, time in heads]]
            self._times = [min(times), max(times)]
            self._topics.update(_names(heads))

    def member(self, begin: int, end: int) -> Member:
        if self._rest:
            self._count(self._rest)
            self._lines += 1
        low, high = self._times or (0, 0)
        return Member(begin, end - begin, self._lines, low, high)
