"""``format("nsq")`` without a call: PySpark registers the ``DefaultSource`` of each ``pyspark_*``.

The wheel installs this module next to the package. Every program with PySpark imports it when it
looks up a data source, so it must not do anything else.
"""

from nsqtools.spark.nsq_format import NsqFormat as DefaultSource

__all__ = ["DefaultSource"]
