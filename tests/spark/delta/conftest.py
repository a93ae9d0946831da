"""Tests on real Delta tables, for which CI has an environment with a PySpark that Delta runs on.

With another one nothing here is collected. The session of all tests has Delta's jars, which Spark
fetches once and keeps beside those of the tests on clusters.
"""

from __future__ import annotations

from dataclasses import replace
from importlib import metadata

import pytest
from plugins.java_classes import FLAGS
from plugins.spark_cluster import IVY

from nsqtools.errors import ConfigurationError
from nsqtools.spark.packages import delta_package
from nsqtools.spark.spark_settings import SparkSettings


def _has_delta() -> bool:
    try:
        return bool(delta_package(metadata.version("pyspark")))
    except (ConfigurationError, metadata.PackageNotFoundError):
        return False


collect_ignore_glob = [] if _has_delta() else ["test_*.py"]


@pytest.fixture(scope="session")
def quick_jvm() -> str:
    """The flags alone: for one JVM a file of classes costs more than it saves."""
    return FLAGS


@pytest.fixture(scope="session")
def spark_settings(spark_settings: SparkSettings) -> SparkSettings:
    """Settings of a session with Delta."""
    conf = {
        "spark.jars.ivy": str(IVY),
        "spark.databricks.delta.snapshotPartitions": "1",
        # to compile costs more than to interpret a few rows
        "spark.sql.codegen.wholeStage": "false",
        "spark.sql.codegen.factoryMode": "NO_CODEGEN",
    }
    return replace(spark_settings, delta=True, conf={**spark_settings.conf, **conf})
