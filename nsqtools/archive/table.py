"""Archives into tables: what becomes of a file's messages, and where it goes.

    topic=clicks/date=2026-11-23/web1-5b1c2f0e8d9a4e6f-17-18a6f5c09d6bd115.parquet
                                .web1-5b1c2f0e8d9a4e6f-17-18a6f5c09d6bd115.parquet.manifest

A file of an archive becomes one Parquet file for each partition that it has messages of. The name
has the host, the writer, the number and the first time of the file, so each has its own name, and a
repetition writes the same rows under the same name. In a folder of Parquet the manifest, which has
size, hash, count and times, is the commit record: what has one is not put again. A Delta table has
its log.

Columns that are found in bodies while a file is read make it begin again with all of them, so that
it makes one file a partition, whichever way it is interrupted. What is damaged is left where it is.
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
from nsqtools.archive.layout import MANIFEST, NULL_PARTITION, aside, folder_of, is_hidden, owner_of
from nsqtools.archive.parquet import ROW_GROUP_BYTES, ParquetWriter
from nsqtools.archive.place import hash_of, translating_errors
from nsqtools.archive.place_url import parse_place
from nsqtools.archive.reader import form_of, look_at
from nsqtools.archive.upload import NotUploadable, identity_of
from nsqtools.errors import ConfigurationError
from nsqtools.records.envelope import BodyKind

HOUR_NS = 3_600 * 10**9
MOST_PARTITIONS = 500  # at a time: each has a file open, and those beyond come in another pass
COLUMNS = "_columns"
"""The folder where Parquet without a log has its columns: the newest file has all of them."""
_COLUMNS_NAME = re.compile(r"/\d{8}\.json$")
_OWN = {*RESERVED, ERROR}
LONGEST_VALUE = 200  # bytes in the name of a folder


@dataclass(frozen=True, slots=True)
class TablePlan:
    """What is made of logs, and where.

    ``partition_by`` are ``hour`` and fields of the bodies, beside topic and date; ``fields`` is the
    JSON Schema of bodies to begin with. ``options`` are settings of the object store.
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
        """The columns of partitions, in the order of the folders."""
        return (*PARTITIONS, *self.partition_by)

    def check(self) -> None:
        """Raise `NsqError` when the options do not fit together, or what is there."""
        storage = Table(self).storage
        with translating_errors("use", self.url):
            refuse_other_form(storage, "--store", is_delta=self.is_delta)
            is_ingested = any(each.name == INGESTED for each in storage.children("")[0])
        if is_ingested and not self.is_delta:
            raise ConfigurationError(
                f"{self.url} belongs to nsq spark ingest, which removes what others put there",
                hint="Give another place.",
            )
        columns = BodyColumns(fields_of(self.fields)).schema()
        known = {each.name for each in columns if not types.is_nested(each.type)} - _OWN
        for name in self.partition_by:
            if name != "hour" and name not in known:
                raise ConfigurationError(
                    f"--partition-by .{name} needs a plain field in the schema of bodies",
                    hint="Give --body json and --schema FILE; nsq archive schema makes one.",
                )


Key = tuple[str | None, ...]
"""The values of a partition, in the order of its columns."""


@dataclass(frozen=True, slots=True)
class Unfit:
    """How many bodies did not fit their columns, and the fields that could not get one."""

    bodies: int = 0
    fields: Collection[str] = ()


@dataclass(frozen=True, slots=True)
class Draft:
    """A Parquet file that is written and compared, and what it becomes in the table."""

    path: str
    file: TableFile


# -- one log into files -------------------------------------------------------------------------


