"""``format("nsq-archive")`` without a call, as `pyspark_nsq` does it for ``nsq``."""

from nsqtools.spark.sources.archive import ArchiveSource as DefaultSource

__all__ = ["DefaultSource"]
