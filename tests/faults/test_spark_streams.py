"""Streams into Parquet, whose processes are killed again and again: nothing lost, nothing doubled.

One stream reads the topic, another one what ``nsq to-file`` archives of it. Killed are the
archiver, the driver, the JVM, the processes that plan the batches (of ``nsq`` that is the consumer,
too), and the workers that read. In the short form each command is killed once, with ``-m slow``
again and again.
"""

from __future__ import annotations

import os
import signal
import subprocess
import threading
import time
from collections import Counter
from io import BytesIO
from pathlib import Path

import pytest
from plugins.archives import unfinished, write_archive
from plugins.cli import SpawnNsq
from plugins.daemons import GoNsqd
from plugins.processes import descendants, is_alive, kill
from plugins.servers import MakeNsqd
from plugins.spark import RunSpark
from plugins.spark_cluster import IVY
from plugins.waiting import patience_s, wait_until
from pyarrow import parquet

from nsqtools.archive.storage_objects import open_storage
from nsqtools.protocol.frames import WireMessage

TOPIC = "clicks"
CHANNELS = SPARK, ARCHIVE = "spark", "archive"
DEADLINE_S = patience_s(180.0)
BATCH = 100
PAUSE_S = 0.02

PLANNER, WORKER = "python_streaming_source_runner", "pyspark.daemon"
JVM, DRIVER = "SparkSubmit", "driver"


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
def nsqd(go_nsqd: MakeNsqd) -> GoNsqd:
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


def kill_one(driver: subprocess.Popen[bytes], what: str) -> None:
    """Kill a process of a kind. Of workers not the one that forks them: Spark waits for it without
    end. Nothing may outlive the driver."""
    family = [driver.pid, *(each.pid for each in descendants(driver.pid))]
    found = {pid: parent for pid, parent, _ in descendants(driver.pid, what)}
    victims = [pid for pid, parent in found.items() if what != WORKER or parent in found]
    kill(driver.pid if what == DRIVER else (victims or family)[-1])
    if what != WORKER:
        driver.wait(DEADLINE_S)
        wait_until(
            lambda: not any(map(is_alive, family)), what="all to be gone", timeout_s=DEADLINE_S
        )


@pytest.mark.slow
@pytest.mark.parametrize("source", ["topic", "archive", "bucket"])
def test_ingestion_through_many_kills(
    source: str,
    request: pytest.FixtureRequest,
    nsqd: GoNsqd,
    spawn_nsq: SpawnNsq,
    spark_env: dict[str, str],
    tmp_path: Path,
) -> None:
    """In the bucket are output and checkpoint; of the JVM's file systems only s3a is used then."""
    messages, archive = 40_000, tmp_path / "in"
    lake, env = str(tmp_path), spark_env
    if source == "bucket":
        lake = request.getfixturevalue("bucket").url
        env = env | {name: os.environ[name] for name in os.environ if name.startswith("AWS_")}
    if source == "topic":
        for first in range(0, messages, 1000):
            nsqd.publish(TOPIC, *[b"%07d" % n for n in range(first, first + 1000)])
        place = ["-t", TOPIC, "-c", SPARK, "--nsqd-tcp-address", nsqd.tcp_address]
    else:
        archive.mkdir()
        records = [WireMessage(n + 1, 1, b"%016x" % n, b"%07d" % n) for n in range(messages)]
        for first in range(0, messages, 100):
            write_archive(archive / f"{first}.gz", records[first : first + 100], topic=TOPIC)
        place = [str(archive)]
    command = ["spark", "ingest", *place, "-o", f"{lake}/out", "--checkpoint", f"{lake}/cp"]
    command += ["--master", "local[2,4]", "--conf", f"spark.jars.ivy={IVY}"]
    command += ["--max-rows-per-trigger", "200", "--spark-log", str(tmp_path / "spark.log")]

    def commits() -> int:
        return len(list(open_storage(f"{lake}/cp/commits").list()))

    for victim in [WORKER, PLANNER, JVM, DRIVER] * 2:
        before = commits()
        driver = spawn_nsq([*command, "--trigger", "0s"], env)
        wait_until(
            lambda p=driver, n=before: p.poll() is not None or commits() > n + 2,
            what="batches",
            timeout_s=DEADLINE_S,
        )
        assert driver.poll() is None, driver.communicate()
        kill_one(driver, victim)
        if victim == WORKER:
            before = commits()
            wait_until(lambda n=before: commits() > n + 1, what="more", timeout_s=DEADLINE_S)
            kill_one(driver, DRIVER)
    last = spawn_nsq([*command, "--once", "--max-rows-per-trigger", "5000"], env)
    _, err = last.communicate(timeout=DEADLINE_S)

    assert last.returncode == 0, err.decode()
    out = open_storage(f"{lake}/out")
    files = [each.name for each in out.list() if each.name.endswith(".parquet")]
    tables = [parquet.read_table(BytesIO(out.read(name))) for name in files]
    check(Counter(body for table in tables for body in table["body"].to_pylist()), messages)
