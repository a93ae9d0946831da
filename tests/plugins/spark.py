"""Spark for the tests: one session for a run, clusters, and a session on one for several commands.

    spark          a session in this process with two cores; shared, so restore its settings
    shared_session commands that start Spark get that session
    run_spark      runs ``nsq spark ARGS`` in this process to its end, with that session
    spark_env      the environment for ``nsq spark`` in its own process
    spark_settings the settings of `spark`, with the log that an error names
    small_cluster  two workers in the JVM of the driver; executors have their own processes, and
                   share with the driver only a disk or a bucket
    spark_cluster  a master and two workers, each a process; for executors, the directory of the
                   tests is empty (as root; otherwise they see it)
    SparkDriver    runs ``nsq spark`` several times on one session, because a driver and two
                   executors take longer to start than to run a command

A test that uses one of the first five is skipped if pyspark, pyarrow or Java is missing; with
``CI=true`` it fails, so that a green run has run all tests.
"""

from __future__ import annotations

import json
import os
import re
import select
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple, Self

import pytest
from plugins.in_process import Result
from plugins.java_classes import QuickSpark
from plugins.processes import descendants
from plugins.servers import need
from plugins.waiting import patience_s, wait_until

import nsqtools

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, SparkSession
    from pyspark.sql.streaming import StreamingQuery

    from nsqtools.spark.spark_settings import SparkSettings
else:  # tests are collected without pyspark as well
    DataFrame = SparkSession = StreamingQuery = Any

SPARK_FIXTURES = {"spark", "spark_env"}

RunSpark = Callable[..., Result]


@pytest.fixture(scope="session")
def spark_settings(
    tmp_path_factory: pytest.TempPathFactory, quick_spark: QuickSpark
) -> SparkSettings:
    from nsqtools.spark.spark_settings import SparkSettings

    log_file = tmp_path_factory.mktemp("spark-log") / "spark.log"
    conf = {
        "spark.sql.shuffle.partitions": "2",
        "spark.driver.extraJavaOptions": quick_spark.flags,
    }
    return SparkSettings("local[2,4]", "tests", "1g", conf, log_file)


@pytest.fixture
def spark(whole_run_session: SparkSession) -> Iterator[SparkSession]:
    yield whole_run_session
    for (
        query
    ) in whole_run_session.streams.active:  # left by a failed test, and would use the processors
        query.stop()


@pytest.fixture(scope="session")
def whole_run_session(
    spark_settings: SparkSettings, quick_spark: QuickSpark
) -> Iterator[SparkSession]:
    from nsqtools.spark.session import spark_session

    with pytest.MonkeyPatch.context() as patch:
        for name in ("JAVA_TOOL_OPTIONS", "SPARK_CONF_DIR", "SPARK_LOCAL_DIRS"):
            patch.delenv(name, raising=False)
        patch.setenv("SPARK_HOME", quick_spark.home)
        with spark_session(spark_settings) as session:
            yield session


@pytest.fixture
def shared_session(
    spark: SparkSession,
    spark_settings: SparkSettings,
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
) -> None:
    from nsqtools.spark import session
    from nsqtools.spark.failures import spark_errors

    @contextmanager
    def shared(settings: SparkSettings) -> Iterator[SparkSession]:
        with spark_errors(spark_settings):
            yield spark

    monkeypatch.setattr(session, "spark_session", shared)
    monkeypatch.setenv("HOME", str(tmp_path))


@pytest.fixture
def run_spark(
    shared_session: None, capfd: pytest.CaptureFixture[str], own_logging: None
) -> RunSpark:
    from nsqtools.cli.main import main

    def run(*arguments: object) -> Result:
        capfd.readouterr()
        status = main(["spark", *map(str, arguments)])
        out, err = capfd.readouterr()
        assert "This is a bug" not in err, err
        return Result(status, out.encode(), err)

    return run


@pytest.fixture
def spark_env(nsq_env: dict[str, str], quick_spark: QuickSpark) -> dict[str, str]:
    kept = {name: os.environ[name] for name in ("JAVA_HOME",) if name in os.environ}
    quick = {"JAVA_TOOL_OPTIONS": quick_spark.flags, "SPARK_HOME": quick_spark.home}
    return nsq_env | kept | quick


