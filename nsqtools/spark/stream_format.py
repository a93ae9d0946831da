"""Streams of both formats, which need a PySpark with read limits for Python data sources (4.2.1).

Batches run on older versions, so this module is imported only for a stream.
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
from nsqtools.spark.nsq_writer import collect_reports, plan_of, publish_task
from nsqtools.spark.publishing.publish_task import SinkPlan, prepared
from nsqtools.spark.publishing.row_outcomes import require_all

if TYPE_CHECKING:
    from nsqtools.spark.topic_stream import TopicStream

# An idle stream waits for this multiple of the time of its last listing, so that listing a large
# archive takes at most a third of the time.
IDLE_SHARE = 2.0


class StreamReader(DataSourceStreamReader, SupportsTriggerAvailableNow):
    """Reads a stream.

    One instance lives as long as the query and plans its batches, with the stream that ``make``
    returns. Its copies on executors only read. The lag of topics is that of the spool, not of nsqd.
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
        # Executors get no addresses and no secrets.
        return {**self.__dict__, "_make": None, "_stream": None}

    @cached_property
    def _stream(self) -> ArchiveStream | TopicStream:
        assert self._make is not None
        return self._make()

    def _offset(self, document: dict[str, Any]) -> Offset:
        offset = decode_offset(document)
        if bool(offset.run) == isinstance(self._stream, ArchiveStream):  # An archive has no spool.
            raise ConfigurationError(
                f"{document!r} is not an offset of {self._source}",
                hint="A checkpoint belongs to one source; use another one for another source.",
            )
        return offset

    def initialOffset(self) -> dict[str, Any]:
        return self._stream.initial().encode()

    def getDefaultReadLimit(self) -> ReadLimit:
        """Return the limit that Spark passes to `latestOffset`, as a mark for all of our limits."""
        return ReadAllAvailable() if self._options.limits == BatchLimits() else ReadMaxRows(1)

    def latestOffset(self, start: dict[str, Any], limit: ReadLimit) -> dict[str, Any]:
        """Return the end of the next batch, after a pause if the last call found nothing new."""
        end_on_sigterm()
        # Spark calls this a hundred times a second. The pause grows with the time of a listing.
        time.sleep(max(0.0, self._not_before_s - time.monotonic()))
        began_s = time.monotonic()
        limits = BatchLimits() if isinstance(limit, ReadAllAvailable) else self._options.limits
        end = self._stream.latest(self._offset(start), limits).encode()
        took_s = time.monotonic() - began_s
        pause_s = max(self._options.poll_s, took_s * (1 + IDLE_SHARE))
        self._not_before_s = began_s + pause_s if end == start else 0.0
        return end

    def reportLatestOffset(self) -> dict[str, Any] | None:
        """Return the source and its lag, as of the last listing, for the progress of the query."""
        lag = self._stream.lag()
        # Spark itself would describe a Python source by the name of a Java class.
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
    """Let `stop` run when Spark ends this process with SIGTERM, which it soon repeats."""
    is_main = threading.current_thread() is threading.main_thread()
    if is_main and signal.getsignal(signal.SIGTERM) is signal.SIG_DFL:
        signal.signal(signal.SIGTERM, _end)


def _end(number: int, frame: FrameType | None) -> None:
    signal.signal(number, signal.SIG_IGN)
    sys.exit(128 + number)


class NsqStreamWriter(DataSourceStreamArrowWriter):
    """Writes the batches of a stream, each at least once.

    ``problem`` is the reason why there is no address of nsqd. Only the tasks raise it, because the
    writer that commits their reports needs no nsqd.
    """

    def __init__(self, plan: SinkPlan, problem: str = "") -> None:
        self._plan = plan
        self._problem = problem

    def write(self, iterator: Iterator[pyarrow.RecordBatch]) -> WriterCommitMessage:
        if self._problem:
            raise ConnectionFailed(self._problem)
        return publish_task(self._plan, iterator)

    def commit(self, messages: list[WriterCommitMessage | None], batchId: int) -> None:
        """Sum the reports of the tasks. Raises `NsqError`, which ends the query.

        Every task of a micro-batch reports, even one without rows. Trigger.Continuous passes no
        rows; its error is logged, and no epoch is committed.
        """
        if None in messages:
            raise ConfigurationError("with Trigger.Continuous a sink in Python gets no rows")
        require_all(collect_reports(messages, f"published: batch {batchId}", self._plan.outcome))

    def abort(self, messages: list[WriterCommitMessage | None], batchId: int) -> None:
        """Report the outcome of the successful tasks, which cannot be undone."""
        collect_reports(messages, f"batch {batchId} failed")


def stream_writer(options: Mapping[str, str], schema: StructType) -> NsqStreamWriter:
    """Return the writer of a stream, or the writer that commits a batch. Raises `NsqError`."""
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
