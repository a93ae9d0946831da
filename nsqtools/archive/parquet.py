"""Write messages to Parquet with verification, and read them by time.

A row group contains consecutive messages, sorted by time, so that readers can skip it by its
statistics of ``ts_ns``. Writing, verifying and reading need the memory of one row group.

A written file is read back. For each column of each row group, the checksum of the values in memory
must be the checksum of the values in the file. So errors of the disk, the memory or the library are
detected while the log still exists.
"""

from __future__ import annotations

import errno
import json
import math
import os
from collections.abc import Collection, Iterable, Iterator, Sequence
from contextlib import suppress
from datetime import datetime, timedelta
from pathlib import Path, PurePosixPath
from typing import Any, BinaryIO, NamedTuple, NoReturn

import pyarrow
from pyarrow import ArrowException, compute, parquet, types

from nsqtools.archive.delta import TableFile
from nsqtools.archive.layout import ALL_TIMES, TimeRange
from nsqtools.archive.members import CorruptError, crc32
from nsqtools.archive.place import hash_of
from nsqtools.files.durable import adding_path_to_errors

ROW_GROUP_BYTES = 64 << 20
"""Arrow memory of a row group, which becomes about 12 MiB of Parquet."""
ROW_GROUP_ROWS = 1 << 18
BATCH_ROWS = 1 << 15
ZSTD_LEVEL = 1  # Level 3 makes files of clicks only 1 % smaller.
TIME = "ts_ns"
# The number of columns and of characters for which Delta's own writers keep statistics.
MAX_STATISTICS = 32
MAX_BOUND_LENGTH = 32
_NEW = os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_NOFOLLOW | os.O_CLOEXEC
_DELTA_ENCODED = {"ts_ns", "timestamp"}
_UNORDERED = {"id", "body", "body_bytes"}
"""Columns without statistics: their values have no order, so a reader could skip nothing."""
_UNIQUE = _UNORDERED | _DELTA_ENCODED
"""Columns without a dictionary: their values rarely repeat."""


def write(batches: Iterable[pyarrow.RecordBatch], path: Path, schema: pyarrow.Schema) -> TableFile:
    """Write a durable file and verify it. Raises the errors of `ParquetWriter.close`."""
    with ParquetWriter(path, schema) as writer:
        for batch in batches:
            writer.add(batch)
        return writer.close()


class ParquetWriter:
    """Writes a file. ``with`` removes it unless it was closed without an error.

    All methods raise ``OSError``.
    """

    def __init__(self, path: Path, schema: pyarrow.Schema) -> None:
        self.path = path
        self.schema = schema
        names = schema.names
        with adding_path_to_errors(path):
            self._file = os.fdopen(os.open(path, _NEW, 0o640), "wb")
            self._writer = parquet.ParquetWriter(
                self._file,
                schema,
                compression="zstd",
                compression_level=ZSTD_LEVEL,
                use_dictionary=[name for name in names if name not in _UNIQUE],
                column_encoding=dict.fromkeys(_DELTA_ENCODED & {*names}, "DELTA_BINARY_PACKED"),
                write_statistics=[name for name in names if name not in _UNORDERED],
                write_page_checksum=True,
                store_schema=False,
            )
        self._pending: list[pyarrow.RecordBatch] = []
        self.pending_bytes = 0
        self._pending_rows = 0
        self._rows = 0
        self._checksums: list[list[int]] = []
        self._is_closed = False

    def __enter__(self) -> ParquetWriter:
        return self

    def __exit__(self, error: object, *_: object) -> None:
        if error is not None or not self._is_closed:
            for file in (self._writer, self._file):
                # A close writes the footer, which fails on a full disk. The file is removed anyway.
                with suppress(Exception):
                    file.close()
            self.path.unlink(missing_ok=True)

    def add(self, batch: pyarrow.RecordBatch) -> None:
        """Add a batch to the row group, and write the row group if it is full."""
        self._pending.append(batch)
        self.pending_bytes += batch.nbytes
        self._pending_rows += batch.num_rows
        if self.pending_bytes >= ROW_GROUP_BYTES or self._pending_rows >= ROW_GROUP_ROWS:
            self.end_row_group()

    def end_row_group(self) -> None:
        """Write the pending batches as a row group, sorted by time."""
        if not self._pending_rows:
            return
        table = pyarrow.Table.from_batches(self._pending, schema=self.schema)
        self._pending, self.pending_bytes, self._pending_rows = [], 0, 0
        table = sort_by_time(table)
        with adding_path_to_errors(self.path):
            self._writer.write_table(table, row_group_size=table.num_rows)
        self._checksums.append([checksum(table[name]) for name in table.column_names])
        self._rows += table.num_rows

    def close(self) -> TableFile:
        """Finish the file, make it durable and verify it; return its size, count and times.

        Raises ``OSError``, also if the verification fails.
        """
        self.end_row_group()
        with adding_path_to_errors(self.path):
            self._writer.close()
            self._file.flush()
            os.fsync(self._file.fileno())
            self._file.close()
        min_ts, max_ts, statistics = _verify(self.path, self._checksums, self.schema.names)
        self._is_closed = True
        size = self.path.stat().st_size
        return TableFile(str(self.path), size, self._rows, min_ts, max_ts, statistics=statistics)


