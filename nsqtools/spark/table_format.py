"""``format("nsq-table")``, for internal use: append messages to a Delta table with delta-rs.

    path             the table, which must exist
    app, number      the writer and the number of the commit; a repeated commit does nothing

Each task writes a file for each topic and date; the rows of a partition must be contiguous. The
driver commits once, in S3 with a conditional put, because Spark's own log store could overwrite the
commit of another writer there. (`mapInArrow` would need no format, but pandas.)
"""

from __future__ import annotations

import uuid
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace
from itertools import chain, groupby

import pyarrow
from pyspark.sql.datasource import DataSource, DataSourceArrowWriter, WriterCommitMessage
from pyspark.sql.types import StructType

from nsqtools.archive.body_columns import RESERVED
from nsqtools.archive.catalog import PARTITIONS, PartitionKey
from nsqtools.archive.columns import message_schema
from nsqtools.archive.delta import DeltaCatalog, TableFile
from nsqtools.archive.parquet import write
from nsqtools.archive.place import translating_errors
from nsqtools.archive.place_url import parse_place
from nsqtools.archive.slices import body_kind, draft_for, fit_to_schema, publish_file
from nsqtools.records.envelope import BodyKind


@dataclass
class Written(WriterCommitMessage):
    """The files of a task, which are not committed yet."""

    files: list[TableFile]


class TableAppender(DataSourceArrowWriter):
    """Writes a batch of a stream."""

    def __init__(self, path: str, app: str, number: int) -> None:
        self._path, self._app, self._number = path, app, number
        self._kind = body_kind(DeltaCatalog(path)) or BodyKind.string

    def write(self, iterator: Iterator[pyarrow.RecordBatch]) -> WriterCommitMessage:
        with translating_errors("write", self._path):
            return Written(list(_files(iterator, self._path, self._kind)))

    def commit(self, messages: list[WriterCommitMessage | None]) -> None:
        tasks = [message for message in messages if isinstance(message, Written)]
        files = [file for task in tasks for file in task.files]
        DeltaCatalog(self._path).commit(files, app_id=self._app, number=self._number)

    def abort(self, messages: list[WriterCommitMessage | None]) -> None:
        """Leave the uncommitted files, which a vacuum of the table removes."""


class TableSink(DataSource):
    """The format ``nsq-table``."""

    @classmethod
    def name(cls) -> str:
        return "nsq-table"

    def writer(self, schema: StructType, overwrite: bool) -> TableAppender:
        options = self.options
        return TableAppender(options["path"], options["app"], int(options["number"]))


def _files(
    batches: Iterator[pyarrow.RecordBatch], path: str, kind: BodyKind
) -> Iterator[TableFile]:
    """Write rows that are sorted by partition; yield the files."""
    storage = parse_place(path)
    if (first := next(batches, None)) is None:
        return
    body_fields = [field for field in first.schema if field.name not in RESERVED]
    message_fields = [field for field in message_schema(kind) if field.name != "topic"]
    schema = pyarrow.schema([*message_fields, *body_fields]).remove_metadata()
    for slot, items in groupby(_split(chain([first], batches)), lambda item: item[0]):
        name = f"{slot.folder}/ingest-{uuid.uuid4().hex}.parquet"
        with draft_for(storage) as draft:
            file = write((fit_to_schema(part, schema, kind) for _, part in items), draft, schema)
            publish_file(draft, storage, name)
        yield replace(file, path=name, partition=slot.values)


def _split(
    batches: Iterable[pyarrow.RecordBatch],
) -> Iterator[tuple[PartitionKey, pyarrow.RecordBatch]]:
    """Split batches where their partition changes."""
    for batch in batches:
        keys = zip(*(batch[name].to_pylist() for name in PARTITIONS), strict=True)
        begin = 0
        for key, rows in groupby(keys):
            count = len(list(rows))
            yield PartitionKey(*key), batch.slice(begin, count)
            begin += count
