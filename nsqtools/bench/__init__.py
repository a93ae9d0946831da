"""Bench: how fast an nsqd is, and how long messages take through it.

    bench.py      one measurement from the topic to its removal: the part to begin with
    bench_plan.py what is measured; bench_report.py what came of it; latency.py times, their spread
    crew.py       worker processes, seen from outside; worker.py is what they run
    publishing.py, consuming.py, bodies.py    what a worker does
    bench_topic.py    its topic by nsqd's HTTP API
    compare.py    two sides in turns; comparison.py whether they differ; program.py other programs
    counters.py   numbers that all processes see; processors.py how busy the machine was

Every connection has a process of its own, so that Python's lock is not what is measured, and each
one tells how much processor time it took: when the client was the limit the report says so.
"""
