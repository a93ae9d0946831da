"""Streams into Parquet, whose processes are killed again and again: nothing lost, nothing doubled.

One stream reads the topic, another one what ``nsq to-file`` archives of it. Killed are the
archiver, the driver, the JVM, the processes that plan the batches (of ``nsq`` that is the consumer,
too), and the workers that read. In the short form each stream is a command that is killed once; in
the long one, with 400,000 messages and ``-m slow``, both are in a session that starts again and
again.
"""

from __future__ import annotations

import json
import os
import random
import signal
import subprocess
import sys
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator
from io import BytesIO
from pathlib import Path

import pytest
from plugins.archives import unfinished, write_archive
from plugins.cli import SpawnNsq
from plugins.daemons import GoNsqd
from plugins.object_store import Bucket
from plugins.processes import descendants, is_alive, kill
from plugins.spark import RunSpark
from plugins.spark_cluster import IVY
from plugins.waiting import patience_s, wait_until
from pyarrow import parquet

from nsqtools.protocol.frames import WireMessage

TOPIC = "clicks"
CHANNELS = SPARK, ARCHIVE = "spark", "archive"
DEADLINE_S = patience_s(180.0)
BATCH = 100
PAUSE_S = 0.02

PROGRAM = (sys.executable, str(Path(__file__).parent / "spark_stream.py"))
FINISH = "finish"
PLANNER, WORKER = "python_streaming_source_runner", "pyspark.daemon"
JVM, DRIVER = "java", "driver"


class Driver:
    """The program, with the processes that belong to it."""

    def __init__(self, directory: Path, env: dict[str, str], streams: dict[str, dict[str, str]]):
        self._directory = directory
        self._env = env
        self._names = list(streams)
        self._arguments = (str(directory), json.dumps(streams))
        self._process: subprocess.Popen[bytes] | None = None

    def start(self) -> None:
        command = [*PROGRAM, *self._arguments]
        self._process = subprocess.Popen(command, env=self._env, stdout=subprocess.PIPE)
        assert self._process.stdout is not None
        assert self._process.stdout.readline().startswith(b"started"), self.log()

    def finish(self) -> dict[str, dict[str, int]]:
        """Have what is left read; how often each body is in the sink of each stream."""
        assert self._process is not None
        assert self._process.stdout is not None
        (self._directory / FINISH).touch()
        for line in self._process.stdout:
            if line.startswith(b"{"):
                found: dict[str, dict[str, int]] = json.loads(line)
                return found
        raise AssertionError(self.log())

    def log(self) -> str:
        path = self._directory / "spark.log"
        return path.read_text("utf-8", "replace")[-3000:] if path.exists() else ""

    def batches(self) -> list[int]:
        """How many batches each stream has written down."""
        return [
            len(list((self._directory / name / "checkpoint" / "offsets").glob("[0-9]*")))
            for name in self._names
        ]

    def wait_for_progress(self) -> None:
        """Wait until every stream has had a batch more."""
        before = self.batches()
        wait_until(
            lambda: all(now > then for now, then in zip(self.batches(), before, strict=True)),
            what="progress",
            timeout_s=DEADLINE_S,
        )

    def kill(self, what: str) -> None:
        """Kill one process that there is; when the others go with it, start anew."""
        assert self._process is not None
        if what == DRIVER:
            self.end(first=self._process.pid)
            self.start()
            return
        victims = wait_until(lambda: self._victims(what), what=f"a {what}", timeout_s=DEADLINE_S)
        if what == JVM:
            self.end(first=victims[-1])
            self.start()
        else:
            kill(victims[-1])

    def _victims(self, what: str) -> list[int]:
        """The processes of a kind; of workers without the one that forks them: Spark waits for it
        without end."""
        assert self._process is not None
        found = {pid: parent for pid, parent, _ in descendants(self._process.pid, what)}
        return [pid for pid, parent in found.items() if what != WORKER or parent in found]

    def end(self, first: int | None = None) -> None:
        """End all, one of them first; they must not outlive each other."""
        if self._process is None:
            return
        family = [self._process.pid, *(each.pid for each in descendants(self._process.pid))]
        for pid in [first] if first else family:
            kill(pid)
        if first is not None:
            time.sleep(0.2)  # the others notice, and do what they do
            kill(self._process.pid)
        self._process.wait(DEADLINE_S)
        wait_until(
            lambda: not any(map(is_alive, family)), what="all to be gone", timeout_s=DEADLINE_S
        )
        assert self._process.stdout is not None
        self._process.stdout.close()
        self._process = None


class Publishing:
    """Publishes numbered bodies at a steady pace, on a thread, as far as it is told."""

    def __init__(self, nsqd: GoNsqd, count: int):
        self._nsqd = nsqd
        self._count = count
        self._upto = 0
        self._may_go_on = threading.Event()
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._thread.start()

    def go_on(self, upto: int) -> None:
        self._upto = upto
        self._may_go_on.set()

    def join(self) -> None:
        self.go_on(self._count)
        self._thread.join(DEADLINE_S)
        assert not self._thread.is_alive()

    def _run(self) -> None:
        for begin in range(0, self._count, BATCH):
            while begin >= self._upto:
                self._may_go_on.wait()
                self._may_go_on.clear()
            self._nsqd.publish(TOPIC, *[b"%07d" % n for n in range(begin, begin + BATCH)])
            time.sleep(PAUSE_S)


