"""The data pipeline on Spark: archives and live topics in, Parquet, reports and topics out.

    options            reads the options of data sources; connection_options those for NSQ
    schema             the columns of a message, for Spark and for Arrow
    session            a session that keeps the terminal clean, made of settings, launch, java, jvm,
                       log and scratch; failures says what its errors mean
    doctor             why it would not work here; doctor_nsqd compares nsqd
    registration       makes the formats known to a session
    archives/          nsq-archive as plain objects: which files there are, offsets, ranges, reading
    spool              a live topic as an archive that this process writes: what ``nsq`` reads from;
                       topic_settings has its options, spool_stream what a query asks of it
    ledger             how far the tasks of a job that publishes have come
    dead_letters       rows that were not published, with the reason
    sources/, sinks/   the classes Spark loads; they and `session` are all that knows PySpark, and
                       what decides something is in the plain modules above
    jobs/              what the ``nsq spark`` commands do

Spark never speaks the consumer protocol on executors: the archive is the write-ahead log, and an
offset is a place in it. A message is identified by (topic, nsqd, id).

To have the formats in a PySpark session of one's own:

    import nsqtools.spark

    nsqtools.spark.register(spark)
    spark.read.format("nsq-archive").load("/var/nsq")

Where nsqtools is installed as a package the formats are known without this call.
"""

from __future__ import annotations

from nsqtools.spark.registration import register

__all__ = ["register"]
