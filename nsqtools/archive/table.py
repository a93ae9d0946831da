"""The tables to which archives are converted, and the conversion of files that exist.

In a Parquet folder the manifest of a file (size, hash, count and times) is its commit record: a
file with a manifest is not written again. A Delta table has its log.
"""

from __future__ import annotations

import errno
import json
import re
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from functools import cached_property
from operator import attrgetter
from pathlib import Path, PurePosixPath

import pyarrow

from nsqtools.archive.body_columns import FIELD, BodyColumns
from nsqtools.archive.body_schema import fields_of, json_schema
from nsqtools.archive.catalog import has_grown
from nsqtools.archive.delta import DeltaCatalog, TableFile
from nsqtools.archive.finding import ArchiveFile, is_table_file
from nsqtools.archive.form import LineKind
from nsqtools.archive.layout import MANIFEST, hidden_name, is_hidden, owner_of
from nsqtools.archive.parquet import manifest_of, open_parquet, plain_schema
from nsqtools.archive.place_url import parse_place
from nsqtools.archive.reader import form_of, scan_archive
from nsqtools.archive.replacements import replaced_names, replaced_rows
from nsqtools.archive.table_places import COLUMNS, refuse_inside_table
from nsqtools.archive.table_writer import (
    MESSAGE_COLUMNS,
    Draft,
    TablePlan,
    TableWriter,
    Unfit,
    append_dead_letters,
    parquet_stem,
    partition_token,
)
from nsqtools.archive.upload import NotUploadable, identity_of
from nsqtools.errors import ConfigurationError
from nsqtools.protocol.text import load_json
from nsqtools.records.envelope import BodyKind

_COLUMNS_NAME = re.compile(r"/\d{8}\.json$")


class Table:
    """One table. Methods raise ``OSError`` and `NsqError`."""

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
        entries = (entry for entry in self.storage.list() if is_table_file(entry.name))
        if newest := max(entries, key=attrgetter("modified_ns"), default=None):
            with (
                suppress(pyarrow.ArrowException),  # A truncated file has no columns.
                self.storage.open(newest.name) as file,
                open_parquet(file) as opened,
            ):
                schema = plain_schema(opened)
                return [column for column in schema if column.name not in MESSAGE_COLUMNS]
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
            refuse_inside_table(self.storage)
            self.catalog.create(schema, self.plan.partitions)
        if self.catalog.partition_columns != list(self.plan.partitions):
            raise ConfigurationError(
                f"{self.storage.url} is partitioned by {', '.join(self.catalog.partition_columns)}",
                hint="Give the --partition-by of the table, or another table.",
            )
        conflicts = self.catalog.add_columns(schema)
        for name in MESSAGE_COLUMNS & conflicts.keys():
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
            return self.put(drafts)
        if self.number_of(app_id) >= number:
            return []
        files = self.put(drafts)
        return files if self.catalog.commit(files, app_id=app_id, number=number) else []

    def put(self, drafts: Iterable[Draft]) -> list[TableFile]:
        """Store files, and their manifests unless the table has a log. Returns the new files."""
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
                self.storage.put(hidden_name(file.path, MANIFEST), manifest_of(file, path))
        return files

    def _manifest_rows(self, name: str) -> int:
        """Return the number of messages in the manifest of a file, or before it was replaced.

        Returns 0 if the manifest is missing or the file does not have the recorded size, so that it
        is written again.
        """
        with suppress(FileNotFoundError, ValueError, KeyError, TypeError):
            manifest = load_json(self.storage.read(hidden_name(name, MANIFEST)))
            if self.storage.stat(name).size == manifest["size"]:
                return int(manifest["messages"])
        return replaced_rows(self.storage, name)

    # -- earlier conversions --------------------------------------------------------------------

    @cached_property
    def existing_files(self) -> dict[str, list[str]]:
        """The paths of the files at the first access, by name without folder and extension."""
        if self.catalog is None:
            entries = (PurePosixPath(entry.name) for entry in self.storage.list())
            paths = [owner_of(path) for path in entries if is_hidden(path.name, MANIFEST)]
            paths += map(PurePosixPath, replaced_names(self.storage))
        else:
            files = self.catalog.files() if self.catalog.exists() else []
            paths = [PurePosixPath(file.path) for file in files]
        paths_by_stem: dict[str, list[str]] = {}
        for path in paths:
            paths_by_stem.setdefault(path.stem, []).append(str(path))
        return paths_by_stem

    def messages_of(self, stem: str) -> int:
        """Return how many messages of an archive file the table has."""
        if self.catalog is not None:
            return self.number_of(_app_id(stem))
        return sum(map(self._manifest_rows, self.existing_files.get(stem, ())))


class Tables:
    """The target of a conversion: one table, or a table for each topic.

    ``fields`` are the initial fields of bodies. Methods raise ``OSError`` and `NsqError`.
    """

    def __init__(self, plan: TablePlan, fields: Iterable[pyarrow.Field] = ()) -> None:
        self.plan = plan
        self._fields = list(fields) or fields_of(plan.fields)
        self._tables: dict[str, Table] = {}

    def of(self, topic: str | None) -> Table:
        """Return the table of a topic. Raises ``ValueError`` as `url_of_topic`."""
        plan = self.plan.of_topic(topic)
        return self._tables.setdefault(plan.url, Table(plan))

    def of_topics(self, topics: Iterable[str | None]) -> list[Table]:
        """Return the tables of those topics that can have one."""
        tables = []
        for topic in topics if self.plan.is_by_topic else [None]:
            with suppress(ValueError):
                tables.append(self.of(topic))
        return tables

    def columns_of(self, topic: str | None) -> BodyColumns | None:
        """Return the columns of bodies in the table of a topic, None if bodies get no columns."""
        table = self.of(topic)
        # Another job may have begun to write to the place since the start.
        table.plan.check_table()
        if self.plan.body is not BodyKind.json:
            return None
        return BodyColumns(self._fields, table.columns())

    def evolve_schemas(self, schemas: Mapping[str | None, pyarrow.Schema]) -> bool:
        """Prepare the tables for files with these columns.

        Returns False if a table has a column with another type or for another field.
        """
        return all(self.of(topic).evolve_schema(schema) for topic, schema in schemas.items())

    def by_table(self, drafts: Iterable[Draft]) -> dict[Table, list[Draft]]:
        """Return the drafts of each table."""
        groups: dict[Table, list[Draft]] = {}
        for draft in drafts:
            groups.setdefault(self.of(draft.file.partition["topic"]), []).append(draft)
        return groups


