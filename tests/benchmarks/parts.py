"""The measurements: each part yields a row for every run.

Every round runs all contestants once, because the speed of a shared machine drifts.
"""

import os
import random
import re
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import replace
from functools import partial
from pathlib import Path
from tempfile import TemporaryDirectory

from benchmarks import bare_loop, contestants
from benchmarks.contestants import UNSENT_FINS, Contestant, Job
from benchmarks.measure import (
    BODY,
    Figures,
    Watched,
    drain,
    publish,
    publish_one_by_one,
    resident_mb,
    running,
)
from benchmarks.raw import Row
from plugins.certificates import LOOPBACK, Authority
from plugins.daemons import GO_PROGRAMS, EmbeddedNsqdProcess, GoNsqd, Nsqd
from plugins.waiting import wait_until

CHECKOUT = Path(__file__).parents[2]
MOST = 3_000_000  # messages of 200 bytes in the memory of nsqd
WARM_UP = 100_000  # messages of the first try, for the fastest contestants
TRIES = 4  # each with more messages, until a run lasts long enough

Measure = Callable[[Nsqd, Contestant, int], Figures]
Entered = Callable[[], AbstractContextManager[Iterable[Contestant]]]


def run(name: str, number: int, work: Callable[[], Figures]) -> Row:
    """Make a row of the figures that ``work`` returns, or of its error."""
    try:
        return Row(name, number, work())
    except (RuntimeError, AssertionError, OSError, subprocess.SubprocessError) as exc:
        return Row(name, number, error=str(exc)[:300] or type(exc).__name__)


@contextmanager
def everything_in_memory(messages: int) -> Iterator[GoNsqd]:
    """A Go nsqd with TLS that keeps all the messages in memory."""
    with TemporaryDirectory() as certificate, TemporaryDirectory(prefix="nsqd-") as directory:
        server = Authority(Path(certificate), "ca").issue("server", *LOOPBACK)
        flags = (f"-mem-queue-size={messages}", *server.nsqd_flags)
        with GoNsqd(Path(directory), *flags) as nsqd:
            yield nsqd


def contest(measure: Measure, entered: Entered, seconds: float, rounds: int) -> Iterator[Row]:
    """Run all contestants on a new nsqd each round, with enough messages for ``seconds`` each."""
    counts: dict[str, int] = {}
    for number in range(rounds):
        with everything_in_memory(MOST) as nsqd, entered() as chosen:
            for contestant in chosen:
                yield run(
                    contestant.name,
                    number,
                    partial(take, measure, nsqd, contestant, seconds, counts),
                )


def take(
    measure: Measure, nsqd: Nsqd, contestant: Contestant, seconds: float, counts: dict[str, int]
) -> Figures:
    """Measure a contestant with the messages of the previous round, or more if it is too fast."""
    count = counts.get(contestant.name, max(5 * UNSENT_FINS, round(WARM_UP * contestant.share)))
    for _ in range(TRIES):  # a first second without a sync shows little
        figures = measure(nsqd, contestant, count)
        if figures["seconds"] >= 0.8 * seconds or count >= MOST:
            break
        count = min(int(count * 1.1 * seconds / figures["seconds"]), MOST)
    counts[contestant.name] = count
    return figures


def forwarding(seconds: float, rounds: int) -> Iterator[Row]:
    for entered in (contestants.to_another_nsqd, contestants.to_http):
        yield from contest(drain, entered, seconds, rounds)


CONNECTIONS = (1, 50, 200, 1000)


def clients(seconds: float, rounds: int) -> Iterator[Row]:
    """Measure libraries on many connections, and publishing of one message after the other."""
    counts: dict[str, int] = {}
    flags = ("-tcp-address=0.0.0.0:0", f"-mem-queue-size={MOST}")
    for number in range(rounds):
        with (
            TemporaryDirectory(prefix="nsqd-") as directory,
            GoNsqd(Path(directory), *flags) as nsqd,
        ):
            for connections in CONNECTIONS:
                measure = partial(drain, connections=connections)
                for client in contestants.CLIENTS:
                    named = replace(client, name=f"{client.name}, {connections:,}")
                    work = partial(take, measure, nsqd, named, seconds, counts)
                    yield run(named.name, number, work)
            for name, line in contestants.ONE_BY_ONE.items():
                contestant = Contestant(name, line.replace("{seconds}", str(seconds)))
                work = partial(publish_one_by_one, nsqd, contestant, seconds)
                yield run(name, number, work)


LONE = 40


def waiting(seconds: float, rounds: int) -> Iterator[Row]:
    """Measure the time from a publish to the printed line, for both programs and settings."""
    slow = f"{contestants.TAIL} -X output_buffer_timeout=250ms"
    for contestant in (*contestants.TAILS, Contestant("`nsq tail`, 250 ms", slow)):
        yield run(contestant.name, 0, partial(lone, contestant))


def lone(contestant: Contestant) -> Figures:
    with TemporaryDirectory(prefix="nsqd-") as directory, GoNsqd(Path(directory)) as nsqd:
        job = Job(nsqd.tcp_address, "latency", "c")
        nsqd.create_channel(job.topic, job.channel)
        latencies = []
        with running(contestant.command(job), stdout=subprocess.PIPE) as program:
            wait_until(
                lambda: nsqd.channel_stats(job.topic, job.channel)["client_count"],
                what="the program has subscribed",
            )
            for number in range(LONE):
                time.sleep(random.uniform(0, 0.07))
                began = time.perf_counter()
                nsqd.publish(job.topic, b"%d" % number)
                program.stdout.readline()
                latencies.append((time.perf_counter() - began) * 1000)
    p90 = statistics.quantiles(latencies, n=10)[-1]
    return {"p50_ms": statistics.median(latencies), "p90_ms": p90, "max_ms": max(latencies)}


