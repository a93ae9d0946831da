"""Messages in Parquet: written in row groups, read back and compared; read by time.

A row group holds the messages that came one after the other, sorted by time, so that its statistics
of ``ts_ns`` say what a reader need not look at. Memory is bounded by a row group, while writing,
comparing and reading.

What was written is proved by the bytes: for each column of each row group there is a checksum of
the values that were handed over, and the file that is read back must give the same. So a fault of
the disk, of the memory or of the library is found while the log is still there.
"""

from __future__ import annotations

import errno
import json
import os
from collections.abc import Iterable, Iterator, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any, BinaryIO, NamedTuple, NoReturn

import pyarrow
from pyarrow import ArrowException, compute, parquet, types

from nsqtools.archive.delta import TableFile
from nsqtools.archive.layout import EVER, TimeRange
from nsqtools.archive.members import CorruptError, crc32
from nsqtools.files.durable import adding_path_to_errors

ROW_GROUP_BYTES = 64 << 20
"""Of Arrow: some 12 MiB of Parquet, and no more than Spark reads at a time."""
ROW_GROUP_ROWS = 1 << 18
BATCH_ROWS = 1 << 15
ZSTD_LEVEL = 1  # 3 makes clicks a hundredth smaller
TIME = "ts_ns"
_NEW = os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_NOFOLLOW | os.O_CLOEXEC
_DELTA_ENCODED = {"ts_ns", "timestamp"}
_ANY = {"id", "body", "body_bytes"}
"""Columns whose values are in no order: their least and most leave no row group out."""
_UNIQUE = _ANY | _DELTA_ENCODED
"""Columns whose values hardly repeat: a dictionary would be built in vain."""


def write(batches: Iterable[pyarrow.RecordBatch], path: Path, schema: pyarrow.Schema) -> TableFile:
    """Write a file, durably, and compare it. Raises as `ParquetWriter.close`."""
    with ParquetWriter(path, schema) as writer:
        for batch in batches:
            writer.add(batch)
        return writer.close()


