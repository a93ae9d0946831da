"""``USING nsq_archive`` in SQL without a call, as in `pyspark_nsq` for ``nsq``."""

from nsqtools.spark.archive_format import SQLArchiveFormat as DefaultSource

__all__ = ["DefaultSource"]
