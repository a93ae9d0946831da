"""``nsq to-file --topic-pattern`` beside nsq_to_file with many topics: draining them, and idle.

    python tests/benchmarks/fleet.py [--topics 200] [--messages 50] [--idle-s 10] [--ours-only]

Of each program, in turn against the same nsqd: the CPU seconds until every message is finished,
start-up included, and then what waiting costs: the share of a core, memory, descriptors, threads.
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
import time
from pathlib import Path
from tempfile import TemporaryDirectory

sys.path.insert(0, str(Path(__file__).parent.parent))

from plugins.daemons import GO_PROGRAMS, GoNsqd, GoNsqlookupd

TICKS = os.sysconf("SC_CLK_TCK")


def cpu_s(pid: int) -> float:
    """User and system time of all threads, those that ended included."""
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / TICKS


def status_of(pid: int, name: str) -> int:
    line = next(
        line for line in Path(f"/proc/{pid}/status").read_text().splitlines() if name in line
    )
    return int(line.split()[1])


def left(nsqd: GoNsqd, channel: str) -> int:
    """What the channels still have; topics that are not subscribed yet count whole."""
    total = 0
    for topic in nsqd.stats()["topics"] or ():
        channels = [each for each in topic["channels"] if each["channel_name"] == channel]
        total += sum(each["depth"] + each["in_flight_count"] for each in channels)
    return total


def measure(name: str, command: list[str], nsqd: GoNsqd, channel: str, idle_s: float) -> None:
    began = time.monotonic()
    program = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    try:
        while left(nsqd, channel):
            assert program.poll() is None, f"{name} ended: {program.returncode}"
            time.sleep(0.1)
        took_s, drained_s = time.monotonic() - began, cpu_s(program.pid)
        time.sleep(3)  # files are synced, messages finished
        before = cpu_s(program.pid)
        time.sleep(idle_s)
        idle = (cpu_s(program.pid) - before) / idle_s
        print(
            f"  {name:14} {took_s:6.1f} s {drained_s:6.2f} CPU s, idle {idle:6.2%} of a core, "
            f"{status_of(program.pid, 'VmRSS') / 1024:5.0f} MiB, "
            f"{len(os.listdir(f'/proc/{program.pid}/fd')):5} descriptors, "
            f"{status_of(program.pid, 'Threads'):3} threads"
        )
    finally:
        program.terminate()
        program.wait()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--topics", type=int, default=200)
    parser.add_argument("--messages", type=int, default=50, help="of each topic")
    parser.add_argument("--idle-s", type=float, default=10)
    parser.add_argument("--ours-only", action="store_true")
    options = parser.parse_args()
    ours = (sys.executable, "-m", "nsqtools", "to-file")
    with (
        TemporaryDirectory(prefix="fleet-") as name,
        GoNsqlookupd() as lookupd,
        GoNsqd(Path(name), f"-lookupd-tcp-address={lookupd.tcp_address}") as nsqd,
    ):
        where = lookupd.http_address
        mine = f"--topic-pattern ^fleet -c ours --output-dir {name}/ours --sync-interval 1s"
        theirs = f"-topic-pattern=^fleet -channel=theirs -output-dir={name}/theirs"
        theirs += f" -sync-interval=1s -lookupd-http-address={where}"
        programs = {
            "nsq to-file": [*ours, *mine.split(), "--lookupd-http-address", where],
            "nsq_to_file": [str(GO_PROGRAMS / "nsq_to_file"), *theirs.split()],
        }
        if options.ours_only:
            del programs["nsq_to_file"]
        for number in range(options.topics):
            topic = f"fleet{number:04d}"
            for channel in ("ours", "theirs"):
                nsqd.create_channel(topic, channel)
            nsqd.publish(topic, *[b"%0200d" % each for each in range(options.messages)])
        while len(lookupd.json("/topics")["topics"]) < options.topics:
            time.sleep(0.1)
        print(f"{options.topics} topics of {options.messages} messages, 200 bytes each")
        for program, command in programs.items():
            channel = "ours" if program == "nsq to-file" else "theirs"
            measure(program, command, nsqd, channel, options.idle_s)


if __name__ == "__main__":
    main()
