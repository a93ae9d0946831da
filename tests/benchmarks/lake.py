"""Landing of topics and logs into tables, which are then compared with their logs.

An Arrow log is landed in this process alone, so CPU is the cost of a message beyond the log.
"""

import os
import subprocess
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from tempfile import TemporaryDirectory

from benchmarks.contestants import OURS, Contestant
from benchmarks.logs import make_logs
from benchmarks.measure import Figures, cost, fill, in_turns, new_job
from benchmarks.parts import MOST, everything_in_memory
from benchmarks.raw import Row

from nsqtools.archive.landing import Lander
from nsqtools.archive.layout import index_of
from nsqtools.archive.table_writer import TablePlan
from nsqtools.records.envelope import BodyKind


def landing(messages: int, rounds: int) -> Iterator[Row]:
    with TemporaryDirectory(prefix="nsq-landing-") as place:
        make_logs(Path(place), messages, 1, suffix=".log.arrow")
        [log] = Path(place).glob("*.log.arrow")
        contestants = {
            "a log into Parquet": partial(land, log, False, "string", messages),
            "a log into Delta": partial(land, log, True, "string", messages),
            "with columns of JSON bodies": partial(land, log, True, "json", messages),
        }
        yield from in_turns(contestants, messages, rounds)


def land(log: Path, is_delta: bool, kind: str, messages: int) -> Figures:
    with TemporaryDirectory(dir=log.parent) as place:
        logs = Path(place, "logs")
        logs.mkdir()
        for path in (log, index_of(log)):  # landing deletes them
            (logs / path.name).hardlink_to(path)
        plan = TablePlan(str(Path(place, "table")), is_delta, "web1", BodyKind(kind))
        landed = Lander(plan, logs).land([logs / log.name])
        assert not landed.refused, landed.refused
        return {"row_bytes": sum(file.bytes for file in landed.files) / messages}


def sustained(messages: int, rounds: int) -> Iterator[Row]:
    """Run ``nsq to-file --store`` until all messages are finished, landed and compared."""
    with everything_in_memory(MOST) as nsqd:
        for number in range(rounds):
            for store in ("parquet", "delta"):
                with new_job(nsqd) as job, TemporaryDirectory(prefix="nsq-lake-") as place:
                    nsqd.create_channel(job.topic, job.channel)
                    fill(nsqd, job, messages)
                    into = f"--output-dir {place}/logs --store {store} --upload {place}/lake"
                    line = f"nsq to-file {OURS} {into} --rotate-size 64MiB --count {messages}"
                    to_file = Contestant(f"`nsq to-file --store {store}`", line)
                    before_s = ended_cpu_s()  # without the CPU time of nsqd
                    figures = cost(partial(_run, to_file.command(job)), messages)
                    cpu_us = (ended_cpu_s() - before_s) / messages * 1e6
                    yield Row(to_file.name, number, {**figures, "cpu_us": cpu_us})


def ended_cpu_s() -> float:
    """CPU time of child processes that have ended."""
    return sum(os.times()[2:4])


def _run(command: list[str]) -> None:
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        raise RuntimeError(done.stderr[-300:])
