"""What is measured: each part yields a row for every run. Rounds are interleaved, because the speed
of a shared machine drifts: every round runs all contestants once."""

from __future__ import annotations

import os
import random
import re
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from tempfile import TemporaryDirectory

from benchmarks import contestants, server
from benchmarks.contestants import UNSENT_FINS, Contestant, Job
from benchmarks.measure import Measured, Watched, drain, publish, running
from benchmarks.raw import Row, figures_of
from cryptography.x509.oid import ExtendedKeyUsageOID
from plugins.certificates import LOOPBACK, Authority
from plugins.daemons import GO_PROGRAMS, EmbeddedNsqdProcess, GoNsqd
from plugins.http_api import Nsqd
from plugins.waiting import wait_until

CHECKOUT = Path(__file__).parents[2]
MOST = 3_000_000  # messages of 200 bytes in the memory of nsqd
WARM_UP = 100_000  # of the fastest: the first try
TRIES = 4  # each with more messages, until one lasts as long as wanted

Measure = Callable[[Nsqd, Contestant, int], Measured]


@dataclass(frozen=True, slots=True)
class Settings:
    """How long and how often."""

    seconds: float = 2.5
    rounds: int = 3


def run(contestant: Contestant, number: int, work: Callable[[], dict[str, float]]) -> Row:
    """A row of what ``work`` returns, or of why it failed."""
    try:
        return Row(contestant.name, number, work())
    except (RuntimeError, AssertionError, OSError, subprocess.SubprocessError) as exc:
        return Row(contestant.name, number, error=str(exc)[:300] or type(exc).__name__)


class Turns:
    """Contestants in turn, each with messages for the seconds that a sample shall last."""

    def __init__(self, settings: Settings) -> None:
        self._settings = settings
        self._messages: dict[str, int] = {}

    def rows(
        self, measure: Measure, nsqd: Nsqd, entered: Iterable[Contestant], number: int
    ) -> Iterator[Row]:
        for contestant in entered:
            yield run(contestant, number, lambda: self._take(measure, nsqd, contestant))  # noqa: B023

    def _take(self, measure: Measure, nsqd: Nsqd, contestant: Contestant) -> dict[str, float]:
        once = replace(contestant, share=1.0)
        wanted_s = self._settings.seconds
        first = max(5 * UNSENT_FINS, contestant.portion(WARM_UP))
        count = self._messages.get(contestant.name, first)
        for _ in range(TRIES):  # what syncs each second says little in its first
            found = measure(nsqd, once, count)
            if found.seconds >= 0.8 * wanted_s or count >= MOST:
                break
            count = min(int(count * 1.1 * wanted_s / found.seconds), MOST)
        self._messages[contestant.name] = count
        return figures_of(found)


@contextmanager
def everything_in_memory(messages: int) -> Iterator[GoNsqd]:
    """The Go nsqd with room for the messages, which offers TLS."""
    with (
        TemporaryDirectory(prefix="certificate-") as certificate,
        TemporaryDirectory(prefix="nsqd-") as directory,
        GoNsqd(
            Path(directory),
            f"-mem-queue-size={messages}",
            *Authority(Path(certificate), "ca")
            .issue("server", ExtendedKeyUsageOID.SERVER_AUTH, LOOPBACK)
            .nsqd_flags,
        ) as nsqd,
    ):
        yield nsqd


def contest(measure: Measure, settings: Settings, entered: Iterable[Contestant]) -> Iterator[Row]:
    """All contestants on one nsqd, a new one each round."""
    turns = Turns(settings)
    for number in range(settings.rounds):
        with everything_in_memory(MOST) as nsqd:
            yield from turns.rows(measure, nsqd, entered, number)


def consume(settings: Settings) -> Iterator[Row]:
    return contest(drain, settings, contestants.CONSUMERS)


def publishing(settings: Settings) -> Iterator[Row]:
    return contest(publish, settings, contestants.PRODUCERS)


def archiving(settings: Settings) -> Iterator[Row]:
    with TemporaryDirectory(prefix="archive-") as directory:
        longer = replace(settings, seconds=1.6 * settings.seconds)  # of which a sync is a second
        yield from contest(drain, longer, contestants.archivers(directory))


def forwarding(settings: Settings) -> Iterator[Row]:
    for what in ("nsq", "http"):
        turns = Turns(settings)
        for number in range(settings.rounds):
            with everything_in_memory(MOST) as source, contestants.forwarders(what) as chosen:
                yield from turns.rows(drain, source, chosen, number)


LONE = 40


def waiting(settings: Settings) -> Iterator[Row]:
    """A lone message from publish to printed line, through both programs at both settings."""
    slow = Contestant("nsq tail, 250 ms", contestants.tail("-X", "output_buffer_timeout=250ms"))
    for contestant in (*contestants.TAILS, slow):
        yield run(contestant, 0, lambda: lone(contestant))  # noqa: B023


def lone(contestant: Contestant) -> dict[str, float]:
    with TemporaryDirectory(prefix="nsqd-") as directory, GoNsqd(Path(directory)) as nsqd:
        job = Job(nsqd.tcp_address, "latency", "c")
        nsqd.create_channel(job.topic, job.channel)
        taken = []
        with running(contestant.command(job), stdout=subprocess.PIPE) as program:
            wait_until(
                lambda: nsqd.channel_stats(job.topic, job.channel)["client_count"],
                what="the program has subscribed",
            )
            for number in range(LONE):
                time.sleep(random.uniform(0, 0.07))
                began = time.perf_counter()
                nsqd.publish(job.topic, b"%d" % number)
                assert program.stdout is not None
                program.stdout.readline()
                taken.append((time.perf_counter() - began) * 1000)
    p90 = statistics.quantiles(taken, n=10)[-1]
    return {"p50_ms": statistics.median(taken), "p90_ms": p90, "max_ms": max(taken)}


