"""``format("nsq-table")``, for internal use: write messages to files of tables.

    plan        the `TablePlan` of the tables as JSON
    result      a place that gets the file `RESULT` with the new files, which are not committed

Each task converts its messages as `archive.table_writer` converts those of an archive file, so
tables of Spark have the same types, partitions and errors. Messages that a Delta table has already
are skipped: another archiver consumed them as well, or nsqd delivered them again after a crash. All
messages of a topic must be in one task. The driver commits (`jobs.table_sink`).

A folder of Parquet has no log, so its files are written to the folder `STAGING`, which readers
skip, until the driver has committed them.

(`mapInArrow` would need no format, but pandas.)
"""

from __future__ import annotations

import json
import time
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any
from uuid import uuid4

import pyarrow
from pyarrow import compute, ipc
from pyspark.sql.datasource import DataSource, DataSourceArrowWriter, WriterCommitMessage
from pyspark.sql.types import StructType

from nsqtools.archive.catalog import hash_path
from nsqtools.archive.columns import IDENTITY, message_schema
from nsqtools.archive.delta import PartitionValues, TableFile
from nsqtools.archive.layout import MANIFEST, TimeRange, hidden_name
from nsqtools.archive.parquet import manifest_of, read
from nsqtools.archive.place import translating_errors
from nsqtools.archive.place_url import parse_place
from nsqtools.archive.slices import MESSAGE_KEY, anti_join, deduplicate, fit_to_schema
from nsqtools.archive.table import Table, Tables
from nsqtools.archive.table_writer import Draft, TableMessages, TablePlan, TableWriter, Unfit
from nsqtools.files.scratch import scratch_directory
from nsqtools.records.envelope import BodyKind

RESULT = "nsq-ingest-result.json"
STAGING = "_ingest"
"""The folder of files of Parquet until their batch is committed, next to the tables."""


@dataclass
class Written(WriterCommitMessage):
    """The result of a task, or of all tasks: the new files, and the bodies that did not fit."""

    files: list[TableFile]
    unfit: Unfit


def encode_plan(plan: TablePlan) -> str:
    """Return a plan as the text of an option."""
    return json.dumps(asdict(plan) | {"body": plan.body.value})


def decode_plan(text: str) -> TablePlan:
    """Return the plan that `encode_plan` has encoded."""
    document = json.loads(text)
    partition_by = tuple(document["partition_by"])
    return TablePlan(
        **document | {"body": BodyKind(document["body"]), "partition_by": partition_by}
    )


def encode_result(tasks: Iterable[Written]) -> bytes:
    """Return the result of all tasks as JSON."""
    tasks = list(tasks)
    document = {
        "files": [asdict(file) for task in tasks for file in task.files],
        "misfits": sum(task.unfit.bodies for task in tasks),
        "fields": sorted({name for task in tasks for name in task.unfit.fields}),
    }
    return json.dumps(document).encode()


def decode_result(content: bytes) -> Written:
    """Return the result that `encode_result` has encoded."""
    document = json.loads(content)
    files = [TableFile(**file) for file in document["files"]]
    return Written(files, Unfit(document["misfits"], document["fields"]))


class TableFiles(DataSourceArrowWriter):
    """Writes a batch of a stream to files."""

    def __init__(self, plan: TablePlan, result: str) -> None:
        self._plan, self._result = plan, result

    def write(self, iterator: Iterator[pyarrow.RecordBatch]) -> WriterCommitMessage:
        with (
            translating_errors("write", self._plan.base),
            scratch_directory("nsq-ingest-") as folder,
        ):
            return _write(iterator, self._plan, folder)

    def commit(self, messages: list[WriterCommitMessage | None]) -> None:
        tasks = [message for message in messages if isinstance(message, Written)]
        parse_place(self._result).put(RESULT, encode_result(tasks))

    def abort(self, messages: list[WriterCommitMessage | None]) -> None:
        """Leave the uncommitted files, which the next batch or a vacuum of the table removes."""


class NsqTableFormat(DataSource):
    """The format ``nsq-table``."""

    @classmethod
    def name(cls) -> str:
        return "nsq-table"

    def writer(self, schema: StructType, overwrite: bool) -> TableFiles:
        return TableFiles(decode_plan(self.options["plan"]), self.options["result"])


