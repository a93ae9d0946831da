"""Read the log of a Delta table, and commit Parquet files to it.

delta-rs reads the log without a JVM, and changes schemas. Files are read and written with pyarrow
alone, because after a scan by delta-rs through pyarrow's data sets the interpreter aborts at its
exit. delta-rs opens, updates and commits in time in proportion to the files of the table (0.3 s of
CPU each for 50,000), which would make the life of a table quadratic. So a catalog keeps a
`_Snapshot`, reads only the log of newer versions, and writes the commits of files itself.

A commit that may be repeated after a kill carries a number of its writer, the *application
transaction*. Delta accepts the same number twice. So the number is read from the same snapshot that
commits, and the commit goes to the next version or fails. Any commit in between, also a repetition
of the same one, makes the attempt fail, and the next attempt reads the number again. Numbers begin
at 1, because a writer without a commit has number 0.

A version of the log is stored only if it does not exist, on S3 with a conditional put, so writers
do not overwrite each other and need no lock. A store that accepts such a put twice is detected and
refused.
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
from urllib.parse import quote, unquote

from nsqtools.archive.place import Place, failure_of, translating_errors
from nsqtools.archive.place_url import parse_place
from nsqtools.archive.storage_objects import error_of
from nsqtools.errors import ConfigurationError, NsqError, OutputError
from nsqtools.files.durable import sync_data, sync_folder
from nsqtools.files.opening import NotRegularError, open_to_read
from nsqtools.protocol.text import load_json, plain_text

if TYPE_CHECKING:
    import pyarrow
    from deltalake import DeltaTable

LOG = "_delta_log"
SINK_LOG = "_spark_metadata"
"""The log of Spark's file sink."""
INGESTED = "_ingest.json"
"""Marks the output of `nsq spark ingest`, which belongs to one checkpoint."""
# Each failed attempt means that another writer succeeded.
COMMIT_ATTEMPTS = 100
_ESCAPE = re.compile(r"%[0-9A-Fa-f]{2}")
_BLANKS = re.compile(r"(?:\s|\x1b\[\d*m)+")  # delta-rs colors its errors.
CHECKPOINT_INTERVAL = 100
"""Versions between two checkpoints, as in delta-rs, unless the table has a property."""
LOG_BATCH_ROWS = 10_000
"""Entries of a log that become Python objects at a time, which bounds the memory."""
UNSYNCED_FILES = 100
"""Newest files of a log that a commit syncs. Older files were written by the system long ago."""

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
"""Features of tables that nsqtools implements, or that have no effect until a property of the table
or of a column enables them, which `_features_in_use` detects."""
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

PartitionValues = Mapping[str, str | None]
"""The values of partition columns, from the names of folders or the log of a table."""


@dataclass(frozen=True, slots=True)
class TableFile:
    """A file of a table. ``path`` is relative to the table; unknown counts and times are None.

    ``statistics`` are those of columns besides ``ts_ns`` in the form of Delta: ``minValues``,
    ``maxValues`` and ``nullCount``, each by column. They are not read from a log.
    """

    path: str
    bytes: int
    rows: int | None = None
    min_ts_ns: int | None = None
    max_ts_ns: int | None = None
    partition: PartitionValues = field(default_factory=dict)
    statistics: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)


def is_table(storage: Place) -> bool:
    """Return whether a place is a Delta table. Raises ``OSError``."""
    # A killed writer may leave a hidden temporary file in a log without commits.
    return any("/." not in entry.name for entry in storage.list(LOG))


def refuse_other_form(storage: Place, option: str, *, is_delta: bool) -> None:
    """Raise `ConfigurationError` if a place has Parquet without a log, or vice versa.

    No reader would read both, so messages would be missing. Raises ``OSError``.
    """
    if is_table(storage):
        if not is_delta:
            raise ConfigurationError(f"{storage.url} is a Delta table", hint=f"Add {option} delta.")
        return
    folders = storage.children("")[1]
    if is_delta and any(name == SINK_LOG or name.startswith("topic=") for name in folders):
        raise ConfigurationError(
            f"{storage.url} holds Parquet that is not a Delta table",
            hint=f"Leave {option} delta out, or give another place.",
        )


