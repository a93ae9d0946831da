"""Batches and compaction on the oldest PySpark that we support, in an environment of its own.

Slow, because it installs one: 450 MB, from a registry. Managed platforms have such a PySpark.
"""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest
from plugins.archives import write_archive
from plugins.waiting import patience_s

from nsqtools.protocol.frames import WireMessage

ROOT = Path(__file__).parents[2]
BEGIN = 1_790_000_000_000_000_000  # 2026-09-21T14:13:20Z
READ = """
import sys
from pyspark.sql import SparkSession

spark = SparkSession.builder.master("local[2]").getOrCreate()
reader = spark.read.format("nsq-archive").option("body", "json").option("schema", sys.argv[2])
print(reader.load(sys.argv[1]).selectExpr("sum(n) n", "count(_error) e").toJSON().first())
"""


@pytest.mark.slow
@pytest.mark.parametrize("version", ["4.0", "4.1"])
def test_batches_and_compaction_run_and_streams_say_what_they_need(
    tmp_path: Path, spark_env: dict[str, str], version: str
) -> None:
    venv, archive, table = tmp_path / "venv", tmp_path / "archive", tmp_path / "table"
    uv, python = Path(sys.executable).with_name("uv"), str(venv / "bin/python")
    subprocess.run([uv, "venv", "-q", "--python", sys.executable, venv], check=True)
    wanted = [f"{ROOT}[delta,parquet]", f"pyspark=={version}.*"]
    subprocess.run([uv, "pip", "install", "-q", "--python", python, *wanted], check=True)
    env = spark_env | {"PYSPARK_PYTHON": python, "PATH": f"{venv}/bin:{spark_env['PATH']}"}

    def run(*command: object) -> subprocess.CompletedProcess[str]:
        return subprocess.run(
            [python, *map(str, command)],
            env=env,
            capture_output=True,
            text=True,
            timeout=patience_s(100),
            check=False,
        )

    archive.mkdir()
    bodies = [b'{"n": %d}' % n for n in range(100)] + [b"no JSON"]
    some = [WireMessage(BEGIN + n, 1, b"%016x" % n, body) for n, body in enumerate(bodies)]
    for name in ("a.gz", "again.gz"):
        write_archive(archive / name, some[:50], some[50:])
    schema = tmp_path / "schema.json"
    schema.write_text('{"properties": {"n": {"type": "integer"}}}')

    read = run("-c", READ, archive, schema)
    nsq = ("-m", "nsqtools", "spark")
    typed = ("--body", "json", "--schema", schema)
    compacted = run(*nsq, "compact", archive, "-o", table, "--format", "delta", *typed)
    query = "select count(*) m, sum(n) n, count(_error) e from delta"
    found = run(*nsq, "sql", query, table, "--json")
    report = run(*nsq, "report", table, "--json")
    stream = run(*nsq, "ingest", archive, "-o", tmp_path / "o", "--checkpoint", tmp_path / "c")

    assert json.loads(read.stdout) == {"n": 2 * 4950, "e": 2}, read.stderr
    assert compacted.returncode == 0, compacted.stderr
    assert json.loads(found.stdout) == {"m": 101, "n": 4950, "e": 1}, found.stderr
    assert json.loads(report.stdout)["topics"][0]["messages"] == 101, report.stderr
    assert stream.returncode == 1
    assert f"streams need pyspark 4.2.1 or newer, and this is {version}" in stream.stderr
    assert "Traceback" not in stream.stderr
