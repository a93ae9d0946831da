"""The cost of programs as nsqd and the kernel see it, independent of the output of a program.

A measurement polls nsqd's statistics every few milliseconds. It lasts from the last response that
shows no progress to the first that shows the end, so the start-up of a program counts only in
the figures ``whole_*``. The error is at most two poll intervals: use enough messages for two
seconds or more. CPU time, peak memory and descriptors are the kernel's figures.
"""

import itertools
import os
import random
import resource
import subprocess
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

from benchmarks import bare_loop
from benchmarks.contestants import Contestant, Job
from benchmarks.raw import Row
from plugins.daemons import Nsqd
from plugins.waiting import wait_until

POLL_S = 0.01
LOOK_S = 0.1  # between two samples of memory and descriptors
STALLED_S = 60.0  # a program that starts on a loaded machine may take 10

Figures = dict[str, float]

BODY = b"x" * 200
BATCH_SIZE = 500


def log_line(chance: random.Random) -> bytes:
    """A line of JSON of 200 bytes, as in a log."""
    user, path = chance.getrandbits(32), (chance.randrange(100), chance.randrange(10_000))
    line = b'{"user":"%08x","path":"/shop/%d/item-%d","status":200,' % (user, *path)
    line += b'"ms":%.3f,"agent":"Mozilla/5.0 (X11; Linux x86_64) Firefox","trace":"' % (
        chance.random() * 90
    )
    return line + b"%0*x" % (198 - len(line), chance.getrandbits(128)) + b'"}'


# So many different lines that a compressor meets none of them again within its window.
LINES = [log_line(chance) for chance in [random.Random(20)] for _ in range(BATCH_SIZE)]

_CPU_CLOCK = 2  # CPUCLOCK_SCHED of the kernel: all threads, including ended ones
_job_numbers = itertools.count(1)


class Watched:
    """The resources that a process has used so far: the peaks of memory and descriptors."""

    def __init__(self, pid: int) -> None:
        self._pid = pid
        self._looked = -LOOK_S
        self.cpu_s = self.peak_mb = 0.0
        self.descriptors = 0

    def look(self) -> None:
        """Sample the kernel's figures. A process that has ended keeps its last ones."""
        try:
            self.cpu_s = time.clock_gettime((~self._pid << 3) | _CPU_CLOCK)
            if time.monotonic() - self._looked > LOOK_S:
                self._looked = time.monotonic()
                place = Path(f"/proc/{self._pid}")
                self.descriptors = max(self.descriptors, len(os.listdir(place / "fd")))
                for line in (place / "status").read_text().splitlines():
                    if line.startswith("VmHWM"):
                        self.peak_mb = int(line.split()[1]) / 1000
        except OSError:
            pass


def drain(nsqd: Nsqd, contestant: Contestant, messages: int, *, connections: int = 1) -> Figures:
    """Finish messages, while the output goes to /dev/null."""
    with new_job(nsqd, connections) as job:
        nsqd.create_channel(job.topic, job.channel)
        fill(nsqd, job, messages)

        def finished() -> int:
            channel = nsqd.channel_stats(job.topic, job.channel)
            return messages - int(channel["depth"] + channel["in_flight_count"])

        began = time.monotonic()
        with running(contestant.command(job), stdout=subprocess.DEVNULL) as program:
            return measured(finished, messages - contestant.leaves, program, began)


def publish(nsqd: Nsqd, contestant: Contestant, messages: int) -> Figures:
    """Publish the lines of a pipe; the program must succeed and publish every line once.

    An endless contestant reads no line and is killed when nsqd has as many messages.
    """
    make_lines = ["sh", "-c", f"yes {BODY.decode()} | head -n {messages}"]
    with new_job(nsqd) as job, running(make_lines, stdout=subprocess.PIPE) as source:
        nsqd.create_topic(job.topic)

        def published() -> int:
            return int(nsqd.topic_stats(job.topic)["message_count"])

        began = time.monotonic()
        with running(contestant.command(job), stdin=source.stdout) as program:
            figures = measured(published, messages, program, began)
            if contestant.is_endless:
                return figures
            status = program.wait(STALLED_S)
        if status != 0 or published() != messages:
            raise RuntimeError(f"{contestant.name}: {published()} of {messages} published")
        return figures


def publish_one_by_one(nsqd: Nsqd, contestant: Contestant, seconds: float) -> Figures:
    """Publish for some seconds. The program prints its number of publishes, and its latencies."""
    with new_job(nsqd) as job:
        earlier = resource.getrusage(resource.RUSAGE_CHILDREN)
        output = subprocess.check_output(
            contestant.command(job), text=True, timeout=STALLED_S + seconds
        )
        after = resource.getrusage(resource.RUSAGE_CHILDREN)
    count, p50_us, p99_us = map(int, output.split())
    cpu_s = after.ru_utime + after.ru_stime - earlier.ru_utime - earlier.ru_stime
    figures = {"rate": count / seconds, "cpu_us": cpu_s / count * 1e6}
    return {**figures, "p50_us": p50_us, "p99_us": p99_us}


