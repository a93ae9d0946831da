"""Streams into Parquet, and a replay, whose processes are killed: nothing is lost.

Streams double nothing either. One stream reads the topic, another one its archive by
``nsq to-file``. The archiver, the driver, the JVM, the processes that plan the batches (which
consume, in ``nsq``) and the workers that read are killed: once, and repeatedly with ``-m slow``.

A replay loses nothing, and reports how many messages it may have doubled: messages that nsqd had
stored and the ledger had not recorded yet, at most a window of unconfirmed batches for each
interrupted task. Between Spark and nsqd, a proxy pauses after a part of the data, so that a kill
interrupts tasks in the middle of their work, however slow this test or quick the replay is.
"""

import os
import random
import re
import signal
import subprocess
import time
from collections.abc import Callable, Iterable
from concurrent.futures import Future
from io import BytesIO
from pathlib import Path

import pytest
from plugins.archives import BEGIN_NS, assert_each_once, unfinished, write_archive
from plugins.cli import SpawnNsq
from plugins.clients import bodies_in
from plugins.examples import slow
from plugins.network import TO_SERVER, ProxyTo
from plugins.processes import descendants, is_alive, kill
from plugins.servers import GoNsqd, MakeNsqd
from plugins.spark import IVY, RunSpark
from plugins.waiting import patience_s, wait_until
from pyarrow import Table, parquet

from nsqtools.archive.finding import find_archives
from nsqtools.archive.place_url import parse_place
from nsqtools.protocol.frames import WireMessage
from nsqtools.spark.publishing.publish_task import BATCH_ROWS, MAX_OUTSTANDING

TOPIC = "clicks"
CHANNELS = SPARK, ARCHIVE = "spark", "archive"
DEADLINE_S = patience_s(180.0)
BATCH = 100
PAUSE_S = 0.02

PLANNER, WORKER = "python_streaming_source_runner", "pyspark.daemon"
JVM, DRIVER = "SparkSubmit", "driver"


def publish(nsqd: GoNsqd, first: int, last: int) -> None:
    """Publish numbered bodies at a steady pace."""
    for begin in range(first, last, BATCH):
        nsqd.publish(TOPIC, *[b"%07d" % n for n in range(begin, begin + BATCH)])
        time.sleep(PAUSE_S)


@pytest.fixture
def nsqd(go_nsqd: MakeNsqd) -> GoNsqd:
    nsqd = go_nsqd("-mem-queue-size=1000000", "-msg-timeout=2s")
    for channel in CHANNELS:
        nsqd.create_channel(TOPIC, channel)
    return nsqd


def wait_for(process: subprocess.Popen[bytes], condition: Callable[[], object]) -> None:
    """Wait until a condition is true, while the process must not end."""
    wait_until(lambda: process.poll() is not None or condition(), what="it", timeout_s=DEADLINE_S)
    assert process.poll() is None, process.communicate()


def check(tables: Iterable[Table], messages: int) -> None:
    bodies = [body.encode() for table in tables for body in table["body"].to_pylist()]
    assert_each_once(bodies, [b"%07d" % number for number in range(messages)])


