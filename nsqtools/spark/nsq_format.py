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
import signal
import sys
import threading
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from functools import cached_property
from types import FrameType
from typing import TYPE_CHECKING, Any

from pyspark import TaskContext
from pyspark.sql.datasource import (
    DataSource,
    DataSourceArrowWriter,
    DataSourceStreamArrowWriter,
    DataSourceStreamReader,
    InputPartition,
    WriterCommitMessage,
)
from pyspark.sql.streaming.datasource import ReadLimit, SupportsTriggerAvailableNow

from nsqtools.errors import ConfigurationError, ConnectionFailed
from nsqtools.spark.archive_format import (
    ArchivePartition,
    Poll,
    columns,
    default_limit,
    limits_under,
    read,
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
from nsqtools.spark.topic_stream import TopicSettings, topic_settings

if TYPE_CHECKING:
    import pyarrow
    from pyspark.sql.types import StructType

    from nsqtools.spark.topic_stream import TopicStream

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


class NsqStreamWriter(DataSourceStreamArrowWriter):
    """Writes the batches of a stream, each at least once.

    ``problem`` is why no nsqd is known. It matters to the tasks and not to the writer that commits
    what they have published.
    """

    def __init__(self, settings: SinkSettings, problem: str = "") -> None:
        self._plan = settings.plan
        self._outcome = settings.outcome
        self._problem = problem

    def write(self, iterator: Iterator[pyarrow.RecordBatch]) -> WriterCommitMessage:
        if self._problem:
            raise ConnectionFailed(self._problem)
        return publish(self._plan, iterator)

    def commit(self, messages: list[WriterCommitMessage | None], batchId: int) -> None:
        """Add up what the tasks did. Raises `NsqError`, which ends the query."""
        report = total(reports(messages))
        log.warning("published: batch %d: %s", batchId, summary(report))
        if self._outcome is not None:
            write_document(self._outcome, report, is_complete=True)
        require_all(report)

    def abort(self, messages: list[WriterCommitMessage | None], batchId: int) -> None:
        """Report what the successful tasks did: it cannot be undone."""
        log.warning("batch %d failed: %s", batchId, summary(total(reports(messages))))


def batch_writer(options: Mapping[str, str], schema: StructType, *, overwrite: bool) -> NsqWriter:
    """Make the writer of a job, on the driver. Raises `NsqError` before anything is published."""
    if overwrite:
        raise ConfigurationError(
            "messages in NSQ cannot be overwritten", hint='Write with .mode("append").'
        )
    settings = _settings(options, schema)
    if settings.plan.ledger is not None:
        prepare_ledger(settings.plan.ledger, settings.ledger_job)
    return NsqWriter(_prepared(settings))


def stream_writer(options: Mapping[str, str], schema: StructType) -> NsqStreamWriter:
    """Make the writer of a stream, or the one that commits a batch. Raises `NsqError`."""
    settings = _settings(options, schema)
    if settings.plan.ledger is not None:
        raise ConfigurationError(
            "a stream has no ledger: the rows of a repeated batch may come in another order",
            hint="Remove ledgerPath; a batch that fails is published again.",
        )
    try:
        return NsqStreamWriter(_prepared(settings))
    except ConnectionFailed as exc:
        return NsqStreamWriter(settings, str(exc))


def _settings(options: Mapping[str, str], schema: StructType) -> SinkSettings:
    columns = {field.name: field.dataType.simpleString() for field in schema.fields}
    given = {name: options[name] for name in options}
    given.pop("checkpointlocation", None)  # Spark's own
    return sink_settings(given, columns, os.environ)


def _prepared(settings: SinkSettings) -> SinkSettings:
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
        settings = topic_settings(self.options, os.environ)
        return NsqStreamReader(settings, columns(schema, MESSAGE_DDL))

    def writer(self, schema: StructType, overwrite: bool) -> NsqWriter:

        return batch_writer(self.options, schema, overwrite=overwrite)

    def streamWriter(self, schema: StructType, overwrite: bool) -> NsqStreamWriter:

        return stream_writer(self.options, schema)


class NsqStreamReader(DataSourceStreamReader, SupportsTriggerAvailableNow):
    """Reads what comes."""

    def __init__(self, settings: TopicSettings, names: list[str]) -> None:
        self._settings = settings
        self._names = names
        self._is_bounded = False

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "_settings": self._settings.for_executors()}

    @cached_property
    def _stream(self) -> TopicStream:
        from nsqtools.spark.topic_stream import TopicStream

        given = self._settings
        assert given.connection is not None
        return TopicStream(given.spool, given.connection, given.read, given.stream)

    @cached_property
    def _poll(self) -> Poll:
        return Poll(self._settings.stream.poll_s)

    def initialOffset(self) -> dict[str, Any]:
        return self._stream.initial()

    def getDefaultReadLimit(self) -> ReadLimit:
        return default_limit(self._settings.stream.limits)

    def latestOffset(self, start: dict[str, Any], limit: ReadLimit) -> dict[str, Any]:
        end_on_sigterm()
        limits = limits_under(limit, self._settings.stream.limits)
        with self._poll as poll:
            end = self._stream.latest(start, limits)
            poll.found_something(end != start)
        return end

    def reportLatestOffset(self) -> dict[str, Any] | None:
        """What is read, and the lag, in a query's progress: of the spool, not of nsqd."""
        lag = self._stream.lag()
        return None if lag is None else {"source": self._settings.spool.description, **lag}

    def prepareForTriggerAvailableNow(self) -> None:
        self._stream.freeze()

    def partitions(self, start: dict[str, Any], end: dict[str, Any]) -> list[ArchivePartition]:
        return [ArchivePartition(planned) for planned in self._stream.plan(start, end)]

    def commit(self, end: dict[str, Any]) -> None:
        self._stream.commit(end)

    def read(self, partition: InputPartition) -> Iterator[pyarrow.RecordBatch]:
        return read(partition.value, self._settings.read, self._names)

    def stop(self) -> None:
        if "_stream" in self.__dict__:
            self._stream.stop()


def end_on_sigterm() -> None:
    """Have `stop` run when Spark ends this process: it sends SIGTERM, and soon another one."""
    if threading.current_thread() is not threading.main_thread():
        return
    if signal.getsignal(signal.SIGTERM) is signal.SIG_DFL:
        signal.signal(signal.SIGTERM, _end)


def _end(number: int, frame: FrameType | None) -> None:
    signal.signal(number, signal.SIG_IGN)
    sys.exit(128 + number)
