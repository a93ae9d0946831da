"""``nsq-archive``: what ``nsq to-file`` wrote, as rows."""

from __future__ import annotations

from pyspark.sql.datasource import DataSource

from nsqtools.services.spark.schema import ARCHIVED_DDL


class ArchiveSource(DataSource):
    """The format ``nsq-archive``."""

    @classmethod
    def name(cls) -> str:
        return "nsq-archive"

    def schema(self) -> str:
        return ARCHIVED_DDL


class SQLArchiveSource(ArchiveSource):
    """The same, under a name that SQL takes without quotes: ``USING nsq_archive``."""

    @classmethod
    def name(cls) -> str:
        return "nsq_archive"