def without_java(env: dict[str, str], directory: Path) -> dict[str, str]:
    """An environment with the programs that Spark's scripts call, but without Java."""
    directory.mkdir()
    for name in ("bash", "dirname", "env", "head", "ps", "rm", "sh", "uname"):
        (directory / name).symlink_to(shutil.which(name) or "")
    kept = {name: value for name, value in env.items() if name != "JAVA_HOME"}
    return kept | {"PATH": str(directory)}


REASON = pytest.StashKey[str]()
"""The reason why Spark cannot run here; empty if it can."""


@pytest.hookimpl(tryfirst=True)
def pytest_runtest_setup(item: pytest.Item) -> None:
    if not SPARK_FIXTURES & set(getattr(item, "fixturenames", ())):
        return
    stash = item.session.stash
    if REASON not in stash:
        from nsqtools.errors import NsqError
        from nsqtools.spark.java import find_java
        from nsqtools.spark.session import require_pyspark

        stash[REASON] = ""
        try:
            require_pyspark()
            find_java(os.environ)
        except NsqError as error:
            stash[REASON] = f"{error}. {error.hint}"
    need(stash[REASON])


TIMEOUT_S = patience_s(180.0)
MASTER, WORKER = "org.apache.spark.deploy.master.Master", "org.apache.spark.deploy.worker.Worker"
IVY = Path(os.environ.get("NSQTOOLS_TEST_IVY") or Path.home() / ".cache/nsqtools-tests/ivy")
"""The directory of the jars for object stores, which are fetched once."""

EXECUTOR = "CoarseGrainedExecutorBackend"
SMALL = {
    "spark.executor.memory": "512m",
    "spark.jars.ivy": str(IVY),
    "spark.sql.shuffle.partitions": "2",
    "spark.shuffle.readHostLocalDisk": "false",  # executors have one host, and different disks
}


class SparkCluster(NamedTuple):
    """The address of a cluster, the environment of drivers, and the workers (none: the driver)."""

    url: str
    env: dict[str, str]
    workers: tuple[int, ...] = ()


@pytest.fixture(scope="module")
def small_cluster(tmp_path_factory: pytest.TempPathFactory) -> SparkCluster:
    """Spark's own cluster for tests; executors write their logs below SPARK_HOME.

    Unlike the others they import pyspark from Spark's zip, like executors of a distribution.
    """
    import pyspark

    home = tmp_path_factory.mktemp("spark")
    for path in Path(pyspark.__file__).parent.iterdir():
        (home / path.name).symlink_to(path)
    return SparkCluster("local-cluster[2,1,512]", {"SPARK_HOME": str(home)})


HIDING = 'mount -t tmpfs none "$0" && mkdir -p "$1" && cd "$1" && shift && exec "$@"'


@pytest.fixture(scope="module")
def spark_cluster(
    tmp_path_factory: pytest.TempPathFactory, quick_spark: QuickSpark
) -> Iterator[SparkCluster]:
    """A master and two workers of one core each."""
    from nsqtools.spark.java import find_java, java_home

    directory = tmp_path_factory.mktemp("cluster")
    with ExitStack() as stack:
        java = Path(stack.enter_context(tempfile.TemporaryDirectory()))
        kept = {n: v for n, v in os.environ.items() if not n.startswith(("SPARK_", "AWS_"))}
        env = kept | {
            "JAVA_HOME": str(java_home(find_java(os.environ), os.environ, java)),
            "SPARK_HOME": quick_spark.home,
            "SPARK_CONF_DIR": str(java),
            "SPARK_LOCAL_IP": "127.0.0.1",
            "SPARK_LOCAL_DIRS": str(directory),
            "SPARK_DAEMON_MEMORY": "256m",
            "JAVA_TOOL_OPTIONS": quick_spark.flags,  # also for executors
            "PYTHONPATH": str(Path(nsqtools.__file__).parents[1]),
        }

        def start(name: str, *command: str, before: Sequence[str] = ()) -> tuple[Path, int]:
            log = directory / f"{name}.log"
            process = subprocess.Popen(
                [*before, f"{quick_spark.home}/bin/spark-class", *command, "--host", "127.0.0.1"],
                stdin=subprocess.DEVNULL,
                stdout=stack.enter_context(log.open("wb")),
                stderr=subprocess.STDOUT,
                env=env,
                cwd=directory,
            )
            stack.callback(process.wait)
            stack.callback(process.kill)
            return log, process.pid

        def logged(log: Path, pattern: str) -> str:
            return wait_until(
                lambda: re.search(pattern, log.read_text(errors="replace")),
                what=f"{pattern} in {log}",
                timeout_s=TIMEOUT_S,
            )[1]

        master, _ = start("master", MASTER, "--port", "0", "--webui-port", "0")
        url = logged(master, r"Starting Spark master at (spark://\S+)")
        size = ("--cores", "1", "--memory", "1g", "--webui-port", "0", "--work-dir")
        hiding = ["unshare", "--mount", "sh", "-c", HIDING, str(directory.parent), str(directory)]
        before = hiding if os.geteuid() == 0 else []
        workers = [
            start(f"worker-{n}", WORKER, *size, f"{directory}/{n}", url, before=before)
            for n in range(2)
        ]
        for log, _ in workers:
            logged(log, r"Successfully registered with master (\S+)")
        names = ("JAVA_HOME", "SPARK_CONF_DIR", "SPARK_LOCAL_IP")
        pids = tuple(pid for _, pid in workers)
        yield SparkCluster(url, {name: env[name] for name in names}, pids)


