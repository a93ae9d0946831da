"""The commands on a real standalone cluster: a master and two workers, each a process of its own.

What local mode hides shows here: tasks run in other processes than the driver, which get only what
was pickled, find nsqtools by themselves, and share nothing with the driver but a directory.
"""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from collections.abc import Iterator, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import NamedTuple

import pytest
from plugins.archives import write_archive
from plugins.cli import Result
from plugins.clients import bodies_in
from plugins.http_api import Nsqd
from plugins.waiting import patience_s, wait_until

import nsqtools
from nsqtools.protocol.message import WireMessage

TIMEOUT_S = patience_s(180.0)
MASTER, WORKER = "org.apache.spark.deploy.master.Master", "org.apache.spark.deploy.worker.Worker"

BEGIN = 1_790_000_000_000_000_000  # 2026-09-21T14:13:20Z
FILES, MEMBERS, PER_MEMBER = 4, 5, 50
KINDS = [b"plain", b"a\nb\0", b"\xff\xfe\x80", "ü".encode(), b'{"a": 1}']


class SparkCluster(NamedTuple):
    """A running cluster, and the environment for its drivers."""

    url: str
    env: dict[str, str]


@pytest.fixture(scope="module")
def spark_cluster(
    tmp_path_factory: pytest.TempPathFactory, quick_jvm: str
) -> Iterator[SparkCluster]:
    """A master and two workers of one core each."""
    from nsqtools.spark.java import find_java, java_home
    from nsqtools.spark.jvm import spark_home

    directory = tmp_path_factory.mktemp("cluster")
    (directory / "conf").mkdir()
    env = {name: value for name, value in os.environ.items() if not name.startswith("SPARK_")} | {
        "JAVA_HOME": str(java_home(find_java(os.environ), os.environ, directory)),
        "SPARK_HOME": str(spark_home()),
        "SPARK_CONF_DIR": str(directory / "conf"),
        "SPARK_LOCAL_IP": "127.0.0.1",
        "SPARK_LOCAL_DIRS": str(directory),
        "SPARK_DAEMON_MEMORY": "256m",
        "JAVA_TOOL_OPTIONS": quick_jvm,  # of executors too
        "PYTHONPATH": str(Path(nsqtools.__file__).parents[1]),
    }
    with ExitStack() as stack:

        def start(name: str, *command: str) -> Path:
            log = directory / f"{name}.log"
            process = subprocess.Popen(
                [spark_home() / "bin" / "spark-class", *command, "--host", "127.0.0.1"],
                stdin=subprocess.DEVNULL,
                stdout=stack.enter_context(log.open("wb")),
                stderr=subprocess.STDOUT,
                env=env,
                cwd=directory,
            )
            stack.callback(process.wait)
            stack.callback(process.kill)
            return log

        master = start("master", MASTER, "--port", "0", "--webui-port", "0")
        url = wait_for(master, r"Starting Spark master at (spark://\S+)")
        size = ("--cores", "1", "--memory", "1g", "--webui-port", "0")
        workers = [
            start(f"worker-{n}", WORKER, *size, "--work-dir", str(directory / f"work-{n}"), url)
            for n in range(2)
        ]
        for worker in workers:
            wait_for(worker, r"Successfully registered with master (\S+)")
        names = ("JAVA_HOME", "SPARK_CONF_DIR", "SPARK_LOCAL_IP")
        yield SparkCluster(url, {name: env[name] for name in names})


def wait_for(log: Path, pattern: str) -> str:
    """Wait until a daemon has logged something, and return what it is."""
    found = wait_until(
        lambda: re.search(pattern, log.read_text(errors="replace")),
        what=f"{pattern} in {log}",
        timeout_s=TIMEOUT_S,
    )
    return found[1]


IN_ONE_SESSION = """
import json, os, sys
from contextlib import contextmanager
from pathlib import Path
from plugins.in_process import run_in_process
from nsqtools.spark import session
from nsqtools.spark.spark_settings import SparkSettings

master, log, timeout_s, commands = json.loads(sys.argv[1])
small = {"spark.executor.memory": "512m", "spark.sql.shuffle.partitions": "2"}
settings = SparkSettings(master, "tests", "512m", small, Path(log))
with session.spark_session(settings) as spark:

    @contextmanager
    def shared(settings):
        yield spark

    session.spark_session = shared
    for command in commands:
        status, out, err = run_in_process(["spark", *command], b"", dict(os.environ), timeout_s)
        print(json.dumps([status, out.decode(), err]), flush=True)
"""
"""A driver and two executors take longer to start than what they are asked to do."""


def in_one_session(
    cluster: SparkCluster, env: dict[str, str], directory: Path, *commands: Sequence[object]
) -> list[Result]:
    """Run ``nsq spark`` several times, on one session with executors of 512 MiB."""
    texts = [[str(word) for word in command] for command in commands]
    what = [cluster.url, str(directory / "spark.log"), TIMEOUT_S, texts]
    path = os.pathsep.join([env["PYTHONPATH"], str(Path(__file__).parents[1])])
    done = subprocess.run(
        [sys.executable, "-c", IN_ONE_SESSION, json.dumps(what)],
        capture_output=True,
        text=True,
        env=env | cluster.env | {"PYTHONPATH": path},
        timeout=TIMEOUT_S,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    lines = [json.loads(line) for line in done.stdout.splitlines()]
    return [Result(status, out.encode(), err) for status, out, err in lines]


def messages() -> list[WireMessage]:
    count = FILES * MEMBERS * PER_MEMBER
    return [
        WireMessage(BEGIN + n * 1_000_000, 1, b"%016x" % n, b"%d " % n + KINDS[n % len(KINDS)])
        for n in range(count)
    ]


@pytest.fixture
def archive(tmp_path: Path) -> Path:
    """An archive of several files with several members each."""
    directory = tmp_path / "archive"
    directory.mkdir()
    found = messages()
    members = [found[n : n + PER_MEMBER] for n in range(0, len(found), PER_MEMBER)]
    for n in range(FILES):
        write_archive(directory / f"clicks-{n}.gz", *members[n * MEMBERS : (n + 1) * MEMBERS])
    return directory


def test_an_archive_becomes_parquet_and_messages_again_on_workers_that_the_doctor_sees(
    spark_cluster: SparkCluster,
    spark_env: dict[str, str],
    archive: Path,
    nsqd: Nsqd,
    tmp_path: Path,
) -> None:
    from pyarrow import parquet

    output = tmp_path / "parquet"
    expected = sorted(message.body for message in messages())

    checked, ingested, replayed = in_one_session(
        spark_cluster,
        spark_env,
        tmp_path,
        ("doctor", "--shared-dir", tmp_path, "--json"),
        ("ingest", archive, "-o", output, "--checkpoint", tmp_path / "cp", "--once"),
        ("replay", output, "--nsqd-tcp-address", nsqd.tcp_address),
    )

    assert checked.status == 0, checked.err
    found = {each["check"]: each for each in json.loads(checked.out)}
    found.pop("java", None)  # it may be old here
    assert {each["state"] for each in found.values()} == {"ok"}
    assert found["executors"]["found"].startswith("2 on ")
    assert str(tmp_path) in found["shared directory"]["found"]
    assert list(tmp_path.glob(".nsq-doctor-*")) == []

    assert ingested.status == 0, ingested.err
    tables = [parquet.read_table(path) for path in output.rglob("*.parquet")]
    assert sorted(body for table in tables for body in table["body"].to_pylist()) == expected

    assert replayed.status == 0, replayed.err
    assert bodies_in(nsqd, "clicks", len(expected)) == expected
