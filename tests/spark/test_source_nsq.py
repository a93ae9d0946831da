"""``readStream.format("nsq")`` in Spark itself; test_spool_stream has what needs no Spark."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
from plugins.archives import parts
from plugins.http_api import Nsqd
from plugins.waiting import patience_s, wait_until

from nsqtools.spark.jobs.ingestion import _lag

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, SparkSession
    from pyspark.sql.streaming import StreamingQuery

TOPIC, CHANNEL = "clicks", "spark"
WAIT_S = patience_s(60.0)

BODIES = [b"plain", b"\xff\x00\x80", "\u2028 caf\u00e9 \n\0".encode(), b"x" * (1 << 20)]


@pytest.fixture
def options(nsqd: Nsqd, tmp_path: Path) -> dict[str, str]:
    nsqd.create_channel(TOPIC, CHANNEL)
    return {
        "topic": TOPIC,
        "channel": CHANNEL,
        "nsqdTcpAddress": nsqd.tcp_address,
        "spoolDir": str(tmp_path / "spool"),
    }


def started(
    frame: DataFrame, checkpoint: Path, found: list[bytes], **trigger: Any
) -> StreamingQuery:
    writer = frame.writeStream.option("checkpointLocation", str(checkpoint))
    writer = writer.trigger(**(trigger or {"processingTime": "0 seconds"}))
    return writer.foreachBatch(
        lambda batch, number: found.extend(bytes(row.body) for row in batch.collect())
    ).start()


def test_every_body_arrives_once_a_stop_is_clean_and_available_now_reads_what_came_since(
    spark: SparkSession, nsqd: Nsqd, options: dict[str, str], tmp_path: Path
) -> None:
    found: list[bytes] = []
    options["idleTimeout"] = f"{patience_s(0.5):g}s"
    frame = spark.readStream.format("nsq").options(**options).load()
    query = started(frame, tmp_path / "checkpoint", found)
    try:
        for number, body in enumerate(BODIES, 1):
            nsqd.publish(TOPIC, body)
            wait_until(lambda n=number: len(found) == n, what="a message", timeout_s=WAIT_S)
        query.processAllAvailable()  # the last batch is committed: it does not come again
    finally:
        query.stop()

    assert found == BODIES
    (spool,) = (tmp_path / "spool").iterdir()
    wait_until(lambda: not parts(spool), what="the files to be finished", timeout_s=WAIT_S)
    wait_until(lambda: nsqd.channel_stats(TOPIC, CHANNEL)["clients"] == [], what="it to be gone")

    nsqd.publish(TOPIC, *[b"%d" % number for number in range(500)])
    later: list[bytes] = []
    query = started(frame, tmp_path / "checkpoint", later, availableNow=True)
    assert query.awaitTermination(int(WAIT_S))
    assert sorted(map(int, later)) == list(range(500))
    latest = _lag(query.recentProgress[-1]["sources"][0]["latestOffset"])
    assert (latest["source"], latest["rows_behind"]) == ("topic clicks, channel spark", 0)


def test_what_ends_the_consumer_is_the_query_s_error(
    spark: SparkSession, options: dict[str, str], tmp_path: Path
) -> None:
    frame = spark.readStream.format("nsq").options(**{**options, "nsqdTcpAddress": "127.0.0.1:1"})
    query = started(frame.load(), tmp_path / "checkpoint", [])

    with pytest.raises(Exception, match=r"ConnectionFailed: cannot connect to 127\.0\.0\.1:1"):
        query.awaitTermination(int(WAIT_S))
