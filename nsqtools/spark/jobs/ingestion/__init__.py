"""Ingestion: a live topic or an archive into Parquet by topic and date, each message once.

    places     which output and which checkpoint belong together
    leftovers  what broken batches wrote
    stream     the query, and following it to its end

Exactly once is Spark's work: the source repeats a batch as it was, and the log of Spark's file sink
(``_spark_metadata``) says which files of the output count. Both hold only as long as output and
checkpoint stay together, which Spark does not check: `places` does.
"""
