"""The classes that Spark loads. They are thin, and the only modules that import PySpark on top.

archive_format    ``nsq-archive``, and ``nsq_archive`` for SQL
nsq_source        ``nsq``: live topics as a stream of rows
nsq_sink          ``nsq``: rows as messages, of a batch or a stream
"""
