"""Convert archives to the Parquet files of a table.

    topic=clicks/date=2026-11-23/web1-5b1c2f0e8d9a4e6f-17-18a6f5c09d6bd115.parquet
                                .web1-5b1c2f0e8d9a4e6f-17-18a6f5c09d6bd115.parquet.manifest

An archive file becomes one Parquet file for each of its partitions. The name consists of the host,
writer, number and first time of the archive file, so it is unique, and a repeated conversion writes
the same rows under the same name. In a Parquet folder the manifest (size, hash, count and times) is
the commit record: a file with a manifest is not written again. A Delta table has its log.

If bodies have new columns, the conversion of the file starts again with all columns. So each
partition gets one file with one schema, even after interruptions. A damaged archive file is not
converted.
"""

from __future__ import annotations

import errno
import json
import os
import re
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, suppress
from dataclasses import dataclass, field, replace
from datetime import UTC, datetime
from functools import cached_property
from operator import attrgetter
from pathlib import Path, PurePosixPath
from typing import Any

import pyarrow
from pyarrow import compute, parquet, types

from nsqtools.archive.body_columns import (
    ERROR,
    FIELD,
    RESERVED,
    BodyColumns,
    fields_of,
    join_errors,
    json_schema,
)
from nsqtools.archive.catalog import DAY_NS, PARTITIONS, has_grown, hash_path
from nsqtools.archive.columns import message_schema, read_batches
from nsqtools.archive.delta import INGESTED, DeltaCatalog, TableFile, refuse_other_form
from nsqtools.archive.finding import ArchiveFile
from nsqtools.archive.form import LineKind
from nsqtools.archive.layout import (
    MANIFEST,
    NULL_PARTITION,
    folder_of,
    hidden_name,
    is_hidden,
    owner_of,
)
from nsqtools.archive.parquet import ROW_GROUP_BYTES, ParquetWriter
from nsqtools.archive.place import hash_of, translating_errors
from nsqtools.archive.place_url import parse_place
from nsqtools.archive.reader import form_of, scan_archive
from nsqtools.archive.upload import NotUploadable, identity_of
from nsqtools.errors import ConfigurationError
from nsqtools.records.envelope import BodyKind

HOUR_NS = 3_600 * 10**9
# Each partition has an open file. Further partitions are written in another pass over the archive.
MAX_OPEN_PARTITIONS = 500
COLUMNS = "_columns"
"""The folder with the columns of a Parquet folder: the newest file has all of them."""
_COLUMNS_NAME = re.compile(r"/\d{8}\.json$")
_MESSAGE_COLUMNS = {*RESERVED, ERROR}
# File systems allow 255 bytes in the name of a folder, and object stores 1024 in the whole path.
MAX_VALUE_BYTES = 200


@dataclass(frozen=True, slots=True)
class TablePlan:
    """The target and the columns of a conversion.

    ``partition_by`` has ``hour`` and fields of the bodies, in addition to topic and date.
    ``fields`` is the initial JSON Schema of bodies. ``options`` are settings of the object store.
    """

    url: str
    is_delta: bool
    host: str
    body: BodyKind = BodyKind.string
    fields: Mapping[str, Any] | None = None
    partition_by: tuple[str, ...] = ()
    options: Mapping[str, str] = field(default_factory=dict)

    @property
    def partitions(self) -> tuple[str, ...]:
        """The partition columns, in the order of the folders."""
        return (*PARTITIONS, *self.partition_by)

    def check(self) -> None:
        """Raise `NsqError` if the options conflict with each other or with the existing table."""
        storage = Table(self).storage
        with translating_errors("use", self.url):
            refuse_other_form(storage, "--store", is_delta=self.is_delta)
            is_ingested = any(entry.name == INGESTED for entry in storage.children("")[0])
        if is_ingested and not self.is_delta:
            raise ConfigurationError(
                f"{self.url} belongs to nsq spark ingest, which removes the files of others",
                hint="Give another place.",
            )
        columns = BodyColumns(fields_of(self.fields)).schema()
        plain = {column.name for column in columns if not types.is_nested(column.type)}
        for name in self.partition_by:
            if name != "hour" and name not in plain - _MESSAGE_COLUMNS:
                raise ConfigurationError(
                    f"--partition-by .{name} needs a plain field in the schema of bodies",
                    hint="Give --body json and --schema FILE; nsq archive schema makes one.",
                )


Key = tuple[str | None, ...]
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


# -- convert a log to files ---------------------------------------------------------------------


