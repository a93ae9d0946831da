"""``nsq``: live topics as a stream of rows, and rows as messages."""

from __future__ import annotations

from pyspark.sql.datasource import DataSource

from nsqtools.services.spark.schema import MESSAGE_DDL


class NsqSource(DataSource):
    """The format ``nsq``."""

    @classmethod
    def name(cls) -> str:
        return "nsq"

    def schema(self) -> str:
        return MESSAGE_DDL
