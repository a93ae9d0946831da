"""A Delta table as a catalog of Parquet files: what its log names, and commits to it.

delta-rs reads and writes the log; there is no JVM. The files are written and read with pyarrow
alone: a scan by delta-rs through pyarrow's data sets makes the interpreter abort at its end.

A commit that may be repeated after a kill carries a number of its writer, the *application
transaction*. delta-rs itself takes the same number twice. So the number is read on the handle that
commits, which commits to the very next version or fails: whatever else was committed since, a
repeated commit included, makes the attempt fail, and the next one looks again. Numbers begin at 1,
because a writer without a commit has none.

On S3 a version of the log is put only if there is none (a conditional put), so no writer overwrites
another, without a lock. A store that takes such a put twice is found out, and refused.
"""

from __future__ import annotations

import json
import os
import re
import time
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from enum import Enum
from secrets import token_hex
from typing import TYPE_CHECKING, Any
from urllib.parse import unquote

from nsqtools.archive.place import Place, failure_of, translating_errors
from nsqtools.archive.place_url import parse_place
from nsqtools.archive.storage_objects import error_of
from nsqtools.errors import ConfigurationError, OutputError
from nsqtools.files.durable import sync_data, sync_folder
from nsqtools.files.opening import NotRegularError, open_to_read

if TYPE_CHECKING:
    import pyarrow
    from deltalake import DeltaTable

LOG = "_delta_log"
SINK_LOG = "_spark_metadata"  # of a stream of Spark into Parquet
INGESTED = "_ingest.json"
"""The mark of what `nsq spark ingest` writes. Of Parquet it removes what its log does not name."""
COMMIT_TRIES = 100
_ESCAPE = re.compile(r"%[0-9A-Fa-f]{2}")
_BLANKS = re.compile(r"(?:\s|\x1b\[\d*m)+")  # delta-rs colors its errors
FILES = 10_000
"""Of a log, that are rows of Python at a time."""
NEWEST = 100
"""Of the files of a log, by name, that a commit may find unwritten: the system writes them soon."""

READ_FEATURES = frozenset(
    {"columnMapping", "deletionVectors", "timestampNtz", "vacuumProtocolCheck"}
)
WRITE_FEATURES = READ_FEATURES | {
    "allowColumnDefaults",
    "appendOnly",
    "changeDataFeed",
    "checkConstraints",
    "generatedColumns",
    "identityColumns",
    "inCommitTimestamp",
    "invariants",
}
"""Features of tables that we implement, or that do nothing until a property of the table or of a
column turns them on, which `_features_in_use` sees."""
_PROPERTIES = {
    "delta.appendOnly": "appendOnly",
    "delta.enableChangeDataFeed": "changeDataFeed",
    "delta.enableInCommitTimestamps": "inCommitTimestamp",
}
_COLUMN_PROPERTIES = {
    "delta.invariants": "invariants",
    "delta.generationExpression": "generatedColumns",
    "delta.identity.start": "identityColumns",
    "CURRENT_DEFAULT": "allowColumnDefaults",
}
_ALWAYS_WRITTEN = {"date", "hour"}

Partition = Mapping[str, str | None]
"""The values in the names of folders, or in the log of a table."""


@dataclass(frozen=True, slots=True)
class TableFile:
    """A file of the table; ``path`` is below it. Times are of ``ts_ns``, None where unknown."""

    path: str
    bytes: int
    rows: int | None = None
    min_ts_ns: int | None = None
    max_ts_ns: int | None = None
    partition: Partition = field(default_factory=dict)


def is_table(storage: Place) -> bool:
    """Return whether a Delta table lies there. Raises ``OSError``."""
    return any("/." not in each.name for each in storage.list(LOG))  # as killed runs left it


def refuse_other_form(storage: Place, option: str, *, is_delta: bool) -> None:
    """Refuse to go on in another form: nothing would read both, and what is there, or what comes,
    would be missing. Raises `ConfigurationError` and ``OSError``."""
    if is_table(storage):
        if not is_delta:
            raise ConfigurationError(f"{storage.url} is a Delta table", hint=f"Add {option} delta.")
        return
    folders = storage.children("")[1]
    if is_delta and any(each == SINK_LOG or each.startswith("topic=") for each in folders):
        raise ConfigurationError(
            f"{storage.url} holds Parquet that is not a Delta table",
            hint=f"Leave {option} delta out, or give another place.",
        )


