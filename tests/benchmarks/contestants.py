"""The programs that are compared, ours and their peers: a name, and an argument list for a job."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory

from plugins.daemons import GO_PROGRAMS, GoNsqd

HERE = Path(__file__).parent
NSQ = (sys.executable, "-m", "nsqtools")
BARE_LOOP = (sys.executable, str(HERE / "bare_loop.py"))
LIBRARY = (sys.executable, str(HERE / "library_programs.py"))
UNSENT_FINS = 1000  # bench_reader writes FINs when 200 are together, on two connections or more


@dataclass(frozen=True, slots=True)
class Job:
    """One measurement: where the messages are, or go."""

    tcp_address: str
    topic: str
    channel: str

    @property
    def ours(self) -> tuple[str, ...]:
        """The place in our words."""
        place = ("-t", self.topic, "-c", self.channel)
        return (*place, "--nsqd-tcp-address", self.tcp_address)

    @property
    def theirs(self) -> tuple[str, ...]:
        """The place in the words of the Go utilities."""
        place = (f"-topic={self.topic}", f"-channel={self.channel}")
        return (*place, f"-nsqd-tcp-address={self.tcp_address}")


Command = Callable[[Job], Sequence[str]]


@dataclass(frozen=True, slots=True)
class Contestant:
    """`command` makes the argument list. A slow one gets only a `share` of the messages. NSQ's own
    benchmarks leave some FINs unsent, or publish without end."""

    name: str
    command: Command
    share: float = 1.0
    leaves: int = 0
    is_endless: bool = False

    def portion(self, messages: int) -> int:
        return max(1, round(messages * self.share))


def nsq(command: str, *flags: str) -> Command:
    return lambda job: (*NSQ, command, *job.ours, *flags)


def go(program: str, *flags: str) -> Command:
    return lambda job: (str(GO_PROGRAMS / program), *job.theirs, *flags)


def tail(*flags: str) -> Command:
    return nsq("tail", "--max-in-flight", "2500", *flags)


def nsq_tail(*flags: str) -> Command:
    return go("nsq_tail", "-max-in-flight=2500", *flags)


def library(what: str, *flags: str) -> Command:
    def command(job: Job) -> Sequence[str]:
        channel = [job.channel] if what == "consume" else []
        return (*LIBRARY, what, job.tcp_address, job.topic, *channel, *flags)

    return command


def gonsq(what: str) -> Command:
    def command(job: Job) -> Sequence[str]:
        channel = [f"-channel={job.channel}"] if what == "consume" else []
        program = str(GO_PROGRAMS / "gonsq")
        return (program, what, f"-topic={job.topic}", *channel, f"-nsqd={job.tcp_address}")

    return command


def bare_publish(job: Job) -> Sequence[str]:
    return (*BARE_LOOP, "publish", job.tcp_address, job.topic)


def to_nsq(job: Job) -> Sequence[str]:
    to = (f"-topic={job.topic}", f"-nsqd-tcp-address={job.tcp_address}")
    return (str(GO_PROGRAMS / "to_nsq"), *to)


def bench_writer(job: Job) -> Sequence[str]:
    to = (f"-topic={job.topic}", f"-nsqd-tcp-address={job.tcp_address}")
    return (str(GO_PROGRAMS / "bench_writer"), *to, "-runfor=1h")


def bare_consume(job: Job) -> Sequence[str]:
    return (*BARE_LOOP, "consume", job.tcp_address, job.topic, job.channel)


def pynsq(job: Job) -> Sequence[str]:
    program = str(HERE / "pynsq_consumer.py")
    return (sys.executable, program, job.tcp_address, job.topic, job.channel)


def pub(job: Job) -> Sequence[str]:
    return (*NSQ, "pub", "-t", job.topic, "--nsqd-tcp-address", job.tcp_address)


TLS = ("--tls", "--tls-insecure")
TAILS = [
    Contestant("nsq_tail", nsq_tail(), share=0.2),
    Contestant("nsq_tail, 25 ms", nsq_tail("-consumer-opt=output_buffer_timeout,25ms"), share=0.2),
    Contestant("nsq tail", tail()),
]
CONSUMERS = [
    *TAILS,
    Contestant("go-nsq, 1 worker", gonsq("consume"), share=0.3),
    Contestant("pynsq", pynsq, share=0.1),
    Contestant("library loop", library("consume")),
    Contestant("run, 1 worker", library("consume", "--with=run")),
    Contestant("bench_reader", go("bench_reader", "-rdy=2500", "-runfor=1h"), leaves=UNSENT_FINS),
    Contestant("bare loop", bare_consume),
    Contestant("nsq tail TLS", tail(*TLS)),
    Contestant("nsq tail snappy", tail("--snappy")),
    Contestant("nsq tail TLS+snappy", tail(*TLS, "--snappy")),
]
PRODUCERS = [
    Contestant("to_nsq", to_nsq, share=0.2),
    Contestant("nsq pub", pub),
    Contestant("go-nsq PublishAsync", gonsq("publish"), share=0.2),
    Contestant("PUB", library("publish", "--with=pub"), share=0.2),
    Contestant("aio PUB", library("publish", "--with=aio"), share=0.2),
    Contestant("linger", library("publish", "--with=linger"), share=0.5),
    Contestant("bench_writer", bench_writer, is_endless=True),
    Contestant("bare MPUB loop", bare_publish),
]


def archivers(directory: str) -> list[Contestant]:
    """Into a directory on disk, fsynced before each FIN."""
    into = ("--output-dir", directory)
    flags = (f"-output-dir={directory}", "-max-in-flight=2500", "-sync-interval=1s")
    raw = (*into, "--format", "raw")
    return [
        Contestant("nsq_to_file", go("nsq_to_file", *flags), share=0.4),
        Contestant("nsq_to_file gzip", go("nsq_to_file", *flags, "-gzip"), share=0.4),
        Contestant("to-file raw", nsq("to-file", *raw)),
        Contestant("to-file raw gzip", nsq("to-file", *raw, "--gzip")),
        Contestant("to-file jsonl gzip", nsq("to-file", *into, "--gzip")),
        Contestant("to-file raw gzip zlib", nsq("to-file", *raw, "--gzip-level", "6")),
    ]


@contextmanager
def forwarders(what: str) -> Iterator[list[Contestant]]:
    """Those that forward to ``nsq`` or ``http``, while what they forward to is there."""
    if what == "nsq":
        with TemporaryDirectory() as there, GoNsqd(Path(there), "-mem-queue-size=5000000") as nsqd:
            to = nsqd.tcp_address
            flags = ("-destination-topic=copies", f"-destination-nsqd-tcp-address={to}")
            own = ("--destination-topic", "copies", "--destination-nsqd-tcp-address", to)
            yield [
                Contestant("nsq_to_nsq", go("nsq_to_nsq", "-status-every=0", *flags)),
                Contestant("nsq to-nsq", nsq("to-nsq", *own, "--no-loop-guard")),
            ]
        return
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE}
    with subprocess.Popen([GO_PROGRAMS / "http_sink"], text=True, **pipes) as server:
        assert server.stdout is not None
        url = f"http://{server.stdout.readline().strip()}/"
        go_http = go("nsq_to_http", "-status-every=0", "-post", url)
        yield [  # a request takes longer than a publish
            Contestant("nsq_to_http", go_http, share=0.2),
            Contestant("nsq to-http", nsq("to-http", "--post", url), share=0.2),
        ]
        assert server.stdin is not None
        server.stdin.close()
