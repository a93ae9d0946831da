"""A connection that worked is lost: nsqd restarts, or has deleted what was consumed."""

from __future__ import annotations

import logging

import pytest
from plugins.clients import CHANNEL, TOPIC, Consume, Handle
from plugins.daemons import GoNsqd
from plugins.waiting import wait_until

PATIENT = {"reconnect_base_s": 3600, "reconnect_max_s": 3600}


def test_a_consumer_is_back_when_its_nsqd_is(
    nsqd: GoNsqd, consume: Consume, handle: Handle
) -> None:
    """It took eight seconds, the first delay between tries, which is an hour here."""
    nsqd.create_channel(TOPIC, CHANNEL)
    nsqd.publish(TOPIC, b"before")
    bodies: list[bytes] = []
    consumer = consume(nsqd.tcp_address, **PATIENT)
    handle(consumer, lambda m: bodies.append(m.body))
    wait_until(lambda: bodies == [b"before"], what="a message")
    nsqd.stop()
    wait_until(lambda: not consumer.connections, what="the loss")
    nsqd.start()
    nsqd.publish(TOPIC, b"after")
    wait_until(lambda: bodies[-1] == b"after", what="the next message", timeout_s=20)


@pytest.mark.parametrize("what", ["topic", "channel"])
def test_what_is_deleted_is_not_brought_back_at_once(
    nsqd: GoNsqd, consume: Consume, handle: Handle, what: str, caplog: pytest.LogCaptureFixture
) -> None:
    """nsqd closes the connection of who consumes it, and a SUB would create it again."""
    caplog.set_level(logging.INFO, "nsqtools")
    nsqd.publish(TOPIC, b"before")
    bodies: list[bytes] = []
    handle(consume(nsqd.tcp_address, **PATIENT), lambda m: bodies.append(m.body))
    wait_until(lambda: bodies == [b"before"], what="a message")
    if what == "topic":
        nsqd.post("/topic/delete", topic=TOPIC)
    else:
        nsqd.post("/channel/delete", topic=TOPIC, channel=CHANNEL)
    wait_until(lambda: "is there, and ended the connection" in caplog.text, what="the look")
    topics = nsqd.stats()["topics"]
    assert [each["channels"] for each in topics] == ([] if what == "topic" else [[]])
