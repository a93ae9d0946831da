"""Streams of both formats: what needs a PySpark with read limits for Python data sources (4.2.1).

Batches run on older ones, so nothing imports this module before a stream is asked for.
"""

from __future__ import annotations

import signal
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from functools import cached_property
from types import FrameType
from typing import TYPE_CHECKING, Any

import pyarrow
from pyspark.sql.datasource import (
    DataSourceStreamArrowWriter,
    DataSourceStreamReader,
    InputPartition,
    WriterCommitMessage,
)
from pyspark.sql.streaming.datasource import (
    ReadAllAvailable,
    ReadLimit,
    ReadMaxRows,
    SupportsTriggerAvailableNow,
)
from pyspark.sql.types import StructType

from nsqtools.errors import ConfigurationError, ConnectionFailed
from nsqtools.spark.archives.archive_stream import ArchiveStream
from nsqtools.spark.archives.offsets import Offset, decode_offset
from nsqtools.spark.archives.partition_reader import read_partition
from nsqtools.spark.archives.read_settings import BatchLimits, ReadSettings, StreamSettings
from nsqtools.spark.nsq_writer import outcome_of, plan_of, publish
from nsqtools.spark.publishing.publish_task import SinkPlan, prepared
from nsqtools.spark.publishing.row_outcomes import require_all

if TYPE_CHECKING:
    from nsqtools.spark.topic_stream import TopicStream

IDLE_SHARE = 2.0  # how long to wait after a look that found nothing, as a share of its time


class StreamReader(DataSourceStreamReader, SupportsTriggerAvailableNow):
    """Reads what comes. One of it lives as long as the query does, and decides; its copies read.

    ``make`` makes what decides. The lag of topics is that of the spool, not of nsqd.
    """

    def __init__(
        self,
        make: Callable[[], ArchiveStream | TopicStream],
        read: ReadSettings,
        options: StreamSettings,
        names: list[str],
        source: str,
    ) -> None:
        self._make: Callable[[], ArchiveStream | TopicStream] | None = make
        self._read, self._options, self._names, self._source = read, options, names, source
        self._not_before_s = 0.0

    def __getstate__(self) -> dict[str, Any]:
        # executors know no address and no secret
        return {**self.__dict__, "_make": None, "_stream": None}

    @cached_property
    def _stream(self) -> ArchiveStream | TopicStream:
        assert self._make is not None
        return self._make()

    def _offset(self, document: dict[str, Any]) -> Offset:
        offset = decode_offset(document)
        if bool(offset.run) == isinstance(self._stream, ArchiveStream):  # which has no spool
            raise ConfigurationError(
                f"{document!r} is not an offset of {self._source}",
                hint="A checkpoint belongs to one source; use another one for another source.",
            )
        return offset

    def initialOffset(self) -> dict[str, Any]:
        return self._stream.initial().encode()

    def getDefaultReadLimit(self) -> ReadLimit:
        """Return what Spark hands to `latestOffset`: it knows one limit, and we have several."""
        return ReadAllAvailable() if self._options.limits == BatchLimits() else ReadMaxRows(1)

    def latestOffset(self, start: dict[str, Any], limit: ReadLimit) -> dict[str, Any]:
        """Wait before, when the last look found nothing: Spark asks a hundred times a second.

        Looking at a large archive takes long, and is done less often then.
        """
        end_on_sigterm()
        time.sleep(max(0.0, self._not_before_s - time.monotonic()))
        began_s = time.monotonic()
        limits = BatchLimits() if isinstance(limit, ReadAllAvailable) else self._options.limits
        end = self._stream.latest(self._offset(start), limits).encode()
        took_s = time.monotonic() - began_s
        pause_s = max(self._options.poll_s, took_s * (1 + IDLE_SHARE))
        self._not_before_s = began_s + pause_s if end == start else 0.0
        return end

    def reportLatestOffset(self) -> dict[str, Any] | None:
        """What is read, and the lag, in a query's progress: as of the last look."""
        lag = self._stream.lag()
        # Spark describes a source in Python by the name of a Java class
        return None if lag is None else {"source": self._source, **lag}

    def prepareForTriggerAvailableNow(self) -> None:
        self._stream.freeze()

    def partitions(self, start: dict[str, Any], end: dict[str, Any]) -> list[InputPartition]:
        planned = self._stream.plan(self._offset(start), self._offset(end))
        return [InputPartition(each) for each in planned]

    def read(self, partition: InputPartition) -> Iterator[pyarrow.RecordBatch]:
        return read_partition(partition.value, self._read, self._names)

    def commit(self, end: dict[str, Any]) -> None:
        self._stream.commit(self._offset(end))

    def stop(self) -> None:
        if self.__dict__.get("_stream") is not None:
            self._stream.stop()


def end_on_sigterm() -> None:
    """Have `stop` run when Spark ends this process: it sends SIGTERM, and soon another one."""
    is_main = threading.current_thread() is threading.main_thread()
    if is_main and signal.getsignal(signal.SIGTERM) is signal.SIG_DFL:
        signal.signal(signal.SIGTERM, _end)


def _end(number: int, frame: FrameType | None) -> None:
    signal.signal(number, signal.SIG_IGN)
    sys.exit(128 + number)


class NsqStreamWriter(DataSourceStreamArrowWriter):
    """Writes the batches of a stream, each at least once.

    ``problem`` is why no nsqd is known. It matters to the tasks and not to the writer that commits
    what they have published.
    """

    def __init__(self, plan: SinkPlan, problem: str = "") -> None:
        self._plan = plan
        self._problem = problem

    def write(self, iterator: Iterator[pyarrow.RecordBatch]) -> WriterCommitMessage:
        if self._problem:
            raise ConnectionFailed(self._problem)
        return publish(self._plan, iterator)

    def commit(self, messages: list[WriterCommitMessage | None], batchId: int) -> None:
        """Add up what the tasks did. Raises `NsqError`, which ends the query.

        Of a micro-batch each task has written, one without rows, too. Trigger.Continuous writes
        nothing; there the error is logged, and no epoch is committed.
        """
        if None in messages:
            raise ConfigurationError("with Trigger.Continuous a sink in Python gets no rows")
        require_all(outcome_of(messages, f"published: batch {batchId}", self._plan.outcome))

    def abort(self, messages: list[WriterCommitMessage | None], batchId: int) -> None:
        """Report what the successful tasks did: it cannot be undone."""
        outcome_of(messages, f"batch {batchId} failed")


def stream_writer(options: Mapping[str, str], schema: StructType) -> NsqStreamWriter:
    """Make the writer of a stream, or the one that commits a batch. Raises `NsqError`."""
    plan = plan_of(options, schema)
    if plan.ledger is not None:
        raise ConfigurationError(
            "a stream has no ledger: the rows of a repeated batch may come in another order",
            hint="Remove ledgerPath; a batch that fails is published again.",
        )
    try:
        return NsqStreamWriter(prepared(plan))
    except ConnectionFailed as exc:
        return NsqStreamWriter(plan, str(exc))
