"""``format("nsq")``, for Spark: live topics as a stream of rows, and rows as messages.

Its decisions are in `topic_stream`, and those of the sinks in `nsqtools.spark.publishing`. The
archiver runs in one process, that of the reader which Spark asks for offsets; the readers on
executors are copies of another one, which only read files, and know no address and no secret.
"""

from __future__ import annotations

import logging
import os
import signal
import sys
import threading
from collections.abc import Iterator
from functools import cached_property
from types import FrameType
from typing import TYPE_CHECKING, Any

from pyspark.sql.datasource import DataSource, DataSourceStreamReader, InputPartition
from pyspark.sql.streaming.datasource import ReadLimit, SupportsTriggerAvailableNow

from nsqtools.spark.archives.message_columns import MESSAGE_DDL
from nsqtools.spark.formats.archive_format import (
    ArchivePartition,
    Poll,
    columns,
    default_limit,
    limits_under,
    read,
)
from nsqtools.spark.topic_stream import TopicSettings, topic_settings

if TYPE_CHECKING:
    import pyarrow
    from pyspark.sql.types import StructType

    from nsqtools.spark.formats.nsq_sink import NsqStreamWriter, NsqWriter
    from nsqtools.spark.topic_stream import TopicStream

log = logging.getLogger("nsqtools")


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
        from nsqtools.spark.formats.nsq_sink import batch_writer

        return batch_writer(self.options, schema, overwrite=overwrite)

    def streamWriter(self, schema: StructType, overwrite: bool) -> NsqStreamWriter:
        from nsqtools.spark.formats.nsq_sink import stream_writer

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
