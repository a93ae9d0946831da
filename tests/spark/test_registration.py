"""The formats in any session: registered or not, on Spark Connect, and with an older PySpark.

The test of an older PySpark, as managed platforms have it, is slow: it installs 450 MB.
"""

import json
import os
import subprocess
import sys
from pathlib import Path
from unittest.mock import MagicMock, PropertyMock

import pytest
from plugins.archives import BEGIN_NS, write_archive
from plugins.clients import bodies_in
from plugins.daemons import Nsqd
from plugins.spark import SparkSession
from plugins.waiting import patience_s

import nsqtools
import nsqtools.spark
from nsqtools.errors import ConfigurationError
from nsqtools.protocol.frames import WireMessage
from nsqtools.spark.java import find_java, java_home


def test_registering_twice_is_harmless_and_sql_can_use_the_format(
    spark: SparkSession, tmp_path: Path
) -> None:
    write_archive(tmp_path / "clicks.gz", [WireMessage(1, 1, b"%016x" % 1, b"body")])
    nsqtools.spark.register(spark)
    nsqtools.spark.register(spark)

    spark.sql(f"CREATE TEMPORARY VIEW v USING nsq_archive OPTIONS (path '{tmp_path}')")

    try:
        [row] = spark.sql("SELECT topic, cast(body AS string) AS body FROM v").collect()
        assert (row.topic, row.body) == ("clicks", "body")
    finally:
        spark.catalog.dropTempView("v")
    assert "ts_ns" in spark.readStream.format("nsq").load().columns


@pytest.mark.parametrize("source", ["exit 1", 'exec "$NSQ_PYTHON" -S "$@"'])
def test_a_worker_without_nsqtools_is_refused_with_a_hint(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, source: str
) -> None:
    monkeypatch.setenv("NSQ_PYTHON", sys.executable)
    monkeypatch.delenv("PYTHONPATH", raising=False)
    monkeypatch.chdir(tmp_path)
    worker = tmp_path / "python3"
    worker.write_text(f"#!/bin/sh\n{source}\n")
    worker.chmod(0o700)
    spark = MagicMock()
    spark.sparkContext.pythonExec = str(worker)

    with pytest.raises(ConfigurationError, match=f"{worker}, which cannot import") as caught:
        nsqtools.spark.register(spark)

    assert caught.value.hint.startswith(f"Set PYSPARK_PYTHON={sys.executable} before")


def test_a_worker_that_runs_this_python_or_cannot_be_checked_is_accepted() -> None:
    spark = MagicMock()
    for worker in (sys.executable, "no-such-python"):
        spark.sparkContext.pythonExec = worker
        nsqtools.spark.register(spark)
    # A Spark Connect session has no context.
    type(spark).sparkContext = PropertyMock(side_effect=RuntimeError)
    nsqtools.spark.register(spark)

    assert spark.dataSource.register.call_count == 3 * 4


PLAIN_PYSPARK = """
import sys
from pyspark.sql import SparkSession
spark = SparkSession.builder.master("local[1]").config("spark.ui.enabled", "false").getOrCreate()
print(spark.read.format("nsq-archive").load(sys.argv[1]).count())
spark.sql(f"CREATE TEMPORARY VIEW v USING nsq_archive OPTIONS (path '{sys.argv[1]}')")
print(len(spark.table("v").columns), len(spark.readStream.format("nsq").load().columns))
"""


def run(*command: object, env: dict[str, str]) -> subprocess.CompletedProcess[str]:
    words = [*map(str, command)]
    return subprocess.run(words, env=env, capture_output=True, text=True, timeout=patience_s(120))


def printed(program: str, *arguments: object, env: dict[str, str], tmp_path: Path) -> list[str]:
    """The lines that a program of a user prints."""
    java = java_home(find_java(os.environ), os.environ, tmp_path / "java")
    environment = {"PYSPARK_PYTHON": sys.executable, "JAVA_HOME": str(java)}
    result = run(sys.executable, "-c", program, *arguments, env=env | environment)
    assert result.returncode == 0, result.stderr
    return result.stdout.splitlines()


def test_a_plain_pyspark_finds_the_formats(spark_env: dict[str, str], tmp_path: Path) -> None:
    write_archive(tmp_path / "clicks.gz", [WireMessage(1, 1, b"%016x" % 1, b"body")])
    # The modules are next to the installed package, or below it in a checkout.
    modules = Path(nsqtools.__file__).parent / "spark" / "top_level"
    path = {"PYTHONPATH": f"{modules}{os.pathsep}{spark_env['PYTHONPATH']}"}

    lines = printed(PLAIN_PYSPARK, tmp_path, env=spark_env | path, tmp_path=tmp_path)

    assert lines == ["1", "9 7"]