@pytest.fixture
def new_driver(spark_env: dict[str, str], tmp_path: Path) -> Iterator[Callable[..., Driver]]:
    drivers: list[Driver] = []

    def make(streams: dict[str, dict[str, str]]) -> Driver:
        drivers.append(Driver(tmp_path, spark_env, streams))
        return drivers[-1]

    yield make
    for driver in drivers:
        driver.end()


@pytest.fixture
def nsqd(go_nsqd: Callable[..., GoNsqd]) -> GoNsqd:
    nsqd = go_nsqd("-mem-queue-size=1000000", "-msg-timeout=2s")
    for channel in CHANNELS:
        nsqd.create_channel(TOPIC, channel)
    return nsqd


def drained(nsqd: GoNsqd, channel: str) -> None:
    wait_until(
        lambda: unfinished(nsqd, TOPIC, channel) == 0, what="an empty channel", timeout_s=DEADLINE_S
    )


def check(found: dict[str, int], messages: int) -> None:
    published = {f"{number:07d}" for number in range(messages)}
    lost = sorted(published - set(found))
    doubled = sorted(body for body, times in found.items() if times > 1)
    assert (len(lost), len(doubled)) == (0, 0), f"lost {lost[:5]}, doubled {doubled[:5]}"
    assert set(found) == published


