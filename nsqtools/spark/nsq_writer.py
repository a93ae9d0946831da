"""Rows as messages, for Spark: the writer of batches, and what that of streams does like it.

A writer is made on the driver and travels to the tasks, each of which gives its report back; of a
stream, another one is made to commit each batch.
"""

from __future__ import annotations

import json
import logging
import os
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path

import pyarrow
from pyspark import TaskContext
from pyspark.sql.datasource import DataSourceArrowWriter, WriterCommitMessage
from pyspark.sql.types import StructType

from nsqtools.archive.place import translating_errors
from nsqtools.files.durable import replace_file
from nsqtools.spark.publishing.publish_task import PublishTask, SinkPlan, chunk_of, sink_plan
from nsqtools.spark.publishing.row_outcomes import (
    PublishReport,
    document,
    require_all,
    summary,
    total,
)

log = logging.getLogger("nsqtools")


class PublishedRows(WriterCommitMessage):
    """A task's report to the driver."""

    def __init__(self, report: PublishReport) -> None:
        self.report = report


def publish(plan: SinkPlan, batches: Iterator[pyarrow.RecordBatch]) -> PublishedRows:
    """Publish the rows of a task, in the process that Spark runs it in. Raises `NsqError`."""
    context = TaskContext.get()
    assert context is not None
    task = PublishTask(plan, context.partitionId(), context.attemptNumber())
    has_topic = plan.topic is not None
    return PublishedRows(task.run(chunk_of(batch, has_topic=has_topic) for batch in batches))


def outcome_of(
    messages: Iterable[WriterCommitMessage | None],
    what: str,
    path: Path | None = None,
    *,
    is_complete: bool = True,
) -> PublishReport:
    """Add up, log and write down what the tasks that succeeded did."""
    report = total(message.report for message in messages if isinstance(message, PublishedRows))
    # as a warning: this process has no logging configured, which drops anything less
    log.warning("%s: %s", what, summary(report))
    if path is not None:
        content = json.dumps(document(report, is_complete=is_complete), indent=1) + "\n"
        with translating_errors("write", path):
            replace_file(path, content.encode())
    return report


class NsqWriter(DataSourceArrowWriter):
    """Writes a batch."""

    def __init__(self, plan: SinkPlan) -> None:
        self._plan = plan

    def write(self, iterator: Iterator[pyarrow.RecordBatch]) -> WriterCommitMessage:
        return publish(self._plan, iterator)

    def commit(self, messages: list[WriterCommitMessage | None]) -> None:
        """Add up what the tasks did. Raises `NsqError` when rows were not published."""
        require_all(outcome_of(messages, "published", self._plan.outcome))

    def abort(self, messages: list[WriterCommitMessage | None]) -> None:
        """Report what the successful tasks did: it cannot be undone."""
        outcome_of(messages, "failed", self._plan.outcome, is_complete=False)


def plan_of(options: Mapping[str, str], schema: StructType) -> SinkPlan:
    """Read the options for rows of some columns. Raises `ConfigurationError`."""
    columns = {field.name: field.dataType.simpleString() for field in schema.fields}
    given = {name: options[name] for name in options if name != "checkpointlocation"}  # Spark's own
    return sink_plan(given, columns, os.environ)
