"""``df.write.format("nsq")`` in a real session: rows become messages, and errors one line."""

import json
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
from plugins.certificates import Certificates
from plugins.clients import bodies_in
from plugins.http_server import AuthServer
from plugins.servers import GoNsqd, MakeLookupd, MakeNsqd, Nsqd
from plugins.spark import DataFrame, SparkSession, StreamingQuery
from plugins.waiting import patience_s, wait_until

from nsqtools.errors import NsqError
from nsqtools.spark.failures import spark_errors
from nsqtools.spark.spark_settings import SparkSettings


@pytest.fixture
def save(spark_settings: SparkSettings) -> Callable[..., None]:
    """Write with errors as a command reports them."""

    def write(frame: DataFrame, *nsqd: Nsqd, mode: str = "append", **options: object) -> None:
        addresses = ",".join(server.tcp_address for server in nsqd)
        if addresses:
            options["nsqdTcpAddress"] = addresses
        with spark_errors(spark_settings):
            frame.write.format("nsq").mode(mode).options(**options).save()  # type: ignore[arg-type]

    return write


def rows(spark: SparkSession, bodies: Sequence[bytes]) -> DataFrame:
    return spark.createDataFrame([(body,) for body in bodies], "body binary").repartition(2)


def test_partitions_start_with_different_nsqd_and_topics_are_options_or_columns(
    spark: SparkSession, go_nsqd: MakeNsqd, save: Callable[..., None], tmp_path: Path
) -> None:
    servers = go_nsqd(), go_nsqd()
    frame = spark.range(0, 20_000, 1, 4).selectExpr(
        "cast(id as string) as body", "if(id % 2 = 0, 'even', 'odd') as topic"
    )
    save(frame, *servers, outcomePath=str(tmp_path / "outcome.json"))
    save(frame.limit(2), servers[0], topic="clicks")  # The option takes precedence over the column.
    document = json.loads((tmp_path / "outcome.json").read_bytes())
    assert document["topics"] == {"even": 10_000, "odd": 10_000}
    assert (document["confirmed"], document["is_complete"]) == (20_000, True)
    assert [nsqd.depth("even") for nsqd in servers] == [5000, 5000]
    assert servers[0].depth("clicks") == 2


def test_nsqd_are_found_by_nsqlookupd_which_is_named_when_it_has_none(
    spark: SparkSession, go_nsqd: MakeNsqd, nsqlookupd: MakeLookupd, save: Callable[..., None]
) -> None:
    lookupd = nsqlookupd()
    with pytest.raises(NsqError, match=f"{lookupd.http_address} know no nsqd") as caught:
        save(rows(spark, [b"x"]), topic="clicks", lookupdHttpAddress=lookupd.http_address)
    assert caught.value.category == "not_found"
    flags = f"-lookupd-tcp-address={lookupd.tcp_address}", "-broadcast-address=nowhere.invalid"
    servers = go_nsqd(*flags), go_nsqd(*flags)
    wait_until(lambda: len(lookupd.json("/nodes")["producers"]) == 2, what="both are registered")
    ports = [nsqd.tcp_address.rpartition(":")[2] for nsqd in servers]
    mapped = ",".join(f"nowhere.invalid:{port}=127.0.0.1:{port}" for port in ports)
    place = {"lookupdHttpAddress": lookupd.http_address, "addressMap": mapped}
    frame = spark.range(0, 100, 1, 2).selectExpr("cast(id as string) as body")
    save(frame, topic="clicks", **place)
    assert [nsqd.depth("clicks") for nsqd in servers] == [50, 50]


def test_an_invalid_write_is_refused_early_and_a_bad_row_fails_once(
    spark: SparkSession, nsqd: GoNsqd, save: Callable[..., None]
) -> None:
    for mode, options, complaint in (
        ("overwrite", {}, "messages in NSQ cannot be overwritten"),
        ("errorifexists", {}, "append"),
        ("append", {"auth_secret": "s"}, "a secret must not be an option"),
    ):
        with pytest.raises(NsqError) as caught:
            save(rows(spark, [b"x"]), nsqd, mode=mode, topic="clicks", **options)
        assert complaint in f"{caught.value} {caught.value.hint}"
        assert (caught.value.category, bool(caught.value.hint)) == ("usage", True)
    assert nsqd.stats()["topics"] == []
    with pytest.raises(NsqError, match=r"1 rows were refused .*: row .*the body is empty"):
        save(rows(spark, [b"one", b"", b"two"]), nsqd, topic="clicks")
    assert bodies_in(nsqd, "clicks", 2) == [b"one", b"two"]
    assert nsqd.topic_stats("clicks")["message_count"] == 2  # The tasks were not retried.


def published(
    rows: DataFrame, folder: Path, address: str, trigger: dict[str, Any], **options: str
) -> StreamingQuery:
    writer = rows.writeStream.format("nsq").options(topic="clicks", nsqdTcpAddress=address)
    writer = writer.options(checkpointLocation=str(folder / "checkpoint"), **options)
    return writer.trigger(**trigger).start()


def test_spark_commits_nothing_with_the_unsupported_continuous_trigger(
    spark: SparkSession, nsqd: GoNsqd, tmp_path: Path
) -> None:
    rows = spark.readStream.format("rate").load().selectExpr("string(value) as body")
    query = published(rows, tmp_path, nsqd.tcp_address, {"continuous": "1 second"})
    wait_until((tmp_path / "checkpoint/offsets/3").exists, what="some epochs", timeout_s=60)
    query.stop()
    assert not list(tmp_path.glob("checkpoint/commits/*"))


def test_a_stream_is_published_in_batches_or_fails_with_the_address(
    spark: SparkSession, nsqd: GoNsqd, unreachable_address: str, tmp_path: Path
) -> None:
    (tmp_path / "in").mkdir()
    for number in range(3):
        lines = "".join(f"{number} {n}\n" for n in range(100))
        (tmp_path / "in" / f"{number}.txt").write_text(lines)
    stream = spark.readStream.format("text").option("maxFilesPerTrigger", 1)
    rows = stream.load(str(tmp_path / "in")).selectExpr("value as body")
    impatient = {"retryTimeout": "0s", "dial_timeout": "500ms"}
    failing = published(rows, tmp_path, unreachable_address, {"availableNow": True}, **impatient)
    with pytest.raises(Exception, match=unreachable_address):
        failing.awaitTermination(int(patience_s(60)))
    query = published(rows, tmp_path, nsqd.tcp_address, {"availableNow": True})
    assert query.awaitTermination(int(patience_s(60)))
    assert query.exception() is None
    expected = sorted(b"%d %d" % (file, n) for file in range(3) for n in range(100))
    assert bodies_in(nsqd, "clicks", 300) == expected


def test_secret_tls_and_compression_reach_the_tasks(
    spark: SparkSession,
    go_nsqd: MakeNsqd,
    auth_server: AuthServer,
    certificates: Certificates,
    save: Callable[..., None],
    tmp_path: Path,
) -> None:
    auth_server.allow("s3cret", topic="clicks")
    nsqd = go_nsqd(f"-auth-http-address={auth_server.address}", *certificates.server.nsqd_flags)
    (tmp_path / "secret").write_text("s3cret\n")
    secure = {"tls": "true", "tlsCaFile": str(certificates.ca), "snappy": "true"}
    secure["authSecretFile"] = str(tmp_path / "secret")
    save(rows(spark, [b"x"]), nsqd, topic="clicks", **secure)
    assert nsqd.depth("clicks") == 1
    nsqd.wait_for_log(r"IDENTIFY: .*TLSv1:true .*Snappy:true")
