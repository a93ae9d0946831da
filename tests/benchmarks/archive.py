"""``nsq to-file`` beside nsq_to_file, into a directory on disk, fsynced before each FIN.

    python tests/benchmarks/archive.py [--messages 500000] [--rounds 3]

Messages are of 200 bytes. Last comes the memory of ours, in a run of its own.
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from tempfile import TemporaryDirectory

sys.path.insert(0, str(Path(__file__).parent.parent))

from benchmarks.__main__ import run_rounds, table
from benchmarks.contestants import Contestant, Job
from benchmarks.measure import drain_rate, fill, new_job
from plugins.daemons import GO_PROGRAMS, GoNsqd

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
    return lambda job: (
        *OURS,
        *("-t", job.topic, "-c", job.channel, "--nsqd-tcp-address", job.tcp_address),
        *place,
        *flags,
    )


def contestants(directory: str) -> tuple[list[Contestant], list[Contestant]]:
    theirs = [
        Contestant("nsq_to_file", nsq_to_file(directory), share=0.4),
        Contestant("nsq_to_file gzip", nsq_to_file(directory, "-gzip"), share=0.4),
    ]
    ours = [
        Contestant("to-file raw", to_file(directory, "--format", "raw")),
        Contestant("to-file raw gzip", to_file(directory, "--format", "raw", "--gzip")),
        Contestant("to-file jsonl gzip", to_file(directory, "--gzip")),
        Contestant("to-file raw zstd", to_file(directory, "--format", "raw", "--zstd-level", "3")),
        Contestant("to-file jsonl zstd", to_file(directory, "--compression", "zstd")),
        Contestant("to-file jsonl gzip -1", to_file(directory, "--gzip-level", "1")),
        Contestant("to-file jsonl gzip -6", to_file(directory, "--gzip-level", "6")),
    ]
    return theirs, ours


def peak_memory_mib(directory: str, messages: int) -> float:
    """The most memory that a run takes which drains so many messages."""
    with (
        TemporaryDirectory(prefix="nsqd-") as data_path,
        GoNsqd(Path(data_path), f"-mem-queue-size={messages}") as nsqd,
        new_job(nsqd) as job,
    ):
        nsqd.create_channel(job.topic, job.channel)
        fill(nsqd, job, messages)
        command = to_file(directory, "--gzip", "--until-empty")(job)
        program = subprocess.Popen(command, stderr=subprocess.DEVNULL)
        _, status, usage = os.wait4(program.pid, 0)
        program.returncode = os.waitstatus_to_exitcode(status)
        return usage.ru_maxrss / 1024


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--messages", type=int, default=500_000)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--only", action="append", help="a contestant's name; repeatable")
    arguments = parser.parse_args()
    with TemporaryDirectory(prefix="archive-") as directory:
        theirs, ours = contestants(directory)
        chosen = [c for c in (*theirs, *ours) if c.name in (arguments.only or [c.name])]
        rates = run_rounds(drain_rate, chosen, arguments.messages, arguments.rounds)
        memory_mib = peak_memory_mib(directory, arguments.messages)
    print(table(rates, [contestant.name for contestant in theirs]))
    print("targets: raw 3 x nsq_to_file, raw gzip 3 x and jsonl gzip 2 x nsq_to_file gzip")
    print(f"memory of to-file jsonl gzip: {memory_mib:.0f} MiB (target: under 80)")


if __name__ == "__main__":
    main()
