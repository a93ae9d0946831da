"""Read a partition into Arrow record batches, on an executor.

The text of a range is read in pieces of whole lines, each with its position in the file. That is
the position of its member, or in a plain file without index that of its first line. The members of
a log in Arrow are columns already. Memory is bounded by the size of a member or a few megabytes of
text, whichever is more. Damage is reported (`damage`) for each member; the rest of a member of text
is read.
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
    LINE_PREFIX,
    Columns,
    bare_columns,
    exact_columns,
    fast_columns,
    filtered_columns,
    joined,
    log_columns,
    row_mask,
)
from nsqtools.archive.form import BEGINNING as MESSAGE
from nsqtools.archive.form import LineKind
from nsqtools.archive.layout import PART, Head, Member, index_of, is_hidden, owner_of
from nsqtools.archive.members import MAX_LINE_SIZE, DamagedError, unpack_members
from nsqtools.archive.place import LocalPlace, Place, translating_errors
from nsqtools.archive.place_url import parse_place
from nsqtools.archive.reader import (
    AMONG_BODIES,
    BATCH_TEXT,
    end_of_lines,
    read_member,
    read_member_columns,
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
OPEN_TRIES = 5  # A file moves at most a few times: when it is finished, and when it is uploaded.

ReportProblem = Callable[[int, str], None]
"""Called with a position and the problem at it."""


class TextPiece(NamedTuple):
    """Whole lines; ``messages`` is their number according to the index, or `UNKNOWN`."""

    pos: int
    text: bytes
    messages: int = UNKNOWN


def open_range(target: Range, settings: ReadSettings) -> BinaryIO:
    """Open the file of a range at its current place. Raises ``OSError``."""
    place = parse_place(target.path)
    for _ in range(OPEN_TRIES):
        if place.is_remote:
            return place.open("", target.entry)
        if _is_same_file(place.path, target.key):
            with suppress(FileNotFoundError):  # It may move between the check and the opening.
                return place.open()
        place = _locate(target, settings)
    return open_to_read(Path(target.path))


def _is_same_file(path: Path, key: Head | str) -> bool:
    index = index_of(owner_of(path) if is_hidden(path.name, PART) else path)
    with suppress(FileNotFoundError):
        return not isinstance(key, Head) or head_at(index) == key
    return False


def _locate(target: Range, settings: ReadSettings) -> Place:
    path = Path(target.path)
    finished = owner_of(path)
    if is_hidden(path.name, PART) and finished.exists() and _is_same_file(finished, target.key):
        return LocalPlace(finished)
    files = ArchiveListing(settings).files(lambda damage: None)
    return files[target.key].place if target.key in files else LocalPlace(path)


def pieces(
    file: BinaryIO, target: Range, delimiter: bytes, report: ReportProblem
) -> Iterator[TextPiece]:
    """Yield the text of a range. Raises ``OSError``."""
    if target.lines:
        for member in target.members:
            yield from _member(file, member, target.content.codec, delimiter, report)
        return
    is_plain = not target.content.codec.is_compressed
    texts = _plain(file, target, delimiter) if is_plain else _unpacked(file, target, report)
    partial, partial_pos = b"", 0  # The beginning of a line that continues in the next text.
    for pos, text in texts:
        if partial:
            line, ending, remainder = (partial + text).partition(delimiter)
            if ending:
                yield TextPiece(partial_pos, line + ending)
                pos += len(text) - len(remainder) if is_plain else 0
                partial, text = b"", remainder
        if end := end_of_lines(text, delimiter):
            yield TextPiece(pos, text[:end])
        if not partial:
            partial_pos = pos + end if is_plain else pos
        partial += text[end:]
        if len(partial) > MAX_LINE_SIZE:
            report(partial_pos, f"a line is longer than {MAX_LINE_SIZE} bytes")
            return
    if partial:
        yield TextPiece(partial_pos, partial)


def _member(
    file: BinaryIO, member: Member, codec: Codec, delimiter: bytes, report: ReportProblem
) -> Iterator[TextPiece]:
    problems: list[str] = []
    texts = read_member(file, member, codec, problems.append)
    # A large member has several texts. A small, undamaged one needs no search for its lines.
    first_texts = list(islice(texts, 2))
    if len(first_texts) == 1 and not problems:
        yield TextPiece(member.offset, first_texts[0], member.messages)
        return
    count = 0
    for text in whole_lines(chain(first_texts, texts), delimiter):
        count += text.count(delimiter)
        yield TextPiece(member.offset, text)
    if not problems and count != member.messages:
        problems.append(f"it has {count} lines, and {member.messages} in its index")
    for problem in problems:
        report(member.offset, problem)


def _unpacked(file: BinaryIO, target: Range, report: ReportProblem) -> Iterator[tuple[int, bytes]]:
    """Yield the texts of a compressed file, each with the position of its member."""
    pos = target.begin
    try:
        for text, end in unpack_members(file, target.content.codec, target.begin):
            yield pos, text
            pos = end or pos
            if pos >= target.end:  # Later members were written after the plan.
                return
    except DamagedError as exc:
        report(exc.offset, str(exc))


def _plain(file: BinaryIO, target: Range, delimiter: bytes) -> Iterator[tuple[int, bytes]]:
    """Yield the lines that begin in a range, each with its position; the last one is read whole.

    A range that is not a whole file has a delimiter of one byte.
    """
    pos = target.begin
    is_inside = pos > 0  # A line that begins before the range belongs to the previous range.
    if is_inside:
        pos -= len(delimiter)
    file.seek(pos)
    while data := file.read(READ_SIZE):
        begin = 0
        if is_inside:
            begin = data.find(delimiter) + len(delimiter)
            is_inside = begin < len(delimiter)
            if is_inside or pos + begin >= target.end:
                begin = len(data)
        last = target.end - pos - len(delimiter)  # The first delimiter from here ends the range.
        end = data.find(delimiter, max(begin, last))
        if end >= 0:
            yield pos + begin, data[begin : end + len(delimiter)]
            return
        if begin < len(data):
            yield pos + begin, data[begin:]
        pos += len(data)
        if begin == len(data) and pos >= target.end:
            return


BATCH_ROWS = 10_000


def read_partition(
    partition: ReadPartition | None, settings: ReadSettings, names: Sequence[str]
) -> Iterator[pyarrow.RecordBatch]:
    """Yield the messages of a partition, in the columns ``names``.

    If a plan is empty, Spark runs one task with None. Raises `NsqError` for damage that fails the
    query, and as `failure_of` describes.
    """
    for target in partition or ():
        with translating_errors("read", target.path):
            yield from _Reader(target, settings, names).batches()


class _Reader:
    """Reads one range."""

    def __init__(self, target: Range, settings: ReadSettings, names: Sequence[str]) -> None:
        self._range = target
        self._settings = settings
        schema = settings.bodies.archived_schema()
        self._schema = pyarrow.schema([schema.field(name) for name in names])
        self._kind = settings.bodies.kind
        self._parsed = {*names, *filtered_columns(settings.within, settings.names)}
        self._columns = settings.bodies.columns() if self._parsed - RESERVED else None
        if self._columns is not None:
            self._parsed.add("body")
        self._is_raw = target.content.kind is LineKind.bodies
        self._delimiter = settings.delimiter if self._is_raw else b"\n"
        self._damages: dict[int, list[ArchiveDamage]] = {}

    def batches(self) -> Iterator[pyarrow.RecordBatch]:
        with open_range(self._range, self._settings) as file:
            if self._range.lines and self._range.content.codec is Codec.ARROW:
                yield from self._read_columns(file)
                return
            batch: list[TextPiece] = []
            for piece in pieces(file, self._range, self._delimiter, self._note):
                batch.append(piece)
                rows = sum(max(piece.messages, 0) for piece in batch)
                if rows >= BATCH_ROWS or sum(len(piece.text) for piece in batch) >= BATCH_TEXT:
                    yield from self._read(batch)
                    batch = []
            yield from self._read(batch)
            self._report()

    def _read_columns(self, file: BinaryIO) -> Iterator[pyarrow.RecordBatch]:
        """Yield the messages of a log in Arrow, which has an index."""
        batches: list[pyarrow.RecordBatch] = []
        positions: list[Any] = []
        size = 0
        for member in self._range.members:
            problems: list[str] = []
            of_member = read_member_columns(file, member, problems.append)
            count = sum(batch.num_rows for batch in of_member)
            if not problems and count != member.messages:
                problems.append(f"it has {count} messages, and {member.messages} in its index")
            for problem in problems:
                self._note(member.offset, problem)
            batches += of_member
            positions.append(pyarrow.repeat(pyarrow.scalar(member.offset, pyarrow.int64()), count))
            size += member.length
            if sum(map(len, positions)) >= BATCH_ROWS or size >= BATCH_TEXT:
                yield from self._joined(batches, positions)
                batches, positions, size = [], [], 0
        yield from self._joined(batches, positions)
        self._report()

    def _joined(
        self, batches: list[pyarrow.RecordBatch], positions: list[Any]
    ) -> Iterator[pyarrow.RecordBatch]:
        if batches:
            columns = log_columns(joined(batches), self._kind)
            yield from self._rows(columns, pyarrow.concat_arrays(positions))

    def _note(self, pos: int, problem: str) -> None:
        damage = ArchiveDamage(self._range.shown, pos, problem)
        self._damages.setdefault(pos, []).append(damage)

    def _report(self) -> None:
        """Report the noted damages, those of each member separately."""
        # A retry must report a member under the same name, whatever else it reads with it.
        damages_by_pos, self._damages = self._damages, {}
        key = self._range.key
        identity = " ".join(map(str, key)) if isinstance(key, Head) else key
        for pos, damages in damages_by_pos.items():
            report_damage(self._settings.damage_path, f"{identity} {pos}", damages)

    def _read(self, batch: list[TextPiece]) -> Iterator[pyarrow.RecordBatch]:
        if not batch:
            return
        if self._is_raw:
            for piece in batch:
                yield from self._bodies(piece)
            return
        # Counts of the index are only compared with the parsed total, unless rows need positions.
        needs_counts = "pos" in self._parsed
        counts = [
            p.text.count(b"\n") if needs_counts or p.messages == UNKNOWN else p.messages
            for p in batch
        ]
        columns = None
        if all(p.messages in (UNKNOWN, count) for p, count in zip(batch, counts, strict=True)):
            text = b"".join(piece.text for piece in batch)
            columns = fast_columns(text, sum(counts), self._parsed, self._kind)
        if columns is not None:
            yield from self._rows(columns, self._positions(batch, counts))
        else:  # One of the pieces is damaged or has an unusual line.
            for piece in batch:
                yield from self._read([piece]) if len(batch) > 1 else self._exactly(piece)
        self._report()

    def _exactly(self, piece: TextPiece) -> Iterator[pyarrow.RecordBatch]:
        lines = split_lines(piece.text, b"\n")
        columns, valid, problems = exact_columns(lines, self._kind)
        places = self._places(piece, lines)
        for number, problem in problems:
            self._note(places[number], problem)
        if piece.messages not in (UNKNOWN, len(lines)):
            self._note(piece.pos, f"it has {len(lines)} lines, and {piece.messages} in its index")
        yield from self._rows(columns, _int64([places[number] for number in valid]))

    def _bodies(self, piece: TextPiece) -> Iterator[pyarrow.RecordBatch]:
        bodies = split_lines(piece.text, self._delimiter)
        places = self._places(piece, bodies)
        if LINE_PREFIX in piece.text and any(map(MESSAGE.match, bodies)):
            self._note(piece.pos, f"it has {AMONG_BODIES}")
            rows = [(b, p) for b, p in zip(bodies, places, strict=True) if not MESSAGE.match(b)]
            bodies, places = [body for body, _ in rows], [place for _, place in rows]
        columns = bare_columns(bodies, self._settings.topic, self._kind)
        yield from self._rows(columns, _int64(places))

    def _positions(self, batch: list[TextPiece], counts: list[int]) -> Any:
        parts = []
        for piece, count in zip(batch, counts, strict=True):
            if self._has_members:
                parts.append(pyarrow.repeat(pyarrow.scalar(piece.pos, pyarrow.int64()), count))
            else:
                parts.append(_int64(self._places(piece, split_lines(piece.text, b"\n"))))
        return pyarrow.concat_arrays(parts)

    @property
    def _has_members(self) -> bool:
        return bool(self._range.lines) or self._range.content.codec.is_compressed

    def _places(self, piece: TextPiece, lines: list[bytes]) -> list[int]:
        """Return the position of each line: that of its member, or without members its own."""
        if self._has_members:
            return [piece.pos] * len(lines)
        lengths = [len(line) + len(self._delimiter) for line in lines]
        return list(accumulate(lengths[:-1], initial=piece.pos)) if lines else []

    def _rows(self, columns: Columns, positions: Any) -> Iterator[pyarrow.RecordBatch]:
        count = len(positions)
        if not count:
            return
        path = self._range.shown.encode(errors="backslashreplace").decode()  # It may not be UTF-8.
        file = pyarrow.repeat(pyarrow.scalar(path, pyarrow.string()), count)
        columns = {**columns, "file": file, "pos": positions}
        names = [name for name in columns if name in self._parsed]
        batch = pyarrow.RecordBatch.from_arrays([columns[name] for name in names], names=names)
        mask = row_mask(columns, self._settings.within, self._settings.names)
        if mask is not None:
            batch = batch.filter(mask)
        if self._columns is not None:
            batch = self._columns.add(batch)
        batch = batch.select(self._schema.names)
        for begin in range(0, batch.num_rows, BATCH_ROWS):
            yield batch.slice(begin, BATCH_ROWS)


def _int64(numbers: list[int]) -> Any:
    return pyarrow.array(numbers, pyarrow.int64())