class ParquetWriter:
    """A file in the making; ``with`` removes one that is not closed, or that an error ends.

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
                write_statistics=[name for name in names if name not in _ANY],
                write_page_checksum=True,
                store_schema=False,
            )
        self._held: list[pyarrow.RecordBatch] = []
        self.held_bytes = 0
        self._held_rows = 0
        self._rows = 0
        self._sums: list[list[int]] = []
        self._is_closed = False

    def __enter__(self) -> ParquetWriter:
        return self

    def __exit__(self, error: object, *_: object) -> None:
        if error is not None or not self._is_closed:
            for each in (self._writer, self._file):
                with suppress(Exception):  # it ends a file that goes, on a disk that is full
                    each.close()
            self.path.unlink(missing_ok=True)

    def add(self, batch: pyarrow.RecordBatch) -> None:
        """Hold a batch; a full row group is written."""
        self._held.append(batch)
        self.held_bytes += batch.nbytes
        self._held_rows += batch.num_rows
        if self.held_bytes >= ROW_GROUP_BYTES or self._held_rows >= ROW_GROUP_ROWS:
            self.end_row_group()

    def end_row_group(self) -> None:
        """Write what is held, in the order of time."""
        if not self._held_rows:
            return

        table = pyarrow.Table.from_batches(self._held, schema=self.schema)
        self._held, self.held_bytes, self._held_rows = [], 0, 0
        table = in_time_order(table)
        with adding_path_to_errors(self.path):
            self._writer.write_table(table, row_group_size=table.num_rows)
        self._sums.append([checksum(table[name]) for name in table.column_names])
        self._rows += table.num_rows

    def close(self) -> TableFile:
        """Finish the file, make it durable, and read it back; return what is in it.

        Raises ``OSError``, also when what is read is not what was written.
        """
        self.end_row_group()
        with adding_path_to_errors(self.path):
            self._writer.close()
            self._file.flush()
            os.fsync(self._file.fileno())
            self._file.close()
        least, most = _compare(self.path, self._sums, self.schema.names)
        self._is_closed = True
        return TableFile(str(self.path), self.path.stat().st_size, self._rows, least, most)


def in_time_order(table: pyarrow.Table) -> pyarrow.Table:
    """Return the rows in the order of time; those of one time keep theirs."""
    if TIME not in table.column_names:
        return table
    times = table[TIME].combine_chunks()
    if compute.all(compute.less_equal(times[:-1], times[1:]), min_count=0).as_py():
        return table
    return table.take(compute.sort_indices(times))


def _compare(
    path: Path, sums: Sequence[Sequence[int]], names: Sequence[str]
) -> tuple[int | None, int | None]:
    """Read a file back; return the lowest and the highest time. Raises ``OSError``."""
    times: list[int | None] = []
    try:
        with parquet.ParquetFile(path, page_checksum_verification=True) as file:
            is_same = file.num_row_groups == len(sums)
            for number in range(file.num_row_groups if is_same else 0):
                group = file.read_row_group(number, use_threads=False)
                is_same &= [checksum(group[name]) for name in names] == list(sums[number])
                if TIME in names:
                    times += time_span(group[TIME])
    except (ArrowException, OSError) as exc:
        raise OSError(errno.EIO, f"it cannot be read back: {exc}", str(path)) from exc
    if not is_same:
        raise OSError(errno.EIO, "what was read back is not what was written", str(path))
    return _ends(times)


def checksum(column: pyarrow.ChunkedArray | pyarrow.Array) -> int:
    """Return a checksum of the values of a column, which is the same however they are chunked."""
    chunks = column.chunks if isinstance(column, pyarrow.ChunkedArray) else [column]
    sums = [0, 0, 0]  # of which are null, of lengths, and of the values or their bytes
    for array in chunks:
        if column.null_count:
            sums[0] = crc32(_values(array.is_null().cast(pyarrow.int8())), sums[0])
        _add(array, sums)
    return crc32(repr((len(column), column.null_count, sums)).encode())


def _add(array: pyarrow.Array, sums: list[int]) -> None:
    array = array.drop_null()
    if types.is_string(array.type) or types.is_binary(array.type):
        sums[1] = crc32(_values(compute.binary_length(array)), sums[1])
        sums[2] = crc32(_text_of(array), sums[2])
        return
    if types.is_boolean(array.type):
        array = array.cast(pyarrow.int8())
    if types.is_primitive(array.type):
        sums[2] = crc32(_values(array), sums[2])
        return
    for value in array.to_pylist():
        sums[2] = crc32(json.dumps(value, default=str).encode(), sums[2])


def _values(array: pyarrow.Array) -> memoryview:
    """The bytes of numbers, without those before and after a slice."""
    width = array.type.bit_width // 8
    whole = array.buffers()[1]
    if whole is None:
        return memoryview(b"")
    return memoryview(whole)[array.offset * width : (array.offset + len(array)) * width]


def _text_of(array: pyarrow.Array) -> memoryview:
    _, offsets, data = array.buffers()
    if data is None or not len(array):
        return memoryview(b"")
    ends = memoryview(offsets).cast("b").cast("i")
    return memoryview(data)[ends[array.offset] : ends[array.offset + len(array)]]


# -- reading ------------------------------------------------------------------------------------


def read(
    source: Path | BinaryIO, columns: Sequence[str] | None = None, within: TimeRange = EVER
) -> Iterator[pyarrow.RecordBatch]:
    """Iterate over the rows of a file, a batch at a time; row groups of other times are left out.

    ``columns`` that the file lacks are left out, too. Raises ``OSError``, `CorruptError` for what
    is not whole Parquet.
    """
    try:
        with parquet.ParquetFile(source, page_checksum_verification=True) as file:
            names = _names_in(file)
            wanted = names if columns is None else [name for name in columns if name in names]
            asked = wanted
            if within != EVER and TIME in names and TIME not in wanted:
                asked = [*wanted, TIME]
            groups = [n for n, each in enumerate(_statistics(file)) if _may_have(each, within)]
            for batch in file.iter_batches(
                BATCH_ROWS, row_groups=groups, columns=asked, use_threads=False
            ):
                if within != EVER and TIME in names:
                    batch = batch.filter(within.mask(batch[TIME]))
                yield batch.select(wanted) if asked is not wanted else batch
    except (ArrowException, OSError) as exc:
        _raise_as_read(exc)


def _raise_as_read(exc: Exception) -> NoReturn:
    """Raise what a storage said as it is, and what Arrow says as `CorruptError`."""
    if isinstance(exc, OSError) and exc.errno is not None:
        raise exc
    raise CorruptError(f"it is not whole Parquet ({str(exc).partition(chr(10))[0]})") from exc


class Contents(NamedTuple):
    """What a file holds. Times are None where there are none; ``untimed`` rows are without."""

    columns: list[str]
    rows: int
    min_ts_ns: int | None
    max_ts_ns: int | None
    untimed: int
    topics: list[str | None]
    """Those in the column of topics, if there is one."""


def contents_of(source: Path | BinaryIO) -> Contents:
    """Read the footer of a file, and as much more as it does not say. Raises as `read`."""
    try:
        with parquet.ParquetFile(source) as file:
            names, rows = _names_in(file), file.metadata.num_rows
            values = _values_in(file, "topic") if "topic" in names else ()
            topics = {each for some in values for each in some.unique().to_pylist()}
            least, most, untimed = _times_of(file)
    except (ArrowException, OSError) as exc:
        _raise_as_read(exc)
    return Contents(names, rows, least, most, untimed, sorted(topics, key=str))


def _names_in(file: Any) -> list[str]:
    """Return the names of the columns. Raises `CorruptError` for one that none of a message is."""
    for each in file.schema_arrow:
        kind = each.type.value_type if types.is_dictionary(each.type) else each.type
        expected, *fitting = _TYPES.get(each.name, (None,))
        if expected and not any(fits(kind) for fits in fitting):
            raise CorruptError(f"its {each.name} is {kind}, not {expected}")
    return list(file.schema_arrow.names)


_TEXT = (types.is_string, types.is_large_string, types.is_null)
_BYTES = (*_TEXT, types.is_binary, types.is_large_binary)
_TYPES: dict[str, tuple[Any, ...]] = {
    TIME: ("int64", types.is_integer),
    "attempts": ("int32", types.is_integer, types.is_null),
    **dict.fromkeys(("topic", "nsqd", "id"), ("string", *_TEXT)),
    **dict.fromkeys(("body", "body_bytes"), ("string or binary", *_BYTES)),
}


def _statistics(file: Any) -> list[Any]:
    """Return those of the times of each row group; None without any, as without such a column."""
    paths = [column.path for column in file.schema]  # a struct is several
    if TIME not in paths:
        return [None] * file.num_row_groups
    groups = (file.metadata.row_group(number) for number in range(file.num_row_groups))
    return [group.column(paths.index(TIME)).statistics for group in groups]


def _values_in(file: Any, name: str) -> Iterator[Any]:
    for batch in file.iter_batches(BATCH_ROWS, columns=[name], use_threads=False):
        yield batch[name]


def _times_of(file: Any) -> tuple[int | None, int | None, int]:
    """Return lowest and highest time, and how many rows have none: by statistics, if they say."""
    if TIME not in file.schema_arrow.names:
        return None, None, file.metadata.num_rows
    found = _statistics(file)
    if all(each is not None and each.has_min_max and each.has_null_count for each in found):
        least, most = (each.min for each in found), (each.max for each in found)
        return min(least, default=None), max(most, default=None), sum(s.null_count for s in found)
    times: list[int | None] = []
    untimed = 0
    for values in _values_in(file, TIME):
        times += time_span(values)
        untimed += values.null_count
    return *_ends(times), untimed


def _ends(times: Iterable[int | None]) -> tuple[int | None, int | None]:
    known = [time for time in times if time is not None]
    return (min(known), max(known)) if known else (None, None)


def time_span(times: Any) -> list[int | None]:
    """Return the lowest and the highest of a column of times; None where there is none."""
    return list(compute.min_max(times).as_py().values())


def _may_have(bounds: Any, within: TimeRange) -> bool:
    if within == EVER or bounds is None or not bounds.has_min_max or bounds.null_count:
        return True
    return within.meets(bounds.min, bounds.max)
