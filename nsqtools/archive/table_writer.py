"""Convert archives to the Parquet files of a table, or of a table for each topic.

    topic=clicks/date=2026-11-23/web1-5b1c2f0e8d9a4e6f-17-18a6f5c09d6bd115.parquet

An archive file becomes one Parquet file for each of its partitions. The name consists of the host,
writer, number and first time of the archive file, so it is unique, and a repeated conversion writes
the same rows under the same name.

If bodies have new columns, the conversion of the file starts again with all columns. So each
partition gets one file with one schema, even after interruptions. A damaged archive file is not
converted.
"""

from __future__ import annotations

import errno
import hashlib
import os
import time
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from contextlib import ExitStack
from dataclasses import dataclass, field, replace
from datetime import UTC, datetime
from functools import partial
from operator import attrgetter
from pathlib import Path, PurePosixPath
from typing import Any, BinaryIO

import pyarrow
from pyarrow import compute, types

from nsqtools.archive.body_columns import ERROR, RESERVED, BodyColumns, join_errors
from nsqtools.archive.body_schema import fields_of
from nsqtools.archive.catalog import DAY_NS, PARTITIONS, hash_path
from nsqtools.archive.columns import JSON_BATCH_ROWS, message_schema, read_batches
from nsqtools.archive.delta import SINK_LOG, TableFile, partition_text, refuse_other_form
from nsqtools.archive.finding import ArchiveFile
from nsqtools.archive.layout import NULL_PARTITION, folder_of
from nsqtools.archive.members import CorruptError
from nsqtools.archive.parquet import ROW_GROUP_BYTES, ParquetWriter, read
from nsqtools.archive.place import translating_errors
from nsqtools.archive.place_url import parse_place
from nsqtools.archive.slices import fit_to_schema
from nsqtools.archive.table_places import TOPIC, refuse_inside_table, split_at_topic, url_of_topic
from nsqtools.archive.upload import NotUploadable, identity_of, token_of_host
from nsqtools.errors import ConfigurationError
from nsqtools.files.durable import LineFile, adding_path_to_errors
from nsqtools.records.envelope import BodyKind, Envelope, encode_dead_letter

HOUR_NS = 3_600 * 10**9
# Each partition has an open file. Further partitions are written in another pass over the archive.
MAX_OPEN_PARTITIONS = 500
MESSAGE_COLUMNS = {*RESERVED, ERROR}
# File systems allow 255 bytes in the name of a folder, and object stores 1024 in the whole path.
MAX_VALUE_BYTES = 200


@dataclass(frozen=True, slots=True)
class TablePlan:
    """The target and the columns of a conversion.

    With ``{topic}`` in its ``url`` each topic has a table. ``partition_by`` has ``hour`` and fields
    of the bodies, in addition to topic and date. ``fields`` is the initial JSON Schema of bodies.
    ``options`` are settings of the object store. ``dead_letters`` is the path of a file that gets
    copies of the messages that do not fit.
    """

    url: str
    is_delta: bool
    host: str
    body: BodyKind = BodyKind.string
    fields: Mapping[str, Any] | None = None
    partition_by: tuple[str, ...] = ()
    options: Mapping[str, str] = field(default_factory=dict)
    dead_letters: str = ""

    @property
    def is_by_topic(self) -> bool:
        """Whether each topic has a table."""
        return TOPIC in self.url

    @property
    def base(self) -> str:
        """The URL of the table, or of the folder above the tables of topics."""
        return split_at_topic(self.url)[0]

    @property
    def partitions(self) -> tuple[str, ...]:
        """The partition columns, in the order of the folders."""
        return (*PARTITIONS, *self.partition_by)

    def of_topic(self, topic: str | None) -> TablePlan:
        """Return the plan of one table. Raises ``ValueError`` as `url_of_topic`."""
        return replace(self, url=url_of_topic(self.url, topic))

    def check(self, option: str = "--store") -> None:
        """Raise `NsqError` if the options conflict with each other or with existing tables.

        ``option`` chooses between Parquet and Delta.
        """
        place = parse_place(self.base, self.options)
        with translating_errors("use", self.base):
            refuse_inside_table(place / "table" if self.is_by_topic else place)
        if not self.is_by_topic:
            self.check_table(option)
        columns = BodyColumns(fields_of(self.fields)).schema()
        plain = {column.name for column in columns if not types.is_nested(column.type)}
        for name in self.partition_by:
            if name != "hour" and name not in plain - MESSAGE_COLUMNS:
                raise ConfigurationError(
                    f"--partition-by .{name} needs a plain field in the schema of bodies",
                    hint="Give --body json and --schema FILE; nsq archive schema makes one.",
                )

    def check_table(self, option: str = "--store") -> None:
        """Raise `NsqError` if the plan of one table conflicts with the existing table."""
        place = parse_place(self.url, self.options)
        with translating_errors("use", self.url):
            refuse_other_form(place, option, is_delta=self.is_delta)
            is_sparks = SINK_LOG in place.children("")[1]
        # `nsq spark ingest --format parquet` takes over what an earlier version wrote.
        if is_sparks and not self.is_delta and option != "--format":
            raise ConfigurationError(
                f"{self.url} is written by Spark, whose log has its files",
                hint="Run nsq spark ingest on it once, or give another place.",
            )