def manifest_of(file: TableFile, path: Path) -> bytes:
    """Return the manifest of a file in a folder of Parquet; ``path`` is a copy. Raises ``OSError``.

    The manifest is the commit record of a file that was landed or compacted.
    """
    document = {
        "version": 1,
        "name": PurePosixPath(file.path).name,
        "size": file.bytes,
        "sha256": hash_of(path),
        "messages": file.rows,
        "min_ts": file.min_ts_ns,
        "max_ts": file.max_ts_ns,
    }
    return json.dumps(document, indent=1).encode() + b"\n"


def sort_by_time(table: pyarrow.Table) -> pyarrow.Table:
    """Return the rows sorted by time; rows with equal times keep their order."""
    if TIME not in table.column_names:
        return table
    times = table[TIME].combine_chunks()
    if compute.all(compute.less_equal(times[:-1], times[1:]), min_count=0).as_py():
        return table
    return table.take(compute.sort_indices(times))


def _verify(
    path: Path, checksums: Sequence[Sequence[int]], names: Sequence[str]
) -> tuple[int | None, int | None, dict[str, dict[str, Any]]]:
    """Read a file and compare checksums.

    Returns the first and the last time, and the statistics of other columns. Raises ``OSError``.
    """
    times: list[int | None] = []
    with_nan: set[str] = set()
    try:
        with open_parquet(path) as file:
            is_same = file.num_row_groups == len(checksums)
            for number in range(file.num_row_groups if is_same else 0):
                sums = [Checksum() for _ in names]
                # Small batches use the same memory again: that of a row group costs page faults.
                for batch in file.iter_batches(BATCH_ROWS, row_groups=[number], use_threads=False):
                    for column, each in zip(batch.columns, sums, strict=True):
                        each.add(column)
                    if TIME in names:
                        times += time_bounds(batch[TIME])
                    with_nan |= {name for name in names if _has_nan(batch[name])}
                is_same &= [each.value for each in sums] == list(checksums[number])
            statistics = _statistics_of(file, without_bounds=with_nan)
    except (ArrowException, OSError) as exc:
        raise OSError(errno.EIO, f"it cannot be read back: {exc}", str(path)) from exc
    if not is_same:
        raise OSError(errno.EIO, "its content is not what was written", str(path))
    return *_min_max(times), statistics


def _has_nan(column: Any) -> bool:
    return types.is_floating(column.type) and bool(compute.any(compute.is_nan(column)).as_py())


def _statistics_of(file: Any, *, without_bounds: Collection[str]) -> dict[str, dict[str, Any]]:
    """Return the statistics of plain columns in the form of Delta: see `TableFile`.

    Readers of a table skip files by them without opening each footer. Bounds in Parquet ignore NaN,
    which Spark orders after all numbers, so columns with NaN must be in ``without_bounds``.
    """
    paths = [column.path for column in file.schema]
    groups = [file.metadata.row_group(number) for number in range(file.num_row_groups)]
    statistics: dict[str, dict[str, Any]] = {"minValues": {}, "maxValues": {}, "nullCount": {}}
    for column in file.schema_arrow:
        if column.name == TIME or not _has_order(column.type):
            continue
        if len(statistics["nullCount"]) == MAX_STATISTICS:
            break
        number = paths.index(column.name)
        of_groups = [group.column(number).statistics for group in groups]
        if not all(of_groups) or not all(group.has_null_count for group in of_groups):
            continue
        statistics["nullCount"][column.name] = sum(group.null_count for group in of_groups)
        with_values = [group for group in of_groups if group.num_values]
        has_bounds = with_values and all(group.has_min_max for group in with_values)
        if column.name in without_bounds or not has_bounds:
            continue
        minimum = _json_bound(min(group.min for group in with_values))
        maximum = _json_bound(max(group.max for group in with_values), is_upper=True)
        if minimum is not None and maximum is not None:
            statistics["minValues"][column.name] = minimum
            statistics["maxValues"][column.name] = maximum
    return statistics


def _has_order(kind: Any) -> bool:
    return bool(
        types.is_integer(kind)
        or types.is_float32(kind)
        or types.is_float64(kind)
        or types.is_string(kind)
        or types.is_timestamp(kind)
    )


