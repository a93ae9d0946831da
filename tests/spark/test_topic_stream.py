"""A live topic through its spool: spooling, reading, removing and taking over; then in Spark."""

import os
import pickle
import shutil
import threading
from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from plugins.archives import parts, values_of
from plugins.daemons import Nsqd
from plugins.spark import DataFrame, SparkSession, StreamingQuery
from plugins.waiting import patience_s, wait_until

from nsqtools.client.connection_settings import ConnectionSettings
from nsqtools.errors import ConfigurationError, NsqError, OutputError
from nsqtools.spark.archives.archive_stream import ArchiveStream
from nsqtools.spark.archives.offsets import Offset
from nsqtools.spark.archives.read_settings import BatchLimits, ReadSettings, StreamSettings
from nsqtools.spark.stream_format import StreamReader
from nsqtools.spark.topic_stream import SpoolSettings, TopicSettings, TopicStream, topic_settings

TOPIC, CHANNEL = "clicks", "spark"
UNLIMITED = BatchLimits()

NewStream = Callable[..., TopicStream]


@pytest.fixture
def settings(tmp_path: Path) -> SpoolSettings:
    spool = tmp_path / "spool"
    return SpoolSettings(spool, (TOPIC,), CHANNEL, flush_s=0.01, idle_s=patience_s(2))


def stream_of(spool: SpoolSettings, connection: ConnectionSettings, **stream: Any) -> TopicStream:
    read = ReadSettings((str(spool.folder),))
    return TopicStream(TopicSettings(spool, read, StreamSettings(**stream), connection))


@pytest.fixture
def new_stream(nsqd: Nsqd, settings: SpoolSettings) -> Iterator[NewStream]:
    """Streams of a channel with a backlog of 50 messages."""
    nsqd.create_channel(TOPIC, CHANNEL)
    nsqd.publish(TOPIC, *numbered(0, 50))
    streams: list[TopicStream] = []

    def make(spool: SpoolSettings = settings, **stream: Any) -> TopicStream:
        connection = ConnectionSettings((nsqd.tcp_address,), options={"msg_timeout": "10s"})
        streams.append(stream_of(spool, connection, **stream))
        return streams[-1]

    yield make
    for stream in streams:
        stream.stop()


def bodies(stream: TopicStream, start: Offset, end: Offset) -> list[bytes]:
    return values_of(stream.plan(start, end), ReadSettings(("/",)), "body")


def following(stream: TopicStream, start: Offset, limits: BatchLimits = UNLIMITED) -> Offset:
    """The next offset with new messages."""
    return wait_until(
        lambda: end if (end := stream.latest(start, limits)) != start else None,
        what="messages",
        timeout_s=20,
    )


def upto(stream: TopicStream, start: Offset, count: int) -> tuple[list[bytes], Offset]:
    """Read batches until there are ``count`` messages; return them and the last offset."""
    received: list[bytes] = []
    while len(received) < count:
        end = following(stream, start)
        received += bodies(stream, start, end)
        start = end
    return received, start


def numbered(begin: int, end: int) -> list[bytes]:
    return [b"%06d" % number for number in range(begin, end)]


def test_messages_arrive_once_across_runs_and_read_files_are_removed(
    nsqd: Nsqd, new_stream: NewStream, settings: SpoolSettings, monkeypatch: pytest.MonkeyPatch
) -> None:
    first = new_stream()
    nsqd.publish(TOPIC, *numbered(50, 500))
    received, offset = upto(first, first.initial(), 500)
    first.stop()
    nsqd.publish(TOPIC, *numbered(500, 900))

    second = new_stream()
    second.initial()  # Spark calls it even when there is a checkpoint.
    more, offset = upto(second, offset, 400)
    second.stop()
    third = new_stream()
    end = following(third, offset)  # the offset of the finished files
    assert bodies(third, offset, end) == []
    synced: list[Path] = []
    monkeypatch.setattr(os, "sync", lambda: synced.extend(settings.folder.glob("*/*jsonl*")))
    third.commit(end)

    assert (sorted(received), sorted(more)) == (numbered(0, 500), numbered(500, 900))
    assert synced
    assert [*settings.folder.glob("*/*jsonl*")] == []


@pytest.mark.parametrize("other", [{"topics": ("other",)}, {"channel": "other"}])
def test_a_batch_can_be_planned_again_and_a_checkpoint_belongs_to_its_channel(
    new_stream: NewStream, settings: SpoolSettings, other: dict[str, Any]
) -> None:
    first = new_stream()
    start = first.initial()
    end = following(first, start, BatchLimits(rows=1))
    expected = bodies(first, start, end)
    first.stop()

    restarted = new_stream()

    assert expected
    assert bodies(restarted, restarted.initial(), end) == expected
    restarted.stop()

    stream = new_stream(replace(settings, **other))
    with pytest.raises(ConfigurationError, match=r"the checkpoint belongs to .*, not to .*other"):
        stream.latest(end, UNLIMITED)


