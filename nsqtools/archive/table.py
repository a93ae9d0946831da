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
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, suppress
from dataclasses import dataclass, field, replace
from datetime import UTC, datetime
from functools import cached_property
from operator import attrgetter
from pathlib import Path, PurePosixPath
from typing import Any

import pyarrow
from pyarrow import compute, types

from nsqtools.archive.body_columns import ERROR, RESERVED, BodyColumns, fields_of
from nsqtools.archive.catalog import DAY_NS, PARTITIONS, has_grown, place_of
from nsqtools.archive.columns import message_schema, read_batches
from nsqtools.archive.delta import INGESTED, DeltaCatalog, TableFile, refuse_other_form
from nsqtools.archive.finding import ArchiveFile
from nsqtools.archive.form import LineKind
from nsqtools.archive.layout import MANIFEST, NULL_PARTITION, aside, folder_of, is_hidden, owner_of
from nsqtools.archive.parquet import ROW_GROUP_BYTES, ParquetWriter
from nsqtools.archive.reader import form_of, look_at
from nsqtools.archive.storage import failing, hash_of
from nsqtools.archive.storage_objects import open_storage
from nsqtools.archive.upload import NotUploadable, identity_of
from nsqtools.errors import ConfigurationError
from nsqtools.records.envelope import BodyKind

HOUR_NS = 3_600 * 10**9
MOST_PARTITIONS = 500  # of one file: each has a file open
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
        with failing("use", self.url):
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


@dataclass(frozen=True, slots=True)
class Draft:
    """A Parquet file that is written and compared, and what it becomes in the table."""

    path: str
    file: TableFile


# -- one log into files -------------------------------------------------------------------------


class TableWriter:
    """Makes Parquet files of archives, in the directory ``drafts``.

    ``fields`` are those of bodies to begin with; ``columns`` knows those found since.
    """

    def __init__(self, plan: TablePlan, drafts: Path, fields: Sequence[pyarrow.Field]) -> None:
        self.plan = plan
        self._drafts = drafts
        self.columns = BodyColumns(fields) if plan.body is BodyKind.json else None

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
        while (drafts := self._write(archive, stem, topic)) is None:
            assert self.columns is not None
            self.columns.misfits = misfits
        return drafts

    @property
    def misfits(self) -> int:
        """How many bodies did not fit."""
        return self.columns.misfits if self.columns else 0

    def _write(self, archive: ArchiveFile, stem: str, topic: str | None) -> list[Draft] | None:
        """Make the files; None when the bodies have columns that were not known before."""
        schema = self.schema
        in_file = pyarrow.schema([each for each in schema if each.name not in self.plan.partitions])
        writers: dict[tuple[str | None, ...], ParquetWriter] = {}
        drafts: list[Draft] = []
        problems: list[str] = []
        with ExitStack() as stack:
            for batch in read_batches(
                archive,
                lambda _, problem: problems.append(problem),
                kind=self.plan.body,
                topic=topic,
            ):
                if problems:
                    break
                typed = self.columns.add(batch) if self.columns else batch
                if self.columns and self.schema != schema:
                    return None
                for key, part in self._parts(typed, archive):
                    writer = writers.get(key)
                    if writer is None:
                        if len(writers) >= MOST_PARTITIONS:
                            what = "it has too many partitions"
                            raise NotUploadable(errno.EFBIG, what, archive.shown)
                        path = self._drafts / f"{stem}-{len(writers)}.parquet"
                        writer = stack.enter_context(ParquetWriter(path, in_file))
                        writers[key] = writer
                    writer.add(part.select(in_file.names))
                while sum(each.held_bytes for each in writers.values()) > ROW_GROUP_BYTES:
                    # no more than a row group is held in memory, of all partitions together
                    max(writers.values(), key=attrgetter("held_bytes")).end_row_group()
            rows = 0
            for key, writer in writers.items():
                written = writer.close()
                rows += written.rows or 0
                named = dict(zip(self.plan.partitions, key, strict=True))
                folder = folder_of(named)
                if any(len(each) > LONGEST_VALUE for each in folder.split("/")):
                    raise NotUploadable(errno.ENAMETOOLONG, f"{folder} is too long", archive.shown)
                file = replace(written, path=f"{folder}/{stem}.parquet", partition=named)
                drafts.append(Draft(written.path, file))
            if len({each.file.path for each in drafts}) != len(drafts):  # one would replace another
                problems.append("two of its partitions have one name")
            if archive.messages not in (None, rows) and not problems:
                problems.append(f"it has {rows} messages, and {archive.messages} in its index")
            if problems:
                raise NotUploadable(errno.EIO, f"it is damaged: {problems[0]}", archive.shown)
        return drafts

    def _parts(
        self, batch: pyarrow.RecordBatch, archive: ArchiveFile
    ) -> Iterator[tuple[tuple[str | None, ...], pyarrow.RecordBatch]]:
        """Cut a batch into partitions; what has no time has that of the file."""
        times = batch["ts_ns"]
        if times.null_count:
            times = times.fill_null(archive.storage.stat(archive.name).modified_ns)
        whole = batch.append_column(_TIMES, times)
        parts: list[tuple[tuple[str | None, ...], Any]] = [((), whole)]
        for name in self.plan.partitions:
            unit_ns, show = _TIME_PARTITIONS.get(name, (0, _plain))
            parts = [
                ((*key, show(value)), some)
                for key, part in parts
                for value, some in _split(
                    part, compute.divide(part[_TIMES], unit_ns) if unit_ns else part[name]
                )
            ]
        yield from parts


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
    return f"{identity}-{archive.size():x}-{place_of(place)}"