class TableWriter:
    """Converts archives to Parquet files in the directory ``drafts``.

    ``fields`` are the initial fields of bodies, and ``columns`` their columns in the table. The
    attribute ``columns`` also has the columns of new fields.
    """

    def __init__(
        self,
        plan: TablePlan,
        drafts: Path,
        fields: Iterable[pyarrow.Field],
        columns: Iterable[pyarrow.Field] = (),
    ) -> None:
        self.plan = plan
        self._drafts = drafts
        self.columns = BodyColumns(fields, columns) if plan.body is BodyKind.json else None

    @property
    def schema(self) -> pyarrow.Schema:
        """The columns of the table, with the partition columns."""
        schema = self.columns.schema() if self.columns else message_schema(self.plan.body)
        kinds = {"date": pyarrow.date32(), "hour": pyarrow.int32()}
        for name in self.plan.partitions:
            if name in kinds:
                schema = schema.append(pyarrow.field(name, kinds[name]))
        return schema

    def write(self, archive: ArchiveFile, stem: str, topic: str | None = None) -> list[Draft]:
        """Write the files of a log. ``topic`` is the topic of bare bodies.

        Raises `NotUploadable` for a damaged log, ``OSError``, and the errors of `read_batches`.
        """
        misfits = self.misfits
        drafts: dict[Key, Draft] = {}
        is_complete = False
        try:
            while not is_complete:
                schema = self.schema
                # Each pass reads the log again, and would count its misfits again.
                if self.columns:
                    self.columns.misfits = misfits
                is_complete = self._write_pass(archive, stem, topic, drafts)
                # Bodies had new columns, so all files are written again with them.
                if self.schema != schema:
                    _remove(drafts)
                    is_complete = False
            _compare(drafts, archive)
        except BaseException:
            _remove(drafts)
            if self.columns:
                self.columns.misfits = misfits
            raise
        if self.columns:
            self.columns.freeze_types()
        return list(drafts.values())

    @property
    def misfits(self) -> int:
        """The number of bodies that did not fit their columns."""
        return self.columns.misfits if self.columns else 0

    @property
    def unfit(self) -> Unfit:
        """The bodies and fields that did not fit."""
        return Unfit(self.misfits, self.columns.without_column if self.columns else ())

    def _write_pass(
        self, archive: ArchiveFile, stem: str, topic: str | None, drafts: dict[Key, Draft]
    ) -> bool:
        """Write the files of at most `MAX_OPEN_PARTITIONS` partitions without a file.

        Returns whether all partitions have files now. The pass ends early if bodies have new
        columns.
        """
        schema, is_complete = self.schema, True
        file_schema = pyarrow.schema(
            [column for column in schema if column.name not in self.plan.partitions]
        )
        writers: dict[Key, ParquetWriter] = {}
        problems: list[str] = []
        with ExitStack() as stack:
            for batch in read_batches(
                archive,
                lambda _, problem: problems.append(problem),
                kind=self.plan.body,
                topic=topic,
            ):
                if problems:
                    raise NotUploadable(errno.EIO, f"it is damaged: {problems[0]}", archive.shown)
                typed = self.columns.add(batch) if self.columns else batch
                if self.schema != schema:
                    return False
                for key, part in self._parts(typed, archive):
                    if key in drafts:
                        continue
                    writer = writers.get(key)
                    if writer is None:
                        if len(writers) >= MAX_OPEN_PARTITIONS:
                            is_complete = False
                            continue
                        path = self._drafts / f"{stem}-{len(drafts) + len(writers)}.parquet"
                        writer = stack.enter_context(ParquetWriter(path, file_schema))
                        writers[key] = writer
                    writer.add(part.select(file_schema.names))
                # All partitions together keep at most one row group in memory.
                while sum(writer.pending_bytes for writer in writers.values()) > ROW_GROUP_BYTES:
                    max(writers.values(), key=attrgetter("pending_bytes")).end_row_group()
            if problems:
                raise NotUploadable(errno.EIO, f"it is damaged: {problems[0]}", archive.shown)
            for key, writer in writers.items():
                draft = writer.close()
                partition = dict(zip(self.plan.partitions, key, strict=True))
                folder = folder_of(partition)
                # nsqd refuses such a topic, so a damaged or forged log has it.
                if len(folder.partition("/")[0]) > MAX_VALUE_BYTES:
                    raise NotUploadable(errno.ENAMETOOLONG, "its topic is too long", archive.shown)
                file = replace(draft, path=f"{folder}/{stem}.parquet", partition=partition)
                drafts[key] = Draft(draft.path, file)
        return is_complete

    def _parts(
        self, batch: pyarrow.RecordBatch, archive: ArchiveFile
    ) -> Iterator[tuple[Key, pyarrow.RecordBatch]]:
        """Split a batch into partitions. A message without a time has the time of the file.

        A value that is too long for the name of a folder counts as a misfit and becomes null.
        """
        times = batch["ts_ns"]
        if times.null_count:
            times = times.fill_null(archive.storage.stat(archive.name).modified_ns)
        parts: list[tuple[Key, Any]] = [((), batch.append_column(_TIMES, times))]
        for name in self.plan.partitions:
            unit_ns, to_text = _TIME_PARTITIONS.get(name, (0, _partition_text))
            parts = [
                self._extend_key(key, name, to_text(value), rows)
                for key, part in parts
                for value, rows in _split(
                    part, compute.divide(part[_TIMES], unit_ns) if unit_ns else part[name]
                )
            ]
        yield from parts

    def _extend_key(self, key: Key, name: str, value: str | None, rows: Any) -> tuple[Key, Any]:
        """Return the key of rows that have one value of a partition column, and the rows."""
        if (
            self.columns is None
            or name in PARTITIONS
            or len(folder_of({name: value})) <= MAX_VALUE_BYTES
        ):
            return (*key, value), rows
        errors = rows[ERROR]
        self.columns.misfits += errors.null_count
        too_long = pyarrow.repeat(f"{name} is too long for a partition", rows.num_rows)
        errors = join_errors(errors, too_long)
        return (*key, None), rows.set_column(rows.schema.get_field_index(ERROR), ERROR, errors)


