"""Bounds of queues, the watermark of the disk, and dead letters: flags that Go does not have."""

from __future__ import annotations

import pytest
from plugins.raw_client import RawClient, sized

from nsqtools.errors import ConfigurationError
from nsqtools.server import EmbeddedNsqd

FULL = b"E_%b_FAILED %b failed the queue is full"


def packed(*bodies: bytes) -> bytes:
    return sized(len(bodies).to_bytes(4, "big") + b"".join(map(sized, bodies)))


def refused(nsqd: EmbeddedNsqd, command: bytes) -> bytes:
    with RawClient(nsqd.tcp_address) as client:
        client.send(command)
        return client.read_error()


def consumed(nsqd: EmbeddedNsqd, topic: str, count: int) -> list[bytes]:
    with RawClient(nsqd.tcp_address) as client:
        client.subscribe(topic, "ch", ready=count)
        return [message.body for message in client.read_messages(count)]


@pytest.mark.parametrize("durable", [False, True])
@pytest.mark.parametrize("mem_queue_size", [0, 2, 100])
def test_a_publish_to_a_full_queue_is_refused_whole(durable: bool, mem_queue_size: int) -> None:
    with (
        EmbeddedNsqd(max_depth=5, mem_queue_size=mem_queue_size, durable=durable) as nsqd,
        RawClient(nsqd.tcp_address) as client,
    ):
        client.publish("t", b"1", b"2", b"3")
        assert refused(nsqd, b"MPUB t\n" + packed(b"4", b"5", b"6")) == FULL % (b"MPUB", b"MPUB")
        client.publish("t", b"4", b"5")
        assert refused(nsqd, b"PUB t\n" + sized(b"6")) == FULL % (b"PUB", b"PUB")
        assert refused(nsqd, b"DPUB t 9000\n" + sized(b"6")) == FULL % (b"DPUB", b"DPUB")
        assert consumed(nsqd, "t", 5) == [b"1", b"2", b"3", b"4", b"5"]


@pytest.mark.parametrize("durable", [False, True])
@pytest.mark.parametrize("mem_queue_size", [0, 2, 100])
def test_the_oldest_make_room_for_the_newest(durable: bool, mem_queue_size: int) -> None:
    with (
        EmbeddedNsqd(
            max_depth=5,
            overflow_policy="drop-oldest",
            mem_queue_size=mem_queue_size,
            durable=durable,
        ) as nsqd,
        RawClient(nsqd.tcp_address) as client,
    ):
        client.publish("t", *[b"%d" % number for number in range(12)])
        assert client.ask(b"MPUB t\n" + packed(b"12", b"13", b"14")) == b"OK"
        assert refused(nsqd, b"MPUB t\n" + packed(*[b"x"] * 6)) == FULL % (b"MPUB", b"MPUB")
        assert consumed(nsqd, "t", 5) == [b"%d" % number for number in range(10, 15)]


def test_bytes_are_bounded_in_memory_and_on_disk() -> None:
    for mem_queue_size in (0, 100):
        with (
            EmbeddedNsqd(max_queue_bytes=3000, mem_queue_size=mem_queue_size) as nsqd,
            RawClient(nsqd.tcp_address) as client,
        ):
            client.publish("t", bytes(900), bytes(900))
            client.publish("t", bytes(900))
            assert refused(nsqd, b"PUB t\n" + sized(bytes(900))) == FULL % (b"PUB", b"PUB")


def test_a_nearly_full_disk_refuses_publishes_and_ping_says_so() -> None:
    with EmbeddedNsqd(min_disk_free=1 << 60) as nsqd:
        error = refused(nsqd, b"PUB t\n" + sized(b"x"))
    assert error.startswith(b"E_PUB_FAILED PUB failed ")
    assert error.endswith(b" bytes free on the disk, fewer than --min-disk-free")


@pytest.mark.parametrize("durable", [False, True])
@pytest.mark.parametrize("how", ["given back", "given back later", "timed out"])
def test_a_message_that_comes_back_too_often_becomes_a_dead_letter(durable: bool, how: str) -> None:
    msg_timeout = 0.2 if how == "timed out" else 60.0  # a REQ that is late would be refused
    with (
        EmbeddedNsqd(max_attempts=2, msg_timeout=msg_timeout, durable=durable) as nsqd,
        RawClient(nsqd.tcp_address) as client,
        RawClient(nsqd.tcp_address) as producer,
    ):
        client.subscribe("t", "ch", ready=1)
        producer.publish("t", b"poison")
        delay_ms = 20 if how == "given back later" else 0
        for attempts in (1, 2):
            message = client.read_message()
            assert (message.body, message.attempts) == (b"poison", attempts)
            if how != "timed out":
                client.send(b"REQ %b %d\n" % (message.id, delay_ms))
        assert consumed(nsqd, "t.dead", 1) == [b"poison"]
        producer.publish("t", b"next")
        assert client.read_message().body == b"next"


def test_a_dead_letter_stays_in_its_topic() -> None:
    with (
        EmbeddedNsqd(max_attempts=1, dead_letter_topic="dead") as nsqd,
        RawClient(nsqd.tcp_address) as client,
    ):
        client.publish("dead", b"x")
        client.subscribe("dead", "ch", ready=1)
        for attempts in (1, 2, 3):
            message = client.read_message()
            assert message.attempts == attempts
            client.send(b"REQ %b 0\n" % message.id)


def test_an_unknown_policy_is_refused() -> None:
    with pytest.raises(ConfigurationError, match="--overflow-policy must be"):
        EmbeddedNsqd(overflow_policy="drop-newest")