PartitionTuple = tuple[str | None, ...]
"""The values of a partition, in the order of the partition columns."""


@dataclass(frozen=True, slots=True)
class Unfit:
    """The number of bodies that did not fit their columns, and the fields without a column."""

    bodies: int = 0
    fields: Collection[str] = ()


@dataclass(frozen=True, slots=True)
class Draft:
    """A written and verified Parquet file, and its entry in the table."""

    path: str
    file: TableFile


@dataclass(frozen=True, slots=True)
class TableMessages:
    """The messages of an archive file, or of a task of Spark, for `TableWriter`.

    ``read`` iterates over them in the columns of `message_schema`, and may be called again.
    ``count`` is their number if it is recorded. ``time_ns`` returns the time of messages without
    one.
    """

    read: Callable[[], Iterator[pyarrow.RecordBatch]]
    shown: str
    time_ns: Callable[[], int]
    count: int | None = None


# -- convert a log to files ---------------------------------------------------------------------


class _EvolvedError(Exception):
    """Bodies had new columns after a file was begun, so all files are written again with them."""


class TableWriter:
    """Converts archives to Parquet files in the directory ``drafts``.

    ``columns_of`` returns the initial columns of bodies in the table of a topic, None if bodies get
    no columns. It is called once for each table, with topic None if there is only one.
    """

    def __init__(
        self, plan: TablePlan, drafts: Path, columns_of: Callable[[str | None], BodyColumns | None]
    ) -> None:
        self.plan = plan
        self._drafts = drafts
        self._columns_of = columns_of
        self._columns: dict[str | None, BodyColumns | None] = {}

    @property
    def schemas(self) -> dict[str | None, pyarrow.Schema]:
        """The columns of each table that was written to, with the partition columns, by topic."""
        return {topic: self._schema(columns) for topic, columns in self._columns.items()}

    @property
    def unfit(self) -> Unfit:
        """The bodies and fields that did not fit."""
        all_columns = list(filter(None, self._columns.values()))
        fields = {name for columns in all_columns for name in columns.without_column}
        return Unfit(sum(columns.misfits for columns in all_columns), fields)

    def _schema(self, columns: BodyColumns | None) -> pyarrow.Schema:
        schema = columns.schema() if columns else message_schema(self.plan.body)
        kinds = {"date": pyarrow.date32(), "hour": pyarrow.int32()}
        for name in self.plan.partitions:
            if name in kinds:
                schema = schema.append(pyarrow.field(name, kinds[name]))
        return schema

    def write(self, archive: ArchiveFile, stem: str, topic: str | None = None) -> list[Draft]:
        """Write the files of a log. ``topic`` is the topic of bare bodies.

        Raises `NotUploadable` for a damaged log, ``OSError``, and the errors of `read_batches`.
        """
        messages = TableMessages(
            read=partial(_read, archive, self.plan.body, topic),
            shown=archive.shown,
            time_ns=lambda: archive.storage.stat(archive.name).modified_ns,
            count=archive.messages,
        )
        return self.write_messages(messages, stem)

    def write_messages(self, messages: TableMessages, stem: str) -> list[Draft]:
        """Write the files of some messages. Raises as `write`."""
        misfits = {key: columns.misfits for key, columns in self._columns.items() if columns}
        drafts: dict[PartitionTuple, Draft] = {}
        schemas: dict[str | None, pyarrow.Schema] = {}
        try:
            is_complete = False
            while not is_complete:
                # Each pass reads the log again, and would count its misfits again.
                self._reset_misfits(misfits)
                try:
                    is_complete = self._write_pass(messages, stem, drafts, schemas)
                except _EvolvedError:
                    _remove(drafts)
                    schemas.clear()
            _compare(drafts, messages)
        except BaseException:
            _remove(drafts)
            self._reset_misfits(misfits)
            raise
        for columns in filter(None, self._columns.values()):
            columns.freeze_types()
        return list(drafts.values())

    def _reset_misfits(self, misfits: Mapping[str | None, int]) -> None:
        for key, columns in self._columns.items():
            if columns:
                columns.misfits = misfits.get(key, 0)

    def _columns_in(self, topic: str | None) -> BodyColumns | None:
        if topic not in self._columns:
            self._columns[topic] = self._columns_of(topic)
        return self._columns[topic]

    def _write_pass(
        self,
        messages: TableMessages,
        stem: str,
        drafts: dict[PartitionTuple, Draft],
        schemas: dict[str | None, pyarrow.Schema],
    ) -> bool:
        """Write the files of at most `MAX_OPEN_PARTITIONS` partitions without a file.

        Returns whether all partitions have files now. Raises `_EvolvedError` if the columns of a
        table differ from those of its first rows, which ``schemas`` has.
        """
        is_complete = True
        writers: dict[PartitionTuple, ParquetWriter] = {}
        with ExitStack() as stack:
            for batch in messages.read():
                for table, rows in self._by_table(batch, messages.shown):
                    columns = self._columns_in(table)
                    typed = columns.add(rows) if columns else rows
                    schema = self._schema(columns)
                    if schemas.setdefault(table, schema) != schema:
                        raise _EvolvedError
                    for key, part in self._parts(typed, messages, columns):
                        if key in drafts:
                            continue
                        if key not in writers and len(writers) >= MAX_OPEN_PARTITIONS:
                            is_complete = False
                            continue
                        if key not in writers:
                            path = self._drafts / f"{stem}-{len(drafts) + len(writers)}.parquet"
                            writer = ParquetWriter(path, self._file_schema(schema))
                            writers[key] = stack.enter_context(writer)
                        writers[key].add(part.select(writers[key].schema.names))
                # All partitions together keep at most one row group in memory.
                while sum(writer.pending_bytes for writer in writers.values()) > ROW_GROUP_BYTES:
                    max(writers.values(), key=attrgetter("pending_bytes")).end_row_group()
            for key, writer in writers.items():
                drafts[key] = self._close(key, writer, stem, messages.shown)
        return is_complete

    def _file_schema(self, schema: pyarrow.Schema) -> pyarrow.Schema:
        return pyarrow.schema([c for c in schema if c.name not in self.plan.partitions])

    def _close(self, key: PartitionTuple, writer: ParquetWriter, stem: str, shown: str) -> Draft:
        file = writer.close()
        partition = dict(zip(self.plan.partitions, key, strict=True))
        folder = folder_of(partition)
        # nsqd refuses such a topic, so a damaged or forged log has it.
        if len(folder.partition("/")[0]) > MAX_VALUE_BYTES:
            raise NotUploadable(errno.ENAMETOOLONG, "its topic is too long", shown)
        path = f"{folder}/{stem}.parquet"
        return Draft(file.path, replace(file, path=path, partition=partition))

    def _by_table(
        self, batch: pyarrow.RecordBatch, shown: str
    ) -> Iterator[tuple[str | None, pyarrow.RecordBatch]]:
        """Split a batch by table; the key is None if there is only one table."""
        if not self.plan.is_by_topic:
            yield None, batch
            return
        for value, rows in _split(batch, batch["topic"]):
            try:
                url_of_topic(self.plan.url, value)
            except ValueError as exc:
                raise NotUploadable(errno.EINVAL, str(exc), shown) from None
            yield value, rows

    def _parts(
        self, batch: pyarrow.RecordBatch, messages: TableMessages, columns: BodyColumns | None
    ) -> Iterator[tuple[PartitionTuple, pyarrow.RecordBatch]]:
        """Split a batch into partitions. A message without a time has the time of the file.

        A value that is too long for the name of a folder counts as a misfit and becomes null.
        """
        times = batch["ts_ns"]
        if times.null_count:
            times = times.fill_null(messages.time_ns())
        parts: list[tuple[PartitionTuple, Any]] = [((), batch.append_column(_TIMES, times))]
        for name in self.plan.partitions:
            unit_ns, to_text = _TIME_PARTITIONS.get(name, (0, _partition_text))
            parts = [
                _extend_key(key, name, to_text(value), rows, columns)
                for key, part in parts
                for value, rows in _split(
                    part, _divide(part[_TIMES], unit_ns) if unit_ns else part[name]
                )
            ]
        yield from parts