def _remove(drafts: dict[Key, Draft]) -> None:
    for draft in drafts.values():
        Path(draft.path).unlink()
    drafts.clear()


def _compare(drafts: Mapping[Key, Draft], archive: ArchiveFile) -> None:
    """Raise `NotUploadable` if the files of a log do not have all of its messages."""
    files = [draft.file for draft in drafts.values()]
    rows = sum(file.rows or 0 for file in files)
    problem = ""
    # One file would replace the other.
    if len({file.path for file in files}) != len(files):
        problem = "two of its partitions have one name"
    elif archive.messages not in (None, rows):
        problem = f"it has {rows} messages, and {archive.messages} in its index"
    if problem:
        raise NotUploadable(errno.EIO, f"it is damaged: {problem}", archive.shown)


_TIMES = "partition ts_ns"  # The space avoids a conflict: no column of a body has one in its name.


def _partition_text(value: Any) -> str | None:
    """Return a value as text for the name of a folder; empty text is null, as in Delta."""
    if isinstance(value, bool):
        return str(value).lower()
    return None if value in (None, "", NULL_PARTITION) else str(value)


_TIME_PARTITIONS: dict[str, tuple[int, Callable[[Any], str | None]]] = {
    "date": (DAY_NS, lambda day: f"{datetime.fromtimestamp(day * 86_400, UTC):%Y-%m-%d}"),
    "hour": (HOUR_NS, lambda hour: str(hour % 24)),
}


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
    same content, so its name contains its size and the hash of its path. Raises ``OSError`` and
    `NsqError`.
    """
    identity = identity_of(archive, host)
    if archive.head is not None:
        return f"{identity}-{archive.members[0].min_ts:x}" if archive.members else identity
    place = archive.shown if archive.is_remote else os.path.abspath(archive.shown)
    return f"{identity}-{archive.size():x}-{hash_path(place)}"


# -- into the table -----------------------------------------------------------------------------


class Table:
    """The target of a conversion. Raises ``OSError`` and `NsqError`."""

    def __init__(self, plan: TablePlan) -> None:
        self.plan = plan
        self.catalog = DeltaCatalog(plan.url, plan.options) if plan.is_delta else None
        self.storage = parse_place(plan.url, plan.options)

    def columns(self) -> list[pyarrow.Field]:
        """Return the columns of the table, which may include columns for fields of bodies."""
        if self.plan.body is not BodyKind.json:
            return []
        if self.catalog is not None:
            return list(self.catalog.schema()) if self.catalog.exists() else []
        return self._columns_file()[1]

    def _columns_file(self) -> tuple[int, list[pyarrow.Field]]:
        """Return the number and the content of the newest file of columns.

        Without such a file, as in a folder of 0.3.0, return 0 and the columns of the newest Parquet
        file.
        """
        names = [entry.name for entry in self.storage.children(COLUMNS)[0]]
        if (newest := max(filter(_COLUMNS_NAME.search, names), default=None)) is None:
            return 0, self._columns_of_newest()
        document = self.storage.read_json(newest)
        columns = [
            column.with_metadata({FIELD: document["fields"][column.name]})
            if column.name in document["fields"]
            else column
            for column in fields_of(document)
        ]
        return int(PurePosixPath(newest).stem), columns

    def _columns_of_newest(self) -> list[pyarrow.Field]:
        """Return the columns of the newest Parquet file, where 0.3.0 recorded them."""
        entries = (
            entry
            for entry in self.storage.list()
            if entry.name.endswith(".parquet")
            and not any(part[0] in "._" for part in entry.name.split("/"))
        )
        if newest := max(entries, key=attrgetter("modified_ns"), default=None):
            with (
                suppress(pyarrow.ArrowException),  # A truncated file has no columns.
                self.storage.open(newest.name) as file,
                parquet.ParquetFile(file) as opened,
            ):
                schema = opened.schema_arrow.remove_metadata()
                return [column for column in schema if column.name not in _MESSAGE_COLUMNS]
        return []

    def _add_to_columns_file(self, schema: pyarrow.Schema) -> bool:
        """Record the columns of a Parquet folder for all of its writers.

        Returns False if the folder has a column with another type or for another field.
        """
        new_columns = [column for column in schema if column.metadata]
        while new_columns:
            number, columns = self._columns_file()
            merged = {column.name.lower(): column for column in columns}
            for column in new_columns:
                present = merged.get(column.name.lower(), column)
                if not column.equals(present, check_metadata=bool(present.metadata)):
                    return False
                merged[column.name.lower()] = column
            union = pyarrow.schema(merged.values())
            if number and union.equals(pyarrow.schema(columns), check_metadata=True):
                break
            fields = {
                column.name: column.metadata[FIELD].decode() for column in union if column.metadata
            }
            document = json_schema(union) | {"fields": fields}
            # If another writer has stored this number first, its columns are merged, too.
            with suppress(FileExistsError):
                name = f"{COLUMNS}/{number + 1:08}.json"
                self.storage.put_if_absent(name, json.dumps(document, indent=1).encode())
                break
        return True

    def evolve_schema(self, schema: pyarrow.Schema) -> bool:
        """Prepare the table for files with ``schema``.

        Returns False if the table has a column with another type or for another field.
        """
        if self.catalog is None:
            return self._add_to_columns_file(schema)
        if not self.catalog.exists():
            self.catalog.create(schema, self.plan.partitions)
        if self.catalog.partition_columns != list(self.plan.partitions):
            raise ConfigurationError(
                f"{self.storage.url} is partitioned by {', '.join(self.catalog.partition_columns)}",
                hint="Give the --partition-by of the table, or another table.",
            )
        conflicts = self.catalog.add_columns(schema)
        for name in _MESSAGE_COLUMNS & conflicts.keys():
            raise ConfigurationError(
                f"{name} is {conflicts[name]} in {self.storage.url}, not {schema.field(name).type}",
                hint="Give the --body of the table, or another table.",
            )
        return not conflicts

    def number_of(self, app_id: str) -> int:
        """Return the number of a writer's last commit, 0 without one."""
        return self.catalog.number_of(app_id) if self.catalog and self.catalog.exists() else 0

    def commit(self, drafts: Sequence[Draft], app_id: str, number: int) -> list[TableFile]:
        """Store files and commit them once under this number of the writer.

        Returns the new files.
        """
        if self.catalog is None or not drafts:
            return self._put(drafts)
        if self.number_of(app_id) >= number:
            return []
        files = self._put(drafts)
        return files if self.catalog.commit(files, app_id=app_id, number=number) else []

    def _put(self, drafts: Iterable[Draft]) -> list[TableFile]:
        """Store files, and their manifests unless the table has a log."""
        files = []
        for draft in drafts:
            path, file = Path(draft.path), draft.file
            if rows := 0 if self.catalog else self._manifest_rows(file.path):
                if rows != file.rows:
                    raise _partial_copy_error(rows, str(self.storage / file.path))
                continue
            files.append(file)
            self.storage.verify(file.path, path, self.storage.put_file(file.path, path))
            if self.catalog is None:
                document = {
                    "version": 1,
                    "name": PurePosixPath(file.path).name,
                    "size": file.bytes,
                    "sha256": hash_of(path),
                    "messages": file.rows,
                    "min_ts": file.min_ts_ns,
                    "max_ts": file.max_ts_ns,
                }
                data = json.dumps(document, indent=1).encode() + b"\n"
                self.storage.put(hidden_name(file.path, MANIFEST), data)
        return files

    def _manifest_rows(self, name: str) -> int:
        """Return the number of messages in the manifest of a file.

        Returns 0 if the manifest is missing or the file does not have the recorded size, so that it
        is written again.
        """
        with suppress(FileNotFoundError, ValueError, KeyError, TypeError):
            manifest = json.loads(self.storage.read(hidden_name(name, MANIFEST)))
            if self.storage.stat(name).size == manifest["size"]:
                return int(manifest["messages"])
        return 0

    # -- earlier conversions --------------------------------------------------------------------

    @cached_property
    def existing_files(self) -> dict[str, list[str]]:
        """The paths of the files at the first access, by name without folder and extension."""
        if self.catalog is None:
            paths = (PurePosixPath(entry.name) for entry in self.storage.list())
            paths = (owner_of(path) for path in paths if is_hidden(path.name, MANIFEST))
        else:
            files = self.catalog.files() if self.catalog.exists() else []
            paths = (PurePosixPath(file.path) for file in files)
        paths_by_stem: dict[str, list[str]] = {}
        for path in paths:
            paths_by_stem.setdefault(path.stem, []).append(str(path))
        return paths_by_stem

    def messages_of(self, stem: str) -> int:
        """Return how many messages of an archive file the table has."""
        if self.catalog is not None:
            return self.number_of(_app_id(stem))
        return sum(map(self._manifest_rows, self.existing_files.get(stem, ())))


