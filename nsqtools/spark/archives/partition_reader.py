"""A partition into Arrow record batches: what an executor does.

The text of a range of a file comes in pieces of whole lines, each with its position in the file:
that of the member; a plain file without index has no members, and each piece has the position of
its first line. Memory is bounded by a member or a few megabytes of text, whichever is more. What
cannot be read is reported (`damage`), one member at a time; the rest of it is read.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from itertools import accumulate, chain, islice
from pathlib import Path
from typing import Any, BinaryIO, NamedTuple

import pyarrow

from nsqtools.archive.body_columns import RESERVED
from nsqtools.archive.columns import (
    BEGINNING,
    Columns,
    bare_columns,
    exact_columns,
    fast_columns,
    filtered_columns,
    wanted_rows,
)
from nsqtools.archive.form import BEGINNING as MESSAGE
from nsqtools.archive.form import LineKind
from nsqtools.archive.layout import PART, Head, Member, index_of, is_hidden, owner_of
from nsqtools.archive.members import LONGEST_LINE, DamagedError, unpack_members
from nsqtools.archive.place import LocalPlace, Place, translating_errors
from nsqtools.archive.reader import (
    AMONG_BODIES,
    BATCH_TEXT,
    lines_end,
    read_member,
    split_lines,
    whole_lines,
)
from nsqtools.files.opening import open_to_read
from nsqtools.records.naming import Codec
from nsqtools.spark.archives.archive_files import UNKNOWN, ArchiveListing, head_at
from nsqtools.spark.archives.damage import ArchiveDamage, report_damage
from nsqtools.spark.archives.partitions import Range, ReadPartition
from nsqtools.spark.archives.read_settings import ReadSettings

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
    place = Place.parse(wanted.path)
    for _ in range(OPEN_TRIES):
        if place.is_remote:
            return place.open("", wanted.entry)
        if _is_it(place.path, wanted.key):
            with suppress(FileNotFoundError):  # it moved in this moment
                return place.open()
        place = _find(wanted, settings)
    return open_to_read(Path(wanted.path))


def _is_it(path: Path, key: Head | str) -> bool:
    index = index_of(owner_of(path) if is_hidden(path.name, PART) else path)
    with suppress(FileNotFoundError):
        return not isinstance(key, Head) or head_at(index) == key
    return False


def _find(wanted: Range, settings: ReadSettings) -> Place:
    path = Path(wanted.path)
    finished = owner_of(path)
    if is_hidden(path.name, PART) and finished.exists() and _is_it(finished, wanted.key):
        return LocalPlace(finished)
    files = ArchiveListing(settings).files(lambda damage: None)
    return files[wanted.key].place if wanted.key in files else LocalPlace(path)


def pieces(
    file: BinaryIO, wanted: Range, delimiter: bytes, tell: ReportProblem
) -> Iterator[TextPiece]:
    """Iterate over the text of a range. Raises ``OSError``."""
    if wanted.lines:
        for member in wanted.members:
            yield from _member(file, member, wanted.content.codec, delimiter, tell)
        return
    is_plain = not wanted.content.codec.is_compressed
    texts = _plain(file, wanted, delimiter) if is_plain else _unpacked(file, wanted, tell)
    rest, rest_pos = b"", 0
    for pos, text in texts:
        line, ending, behind = (rest + text).partition(delimiter) if rest else (b"", b"", text)
        if ending:
            yield TextPiece(rest_pos, line + ending)
            pos += len(text) - len(behind) if is_plain else 0
            rest, text = b"", behind
        if end := lines_end(text, delimiter):
            yield TextPiece(pos, text[:end])
        if not rest:
            rest_pos = pos + end if is_plain else pos
        rest += text[end:]
        if len(rest) > LONGEST_LINE:
            tell(rest_pos, f"a line is longer than {LONGEST_LINE} bytes")
            return
    if rest:
        yield TextPiece(rest_pos, rest)


def _member(
    file: BinaryIO, member: Member, codec: Codec, delimiter: bytes, tell: ReportProblem
) -> Iterator[TextPiece]:
    problems: list[str] = []
    texts = read_member(file, member, codec, problems.append)  # a large one in several pieces
    some = list(islice(texts, 2))
    if len(some) == 1 and not problems:
        yield TextPiece(member.offset, some[0], member.messages)
        return
    count = 0
    for text in whole_lines(chain(some, texts), delimiter):
        count += text.count(delimiter)
        yield TextPiece(member.offset, text)
    if not problems and count != member.messages:
        problems.append(f"it has {count} lines, and {member.messages} in its index")
    for problem in problems:
        tell(member.offset, problem)


def _unpacked(file: BinaryIO, wanted: Range, tell: ReportProblem) -> Iterator[tuple[int, bytes]]:
    """Iterate over the text of a compressed file, each piece with the position of its member."""
    pos = wanted.begin
    try:
        for text, end in unpack_members(file, wanted.content.codec, wanted.begin):
            yield pos, text
            pos = end or pos
            if pos >= wanted.end:  # what follows was written after this was planned
                return
    except DamagedError as exc:
        tell(exc.offset, str(exc))


def _plain(file: BinaryIO, wanted: Range, delimiter: bytes) -> Iterator[tuple[int, bytes]]:
    """Iterate over the lines that begin in a range; the last one is read to its end.

    A range that is not a whole file has a delimiter of one byte.
    """
    pos = wanted.begin
    is_inside = pos > 0  # the line at the beginning belongs to the range before
    if is_inside:
        pos -= len(delimiter)
    file.seek(pos)
    while data := file.read(READ_SIZE):
        begin = 0
        if is_inside:
            begin = data.find(delimiter) + len(delimiter)
            is_inside = begin < len(delimiter)
            if is_inside or pos + begin >= wanted.end:
                begin = len(data)
        last = wanted.end - pos - len(delimiter)  # a delimiter from here on ends the range
        end = data.find(delimiter, max(begin, last))
        if end >= 0:
            yield pos + begin, data[begin : end + len(delimiter)]
            return
        if begin < len(data):
            yield pos + begin, data[begin:]
        pos += len(data)
        if begin == len(data) and pos >= wanted.end:
            return


BATCH_ROWS = 10_000


def read_partition(
    partition: ReadPartition | None, settings: ReadSettings, names: Sequence[str]
) -> Iterator[pyarrow.RecordBatch]:
    """Iterate over the messages of a partition, in the columns ``names``.

    With nothing to read, Spark gives None to the only task.

    Raises `NsqError` for damage that fails the query, and as `failure_of` says.
    """
    for each in partition or ():
        with translating_errors("read", each.path):
            yield from _Reader(each, settings, names).batches()


class _Reader:
    """Reads one range."""

    def __init__(self, wanted: Range, settings: ReadSettings, names: Sequence[str]) -> None:
        self._range = wanted
        self._settings = settings
        schema = settings.bodies.archived_schema()
        self._schema = pyarrow.schema([schema.field(name) for name in names])
        self._kind = settings.bodies.kind
        self._parsed = {*names, *filtered_columns(settings.within, settings.names)}
        self._columns = settings.bodies.columns() if self._parsed - RESERVED else None
        if self._columns is not None:
            self._parsed.add("body")
        self._is_raw = wanted.content.kind is LineKind.bodies
        self._delimiter = settings.delimiter if self._is_raw else b"\n"
        self._found: dict[int, list[ArchiveDamage]] = {}

    def batches(self) -> Iterator[pyarrow.RecordBatch]:
        with open_range(self._range, self._settings) as file:
            held: list[TextPiece] = []
            for piece in pieces(file, self._range, self._delimiter, self._note):
                held.append(piece)
                rows = sum(max(each.messages, 0) for each in held)
                if rows >= BATCH_ROWS or sum(len(each.text) for each in held) >= BATCH_TEXT:
                    yield from self._read(held)
                    held = []
            yield from self._read(held)
            self._tell()

    def _note(self, pos: int, problem: str) -> None:
        damage = ArchiveDamage(self._range.shown, pos, problem)
        self._found.setdefault(pos, []).append(damage)

    def _tell(self) -> None:
        """Tell what was noted, each member's by itself: its name is the same each time."""
        noted, self._found = self._found, {}
        key = self._range.key
        identity = " ".join(map(str, key)) if isinstance(key, Head) else key
        for pos, found in noted.items():
            report_damage(self._settings.damage_path, f"{identity} {pos}", found)

    def _read(self, held: list[TextPiece]) -> Iterator[pyarrow.RecordBatch]:
        if not held:
            return
        if self._is_raw:
            for piece in held:
                yield from self._bodies(piece)
            return
        # what an index says is not counted again: the sum has to be as many as are parsed
        needs_each = "pos" in self._parsed  # else it does not matter which member a row is of
        counts = [
            each.text.count(b"\n") if needs_each or each.messages == UNKNOWN else each.messages
            for each in held
        ]
        columns = None
        if all(each.messages in (UNKNOWN, n) for each, n in zip(held, counts, strict=True)):
            text = b"".join(piece.text for piece in held)
            columns = fast_columns(text, sum(counts), self._parsed, self._kind)
        if columns is not None:
            yield from self._rows(columns, self._positions(held, counts))
        else:  # one of them is not as expected
            for piece in held:
                yield from self._read([piece]) if len(held) > 1 else self._exactly(piece)
        self._tell()

    def _exactly(self, piece: TextPiece) -> Iterator[pyarrow.RecordBatch]:
        lines = split_lines(piece.text, b"\n")
        columns, kept, problems = exact_columns(lines, self._kind)
        places = self._places(piece, lines)
        for number, problem in problems:
            self._note(places[number], problem)
        if piece.messages not in (UNKNOWN, len(lines)):
            self._note(piece.pos, f"it has {len(lines)} lines, and {piece.messages} in its index")
        yield from self._rows(columns, _int64([places[number] for number in kept]))

    def _bodies(self, piece: TextPiece) -> Iterator[pyarrow.RecordBatch]:
        bodies = split_lines(piece.text, self._delimiter)
        places = self._places(piece, bodies)
        if BEGINNING in piece.text and any(map(MESSAGE.match, bodies)):
            self._note(piece.pos, f"it has {AMONG_BODIES}")
            kept = [(b, at) for b, at in zip(bodies, places, strict=True) if not MESSAGE.match(b)]
            bodies, places = [body for body, _ in kept], [at for _, at in kept]
        columns = bare_columns(bodies, self._settings.topic, self._kind)
        yield from self._rows(columns, _int64(places))

    def _positions(self, held: list[TextPiece], counts: list[int]) -> Any:
        parts = []
        for piece, count in zip(held, counts, strict=True):
            if self._has_members:
                parts.append(pyarrow.repeat(pyarrow.scalar(piece.pos, pyarrow.int64()), count))
            else:
                parts.append(_int64(self._places(piece, split_lines(piece.text, b"\n"))))
        return pyarrow.concat_arrays(parts)

    @property
    def _has_members(self) -> bool:
        return bool(self._range.lines) or self._range.content.codec.is_compressed

    def _places(self, piece: TextPiece, lines: list[bytes]) -> list[int]:
        """Where each line is: in its member, or without members at a byte of the file."""
        if self._has_members:
            return [piece.pos] * len(lines)
        lengths = [len(line) + len(self._delimiter) for line in lines]
        return list(accumulate(lengths[:-1], initial=piece.pos)) if lines else []

    def _rows(self, columns: Columns, positions: Any) -> Iterator[pyarrow.RecordBatch]:
        count = len(positions)
        if not count:
            return
        shown = self._range.shown.encode(errors="backslashreplace").decode()  # may not be UTF-8
        file = pyarrow.repeat(pyarrow.scalar(shown, pyarrow.string()), count)
        columns = {**columns, "file": file, "pos": positions}
        names = [name for name in columns if name in self._parsed]
        batch = pyarrow.RecordBatch.from_arrays([columns[name] for name in names], names=names)
        mask = wanted_rows(columns, self._settings.within, self._settings.names)
        if mask is not None:
            batch = batch.filter(mask)
        if self._columns is not None:
            batch = self._columns.add(batch)
        batch = batch.select(self._schema.names)
        for begin in range(0, batch.num_rows, BATCH_ROWS):
            yield batch.slice(begin, BATCH_ROWS)


def _int64(numbers: list[int]) -> Any:
    return pyarrow.array(numbers, pyarrow.int64())