def _json_bound(value: Any, *, is_upper: bool = False) -> Any:
    """Return a minimum or maximum as Delta has it; None for a value that has no place there."""
    if isinstance(value, datetime):
        # Delta has milliseconds, so the upper bound of microseconds is the next one.
        upper = timedelta(microseconds=999) if is_upper else timedelta()
        try:
            return f"{(value + upper).isoformat('T', 'milliseconds')[:23]}Z"
        except OverflowError:
            return None
    if isinstance(value, str):
        return value if len(value) <= MAX_BOUND_LENGTH else None
    return value if isinstance(value, int) or math.isfinite(value) else None


def checksum(column: pyarrow.ChunkedArray | pyarrow.Array) -> int:
    """Return a checksum of the values of a column, which does not depend on its chunks."""
    sums = Checksum()
    for array in column.chunks if isinstance(column, pyarrow.ChunkedArray) else [column]:
        sums.add(array)
    return sums.value


class Checksum:
    """The checksum of a column that comes in parts."""

    def __init__(self) -> None:
        self._rows = self._nulls = self._lengths = self._values = 0

    @property
    def value(self) -> int:
        return crc32(repr((self._rows, self._nulls, self._lengths, self._values)).encode())

    def add(self, array: pyarrow.Array) -> None:
        if array.null_count:
            positions = compute.add(compute.indices_nonzero(array.is_null()), self._rows)
            self._nulls = crc32(_values(positions.cast(pyarrow.int64())), self._nulls)
        self._rows += len(array)
        array = array.drop_null()
        if types.is_string(array.type) or types.is_binary(array.type):
            self._lengths = crc32(_values(compute.binary_length(array)), self._lengths)
            self._values = crc32(_text_bytes(array), self._values)
            return
        if types.is_boolean(array.type):
            array = array.cast(pyarrow.int8())
        if types.is_primitive(array.type):
            self._values = crc32(_values(array), self._values)
            return
        for value in array.to_pylist():
            self._values = crc32(json.dumps(value, default=str).encode(), self._values)


def _values(array: pyarrow.Array) -> memoryview:
    """Return the bytes of numbers. A slice of an array shares the buffer of the whole array."""
    width = array.type.bit_width // 8
    data = array.buffers()[1]
    if data is None:
        return memoryview(b"")
    return memoryview(data)[array.offset * width : (array.offset + len(array)) * width]


def _text_bytes(array: pyarrow.Array) -> memoryview:
    _, offsets, data = array.buffers()
    if data is None or not len(array):
        return memoryview(b"")
    ends = memoryview(offsets).cast("b").cast("i")
    return memoryview(data)[ends[array.offset] : ends[array.offset + len(array)]]


# -- reading ------------------------------------------------------------------------------------


def open_parquet(source: Path | BinaryIO) -> Any:
    """Open a file to read it in this thread. Raises ``OSError`` and ``ArrowException``.

    By default threads of Arrow read ahead. One that still holds a file of Python when the
    interpreter exits aborts the process.
    """
    return parquet.ParquetFile(source, pre_buffer=False, page_checksum_verification=True)


def read(
    source: Path | BinaryIO, columns: Sequence[str] | None = None, within: TimeRange = ALL_TIMES
) -> Iterator[pyarrow.RecordBatch]:
    """Iterate over the rows of a range of times in batches; skip other row groups.

    ``columns`` that the file lacks are ignored, and the types are those of `plain_schema`. Raises
    ``OSError`` and, for a damaged file, `CorruptError`.
    """
    try:
        with open_parquet(source) as file:
            names = _column_names(file)
            selected = names if columns is None else [name for name in columns if name in names]
            needs_time = within != ALL_TIMES and TIME in names
            read_columns = selected
            if needs_time and TIME not in selected:
                read_columns = [*selected, TIME]
            groups = [
                number
                for number, statistics in enumerate(_time_statistics(file))
                if _may_have(statistics, within)
            ]
            for batch in file.iter_batches(
                BATCH_ROWS, row_groups=groups, columns=read_columns, use_threads=False
            ):
                batch = _to_plain(batch)
                if needs_time:
                    batch = batch.filter(within.mask(batch[TIME]))
                yield batch.select(selected) if read_columns is not selected else batch
    except (ArrowException, OSError) as exc:
        _raise_read_error(exc)


def _raise_read_error(exc: Exception) -> NoReturn:
    """Raise errors of the storage unchanged, and errors of Arrow as `CorruptError`."""
    if isinstance(exc, OSError) and exc.errno is not None:
        raise exc
    raise CorruptError(f"it is not whole Parquet ({str(exc).partition(chr(10))[0]})") from exc


def plain_schema(file: Any) -> pyarrow.Schema:
    """Return the columns of an open file, without metadata.

    Polars, pandas and delta-rs also store the types of Arrow in which they had the values: large
    strings, views and dictionaries. These become the types that the values have in Parquet.
    """
    columns = [column.with_type(_plain_type(column.type)) for column in file.schema_arrow]
    return pyarrow.schema(columns)


