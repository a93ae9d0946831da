"""Rows as messages, for Spark: the writer of batches, and what that of streams does like it.

A writer is made on the driver and travels to the tasks, each of which gives its report back; of a
stream, another one is made to commit each batch.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING

from pyspark import TaskContext
from pyspark.sql.datasource import DataSourceArrowWriter, WriterCommitMessage

from nsqtools.errors import ConfigurationError
from nsqtools.spark.publishing.ledger import prepare_ledger
from nsqtools.spark.publishing.publish_task import PublishTask, chunk_of
from nsqtools.spark.publishing.row_outcomes import (
    PublishReport,
    require_all,
    summary,
    total,
    write_document,
)
from nsqtools.spark.publishing.sink_plan import SinkPlan, SinkSettings, prepared, sink_settings

if TYPE_CHECKING:
    import pyarrow
    from pyspark.sql.types import StructType

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
        write_document(path, report, is_complete=is_complete)
    return report


class NsqWriter(DataSourceArrowWriter):
    """Writes a batch."""

    def __init__(self, settings: SinkSettings) -> None:
        self._plan = settings.plan
        self._outcome = settings.outcome

    def write(self, iterator: Iterator[pyarrow.RecordBatch]) -> WriterCommitMessage:
        return publish(self._plan, iterator)

    def commit(self, messages: list[WriterCommitMessage | None]) -> None:
        """Add up what the tasks did. Raises `NsqError` when rows were not published."""
        require_all(outcome_of(messages, "published", self._outcome))

    def abort(self, messages: list[WriterCommitMessage | None]) -> None:
        """Report what the successful tasks did: it cannot be undone."""
        outcome_of(messages, "failed", self._outcome, is_complete=False)


def batch_writer(options: Mapping[str, str], schema: StructType, *, overwrite: bool) -> NsqWriter:
    """Make the writer of a job, on the driver. Raises `NsqError` before anything is published."""
    if overwrite:
        raise ConfigurationError(
            "messages in NSQ cannot be overwritten", hint='Write with .mode("append").'
        )
    settings = settings_of(options, schema)
    if settings.plan.ledger is not None:
        prepare_ledger(settings.plan.ledger, settings.ledger_job)
    return NsqWriter(prepared(settings))


def settings_of(options: Mapping[str, str], schema: StructType) -> SinkSettings:
    columns = {field.name: field.dataType.simpleString() for field in schema.fields}
    given = {name: options[name] for name in options}
    given.pop("checkpointlocation", None)  # Spark's own
    return sink_settings(given, columns, os.environ)
