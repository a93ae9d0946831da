"""Publish the rows of a Spark job, without Spark: a plan for all tasks, and the work of one.

publish_task    the options of the sink, one partition, and the outcome of each of its rows
row_outcomes    the counts of a task and a job, the rows that were put aside, and the ledger:
                progress on disk, so that a task that is retried continues
"""
