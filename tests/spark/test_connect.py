"""The formats on Spark Connect, where they run on the server and the client has no JVM."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
from plugins.archives import write_archive
from plugins.clients import bodies_in
from plugins.http_api import Nsqd
from plugins.waiting import patience_s

from nsqtools.protocol.frames import WireMessage

PROGRAM = """
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
def test_batches_streams_and_the_sink_work(
    spark_env: dict[str, str], nsqd: Nsqd, tmp_path: Path
) -> None:
    """Needs what ``pyspark[connect]`` installs."""
    pytest.importorskip("grpc_status")
    from nsqtools.spark.java import find_java, java_home

    archive = tmp_path / "archive"
    archive.mkdir()
    messages = [WireMessage(n + 1, 1 + n % 2, b"%016x" % n, b"body %d" % n) for n in range(40)]
    write_archive(archive / "clicks.gz", *(messages[n : n + 10] for n in range(0, 40, 10)))
    java = java_home(find_java(os.environ), os.environ, tmp_path / "java")

    done = subprocess.run(
        [sys.executable, "-c", PROGRAM, archive, tmp_path / "out", nsqd.tcp_address],
        capture_output=True,
        text=True,
        env=spark_env | {"PYSPARK_PYTHON": sys.executable, "JAVA_HOME": str(java)},
        timeout=patience_s(120),
        check=False,
    )

    assert done.returncode == 0, done.stderr
    module, counts, streamed = done.stdout.splitlines()
    assert module.startswith("pyspark.sql.connect")
    assert counts == "40 20"
    assert streamed.startswith("40 ")
    assert '"rows_behind": 0' in streamed.replace("'", '"').replace('":0', '": 0')
    assert bodies_in(nsqd, "again", 40) == sorted(message.body for message in messages)
