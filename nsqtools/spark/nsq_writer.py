"""Publish rows as messages, for Spark: the writer of batches, and functions shared with streams.

A writer is created on the driver and sent to the tasks, which return their reports. For a stream,
another writer is created to commit each batch.
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
    report_document,
    require_all,
    sum_of_reports,
    summary,
)

log = logging.getLogger("nsqtools")


class PublishedRows(WriterCommitMessage):
    """A task's report to the driver."""

    def __init__(self, report: PublishReport) -> None:
        self.report = report


def publish_task(plan: SinkPlan, batches: Iterator[pyarrow.RecordBatch]) -> PublishedRows:
    """Publish the rows of a task, in the process of the task. Raises `NsqError`."""
    context = TaskContext.get()
    assert context is not None
    task = PublishTask(plan, context.partitionId(), context.attemptNumber())
    has_topic = plan.topic is not None
    return PublishedRows(task.run(chunk_of(batch, has_topic=has_topic) for batch in batches))


def collect_reports(
    messages: Iterable[WriterCommitMessage | None],
    what: str,
    path: Path | None = None,
    *,
    is_complete: bool = True,
) -> PublishReport:
    """Sum, log and store the reports of the successful tasks."""
    report = sum_of_reports(
        message.report for message in messages if isinstance(message, PublishedRows)
    )
    # Logging is not configured in this process, and drops messages below a warning.
    log.warning("%s: %s", what, summary(report))
    if path is not None:
        content = json.dumps(report_document(report, is_complete=is_complete), indent=1) + "\n"
        with translating_errors("write", path):
            replace_file(path, content.encode())
    return report


class NsqWriter(DataSourceArrowWriter):
    """Writes a batch."""

    def __init__(self, plan: SinkPlan) -> None:
        self._plan = plan

    def write(self, iterator: Iterator[pyarrow.RecordBatch]) -> WriterCommitMessage:
        return publish_task(self._plan, iterator)

    def commit(self, messages: list[WriterCommitMessage | None]) -> None:
        """Sum the reports of the tasks. Raises `NsqError` if rows were not published."""
        require_all(collect_reports(messages, "published", self._plan.outcome))

    def abort(self, messages: list[WriterCommitMessage | None]) -> None:
        """Report the outcome of the successful tasks, which cannot be undone."""
        collect_reports(messages, "failed", self._plan.outcome, is_complete=False)


def plan_of(options: Mapping[str, str], schema: StructType) -> SinkPlan:
    """Read the options of the sink for the columns of a schema. Raises `ConfigurationError`."""
    columns = {field.name: field.dataType.simpleString() for field in schema.fields}
    # Spark passes its own option as well.
    options = {name: options[name] for name in options if name != "checkpointlocation"}
    return sink_plan(options, columns, os.environ)
