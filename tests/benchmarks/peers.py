"""The programs that ours are compared with."""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from pathlib import Path

from benchmarks.contestants import FEW_IN_FLIGHT, Contestant, Job
from plugins.daemons import GO_PROGRAMS

HERE = Path(__file__).parent
BARE_LOOP = str(HERE / "bare_loop.py")
PYNSQ_CONSUMER = str(HERE / "pynsq_consumer.py")
UNSENT_FINS = 1000  # bench_reader writes FINs when 200 are together, on two connections or more


def nsq_tail(job: Job, *flags: str) -> Sequence[str]:
    program = str(GO_PROGRAMS / "nsq_tail")
    place = (f"-topic={job.topic}", f"-channel={job.channel}")
    return (program, *place, f"-nsqd-tcp-address={job.tcp_address}", "-max-in-flight=2500", *flags)


def nsq_tail_as_ours(job: Job) -> Sequence[str]:
    """With the buffer timeout that ``nsq tail`` asks nsqd for; its default is 250 ms."""
    return nsq_tail(job, "-consumer-opt=output_buffer_timeout,25ms")


def bench_reader(job: Job) -> Sequence[str]:
    program = str(GO_PROGRAMS / "bench_reader")
    place = (f"-topic={job.topic}", f"-channel={job.channel}", "-rdy=2500", "-runfor=1h")
    return (program, *place, f"-nsqd-tcp-address={job.tcp_address}")


def bench_writer(job: Job) -> Sequence[str]:
    program = str(GO_PROGRAMS / "bench_writer")
    return (program, f"-topic={job.topic}", "-runfor=1h", f"-nsqd-tcp-address={job.tcp_address}")


def to_nsq(job: Job) -> Sequence[str]:
    program = str(GO_PROGRAMS / "to_nsq")
    return (program, f"-topic={job.topic}", f"-nsqd-tcp-address={job.tcp_address}")


def pynsq(job: Job) -> Sequence[str]:
    return (sys.executable, PYNSQ_CONSUMER, job.tcp_address, job.topic, job.channel)


def bare_consumer(job: Job) -> Sequence[str]:
    return (sys.executable, BARE_LOOP, "consume", job.tcp_address, job.topic, job.channel)


def bare_producer(job: Job) -> Sequence[str]:
    return (sys.executable, BARE_LOOP, "publish", job.tcp_address, job.topic)


def gonsq(job: Job, *flags: str, where: str = "") -> Sequence[str]:
    program = str(GO_PROGRAMS / "gonsq")
    place = (f"-topic={job.topic}", f"-channel={job.channel}")
    return (program, "consume", *place, f"-nsqd={where or job.tcp_address}", *flags)


def gonsq_from_many(count: int) -> Callable[[Job], Sequence[str]]:
    def command(job: Job) -> Sequence[str]:
        return gonsq(job, *FEW_IN_FLIGHT, where=",".join(job.many_addresses(count)))

    return command


def gonsq_publish(job: Job) -> Sequence[str]:
    program = str(GO_PROGRAMS / "gonsq")
    return (program, "publish", f"-topic={job.topic}", f"-nsqd={job.tcp_address}")


HANDLERS = [
    Contestant("go-nsq, 1 worker", gonsq, share=0.5),
    Contestant("go-nsq, 16 workers", lambda job: gonsq(job, "-workers=16"), share=0.5),
]

CONNECTIONS = [
    Contestant("go-nsq, 200", gonsq_from_many(200), share=0.3),
    Contestant("go-nsq, 500", gonsq_from_many(500), share=0.3),
]

BENCH_READER = Contestant("bench_reader", bench_reader, leaves=UNSENT_FINS)
BENCH_WRITER = Contestant("bench_writer", bench_writer, is_endless=True)
LIBRARY_PRODUCERS = [Contestant("go-nsq PublishAsync", gonsq_publish, share=0.2)]

CONSUMERS = [
    Contestant("nsq_tail", nsq_tail, share=0.4),
    Contestant("pynsq", pynsq, share=0.1),
    Contestant("bare loop", bare_consumer),
]

PRODUCERS = [
    Contestant("to_nsq", to_nsq, share=0.2),
    Contestant("bare MPUB loop", bare_producer),
]