def _extend_key(
    key: PartitionTuple, name: str, value: str | None, rows: Any, columns: BodyColumns | None
) -> tuple[PartitionTuple, Any]:
    """Return the key of rows that have one value of a partition column, and the rows."""
    is_short = len(folder_of({name: value})) <= MAX_VALUE_BYTES
    if columns is None or name in PARTITIONS or is_short:
        return (*key, value), rows
    errors = rows[ERROR]
    columns.misfits += errors.null_count
    too_long = pyarrow.repeat(f"{name} is too long for a partition", rows.num_rows)
    errors = join_errors(errors, too_long)
    return (*key, None), rows.set_column(rows.schema.get_field_index(ERROR), ERROR, errors)


def _read(archive: ArchiveFile, kind: BodyKind, topic: str | None) -> Iterator[pyarrow.RecordBatch]:
    """Iterate over the messages of an archive or of a Parquet file. Raises `NotUploadable`."""
    problems: list[str] = []
    batches = (
        read_batches(archive, lambda _, problem: problems.append(problem), kind=kind, topic=topic)
        if archive.table is None
        else _read_parquet(archive, kind)
    )
    try:
        for batch in batches:
            if problems:
                break
            yield batch
    except CorruptError as exc:
        problems.append(str(exc))
    if problems:
        raise NotUploadable(errno.EIO, f"it is damaged: {problems[0]}", archive.shown)


