"""What is measured: each part yields a row for every run. Rounds are interleaved, because the speed
of a shared machine drifts: every round runs all contestants once."""

from __future__ import annotations

import re
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from tempfile import TemporaryDirectory

from benchmarks import archive, forward, latency, ours, peers, server, startup
from benchmarks.__main__ import everything_in_memory
from benchmarks.contestants import Contestant, Job
from benchmarks.measure import Measured, Watched, drain, publish
from benchmarks.report.raw import Row, figures_of
from plugins.daemons import GO_PROGRAMS, EmbeddedNsqdProcess, GoNsqd
from plugins.http_api import Nsqd

CHECKOUT = Path(__file__).parents[3]
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
        self, measure: Measure, nsqd: Nsqd, contestants: Iterable[Contestant], number: int
    ) -> Iterator[Row]:
        for contestant in contestants:
            yield run(contestant, number, lambda: self._take(measure, nsqd, contestant))  # noqa: B023

    def _take(self, measure: Measure, nsqd: Nsqd, contestant: Contestant) -> dict[str, float]:
        once = replace(contestant, share=1.0)
        wanted_s = self._settings.seconds
        first = max(5 * peers.UNSENT_FINS, contestant.portion(WARM_UP))
        count = self._messages.get(contestant.name, first)
        for _ in range(TRIES):  # what syncs each second says little in its first
            found = measure(nsqd, once, count)
            if found.seconds >= 0.8 * wanted_s or count >= MOST:
                break
            count = min(int(count * 1.1 * wanted_s / found.seconds), MOST)
        self._messages[contestant.name] = count
        return figures_of(found)


def contest(
    measure: Measure, settings: Settings, contestants: Iterable[Contestant]
) -> Iterator[Row]:
    """All contestants on one nsqd, a new one each round."""
    turns = Turns(settings)
    for number in range(settings.rounds):
        with everything_in_memory(MOST) as nsqd:
            yield from turns.rows(measure, nsqd, contestants, number)


NSQ_TAIL = Contestant("nsq_tail", peers.nsq_tail, share=0.2)
NSQ_TAIL_25_MS = Contestant("nsq_tail, 25 ms", peers.nsq_tail_as_ours, share=0.2)
TAIL_250_MS = Contestant("nsq tail, 250 ms", lambda job: ours.tail(job, *SLOW_BUFFER))
SLOW_BUFFER = ("-X", "output_buffer_timeout=250ms")


def consume(settings: Settings) -> Iterator[Row]:
    go_nsq = [replace(each, share=0.3) for each in peers.HANDLERS[:1]]
    pynsq = [each for each in peers.CONSUMERS if each.name == "pynsq"]
    contestants = [
        NSQ_TAIL,
        NSQ_TAIL_25_MS,
        *ours.CONSUMERS[:1],
        *go_nsq,
        *pynsq,
        *ours.CONSUMERS[1:],
        ours.HANDLERS[0],
        peers.BENCH_READER,
        peers.CONSUMERS[-1],
        *ours.TRANSPORTS,
    ]
    return contest(drain, settings, contestants)


def publishing(settings: Settings) -> Iterator[Row]:
    to_nsq, bare = peers.PRODUCERS
    contestants = [to_nsq, *ours.PRODUCERS, *peers.LIBRARY_PRODUCERS]
    contestants += [*ours.LIBRARY_PRODUCERS, peers.BENCH_WRITER, bare]
    return contest(publish, settings, contestants)


def archiving(settings: Settings) -> Iterator[Row]:
    with TemporaryDirectory(prefix="archive-") as directory:
        theirs, own = archive.contestants(directory)
        longer = replace(settings, seconds=1.6 * settings.seconds)  # of which a sync is a second
        yield from contest(drain, longer, [*theirs, *own])


def forwarding(settings: Settings) -> Iterator[Row]:
    for what in ("nsq", "http"):
        turns = Turns(settings)
        for number in range(settings.rounds):
            with everything_in_memory(MOST) as source, forward.contestants(what) as chosen:
                yield from turns.rows(drain, source, chosen, number)


