"""``nsq``: live topics as a stream of rows, and rows as messages."""

from __future__ import annotations

from typing import TYPE_CHECKING

from pyspark.sql.datasource import DataSource

from nsqtools.services.spark.schema import MESSAGE_DDL

if TYPE_CHECKING:
    from pyspark.sql.types import StructType

    from nsqtools.services.spark.sinks.nsq import NsqStreamWriter, NsqWriter


class NsqSource(DataSource):
    """The format ``nsq``."""

    @classmethod
    def name(cls) -> str:
        return "nsq"

    def schema(self) -> str:
        return MESSAGE_DDL

    def writer(self, schema: StructType, overwrite: bool) -> NsqWriter:
        from nsqtools.services.spark.sinks.nsq import batch_writer

        return batch_writer(self.options, schema, overwrite=overwrite)

    def streamWriter(self, schema: StructType, overwrite: bool) -> NsqStreamWriter:
        from nsqtools.services.spark.sinks.nsq import stream_writer

        return stream_writer(self.options, schema)
