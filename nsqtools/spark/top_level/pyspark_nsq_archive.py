"""``format("nsq-archive")`` without a call, as in `pyspark_nsq` for ``nsq``."""

from nsqtools.spark.archive_format import ArchiveFormat as DefaultSource

__all__ = ["DefaultSource"]