def test_an_offset_belongs_to_one_kind_of_source(new_stream: NewStream, tmp_path: Path) -> None:
    read, stream = ReadSettings((str(tmp_path),)), StreamSettings()
    topics = StreamReader(new_stream, read, stream, [], "topic clicks")
    archive = StreamReader(partial(ArchiveStream, read, stream), read, stream, [], "archive a")
    for reader, other in ((topics, archive), (archive, topics)):
        reader.commit(reader.initialOffset())
        with pytest.raises(ConfigurationError, match=f"is not an offset of {reader._source}"):
            reader.commit(other.initialOffset())


@pytest.mark.parametrize("is_planned", [False, True])
def test_a_new_query_takes_over_the_spool_of_an_ended_one(
    new_stream: NewStream, is_planned: bool
) -> None:
    ending = new_stream()
    start = ending.initial()
    end = following(ending, start)  # Spark ends before or after it stores the offset.
    if is_planned:
        bodies(ending, start, end)
    threading.Timer(0.5, ending.stop).start()

    stream = new_stream()

    assert stream.initial() == start
    assert sorted(upto(stream, start, 50)[0]) == numbered(0, 50)


@pytest.mark.parametrize("fails", [True, False])
def test_a_missing_spool_is_reported(
    nsqd: Nsqd, new_stream: NewStream, settings: SpoolSettings, fails: bool
) -> None:
    first = new_stream()
    start = first.initial()
    _, offset = upto(first, start, 50)
    first.stop()
    shutil.rmtree(settings.folder / start.run)

    stream = new_stream(fail_on_data_loss=fails)
    if fails:
        with pytest.raises(NsqError, match=f"the spool .*{start.run} is gone"):
            stream.latest(offset, UNLIMITED)
    else:
        nsqd.publish(TOPIC, b"new")
        end = stream.latest(offset, UNLIMITED)
        received = bodies(stream, offset, end)
        assert received + upto(stream, end, 1 - len(received))[0] == [b"new"]


def test_a_full_spool_stops_consuming_until_half_of_it_is_read(
    nsqd: Nsqd, new_stream: NewStream, settings: SpoolSettings
) -> None:
    stream = new_stream(replace(settings, max_rows=100))
    start = stream.initial()
    stream.latest(start, UNLIMITED)
    nsqd.publish(TOPIC, *numbered(50, 200))

    def ready() -> list[int]:
        return [c["ready_count"] for c in nsqd.channel_stats(TOPIC, CHANNEL)["clients"]]

    wait_until(lambda: ready() == [0], what="RDY 0", timeout_s=20)
    nsqd.publish(TOPIC, *numbered(200, 300))
    received, start = upto(stream, start, 200)
    wait_until(lambda: ready() != [0], what="RDY again", timeout_s=20)
    more, _ = upto(stream, start, 300 - len(received))

    assert sorted(received + more) == numbered(0, 300)


def test_a_full_disk_ends_available_now_and_is_reported_by_other_triggers(
    nsqd: Nsqd, new_stream: NewStream, settings: SpoolSettings, small_disk: Path
) -> None:
    nsqd.publish(TOPIC, *(b"x" * 5000 for _ in range(50)))
    (room := small_disk / "room").write_bytes(bytes(4096))
    stream = new_stream(replace(settings, folder=small_disk))
    stream.freeze()
    with pytest.raises(OutputError, match="No space left on device"):
        stream.latest(stream.initial(), UNLIMITED)
    stream.stop()

    room.unlink()  # room for the notes of the next run, but not for a message
    stream = new_stream(replace(settings, folder=small_disk))
    start = stream.initial()
    wait_until(
        lambda: stream.latest(start, UNLIMITED) and "problem" in (stream.lag() or ()),
        what="a full disk",
        timeout_s=20,
    )
    assert "No space left on device" in (stream.lag() or {})["problem"]


