"""Bench: how fast an nsqd is, and how long messages take through it.

    bench.py           one measurement, from creating the topic to removing it: start reading here
    bench_plan.py      the plan of a measurement, its messages and its report
    worker.py          the work of one process; starting and watching them; their shared counters

Each connection runs in its own process, so that the measurement does not include contention for
Python's lock. Each process measures its processor time, and the report names the client as the
limit when a process was busy all the time.
"""