def _write(batches: Iterator[pyarrow.RecordBatch], plan: TablePlan, folder: Path) -> Written:
    tables = Tables(plan)
    rows = _TaskRows(batches, folder / "rows.arrow", plan.body)
    rows.drop_present(tables)
    messages = TableMessages(rows.read, "a batch of messages", time_ns=time.time_ns)
    # A repeated task must not replace files of the first one, whose sizes may be committed.
    stem = f"ingest-{uuid4().hex}"
    # Another writer may give a new column another type first. The next attempt reads it.
    while True:
        writer = TableWriter(plan, folder, tables.columns_of)
        drafts = writer.write_messages(messages, stem)
        if not drafts or tables.evolve_schemas(writer.schemas):
            break
        for draft in drafts:
            Path(draft.path).unlink()
    return Written(_put(tables, drafts), writer.unfit)


def _put(tables: Tables, drafts: Sequence[Draft]) -> list[TableFile]:
    """Store the files of a task, which no reader sees before they are committed."""
    if tables.plan.is_delta:
        of_tables = tables.by_table(drafts).items()
        return [file for table, of_table in of_tables for file in table.put(of_table)]
    base = parse_place(tables.plan.base)
    for draft in drafts:
        name, path = staged_name(draft.file.path), Path(draft.path)
        base.verify(name, path, base.put_file(name, path))
        base.put(hidden_name(name, MANIFEST), manifest_of(draft.file, path))
    return [draft.file for draft in drafts]


def staged_name(path: str) -> str:
    """Return the name of a file until its batch is committed. Globs of Parquet do not match it."""
    return f"{STAGING}/{hash_path(path)}"


class _TaskRows:
    """The messages of a task in a local file, because `TableWriter` may read them repeatedly."""

    def __init__(self, batches: Iterator[pyarrow.RecordBatch], path: Path, kind: BodyKind) -> None:
        self._path = path
        schema = message_schema(kind)
        with ipc.new_stream(path, schema) as stream:
            for batch in batches:
                stream.write_batch(fit_to_schema(batch, schema, kind))
        self._mask: Any = None

    def _batches(self) -> Iterator[pyarrow.RecordBatch]:
        with pyarrow.memory_map(str(self._path)) as file:
            yield from ipc.open_stream(file)

    def read(self) -> Iterator[pyarrow.RecordBatch]:
        """Iterate over the messages that were not dropped."""
        begin = 0
        for batch in self._batches():
            rows = batch.filter(self._mask.slice(begin, batch.num_rows))
            begin += batch.num_rows
            if rows.num_rows:
                yield rows

    def drop_present(self, tables: Tables) -> None:
        """Drop messages that are repeated, or that the tables have. Bare bodies are kept."""
        names = [*dict.fromkeys((*IDENTITY, *MESSAGE_KEY)), "attempts"]
        schema = pyarrow.schema([message_schema().field(name) for name in names])
        keys = pyarrow.Table.from_batches((b.select(names) for b in self._batches()), schema)
        keys = keys.append_column("row", pyarrow.array(range(keys.num_rows), pyarrow.int64()))
        is_named = compute.and_(compute.is_valid(keys["id"]), compute.is_valid(keys["topic"]))
        named = keys.filter(is_named)
        kept = [*keys.filter(compute.invert(is_named))["row"].chunks]
        for topic in compute.unique(named["topic"]).to_pylist():
            rows = deduplicate(named.filter(compute.equal(named["topic"], topic)))
            kept += anti_join(rows, _identities(tables.of(topic), topic, rows))["row"].chunks
        kept_rows = pyarrow.chunked_array(kept, pyarrow.int64())
        self._mask = compute.is_in(keys["row"], value_set=kept_rows).combine_chunks()


def _identities(table: Table, topic: str, rows: pyarrow.Table) -> pyarrow.Table:
    """Return the identities that a table has in the range of times of some rows."""
    schema = rows.select(MESSAGE_KEY).schema
    if table.catalog is None or not table.catalog.exists():
        return schema.empty_table()
    times = compute.min_max(rows["ts_ns"]).as_py()
    within = TimeRange(times["min"], times["max"] + 1)

    def is_of_topic(partition: PartitionValues) -> bool:
        return partition.get("topic") == topic

    batches: list[pyarrow.RecordBatch] = []
    for file in table.catalog.files(is_selected=is_of_topic):
        if file.min_ts_ns is None or within.overlaps(file.min_ts_ns, file.max_ts_ns or 0):
            with table.storage.open(file.path) as opened:
                batches += read(opened, MESSAGE_KEY, within)
    return pyarrow.Table.from_batches((b.select(MESSAGE_KEY) for b in batches), schema)