class _Access(Enum):
    READ, APPEND, REPLACE = range(3)


DELETED_ROWS = "rows deleted by deletion vectors"
_OF_REPLACING = frozenset({"appendOnly", "changeDataFeed"})
"""Features that only matter to who removes files: rows that are only added keep their rules."""
_REMEDY = "Drop the feature with the engine that added it, or give another table."
_REMEDIES = {
    DELETED_ROWS: "Rewrite its files with the engine that deleted the rows: in Delta's Spark "
    "REORG TABLE ... APPLY (PURGE).",
    **dict.fromkeys(_OF_REPLACING, "Compact it with the engine that writes it, or give --output."),
}


class DeltaCatalog:
    """The table at ``uri``. ``options`` are settings of the object store, by obstore's names.

    It and all methods raise `NsqError` for what the store or the log does not allow.
    """

    def __init__(self, uri: str, options: Mapping[str, str] | None = None) -> None:
        import deltalake  # noqa: F401 - who needs it only later learns it before the work

        self.storage = parse_place(uri, options)
        is_local = not self.storage.is_remote
        place = str(self.storage.absolute()).replace("s3a://", "s3://", 1)
        if escape := _ESCAPE.search(place):  # delta-rs looks below a decoded name
            raise ConfigurationError(
                f"{place} cannot be a Delta table: {escape[0]} is in its name",
                hint="Give another place, or have Parquet there.",
            )
        self._uri = place if is_local else place.replace("#", "%23").replace("?", "%3F")
        self._is_checked = False

    # -- what is there --------------------------------------------------------------------------

    def exists(self) -> bool:
        """Return whether there is a table."""
        from deltalake import DeltaTable

        with self._failing():
            return bool(DeltaTable.is_deltatable(self._uri, self._options()))

    def create(self, schema: pyarrow.Schema, partition_by: Collection[str]) -> None:
        """Make the table if there is none; ``schema`` has the columns of partitions, too."""
        from deltalake import DeltaTable
        from deltalake.exceptions import DeltaError

        self._check_store()
        if not self.storage.is_remote:
            self.storage.path.mkdir(0o750, parents=True, exist_ok=True)
        with self._failing():
            try:
                DeltaTable.create(
                    self._uri,
                    schema=schema,
                    mode="ignore",
                    partition_by=list(partition_by),
                    storage_options=self._options(),
                )
            except (DeltaError, OSError):
                if not self.exists():  # else another writer was faster
                    raise

    def schema(self) -> pyarrow.Schema:
        """Return the columns, those of partitions included."""
        import pyarrow

        return pyarrow.schema(self._table().schema().to_arrow())

    @property
    def partition_columns(self) -> list[str]:
        return list(self._table().metadata().partition_columns)

    def files(
        self, *, is_selected: Callable[[Partition], bool] = lambda at: True
    ) -> list[TableFile]:
        """Return the files of the newest version, with their statistics.

        Those in partitions that are not ``is_selected`` take no memory.
        """
        with self._failing():
            return list(_files_of(self._table(), is_selected))

    def number_of(self, app_id: str) -> int:
        """Return the number of a writer's last commit, 0 without one."""
        with self._failing():
            return int(self._table().transaction_version(app_id) or 0)

    def check_writable(self, *, removes: bool = False) -> None:
        """Raise `ConfigurationError` for a table with rules that we do not keep.

        ``removes`` is for who replaces files of it, as compaction does.
        """
        self._table(_Access.REPLACE if removes else _Access.APPEND)

    # -- commits --------------------------------------------------------------------------------

    def add_columns(self, fields: Iterable[pyarrow.Field]) -> dict[str, Any]:
        """Add nullable columns, and the metadata that columns of the table lack.

        Returns those that have another type there, or other metadata, with the type that is there.
        """
        import pyarrow
        from deltalake import Schema
        from deltalake.exceptions import DeltaError

        fields, tries = list(fields), 0
        while True:
            table = self._table(_Access.APPEND)
            there = {each.name: each for each in pyarrow.schema(table.schema().to_arrow())}
            lower = {name.lower() for name in there}
            new = [field for field in fields if field.name.lower() not in lower]
            bare = [
                field
                for field in fields
                if field.name in there
                and not _words(field).keys() <= _words(there[field.name]).keys()
            ]
            if not new and not bare:
                break
            with self._failing():
                try:
                    if new:
                        table.alter.add_columns(list(Schema.from_arrow(pyarrow.schema(new)).fields))
                    for field in bare[: not new]:  # a commit each, on what was read before it
                        words = _words(there[field.name]) | _words(field)
                        table.alter.set_column_metadata(field.name, words)
                except (DeltaError, OSError):
                    if (tries := tries + 1) == COMMIT_TRIES:
                        raise
        return {
            field.name: there[field.name].type if field.name in there else None
            for field in fields
            if field.name not in there
            or not field.equals(there[field.name])
            or not _words(field).items() <= _words(there[field.name]).items()
        }

    def commit(
        self,
        adds: Iterable[TableFile],
        removes: Collection[TableFile] = (),
        *,
        app_id: str,
        number: int,
        data_change: bool = True,
    ) -> bool:
        """Add files, and remove others, in one transaction; False if ``number`` was committed.

        ``data_change`` False is for a compaction: the rows stay what they were. Raises
        `OutputError` when a file to remove is not in the table any more.
        """
        from deltalake import CommitProperties, Transaction
        from deltalake.exceptions import CommitFailedError
        from deltalake.transaction import AddAction, RemoveAction

        if number < 1:
            raise ValueError("numbers of commits begin at 1")
        self._check_store()
        now_ms = int(time.time() * 1000)
        added = [
            AddAction(
                each.path, each.bytes, dict(each.partition), now_ms, data_change, _statistics(each)
            )
            for each in adds
        ]
        removed = [
            RemoveAction(each.path, data_change, now_ms, each.bytes, dict(each.partition))
            for each in removes
        ]
        tries = 0
        while True:
            with self._failing():
                table = self._table(_Access.REPLACE if removed else _Access.APPEND)
                if (table.transaction_version(app_id) or 0) >= number:
                    self._sync_log()
                    return False
                if removed:
                    there = {each.path for each in _files_of(table)}
                    if gone := [each.path for each in removes if each.path not in there]:
                        raise OutputError(f"{self.storage / gone[0]} is not in the table now")
                try:
                    table.create_write_transaction(
                        [*added, *removed],
                        mode="append",
                        schema=table.schema(),
                        partition_by=table.metadata().partition_columns,
                        commit_properties=CommitProperties(
                            max_commit_retries=0, app_transactions=[Transaction(app_id, number)]
                        ),
                    )
                    self._sync_log()
                    return True
                except CommitFailedError:
                    # Another writer took the version; or the answer was lost, and it is ours.
                    if (tries := tries + 1) == COMMIT_TRIES:
                        raise
                    time.sleep(min(0.01 * 2**tries, 1.0))

    def _sync_log(self) -> None:
        """Make commits durable on a local disk: delta-rs leaves that to the system."""
        if not self.storage.is_remote:
            log = self.storage.path / LOG
            for name in sorted(os.listdir(log))[-NEWEST:]:
                with suppress(FileNotFoundError, NotRegularError), open_to_read(log / name) as file:
                    sync_data(file.fileno())
            sync_folder(log)

    # -- how it is reached ----------------------------------------------------------------------

    def _options(self) -> dict[str, str]:
        return self.storage.for_delta_rs()

    def _table(self, access: _Access = _Access.READ) -> DeltaTable:
        """Open the table; the only way to it. Raises `ConfigurationError` for one that we would
        misread, or break: with features of Delta that are in use there, and not implemented here.
        """
        from deltalake import DeltaTable
        from deltalake.exceptions import TableNotFoundError

        with self._failing():
            try:
                table = DeltaTable(self._uri, storage_options=self._options())
            except TableNotFoundError:
                raise ConfigurationError(f"there is no Delta table at {self.storage.url}") from None
            if feature := next(_unsupported(table, access), None):
                what = "read" if access is _Access.READ else "write to"
                raise ConfigurationError(
                    f"cannot {what} {self.storage.url}: the table has {feature}, "
                    "which nsqtools does not implement",
                    hint=_REMEDIES.get(feature, _REMEDY),
                )
        return table

    @contextmanager
    def _failing(self) -> Iterator[None]:
        from deltalake.exceptions import DeltaError

        try:
            yield
        except (DeltaError, OSError) as exc:
            reason = _BLANKS.sub(" ", str(getattr(exc, "strerror", None) or exc))[:300]
            error = error_of(exc, self.storage.url, reason)
            raise failure_of(error, "use the Delta table", "") from exc

    def _check_store(self) -> None:
        """Refuse a store where one writer may overwrite the commit of another."""
        if self._is_checked or not self.storage.is_remote:
            return
        name = f".nsqtools-{token_hex(8)}"
        with translating_errors("use", self.storage.url):
            try:
                for data in (b"1", b"2"):
                    self.storage.put_if_absent(name, data)
            except FileExistsError:  # of the first, too: an answer that was lost was repeated
                self._is_checked = True
                return
            finally:
                self.storage.delete(name)
        raise ConfigurationError(
            f"{self.storage.url} has no conditional puts: writers overwrite each other's commits",
            hint="Use --store parquet there, or a store that knows If-None-Match.",
        )


