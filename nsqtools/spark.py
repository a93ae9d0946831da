"""NSQ in any PySpark session: the formats ``nsq-archive`` and ``nsq``.

    import nsqtools.spark

    nsqtools.spark.register(spark)
    spark.read.format("nsq-archive").load("/var/nsq")

Where nsqtools is installed as a package the formats are known without this call.
"""

from __future__ import annotations

from nsqtools.services.spark.registration import register

__all__ = ["register"]
