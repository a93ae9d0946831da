"""A partition into Arrow record batches: what an executor does.

Memory is bounded by a member or a few megabytes of text, whichever is more. What cannot be read is
reported (`damage`), one member at a time; the rest of it is read.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import accumulate
from typing import TYPE_CHECKING, Any

from nsqtools.errors import OutputError
from nsqtools.spark.archives.archive_files import UNKNOWN, LineKind
from nsqtools.spark.archives.damage import ArchiveDamage, DamageReports
from nsqtools.spark.archives.message_columns import (
    Columns,
    archived_schema,
    body_columns,
    exact_columns,
    fast_columns,
    filtered_columns,
    wanted_rows,
)
from nsqtools.spark.archives.partitions import Range, ReadPartition
from nsqtools.spark.archives.read_settings import ReadSettings
from nsqtools.spark.archives.texts import TextPiece, open_range, pieces

if TYPE_CHECKING:
    import pyarrow

BATCH_ROWS = 10_000
BATCH_TEXT = 8 << 20


def read_partition(
    partition: ReadPartition, settings: ReadSettings, names: Sequence[str] | None = None
) -> Iterator[pyarrow.RecordBatch]:
    """Iterate over the messages of a partition, in the columns ``names`` (default: all).

    Raises `NsqError` for damage that fails the query, `OutputError` for what cannot be read.
    """
    names = archived_schema().names if names is None else names
    for each in partition.ranges:
        try:
            yield from _Reader(each, settings, names).batches()
        except OSError as exc:
            reason = exc.strerror or exc
            raise OutputError(f"cannot read {exc.filename or each.path} ({reason})") from exc


class _Reader:
    """Reads one range."""

    def __init__(self, wanted: Range, settings: ReadSettings, names: Sequence[str]) -> None:
        import pyarrow

        self._range = wanted
        self._settings = settings
        self._schema = pyarrow.schema([archived_schema().field(name) for name in names])
        self._parsed = {*names, *filtered_columns(settings.within, settings.names)}
        self._is_raw = wanted.content.kind is LineKind.bodies
        self._delimiter = settings.delimiter if self._is_raw else b"\n"
        self._damages = DamageReports(settings.damage_path)
        self._found: list[ArchiveDamage] = []

    def batches(self) -> Iterator[pyarrow.RecordBatch]:
        with open_range(self._range, self._settings) as file:
            held: list[TextPiece] = []
            for piece in pieces(file, self._range, self._delimiter, self._note):
                held.append(piece)
                is_enough = (
                    sum(max(each.messages, 0) for each in held) >= BATCH_ROWS
                    or sum(len(each.text) for each in held) >= BATCH_TEXT
                )
                if is_enough:
                    yield from self._read(held)
                    held = []
            yield from self._read(held)
            self._tell()

    def _note(self, pos: int, problem: str) -> None:
        self._found.append(ArchiveDamage(self._range.shown, pos, problem))

    def _tell(self) -> None:
        """Tell what was noted, each member's by itself: its name is the same each time."""
        by_pos: dict[int, list[ArchiveDamage]] = {}
        for damage in self._found:
            by_pos.setdefault(damage.pos, []).append(damage)
        self._found = []
        for pos, found in by_pos.items():
            self._damages.tell(f"{self._range.identity} {pos}", found)

    def _read(self, held: list[TextPiece]) -> Iterator[pyarrow.RecordBatch]:
        if not held:
            return
        if self._is_raw:
            for piece in held:
                yield from self._bodies(piece)
            return
        columns = None
        counts = [piece.text.count(b"\n") for piece in held]
        if all(each.messages in (UNKNOWN, n) for each, n in zip(held, counts, strict=True)):
            columns = fast_columns(
                b"".join(piece.text for piece in held), sum(counts), self._parsed
            )
        if columns is not None:
            yield from self._rows(columns, self._positions(held, counts))
        elif len(held) > 1:  # one of them is not as expected
            for piece in held:
                yield from self._read([piece])
        else:
            yield from self._exactly(held[0])
        self._tell()

    def _exactly(self, piece: TextPiece) -> Iterator[pyarrow.RecordBatch]:
        lines = _split(piece.text, b"\n")
        columns, kept, problems = exact_columns(lines)
        places = self._places(piece, lines)
        for number, problem in problems:
            self._note(places[number], problem)
        if piece.messages not in (UNKNOWN, len(lines)):
            self._note(piece.pos, f"it has {len(lines)} lines, and {piece.messages} in its index")
        yield from self._rows(columns, _int64([places[number] for number in kept]))

    def _bodies(self, piece: TextPiece) -> Iterator[pyarrow.RecordBatch]:
        bodies = _split(piece.text, self._delimiter)
        columns = body_columns(bodies, self._settings.topic)
        yield from self._rows(columns, _int64(self._places(piece, bodies)))

    def _positions(self, held: list[TextPiece], counts: list[int]) -> Any:
        import pyarrow

        parts = []
        for piece, count in zip(held, counts, strict=True):
            if self._has_members:
                parts.append(pyarrow.repeat(pyarrow.scalar(piece.pos, pyarrow.int64()), count))
            else:
                parts.append(_int64(self._places(piece, _split(piece.text, b"\n"))))
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
        import pyarrow

        count = len(positions)
        if not count:
            return
        file = pyarrow.repeat(pyarrow.scalar(self._range.shown, pyarrow.string()), count)
        columns = {**columns, "file": file, "pos": positions}
        schema = self._schema
        batch = pyarrow.RecordBatch.from_arrays([columns[n] for n in schema.names], schema=schema)
        mask = wanted_rows(columns, self._settings.within, self._settings.names)
        if mask is not None:
            batch = batch.filter(mask)
        for begin in range(0, batch.num_rows, BATCH_ROWS):
            yield batch.slice(begin, BATCH_ROWS)


def _split(text: bytes, delimiter: bytes) -> list[bytes]:
    lines = text.split(delimiter)
    if not lines[-1]:
        lines.pop()
    return lines


def _int64(numbers: list[int]) -> Any:
    import pyarrow

    return pyarrow.array(numbers, pyarrow.int64())
