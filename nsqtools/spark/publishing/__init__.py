"""Publish the rows of a Spark job, without Spark: a plan for all tasks, and the work of one.

sink_plan       the options of the sink, and the nsqd to publish to
publish_task    one partition, and the outcome of each of its rows
row_outcomes    the counts of a task and a job, and the rows that were put aside
ledger          progress on disk, so that a task that is retried continues
"""
