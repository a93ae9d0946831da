"""Bench: how fast an nsqd is, and how long messages take through it.

    bench.py      one measurement from the topic to its removal: the part to begin with
    plan.py       what is measured; report.py what came of it; latency.py times and their spread
    crew.py       worker processes, seen from outside; worker.py is what they run
    publishing.py, consuming.py, bodies.py    what a worker does
    counters.py   numbers that all processes see; processors.py how busy the machine was

Every connection has a process of its own, so that Python's lock is not what is measured, and each
one tells how much processor time it took: when the client was the limit the report says so.
"""