LONE = 40


def waiting(settings: Settings) -> Iterator[Row]:
    """A lone message, through both programs at both settings."""
    tails = [NSQ_TAIL, NSQ_TAIL_25_MS, Contestant("nsq tail", ours.tail), TAIL_250_MS]
    for contestant in tails:
        yield run(contestant, 0, lambda: lone(contestant))  # noqa: B023


def lone(contestant: Contestant) -> dict[str, float]:
    with TemporaryDirectory(prefix="nsqd-") as directory, GoNsqd(Path(directory)) as nsqd:
        job = Job(nsqd.tcp_address, "latency", "c")
        taken = latency.latencies_ms(nsqd, contestant.command(job), job, LONE)
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


def starting(settings: Settings) -> Iterator[Row]:
    times_s = startup.times_s(5 * settings.rounds, startup.SHORT)
    for name, values in times_s.items():
        for number, value in enumerate(values):
            yield Row(name, number, {"ms": value * 1e3})


RATE_LINE = re.compile(r"^(?P<name>[\w. ,-]+?)\s+(?P<median>[\d,]+)\s+[\d,]+\s+[\d,]+ rows/s")
WAIT_LINE = re.compile(r"^latency, (?P<name>.+?)\s+p50\s+(?P<p50>\d+) ms, p95\s+(?P<p95>\d+)")
QUERY_LINE = re.compile(
    r"^(?P<name>.{22})(?P<other>\S+) (?P<base>[\d.]+)  sql (?P<sql>[\d.]+)  (?P<ratio>[\d.]+) x"
)
PLAN_LINE = re.compile(r"^(?P<files>\d+) files: (?P<s>[\d.]+) s .*, (?P<tasks>\d+) tasks")


def spark(settings: Settings) -> Iterator[Row]:
    """Reading and compaction, as their benchmarks print them."""
    for script, more in (("spark_read.py", ["--seconds", "5"]), ("spark_compact.py", [])):
        for line in spark_benchmark(script, settings, *more):
            if isinstance(line, Row):
                yield line
            elif found := RATE_LINE.match(line):
                yield rate_row(found, " by day" if "compact" in script else "")
            elif found := WAIT_LINE.match(line):
                figures = {"p50_ms": float(found["p50"]), "p95_ms": float(found["p95"])}
                yield Row(found["name"], 0, figures)


def spark_publishing(settings: Settings) -> Iterator[Row]:
    for line in spark_benchmark("spark_publish.py", settings):
        if isinstance(line, Row):
            yield line
        elif found := RATE_LINE.match(line):
            yield rate_row(found)


def spark_queries(settings: Settings) -> Iterator[Row]:
    """Seconds of a query, and of what it is compared with; of planning, and its tasks."""
    for line in spark_benchmark("spark_query.py", settings, rounds=5):
        if isinstance(line, Row):
            yield line
        elif found := QUERY_LINE.match(line):
            figures = {name: float(found[name]) for name in ("base", "sql", "ratio")}
            yield Row(f"{found['name'].strip()}, {found['other']}", 0, figures)
        elif found := PLAN_LINE.match(line):
            figures = {"s": float(found["s"]), "tasks": float(found["tasks"])}
            yield Row(f"{int(found['files']):,} files", 0, figures)


def spark_benchmark(
    script: str, settings: Settings, *more: str, rounds: int = 2
) -> Iterator[str | Row]:
    """What a benchmark prints, and a row for its failure. A round of its own warms its JVM up."""
    few = ["--messages", str(int(settings.seconds * 400_000)), "--rounds", str(rounds)]
    command = [sys.executable, str(CHECKOUT / "tests" / "benchmarks" / script), *few, *more]
    done = subprocess.run(command, capture_output=True, text=True, timeout=240, check=False)
    if done.returncode:
        yield Row(script, 0, error=done.stderr[-300:])
    yield from done.stdout.splitlines()


def rate_row(found: re.Match[str], suffix: str = "") -> Row:
    return Row(f"{found['name']}{suffix}", 0, {"rate": float(found["median"].replace(",", ""))})


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
