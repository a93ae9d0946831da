"""``USING nsq_archive`` in SQL without a call, as `pyspark_nsq` does it for ``nsq``."""

from nsqtools.spark.archive_format import SQLArchiveFormat as DefaultSource

__all__ = ["DefaultSource"]