def _words(column: pyarrow.Field) -> dict[str, str]:
    """Return the metadata of a column, to which other programs may add."""
    return {key.decode(): value.decode() for key, value in (column.metadata or {}).items()}


def _unsupported(table: DeltaTable, access: _Access) -> Iterator[str]:
    """Iterate over what a table has that we do not keep: features of Delta, and columns."""
    protocol = table.protocol()
    in_use = _features_in_use(table)
    named = {*(protocol.reader_features or ())} - READ_FEATURES
    if protocol.min_reader_version > 3:
        yield f"reader version {protocol.min_reader_version}"
    yield from sorted(named | (in_use & {"columnMapping"}))
    if "deletionVectors" in (protocol.reader_features or ()) and any(table.deletion_vectors()):
        yield DELETED_ROWS
    if access is _Access.READ:
        return
    if protocol.min_writer_version > 7:
        yield f"writer version {protocol.min_writer_version}"
    yield from sorted({*(protocol.writer_features or ())} - WRITE_FEATURES)
    in_the_way = in_use if access is _Access.REPLACE else in_use - _OF_REPLACING
    yield from sorted(in_the_way)
    for column in table.schema().fields:
        if not column.nullable and column.name not in _ALWAYS_WRITTEN:
            yield f"the NOT NULL column {column.name}"


