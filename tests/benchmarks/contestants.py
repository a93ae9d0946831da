"""The programs that are compared, ours and their peers: names in tables, and command lines."""

import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import NamedTuple

from plugins.daemons import GO_PROGRAMS, GoNsqd

HERE = Path(__file__).parent
NSQ = (sys.executable, "-m", "nsqtools")
UNSENT_FINS = 1000  # bench_reader writes FINs when 200 are together, on two connections or more


class Job(NamedTuple):
    """The source or destination of one measurement.

    ``each_nsqd`` has an address for each connection, separated by commas.
    """

    nsqd: str
    topic: str
    channel: str
    each_nsqd: str = ""


@dataclass(frozen=True, slots=True)
class Contestant:
    """A program: ``line`` is nsq, a Go program or a script in this directory, and its arguments.

    The arguments may have the fields of a `Job`. A slow contestant gets only a ``share`` of the
    messages. NSQ's own benchmarks leave some FINs unsent, or publish without end.
    """

    name: str
    line: str
    share: float = 1.0
    leaves: int = 0
    is_endless: bool = False

    def command(self, job: Job) -> list[str]:
        program, *arguments = self.line.format_map(job._asdict()).split()
        if program == "nsq":
            return [*NSQ, *arguments]
        if program.endswith(".py"):
            return [sys.executable, str(HERE / program), *arguments]
        return [str(GO_PROGRAMS / program), *arguments]


# the source of messages: for nsq, for the Go utilities, and for a script
OURS = "-t {topic} -c {channel} --nsqd-tcp-address {nsqd}"
GO_TOPIC = "-topic={topic} -nsqd-tcp-address={nsqd}"
GO = f"{GO_TOPIC} -channel={{channel}}"
PLACE = "{nsqd} {topic} {channel}"

NSQ_TAIL = f"nsq_tail {GO} -max-in-flight=2500"
SOON = "-consumer-opt=output_buffer_timeout,25ms"
TAIL = f"nsq tail {OURS} --max-in-flight 2500"
PROGRAM = "library_programs.py {} {{nsqd}} {{topic}}".format
TAILS = [
    Contestant("nsq_tail", NSQ_TAIL, share=0.2),
    Contestant("nsq_tail, 25 ms", f"{NSQ_TAIL} {SOON}", share=0.2),
    Contestant("`nsq tail`", TAIL),
]
CONSUMERS = [
    *TAILS,
    Contestant("go-nsq", "gonsq consume -topic={topic} -channel={channel} -nsqd={nsqd}", share=0.3),
    Contestant("pynsq", f"library_programs.py pynsq {PLACE}", share=0.1),
    Contestant("`for` loop", f"library_programs.py loop {PLACE}"),
    Contestant("`run(handler)`", f"library_programs.py run {PLACE}"),
    Contestant("bench_reader", f"bench_reader {GO} -rdy=2500 -runfor=1h", leaves=UNSENT_FINS),
    Contestant("bare loop", f"bare_loop.py consume {PLACE}"),
    Contestant("`nsq tail --tls`", f"{TAIL} --tls --tls-insecure"),
    Contestant("`nsq tail --snappy`", f"{TAIL} --snappy"),
    Contestant("with both", f"{TAIL} --tls --tls-insecure --snappy"),
]
PRODUCERS = [
    Contestant("to_nsq", f"to_nsq {GO_TOPIC}", share=0.2),
    Contestant("`nsq pub`", "nsq pub -t {topic} --nsqd-tcp-address {nsqd}"),
    Contestant("go-nsq", "gonsq publish -topic={topic} -nsqd={nsqd}", share=0.2),
    Contestant("`Producer`", PROGRAM("pub"), share=0.2),
    Contestant("`aio.Producer`", PROGRAM("aio"), share=0.2),
    Contestant("`Producer`, linger_s", PROGRAM("linger"), share=0.5),
    Contestant("bench_writer", f"bench_writer {GO_TOPIC} -runfor=1h", is_endless=True),
    Contestant("bare MPUB loop", "bare_loop.py publish {nsqd} {topic}"),
]


EACH = "{each_nsqd} {topic} {channel}"
CLIENTS = [
    Contestant("go-nsq", "gonsq consume -topic={topic} -channel={channel} -nsqd={each_nsqd}"),
    Contestant("`run(handler)`", f"library_programs.py run {EACH}"),
    Contestant("`for` loop", f"library_programs.py loop {EACH}"),
    Contestant("`aio`, run", f"library_programs.py aio-run {EACH}"),
    Contestant("pynsq", f"library_programs.py pynsq {EACH}", share=0.1),
]
GO_LONE = "gonsq lone -topic={topic} -nsqd={nsqd} -sleep={seconds}s -workers="
ONE_BY_ONE = {
    "go-nsq, one by one": f"{GO_LONE}1",
    "`Producer`, one by one": "library_programs.py lone {nsqd} {topic} {seconds} 1",
    "go-nsq, 100 goroutines": f"{GO_LONE}100",
    "`Producer`, 100 threads": "library_programs.py lone {nsqd} {topic} {seconds} 100",
    "`aio.Producer`, 1,000 tasks": "library_programs.py aio-lone {nsqd} {topic} {seconds} 1000",
}


@contextmanager
def archivers() -> Iterator[list[Contestant]]:
    """Archivers write into a directory on disk, fsynced before each FIN."""
    with TemporaryDirectory(prefix="archive-") as place:
        go = f"nsq_to_file {GO} -output-dir={place} -max-in-flight=2500 -sync-interval=1s"
        lines = f"nsq to-file {OURS} --output-dir {place}"
        raw = f"{lines} --format raw"
        yield [
            Contestant("nsq_to_file", go, share=0.4),
            Contestant("nsq_to_file -gzip", f"{go} -gzip", share=0.4),
            Contestant("`nsq to-file`, raw", raw),
            Contestant("raw, gzip", f"{raw} --gzip"),
            Contestant("JSON lines, gzip", f"{lines} --gzip"),
            Contestant("raw, gzip level 6", f"{raw} --gzip-level 6"),
        ]


@contextmanager
def to_another_nsqd() -> Iterator[list[Contestant]]:
    with TemporaryDirectory() as there, GoNsqd(Path(there), "-mem-queue-size=5000000") as nsqd:
        to = f"--destination-topic=copies --destination-nsqd-tcp-address={nsqd.tcp_address}"
        yield [  # Go accepts two dashes as well
            Contestant("nsq_to_nsq", f"nsq_to_nsq {GO} -status-every=0 {to}"),
            Contestant("`nsq to-nsq`", f"nsq to-nsq {OURS} {to} --no-loop-guard"),
        ]


@contextmanager
def to_http() -> Iterator[list[Contestant]]:
    """Forward over HTTP; a request takes longer than a publish."""
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE}
    with subprocess.Popen([GO_PROGRAMS / "http_sink"], text=True, **pipes) as server:
        url = f"http://{server.stdout.readline().strip()}/"
        yield [
            Contestant("nsq_to_http", f"nsq_to_http {GO} -status-every=0 -post {url}", share=0.2),
            Contestant("`nsq to-http`", f"nsq to-http {OURS} --post {url}", share=0.2),
        ]
        server.stdin.close()
