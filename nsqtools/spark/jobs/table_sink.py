"""The sink of ``nsq spark ingest --format delta``: each batch is one commit in each of its tables.

The tasks write files (`table_format`), and the driver commits them under the number of the batch.
Spark repeats a batch after a crash between the commits of the tables and of the checkpoint. Delta
ignores the repetition, including bare bodies, which have no identity. As with Delta's own sink, a
query is named by the id in its checkpoint.

Another writer may commit between the evaluation and the commit of a batch. As an append without
reading, the commit does not conflict with it.
"""

from __future__ import annotations

import logging
from dataclasses import dataclass, field

from pyspark.sql import DataFrame

from nsqtools.archive.landing import MAX_FIELDS_LOGGED
from nsqtools.archive.place import Place
from nsqtools.archive.place_url import parse_place
from nsqtools.archive.table import Tables
from nsqtools.archive.table_writer import Draft, TablePlan, Unfit, append_dead_letters_of
from nsqtools.spark.table_format import RESULT, Written, decode_result, encode_plan

log = logging.getLogger("nsqtools")

NOTE = "nsq-ingest-table.json"
"""The number of the last commit, in the checkpoint."""
BEGUN_NOTE = "_ingest-batch.json"
"""The number of the last batch that was begun, in the folder above tables of topics."""
# A task writes the files of a few topics one after the other. More tasks than this would mostly
# cost scheduling, as a batch has at most a million rows by default.
MAX_TASKS = 64


def query_id(checkpoint: Place) -> str:
    """Return the id of a checkpoint's query, "" before its first start."""
    return str((checkpoint.read_json("metadata") or {"id": ""})["id"])


def last_number(plan: TablePlan, query: str) -> int:
    """Return the number of the last commit that a query has begun, 0 without one.

    Raises `NsqError`, also for a table that cannot be written to.
    """
    if plan.is_by_topic:
        return int(parse_place(plan.base).read_json(BEGUN_NOTE) or 0)
    table = Tables(plan).of(None)
    if table.catalog is not None and table.catalog.exists():
        table.catalog.check_writable()
    return table.number_of(query)


@dataclass(slots=True)
class TableSink:
    """Appends the new messages of each batch to Delta tables, for ``foreachBatch``.

    ``misfits`` counts the bodies that did not fit, ``without_column`` has the fields that could not
    get a column.
    """

    plan: TablePlan
    checkpoint: Place
    misfits: int = 0
    without_column: set[str] = field(default_factory=set)
    _tables: Tables | None = None

    def __call__(self, batch: DataFrame, number: int) -> None:
        """Append the new messages of a batch. Raises Spark's errors and `NsqError`."""
        # One object for the whole query: its catalogs read only the newer part of their logs.
        tables = self._tables = self._tables or Tables(self.plan)
        query = query_id(self.checkpoint)
        if not self.plan.is_by_topic and tables.of(None).number_of(query) > number:
            return
        written = self._write(batch)
        groups = tables.by_table(Draft("", file) for file in written.files)
        files = {table: [draft.file for draft in drafts] for table, drafts in groups.items()}
        if self.plan.dead_letters and written.unfit.bodies:
            for table, of_table in files.items():
                for file in of_table:
                    with table.storage.open(file.path) as opened:
                        append_dead_letters_of(self.plan, file, opened)
        if self.plan.is_by_topic and files:
            parse_place(self.plan.base).put(BEGUN_NOTE, b"%d" % (number + 1))
        for table, of_table in files.items():
            if table.catalog is not None:
                table.catalog.commit(of_table, app_id=query, number=number + 1)
        if files:
            self.checkpoint.put(NOTE, b"%d" % (number + 1))
        self._count(written.unfit)

    def _write(self, batch: DataFrame) -> Written:
        """Write the files of a batch."""
        parallelism = batch.sparkSession.sparkContext.defaultParallelism
        # The columns of a topic are determined in one task.
        rows = batch.repartition(min(parallelism, MAX_TASKS), "topic")
        options = {"plan": encode_plan(self.plan), "result": str(self.checkpoint)}
        rows.write.format("nsq-table").options(**options).mode("append").save()
        return decode_result(self.checkpoint.read(RESULT))

    def _count(self, unfit: Unfit) -> None:
        self.misfits += unfit.bodies
        if new := {*unfit.fields} - self.without_column:
            names = ", ".join(map(repr, sorted(new)[:MAX_FIELDS_LOGGED]))
            log.warning("%d fields get no column in %s: %s", len(new), self.plan.url, names)
            self.without_column |= new