SERVERS: dict[str, type[GoNsqd]] = {"Go nsqd": GoNsqd, "nsq nsqd": EmbeddedNsqdProcess}


def serving(settings: Settings) -> Iterator[Row]:
    """Both nsqd under a bare client, and under NSQ's own benchmarks."""
    messages = int(settings.seconds * 600_000)
    for number in range(settings.rounds):
        for name, kind in SERVERS.items():
            contestant = Contestant(name, lambda job: ())
            yield run(contestant, number, lambda: serve(kind, messages, settings.seconds))  # noqa: B023


def serve(kind: type[GoNsqd], messages: int, seconds: float) -> dict[str, float]:
    with (
        TemporaryDirectory(prefix="nsqd-") as directory,
        kind(Path(directory), "-mem-queue-size=5000000") as nsqd,
    ):
        watched = Watched(nsqd.pid)
        host, _, port = nsqd.tcp_address.rpartition(":")
        address = (host, int(port))
        figures = {}

        def note(what: str, work: Callable[[], None]) -> None:
            watched.look()
            before = watched.cpu_s
            figures[f"{what}_rate"] = messages / server.timed(work)
            watched.look()
            figures[f"{what}_cpu_us"] = (watched.cpu_s - before) / messages * 1e6

        with server.subscribe(address) as consumer:
            before = server.resident_bytes(nsqd.pid)
            note("publish", lambda: server.publish(address, messages))
            figures["queued_bytes"] = (server.resident_bytes(nsqd.pid) - before) / messages
            note("consume", lambda: server.consume(consumer, messages))
        figures["writer_rate"] = own_benchmark("bench_writer", nsqd, seconds)
        time.sleep(0.2)
        figures["reader_rate"] = own_benchmark("bench_reader", nsqd, seconds / 2)
        time.sleep(0.2)
        watched.look()
        return {**figures, "peak_mb": watched.peak_mb, "descriptors": watched.descriptors}


def own_benchmark(program: str, nsqd: GoNsqd, seconds: float) -> float:
    """Messages a second as NSQ's benchmark reports them, of what it publishes itself."""
    command = [str(GO_PROGRAMS / program), f"-runfor={seconds}s"]
    command += [f"-nsqd-tcp-address={nsqd.tcp_address}", "-topic=bench"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
    if not (found := re.search(r"([\d.]+)ops/s", done.stderr)):
        raise RuntimeError(f"{program}: {done.stderr[-200:]}")
    return float(found[1])


BARE = "python -c pass"
SHORT = ("--version", "--help", "pub --help", "tail --help")
WARM_UPS = 3  # which write the bytecode


def starting(settings: Settings) -> Iterator[Row]:
    """How long ``nsq`` takes to start, beside a bare interpreter."""
    environ = {name: value for name, value in os.environ.items() if not name.startswith("PYTHON")}
    runs = {BARE: ["-c", "pass"]}
    runs |= {f"nsq {line}": ["-m", "nsqtools", *line.split()] for line in SHORT}
    for turn in range(-WARM_UPS, 5 * settings.rounds):
        for name, arguments in runs.items():
            begin = time.perf_counter()
            command = [sys.executable, *arguments]
            subprocess.run(command, env=environ, stdout=subprocess.DEVNULL, check=True)
            if turn >= 0:
                yield Row(name, turn, {"ms": (time.perf_counter() - begin) * 1e3})


def spark(settings: Settings) -> Iterator[Row]:
    """All about tables, and reading archives, in one session."""
    from benchmarks import lake  # it needs the packages of tables and of Spark
    from benchmarks.landing import landing

    messages = int(settings.seconds * 800_000)
    rounds = settings.rounds
    yield from errors_as_rows("queries", lake.beside_spark(messages, rounds))
    yield from errors_as_rows("landing", landing(messages // 4, rounds))
    yield from errors_as_rows("to-file", lake.sustained(messages, rounds))
    yield from errors_as_rows("planning", lake.planning())
    yield from errors_as_rows("a bucket", lake.buckets())
    yield from errors_as_rows("a million files", lake.a_million())


def errors_as_rows(name: str, rows: Iterator[Row]) -> Iterator[Row]:
    """What could not be measured is said, and ends nothing else."""
    try:
        yield from rows
    except Exception as exc:
        yield Row(name, 0, error=f"{type(exc).__name__}: {exc}"[:300])


def spark_publishing(settings: Settings) -> Iterator[Row]:
    from benchmarks.spark_publish import publishing

    messages = int(settings.seconds * 400_000)
    yield from errors_as_rows("publishing", publishing(messages, 2))


def spark_queries(settings: Settings) -> Iterator[Row]:
    from benchmarks.spark_query import planning, queries

    messages = int(settings.seconds * 400_000)
    yield from errors_as_rows("queries", queries(messages, 5))
    yield from errors_as_rows("planning", planning(10_000))


PARTS: dict[str, Callable[[Settings], Iterator[Row]]] = {
    "consume": consume,
    "publish": publishing,
    "archive": archiving,
    "latency": waiting,
    "server": serving,
    "forward": forwarding,
    "startup": starting,
    "spark": spark,
    "spark-publish": spark_publishing,
    "spark-query": spark_queries,
}
