"""The jobs of the ``nsq spark`` commands.

inputs       messages from archives and Parquet, distinguished by their content
ingestion    a live topic or a growing archive into Parquet or Delta, as a stream
table_sink   commits its batches to Delta tables
reporting    figures of topics by the hour, and gaps
replay_job   archives and Parquet back into topics
sql          a query over archives and Parquet
"""

from nsqtools.spark.session import require_pyspark

require_pyspark()
