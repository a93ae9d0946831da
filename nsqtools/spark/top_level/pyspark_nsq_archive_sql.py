"""``USING nsq_archive`` in SQL without a call, as `pyspark_nsq` does it for ``nsq``."""

from nsqtools.spark.sources.archive import SQLArchiveSource as DefaultSource

__all__ = ["DefaultSource"]
