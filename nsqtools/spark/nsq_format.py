"""``format("nsq")``, for Spark: live topics as a stream of rows, and rows as messages.

    df.write.format("nsq").mode("append").option("topic", "clicks").save()

The classes connect Spark to `topic_stream`, which reads, and to `publishing`, which writes. The
archiver runs in one process, that of the reader which plans batches. The readers on executors are
copies of another instance. They only read files, and have no address and no secret.

Delivery is *at least once*. Spark retries a failed task, which publishes its rows again unless a
ledger (`ledgerPath`) records the finished ones. A stream has no ledger, because the rows of a
repeated batch may come in another order, so after a failure its batch is published again. Messages
cannot be removed from NSQ, so a failed job is not undone.

Columns to write: ``body`` (binary or string); ``topic``, unless the option names one for all rows;
``defer_ms``. The options are listed in `publishing.publish_task`.
"""

from __future__ import annotations

import os
from functools import partial
from typing import TYPE_CHECKING

from pyspark.sql.datasource import DataSource
from pyspark.sql.types import StructType

from nsqtools.errors import ConfigurationError
from nsqtools.spark.archives.read_settings import body_settings
from nsqtools.spark.format_options import Options
from nsqtools.spark.nsq_writer import NsqWriter, plan_of
from nsqtools.spark.publishing.publish_task import prepared
from nsqtools.spark.publishing.row_outcomes import prepare_ledger
from nsqtools.spark.pyspark_internals import columns, require_streams, struct_of

if TYPE_CHECKING:
    from nsqtools.spark.stream_format import NsqStreamWriter, StreamReader


class NsqFormat(DataSource):
    """The format ``nsq``."""

    @classmethod
    def name(cls) -> str:
        return "nsq"

    def schema(self) -> StructType:
        return struct_of(body_settings(Options("nsq", self.options)).message_schema())

    def streamReader(self, schema: StructType) -> StreamReader:
        require_streams()
        from nsqtools.spark.stream_format import StreamReader
        from nsqtools.spark.topic_stream import TopicStream, topic_settings

        settings = topic_settings(self.options, os.environ)
        names = columns(schema, settings.read.bodies.message_schema())
        make, description = partial(TopicStream, settings), settings.spool.description
        return StreamReader(make, settings.read, settings.stream, names, description)

    def writer(self, schema: StructType, overwrite: bool) -> NsqWriter:
        """Return the writer of a job, on the driver. Raises `NsqError` before it publishes."""
        if overwrite:
            raise ConfigurationError(
                "messages in NSQ cannot be overwritten", hint='Write with .mode("append").'
            )
        plan = plan_of(self.options, schema)
        if plan.ledger is not None:
            prepare_ledger(plan.ledger, plan.ledger_job)
        return NsqWriter(prepared(plan))

    def streamWriter(self, schema: StructType, overwrite: bool) -> NsqStreamWriter:
        require_streams()
        from nsqtools.spark.stream_format import stream_writer

        return stream_writer(self.options, schema)
