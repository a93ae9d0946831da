"""``format("nsq")``, for Spark: live topics as a stream of rows, and rows as messages.

    df.write.format("nsq").mode("append").option("topic", "clicks").save()

The classes stand between Spark and `topic_stream`, which reads, and `publishing`, which writes.
The archiver runs in one process, that of the reader which Spark asks for offsets; the readers on
executors are copies of another one, which only read files, and know no address and no secret. A
writer is made on the driver and travels to the tasks, each of which gives its report back; of a
stream, another one is made to commit each batch.

Delivery is *at least once*. Spark retries a task that fails, which publishes its rows again unless
a ledger (`ledgerPath`) knows which are done. A stream has no ledger, because the rows of a repeated
batch may come in another order: after a failure its batch is published again. NSQ cannot take
messages back, so nothing of a failed job is undone.

Columns to write: ``body`` (binary or string); ``topic``, unless the option names one for all rows;
``defer_ms``. The options are listed in `publishing.publish_task`.
"""

from __future__ import annotations

import json
import logging
import os
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING

from pyspark import TaskContext
from pyspark.sql.datasource import DataSource, DataSourceArrowWriter, WriterCommitMessage

from nsqtools.archive.storage import failing
from nsqtools.errors import ConfigurationError
from nsqtools.files.durable import replace_file
from nsqtools.spark.archive_format import columns
from nsqtools.spark.archives.read_settings import body_settings
from nsqtools.spark.format_options import Options
from nsqtools.spark.publishing.publish_task import (
    PublishTask,
    SinkPlan,
    chunk_of,
    prepared,
    sink_plan,
)
from nsqtools.spark.publishing.row_outcomes import (
    PublishReport,
    document,
    prepare_ledger,
    require_all,
    summary,
    total,
)
from nsqtools.spark.pyspark_internals import need_streams, struct_of

if TYPE_CHECKING:
    import pyarrow
    from pyspark.sql.types import StructType

    from nsqtools.spark.stream_format import NsqStreamReader, NsqStreamWriter

log = logging.getLogger("nsqtools")


class NsqFormat(DataSource):
    """The format ``nsq``."""

    @classmethod
    def name(cls) -> str:
        return "nsq"

    def schema(self) -> StructType:
        return struct_of(body_settings(Options("nsq", self.options)).message_schema())

    def streamReader(self, schema: StructType) -> NsqStreamReader:
        need_streams()
        from nsqtools.spark.stream_format import NsqStreamReader
        from nsqtools.spark.topic_stream import topic_settings

        settings = topic_settings(self.options, os.environ)
        names = columns(schema, settings.read.bodies.message_schema())
        return NsqStreamReader(settings, names)

    def writer(self, schema: StructType, overwrite: bool) -> NsqWriter:
        """Make the writer of a job, on the driver. Raises `NsqError` before it publishes."""
        if overwrite:
            raise ConfigurationError(
                "messages in NSQ cannot be overwritten", hint='Write with .mode("append").'
            )
        plan = plan_of(self.options, schema)
        if plan.ledger is not None:
            prepare_ledger(plan.ledger, plan.ledger_job)
        return NsqWriter(prepared(plan))

    def streamWriter(self, schema: StructType, overwrite: bool) -> NsqStreamWriter:
        need_streams()
        from nsqtools.spark.stream_format import stream_writer

        return stream_writer(self.options, schema)


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
        with failing("write", path):
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
    given = {name: options[name] for name in options}
    given.pop("checkpointlocation", None)  # Spark's own
    return sink_plan(given, columns, os.environ)
