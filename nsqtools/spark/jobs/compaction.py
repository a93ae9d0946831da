"""Compaction in Spark: the jobs of `archive.compaction` in its tasks, all of them as one job."""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING

from pyspark.sql import SparkSession

from nsqtools.archive.compaction import RunJobs
from nsqtools.archive.slices import Done, Job, run_job
from nsqtools.spark.failures import spark_errors

if TYPE_CHECKING:
    from nsqtools.spark.spark_settings import SparkSettings

CLUSTER_SLOTS = 64
"""How many tasks are assumed to run at a time on a cluster: for less work files are smaller."""


def slots_of(settings: SparkSettings) -> int:
    """Return about how many tasks run at a time."""
    return (os.cpu_count() or 1) if settings.is_local else CLUSTER_SLOTS


def in_tasks(spark: SparkSession, settings: SparkSettings) -> RunJobs:
    """Run jobs in tasks. A task that is tried again makes the same file again."""

    def run(jobs: Sequence[Job]) -> Iterator[tuple[int, Done]]:
        with spark_errors(settings):
            rows = spark.sparkContext.parallelize(list(enumerate(jobs)), max(1, len(jobs)))
            found = rows.map(lambda each: (each[0], run_job(each[1]))).collect()
        yield from found

    return run
