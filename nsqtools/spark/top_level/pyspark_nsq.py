"""``format("nsq")`` without a call: PySpark registers the ``DefaultSource`` of each ``pyspark_*``.

The wheel puts this module beside the package. PySpark imports it whenever data sources are looked
up, in whatever program, so it does nothing else.
"""

from nsqtools.spark.nsq_format import NsqFormat as DefaultSource

__all__ = ["DefaultSource"]
