"""The jars that Spark needs beside its own."""

from __future__ import annotations

from pathlib import Path

from nsqtools.spark.spark_settings import beside_sparks_own

FETCHED = [
    "/ivy/jars/io.delta_delta-spark_4.2_2.13-4.4.0.jar",
    "/ivy/jars/com.fasterxml.jackson.core_jackson-databind-2.13.5.jar",
    "/ivy/jars/com.fasterxml.jackson.core_jackson-core-2.13.5.jar",
    "/ivy/jars/org.apache.hadoop_hadoop-aws-3.5.0.jar",
]


def test_of_what_spark_has_itself_its_own_version_counts(tmp_path: Path) -> None:
    (tmp_path / "jars").mkdir()
    for name in ("jackson-databind-2.21.2.jar", "jackson-core-2.21.2.jar", "delta-x-1.jar"):
        (tmp_path / "jars" / name).touch()

    assert beside_sparks_own(FETCHED, tmp_path) == [FETCHED[0], FETCHED[3]]