def _read_parquet(archive: ArchiveFile, kind: BodyKind) -> Iterator[pyarrow.RecordBatch]:
    """Iterate over the messages of a Parquet file, without the columns of fields in bodies."""
    assert archive.table is not None
    topic, schema = archive.table.partition.get("topic"), message_schema(kind)
    with archive.open() as file:
        for batch in read(file):
            if "topic" not in batch.schema.names:
                batch = batch.append_column("topic", pyarrow.repeat(topic, batch.num_rows))
            names = [name for name in schema.names if name in batch.schema.names]
            fitted = fit_to_schema(batch.select(names), schema, kind)
            for offset in range(0, fitted.num_rows, JSON_BATCH_ROWS):
                yield fitted.slice(offset, JSON_BATCH_ROWS)


def _remove(drafts: dict[PartitionTuple, Draft]) -> None:
    for draft in drafts.values():
        Path(draft.path).unlink()
    drafts.clear()


def _compare(drafts: Mapping[PartitionTuple, Draft], messages: TableMessages) -> None:
    """Raise `NotUploadable` if the files of a log do not have all of its messages."""
    files = [draft.file for draft in drafts.values()]
    rows = sum(file.rows or 0 for file in files)
    problem = ""
    # One file would replace the other.
    if len({file.path for file in files}) != len(files):
        problem = "two of its partitions have one name"
    elif messages.count not in (None, rows):
        problem = f"it has {rows} messages, and {messages.count} in its index"
    if problem:
        raise NotUploadable(errno.EIO, f"it is damaged: {problem}", messages.shown)


_TIMES = "partition ts_ns"  # The space avoids a conflict: no column of a body has one in its name.


def _partition_text(value: Any) -> str | None:
    """Return a value as text for the name of a folder; empty text is null, as in Delta."""
    return None if value in ("", NULL_PARTITION) else partition_text(value)


