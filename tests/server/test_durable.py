"""--durable in one process: what is confirmed, what a kill leaves, what is dropped on purpose."""

from __future__ import annotations

import os
import socket
from contextlib import suppress
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from plugins.embedded import EmbeddedServer
from plugins.raw_client import RawClient, sized
from plugins.servers import Serve
from plugins.waiting import wait_until

from nsqtools.server.durable import checkpoint
from nsqtools.server.durable.records import (
    Deferred,
    Delivered,
    Dropped,
    Finished,
    Kept,
    Published,
    QueueBegins,
    Record,
    Stage,
    decode_blocks,
    encode_block,
    encode_record,
)
from nsqtools.server.durable.recovery import replay
from nsqtools.server.queues.queued_message import new_messages

ID = b"0123456789abcdef"


@pytest.fixture
def nsqd(tmp_path: Path, serve: Serve) -> EmbeddedServer:
    return serve(EmbeddedServer(tmp_path, "-durable", "-mem-queue-size=5"))


def killed(nsqd: EmbeddedServer) -> EmbeddedServer:
    nsqd.kill()
    nsqd.start()
    return nsqd


# records

RECORDS: list[Record] = [
    QueueBegins(1, 2, 3, 4, 5, 6, "t:ch"),
    Published(0, (1, 2, 3), b"frames"),
    Kept(1, Stage.DEFERRED, 77, b"frames"),
    Delivered(1, 2, 3, b"\0\1" + ID),
    Deferred(1, 99, 3, ID),
    Finished(1, ID * 3),
    Dropped(1),
]


@given(st.lists(st.sampled_from(RECORDS), min_size=1), st.integers(1, 9))
def test_a_log_that_is_cut_off_or_damaged_ends_there(records: list[Record], cut: int) -> None:
    first, second = (encode_block([encode_record(each) for each in records]) for _ in range(2))
    assert decode_blocks(first + second) == (records * 2, len(first + second))
    assert decode_blocks(first + second[:-cut]) == (records, len(first))
    damaged = second[:-1] + bytes([second[-1] ^ cut])
    assert decode_blocks(first + damaged) == (records, len(first))
    assert decode_blocks(first + bytes(100)) == (records, len(first))


def test_what_a_checkpoint_keeps_may_be_written_after_it_is_done() -> None:
    [frame] = new_messages([b"x"], [ID], 7)
    begins = QueueBegins(1, 0, 0, 0, 0, 0, "t")
    kept, finished = Kept(1, Stage.WAITING, 0, frame), Finished(1, ID)
    for records in ([begins, kept, finished], [begins, finished, kept]):
        assert list(replay(records)[1].unfinished([])) == []
    assert len(list(replay([begins, finished, begins, kept])[1].unfinished([]))) == 1
    assert replay([begins, kept, Dropped(1), begins, kept]) == {}


def test_a_message_is_recovered_as_it_was_with_the_attempts_that_were_made() -> None:
    ids = [b"%016d" % number for number in range(4)]
    frames = new_messages([b"x", b"y", b"longer", b""], ids, 7)
    log: list[Record] = [
        QueueBegins(1, 0, 0, 0, 0, 0, "t"),
        Published(0, (1,), b"".join(frames)),
        Delivered(1, 0, 0, b"\0\1" + ids[1] + b"\0\2" + ids[2]),
        Delivered(1, 0, 0, b"\0\1" + ids[2]),
        Deferred(1, 99, 1, ids[3]),
    ]
    head = (7).to_bytes(8, "big")
    assert list(replay(log)[1].unfinished([head + b"\0\3" + ID])) == [
        (sized(head + b"\0\3" + ID), 0),
        (sized(head + b"\0\0" + ids[0] + b"x"), 0),
        (sized(head + b"\0\1" + ids[1] + b"y"), 0),
        (sized(head + b"\0\2" + ids[2] + b"longer"), 0),
        (sized(head + b"\0\1" + ids[3]), 99),
    ]


# a kill


