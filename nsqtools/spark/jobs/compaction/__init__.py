"""Compaction: archives to Parquet by topic and date, each message once, a closed day at a time.

    days        which day a time is on, and when a day is over
    inventory   what archives hold: how many messages of which topic and day are in which file
    layout      where things are in the output, and how one partition takes another's place
    manifest    what a partition was made from and what came out
    plan        what is to be done: which days are closed, which files are new to them
    partition   one topic and day in Spark: read, union, deduplicate, write, read back
    deletion    which archives are not needed any more
    job         all of it, in order

The unit of work is a *partition*: one topic on one day (UTC). It is written into a directory
aside, read back and compared with what was read, and only then takes the place of the one before,
together with its manifest, which lies inside of it. So a run that is killed leaves a partition as
it was or as it will be, and the next run goes on from there. A partition that is there and gets
late messages is united with them: the archives that it was made from may be gone.

Bare bodies have no id, time and topic: they are all kept, in a partition without topic and date.
Such a file is taken once, which its partition's manifest remembers.
"""
