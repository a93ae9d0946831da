"""The data pipeline on Spark: archives and live topics in, Parquet, reports and topics out.

    format_options       the options of data sources, and of their connection to NSQ
    session              a Spark session that keeps the terminal clean: spark_settings, java;
                         failures explains its errors
    doctor               why Spark would not work here
    archive_format,      the classes that Spark loads: nsq-archive, nsq, and nsq-table for our own
    nsq_format,          use. They are thin; beside them, stream_format, nsq_writer and jobs nothing
    table_format         imports PySpark on top
    archives/            nsq-archive as plain objects: files, offsets, partitions, reading
    topic_stream         a live topic as an archive that this process writes, and as a stream
    publishing/          the sink as plain objects: rows into topics, ledger, dead letters
    jobs/                what the ``nsq spark`` commands do

Executors never speak the consumer protocol: the archive is the write-ahead log, and an offset is a
position in it. A message is identified by (topic, nsqd, id).

To use the formats in a PySpark session of your own:

    import nsqtools.spark

    nsqtools.spark.register(spark)
    spark.read.format("nsq-archive").load("/var/nsq")

An installed nsqtools needs no such call: PySpark finds the modules ``pyspark_nsq*`` beside the
package by itself. An editable install does.
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

    Raises `ConfigurationError` when Spark's workers would run a Python without nsqtools.
    """
    from pyspark.errors import AnalysisException

    from nsqtools.spark.archive_format import ArchiveFormat, SQLArchiveFormat
    from nsqtools.spark.nsq_format import NsqFormat
    from nsqtools.spark.table_format import TableSink

    check_worker_python(spark)
    for source in (ArchiveFormat, SQLArchiveFormat, NsqFormat, TableSink):
        try:
            spark.dataSource.register(source)
        except AnalysisException as error:
            # before 4.2 what Spark has found by itself, by a module's name, is not replaced
            if error.getCondition() != "DATA_SOURCE_ALREADY_EXISTS":
                raise


def check_worker_python(spark: SparkSession) -> None:
    """Check the Python that Spark runs data sources with, on this machine too.

    It is ``python3`` of PATH unless PYSPARK_PYTHON says otherwise, and not this one. Raises
    `ConfigurationError` when it cannot import nsqtools.
    """
    try:
        worker = shutil.which(spark.sparkContext.pythonExec)
    except Exception:  # a Spark Connect session has no context, and a server with its own Python
        return
    if worker is None or os.path.abspath(worker) == os.path.abspath(sys.executable):
        return
    done = subprocess.run([worker, "-c", "import nsqtools, pyarrow"], capture_output=True)
    if done.returncode:
        raise ConfigurationError(
            f"Spark's workers run {worker}, which cannot import nsqtools and pyarrow",
            hint=f"Set PYSPARK_PYTHON={sys.executable} before the session is made.",
        )
