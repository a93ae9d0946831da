"""Write one sorted and deduplicated Parquet file from slices of time.

All copies of a message have the same nsqd timestamp, so a *slice* of time of one topic contains all
of them. Slices are independent, so there is no shuffle, and a job needs the memory of one slice.
`run_job` writes one file from consecutive slices, in a process of `compaction` or a task of Spark.

Messages that the output already has are skipped. To find them, only the identities in the slice's
range of times are read from the output. The name of a file contains a hash of its inputs, so that a
retried job makes the same file and a different job never the same name.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, replace
from functools import reduce
from itertools import chain
from pathlib import Path, PurePosixPath
from typing import Any
from uuid import uuid4

import pyarrow
from pyarrow import ArrowException, compute, types

from nsqtools.archive.body_columns import ERROR, BodyColumns, join_errors
from nsqtools.archive.body_schema import fields_of
from nsqtools.archive.catalog import PARTITIONS, PartitionKey, Source, hash_path
from nsqtools.archive.columns import KEYS_OF, bodies_as, message_schema, micros, read_batches
from nsqtools.archive.delta import DeltaCatalog, TableFile
from nsqtools.archive.layout import ALL_TIMES, TimeRange
from nsqtools.archive.members import CorruptError
from nsqtools.archive.parquet import (
    ParquetWriter,
    manifest_of,
    open_parquet,
    plain_schema,
    read,
)
from nsqtools.archive.place import Place, translating_errors
from nsqtools.archive.place_url import parse_place
from nsqtools.archive.reader import REMAKE
from nsqtools.archive.replacements import COMPACTED, STAGING, Staged
from nsqtools.errors import NsqError, OutputError
from nsqtools.files.durable import make_folders, sync_folder
from nsqtools.files.scratch import scratch_directory
from nsqtools.records.envelope import BodyKind

MESSAGE_KEY = ["ts_ns", "nsqd", "id"]
"""The columns that identify a message."""


@dataclass(frozen=True, slots=True)
class Slice:
    """A range of times, and the files that may have messages in it."""

    since_ns: int
    until_ns: int
    sources: tuple[Source, ...]


@dataclass(frozen=True, slots=True)
class Settings:
    """Options of a compaction."""

    target_bytes: int = 256 << 20
    parallel: int = 1
    delimiter: bytes = b"\n"
    skips_damaged: bool = False
    body: BodyKind = BodyKind.string
    fields: Mapping[str, Any] | None = None
    """The JSON Schema of the columns that bodies of archives get; None for no such columns."""


@dataclass(frozen=True, slots=True)
class Job:
    """The inputs of one file. ``present`` are files of the output with messages of these times."""

    output: str
    key: PartitionKey
    slices: tuple[Slice, ...]
    present: tuple[Source, ...] = ()
    settings: Settings = Settings()
    extra_columns: pyarrow.Schema | None = None
    """The columns of the output in addition to those of a message, or with other types."""
    is_staged: bool = False
    """Whether the file remains hidden until it replaces others: see `replacements`."""

    @property
    def range(self) -> tuple[int, int]:
        """The range of times in nanoseconds: since and until."""
        return self.slices[0].since_ns, self.slices[-1].until_ns

    @property
    def name(self) -> str:
        """The name of the file; the same inputs give the same name."""
        sources = (source for part in self.slices for source in part.sources)
        inputs = sorted({(source.key, source.size, source.begin) for source in sources})
        identity = repr((self.key, *self.range, [source.key for source in self.present]))
        digest = hashlib.sha256((identity + repr(inputs)).encode()).hexdigest()[:20]
        for path, size, begin in inputs:
            # `has_grown` recognizes a file of bare bodies by this ending.
            if self.key.day is None and begin.isalnum():
                digest += f"-{begin[:32]}-{size:x}-{hash_path(path)}"
        return f"{self.key.folder}/{COMPACTED}{digest}.parquet"


@dataclass(frozen=True, slots=True)
class JobResult:
    """The result of a job. ``file`` is None if the output had all of its messages already."""

    key: PartitionKey
    file: TableFile | None
    read: int
    duplicates: int
    damages: tuple[tuple[str, str], ...] = ()
    misfits: int = 0
    staged: Staged | None = None


# -- running a job ------------------------------------------------------------------------------


def run_job(job: Job, is_stopped: Callable[[], bool] = lambda: False) -> JobResult:
    """Read, sort, deduplicate and write one file, verify and publish it.

    Raises `NsqError`, also if the job ``is_stopped``.
    """
    storage, reading = parse_place(job.output), _JobReader(job, is_stopped)
    duplicates = misfits = 0
    with (
        translating_errors("compact into", job.output),
        draft_for(storage) as draft,
        ParquetWriter(draft, reading.schema) as writer,
    ):
        for part in job.slices:
            if job.key.day is None:
                for batch in reading.batches(part):
                    misfits += _misfits(batch)
                    writer.add(batch)
                continue
            rows = pyarrow.Table.from_batches(reading.batches(part), reading.schema)
            new_rows = anti_join(deduplicate(rows), reading.identities(part))
            duplicates += rows.num_rows - new_rows.num_rows
            misfits += _misfits(new_rows)
            for batch in new_rows.to_batches(1 << 16):
                writer.add(batch)
        damages = tuple(reading.damages)
        if reading.rows == duplicates:
            return JobResult(job.key, None, reading.rows, duplicates, damages)
        file = replace(writer.close(), path=job.name, partition=job.key.values)
        name, staged = job.name, None
        if job.is_staged:
            name = f"{STAGING}/{PurePosixPath(name).name}"
            staged = Staged(name, file.bytes, manifest_of(file, draft).decode())
        publish_file(draft, storage, name)
        return JobResult(job.key, file, reading.rows, duplicates, damages, misfits, staged)


def _misfits(rows: pyarrow.Table | pyarrow.RecordBatch) -> int:
    """Return how many bodies did not fit their columns."""
    return int(rows.num_rows - rows[ERROR].null_count) if ERROR in rows.schema.names else 0


@contextmanager
def draft_for(storage: Place) -> Iterator[Path]:
    """Yield the path of a draft for a storage: on its own disk, unless it is remote."""
    if not storage.is_remote:
        staging = storage.path / STAGING
        staging.mkdir(0o750, parents=True, exist_ok=True)
        yield staging / f"{uuid4().hex}.parquet"
        return
    with scratch_directory("nsq-compact-") as folder:
        yield folder / "file.parquet"


def publish_file(draft: Path, storage: Place, name: str) -> None:
    """Move a durable file into the storage atomically. Raises ``OSError``."""
    if not storage.is_remote:
        final = storage.path / name
        make_folders(storage.path, final.parent, 0o750)
        draft.replace(final)
        sync_folder(final.parent)
    else:
        storage.verify(name, draft, storage.put_file(name, draft))


class _JobReader:
    """Reads the inputs of a job, in the columns of its output."""

    def __init__(self, job: Job, is_stopped: Callable[[], bool]) -> None:
        self._job, self._is_stopped = job, is_stopped
        self.rows = 0
        self.damages: list[tuple[str, str]] = []
        partitions = job.key.values
        all_columns = (*message_schema(job.settings.body), *(job.extra_columns or ()))
        columns = {column.name: column for column in all_columns if column.name not in partitions}
        self.schema = pyarrow.schema(columns.values())
        self._columns = None
        if job.settings.fields is not None:
            fields = fields_of(job.settings.fields)
            self._columns = BodyColumns(fields, job.extra_columns or (), evolves=False)

    def batches(self, part: Slice) -> Iterator[pyarrow.RecordBatch]:
        """Iterate over the messages of a slice. Raises `NsqError` for damage."""
        is_bare = self._job.key.day is None
        within = ALL_TIMES if is_bare else TimeRange(part.since_ns, part.until_ns)
        for source in part.sources:
            if source.is_parquet:
                try:
                    with source.file.storage.open(source.file.name) as file:
                        for batch in read(file, within=within):
                            yield self._fit(self._filter_topic(batch, source))
                # Arrow raises its own error for a number that is too large for its column.
                except (CorruptError, ArrowException) as exc:
                    self._on_damage(source, str(exc).partition("\n")[0])
                continue
            row_counts: list[int] = []
            for batch in read_batches(
                source.file,
                lambda _, problem, source=source: self._on_damage(source, problem),  # type: ignore[misc]
                kind=self._job.settings.body,
                delimiter=self._job.settings.delimiter,
                within=within,
                on_rows=row_counts.append,
            ):
                rows = self._filter_topic(batch, source)
                yield self._fit(self._columns.add(rows) if self._columns else rows)
            members = source.file.members
            spans = source.spans if members is None else filter(within.may_contain, members)
            expected = sum(span.messages for span in spans)
            if not source.damage and not is_bare and sum(row_counts) != expected:
                problem = f"it has {sum(row_counts)} messages, and {expected} in its index"
                self._on_damage(source, problem)

    def _fit(self, batch: pyarrow.RecordBatch) -> pyarrow.RecordBatch:
        if self._is_stopped():
            raise NsqError("the compaction was stopped")
        self.rows += batch.num_rows
        return fit_to_schema(batch, self.schema, self._job.settings.body)

    def _filter_topic(self, batch: pyarrow.RecordBatch, source: Source) -> pyarrow.RecordBatch:
        if source.is_parquet and not source.is_shared:
            return batch
        # Other programs write large strings or dictionaries.
        topics = batch["topic"].cast(pyarrow.string())
        mask = compute.is_in(topics, value_set=pyarrow.array([source.topic], topics.type))
        if compute.all(mask, min_count=0).as_py():
            return batch
        if source.damage or not source.is_shared:
            problem = "it has topics that its first and last messages do not have"
            self._on_damage(source, source.damage or problem)
        return batch.filter(mask)

    def _on_damage(self, source: Source, problem: str) -> None:
        if not self._job.settings.skips_damaged:
            raise unreadable(source, problem)
        self.damages.append((source.shown, problem))

    def identities(self, part: Slice) -> pyarrow.Table:
        """Return the identities of the messages that the output already has in a slice."""
        within = TimeRange(part.since_ns, part.until_ns)
        batches: list[Any] = []
        for source in self._job.present:
            if source.between(part.since_ns, part.until_ns):
                try:
                    with source.file.storage.open(source.file.name) as file:
                        batches += read(file, MESSAGE_KEY, within)
                except CorruptError as exc:
                    raise OutputError(
                        f"cannot read {source.shown}: {exc}",
                        hint="Restore it: duplicates of its messages cannot be found without it.",
                    ) from exc
        kinds = (pyarrow.int64(), pyarrow.string(), pyarrow.string())
        schema = pyarrow.schema(list(zip(MESSAGE_KEY, kinds, strict=True)))
        return pyarrow.Table.from_batches([batch.select(MESSAGE_KEY) for batch in batches], schema)


def fit_to_schema(
    batch: pyarrow.RecordBatch, schema: pyarrow.Schema, kind: BodyKind
) -> pyarrow.RecordBatch:
    """Return a batch in the columns of a schema; columns that it lacks are null.

    A value that does not fit the type of its column becomes null, as when a body is read, and
    ``_error`` has the reason. Raises `CorruptError` if the schema has no such column.
    """
    columns = dict(zip(batch.schema.names, batch.columns, strict=True))
    if "body" in columns:
        columns |= bodies_as(columns["body"], columns.get("body_bytes"), kind)
    # The time of a file that pandas wrote has nanoseconds, so it is computed again.
    if "ts_ns" in columns:
        columns["timestamp"] = micros(columns["ts_ns"])
    for field in schema:
        if field.name in KEYS_OF or field.name not in columns:
            continue
        values = columns[field.name]
        columns[field.name], fits = _convert(values, field.type)
        if not compute.all(fits).as_py():
            if ERROR not in schema.names:
                raise CorruptError(f"its {field.name} is {values.type}, not {field.type}")
            nulls = pyarrow.nulls(batch.num_rows, pyarrow.string())
            errors = compute.if_else(fits, nulls, f"{field.name} is not {field.type}")
            columns[field.name] = compute.if_else(fits, columns[field.name], None)
            columns[ERROR] = join_errors(columns.get(ERROR, nulls), errors)
    arrays = [
        columns[field.name].cast(field.type)
        if field.name in columns
        else pyarrow.nulls(batch.num_rows, field.type)
        for field in schema
    ]
    return pyarrow.RecordBatch.from_arrays(arrays, schema=schema)


_FAMILIES = (types.is_timestamp, types.is_time, types.is_date, types.is_decimal, types.is_nested)
"""Types between which a conversion keeps the values."""


def _convert(values: Any, kind: Any) -> tuple[Any, Any]:
    """Return values converted to another type, and which of them were converted without loss."""
    if values.type == kind:
        return values, pyarrow.scalar(True)
    if all(types.is_integer(each) or types.is_floating(each) for each in (values.type, kind)):
        converted = values.cast(kind, safe=False)
        is_same = compute.equal(converted.cast(values.type, safe=False), values)
        # NaN is not equal to itself, but a floating type has it.
        is_null = values.is_null(nan_is_null=types.is_floating(kind))
        return converted, compute.or_kleene(is_same, is_null)
    if any(is_of_family(values.type) and is_of_family(kind) for is_of_family in _FAMILIES):
        # Spark's times have nanoseconds in Parquet, and microseconds in a table.
        with suppress(ArrowException):
            return values.cast(kind, safe=not types.is_timestamp(kind)), pyarrow.scalar(True)
    return pyarrow.nulls(len(values), kind), values.is_null()


def body_kind(table: DeltaCatalog) -> BodyKind | None:
    """Return the kind of bodies in a table; None if the table does not exist."""
    return _body_kind_in(table.schema()) if table.exists() else None


def body_kind_of(present: Iterable[Sequence[Source]]) -> BodyKind | None:
    """Return the kind of bodies in existing Parquet files: early versions wrote bytes."""
    first = next(chain.from_iterable(present), None)
    return None if first is None else _body_kind_in(columns_in(first))


def _body_kind_in(schema: pyarrow.Schema) -> BodyKind:
    return BodyKind.binary if types.is_binary(schema.field("body").type) else BodyKind.string


def columns_in(source: Source) -> pyarrow.Schema:
    """Return the columns of a Parquet file. Raises `NsqError` and the errors of `failure_of`."""
    with translating_errors("read", source.shown):
        try:
            with source.file.open() as file, open_parquet(file) as opened:
                return plain_schema(opened)
        except ArrowException as exc:
            raise unreadable(source, f"it is not whole Parquet ({exc})".splitlines()[0]) from exc


def prepare_table(
    table: DeltaCatalog, columns: pyarrow.Schema, kind: BodyKind, partitions: Sequence[str] = ()
) -> None:
    """Create a table of messages if it does not exist, and add missing ``columns``.

    ``partitions`` are partition columns in addition to topic and date. Raises `OutputError` for a
    column of another type.
    """
    if not table.exists():
        schema = message_schema(kind).append(pyarrow.field("date", pyarrow.date32()))
        for name in partitions:
            schema = schema.append(pyarrow.field(name, pyarrow.string()))
        table.create(schema, [*PARTITIONS, *partitions])
    new_columns = {field.name: field for field in columns}
    for name in table.partition_columns if new_columns else ():
        new_columns.pop(name, None)
    conflicts = table.add_columns(new_columns.values()) if new_columns else {}
    for name, present_type in conflicts.items():
        new_type = columns.field(name).type
        problem = f"{present_type} in {table.storage.url}, not {new_type}"
        if present_type == new_type:
            problem = f"the column of another field in {table.storage.url}"
        raise OutputError(
            f"{name} is {problem}",
            hint="Give a schema with the types of the table, or another table.",
        )


def unreadable(source: Source, problem: str) -> NsqError:
    """Return the error for damage that ends a compaction."""
    remedy = REMAKE if source.is_parquet else "Repair it with nsq archive repair"
    return NsqError(
        f"cannot read {source.shown}: {problem}",
        hint=f"{remedy}, or skip what is damaged with --skip-damaged.",
    )


def deduplicate(rows: pyarrow.Table) -> pyarrow.Table:
    """Return rows sorted by time, one for each identity: the one with the fewest attempts.

    Only rows with equal times are compared. Rows without an id are kept.
    """
    if rows.num_rows < 2:
        return rows
    # Arrow takes rows of one chunk much faster.
    rows = rows.combine_chunks()
    times = rows["ts_ns"].combine_chunks()
    is_sorted = compute.all(compute.less_equal(times[:-1], times[1:]), min_count=0).as_py()
    order = None if is_sorted else compute.sort_indices(times)
    if order is not None:
        times = times.take(order)
    is_equal = compute.equal(times[:-1], times[1:])
    if not compute.any(is_equal).as_py():
        return rows if order is None else rows.take(order)
    # A candidate has the time of the row before it or after it.
    false = pyarrow.array([False])
    equals_previous = pyarrow.concat_arrays([false, is_equal])
    equals_next = pyarrow.concat_arrays([is_equal, false])
    indices = compute.indices_nonzero(compute.or_(equals_previous, equals_next))
    candidates = rows.select([*MESSAGE_KEY, "attempts"])
    candidates = candidates.take(indices if order is None else order.take(indices))
    columns = {
        "ts_ns": candidates["ts_ns"],
        "nsqd": compute.fill_null(candidates["nsqd"], ""),
        "id": candidates["id"],
        "attempts": compute.fill_null(candidates["attempts"], 0),
        "index": indices,
    }
    candidates = pyarrow.table(columns).sort_by([(name, "ascending") for name in columns])
    previous, following = candidates[:-1], candidates[1:]
    # A comparison with a missing id is null, so the row is kept.
    repeats = [compute.equal(previous[name], following[name]) for name in MESSAGE_KEY]
    repeated = following["index"].filter(reduce(compute.and_kleene, repeats))
    mask = _all_except(repeated, rows.num_rows)
    # One copy of the rows: sorting first and dropping then would make two.
    return rows.filter(mask) if order is None else rows.take(order.filter(mask))


def _all_except(indices: Any, count: int) -> Any:
    """Return a mask of ``count`` rows without those at the indices, which are few as a rule."""
    bits = bytearray(b"\xff" * -(-count // 8))
    for index in indices.to_pylist():
        bits[index >> 3] &= ~(1 << (index & 7))
    return pyarrow.Array.from_buffers(pyarrow.bool_(), count, [None, pyarrow.py_buffer(bits)])


def anti_join(rows: pyarrow.Table, present: pyarrow.Table) -> pyarrow.Table:
    """Return the rows whose identity is not in ``present``."""
    if not present.num_rows or not rows.num_rows:
        return rows
    # The identities of rows become Python objects only where the times match.
    times = compute.unique(present["ts_ns"])
    indices = compute.indices_nonzero(compute.is_in(rows["ts_ns"], value_set=times))
    candidates = rows.select(MESSAGE_KEY).take(indices)
    present_keys = set(zip(*(present[name].to_pylist() for name in MESSAGE_KEY), strict=True))
    keys = zip(*(candidates[name].to_pylist() for name in MESSAGE_KEY), strict=True)
    is_present = [key[2] is not None and key in present_keys for key in keys]
    present_indices = indices.filter(pyarrow.array(is_present, pyarrow.bool_()))
    return rows.filter(_all_except(present_indices, rows.num_rows))
