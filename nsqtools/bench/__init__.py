"""Bench: how fast an nsqd is, and how long messages take through it.

    bench.py           one measurement from the topic to its removal: the part to begin with
    bench_plan.py      what is measured, the messages, and what came of it
    crew.py            worker processes, seen from outside, and the numbers that they share
    worker.py          what a worker does

Every connection has a process of its own, so that Python's lock is not what is measured, and each
one tells how much processor time it took: when the client was the limit the report says so.
"""
