"""Compaction: archives to Parquet by topic and date, each message once, a closed day at a time.

    inventory          how many messages of which topic and day each archive holds; days in UTC
    compacted_output   the layout of the output, manifests, and how a partition is replaced
    compaction_plan    what to do: which days are closed, which files are new to them
    partition_job      one topic and day in Spark: read, unite, deduplicate, write, verify
    compaction_job     all of it in order, and which archives may be deleted then

The unit of work is a *partition*: one topic on one day (UTC). It is written to a staging directory,
read back and compared with what was read, and only then replaces the previous one, together with
its manifest, which lies inside it. So a run that is killed leaves a partition as it was or as it
will be, and the next run continues. An existing partition that gets late messages is united with
them: the archives that it was made from may be gone.

Bare bodies have no id, time and topic: all are kept, in a partition without topic and date. Such a
file is taken once, which its partition's manifest records.
"""
