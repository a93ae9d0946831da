"""Our own programs, compared with those of peers.py in the same run."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from pathlib import Path

from benchmarks.contestants import Contestant, Job

NSQ = (sys.executable, "-m", "nsqtools")
LIBRARY_LOOP = str(Path(__file__).parent / "library_loop.py")


def tail(job: Job, *flags: str) -> Sequence[str]:
    place = ("-t", job.topic, "-c", job.channel, "--nsqd-tcp-address", job.tcp_address)
    return (*NSQ, "tail", *place, "--max-in-flight", "2500", *flags)


def pub(job: Job, *flags: str) -> Sequence[str]:
    return (*NSQ, "pub", "-t", job.topic, "--nsqd-tcp-address", job.tcp_address, *flags)


def library_loop(job: Job) -> Sequence[str]:
    return (sys.executable, LIBRARY_LOOP, job.tcp_address, job.topic, job.channel)


CONSUMERS = [Contestant("nsq tail", tail), Contestant("library loop", library_loop)]
PRODUCERS = [Contestant("nsq pub", pub)]
TRANSPORTS = [
    Contestant("nsq tail TLS", lambda job: tail(job, "--tls", "--tls-insecure")),
    Contestant("nsq tail snappy", lambda job: tail(job, "--snappy")),
    Contestant("nsq tail TLS+snappy", lambda job: tail(job, "--tls", "--tls-insecure", "--snappy")),
]
