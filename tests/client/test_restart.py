"""An nsqd that restarts: its consumers are back at once."""

from __future__ import annotations

import threading

from plugins.clients import CHANNEL, TOPIC
from plugins.daemons import GoNsqd
from plugins.waiting import patience_s, wait_until

from nsqtools import ClientOptions, Consumer


def test_a_consumer_is_back_when_its_nsqd_is(nsqd: GoNsqd) -> None:
    """It took eight seconds, the first delay between tries, which is an hour here."""
    nsqd.create_channel(TOPIC, CHANNEL)
    nsqd.publish(TOPIC, b"before")
    bodies: list[bytes] = []
    consumer = Consumer(
        TOPIC,
        CHANNEL,
        nsqd_tcp_addresses=nsqd.tcp_address,
        options=ClientOptions(
            reconnect_base_s=3600, reconnect_max_s=3600, output_buffer_timeout_s=0.025
        ),
    )
    thread = threading.Thread(target=consumer.run, args=(lambda m: bodies.append(m.body),))
    thread.start()
    try:
        wait_until(lambda: bodies == [b"before"], what="a message")
        nsqd.stop()
        wait_until(lambda: not consumer.connections, what="the loss")
        nsqd.start()
        nsqd.publish(TOPIC, b"after")
        wait_until(lambda: bodies[-1] == b"after", what="the next message", timeout_s=20)
    finally:
        consumer.abort()
        thread.join(patience_s(10))
