"""What the ``nsq spark`` commands do.

inputs       messages from archives and Parquet, distinguished by their content
ingestion    a live topic or a growing archive into Parquet, as a stream
reporting    what went through topics, by the hour
replay_job   archives and Parquet back into topics
sql          a query over archives and Parquet
"""

from nsqtools.spark.session import require_pyspark

require_pyspark()