SERVERS: dict[str, type[GoNsqd]] = {"Go nsqd": GoNsqd, "`nsq nsqd`": EmbeddedNsqdProcess}


def serving(seconds: float, rounds: int) -> Iterator[Row]:
    """Measure both nsqd with a bare client, and with NSQ's own benchmarks."""
    for number in range(rounds):
        for name, kind in SERVERS.items():
            yield run(name, number, partial(serve, kind, seconds))


def serve(kind: type[GoNsqd], seconds: float) -> Figures:
    messages = int(seconds * 600_000)
    with (
        TemporaryDirectory(prefix="nsqd-") as directory,
        kind(Path(directory), "-mem-queue-size=5000000") as nsqd,
    ):
        watched, figures = Watched(nsqd.pid), {}
        batches = [bare_loop.packed([BODY] * 100)] * (messages // 100)

        def note(what: str, work: Callable[[], None]) -> None:
            watched.look()
            before, began_s = watched.cpu_s, time.perf_counter()
            work()
            figures[f"{what}_rate"] = messages / (time.perf_counter() - began_s)
            watched.look()
            figures[f"{what}_cpu_us"] = (watched.cpu_s - before) / messages * 1e6

        with bare_loop.subscribe(nsqd.tcp_address, "bench", "ch") as consumer:
            before_mb = resident_mb(nsqd.pid)
            note("publish", lambda: bare_loop.publish(nsqd.tcp_address, "bench", batches, 50))
            figures["queued_bytes"] = (resident_mb(nsqd.pid) - before_mb) * 1e6 / messages
            note("consume", lambda: bare_loop.finish(consumer, messages))
        figures["writer_rate"] = own_benchmark("bench_writer", nsqd, seconds)
        time.sleep(0.2)
        figures["reader_rate"] = own_benchmark("bench_reader", nsqd, seconds / 2)
        time.sleep(0.2)
        watched.look()
        return {**figures, "peak_mb": watched.peak_mb, "descriptors": watched.descriptors}


def own_benchmark(program: str, nsqd: GoNsqd, seconds: float) -> float:
    """The messages per second that NSQ's benchmark reports."""
    command = [str(GO_PROGRAMS / program), f"-runfor={seconds}s"]
    command += [f"-nsqd-tcp-address={nsqd.tcp_address}", "-topic=bench"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
    if not (found := re.search(r"([\d.]+)ops/s", done.stderr)):
        raise RuntimeError(f"{program}: {done.stderr[-200:]}")
    return float(found[1])


SHORT = ("--version", "--help", "pub --help", "tail --help")
WARM_UPS = 3  # the first runs write the bytecode


def starting(seconds: float, rounds: int) -> Iterator[Row]:
    """Measure the start-up of ``nsq`` and of a bare interpreter."""
    environ = {name: value for name, value in os.environ.items() if not name.startswith("PYTHON")}
    runs = {"`python -c pass`": ["-c", "pass"]}
    runs |= {f"`nsq {line}`": ["-m", "nsqtools", *line.split()] for line in SHORT}
    for turn in range(-WARM_UPS, 5 * rounds):
        for name, arguments in runs.items():
            begin = time.perf_counter()
            command = [sys.executable, *arguments]
            subprocess.run(command, env=environ, stdout=subprocess.DEVNULL, check=True)
            if turn >= 0:
                yield Row(name, turn, {"ms": (time.perf_counter() - begin) * 1e3})


def spark(seconds: float, rounds: int) -> Iterator[Row]:
    """Measure tables and the reading of archives."""
    from benchmarks import lake, planning  # these need the packages of tables and of Spark
    from benchmarks.spark import beside_spark

    messages = int(seconds * 800_000)
    yield from errors_as_rows("queries", beside_spark(messages, rounds))
    yield from errors_as_rows("landing", lake.landing(messages // 4, rounds))
    yield from errors_as_rows("to-file", lake.sustained(messages, rounds))
    yield from errors_as_rows("planning", planning.planning())


def errors_as_rows(name: str, rows: Iterator[Row]) -> Iterator[Row]:
    """Turn an exception into a row, so that it ends no other measurement."""
    try:
        yield from rows
    except Exception as exc:
        yield Row(name, 0, error=f"{type(exc).__name__}: {exc}"[:300])


def spark_publishing(seconds: float, rounds: int) -> Iterator[Row]:
    from benchmarks.spark import publishing

    return errors_as_rows("publishing", publishing(int(seconds * 400_000), 2))


def spark_queries(seconds: float, rounds: int) -> Iterator[Row]:
    from benchmarks.spark import sql_queries

    return errors_as_rows("queries", sql_queries(int(seconds * 400_000), 5))


# called with the seconds of a sample, and the number of rounds
PARTS: dict[str, Callable[[float, int], Iterator[Row]]] = {
    "consume": partial(contest, drain, lambda: nullcontext(contestants.CONSUMERS)),
    "client": clients,
    "publish": partial(contest, publish, lambda: nullcontext(contestants.PRODUCERS)),
    # longer, because a sync takes a second
    "archive": lambda seconds, rounds: contest(drain, contestants.archivers, 1.6 * seconds, rounds),
    "latency": waiting,
    "server": serving,
    "forward": forwarding,
    "startup": starting,
    "spark": spark,
    "spark-publish": spark_publishing,
    "spark-query": spark_queries,
}