class TableWriter:
    """Makes Parquet files of archives, in the directory ``drafts``.

    ``fields`` are those of bodies to begin with, ``columns`` those that the table has for them; the
    attribute knows those found since, too.
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
        """The columns of the table, those of partitions included."""
        schema = self.columns.schema() if self.columns else message_schema(self.plan.body)
        kinds = {"date": pyarrow.date32(), "hour": pyarrow.int32()}
        for name in self.plan.partitions:
            if name in kinds:
                schema = schema.append(pyarrow.field(name, kinds[name]))
        return schema

    def write(self, archive: ArchiveFile, stem: str, topic: str | None = None) -> list[Draft]:
        """Make the files of a log. ``topic`` is that of bare bodies.

        Raises `NotUploadable` for one that is damaged, ``OSError``, and as `read_batches`.
        """
        misfits = self.misfits
        drafts: dict[Key, Draft] = {}
        is_over = False
        try:
            while not is_over:
                schema = self.schema
                if self.columns:
                    self.columns.misfits = misfits  # of a log that is read again
                is_over = self._write_some(archive, stem, topic, drafts)
                if self.schema != schema:  # bodies have columns that were not known before
                    _remove(drafts)
                    is_over = False
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
        """How many bodies did not fit."""
        return self.columns.misfits if self.columns else 0

    @property
    def unfit(self) -> Unfit:
        """What did not fit."""
        return Unfit(self.misfits, self.columns.without_column if self.columns else ())

    def _write_some(
        self, archive: ArchiveFile, stem: str, topic: str | None, drafts: dict[Key, Draft]
    ) -> bool:
        """Make the files of partitions that have none yet, as many as can be open at a time; return
        whether these are all. It ends early when there are new columns."""
        schema, is_over = self.schema, True
        in_file = pyarrow.schema([each for each in schema if each.name not in self.plan.partitions])
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
                        if len(writers) >= MOST_PARTITIONS:
                            is_over = False
                            continue
                        path = self._drafts / f"{stem}-{len(drafts) + len(writers)}.parquet"
                        writer = stack.enter_context(ParquetWriter(path, in_file))
                        writers[key] = writer
                    writer.add(part.select(in_file.names))
                while sum(each.held_bytes for each in writers.values()) > ROW_GROUP_BYTES:
                    # no more than a row group is held in memory, of all partitions together
                    max(writers.values(), key=attrgetter("held_bytes")).end_row_group()
            if problems:
                raise NotUploadable(errno.EIO, f"it is damaged: {problems[0]}", archive.shown)
            for key, writer in writers.items():
                written = writer.close()
                named = dict(zip(self.plan.partitions, key, strict=True))
                folder = folder_of(named)
                if len(folder.partition("/")[0]) > LONGEST_VALUE:  # no nsqd has such a topic
                    raise NotUploadable(errno.ENAMETOOLONG, "its topic is too long", archive.shown)
                file = replace(written, path=f"{folder}/{stem}.parquet", partition=named)
                drafts[key] = Draft(written.path, file)
        return is_over

    def _parts(
        self, batch: pyarrow.RecordBatch, archive: ArchiveFile
    ) -> Iterator[tuple[Key, pyarrow.RecordBatch]]:
        """Cut a batch into partitions; what has no time has that of the file.

        A field whose value is too long for the name of a folder has none, as a misfit.
        """
        times = batch["ts_ns"]
        if times.null_count:
            times = times.fill_null(archive.storage.stat(archive.name).modified_ns)
        whole = batch.append_column(_TIMES, times)
        parts: list[tuple[Key, Any]] = [((), whole)]
        for name in self.plan.partitions:
            unit_ns, show = _TIME_PARTITIONS.get(name, (0, _plain))
            parts = [
                self._placed(key, name, show(value), some)
                for key, part in parts
                for value, some in _split(
                    part, compute.divide(part[_TIMES], unit_ns) if unit_ns else part[name]
                )
            ]
        yield from parts

    def _placed(self, key: Key, name: str, value: str | None, part: Any) -> tuple[Key, Any]:
        """Return the partition of some rows that have one value, and the rows."""
        if (
            self.columns is None
            or name in PARTITIONS
            or len(folder_of({name: value})) <= LONGEST_VALUE
        ):
            return (*key, value), part
        errors = part[ERROR]
        self.columns.misfits += errors.null_count
        more = pyarrow.repeat(f"{name} is too long for a partition", part.num_rows)
        both = join_errors(errors, more)
        return (*key, None), part.set_column(part.schema.get_field_index(ERROR), ERROR, both)


def _remove(drafts: dict[Key, Draft]) -> None:
    for draft in drafts.values():
        Path(draft.path).unlink()
    drafts.clear()


def _compare(drafts: Mapping[Key, Draft], archive: ArchiveFile) -> None:
    """Raise `NotUploadable` when the files of a log are not all of it."""
    files = [draft.file for draft in drafts.values()]
    rows = sum(file.rows or 0 for file in files)
    problem = ""
    if len({file.path for file in files}) != len(files):  # one would replace another
        problem = "two of its partitions have one name"
    elif archive.messages not in (None, rows):
        problem = f"it has {rows} messages, and {archive.messages} in its index"
    if problem:
        raise NotUploadable(errno.EIO, f"it is damaged: {problem}", archive.shown)


_TIMES = "partition ts_ns"  # no column of a body has a space in its name


def _plain(value: Any) -> str | None:
    """Return a value as a folder has it; empty text is none, as in Delta."""
    if isinstance(value, bool):
        return str(value).lower()
    return None if value in (None, "", NULL_PARTITION) else str(value)


_TIME_PARTITIONS: dict[str, tuple[int, Callable[[Any], str | None]]] = {
    "date": (DAY_NS, lambda day: f"{datetime.fromtimestamp(day * 86_400, UTC):%Y-%m-%d}"),
    "hour": (HOUR_NS, lambda hour: str(hour % 24)),
}


def _split(batch: Any, keys: Any) -> Iterator[tuple[Any, Any]]:
    coded = keys.dictionary_encode(null_encoding="encode")  # not a number equals nothing
    if len(coded.dictionary) == 1:
        yield coded.dictionary[0].as_py(), batch
        return
    for number, value in enumerate(coded.dictionary):
        yield value.as_py(), batch.filter(compute.equal(coded.indices, number))


def stem_of(archive: ArchiveFile, host: str) -> str:
    """Return the name of the files that an archive becomes, without their ending.

    Machines of one image, and one that went back to a snapshot, give several files one head; their
    times tell them apart. A file without a head may be one of two with the same content, and may
    grow: it is known by its place, and by the size that it had. Raises ``OSError`` and `NsqError`.
    """
    identity = identity_of(archive, host)
    if archive.head is not None:
        return f"{identity}-{archive.members[0].min_ts:x}" if archive.members else identity
    place = archive.shown if archive.is_remote else os.path.abspath(archive.shown)
    return f"{identity}-{archive.size():x}-{hash_path(place)}"


# -- into the table -----------------------------------------------------------------------------


class Table:
    """Where files land. Raises ``OSError`` and `NsqError`."""

    def __init__(self, plan: TablePlan) -> None:
        self.plan = plan
        self.catalog = DeltaCatalog(plan.url, plan.options) if plan.is_delta else None
        self.storage = parse_place(plan.url, plan.options)

    def columns(self) -> list[pyarrow.Field]:
        """Return the columns that the table has for fields of bodies, and more of its own."""
        if self.plan.body is not BodyKind.json:
            return []
        if self.catalog is not None:
            return list(self.catalog.schema()) if self.catalog.exists() else []
        return self._columns_file()[1]

    def _columns_file(self) -> tuple[int, list[pyarrow.Field]]:
        """Return the number and the content of the newest file of columns.

        Without one, as in a folder of 0.3.0, return 0 and the columns of the newest Parquet.
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
        """Return the columns of the newest file of Parquet: 0.3.0 wrote them nowhere else."""
        entries = (
            entry
            for entry in self.storage.list()
            if entry.name.endswith(".parquet")
            and not any(part[0] in "._" for part in entry.name.split("/"))
        )
        if newest := max(entries, key=attrgetter("modified_ns"), default=None):
            with (
                suppress(pyarrow.ArrowException),  # one that is not whole tells nothing
                self.storage.open(newest.name) as file,
                parquet.ParquetFile(file) as opened,
            ):
                schema = opened.schema_arrow.remove_metadata()
                return [each for each in schema if each.name not in _OWN]
        return []

    def _add_to_columns_file(self, schema: pyarrow.Schema) -> bool:
        """Write the columns of a folder of Parquet down, for all who write there; False when it has
        another type for one, or another field."""
        own = [column for column in schema if column.metadata]
        while own:
            number, columns = self._columns_file()
            merged = {column.name.lower(): column for column in columns}
            for column in own:
                there = merged.get(column.name.lower(), column)
                if not column.equals(there, check_metadata=bool(there.metadata)):
                    return False
                merged[column.name.lower()] = column
            every = pyarrow.schema(merged.values())
            if number and every.equals(pyarrow.schema(columns), check_metadata=True):
                break
            fields = {each.name: each.metadata[FIELD].decode() for each in every if each.metadata}
            document = json_schema(every) | {"fields": fields}
            with suppress(FileExistsError):  # another writer was faster: look again
                name = f"{COLUMNS}/{number + 1:08}.json"
                self.storage.put_if_absent(name, json.dumps(document, indent=1).encode())
                break
        return True

    def evolve_schema(self, schema: pyarrow.Schema) -> bool:
        """Have the table take files of ``schema``; False when a column has another type there, or
        another field."""
        if self.catalog is None:
            return self._add_to_columns_file(schema)
        if not self.catalog.exists():
            self.catalog.create(schema, self.plan.partitions)
        if self.catalog.partition_columns != list(self.plan.partitions):
            raise ConfigurationError(
                f"{self.storage.url} is partitioned by {', '.join(self.catalog.partition_columns)}",
                hint="Give --partition-by as it was made, or another table.",
            )
        other = self.catalog.add_columns(schema)
        for name in _OWN & other.keys():
            here = schema.field(name).type
            raise ConfigurationError(
                f"{name} is {other[name]} in {self.storage.url}, and {here} here",
                hint="Give another table, or --body as it was made.",
            )
        return not other

    def number_of(self, app_id: str) -> int:
        """Return the number of a writer's last commit, 0 without one."""
        return self.catalog.number_of(app_id) if self.catalog and self.catalog.exists() else 0

    def commit(self, drafts: Sequence[Draft], app_id: str, number: int) -> list[TableFile]:
        """Put files in their place, and commit them: once, under this number of a writer.

        Returns those that were not there.
        """
        if self.catalog is None or not drafts:
            return self._put(drafts)
        if self.number_of(app_id) >= number:
            return []
        files = self._put(drafts)
        return files if self.catalog.commit(files, app_id=app_id, number=number) else []

    def _put(self, drafts: Iterable[Draft]) -> list[TableFile]:
        """Put files in their place, and their manifests if there is no other catalog."""
        files = []
        for each in drafts:
            path, file = Path(each.path), each.file
            if there := 0 if self.catalog else self._noted(file.path):
                if there != file.rows:
                    raise _holds_less(there, str(self.storage / file.path))
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
                self.storage.put(aside(file.path, MANIFEST), data)
        return files

    def _noted(self, name: str) -> int:
        """Return how many messages a file has by its manifest, 0 without both as they were made."""
        with suppress(FileNotFoundError, ValueError, KeyError, TypeError):
            said = json.loads(self.storage.read(aside(name, MANIFEST)))
            if self.storage.stat(name).size == said["size"]:  # else it is to be made again
                return int(said["messages"])
        return 0

    # -- what was converted before --------------------------------------------------------------

    @cached_property
    def there(self) -> dict[str, list[str]]:
        """The files that were there at first, by their names without folder and ending."""
        if self.catalog is None:
            hidden = (PurePosixPath(entry.name) for entry in self.storage.list())
            paths = [owner_of(each) for each in hidden if is_hidden(each.name, MANIFEST)]
        else:
            files = self.catalog.files() if self.catalog.exists() else []
            paths = [PurePosixPath(each.path) for each in files]
        there: dict[str, list[str]] = {}
        for path in paths:
            there.setdefault(path.stem, []).append(str(path))
        return there

    def messages_of(self, stem: str) -> int:
        """Return how many messages of an archive are there."""
        if self.catalog is not None:
            return self.number_of(_app_of(stem))
        return sum(map(self._noted, self.there.get(stem, ())))


