"""The text of a range of a file, in pieces of whole lines, each with its position in the file.

The position is that of the member; a plain file without index has no members, and each piece has
the position of its first line. Damage is reported and skipped.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import BinaryIO, NamedTuple

from nsqtools.archive.codecs import Codec, unpack_whole
from nsqtools.archive.layout import PART, Head, Member, index_of, is_hidden, owner_of
from nsqtools.archive.members import DamagedError, unpack_members
from nsqtools.archive.reader import LARGEST_TEXT, LONGEST_LINE, read_member
from nsqtools.files.opening import open_to_read
from nsqtools.spark.archives.archive_files import UNKNOWN, Listing, head_at
from nsqtools.spark.archives.partitions import Range
from nsqtools.spark.archives.read_settings import ReadSettings
from nsqtools.spark.location import parse_place

READ_SIZE = 1 << 20
OPEN_TRIES = 5

ReportProblem = Callable[[int, str], None]
"""Takes a position and the problem there."""


class TextPiece(NamedTuple):
    """Whole lines; ``messages`` is their number by the index, or `UNKNOWN`."""

    pos: int
    text: bytes
    messages: int = UNKNOWN


def open_range(wanted: Range, settings: ReadSettings) -> BinaryIO:
    """Open the file of a range, wherever it is by now. Raises ``OSError``."""
    place = parse_place(wanted.path)
    if not isinstance(place, Path):
        return place.open()
    path: Path | None = place
    for _ in range(OPEN_TRIES):
        if path is not None and _is_it(path, wanted.key):
            try:
                return open_to_read(path)
            except FileNotFoundError:
                pass  # it moved in this moment
        path = _find(wanted, settings)
    return open_to_read(place)


def _is_it(path: Path, key: Head | str) -> bool:
    if not isinstance(key, Head):
        return True
    try:
        return head_at(index_of(owner_of(path) if is_hidden(path.name, PART) else path)) == key
    except FileNotFoundError:
        return False


def _find(wanted: Range, settings: ReadSettings) -> Path | None:
    path = Path(wanted.path)
    if is_hidden(path.name, PART) and _is_it(owner_of(path), wanted.key):
        return owner_of(path)
    files = Listing(settings.roots, settings.work_dir).files(lambda damage: None)
    return files[wanted.key].path if wanted.key in files else None


def pieces(
    file: BinaryIO, wanted: Range, delimiter: bytes, tell: ReportProblem
) -> Iterator[TextPiece]:
    """Iterate over the text of a range. Raises ``OSError``."""
    if wanted.lines:
        for member in wanted.members:
            yield from _member(file, member, wanted.content.codec, tell)
    elif wanted.content.codec.is_compressed:
        yield from _compressed(file, wanted, delimiter, tell)
    else:
        yield from _plain(file, wanted, delimiter, tell)


def _member(
    file: BinaryIO, member: Member, codec: Codec, tell: ReportProblem
) -> Iterator[TextPiece]:
    if codec.is_compressed:
        file.seek(member.offset)
        text = unpack_whole(codec, file.read(member.length), LARGEST_TEXT)
        if text is not None:
            yield TextPiece(member.offset, text, member.messages)
            return
    problems: list[str] = []
    for text in read_member(file, member, codec, problems.append):
        yield TextPiece(member.offset, text, UNKNOWN if problems else member.messages)
    for problem in problems:
        tell(member.offset, problem)


class _Until:
    """A file that ends where it ended when it was planned to be read."""

    def __init__(self, file: BinaryIO, end: int) -> None:
        self._file = file
        self._end = end

    def seek(self, offset: int) -> int:
        return self._file.seek(offset)

    def read(self, size: int) -> bytes:
        return self._file.read(max(0, min(size, self._end - self._file.tell())))


def _compressed(
    file: BinaryIO, wanted: Range, delimiter: bytes, tell: ReportProblem
) -> Iterator[TextPiece]:
    member_pos = rest_pos = wanted.begin
    rest = b""
    try:
        for text, member_end in unpack_members(
            _Until(file, wanted.end), wanted.content.codec, wanted.begin
        ):
            if rest and (cut := _behind(text, delimiter, rest)):
                yield TextPiece(rest_pos, rest + text[:cut])
                rest, text = b"", text[cut:]
            if not rest:
                rest_pos = member_pos
            end = text.rfind(delimiter) + len(delimiter) if delimiter in text else 0
            if end:
                yield TextPiece(rest_pos, text[:end])
            rest += text[end:]
            if len(rest) > LONGEST_LINE:
                tell(rest_pos, f"a line is longer than {LONGEST_LINE} bytes")
                return
            member_pos = member_end if member_end is not None else member_pos
    except DamagedError as exc:
        tell(exc.offset, str(exc))
        return
    if rest:
        yield TextPiece(rest_pos, rest)


def _behind(text: bytes, delimiter: bytes, rest: bytes) -> int:
    """Where in ``text`` the line that began as ``rest`` ends; 0 if it does not."""
    overlap = rest[-(len(delimiter) - 1) :] if len(delimiter) > 1 else b""
    found = (overlap + text).find(delimiter)
    return found + len(delimiter) - len(overlap) if found >= 0 else 0


def _plain(
    file: BinaryIO, wanted: Range, delimiter: bytes, tell: ReportProblem
) -> Iterator[TextPiece]:
    """Lines that begin in the range; the last one is read to its end."""
    pos = wanted.begin
    file.seek(max(0, pos - len(delimiter)))
    held = file.read(READ_SIZE)
    if pos:  # the line at the beginning belongs to the range before
        pos -= len(delimiter)
        while delimiter not in held:
            more = file.read(READ_SIZE)
            if not more or pos >= wanted.end:
                return
            pos += len(held) - len(delimiter) + 1
            held = held[len(held) - len(delimiter) + 1 :] + more
        begin = held.index(delimiter) + len(delimiter)
        pos, held = pos + begin, held[begin:]
    while pos < wanted.end:
        last = wanted.end - pos - len(delimiter)  # a delimiter from here on ends the range
        if len(held) >= wanted.end - pos and (at := held.find(delimiter, max(0, last))) >= 0:
            yield TextPiece(pos, held[: at + len(delimiter)])
            return
        end = held.rfind(delimiter) + len(delimiter) if delimiter in held else 0
        if end:
            yield TextPiece(pos, held[:end])
            pos, held = pos + end, held[end:]
        if len(held) > LONGEST_LINE:
            tell(pos, f"a line is longer than {LONGEST_LINE} bytes")
            return
        more = file.read(READ_SIZE)
        if not more:
            break
        held += more
    if held and pos < wanted.end:
        yield TextPiece(pos, held)
