"""``nsq-archive`` as plain objects: no module imports Spark, and only reading imports Arrow.

    read_settings      the options, and the columns of a message as Spark declares them
    archive_files      the current files, by writer and number, and the kind of their lines
    damage             unreadable data, which fails the query or is reported and counted
    partitions         split files into ranges of members, and pack ranges into partitions
    offsets            the position of a stream, and the end of its next batch
    archive_stream     a stream over an archive
    partition_reader   read a partition into Arrow record batches

One process on the driver plans; executors get partitions, and open files.
"""

from nsqtools.spark.session import require_pyspark

require_pyspark()
