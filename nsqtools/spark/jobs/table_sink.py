"""The sink of ``nsq spark ingest``: each batch is in its tables once, also if Spark repeats it.

The tasks write files (`table_format`), and the driver commits them under the number of the batch.
Spark repeats a batch after a crash between the commits of the tables and of the checkpoint.

In Delta, a batch is one commit in each of its tables. Delta ignores the repetition, including bare
bodies, which have no identity. As with Delta's own sink, a query is named by the id in its
checkpoint. Another writer may commit between the evaluation and the commit of a batch. As an append
without reading, the commit does not conflict with it.

In Parquet, the note `BEGUN_NOTE` commits a batch: it has the number and the names of the files,
which the tasks left in a folder that readers skip. They are moved to their tables only then, and
again after a kill (`finish_batch`). A repetition of the batch writes nothing.
"""

from __future__ import annotations

import json
import logging
from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any

from pyspark.sql import DataFrame

from nsqtools.archive.delta import TableFile
from nsqtools.archive.landing import MAX_FIELDS_LOGGED
from nsqtools.archive.layout import MANIFEST, hidden_name
from nsqtools.archive.place import Place, map_concurrently
from nsqtools.archive.place_url import parse_place
from nsqtools.archive.replacements import replaced_rows
from nsqtools.archive.table import Table, Tables
from nsqtools.archive.table_places import split_at_topic, url_of_topic
from nsqtools.archive.table_writer import Draft, TablePlan, Unfit, append_dead_letters_of
from nsqtools.spark.table_format import (
    RESULT,
    STAGING,
    Written,
    decode_result,
    encode_plan,
    staged_name,
)

log = logging.getLogger("nsqtools")

NOTE = "nsq-ingest-table.json"
"""The number of the last commit, in the checkpoint."""
BEGUN_NOTE = "_ingest-batch.json"
"""The last batch that was begun, in a folder of Parquet and in the folder above tables of topics.

It has the number, and of Parquet the files that are not in their tables yet."""
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
    if plan.is_by_topic or not plan.is_delta:
        return int(_read_note(parse_place(plan.base))["number"])
    table = Tables(plan).of(None)
    if table.catalog is not None and table.catalog.exists():
        table.catalog.check_writable()
    return table.number_of(query)


def _read_note(base: Place) -> dict[str, Any]:
    return dict(base.read_json(BEGUN_NOTE) or {"number": 0, "files": []})


def encode_note(number: int, files: Iterable[tuple[str, str]] = ()) -> bytes:
    """Return the content of `BEGUN_NOTE`; a file is its table below the output, and its path."""
    return json.dumps({"number": number, "files": list(files)}).encode()


def finish_batch(output: Place) -> int:
    """Move the files of the last batch to their tables of Parquet.

    Returns the number of the batch, 0 before the first one. Raises ``OSError`` and `OutputError`.
    """
    note = _read_note(output)
    _move_to_tables(output, note["number"], note["files"])
    return int(note["number"])


def _move_to_tables(output: Place, number: int, files: Sequence[tuple[str, str]]) -> None:
    """Move the files of a batch that `BEGUN_NOTE` has, and note that they are in their tables."""

    def move(file: tuple[str, str]) -> None:
        folder, path = file
        # A kill may leave a copy in a bucket, and compaction may have replaced the file since.
        if replaced_rows(output / folder if folder else output, path):
            return
        staged, name = staged_name(path), f"{folder}/{path}" if folder else path
        with suppress(FileNotFoundError):  # It was moved before a kill.
            output.move(hidden_name(staged, MANIFEST), hidden_name(name, MANIFEST))
        with suppress(FileNotFoundError):
            output.move(staged, name)

    if files:
        list(map_concurrently(move, files, is_remote=output.is_remote))
        output.put(BEGUN_NOTE, encode_note(number))


def remove_staged(output: Place) -> None:
    """Remove the files of tasks whose batch was not committed. Raises ``OSError``."""
    for entry in list(output.list(STAGING)):
        output.delete(entry.name)


@dataclass(slots=True)
class TableSink:
    """Appends the new messages of each batch to tables, for ``foreachBatch``.

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
        query, output = query_id(self.checkpoint), parse_place(self.plan.base)
        if not self.plan.is_delta:
            last = finish_batch(output)
        else:
            last = 0 if self.plan.is_by_topic else tables.of(None).number_of(query)
        if last > number:
            return
        written = self._write(batch)
        groups = tables.by_table(Draft("", file) for file in written.files)
        files = {table: [draft.file for draft in drafts] for table, drafts in groups.items()}
        if self.plan.dead_letters and written.unfit.bodies:
            self._append_dead_letters(files)
        staged = [] if self.plan.is_delta else list(map(self._name_of, written.files))
        if files and (self.plan.is_by_topic or not self.plan.is_delta):
            output.put(BEGUN_NOTE, encode_note(number + 1, staged))
        for table, of_table in files.items():
            if table.catalog is not None:
                table.catalog.commit(of_table, app_id=query, number=number + 1)
        if not self.plan.is_delta:
            _move_to_tables(output, number + 1, staged)
            remove_staged(output)
        if files:
            self.checkpoint.put(NOTE, b"%d" % (number + 1))
        self._count(written.unfit)

    def _name_of(self, file: TableFile) -> tuple[str, str]:
        """Return the table of a file below the output, and the path in the table."""
        below = split_at_topic(self.plan.url)[1]
        return url_of_topic(below, file.partition["topic"]), file.path

    def _append_dead_letters(self, files: Mapping[Table, Iterable[TableFile]]) -> None:
        base = parse_place(self.plan.base)
        for table, of_table in files.items():
            for file in of_table:
                place, name = table.storage, file.path
                if not self.plan.is_delta:
                    place, name = base, staged_name(file.path)
                with place.open(name) as opened:
                    append_dead_letters_of(self.plan, file, opened)

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
