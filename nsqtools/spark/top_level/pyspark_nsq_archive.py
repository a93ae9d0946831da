"""``format("nsq-archive")`` without a call, as `pyspark_nsq` does it for ``nsq``."""

from nsqtools.spark.archive_format import ArchiveFormat as DefaultSource

__all__ = ["DefaultSource"]
