"""``nsq to-file`` beside nsq_to_file, into a directory on disk, fsynced before each FIN.

    python tests/benchmarks/archive.py [--messages 500000] [--rounds 3]

Messages are of 200 bytes.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from tempfile import TemporaryDirectory

sys.path.insert(0, str(Path(__file__).parent.parent))

from benchmarks import ours
from benchmarks.__main__ import run_rounds, table
from benchmarks.contestants import Contestant, Job
from benchmarks.measure import drain
from plugins.daemons import GO_PROGRAMS

OURS = (sys.executable, "-m", "nsqtools", "to-file")
GO = (str(GO_PROGRAMS / "nsq_to_file"),)

Command = Callable[[Job], Sequence[str]]


def nsq_to_file(directory: str, *flags: str) -> Command:
    return lambda job: (
        *GO,
        f"-topic={job.topic}",
        f"-channel={job.channel}",
        f"-nsqd-tcp-address={job.tcp_address}",
        f"-output-dir={directory}",
        "-max-in-flight=2500",
        "-sync-interval=1s",
        *flags,
    )


def to_file(directory: str, *flags: str) -> Command:
    place = ("--output-dir", directory)
    return lambda job: (*OURS, *ours.place_of(job), *place, *flags)


def contestants(directory: str) -> tuple[list[Contestant], list[Contestant]]:
    theirs = [
        Contestant("nsq_to_file", nsq_to_file(directory), share=0.4),
        Contestant("nsq_to_file gzip", nsq_to_file(directory, "-gzip"), share=0.4),
    ]
    own = [
        Contestant("to-file raw", to_file(directory, "--format", "raw")),
        Contestant("to-file raw gzip", to_file(directory, "--format", "raw", "--gzip")),
        Contestant("to-file jsonl gzip", to_file(directory, "--gzip")),
        Contestant(
            "to-file raw gzip zlib", to_file(directory, "--format", "raw", "--gzip-level", "6")
        ),
    ]
    return theirs, own


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--messages", type=int, default=500_000)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--only", action="append", help="a contestant's name; repeatable")
    arguments = parser.parse_args()
    with TemporaryDirectory(prefix="archive-") as directory:
        theirs, own = contestants(directory)
        chosen = [c for c in (*theirs, *own) if c.name in (arguments.only or [c.name])]
        found = run_rounds(drain, chosen, arguments.messages, arguments.rounds)
    print(table(found, [contestant.name for contestant in theirs]))
    print("targets: raw 3 x nsq_to_file, raw gzip 3 x and jsonl gzip 2 x nsq_to_file gzip")


if __name__ == "__main__":
    main()
