"""``format("nsq")``, for Spark: live topics as a stream of rows, and rows as messages.

    df.write.format("nsq").mode("append").option("topic", "clicks").save()

The class only stands between Spark and `topic_stream`, which reads, and `nsq_writer`, which writes.
The archiver runs in one process, that of the reader which Spark asks for offsets; the readers on
executors are copies of another one, which only read files, and know no address and no secret.

Delivery is *at least once*. Spark retries a task that fails, which publishes its rows again unless
a ledger (`ledgerPath`) knows which are done. A stream has no ledger, because the rows of a repeated
batch may come in another order: after a failure its batch is published again. NSQ cannot take
messages back, so nothing of a failed job is undone.

Columns to write: ``body`` (binary or string); ``topic``, unless the option names one for all rows;
``defer_ms``. The options are listed in `publishing.sink_plan`.
"""

from __future__ import annotations

import os
from typing import TYPE_CHECKING

from pyspark.sql.datasource import DataSource

from nsqtools.spark.archive_format import columns
from nsqtools.spark.archives.read_settings import body_settings
from nsqtools.spark.format_options import Options
from nsqtools.spark.nsq_writer import NsqWriter, batch_writer
from nsqtools.spark.pyspark_internals import need_streams, struct_of
from nsqtools.spark.topic_stream import topic_settings

if TYPE_CHECKING:
    from pyspark.sql.types import StructType

    from nsqtools.spark.stream_format import NsqStreamReader, NsqStreamWriter


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

        settings = topic_settings(self.options, os.environ)
        names = columns(schema, settings.read.bodies.message_schema())
        return NsqStreamReader(settings, names)

    def writer(self, schema: StructType, overwrite: bool) -> NsqWriter:
        return batch_writer(self.options, schema, overwrite=overwrite)

    def streamWriter(self, schema: StructType, overwrite: bool) -> NsqStreamWriter:
        need_streams()
        from nsqtools.spark.stream_format import stream_writer

        return stream_writer(self.options, schema)
