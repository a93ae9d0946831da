"""``nsq-archive`` as plain objects: nothing here knows Spark, and only reading knows Arrow.

    read_settings      the options, and the columns of a message as Spark declares them
    archive_files      which files there are, by writer and number, and what kind of lines they hold
    damage             what cannot be read: fails the query, or is reported and counted
    partitions         files into ranges of members, ranges into partitions
    offsets            how far a stream has read, and how far its next batch goes
    archive_stream     the answers of a stream's reader
    partition_reader   a partition into Arrow record batches

One process on the driver plans; executors get partitions, and open files.
"""

from nsqtools.spark.session import require_pyspark

require_pyspark()