# -- into the table -----------------------------------------------------------------------------


class Table:
    """Where files land. Raises ``OSError`` and `NsqError`."""

    def __init__(self, plan: TablePlan) -> None:
        self.plan = plan
        self.catalog = DeltaCatalog(plan.url, plan.options) if plan.is_delta else None
        self.storage = open_storage(plan.url, plan.options)

    def known_fields(self, known: Iterable[pyarrow.Field]) -> list[pyarrow.Field]:
        """Return fields of bodies with the types that the table has, and the table's own."""
        fields = {each.name: each.type for each in known}
        there = self.catalog.schema() if self.catalog and self.catalog.exists() else ()
        for each in there:
            if each.name not in _OWN:
                name = each.name.removeprefix("body_")
                fields[name if name in RESERVED else each.name] = each.type
        return [pyarrow.field(name, kind) for name, kind in fields.items()]

    def make_ready(self, schema: pyarrow.Schema) -> bool:
        """Have the table take files of ``schema``; False when a column has another type there."""
        if self.catalog is None:
            return True
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
                    raise _holds_less(there, self.storage.where(file.path))
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
) -> Iterator[tuple[ArchiveFile, list[TableFile], str, int]]:
    """Bring archives into a table, one after the other; they stay where they are.

    Yields each with its files, or why it is left out, and how many bodies did not fit. One that
    is in the table already gives no files, and nothing is done. Raises ``OSError`` and `NsqError`.
    """
    table = Table(plan)
    known = fields_of(plan.fields)
    for archive in archives:
        if archive.is_in_progress:
            yield archive, [], "it is in progress", 0
            continue
        stem = stem_of(archive, plan.host)
        try:
            if _is_there(table, archive, stem):
                yield archive, [], "", 0
                continue
            while True:
                writer = TableWriter(plan, drafts, table.known_fields(known))
                made = writer.write(archive, stem, topic)
                if not made or table.make_ready(writer.schema):
                    break
            known = writer.columns.fields if writer.columns else known
            rows = sum(each.file.rows or 0 for each in made)
            try:
                files = table.commit(made, _app_of(stem), rows)
            finally:
                for each in made:
                    Path(each.path).unlink()
        except NotUploadable as exc:
            yield archive, [], str(exc.strerror), 0
        else:
            yield archive, files, "", writer.misfits if files else 0


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
