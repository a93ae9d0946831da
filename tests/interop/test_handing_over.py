"""Each program continues with the files of the other, without loss or change.

The files are data directories, between both nsqd in every order, and archives of the Go
nsq_to_file, including truncated ones.
"""

import subprocess
from pathlib import Path

import pytest
from plugins.archives import unfinished
from plugins.cli import RunNsq
from plugins.raw_client import subscribed
from plugins.servers import DataPath, EmbeddedServer, GoNsqd, GoProgram, Nsqd, Serve
from plugins.waiting import wait_until

pytestmark = pytest.mark.real_nsqd

ORDERS = [
    pytest.param((GoNsqd, EmbeddedServer), id="Go to embedded"),
    pytest.param((EmbeddedServer, GoNsqd), id="embedded to Go"),
    pytest.param((GoNsqd, EmbeddedServer, GoNsqd), id="Go to embedded and back"),
    pytest.param((EmbeddedServer, GoNsqd, EmbeddedServer), id="embedded to Go and back"),
]
Kinds = tuple[type[GoNsqd] | type[EmbeddedServer], ...]
SMALL_FILES = "-max-bytes-per-file=1000"


def hand_on(serve: Serve, server: Nsqd, kinds: Kinds, *flags: str) -> Nsqd:
    """Stop a server, and start others in its directory one after the other; return the last one."""
    for kind in kinds:
        server.stop()
        server = serve(kind(server.data_path, *flags))
    return server


@pytest.mark.parametrize("kinds", ORDERS)
def test_messages_in_every_state_arrive(kinds: Kinds, data_path: DataPath, serve: Serve) -> None:
    flags = ("-mem-queue-size=10", SMALL_FILES)
    first = serve(kinds[0](data_path(), *flags))
    bodies = {b"%03d" % number for number in range(100)}
    with subscribed(first.tcp_address, "t", "ch", ready=5) as client:
        first.publish("t", *bodies)
        held = client.read_messages(5)
        client.send(b"REQ %b 3600000\n" % held[0].id)
        first.post("/pub", b"deferred", topic="t", defer=3_600_000)
        client.read_message()  # replaces the requeued one
        last = hand_on(serve, first, kinds[1:], *flags)

    with subscribed(last.tcp_address, "t", "ch", ready=200) as client:
        received = client.read_messages(101)

    assert {message.body for message in received} == bodies | {b"deferred"}
    delivered_before = {message.id: message for message in held}
    for message in received:
        delivered = delivered_before.get(message.id)
        if delivered is not None:
            assert (message.attempts, message.timestamp_ns) == (2, delivered.timestamp_ns)
    assert last.channel_stats("t", "ch")["depth"] == 0


@pytest.mark.parametrize("kinds", ORDERS[:2])
def test_topics_channels_and_pauses_persist(
    kinds: Kinds, data_path: DataPath, serve: Serve
) -> None:
    first = serve(kinds[0](data_path()))
    first.create_channel("t", "paused")
    first.create_channel("t", "open")
    first.create_channel("t", "gone#ephemeral")
    first.create_topic("bare")
    first.create_topic("gone#ephemeral")
    first.post("/topic/pause", topic="bare")
    first.post("/channel/pause", topic="t", channel="paused")
    first.publish("bare", b"waiting in the topic")
    last = hand_on(serve, first, kinds[1:])

    topics = {topic["topic_name"]: topic for topic in last.stats()["topics"]}
    assert topics.keys() == {"bare", "t"}
    assert (topics["bare"]["paused"], topics["bare"]["depth"]) == (True, 1)
    paused = {channel["channel_name"]: channel["paused"] for channel in topics["t"]["channels"]}
    assert paused == {"open": False, "paused": True}


@pytest.mark.parametrize("kinds", ORDERS[:2])
def test_partly_read_files_are_continued(kinds: Kinds, data_path: DataPath, serve: Serve) -> None:
    first = serve(kinds[0](data_path(), "-mem-queue-size=0", SMALL_FILES))
    bodies = [b"%03d" % number for number in range(120)]
    with subscribed(first.tcp_address, "t", "ch") as client:
        client.publish("t", *bodies)
        client.send(b"RDY 1\n")
        for _ in range(50):
            client.finish([client.read_message()])
        client.send(b"RDY 0\n")
        client.finish([client.read_message()])
        client.settle()
        last = hand_on(serve, first, kinds[1:], "-mem-queue-size=0", SMALL_FILES)

    with subscribed(last.tcp_address, "t", "ch", ready=100) as client:
        assert [message.body for message in client.read_messages(69)] == bodies[51:]


@pytest.mark.parametrize("kind", [GoNsqd, EmbeddedServer])
def test_a_directory_in_use_is_refused(
    kind: type[GoNsqd] | type[EmbeddedServer], data_path: DataPath, serve: Serve
) -> None:
    directory = data_path()
    serve(kind(directory))

    for second in (GoNsqd(directory), EmbeddedServer(directory)):
        with pytest.raises(Exception, match="cannot flock directory"):
            second.start()
        second.kill()


TOPIC, CHANNEL = "clicks", "archive"
COUNT = 3000


def test_a_truncated_file_is_printed_repaired_and_replayed(
    nsqd: GoNsqd, tmp_path: Path, go_program: GoProgram, run_nsq: RunNsq
) -> None:
    """The file has several gzip members, of which the last one is truncated."""
    nsqd.create_channel(TOPIC, CHANNEL)
    nsqd.publish(TOPIC, *[b"message %d" % number for number in range(COUNT)])
    address = f"-nsqd-tcp-address={nsqd.tcp_address}"
    place = [f"-topic={TOPIC}", f"-channel={CHANNEL}", address, f"-output-dir={tmp_path}"]
    command = [go_program("nsq_to_file"), *place, "-gzip", "-sync-interval=1s"]
    with subprocess.Popen(command, stderr=subprocess.DEVNULL) as program:
        try:
            wait_until(lambda: not unfinished(nsqd, TOPIC, CHANNEL), what="the end", timeout_s=20)
        finally:
            program.kill()
    (path,) = tmp_path.glob("*.gz")
    path.write_bytes(path.read_bytes().rstrip(b"\0")[:-30])
    partly = subprocess.run(["zcat", path], capture_output=True, check=False)
    assert partly.returncode != 0
    *complete, _ = partly.stdout.split(b"\n")

    printed = run_nsq(["archive", "cat", str(path)])
    assert printed.status == 6
    assert "cut off in the member" in printed.err
    assert printed.out.split(b"\n")[: len(complete)] == complete

    assert run_nsq(["archive", "repair", str(path)]).status == 0
    assert subprocess.check_output(["zcat", path]).split(b"\n")[:-1] == complete

    assert run_nsq(["replay", str(path), "--topic", "again", f"-{address}"]).status == 0
    assert nsqd.topic_stats("again")["message_count"] == len(complete)