@dataclass(slots=True)
class _Snapshot:
    """A version of a table. ``table`` may be an earlier one with the same schema and protocol.

    ``entry`` identifies the file of the version in the log. ``numbers`` are those of writers that
    have committed since ``table`` was opened.
    """

    table: DeltaTable
    version: int
    entry: str
    numbers: dict[str, int] = field(default_factory=dict)

    @property
    def is_ahead(self) -> bool:
        """Whether the table lacks the files of newer versions."""
        return self.version != self.table.version()

    def number_of(self, app_id: str) -> int:
        """Return the number of a writer's last commit, 0 without one."""
        if app_id not in self.numbers:
            self.numbers[app_id] = int(self.table.transaction_version(app_id) or 0)
        return self.numbers[app_id]


class _Access(Enum):
    READ, APPEND, REPLACE = range(3)


DELETED_ROWS = "rows deleted by deletion vectors"
_REPLACE_FEATURES = frozenset({"appendOnly", "changeDataFeed"})
"""Features that forbid only the removal of files, not the addition."""
_REMEDY = "Drop the feature with the engine that added it, or give another table."
_REMEDIES = {
    DELETED_ROWS: "Rewrite its files with the engine that deleted the rows: in Delta's Spark "
    "REORG TABLE ... APPLY (PURGE).",
    **dict.fromkeys(
        _REPLACE_FEATURES, "Compact it with the engine that writes it, or give --output."
    ),
}