def _plain_type(kind: Any) -> Any:
    if types.is_dictionary(kind):
        return _plain_type(kind.value_type)
    if types.is_large_string(kind) or types.is_string_view(kind):
        return pyarrow.string()
    is_binary = types.is_large_binary(kind) or types.is_binary_view(kind)
    return pyarrow.binary() if is_binary else kind


def _to_plain(batch: pyarrow.RecordBatch) -> pyarrow.RecordBatch:
    kinds = [_plain_type(kind) for kind in batch.schema.types]
    if kinds == batch.schema.types:
        return batch
    arrays = [
        (column.dictionary_decode() if types.is_dictionary(column.type) else column).cast(kind)
        for column, kind in zip(batch.columns, kinds, strict=True)
    ]
    return pyarrow.RecordBatch.from_arrays(arrays, names=batch.schema.names)


class Contents(NamedTuple):
    """The content of a file. ``untimed`` counts rows without a time."""

    columns: list[str]
    rows: int
    min_ts_ns: int | None
    max_ts_ns: int | None
    untimed: int
    topics: list[str | None]
    """The distinct values of the column of topics, if it exists."""


def contents_of(source: Path | BinaryIO) -> Contents:
    """Return the content of a file by its footer, and read columns that lack statistics.

    Raises the errors of `read`.
    """
    try:
        with open_parquet(source) as file:
            names, rows = _column_names(file), file.metadata.num_rows
            batches = _column_batches(file, "topic") if "topic" in names else ()
            topics = {topic for values in batches for topic in values.unique().to_pylist()}
            min_ts, max_ts, untimed = _times_of(file)
    except (ArrowException, OSError) as exc:
        _raise_read_error(exc)
    return Contents(names, rows, min_ts, max_ts, untimed, sorted(topics, key=str))


def _column_names(file: Any) -> list[str]:
    """Return the names of the columns.

    Raises `CorruptError` if a column of messages has another type.
    """
    for column in file.schema_arrow:
        kind = _plain_type(column.type)
        expected, *predicates = _TYPES.get(column.name, (None,))
        if expected and not any(is_valid(kind) for is_valid in predicates):
            raise CorruptError(f"its {column.name} is {kind}, not {expected}")
    return list(file.schema_arrow.names)


_TEXT = (types.is_string, types.is_null)
_BYTES = (*_TEXT, types.is_binary)
_TYPES: dict[str, tuple[Any, ...]] = {
    TIME: ("int64", types.is_integer),
    "attempts": ("int32", types.is_integer, types.is_null),
    **dict.fromkeys(("topic", "nsqd", "id"), ("string", *_TEXT)),
    **dict.fromkeys(("body", "body_bytes"), ("string or binary", *_BYTES)),
}


def _time_statistics(file: Any) -> list[Any]:
    """Return the statistics of the times of each row group, or None."""
    paths = [column.path for column in file.schema]  # A struct has several paths.
    if TIME not in paths:
        return [None] * file.num_row_groups
    groups = (file.metadata.row_group(number) for number in range(file.num_row_groups))
    return [group.column(paths.index(TIME)).statistics for group in groups]


def _column_batches(file: Any, name: str) -> Iterator[Any]:
    for batch in file.iter_batches(BATCH_ROWS, columns=[name], use_threads=False):
        yield _to_plain(batch)[name]


def _times_of(file: Any) -> tuple[int | None, int | None, int]:
    """Return the first and the last time, and the number of rows without a time.

    The column is read only if the statistics are incomplete.
    """
    if TIME not in file.schema_arrow.names:
        return None, None, file.metadata.num_rows
    groups = _time_statistics(file)
    if all(group is not None and group.has_min_max and group.has_null_count for group in groups):
        min_ts = min((group.min for group in groups), default=None)
        max_ts = max((group.max for group in groups), default=None)
        return min_ts, max_ts, sum(group.null_count for group in groups)
    times: list[int | None] = []
    untimed = 0
    for values in _column_batches(file, TIME):
        times += time_bounds(values)
        untimed += values.null_count
    return *_min_max(times), untimed


def _min_max(times: Iterable[int | None]) -> tuple[int | None, int | None]:
    valid = [time for time in times if time is not None]
    return (min(valid), max(valid)) if valid else (None, None)


def time_bounds(times: Any) -> list[int | None]:
    """Return the minimum and the maximum of a column of times, each None without a time."""
    return list(compute.min_max(times).as_py().values())


def _may_have(statistics: Any, within: TimeRange) -> bool:
    if (
        within == ALL_TIMES
        or statistics is None
        or not statistics.has_min_max
        or statistics.null_count
    ):
        return True
    return within.overlaps(statistics.min, statistics.max)
