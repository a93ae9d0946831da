"""``format("nsq-table")``, for our own use: rows of messages appended to a Delta table by delta-rs.

    path             the table, which is there
    app, number      the writer and the number of the commit: one that the table has does nothing

Each task writes a file for each topic and date, and compares it; the rows of a partition come one
after the other. The commit is made once, on the driver, with conditional puts where the table is in
S3: Spark's own log store could overwrite the commit of another writer there. (`mapInArrow` would
need no format, and needs pandas.)
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
from nsqtools.archive.catalog import PARTITIONS, Slot
from nsqtools.archive.columns import message_schema
from nsqtools.archive.delta import DeltaCatalog, TableFile
from nsqtools.archive.parquet import write
from nsqtools.archive.place import Place, translating_errors
from nsqtools.archive.slices import body_kind, draft_for, fitted, publish
from nsqtools.records.envelope import BodyKind


@dataclass
class Written(WriterCommitMessage):
    """The files of a task, which no log names yet."""

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
        files = [file for each in messages if isinstance(each, Written) for file in each.files]
        DeltaCatalog(self._path).commit(files, app_id=self._app, number=self._number)

    def abort(self, messages: list[WriterCommitMessage | None]) -> None:
        """Leave files that no log names: a vacuum of the table removes them."""


class TableSink(DataSource):
    """See above."""

    @classmethod
    def name(cls) -> str:
        return "nsq-table"

    def writer(self, schema: StructType, overwrite: bool) -> TableAppender:
        options = self.options
        return TableAppender(options["path"], options["app"], int(options["number"]))


def _files(
    batches: Iterator[pyarrow.RecordBatch], path: str, kind: BodyKind
) -> Iterator[TableFile]:
    """Write rows that are in the order of partitions."""
    storage = Place.parse(path)
    if (first := next(batches, None)) is None:
        return
    of_bodies = [each for each in first.schema if each.name not in RESERVED]
    own = [each for each in message_schema(kind) if each.name != "topic"]
    schema = pyarrow.schema([*own, *of_bodies]).remove_metadata()
    for slot, some in groupby(_cut(chain([first], batches)), lambda each: each[0]):
        name = f"{slot.folder}/ingest-{uuid.uuid4().hex}.parquet"
        with draft_for(storage) as draft:
            file = write((fitted(part, schema, kind) for _, part in some), draft, schema)
            publish(draft, storage, name)
        yield replace(file, path=name, partition=slot.values)


def _cut(batches: Iterable[pyarrow.RecordBatch]) -> Iterator[tuple[Slot, pyarrow.RecordBatch]]:
    """Cut batches where their partition changes."""
    for batch in batches:
        keys = zip(*(batch[name].to_pylist() for name in PARTITIONS), strict=True)
        begin = 0
        for key, some in groupby(keys):
            count = len(list(some))
            yield Slot(*key), batch.slice(begin, count)
            begin += count