PROGRAM = """
import json, os, sys
from contextlib import contextmanager
from pathlib import Path
from plugins.in_process import run_in_process
from nsqtools.spark import session
from nsqtools.spark.failures import spark_errors
from nsqtools.archive.place_url import parse_place
from nsqtools.spark.spark_settings import SparkSettings

timeout_s, given = json.loads(sys.argv[1])
given["places"] = tuple(map(parse_place, given["places"]))
settings = SparkSettings(**given | {"log_file": Path(given["log_file"])})
with session.spark_session(settings) as spark:

    @contextmanager
    def shared(settings):
        with spark_errors(settings):
            yield spark

    session.spark_session = shared
    for line in sys.stdin:
        command = ["spark", *json.loads(line)]
        status, out, err = run_in_process(command, b"", dict(os.environ), timeout_s)
        print(json.dumps([status, out.decode(), err]), flush=True)
"""


class SparkDriver:
    """One session with executors of 512 MiB. Use it as a context manager."""

    def __init__(
        self,
        cluster: SparkCluster,
        env: Mapping[str, str],
        directory: Path,
        places: tuple[str, ...] = (),
    ) -> None:
        self.log = directory / "spark.log"
        self._cluster = cluster
        small = {"app_name": "tests", "driver_memory": "512m", "conf": SMALL}
        settings = {**small, "master": cluster.url, "log_file": str(self.log), "places": places}
        path = os.pathsep.join([env["PYTHONPATH"], str(Path(__file__).parents[1])])
        self._complaints = (directory / "driver.err").open("w+")
        self._process = subprocess.Popen(
            [sys.executable, "-c", PROGRAM, json.dumps([TIMEOUT_S, settings])],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self._complaints,
            text=True,
            env={**env, **cluster.env, "PYTHONPATH": path},
        )

    @property
    def pid(self) -> int:
        return self._process.pid

    def executors(self) -> list[int]:
        """The processes that run tasks at present."""
        roots = [*self._cluster.workers, self.pid]
        processes = (process for pid in roots for process in descendants(pid, EXECUTOR))
        return [process.pid for process in processes if process.command.split()[0].endswith("java")]

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exception: object) -> None:
        if exception[0] is not None:
            self._process.kill()
        with self._process, self._complaints:
            pass

    def begin(self, *command: object) -> None:
        """Start a command; `end` waits for it."""
        self._process.stdin.write(json.dumps([str(word) for word in command]) + "\n")
        self._process.stdin.flush()

    @property
    def has_ended(self) -> bool:
        """Whether the command has ended."""
        return bool(select.select([self._process.stdout], [], [], 0)[0])

    def end(self) -> Result:
        line = self._process.stdout.readline()
        if not line:
            self._complaints.seek(0)
            raise AssertionError(self._complaints.read())
        status, out, err = json.loads(line)
        return Result(status, out.encode(), err)

    def run(self, *command: object) -> Result:
        """Run a command, which must succeed."""
        self.begin(*command)
        result = self.end()
        assert result.status == 0, result.out.decode() + result.err
        return result
