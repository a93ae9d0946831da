"""``nsq to-nsq`` beside nsq_to_nsq, and ``nsq to-http`` beside nsq_to_http, in one run.

    python tests/benchmarks/forward.py nsq --messages 600000 --rounds 3
    python tests/benchmarks/forward.py http --messages 100000 --rounds 3

From a full channel until nothing is left of it. The endpoint is a Go server that answers 200
(tests/go/http_sink).
"""

from __future__ import annotations

import argparse
import subprocess
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from tempfile import TemporaryDirectory

sys.path.insert(0, str(Path(__file__).parent.parent))

from benchmarks import ours
from benchmarks.__main__ import everything_in_memory, table
from benchmarks.contestants import Contestant, Job
from benchmarks.measure import Measured, drain
from plugins.daemons import GO_PROGRAMS, GoNsqd

HTTP_SHARE = 0.2  # of the messages: a request takes longer than a publish


def go(program: str, job: Job) -> Sequence[str]:
    place = (f"-topic={job.topic}", f"-channel={job.channel}", "-status-every=0")
    return (str(GO_PROGRAMS / program), *place, f"-nsqd-tcp-address={job.tcp_address}")


def own(command: str, job: Job) -> Sequence[str]:
    place = ("-t", job.topic, "-c", job.channel, "--nsqd-tcp-address", job.tcp_address)
    return (*ours.NSQ, command, *place)


def to_nsq(target: str) -> list[Contestant]:
    """Forward to the nsqd at ``target``."""

    def theirs(job: Job) -> Sequence[str]:
        return (
            *go("nsq_to_nsq", job),
            "-destination-topic=copies",
            f"-destination-nsqd-tcp-address={target}",
        )

    def mine(job: Job) -> Sequence[str]:
        there = ("--destination-nsqd-tcp-address", target, "--destination-topic", "copies")
        return (*own("to-nsq", job), *there, "--no-loop-guard")

    return [Contestant("nsq_to_nsq", theirs), Contestant("nsq to-nsq", mine)]


def to_http(url: str) -> list[Contestant]:
    """Forward to the endpoint at ``url``."""
    return [
        Contestant("nsq_to_http", lambda job: (*go("nsq_to_http", job), "-post", url), HTTP_SHARE),
        Contestant("nsq to-http", lambda job: (*own("to-http", job), "--post", url), HTTP_SHARE),
    ]


@contextmanager
def contestants(what: str) -> Iterator[list[Contestant]]:
    """Those that forward to ``nsq`` or ``http``, while what they forward to is there."""
    if what == "nsq":
        with TemporaryDirectory() as there, GoNsqd(Path(there), "-mem-queue-size=5000000") as nsqd:
            yield to_nsq(nsqd.tcp_address)
    else:
        with http_sink() as url:
            yield to_http(url)


@contextmanager
def http_sink() -> Iterator[str]:
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE}
    with subprocess.Popen([GO_PROGRAMS / "http_sink"], text=True, **pipes) as server:
        assert server.stdout is not None
        yield f"http://{server.stdout.readline().strip()}/"
        assert server.stdin is not None
        server.stdin.close()


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("what", choices=["nsq", "http"])
    parser.add_argument("--messages", type=int, default=500_000)
    parser.add_argument("--rounds", type=int, default=3)
    given = parser.parse_args()
    found: dict[str, list[Measured]] = {}
    for _ in range(given.rounds):
        with everything_in_memory(given.messages) as source, contestants(given.what) as chosen:
            for each in chosen:
                found.setdefault(each.name, []).append(drain(source, each, given.messages))
    print(table(found, [next(iter(found))]))


if __name__ == "__main__":
    main()