@pytest.mark.parametrize("format", ["parquet", "delta"])
def test_ingestion_through_kills(
    format: str,
    nsqd: GoNsqd,
    spawn_nsq: SpawnNsq,
    run_spark: RunSpark,
    spark_env: dict[str, str],
    in_background: Callable[..., Future[None]],
    tmp_path: Path,
) -> None:
    """``nsq spark ingest`` of a topic loses its consumer, that of an archive its driver.

    The JVM of that driver is stopped, as if it were slow to end: until it has ended, no other run
    may treat the files of its last batch as leftovers.
    """
    messages = 3_000
    archive, lakes = tmp_path / "in", tmp_path / "lakes"
    archive.mkdir()
    address = ["--nsqd-tcp-address", nsqd.tcp_address]
    to_file = ["to-file", "-t", TOPIC, "-c", ARCHIVE, *address, "--output-dir", str(archive)]
    to_file += ["--max-in-flight", "200", "--rotate-text-size", "100KB", "--gzip"]
    sources = {SPARK: ["-t", TOPIC, "-c", SPARK, *address], ARCHIVE: [str(archive)]}
    commands = {}
    for name, source in sources.items():
        output, checkpoint = str(lakes / name), str(lakes / f"{name}.checkpoint")
        commands[name] = ["spark", "ingest", *source, "-o", output, "--checkpoint", checkpoint]
        commands[name] += ["--max-rows-per-trigger", "300", "--format", format]
    started = ["--trigger", "0s", "--master", "local[2,4]"]

    def start(name: str) -> subprocess.Popen[bytes]:
        return spawn_nsq([*commands[name], *started], spark_env)

    def wait_for_batches(process: subprocess.Popen[bytes], name: str) -> None:
        batches = lakes / f"{name}.checkpoint" / "commits"
        wait_for(process, lambda: len(list(batches.glob("[0-9]*"))) > 1)

    archiver = spawn_nsq(to_file)
    first_half = in_background(publish, nsqd, 0, messages // 2)
    of_topic, of_archive = start(SPARK), start(ARCHIVE)
    wait_for_batches(of_topic, SPARK)
    kill(descendants(of_topic.pid, PLANNER)[-1].pid)
    _, of_topic_err = of_topic.communicate(timeout=DEADLINE_S)

    archiver.kill()
    archiver.wait(DEADLINE_S)
    archiver = spawn_nsq(to_file)
    first_half.result(DEADLINE_S)
    publish(nsqd, messages // 2, messages)
    wait_for_batches(of_archive, ARCHIVE)
    [jvm] = descendants(of_archive.pid, "SparkSubmit")
    os.kill(jvm.pid, signal.SIGSTOP)
    kill(of_archive.pid)
    of_archive.wait(DEADLINE_S)
    too_early = run_spark(*commands[ARCHIVE][1:], "--once")
    kill(jvm.pid)
    wait_until(lambda: not is_alive(jvm.pid), what="the end of the JVM", timeout_s=DEADLINE_S)

    wait_until(lambda: unfinished(nsqd, TOPIC, ARCHIVE) == 0, what="the end", timeout_s=DEADLINE_S)
    archiver.send_signal(signal.SIGTERM)
    archiver.wait(DEADLINE_S)
    ends = [run_spark(*command[1:], "--once") for command in commands.values()]

    assert of_topic.returncode == 1, of_topic_err.decode()
    assert b"nsq: error: Spark failed: " in of_topic_err, of_topic_err.decode()
    assert too_early.status == 1
    assert "another run writes to" in too_early.err
    for name, end in zip(commands, ends, strict=True):
        assert end.status == 0, end.err
        files = find_archives([str(lakes / name)])
        check((parquet.read_table(file.shown, partitioning=None) for file in files), messages)


def kill_one(driver: subprocess.Popen[bytes], what: str) -> None:
    """Kill a process of a kind, and check that none outlives the driver.

    The process that forks the workers is spared, because Spark would wait for it forever.
    """
    family = [driver.pid, *(process.pid for process in descendants(driver.pid))]
    parents = {pid: parent for pid, parent, _ in descendants(driver.pid, what)}
    victims = [pid for pid, parent in parents.items() if what != WORKER or parent in parents]
    kill(driver.pid if what == DRIVER else (victims or family)[-1])
    if what != WORKER:
        driver.wait(DEADLINE_S)
        wait_until(lambda: not any(map(is_alive, family)), what="their end", timeout_s=DEADLINE_S)


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
    """A bucket has the output and the checkpoint, and the JVM uses no file system but s3a."""
    messages, archive = 40_000, tmp_path / "in"
    lake, env = str(tmp_path), spark_env
    if source == "bucket":
        lake = request.getfixturevalue("bucket").url
        env = env | {name: os.environ[name] for name in os.environ if name.startswith("AWS_")}
    if source == "topic":
        publish(nsqd, 0, messages)
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
        return len(list(parse_place(f"{lake}/cp/commits").list()))

    for victim in [WORKER, PLANNER, JVM, DRIVER] * 2:
        committed = commits()
        driver = spawn_nsq([*command, "--trigger", "0s"], env)
        wait_for(driver, lambda n=committed: commits() > n + 2)  # type: ignore[misc]
        kill_one(driver, victim)
        if victim == WORKER:
            committed = commits()
            wait_for(driver, lambda n=committed: commits() > n + 1)  # type: ignore[misc]
            kill_one(driver, DRIVER)
    last = spawn_nsq([*command, "--once", "--max-rows-per-trigger", "5000"], env)
    _, err = last.communicate(timeout=DEADLINE_S)

    assert last.returncode == 0, err.decode()
    out = parse_place(f"{lake}/out")
    files = [file.name for file in out.list() if file.name.endswith(".parquet")]
    check((parquet.read_table(BytesIO(out.read(name))) for name in files), messages)


SLOTS = 2
BODY_BYTES = 400
MESSAGE_BYTES = 4 + BODY_BYTES  # the size in an MPUB
WINDOW = SLOTS * (MAX_OUTSTANDING + 2) * BATCH_ROWS


def write_input(folder: Path, count: int) -> None:
    """Write archives of bodies that compress badly, so that there are several partitions."""
    dice = random.Random(count)
    folder.mkdir()

    def message(number: int) -> WireMessage:
        body = b"%07d %s" % (number, dice.randbytes((BODY_BYTES - 8) // 2).hex().encode())
        return WireMessage(BEGIN_NS + number, 1, b"%016x" % number, body)

    for first in range(0, count, 20_000):
        spans = (range(begin, begin + 2500) for begin in range(first, first + 20_000, 2500))
        write_archive(folder / f"{first:07d}.gz", *([*map(message, span)] for span in spans))


def workers(driver: subprocess.Popen[bytes]) -> list[int]:
    """The Python processes that run tasks: the children of the daemon that forks them."""
    processes = descendants(driver.pid, WORKER)
    daemons = {process.pid for process in processes}
    return [process.pid for process in processes if process.parent in daemons]


def command_and_jvm(driver: subprocess.Popen[bytes]) -> list[int]:
    """All processes except the workers, which publish for another moment and then end."""
    java = [process.pid for process in descendants(driver.pid, JVM)]
    return [driver.pid, *java] if java else []


@pytest.mark.parametrize(("count", "runs", "kills_in_a_run"), [(40_000, 1, 1), slow(400_000, 5, 3)])
def test_a_killed_replay_loses_nothing_and_reports_doubles(
    count: int,
    runs: int,
    kills_in_a_run: int,
    go_nsqd: MakeNsqd,
    proxy_to: ProxyTo,
    spawn_nsq: SpawnNsq,
    run_spark: RunSpark,
    spark_env: dict[str, str],
    tmp_path: Path,
) -> None:
    """``runs`` runs are killed, and the last run is not."""
    write_input(tmp_path / "in", count)
    nsqd = go_nsqd()
    nsqd.create_topic("clicks")
    proxy = proxy_to(nsqd.tcp_address)
    place = ["--nsqd-tcp-address", proxy.address, "--ledger", str(tmp_path / "ledger")]
    place += ["--master", f"local[{SLOTS},9]", "--spark-log", str(tmp_path / "spark.log")]
    args = ["spark", "replay", str(tmp_path / "in"), *place]
    step = count * MESSAGE_BYTES // ((runs + 1) * (kills_in_a_run + 1))

    kills = [workers] * kills_in_a_run + [command_and_jvm]
    for _ in range(runs):
        proxy.pause_after(TO_SERVER, step)
        driver = spawn_nsq(args, spark_env)
        for victims in kills:
            # another part was sent to nsqd (maybe by workers of the previous driver, so the victims
            # must exist as well), and the tasks wait for its answers
            wait_for(driver, lambda d=driver, v=victims: proxy.is_paused(TO_SERVER) and v(d))
            for pid in victims(driver):
                kill(pid)
            proxy.pause_after(TO_SERVER, step)
        driver.wait(patience_s(20))
    proxy.resume(TO_SERVER)
    last = run_spark(*args[1:])

    assert last.status == 0, last.err
    assert last.out == b"topic\tmessages\nclicks\t%d\n" % count
    depth = nsqd.depth("clicks")
    replayed = {body[:7] for body in bodies_in(nsqd, "clicks", depth)}
    assert replayed == {b"%07d" % n for n in range(count)}
    reported = re.search(r"up to (\d+) twice", last.err)
    assert depth - count <= (int(reported[1]) if reported else 0) <= runs * len(kills) * WINDOW