def _app_of(stem: str) -> str:
    return f"nsqtools-convert-{stem}"


def _holds_less(there: int, shown: str) -> NotUploadable:
    """Return why the whole of a file cannot follow a copy of it that was cut off."""
    return NotUploadable(errno.EEXIST, f"a copy of it with {there} messages is there", shown)


def convert(
    archives: Sequence[ArchiveFile], plan: TablePlan, drafts: Path, topic: str | None = None
) -> Iterator[tuple[ArchiveFile, list[TableFile], str, Unfit]]:
    """Bring archives into a table, one after the other; they stay where they are.

    Yields each with its files, or why it is left out, and what did not fit. One that is in the
    table already gives no files, and nothing is done. Raises ``OSError`` and `NsqError`.
    """
    table = Table(plan)
    if table.catalog is not None and table.catalog.exists():
        table.catalog.check_writable()
    for archive in archives:
        if archive.is_in_progress:
            yield archive, [], "it is in progress", Unfit()
            continue
        stem = stem_of(archive, plan.host)
        try:
            if _is_there(table, archive, stem):
                yield archive, [], "", Unfit()
                continue
            while True:
                writer = TableWriter(plan, drafts, fields_of(plan.fields), table.columns())
                made = writer.write(archive, stem, topic)
                if not made or table.evolve_schema(writer.schema):
                    break
            rows = sum(each.file.rows or 0 for each in made)
            try:
                files = table.commit(made, _app_of(stem), rows)
            finally:
                for each in made:
                    Path(each.path).unlink()
        except NotUploadable as exc:
            yield archive, [], str(exc.strerror), Unfit()
        else:
            yield archive, files, "", writer.unfit if files else Unfit()


def _is_there(table: Table, archive: ArchiveFile, stem: str) -> bool:
    """Return whether an archive was converted. Raises `NotUploadable` if it was in part, for good.

    A run that was killed while it put the files of a folder of Parquet goes on.
    """
    names = [stem]
    if archive.head is None and form_of(archive).kind is LineKind.messages:
        content = identity_of(archive, table.plan.host)  # the whole name in 0.3.0
        names += [content, *(name for name in table.there if name.startswith(f"{content}-"))]
    if there := max(map(table.messages_of, names)):
        count = archive.messages
        if count is None:
            count = sum(member.messages for member in look_at(archive).members)
        if there < count and table.catalog is not None:
            raise _holds_less(there, archive.shown)
        return there >= count
    place = stem.rpartition("-")[2]
    if archive.head is None and has_grown(archive, place, table.there):
        raise NotUploadable(errno.EEXIST, "it has grown since it was converted", archive.shown)
    return False