def _app_id(stem: str) -> str:
    return f"nsqtools-convert-{stem}"


def _partial_copy_error(messages: int, shown: str) -> NotUploadable:
    """Return the error for a table that has a truncated copy of the same file."""
    return NotUploadable(errno.EEXIST, f"the table has a copy with {messages} messages", shown)


def have_many_topics(
    archives: Iterable[ArchiveFile], topic_of: Callable[[ArchiveFile], str | None]
) -> bool:
    """Return whether files have several topics, by their indexes and folders. Raises `NsqError`.

    ``topic_of`` returns the topic of a file of bare bodies.
    """
    topics = set[str | None]()
    for archive in archives:
        if not archive.is_in_progress:
            topics |= scan_archive(archive).topics or {topic_of(archive)}
    return len(topics - {None}) > 1


def convert(
    archives: Sequence[ArchiveFile],
    plan: TablePlan,
    drafts: Path,
    topic_of: Callable[[ArchiveFile], str | None] = lambda archive: None,
) -> Iterator[tuple[ArchiveFile, list[TableFile], str, Unfit]]:
    """Convert archives and tables to files of a table, one after the other. They are kept.

    ``topic_of`` returns the topic of a file of bare bodies.

    Yields each archive file with its Parquet files, the reason why it was skipped or "", and the
    misfits. A file that was converted before has no Parquet files. Raises ``OSError`` and
    `NsqError`.
    """
    tables = Tables(plan)
    if not plan.is_by_topic and (catalog := tables.of(None).catalog) and catalog.exists():
        catalog.check_writable()
    stems = {parquet_stem(archive, plan.host) for archive in archives if archive.table is not None}
    for archive in archives:
        if archive.is_in_progress:
            yield archive, [], "it is in progress", Unfit()
            continue
        stem, topic = parquet_stem(archive, plan.host), topic_of(archive)
        try:
            if _is_converted(tables, archive, stem, topic, stems):
                yield archive, [], "", Unfit()
                continue
            files, unfit = _convert(tables, archive, stem, drafts, topic)
        except NotUploadable as exc:
            yield archive, [], str(exc.strerror), Unfit()
        else:
            yield archive, files, "", unfit if files else Unfit()


def _convert(
    tables: Tables, archive: ArchiveFile, stem: str, drafts: Path, topic: str | None
) -> tuple[list[TableFile], Unfit]:
    # Another writer may give a new column another type first. The next attempt reads it.
    while True:
        writer = TableWriter(tables.plan, drafts, tables.columns_of)
        new_drafts = writer.write(archive, stem, topic)
        if not new_drafts or tables.evolve_schemas(writer.schemas):
            break
    try:
        append_dead_letters(tables.plan, new_drafts)
        files: list[TableFile] = []
        for table, of_table in tables.by_table(new_drafts).items():
            rows = sum(draft.file.rows or 0 for draft in of_table)
            if table.catalog and 0 < (converted := table.messages_of(stem)) < rows:
                raise _partial_copy_error(converted, archive.shown)
            files += table.commit(of_table, _app_id(stem), rows)
    finally:
        for draft in new_drafts:
            Path(draft.path).unlink()
    return files, writer.unfit


def _is_converted(
    tables: Tables, archive: ArchiveFile, stem: str, topic: str | None, stems: Collection[str]
) -> bool:
    """Return whether a file was converted.

    After a kill between two files of a Parquet folder, or between two tables, the conversion is
    repeated. A Delta table has all files of a commit or none, so a smaller count in one table is a
    truncated copy: the function raises `NotUploadable`. ``stems`` has the names of all files of
    tables to convert.
    """
    is_headless = archive.head is None and archive.table is None
    topics = {topic} if topic else set[str | None]()
    if tables.plan.is_by_topic:
        topics |= scan_archive(archive).topics
    targets = tables.of_topics(topics)
    existing = [name for table in targets for name in table.existing_files]
    names = [stem]
    if is_headless and form_of(archive).kind is LineKind.messages:
        identity = identity_of(archive, tables.plan.host)  # the whole name in 0.3.0
        names += [identity, *(name for name in existing if name.startswith(f"{identity}-"))]
    counts = [sum(table.messages_of(name) for table in targets) for name in names]
    if converted := max(counts):
        count = archive.messages
        if count is None:
            count = sum(member.messages for member in scan_archive(archive).members)
        if converted < count and len(targets) == 1 and targets[0].catalog is not None:
            raise _partial_copy_error(converted, archive.shown)
        return converted >= count
    if is_headless and has_grown(archive, stem.rpartition("-")[2], existing):
        raise NotUploadable(errno.EEXIST, "it has grown since it was converted", archive.shown)
    if archive.table is not None:
        token = partition_token(archive)
        if any(name.endswith(token) and name not in stems for name in existing):
            reason = "its partition was compacted since it was converted in part: convert the "
            reason += "table to an empty place"
            raise NotUploadable(errno.EEXIST, reason, archive.shown)
    return False
