"""An HDFS on this machine: Hadoop's own minicluster, a namenode and a datanode in one JVM.

    hdfs    an `HDFS` with an empty folder for each test; where its namenode listens and the user
            are in the environment, as a user's would be
    store   a bucket, or that

It needs 60 MB of jars, fetched once by Spark, and some ten seconds to start: for tests with
``-m slow``.
"""

from __future__ import annotations

import itertools
import json
import os
import subprocess
from collections.abc import Iterator
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import NamedTuple
from urllib.parse import urlencode
from urllib.request import Request, urlopen

import pytest
from plugins.object_store import Bucket
from plugins.spark_cluster import IVY
from plugins.waiting import patience_s, wait_until

from nsqtools.archive.hdfs_settings import ADDRESS, USER
from nsqtools.archive.storage import Storage, open_storage

MINICLUSTER = "org.apache.hadoop:hadoop-client-minicluster:{hadoop}"
JUNIT = "org.junit.jupiter:junit-jupiter-api:5.13.3"  # which the minicluster cannot do without
MANAGER = "org.apache.hadoop.test.MiniDFSClusterManager"
FETCH_TIMEOUT_S = 600.0
FLAGS = ("-Xmx300m", "-XX:TieredStopAtLevel=1", "-XX:+UseSerialGC", "-XX:-UsePerfData")
NAME = "nsq-tests"

_numbers = itertools.count(1)


class HDFS(NamedTuple):
    """A folder of an HDFS, and the variables by which it is reached."""

    url: str
    env: dict[str, str]

    @property
    def storage(self) -> Storage:
        return open_storage(self.url)

    def names(self) -> list[str]:
        """The names of all files, in order."""
        return sorted(entry.name for entry in self.storage.list())


@pytest.fixture(scope="session")
def minicluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[int, int]]:
    """The ports of a namenode: Hadoop's own, and HTTP."""
    from nsqtools.spark.java import find_java, java_home
    from nsqtools.spark.jvm import spark_home

    directory = tmp_path_factory.mktemp("hdfs")
    details, conf, log = (directory / name for name in ("details", "conf", "log"))
    with TemporaryDirectory() as shim, log.open("wb") as output:
        home = java_home(find_java(os.environ), os.environ, Path(shim))
        jars = [*_jars(home), *(spark_home() / "jars").glob("*.jar")]
        process = subprocess.Popen(
            [
                *(home / "bin" / "java", *FLAGS, f"-Dtest.build.data={directory}"),
                *("-cp", ":".join(map(str, jars)), MANAGER, "-format"),
                *("-writeDetails", details, "-writeConfig", conf),
            ],
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=subprocess.STDOUT,
            cwd=directory,
        )
        try:
            wait_until(
                lambda: details.exists() and details.read_text().endswith("}"),
                what=f"the minicluster, whose log is {log}",
                timeout_s=patience_s(120.0),
            )
            at = conf.read_text().partition("<name>dfs.namenode.http-address</name>")[2]
            http = at.partition("<value>")[2].partition("</value>")[0]
            yield json.loads(details.read_text())["namenode_port"], int(http.rpartition(":")[2])
        finally:
            process.kill()
            process.wait()


def _jars(home: Path) -> list[Path]:
    """Return the jars that Spark comes without; Spark fetches them."""
    from nsqtools.spark.jvm import spark_home

    prefix = "hadoop-client-api-"
    [api] = (spark_home() / "jars").glob(f"{prefix}*.jar")
    hadoop = api.stem.removeprefix(prefix)
    minicluster = IVY / "jars" / f"org.apache.hadoop_hadoop-client-minicluster-{hadoop}.jar"
    if not minicluster.exists():
        subprocess.run(
            [
                *(spark_home() / "bin" / "spark-submit", "--master", "local[1]"),
                *("--conf", f"spark.jars.ivy={IVY}"),
                *("--packages", f"{MINICLUSTER.format(hadoop=hadoop)},{JUNIT}"),
                *("--exclude-packages", "org.apache.hadoop:hadoop-client-api"),
                *("--class", "org.apache.hadoop.util.VersionInfo", "spark-internal"),
            ],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            timeout=FETCH_TIMEOUT_S,
            check=True,
            env={**os.environ, "JAVA_HOME": str(home), "SPARK_HOME": str(spark_home())},
        )
    return [minicluster, *(IVY / "jars").glob("org.junit.*.jar"), *IVY.glob("jars/org.opentest*")]


@pytest.fixture
def hdfs(
    minicluster: tuple[int, int], nsq_env: dict[str, str], monkeypatch: pytest.MonkeyPatch
) -> HDFS:
    """A folder that belongs to a user who owns nothing else."""
    rpc, http = minicluster
    path = f"/tests/{next(_numbers)}"
    for operation in ({"op": "MKDIRS"}, {"op": "SETOWNER", "owner": NAME}):
        query = urlencode({**operation, "user.name": os.environ.get("USER", "root")})
        url = f"http://127.0.0.1:{http}/webhdfs/v1{path}?{query}"
        urlopen(Request(url, method="PUT"), timeout=patience_s(30.0)).close()
    env = {ADDRESS: f"127.0.0.1:{rpc}=127.0.0.1:{http}", USER: NAME}
    for name, value in env.items():
        monkeypatch.setenv(name, value)
        nsq_env[name] = value
    return HDFS(f"hdfs://127.0.0.1:{rpc}{path}", env)


Store = Bucket | HDFS


@pytest.fixture(params=["bucket", pytest.param("hdfs", marks=pytest.mark.slow)])
def store(request: pytest.FixtureRequest) -> Store:
    """An empty bucket, and with ``-m slow`` an empty folder of an HDFS."""
    found: Store = request.getfixturevalue(request.param)
    return found
