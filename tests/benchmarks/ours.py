"""Our own programs, compared with those of peers.py in the same run."""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from pathlib import Path

from benchmarks.contestants import FEW_IN_FLIGHT, Contestant, Job

NSQ = (sys.executable, "-m", "nsqtools")
LIBRARY = (sys.executable, str(Path(__file__).parent / "library_programs.py"))


def place_of(job: Job) -> tuple[str, ...]:
    return ("-t", job.topic, "-c", job.channel, "--nsqd-tcp-address", job.tcp_address)


def tail(job: Job, *flags: str) -> Sequence[str]:
    return (*NSQ, "tail", *place_of(job), "--max-in-flight", "2500", *flags)


def pub(job: Job, *flags: str) -> Sequence[str]:
    return (*NSQ, "pub", "-t", job.topic, "--nsqd-tcp-address", job.tcp_address, *flags)


def consume(job: Job, *flags: str) -> Sequence[str]:
    return (*LIBRARY, "consume", job.tcp_address, job.topic, job.channel, *flags)


def consume_from_many(count: int) -> Callable[[Job], Sequence[str]]:
    """Consume over so many connections with at most 100 messages in flight."""

    def command(job: Job) -> Sequence[str]:
        where = ",".join(job.many_addresses(count))
        return (*LIBRARY, "consume", where, job.topic, job.channel, "--with=run", *FEW_IN_FLIGHT)

    return command


def publish(job: Job, how: str) -> Sequence[str]:
    return (*LIBRARY, "publish", job.tcp_address, job.topic, f"--with={how}")


CONSUMERS = [Contestant("nsq tail", tail), Contestant("library loop", consume)]
HANDLERS = [
    Contestant("run, 1 worker", lambda job: consume(job, "--with=run")),
    Contestant("run, 16 workers", lambda job: consume(job, "--with=run", "--workers=16")),
    Contestant("aio loop", lambda job: consume(job, "--with=aio")),
    Contestant("library loop", consume),
]
CONNECTIONS = [
    Contestant("run, 200", consume_from_many(200), share=0.3),
    Contestant("run, 500", consume_from_many(500), share=0.3),
]
LIBRARY_PRODUCERS = [
    Contestant("PUB", lambda job: publish(job, "pub"), share=0.2),
    Contestant("aio PUB", lambda job: publish(job, "aio"), share=0.2),
    Contestant("linger", lambda job: publish(job, "linger"), share=0.5),
]
PRODUCERS = [Contestant("nsq pub", pub)]
TRANSPORTS = [
    Contestant("nsq tail TLS", lambda job: tail(job, "--tls", "--tls-insecure")),
    Contestant("nsq tail snappy", lambda job: tail(job, "--snappy")),
    Contestant("nsq tail TLS+snappy", lambda job: tail(job, "--tls", "--tls-insecure", "--snappy")),
]