def stream_with_kills(
    nsqd: GoNsqd,
    new_driver: Callable[..., Driver],
    spawn_nsq: SpawnNsq,
    directory: Path,
    victims: list[str],
    *,
    messages: int,
    archiver_kills: int,
) -> None:
    rng = random.Random(messages)
    archive = directory / "archive"
    archive.mkdir()
    place = ["--nsqd-tcp-address", nsqd.tcp_address, "--output-dir", str(archive), "--gzip"]
    small = ["--max-in-flight", "200", "--rotate-text-size", "300KB"]
    to_file = ["to-file", "-t", TOPIC, "-c", ARCHIVE, *place, *small]
    limits = {"maxRowsPerTrigger": str(messages // 8), "minPartitions": "2"}
    topic = {"topic": TOPIC, "channel": SPARK, "nsqdTcpAddress": nsqd.tcp_address}
    # what is in flight of a consumer that was killed comes again after two seconds
    spool = {"spoolDir": str(directory / "spool"), "idleTimeout": "3s"}
    driver = new_driver(
        {"nsq": {**topic, **spool, **limits}, "nsq-archive": {"path": str(archive), **limits}}
    )
    archiver = spawn_nsq(to_file)
    driver.start()
    publishing = Publishing(nsqd, messages)
    for number, victim in enumerate(victims, 1):
        publishing.go_on(number * messages // len(victims))
        driver.wait_for_progress()
        for _ in range(archiver_kills):
            time.sleep(rng.uniform(0, 0.5))  # the random point
            archiver.kill()
            archiver.wait(DEADLINE_S)
            archiver = spawn_nsq(to_file)
        driver.kill(victim)
    publishing.join()
    drained(nsqd, ARCHIVE)
    archiver.send_signal(signal.SIGTERM)
    archiver.wait(DEADLINE_S)
    found = driver.finish()

    check(found["nsq-archive"], messages)
    check(found["nsq"], messages)


def test_ingestion_through_kills(
    nsqd: GoNsqd,
    spawn_nsq: SpawnNsq,
    run_spark: RunSpark,
    spark_env: dict[str, str],
    tmp_path: Path,
) -> None:
    """``nsq spark ingest`` itself: of a topic the consumer dies, of an archive the driver.

    The JVM of that driver is halted, as if it were slow to end: until it has ended nobody else may
    take the files of its last batch for leftovers.
    """
    messages = 3_000
    archive, lakes = tmp_path / "in", tmp_path / "lakes"
    archive.mkdir()
    address = ["--nsqd-tcp-address", nsqd.tcp_address]
    small = ["--max-in-flight", "200", "--rotate-text-size", "100KB", "--gzip"]
    to_file = ["to-file", "-t", TOPIC, "-c", ARCHIVE, *address, *small]
    to_file += ["--output-dir", str(archive)]
    sources = {SPARK: ["-t", TOPIC, "-c", SPARK, *address], ARCHIVE: [str(archive)]}
    commands = {}
    for name, source in sources.items():
        output, checkpoint = str(lakes / name), str(lakes / f"{name}.checkpoint")
        commands[name] = ["spark", "ingest", *source, "-o", output, "--checkpoint", checkpoint]
        commands[name] += ["--max-rows-per-trigger", "300"]
    started = ["--trigger", "0s", "--master", "local[2,4]"]

    def start(name: str) -> subprocess.Popen[bytes]:
        return spawn_nsq([*commands[name], *started], spark_env)

    def wait_for_batches(process: subprocess.Popen[bytes], name: str) -> None:
        batches = lakes / f"{name}.checkpoint" / "commits"
        wait_until(
            lambda: process.poll() is not None or len(list(batches.glob("[0-9]*"))) > 1,
            what="batches",
            timeout_s=DEADLINE_S,
        )
        assert process.poll() is None, process.communicate()

    archiver = spawn_nsq(to_file)
    publishing = Publishing(nsqd, messages)
    publishing.go_on(messages // 2)
    of_topic, of_archive = start(SPARK), start(ARCHIVE)
    wait_for_batches(of_topic, SPARK)
    kill(descendants(of_topic.pid, PLANNER)[-1].pid)
    _, of_topic_err = of_topic.communicate(timeout=DEADLINE_S)

    archiver.kill()
    archiver.wait(DEADLINE_S)
    archiver = spawn_nsq(to_file)
    publishing.join()
    wait_for_batches(of_archive, ARCHIVE)
    [jvm] = descendants(of_archive.pid, "SparkSubmit")
    os.kill(jvm.pid, signal.SIGSTOP)
    kill(of_archive.pid)
    of_archive.wait(DEADLINE_S)
    too_early = run_spark(*commands[ARCHIVE][1:], "--once")
    kill(jvm.pid)
    wait_until(lambda: not is_alive(jvm.pid), what="the end of the JVM", timeout_s=DEADLINE_S)

    drained(nsqd, ARCHIVE)
    archiver.send_signal(signal.SIGTERM)
    archiver.wait(DEADLINE_S)
    ends = [run_spark(*command[1:], "--once") for command in commands.values()]

    assert of_topic.returncode == 1, of_topic_err.decode()
    assert b"nsq: error: Spark failed: " in of_topic_err, of_topic_err.decode()
    assert too_early.status == 1
    assert "another run writes to" in too_early.err
    for name, end in zip(commands, ends, strict=True):
        assert end.status == 0, end.err
        tables = map(parquet.read_table, (lakes / name).rglob("*.parquet"))
        bodies = [body for table in tables for body in table["body"].to_pylist()]
        check(Counter(bodies), messages)


@pytest.mark.slow
def test_400_000_messages_through_kills(
    nsqd: GoNsqd, new_driver: Callable[..., Driver], spawn_nsq: SpawnNsq, tmp_path: Path
) -> None:
    victims = [WORKER, PLANNER, JVM, WORKER, PLANNER, DRIVER] * 4
    stream_with_kills(
        nsqd, new_driver, spawn_nsq, tmp_path, victims, messages=400_000, archiver_kills=2
    )


@pytest.mark.slow
def test_a_checkpoint_in_a_bucket_through_kills(
    bucket: Bucket, spawn_nsq: SpawnNsq, spark_env: dict[str, str], tmp_path: Path
) -> None:
    """Output and checkpoint are in the bucket; of the JVM's file systems only s3a is used."""
    messages, kills = 4_000, 3
    archive = tmp_path / "in"
    archive.mkdir()
    bodies = [b"%07d" % n for n in range(messages)]
    records = [WireMessage(n + 1, 1, b"%016x" % n, body) for n, body in enumerate(bodies)]
    for first in range(0, messages, 100):
        write_archive(archive / f"{first}.gz", records[first : first + 100], topic=TOPIC)
    env = spark_env | {name: os.environ[name] for name in os.environ if name.startswith("AWS_")}
    command = ["spark", "ingest", str(archive), "-o", f"{bucket.url}/out", "--master", "local[2,4]"]
    command += ["--checkpoint", f"{bucket.url}/checkpoint", "--max-rows-per-trigger", "200"]
    command += ["--conf", f"spark.jars.ivy={IVY}", "--spark-log", str(tmp_path / "spark.log")]

    def commits() -> int:
        return sum(name.startswith("checkpoint/commits/") for name in bucket.names())

    for _ in range(kills):
        before = commits()
        process = spawn_nsq([*command, "--trigger", "0s"], env)
        wait_until(
            lambda p=process, n=before: p.poll() is not None or commits() > n + 1,
            what="batches",
            timeout_s=DEADLINE_S,
        )
        assert process.poll() is None, process.communicate()
        for each in descendants(process.pid):
            kill(each.pid)
        kill(process.pid)
        process.wait(DEADLINE_S)
    last = spawn_nsq([*command, "--once"], env)
    _, err = last.communicate(timeout=DEADLINE_S)

    assert last.returncode == 0, err.decode()
    files = [name for name in bucket.names() if name.endswith(".parquet")]
    tables = [parquet.read_table(BytesIO(bucket.storage.read(name))) for name in files]
    found = [body for table in tables for body in table.column("body").to_pylist()]
    check(Counter(map(bytes.decode, found)), messages)