def measured(
    done: Callable[[], int], goal: int, program: subprocess.Popen[bytes], began_s: float
) -> Figures:
    """Watch a program until ``done()`` is ``goal``. Raise `RuntimeError` if it ends earlier."""
    watched = Watched(program.pid)
    first = last_progress = time.monotonic()
    before, first_cpu_s = 0, 0.0
    while True:
        watched.look()
        if (now_done := done()) >= goal:
            break
        now = time.monotonic()
        if now_done == 0:
            first, first_cpu_s = now, watched.cpu_s
        if now_done != before:
            before, last_progress = now_done, now
        if program.poll() or now - last_progress > STALLED_S:
            raise RuntimeError(f"{program.args!r} stopped at {now_done} of {goal} messages")
        time.sleep(POLL_S)
    ended = time.monotonic()
    watched.look()
    seconds, whole_s, cpu_s = ended - first, ended - began_s, watched.cpu_s - first_cpu_s
    return {
        "messages": now_done,
        "seconds": seconds,
        "whole_s": whole_s,
        "cpu_s": cpu_s,
        "whole_cpu_s": watched.cpu_s,
        "peak_mb": watched.peak_mb,
        "descriptors": watched.descriptors,
        "rate": now_done / seconds,
        "whole_rate": now_done / whole_s,
        "cpu_us": cpu_s / now_done * 1e6,
    }


def fill(nsqd: Nsqd, job: Job, messages: int) -> None:
    """Publish messages to the topic, and wait until they are in the channel."""
    full, remainder = divmod(messages, BATCH_SIZE)
    batches = [bare_loop.packed(LINES)] * full + (
        [bare_loop.packed(LINES[:remainder])] if remainder else []
    )
    bare_loop.publish(job.nsqd, job.topic, batches)
    wait_until(lambda: nsqd.depth(job.topic, job.channel) == messages, what="all", timeout_s=60)


@contextmanager
def new_job(nsqd: Nsqd, connections: int = 1) -> Iterator[Job]:
    """Make a new topic, and delete it afterwards to free its memory.

    Several connections need an nsqd that listens on all addresses: each has its own loopback one.
    """
    address = nsqd.tcp_address.replace("[::]", "127.0.0.1")
    port = address.rpartition(":")[2]
    addresses = [f"127.{1 + n // 250}.0.{1 + n % 250}:{port}" for n in range(connections)]
    each_nsqd = ",".join(addresses) if connections > 1 else address
    yield (job := Job(address, f"benchmark_{next(_job_numbers)}", "archive", each_nsqd))
    nsqd.post("/topic/delete", topic=job.topic)


@contextmanager
def running(command: Sequence[str], **streams: Any) -> Iterator[subprocess.Popen[bytes]]:
    """Run a program as a user would: without the settings of the tests."""
    testing = {"PYTHONDONTWRITEBYTECODE", "PYTHONUNBUFFERED"}
    environment = {name: value for name, value in os.environ.items() if name not in testing}
    streams = {"stderr": subprocess.DEVNULL, **streams}
    with subprocess.Popen(command, env=environment, **streams) as program:
        try:
            yield program
        finally:
            program.kill()  # pynsq would take five seconds to end by itself


def in_turns(
    contestants: Mapping[str, Callable[[], object]], messages: int, rounds: int
) -> Iterator[Row]:
    """Run all contestants in each round, after a warm-up round for imports and the JVM."""
    for number in range(rounds + 1):
        for name, run in contestants.items():
            figures = cost(run, messages)
            if number:
                yield Row(name, number, figures)


def cost(run: Callable[[], object], messages: int) -> Figures:
    """Measure the seconds, rate and CPU of some work, and the peak memory of a child process.

    JVMs do not count for the memory. Figures that ``run`` returns are added.
    """
    peaks = [0.0]
    is_over = threading.Event()

    def look() -> None:
        while not is_over.wait(LOOK_S):
            peaks.extend(resident_mb(pid) for pid in descendants(os.getpid()) if not is_jvm(pid))

    looking = threading.Thread(target=look)
    began_s, began_cpu_s = time.monotonic(), family_cpu_s()
    looking.start()
    try:
        figures = run()
    finally:
        taken_s, taken_cpu_s = time.monotonic() - began_s, family_cpu_s() - began_cpu_s
        is_over.set()
        looking.join()
    return {
        "s": taken_s,
        "rate": messages / taken_s,
        "cpu_us": taken_cpu_s / messages * 1e6,
        "peak_mb": max(peaks),
        **(figures if isinstance(figures, dict) else {}),
    }


def family_cpu_s() -> float:
    """CPU time of this process and all its descendants, including running ones."""
    ticks = os.sysconf("SC_CLK_TCK")
    used = sum(os.times()[:4])
    for pid in descendants(os.getpid()):
        with suppress(OSError, IndexError):
            stat = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
            used += sum(map(int, stat[11:15])) / ticks
    return used


def is_jvm(pid: int) -> bool:
    with suppress(OSError):
        return os.readlink(f"/proc/{pid}/exe").endswith("/java")
    return False


def resident_mb(pid: int) -> float:
    """The resident memory of a process; 0 if it has ended."""
    with suppress(OSError, IndexError):
        pages = int(Path(f"/proc/{pid}/statm").read_text().split()[1])
        return pages * os.sysconf("SC_PAGE_SIZE") / 1e6
    return 0.0


def descendants(pid: int) -> set[int]:
    pids: set[int] = set()
    waiting = [pid]
    while waiting:
        for task in Path(f"/proc/{waiting.pop()}/task").glob("*/children"):
            with suppress(OSError):
                new = {int(pid) for pid in task.read_text().split()} - pids
                pids |= new
                waiting += new
    return pids
