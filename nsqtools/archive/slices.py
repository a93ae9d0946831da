"""A slice of time becomes a file: read, sorted, each message once, written, compared, published.

All copies of a message have the same time of nsqd, so a *slice* of time of one topic has all of
them, and slices need nothing of each other: no shuffle, and no more memory than a slice. `run_job`
makes one file of some slices in a row, in a process of `compaction` or in a task of Spark.

Of what is in the output already only the identities are read, for the times concerned: a message
that is there is left out. The name of a file says what it was made of, so that a job that is tried
again makes the same file, and another one never takes its name.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import reduce
from itertools import chain
from pathlib import Path
from typing import Any
from uuid import uuid4

import pyarrow
from pyarrow import ArrowException, compute, parquet, types

from nsqtools.archive.body_columns import ERROR, RESERVED, BodyColumns, fields_of, join_errors
from nsqtools.archive.catalog import PARTITIONS, PartitionKey, Source, hash_path
from nsqtools.archive.columns import bodies_as, message_schema, micros, read_batches
from nsqtools.archive.delta import DeltaCatalog, TableFile
from nsqtools.archive.layout import EVER, TimeRange
from nsqtools.archive.members import CorruptError
from nsqtools.archive.parquet import ParquetWriter, in_time_order, read
from nsqtools.archive.place import Place, translating_errors
from nsqtools.archive.place_url import parse_place
from nsqtools.archive.reader import REMAKE
from nsqtools.errors import NsqError, OutputError
from nsqtools.files.durable import make_folders, sync_folder
from nsqtools.files.scratch import scratch_directory
from nsqtools.records.envelope import BodyKind

KEY = ["ts_ns", "nsqd", "id"]
NOTES = "_compaction"
STAGING = f"{NOTES}/staging"


@dataclass(frozen=True, slots=True)
class Slice:
    """A range of times, and the files that may have messages of it."""

    since_ns: int
    until_ns: int
    sources: tuple[Source, ...]


@dataclass(frozen=True, slots=True)
class Settings:
    """How files are made."""

    target_bytes: int = 256 << 20
    parallel: int = 1
    delimiter: bytes = b"\n"
    skips_damaged: bool = False
    body: BodyKind = BodyKind.string
    fields: Mapping[str, Any] | None = None
    """The JSON Schema by which bodies of archives have columns; None for none."""


@dataclass(frozen=True, slots=True)
class Job:
    """What becomes one file. ``present`` are files of the output with messages of its times."""

    output: str
    key: PartitionKey
    slices: tuple[Slice, ...]
    present: tuple[Source, ...] = ()
    settings: Settings = Settings()
    others: pyarrow.Schema | None = None
    """The columns of the output beside those of a message."""

    @property
    def range(self) -> tuple[int, int]:
        """The times of its messages, in nanoseconds: from and until."""
        return self.slices[0].since_ns, self.slices[-1].until_ns

    @property
    def name(self) -> str:
        """The name of the file, the same for the same work."""
        sources = (each for part in self.slices for each in part.sources)
        read = sorted({(each.key, each.size, each.begin) for each in sources})
        identity = repr((self.key, *self.range, [each.key for each in self.present]))
        digest = hashlib.sha256((identity + repr(read)).encode()).hexdigest()[:20]
        for key, size, begin in read:
            if self.key.day is None and begin.isalnum():  # `has_grown` knows it by that
                digest += f"-{begin[:32]}-{size:x}-{hash_path(key)}"
        return f"{self.key.folder}/compacted-{digest}.parquet"


@dataclass(frozen=True, slots=True)
class JobResult:
    """What became of a job. ``file`` is None when all of its messages were there already."""

    key: PartitionKey
    file: TableFile | None
    read: int
    duplicates: int
    damages: tuple[tuple[str, str], ...] = ()
    misfits: int = 0


# -- the work of one file -----------------------------------------------------------------------


def run_job(job: Job) -> JobResult:
    """Make one file: read, sort, deduplicate, write, compare, publish. Raises `NsqError`."""
    storage, reading = parse_place(job.output), _Reading(job)
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
            kept = anti_join(deduplicated(rows), reading.identities(part))
            duplicates += rows.num_rows - kept.num_rows
            misfits += _misfits(kept)
            for batch in kept.to_batches(1 << 16):
                writer.add(batch)
        damages = tuple(reading.damages)
        if reading.rows == duplicates:
            return JobResult(job.key, None, reading.rows, duplicates, damages)
        file = replace(writer.close(), path=job.name, partition=job.key.values)
        publish(draft, storage, job.name)
        return JobResult(job.key, file, reading.rows, duplicates, damages, misfits)


def _misfits(rows: pyarrow.Table | pyarrow.RecordBatch) -> int:
    """How many bodies did not fit their columns."""
    return int(rows.num_rows - rows[ERROR].null_count) if ERROR in rows.schema.names else 0


@contextmanager
def draft_for(storage: Place) -> Iterator[Path]:
    """Where a file for a storage is made: beside its place, if that is a directory."""
    if not storage.is_remote:
        staging = storage.path / STAGING
        staging.mkdir(0o750, parents=True, exist_ok=True)
        yield staging / f"{uuid4().hex}.parquet"
        return
    with scratch_directory("nsq-compact-") as folder:
        yield folder / "file.parquet"


def publish(draft: Path, storage: Place, name: str) -> None:
    """Move a file that is durable to its place, where it appears whole. Raises ``OSError``."""
    if not storage.is_remote:
        final = storage.path / name
        make_folders(storage.path, final.parent, 0o750)
        draft.replace(final)
        sync_folder(final.parent)
    else:
        storage.verify(name, draft, storage.put_file(name, draft))


class _Reading:
    """Reads what a job names, in the columns of its output."""

    def __init__(self, job: Job) -> None:
        self._job = job
        self.rows = 0
        self.damages: list[tuple[str, str]] = []
        of_folders = job.key.values
        some = [*message_schema(job.settings.body), *(job.others or ())]
        self.schema = pyarrow.schema([each for each in some if each.name not in of_folders])
        self._columns = None
        if job.settings.fields is not None:
            fields = fields_of(job.settings.fields)
            self._columns = BodyColumns(fields, job.others or (), evolves=False)

    def batches(self, part: Slice) -> Iterator[pyarrow.RecordBatch]:
        """Iterate over the messages of a slice. Raises `NsqError` for what is damaged."""
        bare = self._job.key.day is None
        within = EVER if bare else TimeRange(part.since_ns, part.until_ns)
        for source in part.sources:
            if source.is_parquet:
                try:
                    with source.file.storage.open(source.file.name) as file:
                        for batch in read(file, within=within):
                            yield self._taken(self._of_topic(batch, source))
                except (CorruptError, ArrowException) as exc:  # a number may be too large
                    self._on_damage(source, str(exc).partition("\n")[0])
                continue
            counted: list[int] = []
            for batch in read_batches(
                source.file,
                lambda _, problem, source=source: self._on_damage(source, problem),  # type: ignore[misc]
                kind=self._job.settings.body,
                delimiter=self._job.settings.delimiter,
                within=within,
                on_rows=counted.append,
            ):
                chosen = self._of_topic(batch, source)
                typed = self._columns.add(chosen) if self._columns else chosen
                yield self._taken(typed)
            known = source.file.members
            spans = source.spans if known is None else filter(within.may_have, known)
            expected = sum(span.messages for span in spans)
            if not source.damage and not bare and sum(counted) != expected:
                problem = f"it has {sum(counted)} messages, and {expected} in its index"
                self._on_damage(source, problem)

    def _taken(self, batch: pyarrow.RecordBatch) -> pyarrow.RecordBatch:
        self.rows += batch.num_rows
        return fitted(batch, self.schema, self._job.settings.body)

    def _of_topic(self, batch: pyarrow.RecordBatch, source: Source) -> pyarrow.RecordBatch:
        if source.is_parquet and not source.is_shared:
            return batch
        topics = batch["topic"].cast(pyarrow.string())  # from large ones, and from dictionaries
        mask = compute.is_in(topics, value_set=pyarrow.array([source.topic], topics.type))
        if compute.all(mask, min_count=0).as_py():
            return batch
        if source.damage or not source.is_shared:
            other = "it has topics that its first and last messages do not have"
            self._on_damage(source, source.damage or other)
        return batch.filter(mask)

    def _on_damage(self, source: Source, problem: str) -> None:
        if not self._job.settings.skips_damaged:
            raise unreadable(source, problem)
        self.damages.append((source.shown, problem))

    def identities(self, part: Slice) -> pyarrow.Table:
        """Return the identities of what the output has of the times of a slice."""
        within = TimeRange(part.since_ns, part.until_ns)
        found: list[Any] = []
        for source in self._job.present:
            if source.between(part.since_ns, part.until_ns):
                try:
                    with source.file.storage.open(source.file.name) as file:
                        found += read(file, KEY, within)
                except CorruptError as exc:
                    raise OutputError(
                        f"cannot read {source.shown}: {exc}",
                        hint="Restore it: without it the messages that are there are unknown.",
                    ) from exc
        kinds = zip(KEY, (pyarrow.int64(), pyarrow.string(), pyarrow.string()), strict=True)
        batches = [each.select(KEY) for each in found]
        return pyarrow.Table.from_batches(batches, pyarrow.schema(list(kinds)))


def fitted(
    batch: pyarrow.RecordBatch, schema: pyarrow.Schema, kind: BodyKind
) -> pyarrow.RecordBatch:
    """Give a batch the columns of an output: those that it lacks are null.

    A value of another type than its column does not fit: it is null then, as when the body had
    been read, and ``_error`` says why.
    """
    columns = dict(zip(batch.schema.names, batch.columns, strict=True))
    if "body" in columns:
        columns |= bodies_as(columns["body"], columns.get("body_bytes"), kind)
    if "ts_ns" in columns:  # pandas has nanoseconds here, too
        columns["timestamp"] = micros(columns["ts_ns"])
    for each in schema:
        if each.name in RESERVED or each.name not in columns:
            continue
        columns[each.name], fits = _converted(columns[each.name], each.type)
        if not compute.all(fits).as_py():
            nothing = pyarrow.nulls(batch.num_rows, pyarrow.string())
            wrong = compute.if_else(fits, nothing, f"{each.name} is not {each.type}")
            columns[each.name] = compute.if_else(fits, columns[each.name], None)
            columns[ERROR] = join_errors(columns.get(ERROR, nothing), wrong)
    arrays = [
        columns[each.name].cast(each.type)
        if each.name in columns
        else pyarrow.nulls(batch.num_rows, each.type)
        for each in schema
    ]
    return pyarrow.RecordBatch.from_arrays(arrays, schema=schema)


def _converted(values: Any, kind: Any) -> tuple[Any, Any]:
    """Return values as another type has them, and which of them it has, null included."""
    if values.type == kind:
        return values, pyarrow.scalar(True)
    if all(types.is_integer(each) or types.is_floating(each) for each in (values.type, kind)):
        converted = values.cast(kind, safe=False)
        same = compute.equal(converted.cast(values.type, safe=False), values)
        nan = types.is_floating(kind)  # which equals nothing
        return converted, compute.or_kleene(same, values.is_null(nan_is_null=nan))
    return pyarrow.nulls(len(values), kind), values.is_null()


def body_kind(table: DeltaCatalog) -> BodyKind | None:
    """Return what the bodies of a table are, None of one that is not there."""
    return _kind_in(table.schema()) if table.exists() else None


def body_kind_of(present: Iterable[Sequence[Source]]) -> BodyKind | None:
    """Return what the bodies of Parquet that is there are: earlier versions wrote bytes."""
    first = next(chain.from_iterable(present), None)
    return None if first is None else _kind_in(columns_in(first))


def _kind_in(schema: pyarrow.Schema) -> BodyKind:
    return BodyKind.binary if types.is_binary(schema.field("body").type) else BodyKind.string


def columns_in(source: Source) -> pyarrow.Schema:
    """Return the columns of a file of Parquet. Raises `NsqError`, and as `failure_of` says."""
    with translating_errors("read", source.shown):
        try:
            with source.file.open() as file, parquet.ParquetFile(file) as opened:
                return opened.schema_arrow.remove_metadata()
        except ArrowException as exc:
            raise unreadable(source, f"it is not whole Parquet ({exc})".splitlines()[0]) from exc


def prepare_table(
    table: DeltaCatalog, columns: pyarrow.Schema, kind: BodyKind, others: Sequence[str] = ()
) -> None:
    """Make a table of messages if there is none, and add the ``columns`` of bodies that it lacks.

    ``others`` are more columns of partitions. Raises `OutputError` for a column of another type.
    """
    if not table.exists():
        schema = message_schema(kind).append(pyarrow.field("date", pyarrow.date32()))
        for name in others:
            schema = schema.append(pyarrow.field(name, pyarrow.string()))
        table.create(schema, [*PARTITIONS, *others])
    own = {each.name: each for each in columns if each.name not in RESERVED}
    for name in table.partition_columns if own else ():
        own.pop(name, None)
    for name, there in table.add_columns(own.values()).items() if own else ():
        kind = columns.field(name).type
        what = f"{there} in {table.storage.url}, not {kind}"
        if there == kind:
            what = f"the column of another field in {table.storage.url}"
        raise OutputError(
            f"{name} is {what}",
            hint="Give a schema with the types of the table, or another table.",
        )


def unreadable(source: Source, problem: str) -> NsqError:
    """Return the error for damage that ends a compaction."""
    remedy = "Repair it with nsq archive repair"
    if source.is_parquet:
        remedy = REMAKE
    return NsqError(
        f"cannot read {source.shown}: {problem}",
        hint=f"{remedy}, or leave out what is damaged with --skip-damaged.",
    )


def deduplicated(rows: pyarrow.Table) -> pyarrow.Table:
    """Return the rows in the order of time, one for each identity: that of the fewest attempts.

    Only rows of equal times are compared. One without an id is kept.
    """
    if rows.num_rows < 2:
        return rows
    rows = in_time_order(rows).combine_chunks()
    times = rows["ts_ns"].combine_chunks()
    same = compute.equal(times[:-1], times[1:])
    if not compute.any(same).as_py():
        return rows
    no = pyarrow.array([False])
    run = compute.or_(pyarrow.concat_arrays([no, same]), pyarrow.concat_arrays([same, no]))
    places = compute.indices_nonzero(run)
    some = rows.select([*KEY, "attempts"]).take(places)
    columns = {
        "ts_ns": some["ts_ns"],
        "nsqd": compute.fill_null(some["nsqd"], ""),
        "id": some["id"],
        "attempts": compute.fill_null(some["attempts"], 0),
        "at": places,
    }
    some = pyarrow.table(columns).sort_by([(name, "ascending") for name in columns])
    before, after = some[:-1], some[1:]
    repeats = [compute.equal(before[name], after[name]) for name in KEY]  # null for one without id
    return _dropping(rows, after["at"].filter(reduce(compute.and_kleene, repeats)))


def _dropping(rows: pyarrow.Table, drop: Any) -> pyarrow.Table:
    numbers = compute.indices_nonzero(pyarrow.repeat(True, rows.num_rows))
    return rows.filter(compute.invert(compute.is_in(numbers, value_set=drop)))


def anti_join(rows: pyarrow.Table, present: pyarrow.Table) -> pyarrow.Table:
    """Return the rows whose identity is not among those that are there."""
    if not present.num_rows or not rows.num_rows:
        return rows
    known = compute.unique(present["ts_ns"])
    places = compute.indices_nonzero(compute.is_in(rows["ts_ns"], value_set=known))
    some = rows.select(KEY).take(places)
    there = set(zip(*(present[name].to_pylist() for name in KEY), strict=True))
    keys = zip(*(some[name].to_pylist() for name in KEY), strict=True)
    drop = [key[2] is not None and key in there for key in keys]
    return _dropping(rows, places.filter(pyarrow.array(drop, pyarrow.bool_())))
