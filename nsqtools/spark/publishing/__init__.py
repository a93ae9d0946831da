"""Publish the rows of a Spark job, without Spark: a plan for all tasks, and the work of one task.

publish_task    the options of the sink, one partition, and the outcome of each of its rows
row_outcomes    the counts of a task and a job, dead letters, and the ledger: progress on disk, from
                which a retried task continues
"""
