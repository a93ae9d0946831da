"""How the cost of a message grows with messages, sizes, topics, connections and files.

A point is one run; its name is ``AXIS PROGRAM`` and ``at`` the place on the axis. Rates of 200-byte
messages leave start-up out; `whole_s` and `whole_cpu_s` have it, and are what few messages cost.
"""

from __future__ import annotations

import os
import resource
import shutil
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from tempfile import TemporaryDirectory

from benchmarks import bare_loop, ours, publishing
from benchmarks.archive import to_file
from benchmarks.contestants import Contestant, Job
from benchmarks.measure import BODY, LINES, Measured, Watched, drain, measured, publish, running
from benchmarks.report.raw import Row, figures_of
from plugins.archives import write_archive
from plugins.daemons import EmbeddedNsqdProcess, GoNsqd
from plugins.waiting import wait_until

from nsqtools.protocol.message import WireMessage

MESSAGES = (10_000, 100_000, 1_000_000, 10_000_000)
SIZES = (1, 100, 1_000, 10_000, 100_000, 1_000_000)
TOPICS = (1, 10, 100, 1_000)
CONNECTIONS = (1, 10, 100, 500)
FILES = (1, 10, 100, 1_000, 10_000)
USUAL = 200_000  # messages of a point, where they are not the axis
BYTES = 100_000_000  # no more of them, with large bodies
ARCHIVED = 100_000  # messages in all files together
SERVING_S = 1.0

Point = tuple[str, int, Callable[[], dict[str, float]]]


def growth(most_messages: int) -> Iterator[Row]:
    """All points, one after the other."""
    most = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
    resource.setrlimit(resource.RLIMIT_NOFILE, (most, most))
    with TemporaryDirectory(prefix="growth-") as directory:
        for points in (
            over_messages(directory, most_messages),
            over_sizes(directory),
            over_topics(directory),
            over_connections(directory),
            over_files(directory),
        ):
            for name, at, work in points:
                try:
                    yield Row(name, at, work())
                except (RuntimeError, AssertionError, OSError, subprocess.SubprocessError) as exc:
                    yield Row(name, at, error=str(exc)[:300] or type(exc).__name__)


@contextmanager
def go_nsqd(*flags: str) -> Iterator[GoNsqd]:
    with (
        TemporaryDirectory(prefix="nsqd-") as directory,
        GoNsqd(Path(directory), "-tcp-address=0.0.0.0:0", *flags) as nsqd,
    ):
        yield nsqd


def programs(directory: str) -> dict[str, Callable[[Job], Sequence[str]]]:
    return {
        "tail": ours.tail,
        "to-file": to_file(directory, "--gzip"),
        "Consumer": ours.consume,
    }


def drained(
    command: Callable[[Job], Sequence[str]], messages: int, bodies: Sequence[bytes] = LINES
) -> Measured:
    with go_nsqd(f"-mem-queue-size={min(messages, 3_000_000)}") as nsqd:
        return drain(nsqd, Contestant("", command), messages, bodies=bodies)


def published(messages: int, body: bytes = BODY, *flags: str) -> Measured:
    with go_nsqd(f"-mem-queue-size={min(messages, 3_000_000)}") as nsqd:
        contestant = Contestant("", lambda job: ours.pub(job, *flags))
        return publish(nsqd, contestant, messages, body=body)


def over_messages(directory: str, most: int) -> Iterator[Point]:
    for count in (each for each in MESSAGES if each <= most):
        for name, command in programs(directory).items():
            yield (
                f"messages {name}",
                count,
                lambda command=command, count=count: figures_of(drained(command, count)),
            )
        yield "messages pub", count, lambda count=count: figures_of(published(count))
        yield "messages nsqd", count, lambda count=count: served(count, BODY)


