"""Make the formats known to a session: ``nsq-archive``, ``nsq_archive`` (for SQL) and ``nsq``.

Where nsqtools is installed, PySpark finds them by itself, by the modules ``pyspark_nsq*`` that
stand beside the package. `register` is for where that does not work: an editable install.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from pyspark.sql import SparkSession


def register(spark: SparkSession) -> None:
    """Register the formats of nsqtools with ``spark``; doing it twice does no harm."""
    from nsqtools.spark.sources.archive import ArchiveSource, SQLArchiveSource
    from nsqtools.spark.sources.nsq import NsqSource

    for source in (ArchiveSource, SQLArchiveSource, NsqSource):
        spark.dataSource.register(source)