_TIME_PARTITIONS: dict[str, tuple[int, Callable[[Any], str | None]]] = {
    "date": (DAY_NS, lambda day: f"{datetime.fromtimestamp(day * 86_400, UTC):%Y-%m-%d}"),
    "hour": (HOUR_NS, lambda hour: str(hour % 24)),
}


def _divide(times: Any, unit_ns: int) -> Any:
    """Divide times and round down, also those before 1970, which Arrow would round up."""
    quotients = compute.divide(times, unit_ns)
    is_rounded_up = compute.less(times, compute.multiply(quotients, unit_ns))
    return compute.subtract(quotients, is_rounded_up.cast(pyarrow.int64()))


def _split(batch: Any, keys: Any) -> Iterator[tuple[Any, Any]]:
    """Iterate over the distinct values of a column, and the rows of each."""
    # Rows are compared by index, because NaN is not equal to itself.
    encoded = keys.dictionary_encode(null_encoding="encode")
    if len(encoded.dictionary) == 1:
        yield encoded.dictionary[0].as_py(), batch
        return
    for number, value in enumerate(encoded.dictionary):
        yield value.as_py(), batch.filter(compute.equal(encoded.indices, number))


def parquet_stem(archive: ArchiveFile, host: str) -> str:
    """Return the name of the Parquet files of an archive file, without their extension.

    Machines that were cloned from one image, or restored from a snapshot, write files with the same
    head, which differ in their times. A file without a head may grow, and may have a copy with the
    same content, so its name contains its size and the hash of its path. A file of a table has a
    unique name in its partition. Raises ``OSError`` and `NsqError`.
    """
    if archive.table is not None:
        return f"{PurePosixPath(archive.name).stem}-{partition_token(archive)}"
    if archive.head is not None:
        identity = identity_of(archive, host)
        return f"{identity}-{archive.members[0].min_ts:x}" if archive.members else identity
    place = archive.shown if archive.is_remote else os.path.abspath(archive.shown)
    digest, size = archive.content()
    return f"{token_of_host(host)}-{digest[:32]}-{size:x}-{hash_path(place)}"


def partition_token(archive: ArchiveFile) -> str:
    """Return the hash of the partition folder of a Parquet file."""
    return hash_path(str((archive.storage / archive.name).absolute().parent))


# -- dead letters -------------------------------------------------------------------------------

# Messages whose bodies did not fit the columns are in the table, with the reasons in ``_error``.
# Copies in a file of dead letters are for ``nsq redrive``, after the schema or the publisher was
# corrected. They are written before the messages are committed to the table, so a kill may repeat
# them.
_LETTER_COLUMNS = ("nsqd", "id", "ts_ns", "attempts", "body", "body_bytes", ERROR)


def append_dead_letters(plan: TablePlan, drafts: Iterable[Draft]) -> None:
    """Append the messages of new files with an error. Raises ``OSError`` and `OutputError`."""
    for draft in drafts if plan.dead_letters else ():
        append_dead_letters_of(plan, draft.file, Path(draft.path))


def append_dead_letters_of(plan: TablePlan, file: TableFile, source: Path | BinaryIO) -> None:
    """Append the messages of one file of a table. Raises as `append_dead_letters`."""
    path, topic = Path(plan.dead_letters), file.partition["topic"] or ""
    letters = LineFile(path)
    for batch in read(source, _LETTER_COLUMNS):
        if ERROR not in batch.schema.names:
            continue
        rows = batch.filter(compute.is_valid(batch[ERROR])).to_pylist()
        if lines := b"".join(_dead_letter(row, topic) for row in rows):
            with adding_path_to_errors(path):
                letters.append(lines)


def _dead_letter(row: Mapping[str, Any], topic: str) -> bytes:
    """Return the line of a row of a table with an error."""
    now_ns, text = time.time_ns(), row["body"]
    body: bytes = row["body_bytes"] if text is None else text.encode()
    # A bare body has no id, and each dead letter needs one.
    id = row["id"] or hashlib.blake2s(body, digest_size=8).hexdigest()
    nsqd, attempts = row["nsqd"] or "", row["attempts"] or 1
    message = Envelope(topic, nsqd, id.encode(), row["ts_ns"] or now_ns, attempts, body)
    return encode_dead_letter(topic, nsqd, message, error=row[ERROR], failed_at_ns=now_ns)