def test_a_spool_belongs_to_one_query(
    new_stream: NewStream, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("nsqtools.spark.topic_stream.LOCK_WAIT_S", 0.2)
    first, second = new_stream(), new_stream()
    start = first.initial()
    first.latest(start, UNLIMITED)

    with pytest.raises(OutputError, match="another process writes the spool"):
        second.latest(start, UNLIMITED)


def test_no_secret_is_sent_to_executors(monkeypatch: pytest.MonkeyPatch) -> None:
    from nsqtools.spark.nsq_format import NsqFormat

    monkeypatch.setenv("NSQ_AUTH_SECRET", "sesame")
    source = NsqFormat({"topic": TOPIC, "channel": CHANNEL, "spooldir": "/shared/spool"})
    reader = source.streamReader(source.schema())
    reader.initialOffset()

    travels = pickle.dumps(reader)

    assert (b"spool" in travels, b"sesame" in travels) == (True, False)


def test_available_now_reads_matching_topics_and_names_an_unreachable_nsqd(
    nsqd: Nsqd, settings: SpoolSettings, tmp_path: Path
) -> None:
    for topic in ("orders.new", "orders.paid", "views"):
        nsqd.create_channel(topic, CHANNEL)
        nsqd.publish(topic, *[b"%b %d" % (topic.encode(), number) for number in range(1500)])
    options = {"topicPattern": "^orders", "channel": CHANNEL, "spoolDir": str(tmp_path)}
    pattern = topic_settings(options, {}).spool.pattern
    stream = stream_of(
        replace(settings, topics=(), pattern=pattern, max_rows=1000),
        ConnectionSettings(
            (nsqd.tcp_address, "127.0.0.1:1"), nsqd_http_addresses=(nsqd.http_address,)
        ),
    )
    stream.freeze()
    start, received = stream.initial(), []
    while (end := stream.latest(start, BatchLimits(rows=400))) != start:
        received += bodies(stream, start, end)
        start = end

    orders = [b"orders.%b %d" % (kind, n) for kind in (b"new", b"paid") for n in range(1500)]
    assert sorted(received) == sorted(orders)
    assert nsqd.depth("views", CHANNEL) == 1500
    assert "cannot connect to 127.0.0.1:1 (" in stream.lag()["problem"]
    with pytest.raises(ConfigurationError, match="exclude each other"):
        topic_settings(options | {"topic": "views"}, {})


BODIES = [b"plain", b"\xff\x00\x80", "\u2028 caf\u00e9 \n\0".encode(), b"x" * (1 << 20)]


@pytest.fixture
def spark_options(nsqd: Nsqd, tmp_path: Path) -> dict[str, str]:
    nsqd.create_channel(TOPIC, CHANNEL)
    place = {"nsqdTcpAddress": nsqd.tcp_address, "spoolDir": str(tmp_path / "spool")}
    return {"topic": TOPIC, "channel": CHANNEL, **place}


def started(frame: DataFrame, place: Path, received: list[bytes], **trigger: Any) -> StreamingQuery:
    writer = frame.writeStream.option("checkpointLocation", str(place))
    writer = writer.trigger(**(trigger or {"processingTime": "0 seconds"}))
    return writer.foreachBatch(
        lambda batch, number: received.extend(bytes(row.body) for row in batch.collect())
    ).start()


def test_every_body_arrives_once_and_available_now_reads_later_messages(
    spark: SparkSession, nsqd: Nsqd, spark_options: dict[str, str], tmp_path: Path
) -> None:
    from nsqtools.spark.jobs.ingestion import _parse_lag

    received: list[bytes] = []
    spark_options["idleTimeout"] = f"{patience_s(2):g}s"
    frame = spark.readStream.format("nsq").options(**spark_options).load()
    query = started(frame, tmp_path / "checkpoint", received)
    try:
        for number, body in enumerate(BODIES, 1):
            nsqd.publish(TOPIC, body)
            wait_until(lambda n=number: len(received) == n, what="a message", timeout_s=60)
        query.processAllAvailable()  # The last batch is committed, so it is not repeated.
    finally:
        query.stop()

    assert received == BODIES
    (spool,) = (tmp_path / "spool").iterdir()
    wait_until(lambda: not parts(spool), what="the files to be finished", timeout_s=60)
    wait_until(lambda: nsqd.channel_stats(TOPIC, CHANNEL)["clients"] == [], what="it to be gone")

    nsqd.publish(TOPIC, *[b"%d" % number for number in range(500)])
    later: list[bytes] = []
    query = started(frame, tmp_path / "checkpoint", later, availableNow=True)
    assert query.awaitTermination(int(patience_s(60)))
    assert sorted(map(int, later)) == list(range(500))
    latest = _parse_lag(query.recentProgress[-1]["sources"][0]["latestOffset"])
    assert (latest["source"], latest["rows_behind"]) == ("topic clicks, channel spark", 0)


def test_an_error_that_ends_the_consumer_ends_the_query(
    spark: SparkSession, spark_options: dict[str, str], tmp_path: Path
) -> None:
    spark_options["nsqdTcpAddress"] = "127.0.0.1:1"
    frame = spark.readStream.format("nsq").options(**spark_options)
    query = started(frame.load(), tmp_path / "checkpoint", [])

    with pytest.raises(Exception, match=r"ConnectionFailed: cannot connect to 127\.0\.0\.1:1"):
        query.awaitTermination(int(patience_s(60)))