def _features_in_use(table: DeltaTable) -> set[str]:
    configuration = table.metadata().configuration
    used = {name for key, name in _PROPERTIES.items() if configuration.get(key) == "true"}
    if configuration.get("delta.columnMapping.mode", "none") != "none":
        used.add("columnMapping")
    if any(key.startswith("delta.constraints.") for key in configuration):
        used.add("checkConstraints")
    for column in json.loads(table.schema().to_json())["fields"]:
        text = json.dumps(column)  # of columns in columns, too
        used |= {name for key, name in _COLUMN_PROPERTIES.items() if f'"{key}"' in text}
    return used


def _statistics(file: TableFile) -> str:
    document: dict[str, Any] = {"numRecords": file.rows or 0}
    if file.min_ts_ns is not None:
        document |= {
            "minValues": {"ts_ns": file.min_ts_ns},
            "maxValues": {"ts_ns": file.max_ts_ns},
            "nullCount": {"ts_ns": 0},
        }
    return json.dumps(document)


def _files_of(
    table: DeltaTable, is_selected: Callable[[Partition], bool] = lambda at: True
) -> Iterator[TableFile]:
    import pyarrow

    actions = pyarrow.table(table.get_add_actions(flatten=True))
    names = actions.column_names
    keys = [name for name in names if name.startswith("partition.")]
    columns_at = [name.removeprefix("partition.") for name in keys]
    columns = ["path", "size_bytes", "num_records", "min.ts_ns", "max.ts_ns", *keys]
    columns.append("null_count.ts_ns")
    partitions: dict[tuple[object, ...], Partition | None] = {}  # None for one not is_selected
    for batch in actions.select([name for name in columns if name in names]).to_batches(FILES):
        for row in batch.to_pylist():
            key = tuple(row[name] for name in keys)
            if key not in partitions:
                values = (None if each is None else str(each) for each in key)
                at = dict(zip(columns_at, values, strict=True))
                partitions[key] = at if is_selected(at) else None
            if (partition := partitions[key]) is not None:
                is_timed = not row.get("null_count.ts_ns")  # else no time leaves the file out
                yield TableFile(
                    unquote(row["path"]),
                    row["size_bytes"],
                    row.get("num_records"),
                    row.get("min.ts_ns") if is_timed else None,
                    row.get("max.ts_ns") if is_timed else None,
                    partition,
                )