def _app_id(stem: str) -> str:
    return f"nsqtools-convert-{stem}"


def _partial_copy_error(messages: int, shown: str) -> NotUploadable:
    """Return the error for a table that has a truncated copy of the same file."""
    return NotUploadable(errno.EEXIST, f"the table has a copy with {messages} messages", shown)


def convert(
    archives: Sequence[ArchiveFile], plan: TablePlan, drafts: Path, topic: str | None = None
) -> Iterator[tuple[ArchiveFile, list[TableFile], str, Unfit]]:
    """Convert archives to files of a table, one after the other. The archives are kept.

    Yields each archive file with its Parquet files, the reason why it was skipped or "", and the
    misfits. A file that was converted before has no Parquet files. Raises ``OSError`` and
    `NsqError`.
    """
    table = Table(plan)
    if table.catalog is not None and table.catalog.exists():
        table.catalog.check_writable()
    for archive in archives:
        if archive.is_in_progress:
            yield archive, [], "it is in progress", Unfit()
            continue
        stem = parquet_stem(archive, plan.host)
        try:
            if _is_converted(table, archive, stem):
                yield archive, [], "", Unfit()
                continue
            # Another writer may give a new column another type first. The next attempt reads it.
            while True:
                writer = TableWriter(plan, drafts, fields_of(plan.fields), table.columns())
                new_drafts = writer.write(archive, stem, topic)
                if not new_drafts or table.evolve_schema(writer.schema):
                    break
            rows = sum(draft.file.rows or 0 for draft in new_drafts)
            try:
                files = table.commit(new_drafts, _app_id(stem), rows)
            finally:
                for draft in new_drafts:
                    Path(draft.path).unlink()
        except NotUploadable as exc:
            yield archive, [], str(exc.strerror), Unfit()
        else:
            yield archive, files, "", writer.unfit if files else Unfit()


def _is_converted(table: Table, archive: ArchiveFile, stem: str) -> bool:
    """Return whether a file was converted.

    After a kill between two files of a Parquet folder the conversion is repeated. A Delta table has
    all files of a commit or none, so a smaller count there is a truncated copy: the function raises
    `NotUploadable`.
    """
    names = [stem]
    if archive.head is None and form_of(archive).kind is LineKind.messages:
        identity = identity_of(archive, table.plan.host)  # the whole name in 0.3.0
        prefix = f"{identity}-"
        names += [identity, *(name for name in table.existing_files if name.startswith(prefix))]
    if converted := max(map(table.messages_of, names)):
        count = archive.messages
        if count is None:
            count = sum(member.messages for member in scan_archive(archive).members)
        if converted < count and table.catalog is not None:
            raise _partial_copy_error(converted, archive.shown)
        return converted >= count
    place = stem.rpartition("-")[2]
    if archive.head is None and has_grown(archive, place, table.existing_files):
        raise NotUploadable(errno.EEXIST, "it has grown since it was converted", archive.shown)
    return False