def over_sizes(directory: str) -> Iterator[Point]:
    for size in SIZES:
        body, count = b"x" * size, min(USUAL, BYTES // size)
        for name, command in programs(directory).items():
            yield (
                f"size {name}",
                size,
                lambda command=command, count=count, body=body: figures_of(
                    drained(command, count, [body])
                ),
            )
        yield (
            "size pub",
            size,
            lambda count=count, body=body: figures_of(published(count, body)),
        )
        yield "size nsqd", size, lambda count=count, body=body: served(count, body)


def served(messages: int, body: bytes) -> dict[str, float]:
    """The embedded nsqd: CPU time of a message that is published and consumed."""
    with (
        TemporaryDirectory(prefix="nsqd-") as directory,
        EmbeddedNsqdProcess(Path(directory), f"-mem-queue-size={min(messages, 2_000_000)}") as nsqd,
    ):
        nsqd.create_channel("bench", "ch")
        watched = Watched(nsqd.pid)
        watched.look()
        began, before = time.monotonic(), watched.cpu_s
        size = max(1, min(100, 1_000_000 // (len(body) + 4)))
        batches = [bare_loop.packed([body] * size)] * (messages // size)
        bare_loop.publish(nsqd.tcp_address, "bench", batches)
        count = size * len(batches)
        job = Job(nsqd.tcp_address, "bench", "ch")

        def unfinished() -> int:
            channel = nsqd.channel_stats("bench", "ch")
            return channel["depth"] + channel["in_flight_count"]  # type: ignore[no-any-return]

        command = [sys.executable, bare_loop.__file__, "consume", *job_arguments(job)]
        with running(command, stdout=subprocess.DEVNULL):
            wait_until(lambda: not unfinished(), what="nothing left", timeout_s=120)
        took_s = time.monotonic() - began
        watched.look()
        return {
            "messages": count,
            "rate": count / took_s,
            "cpu_us": (watched.cpu_s - before) / count * 1e6,
            "peak_mb": watched.peak_mb,
            "descriptors": watched.descriptors,
        }


def job_arguments(job: Job) -> tuple[str, ...]:
    return (job.tcp_address, job.topic, job.channel)


def over_topics(directory: str) -> Iterator[Point]:
    for count in TOPICS:
        names = [f"t{number}" for number in range(count)]
        flags = [flag for name in names for flag in ("-t", name)]
        own = {
            "tail": [*ours.NSQ, "tail", *flags, "-c", "ch", "--max-in-flight", "2500"],
            "to-file": [*ours.NSQ, "to-file", *flags, "-c", "ch", "--gzip"],
            "Consumer": [*ours.LIBRARY, "consume"],
        }
        own["to-file"] += ["--output-dir", f"{directory}/topics{count}"]
        for name, command in own.items():
            yield (
                f"topics {name}",
                count,
                lambda command=command, names=names: figures_of(drained_topics(command, names)),
            )
        yield (
            "topics nsqd",
            count,
            lambda count=count: under_publishers(publishing.multi(count), 4, 100),
        )


def drained_topics(command: Sequence[str], topics: Sequence[str]) -> Measured:
    """As many messages as usual, in all topics together."""
    each = USUAL // len(topics)
    with go_nsqd(f"-mem-queue-size={each}") as nsqd:
        for topic in topics:
            nsqd.create_channel(topic, "ch")
        for topic in topics:
            batches = [bare_loop.packed([BODY] * 200)] * (each // 200)
            bare_loop.publish(nsqd.tcp_address.replace("[::]", "127.0.0.1"), topic, batches)
        address = nsqd.tcp_address.replace("[::]", "127.0.0.1")

        def finished() -> int:
            left = 0
            for topic in nsqd.stats()["topics"]:
                left += topic["depth"]
                left += sum(one["depth"] + one["in_flight_count"] for one in topic["channels"])
            return USUAL - left

        place = [address, ",".join(topics), "ch", "--with=aio"]
        if "consume" not in command:
            place = ["--nsqd-tcp-address", address]
        began = time.monotonic()
        with running([*command, *place], stdout=subprocess.DEVNULL) as program:
            return measured(finished, USUAL, program, began)


def over_connections(directory: str) -> Iterator[Point]:
    def to(job: Job, count: int, command: Sequence[str]) -> Sequence[str]:
        """With every address in place of the only one."""
        where = job.many_addresses(count)
        flags = [flag for address in where for flag in ("--nsqd-tcp-address", address)]
        return [*command[: command.index("--nsqd-tcp-address")], *flags]

    for count in CONNECTIONS:
        place = f"{directory}/connections{count}"
        commands: dict[str, Callable[[Job], Sequence[str]]] = {
            "tail": lambda job, count=count: [
                *to(job, count, ours.tail(job)),
                "--max-in-flight=2500",
            ],  # type: ignore[misc]
            "to-file": lambda job, count=count, place=place: [  # type: ignore[misc]
                *to(job, count, to_file(place)(job)),
                "--output-dir",
                place,
                "--gzip",
            ],
            "Consumer": lambda job, count=count: [  # type: ignore[misc]
                *ours.LIBRARY,
                "consume",
                ",".join(job.many_addresses(count)),
                job.topic,
                job.channel,
                "--with=run",
            ],
        }
        for name, command in commands.items():
            yield (
                f"connections {name}",
                count,
                lambda command=command: figures_of(drained(command, USUAL)),
            )
        pub = lambda job, count=count: [*to(job, count, ours.pub(job)), "--mode", "round-robin"]  # noqa: E731
        yield "connections pub", count, lambda pub=pub: figures_of(published_by(pub))
        yield (
            "connections nsqd",
            count,
            lambda count=count: under_publishers(publishing.single(), count, 1),
        )


def published_by(command: Callable[[Job], Sequence[str]]) -> Measured:
    with go_nsqd(f"-mem-queue-size={USUAL}") as nsqd:
        return publish(nsqd, Contestant("", command), USUAL)


def under_publishers(commands: list[bytes], connections: int, weight: int) -> dict[str, float]:
    """The embedded nsqd while so many connections publish, each waiting for its answer."""
    with publishing.running(EmbeddedNsqdProcess, "-mem-queue-size=10000000") as nsqd:
        publishing.publish(nsqd, commands, connections, 0.3)
        watched = Watched(nsqd.pid)
        watched.look()
        before = watched.cpu_s
        count, _ = publishing.publish(nsqd, commands, connections, SERVING_S)
        watched.look()
        messages = count * weight
        return {
            "messages": messages,
            "rate": messages / SERVING_S,
            "cpu_us": (watched.cpu_s - before) / messages * 1e6,
            "peak_mb": watched.peak_mb,
            "descriptors": watched.descriptors,
        }


def over_files(directory: str) -> Iterator[Point]:
    for count in FILES:
        place = Path(directory) / f"files{count}"
        yield (
            "files archive cat",
            count,
            lambda place=place, count=count: read_files(place, count, "archive", "cat"),
        )
        yield (
            "files archive info",
            count,
            lambda place=place, count=count: read_files(place, count, "archive", "info"),
        )
        yield "files to-file", count, lambda place=place: beginning(place)


def read_files(place: Path, count: int, *command: str) -> dict[str, float]:
    """A whole command, from start to end, over an archive of so many files."""
    if not place.exists():
        make_files(place, count)
    began = time.monotonic()
    with running([*ours.NSQ, *command, str(place)], stdout=subprocess.DEVNULL) as program:
        watched = Watched(program.pid)
        while os.waitid(os.P_PID, program.pid, os.WEXITED | os.WNOWAIT | os.WNOHANG) is None:
            watched.look()
            time.sleep(0.005)
        watched.look()
        took_s = time.monotonic() - began
        if status := program.wait():
            raise RuntimeError(f"{' '.join(command)}: status {status}")
    return {
        "messages": ARCHIVED,
        "whole_s": took_s,
        "whole_cpu_s": watched.cpu_s,
        "peak_mb": watched.peak_mb,
        "descriptors": watched.descriptors,
    }


def make_files(place: Path, count: int) -> None:
    """The same file under many names: what is in it does not matter here."""
    place.mkdir()
    each = ARCHIVED // count
    messages = [WireMessage(10**18 + n, 1, b"%016x" % n, BODY) for n in range(each)]
    members = [messages[start : start + 2500] for start in range(0, each, 2500)]
    first = write_archive(place / "clicks.00000.log.gz", *members)
    beside = [each.name for each in place.iterdir() if each.name != first.name]
    for number in range(1, count):
        for name in (first.name, *beside):
            shutil.copy(place / name, place / name.replace("00000", f"{number:05}"))


def beginning(place: Path) -> dict[str, float]:
    """``nsq to-file`` beside the files that are there: until it has written 1,000 messages."""
    contestant = Contestant("", to_file(str(place), "--gzip"))
    with go_nsqd() as nsqd:
        return figures_of(drain(nsqd, contestant, 1000))