@pytest.mark.parametrize("how", ["empty the channel", "delete the channel", "delete the topic"])
def test_what_was_dropped_does_not_come_back(nsqd: EmbeddedServer, how: str) -> None:
    nsqd.create_channel("t", "ch")
    nsqd.publish("t", *[b"%d" % number for number in range(20)])
    if how == "empty the channel":
        nsqd.post("/channel/empty", topic="t", channel="ch")
    elif how == "delete the channel":
        nsqd.post("/channel/delete", topic="t", channel="ch")
        nsqd.create_channel("t", "ch")
    else:
        nsqd.post("/topic/delete", topic="t")
        nsqd.create_channel("t", "ch")
    nsqd.publish("t", *[b"new %d" % number for number in range(9)])

    for _ in range(2):
        killed(nsqd)
        assert nsqd.depth("t", "ch") == 9
    with RawClient(nsqd.tcp_address) as client:
        client.subscribe("t", "ch", ready=20)
        assert all(each.body.startswith(b"new") for each in client.read_messages(9))


def test_messages_wait_for_a_channel_through_kills(nsqd: EmbeddedServer) -> None:
    bodies = [b"%d" % number for number in range(12)]
    nsqd.publish("t", *bodies)
    with RawClient(nsqd.tcp_address) as client:
        client.publish_deferred("t", 100, b"deferred")
    assert killed(nsqd).depth("t") == 13
    nsqd.create_channel("t", "ch")
    wait_until(lambda: nsqd.depth("t") == 0, what="the channel has them")
    with RawClient(killed(nsqd).tcp_address) as client:
        client.subscribe("t", "ch", ready=20)
        missing = {*bodies, b"deferred"}
        while missing:  # what moved just before the kill may come from both queues
            missing -= {each.body for each in client.read_messages(1)}


def test_an_ephemeral_channel_gets_messages_and_leaves_nothing(nsqd: EmbeddedServer) -> None:
    with RawClient(nsqd.tcp_address) as client, RawClient(nsqd.tcp_address) as producer:
        client.subscribe("t", "ch#ephemeral", ready=1)
        producer.publish("t", b"x")
        assert client.read_message().body == b"x"
        producer.publish("e#ephemeral", b"y")
    assert sum(topic["depth"] for topic in killed(nsqd).stats()["topics"]) == 0


def test_a_log_without_the_flag_is_not_ignored(nsqd: EmbeddedServer, serve: Serve) -> None:
    nsqd.create_channel("t", "ch")
    nsqd.publish("t", b"1", b"2")
    nsqd.kill()
    plain = serve(EmbeddedServer(nsqd.data_path))
    assert plain.depth("t", "ch") == 2
    assert not list(nsqd.data_path.glob("nsqd.durable*"))
    plain.kill()
    assert serve(EmbeddedServer(nsqd.data_path, "-durable")).depth("t", "ch") == 2


