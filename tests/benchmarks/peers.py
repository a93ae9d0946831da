"""The programs that ours are compared with."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from pathlib import Path

from benchmarks.contestants import Contestant, Job
from plugins.daemons import GO_PROGRAMS

HERE = Path(__file__).parent
BARE_LOOP = str(HERE / "bare_loop.py")
PYNSQ_CONSUMER = str(HERE / "pynsq_consumer.py")


def nsq_tail(job: Job) -> Sequence[str]:
    program = str(GO_PROGRAMS / "nsq_tail")
    place = (f"-topic={job.topic}", f"-channel={job.channel}")
    return (program, *place, f"-nsqd-tcp-address={job.tcp_address}", "-max-in-flight=2500")


def to_nsq(job: Job) -> Sequence[str]:
    program = str(GO_PROGRAMS / "to_nsq")
    return (program, f"-topic={job.topic}", f"-nsqd-tcp-address={job.tcp_address}")


def pynsq(job: Job) -> Sequence[str]:
    return (sys.executable, PYNSQ_CONSUMER, job.tcp_address, job.topic, job.channel)


def bare_consumer(job: Job) -> Sequence[str]:
    return (sys.executable, BARE_LOOP, "consume", job.tcp_address, job.topic, job.channel)


def bare_producer(job: Job) -> Sequence[str]:
    return (sys.executable, BARE_LOOP, "publish", job.tcp_address, job.topic)


CONSUMERS = [
    Contestant("nsq_tail", nsq_tail, share=0.4),
    Contestant("pynsq", pynsq, share=0.1),
    Contestant("bare loop", bare_consumer),
]

PRODUCERS = [
    Contestant("to_nsq", to_nsq, share=0.2),
    Contestant("bare MPUB loop", bare_producer),
]