class DeltaCatalog:
    """The Delta table at a URI. ``options`` are settings of the object store by obstore's names.

    The constructor and all methods raise `NsqError` for errors of the store and the log.
    """

    def __init__(self, uri: str, options: Mapping[str, str] | None = None) -> None:
        # A missing package is an error now, and not after hours of work.
        import deltalake  # noqa: F401

        self.storage = parse_place(uri, options)
        is_local = not self.storage.is_remote
        place = str(self.storage.absolute()).replace("s3a://", "s3://", 1)
        # delta-rs would decode the name, and so use another place.
        if escape := _ESCAPE.search(place):
            raise ConfigurationError(
                f"{place} cannot be a Delta table: {escape[0]} is in its name",
                hint="Give another place, or write Parquet there.",
            )
        self._uri = place if is_local else place.replace("#", "%23").replace("?", "%3F")
        self._is_checked = False
        self._latest: _Snapshot | None = None

    # -- reading --------------------------------------------------------------------------------

    def exists(self) -> bool:
        """Return whether the table exists."""
        from deltalake import DeltaTable

        with self._failing():
            return bool(DeltaTable.is_deltatable(self._uri, self._options()))

    def create(self, schema: pyarrow.Schema, partition_by: Collection[str]) -> None:
        """Create the table if it does not exist. ``schema`` includes the partition columns."""
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
                # Another writer may have created it at the same time.
                if not self.exists():
                    raise

    def schema(self) -> pyarrow.Schema:
        """Return the columns, including the partition columns."""
        import pyarrow

        return pyarrow.schema(self._snapshot().table.schema().to_arrow())

    @property
    def partition_columns(self) -> list[str]:
        return list(self._snapshot().table.metadata().partition_columns)

    def files(
        self, *, is_selected: Callable[[PartitionValues], bool] = lambda at: True
    ) -> list[TableFile]:
        """Return the files of the newest version in selected partitions, with statistics."""
        with self._failing():
            return list(_files_of(self._table(), is_selected))

    def number_of(self, app_id: str) -> int:
        """Return the number of a writer's last commit, 0 without one."""
        with self._failing():
            return self._snapshot().number_of(app_id)

    def check_writable(self, *, removes: bool = False) -> None:
        """Raise `ConfigurationError` for a table with rules that nsqtools does not implement.

        ``removes`` is true for a caller that replaces files, as compaction does.
        """
        self._snapshot(_Access.REPLACE if removes else _Access.APPEND)

    # -- commits --------------------------------------------------------------------------------

    def add_columns(self, fields: Iterable[pyarrow.Field]) -> dict[str, Any]:
        """Add nullable columns, and metadata that columns of the table lack.

        Returns the conflicts: fields that have another type or other metadata in the table, with
        their type in the table. The type is None if only the case of the name differs.
        """
        import pyarrow
        from deltalake import Schema
        from deltalake.exceptions import DeltaError

        fields, attempts = list(fields), 0
        while True:
            table = self._snapshot(_Access.APPEND).table
            present = {field.name: field for field in pyarrow.schema(table.schema().to_arrow())}
            lower_names = {name.lower() for name in present}
            new = [field for field in fields if field.name.lower() not in lower_names]
            without_metadata = [
                field
                for field in fields
                if field.name in present
                and not _metadata(field).keys() <= _metadata(present[field.name]).keys()
            ]
            if not new and not without_metadata:
                break
            with self._failing():
                try:
                    table = self._table(_Access.APPEND)
                    if new:
                        table.alter.add_columns(list(Schema.from_arrow(pyarrow.schema(new)).fields))
                    # One commit per pass, because each must be based on the current schema.
                    elif without_metadata:
                        field = without_metadata[0]
                        metadata = _metadata(present[field.name]) | _metadata(field)
                        table.alter.set_column_metadata(field.name, metadata)
                except (DeltaError, OSError):
                    if (attempts := attempts + 1) == COMMIT_ATTEMPTS:
                        raise
        return {
            field.name: present[field.name].type if field.name in present else None
            for field in fields
            if field.name not in present
            or not field.equals(present[field.name])
            or not _metadata(field).items() <= _metadata(present[field.name]).items()
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
        """Add and remove files in one transaction; return False if ``number`` was committed before.

        ``data_change`` is False for a compaction that does not change the rows. Raises
        `OutputError` if a file to remove is no longer in the table.
        """
        if number < 1:
            raise ValueError("numbers of commits begin at 1")
        self._check_store()
        adds, attempts = list(adds), 0
        while True:
            with self._failing():
                access = _Access.REPLACE if removes else _Access.APPEND
                snapshot = self._snapshot(access, needs_files=bool(removes))
                if snapshot.number_of(app_id) >= number:
                    self._sync_log()
                    return False
                paths = _paths_in_log(snapshot.table) if removes else {}
                if missing := [file.path for file in removes if file.path not in paths]:
                    raise OutputError(f"{self.storage / missing[0]} is not in the table now")
                actions = _actions(adds, removes, paths, data_change=data_change)
                actions.append({"txn": {"appId": app_id, "version": number}})
                content = "\n".join(map(json.dumps, actions)).encode() + b"\n"
                version = snapshot.version + 1
                try:
                    self.storage.put_if_absent(_name_of_version(version), content)
                except FileExistsError:
                    # Another writer has committed this version, or it is our own commit whose
                    # answer was lost. The number of the next snapshot distinguishes them.
                    if (attempts := attempts + 1) == COMMIT_ATTEMPTS:
                        raise
                    time.sleep(min(0.01 * 2**attempts, 1.0))
                    continue
                self._sync_log()
                self._add_checkpoint(version)
                return True

    def add_checkpoint(self) -> None:
        """Store a checkpoint of the newest version, durably. Earlier entries are then history."""
        with self._failing():
            self._table().create_checkpoint()
            self._sync_log()

    def _add_checkpoint(self, version: int) -> None:
        """Add a checkpoint after some versions, and remove expired versions, as delta-rs does."""
        from deltalake.exceptions import DeltaError

        # A failure leaves a valid table, and the next checkpoint makes up for it.
        with suppress(DeltaError, OSError, NsqError):
            configuration = self._snapshot().table.metadata().configuration
            interval = configuration.get("delta.checkpointInterval", "")
            if version % (int(interval) if interval.isdecimal() else CHECKPOINT_INTERVAL) == 0:
                table = self._table()
                table.create_checkpoint()
                table.cleanup_metadata()

    def _sync_log(self) -> None:
        """Sync the log on a local disk, which delta-rs does not do."""
        if not self.storage.is_remote:
            log = self.storage.path / LOG
            for name in sorted(os.listdir(log))[-UNSYNCED_FILES:]:
                with suppress(FileNotFoundError, NotRegularError), open_to_read(log / name) as file:
                    sync_data(file.fileno())
            sync_folder(log)

    # -- opening --------------------------------------------------------------------------------

    def _options(self) -> dict[str, str]:
        return self.storage.for_delta_rs()

    def _table(self, access: _Access = _Access.READ) -> DeltaTable:
        """Open the newest version with its files. Raises the errors of `_snapshot`."""
        return self._snapshot(access, needs_files=True).table

    def _snapshot(self, access: _Access = _Access.READ, *, needs_files: bool = False) -> _Snapshot:
        """Return the newest version. All methods use this.

        With ``needs_files`` its table has the files of the version. Raises `ConfigurationError` for
        a table that uses features of Delta that nsqtools does not implement, because it would
        misread or damage the table.
        """
        from deltalake.exceptions import TableNotFoundError

        with self._failing():
            try:
                snapshot = self._newest(needs_files=needs_files)
            except TableNotFoundError:
                raise ConfigurationError(f"there is no Delta table at {self.storage.url}") from None
            if feature := next(_unsupported(snapshot.table, access), None):
                verb = "read" if access is _Access.READ else "write to"
                raise ConfigurationError(
                    f"cannot {verb} {self.storage.url}: the table has {feature}, "
                    "which nsqtools does not implement",
                    hint=_REMEDIES.get(feature, _REMEDY),
                )
        return snapshot

    def _newest(self, *, needs_files: bool) -> _Snapshot:
        from deltalake import DeltaTable

        snapshot = self._latest
        # The file of a version changes if the table is made again, and is removed when it expires.
        if (
            snapshot is not None
            and snapshot.entry == self._entry_of(snapshot.version)
            and self._advance(snapshot)
            and not (needs_files and snapshot.is_ahead)
        ):
            return snapshot
        table = DeltaTable(self._uri, storage_options=self._options())
        entry = self._entry_of(table.version())
        snapshot = _Snapshot(table, table.version(), entry)
        # Files with deleted rows may come with any version.
        has_vectors = "deletionVectors" in (table.protocol().reader_features or ())
        self._latest = snapshot if entry and not has_vectors else None
        return snapshot

    def _entry_of(self, version: int) -> str:
        """Return the identity of the file of a version, "" if it does not exist."""
        try:
            return self.storage.stat(_name_of_version(version)).version
        except FileNotFoundError:
            return ""

    def _advance(self, snapshot: _Snapshot) -> bool:
        """Read the versions after a snapshot; return False if schema or protocol have changed."""
        while True:
            version = snapshot.version + 1
            try:
                lines = self.storage.read(_name_of_version(version)).splitlines()
            except FileNotFoundError:
                return True
            try:
                actions = [load_json(line) for line in lines if line]
                numbers = [action["txn"] for action in actions if "txn" in action]
                new_numbers = {txn["appId"]: int(txn["version"]) for txn in numbers}
            except (ValueError, KeyError, TypeError):
                return False
            if any("metaData" in action or "protocol" in action for action in actions):
                return False
            snapshot.numbers |= new_numbers
            snapshot.version, snapshot.entry = version, self._entry_of(version)

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
        """Refuse a store without conditional puts, where writers may overwrite each other."""
        if self._is_checked or not self.storage.is_remote:
            return
        name = f".nsqtools-{token_hex(8)}"
        with translating_errors("use", self.storage.url):
            try:
                for data in (b"1", b"2"):
                    self.storage.put_if_absent(name, data)
            # The first put may raise it as well, if its answer was lost and the client repeated it.
            except FileExistsError:
                self._is_checked = True
                return
            finally:
                self.storage.delete(name)
        raise ConfigurationError(
            f"{self.storage.url} has no conditional puts: writers overwrite each other's commits",
            hint="Use --store parquet there, or a store that supports If-None-Match.",
        )


def _name_of_version(version: int) -> str:
    return f"{LOG}/{version:020}.json"


def _paths_in_log(table: DeltaTable) -> dict[str, str]:
    """Return the paths of the files as the log has them, by the names of the files."""
    import pyarrow

    paths = pyarrow.table(table.get_add_actions(flatten=True))["path"].to_pylist()
    return {unquote(path): path for path in paths}


def _actions(
    adds: Iterable[TableFile],
    removes: Iterable[TableFile],
    paths: Mapping[str, str],
    *,
    data_change: bool,
) -> list[dict[str, Any]]:
    """Return the actions of a commit, in the form of Delta's protocol.

    ``paths`` has the paths of the files to remove. Writers differ in the characters that they
    escape, and a removal has an effect only with the path of the addition.
    """
    now_ms = int(time.time() * 1000)
    info = {"timestamp": now_ms, "operation": "WRITE", "engineInfo": "nsqtools"}
    actions: list[dict[str, Any]] = [{"commitInfo": info}]
    for file in adds:
        action = _action(file, data_change=data_change)
        actions.append({"add": action | {"modificationTime": now_ms, "stats": _statistics(file)}})
    for file in removes:
        action = _action(file, data_change=data_change)
        action |= {"path": paths[file.path], "deletionTimestamp": now_ms}
        action |= {"extendedFileMetadata": True}
        actions.append({"remove": action})
    return actions


def _action(file: TableFile, *, data_change: bool) -> dict[str, Any]:
    return {
        "path": quote(file.path, safe="/="),
        "partitionValues": dict(file.partition),
        "size": file.bytes,
        "dataChange": data_change,
    }


def _metadata(column: pyarrow.Field) -> dict[str, str]:
    """Return the metadata of a column; other programs may have added to it."""
    return {key.decode(): value.decode() for key, value in (column.metadata or {}).items()}


def _unsupported(table: DeltaTable, access: _Access) -> Iterator[str]:
    """Iterate over features and columns of a table that nsqtools does not implement."""
    protocol = table.protocol()
    in_use = _features_in_use(table)
    unknown = {*(protocol.reader_features or ())} - READ_FEATURES
    if protocol.min_reader_version > 3:
        yield f"reader version {protocol.min_reader_version}"
    yield from sorted(unknown | (in_use & {"columnMapping"}))
    if "deletionVectors" in (protocol.reader_features or ()) and any(table.deletion_vectors()):
        yield DELETED_ROWS
    if access is _Access.READ:
        return
    if protocol.min_writer_version > 7:
        yield f"writer version {protocol.min_writer_version}"
    yield from sorted({*(protocol.writer_features or ())} - WRITE_FEATURES)
    yield from sorted(in_use if access is _Access.REPLACE else in_use - _REPLACE_FEATURES)
    for column in table.schema().fields:
        if not column.nullable and column.name not in _ALWAYS_WRITTEN:
            yield f"the NOT NULL column {column.name}"


def _features_in_use(table: DeltaTable) -> set[str]:
    configuration = table.metadata().configuration
    features = {name for key, name in _PROPERTIES.items() if configuration.get(key) == "true"}
    if configuration.get("delta.columnMapping.mode", "none") != "none":
        features.add("columnMapping")
    if any(key.startswith("delta.constraints.") for key in configuration):
        features.add("checkConstraints")
    for column in json.loads(table.schema().to_json())["fields"]:
        # The text includes the properties of nested columns.
        text = json.dumps(column)
        features |= {name for key, name in _COLUMN_PROPERTIES.items() if f'"{key}"' in text}
    return features


def _statistics(file: TableFile) -> str:
    document: dict[str, Any] = {"numRecords": file.rows or 0}
    is_timed = file.min_ts_ns is not None
    times = {"minValues": file.min_ts_ns, "maxValues": file.max_ts_ns, "nullCount": 0}
    for key, value in times.items():
        values = {**({"ts_ns": value} if is_timed else {}), **file.statistics.get(key, {})}
        if values:
            document[key] = values
    return json.dumps(document)


def partition_text(value: Any) -> str | None:
    """Return the value of a partition column as text, as Delta has it; None for null."""
    return None if value is None else plain_text(value)


def _files_of(
    table: DeltaTable, is_selected: Callable[[PartitionValues], bool] = lambda at: True
) -> Iterator[TableFile]:
    import pyarrow

    actions = pyarrow.table(table.get_add_actions(flatten=True))
    names = actions.column_names
    keys = [name for name in names if name.startswith("partition.")]
    partition_columns = [name.removeprefix("partition.") for name in keys]
    columns = ["path", "size_bytes", "num_records", "min.ts_ns", "max.ts_ns", *keys]
    columns.append("null_count.ts_ns")
    # Files share the dictionary of their partition. None means that it is not selected.
    partitions: dict[tuple[object, ...], PartitionValues | None] = {}
    actions = actions.select([name for name in columns if name in names])
    for batch in actions.to_batches(LOG_BATCH_ROWS):
        for row in batch.to_pylist():
            key = tuple(row[name] for name in keys)
            if key not in partitions:
                partition = dict(zip(partition_columns, map(partition_text, key), strict=True))
                partitions[key] = partition if is_selected(partition) else None
            if (selected := partitions[key]) is not None:
                # A file with rows without a time has no range, so that no range excludes it.
                is_timed = not row.get("null_count.ts_ns")
                yield TableFile(
                    unquote(row["path"]),
                    row["size_bytes"],
                    row.get("num_records"),
                    row.get("min.ts_ns") if is_timed else None,
                    row.get("max.ts_ns") if is_timed else None,
                    selected,
                )