def test_checkpoints_keep_the_log_small_and_lose_nothing(
    tmp_path: Path, serve: Serve, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(checkpoint, "MIN_LOG_BYTES", 20_000)
    monkeypatch.setattr(checkpoint, "_LOOK_S", 0.02)
    flags = ("-durable", "-mem-queue-size=5", "-max-bytes-per-file=3000")
    nsqd = serve(EmbeddedServer(tmp_path, *flags))
    nsqd.create_channel("t", "ch")
    with RawClient(nsqd.tcp_address) as client, RawClient(nsqd.tcp_address) as producer:
        producer.publish_deferred("t", 3_600_000, b"deferred")
        producer.publish("t", b"held")
        client.subscribe("t", "ch", ready=1)
        held = client.read_message()
        client.send(b"RDY 10\n")
        for number in range(100):
            producer.publish("t", *[b"%d %d " % (number, each) * 9 for each in range(10)])
            client.finish(client.read_messages(9))
    wait_until(lambda: log_bytes(tmp_path) < 60_000, what="a checkpoint")
    assert len(list(tmp_path.glob("t:ch.diskqueue.0*.dat"))) < 60

    with RawClient(killed(nsqd).tcp_address) as client:
        client.subscribe("t", "ch", ready=200)
        found = {each.body: each.attempts for each in client.read_messages(101)}
    assert found[held.body] == 2
    assert nsqd.channel_stats("t", "ch")["deferred_count"] == 1


def log_bytes(path: Path) -> int:
    """Of all segments; a checkpoint may remove one just now."""
    total = 0
    for each in path.glob("nsqd.durable.*.log"):
        with suppress(FileNotFoundError):
            total += each.stat().st_size
    return total


# a disk that fails


def test_a_publish_that_cannot_be_written_is_refused_and_others_go_on(
    nsqd: EmbeddedServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    nsqd.create_channel("t", "ch")
    nsqd.publish("t", b"1")
    with monkeypatch.context() as patch:

        def full(*_: object) -> int:
            raise OSError(28, "No space left on device")

        patch.setattr(os, "pwrite", full)
        with RawClient(nsqd.tcp_address) as client:
            client.send(b"PUB t\n" + sized(b"refused"))
            error = client.read_error()
        assert error == b"E_PUB_FAILED PUB failed write: No space left on device"
        assert nsqd.request("POST", "/pub?topic=t", b"x") == (503, b'{"message":"EXITING"}')
        assert nsqd.request("GET", "/ping")[0] == 500
        assert nsqd.depth("t", "ch") == 1
    nsqd.publish("t", b"2")
    assert nsqd.request("GET", "/ping") == (200, b"OK")
    with RawClient(killed(nsqd).tcp_address) as client:
        client.subscribe("t", "ch", ready=9)
        assert {each.body for each in client.read_messages(2)} == {b"1", b"2"}


# answers


def test_answers_come_in_order_however_late_the_disk_is(nsqd: EmbeddedServer) -> None:
    with RawClient(nsqd.tcp_address) as client:
        bodies = [b"x" * 100_000] * 200
        client.send(b"".join(b"PUB t\n" + sized(each) for each in bodies) + b"SUB t ch\nRDY 1\n")
        for _ in range(201):
            assert client.read_response() == b"OK"
        client.read_message()
        client.send(b"PUB t\n" + sized(b"y") + b"CLS\n")
        answers = [client.read() for _ in range(2)]
    assert [data for _, data in answers] == [b"OK", b"CLOSE_WAIT"]


def test_a_client_that_sends_no_more_still_gets_its_answers(nsqd: EmbeddedServer) -> None:
    with RawClient(nsqd.tcp_address) as client:
        client.send(b"".join(b"PUB t\n" + sized(b"%d" % number) for number in range(50)))
        client.socket.shutdown(socket.SHUT_WR)
        for _ in range(50):
            assert client.read_response() == b"OK"
    assert nsqd.depth("t") == 50


def test_http_requests_that_come_together_are_answered_in_order(nsqd: EmbeddedServer) -> None:
    def post(target: bytes, body: bytes) -> bytes:
        return b"POST /%b HTTP/1.1\r\nHost: x\r\nContent-Length: %d\r\n\r\n%b" % (
            target,
            len(body),
            body,
        )

    ping = b"GET /ping HTTP/1.1\r\nHost: x\r\n\r\n"
    with RawClient(nsqd.http_address, magic=b"") as web, RawClient(nsqd.tcp_address) as client:
        web.send(post(b"pub?topic=t", b"1") + ping + post(b"mpub?topic=t", b"2\n3"))
        web.send(post(b"pub?topic=t&defer=1", b"4") + post(b"mpub?topic=t", b"\n"))
        web.socket.shutdown(socket.SHUT_WR)
        answers = b"".join(iter(lambda: web.socket.recv(1 << 16), b""))
        client.subscribe("t", "ch", ready=9)
        assert {each.body for each in client.read_messages(4)} == {b"1", b"2", b"3", b"4"}
    assert answers.count(b"HTTP/1.1 200 OK\r\n") == answers.count(b"\r\n\r\nOK") == 5
    assert [b"X-Nsq" in each for each in answers.split(b"HTTP/1.1 ")[1:]] == [
        True,
        False,
        True,
        True,
        True,
    ]