CONNECT = """
import sys
from pyspark.sql import SparkSession
from nsqtools.spark import register

archive, out, nsqd = sys.argv[1:]
spark = SparkSession.builder.remote("local[2]").config("spark.ui.enabled", "false").getOrCreate()
register(spark)
print(type(spark).__module__)
archived = spark.read.format("nsq-archive").load(archive)
print(archived.count(), archived.where("attempts = 2").count())
stream = spark.readStream.format("nsq-archive").option("maxRowsPerTrigger", 10).load(archive)
writer = stream.writeStream.option("checkpointLocation", out + ".checkpoint").format("parquet")
query = writer.trigger(availableNow=True).start(out)
query.awaitTermination()
print(spark.read.parquet(out).count(), query.lastProgress["sources"][0]["latestOffset"])
rows = archived.selectExpr("'again' AS topic", "body").write.format("nsq").mode("append")
rows.option("nsqdTcpAddress", nsqd).save()
spark.stop()
"""


@pytest.mark.slow
def test_spark_connect_supports_all_formats(
    spark_env: dict[str, str], nsqd: Nsqd, tmp_path: Path
) -> None:
    """The formats run on the server, and the client has no JVM. Needs ``pyspark[connect]``."""
    pytest.importorskip("grpc_status")
    messages = [WireMessage(n + 1, 1 + n % 2, b"%016x" % n, b"body %d" % n) for n in range(40)]
    members = (messages[n : n + 10] for n in range(0, 40, 10))
    archive = write_archive(tmp_path / "archive" / "clicks.gz", *members).parent
    out = (tmp_path / "out", nsqd.tcp_address)

    module, counts, streamed = printed(CONNECT, archive, *out, env=spark_env, tmp_path=tmp_path)

    assert module.startswith("pyspark.sql.connect")
    assert counts == "40 20"
    assert streamed.startswith("40 ")
    assert '"rows_behind": 0' in streamed.replace("'", '"').replace('":0', '": 0')
    assert bodies_in(nsqd, "again", 40) == sorted(message.body for message in messages)


READ = """
import sys
from pyspark.sql import SparkSession

spark = SparkSession.builder.master("local[2]").getOrCreate()
reader = spark.read.format("nsq-archive").option("body", "json").option("schema", sys.argv[2])
print(reader.load(sys.argv[1]).selectExpr("sum(n) n", "count(_error) e").toJSON().first())
"""


@pytest.mark.slow
@pytest.mark.parametrize("version", ["4.0", "4.1"])
def test_batches_run_on_an_older_pyspark_and_streams_name_the_version_they_need(
    tmp_path: Path, spark_env: dict[str, str], version: str
) -> None:
    venv, archive, table = tmp_path / "venv", tmp_path / "archive", tmp_path / "table"
    uv, python = Path(sys.executable).with_name("uv"), str(venv / "bin/python")
    subprocess.run([uv, "venv", "-q", "--python", sys.executable, venv], check=True)
    requirements = [f"{Path(__file__).parents[2]}[delta,parquet]", f"pyspark=={version}.*"]
    subprocess.run([uv, "pip", "install", "-q", "--python", python, *requirements], check=True)
    environ = spark_env | {"PYSPARK_PYTHON": python, "PATH": f"{venv}/bin:{spark_env['PATH']}"}

    bodies = [b'{"n": %d}' % n for n in range(100)] + [b"no JSON"]
    messages = [WireMessage(BEGIN_NS + n, 1, b"%016x" % n, body) for n, body in enumerate(bodies)]
    for name in ("a.gz", "again.gz"):
        write_archive(archive / name, messages[:50], messages[50:])
    schema = tmp_path / "schema.json"
    schema.write_text('{"properties": {"n": {"type": "integer"}}}')

    read = run(python, "-c", READ, archive, schema, env=environ)
    nsq = (python, "-m", "nsqtools", "spark")
    typed = ("--body", "json", "--schema", schema)
    compacted = run(*nsq, "compact", archive, "-o", table, "--format", "delta", *typed, env=environ)
    query = "select count(*) m, sum(n) n, count(_error) e from delta"
    result = run(*nsq, "sql", query, table, "--json", env=environ)
    report = run(*nsq, "report", table, "--json", env=environ)
    stream = run(
        *nsq, "ingest", archive, "-o", tmp_path / "o", "--checkpoint", tmp_path / "c", env=environ
    )

    assert json.loads(read.stdout) == {"n": 2 * 4950, "e": 2}, read.stderr
    assert compacted.returncode == 0, compacted.stderr
    assert json.loads(result.stdout) == {"m": 101, "n": 4950, "e": 1}, result.stderr
    assert json.loads(report.stdout)["topics"][0]["messages"] == 101, report.stderr
    assert stream.returncode == 1
    assert f"streams need pyspark 4.2.1 or newer, and this is {version}" in stream.stderr
    assert "Traceback" not in stream.stderr
