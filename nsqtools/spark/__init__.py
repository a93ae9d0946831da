"""The data pipeline on Spark: archives and live topics in, Parquet, reports and topics out.

    format_options       the options of data sources, and of their connection to NSQ
    session              a Spark session that keeps the terminal clean: spark_settings, java;
                         failures explains its errors
    doctor               checks whether Spark works on this machine
    archive_format,      the classes that Spark loads: nsq-archive, nsq, and the internal nsq-table.
    nsq_format,          They are thin. Only these, stream_format, nsq_writer and jobs import
    table_format         PySpark at their top
    archives/            nsq-archive as plain objects: files, offsets, partitions, reading
    topic_stream         a live topic as an archive that this process writes, and as a stream
    publishing/          the sink as plain objects: rows into topics, ledger, dead letters
    jobs/                the jobs of the ``nsq spark`` commands

Executors never consume: the archive is the write-ahead log, and an offset is a position in it. A
message is identified by (topic, nsqd, id).

To use the formats in your own PySpark session:

    import nsqtools.spark

    nsqtools.spark.register(spark)
    spark.read.format("nsq-archive").load("/var/nsq")

An installed nsqtools needs no such call, because PySpark finds the modules ``pyspark_nsq*`` next to
the package. An editable install needs it.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from typing import TYPE_CHECKING

from nsqtools.errors import ConfigurationError

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

__all__ = ["register"]


def register(spark: SparkSession) -> None:
    """Register the formats ``nsq-archive``, ``nsq_archive`` (for SQL) and ``nsq``. Idempotent.

    Raises `ConfigurationError` if Spark's workers would run a Python without nsqtools.
    """
    from pyspark.errors import AnalysisException

    from nsqtools.spark.archive_format import ArchiveFormat, SQLArchiveFormat
    from nsqtools.spark.nsq_format import NsqFormat
    from nsqtools.spark.table_format import NsqTableFormat

    check_worker_python(spark)
    for source in (ArchiveFormat, SQLArchiveFormat, NsqFormat, NsqTableFormat):
        try:
            spark.dataSource.register(source)
        except AnalysisException as error:
            # Before 4.2, Spark does not replace a format that it has found by its module's name.
            if error.getCondition() != "DATA_SOURCE_ALREADY_EXISTS":
                raise


def check_worker_python(spark: SparkSession) -> None:
    """Raise `ConfigurationError` if the Python of Spark's workers cannot import nsqtools.

    Spark runs data sources with PYSPARK_PYTHON, or with ``python3`` in PATH, even on this machine.
    """
    try:
        worker = shutil.which(spark.sparkContext.pythonExec)
    except Exception:  # A Spark Connect session has no context, and its server has its own Python.
        return
    if worker is None or os.path.abspath(worker) == os.path.abspath(sys.executable):
        return
    done = subprocess.run([worker, "-c", "import nsqtools, pyarrow"], capture_output=True)
    if done.returncode:
        raise ConfigurationError(
            f"Spark's workers run {worker}, which cannot import nsqtools and pyarrow",
            hint=f"Set PYSPARK_PYTHON={sys.executable} before the session is made.",
        )
