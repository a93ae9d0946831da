"""``format("nsq")``, for Spark: live topics as a stream of rows, and rows as messages.

    df.write.format("nsq").mode("append").option("topic", "clicks").save()

These classes only stand between Spark and `topic_stream`, which reads, and
`publishing.publish_task`, which writes. The archiver runs in one process, that of the reader which
Spark asks for offsets; the readers on executors are copies of another one, which only read files,
and know no address and no secret. A writer is made on the driver and travels to the tasks; of a
stream, another one is made to commit each batch.

Delivery is *at least once*. Spark retries a task that fails, which publishes its rows again unless
a ledger (`ledgerPath`) knows which are done. A stream has no ledger, because the rows of a repeated
batch may come in another order: after a failure its batch is published again. NSQ cannot take
messages back, so nothing of a failed job is undone.

Columns to write: ``body`` (binary or string); ``topic``, unless the option names one for all rows;
``defer_ms``. The options are listed in `publishing.sink_plan`.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING

from pyspark import TaskContext
from pyspark.sql.datasource import (
    DataSource,
    DataSourceArrowWriter,
    WriterCommitMessage,
)

from nsqtools.errors import ConfigurationError
from nsqtools.spark.archive_format import (
    columns,
)
from nsqtools.spark.archives.message_columns import MESSAGE_DDL
from nsqtools.spark.publishing.ledger import prepare_ledger
from nsqtools.spark.publishing.publish_task import PublishTask, chunk_of
from nsqtools.spark.publishing.row_outcomes import (
    PublishReport,
    require_all,
    summary,
    total,
    write_document,
)
from nsqtools.spark.publishing.sink_plan import (
    SinkPlan,
    SinkSettings,
    make_folders,
    producer_addresses,
    sink_settings,
)
from nsqtools.spark.pyspark_internals import need_streams
from nsqtools.spark.topic_stream import topic_settings

if TYPE_CHECKING:
    import pyarrow
    from pyspark.sql.types import StructType

    from nsqtools.spark.stream_format import NsqStreamReader, NsqStreamWriter

log = logging.getLogger("nsqtools")


class Published(WriterCommitMessage):
    """A task's report to the driver."""

    def __init__(self, report: PublishReport) -> None:
        self.report = report


def publish(plan: SinkPlan, batches: Iterator[pyarrow.RecordBatch]) -> Published:
    """Publish the rows of a task, in the process that Spark runs it in. Raises `NsqError`."""
    context = TaskContext.get()
    assert context is not None
    task = PublishTask(plan, context.partitionId(), context.attemptNumber())
    has_topic = plan.topic is not None
    return Published(task.run(chunk_of(batch, has_topic=has_topic) for batch in batches))


def reports(messages: Sequence[WriterCommitMessage | None]) -> list[PublishReport]:
    """The reports of the tasks that succeeded."""
    return [message.report for message in messages if isinstance(message, Published)]


class NsqWriter(DataSourceArrowWriter):
    """Writes a batch."""

    def __init__(self, settings: SinkSettings) -> None:
        self._plan = settings.plan
        self._outcome = settings.outcome

    def write(self, iterator: Iterator[pyarrow.RecordBatch]) -> WriterCommitMessage:
        return publish(self._plan, iterator)

    def commit(self, messages: list[WriterCommitMessage | None]) -> None:
        """Add up what the tasks did. Raises `NsqError` when rows were not published."""
        self._report(messages, is_complete=True)
        require_all(total(reports(messages)))

    def abort(self, messages: list[WriterCommitMessage | None]) -> None:
        """Report what the successful tasks did: it cannot be undone."""
        self._report(messages, is_complete=False)

    def _report(self, messages: list[WriterCommitMessage | None], *, is_complete: bool) -> None:
        report = total(reports(messages))
        # as a warning: this process has no logging configured, which drops anything less
        log.warning("%s: %s", "published" if is_complete else "failed", summary(report))
        if self._outcome is not None:
            write_document(self._outcome, report, is_complete=is_complete)


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


def prepared(settings: SinkSettings) -> SinkSettings:
    """Look up what a job needs to begin, once. Raises `NsqError`."""
    make_folders(settings)
    addresses = producer_addresses(settings.connection)
    return replace(settings, plan=replace(settings.plan, addresses=addresses))


class NsqFormat(DataSource):
    """The format ``nsq``."""

    @classmethod
    def name(cls) -> str:
        return "nsq"

    def schema(self) -> str:
        return MESSAGE_DDL

    def streamReader(self, schema: StructType) -> NsqStreamReader:
        need_streams()
        from nsqtools.spark.stream_format import NsqStreamReader

        settings = topic_settings(self.options, os.environ)
        return NsqStreamReader(settings, columns(schema, MESSAGE_DDL))

    def writer(self, schema: StructType, overwrite: bool) -> NsqWriter:

        return batch_writer(self.options, schema, overwrite=overwrite)

    def streamWriter(self, schema: StructType, overwrite: bool) -> NsqStreamWriter:
        need_streams()
        from nsqtools.spark.stream_format import stream_writer

        return stream_writer(self.options, schema)
