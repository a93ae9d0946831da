"""Consumer as its users see it."""

from __future__ import annotations

from dataclasses import asdict
from typing import Any

import pytest
from plugins.clients import CHANNEL, TOPIC, Consume, Handle, InBackground, Produce, take
from plugins.daemons import GoNsqd
from plugins.scripted_nsqd import ScriptedNsqd
from plugins.waiting import patience_s, wait_until

from nsqtools.client import consumer_io
from nsqtools.client.consumer import Consumer
from nsqtools.client.handling import RequeueWithoutBackoff
from nsqtools.client.message import Message
from nsqtools.client.options import ClientOptions
from nsqtools.errors import ConfigurationError


@pytest.mark.parametrize(
    "arguments",
    [
        {"topic": "bad topic"},
        {"channel": "bad\n"},
        {"nsqd_tcp_addresses": []},
        {"nsqd_tcp_addresses": ["http://localhost"]},
        {"nsqd_tcp_addresses": [], "lookupd_http_addresses": ["ftp://localhost"]},
        {"options": ClientOptions(heartbeat_interval_s=-1)},
    ],
    ids=str,
)
def test_what_cannot_work_is_refused_at_once(arguments: dict[str, Any]) -> None:
    usable: dict[str, Any] = {
        "topic": TOPIC,
        "channel": CHANNEL,
        "nsqd_tcp_addresses": ["localhost"],
    }
    with pytest.raises(ConfigurationError):
        Consumer(**(usable | arguments))


def test_what_cannot_be_asked_for_is_refused_where_it_is_written(
    consume: Consume, in_background: InBackground
) -> None:
    consumer = consume("127.0.0.1:1", started=False, max_in_flight=1000)
    for size, within_s in ((0, 1.0), (-1, 1.0), (1001, 1.0), (5, 0.0), (5, float("nan"))):
        with pytest.raises(ConfigurationError):
            consumer.batches(size=size, within_s=within_s)
    for delay_s in (-1, float("nan")):
        with pytest.raises(ConfigurationError, match="delay_s must be >= 0"):
            RequeueWithoutBackoff(delay_s)
    with pytest.raises(ConfigurationError, match="workers must be a whole number >= 1, not 0"):
        consumer.run(lambda message: None, workers=0)
    with pytest.raises(ConfigurationError, match="main thread"):
        in_background(consumer.run, lambda message: None, signals=True).result(patience_s(5))


def test_a_handlers_result_is_the_answer(nsqd: GoNsqd, consume: Consume, handle: Handle) -> None:
    nsqd.create_channel(TOPIC, CHANNEL)
    nsqd.publish(TOPIC, b"true", b"none", b"false", b"raise", b"neutral", b"own")
    attempts: dict[bytes, int] = {}

    def answer(message: Message) -> object:
        attempts[message.body] = message.attempts
        if message.attempts > 1:
            return True
        if message.body == b"raise":
            raise LookupError
        if message.body == b"neutral":
            raise RequeueWithoutBackoff(0)
        if message.body == b"own":
            message.requeue(0, backoff=False)
            return False
        return {b"true": True, b"none": None, b"false": False}[message.body]

    consumer = consume(nsqd.tcp_address, default_requeue_delay_s=0.0, backoff_multiplier_s=0.01)
    handle(consumer, answer, workers=4)
    wait_until(lambda: consumer.stats.finished == 6, what="six messages")
    assert {body for body, count in attempts.items() if count > 1} == {
        b"false",
        b"raise",
        b"neutral",
        b"own",
    }


def test_is_starved_when_all_that_is_allowed_is_held(nsqd: GoNsqd, consume: Consume) -> None:
    nsqd.create_channel(TOPIC, CHANNEL)
    consumer = consume(nsqd.tcp_address, max_in_flight=4)
    assert not consumer.is_starved
    nsqd.publish(TOPIC, *[b"x"] * 10)
    wait_until(lambda: consumer.is_starved and consumer.stats.received == 4, what="starving")
    consumer.set_max_in_flight(0)
    for message in take(consumer, 4):
        message.finish()
    wait_until(lambda: not consumer.is_starved, what="room")
    with pytest.raises(ConfigurationError):
        consumer.set_max_in_flight(-1)


def test_single_answers_at_max_in_flight_1_do_not_wait_to_be_gathered(
    nsqd: GoNsqd, consume: Consume, in_background: InBackground, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With a second for each these would take minutes."""
    monkeypatch.setattr(consumer_io, "GATHER_S", 1.0)
    nsqd.create_channel(TOPIC, CHANNEL)
    nsqd.publish(TOPIC, *[b"x"] * 200)
    consumer = consume(nsqd.tcp_address, max_in_flight=1)

    def answer_all() -> None:
        for _ in range(200):
            batch = consumer.next_batch(timeout_s=patience_s(5))
            assert batch
            batch[0].finish()

    in_background(answer_all).result(patience_s(10))


# -- health, as a probe of Kubernetes reads it -----------------------------------------------------


def test_health_tells_connections_messages_and_backoff(nsqd: GoNsqd, consume: Consume) -> None:
    consumer = consume(nsqd.tcp_address, default_requeue_delay_s=3600, backoff_multiplier_s=3600)
    wait_until(lambda: consumer.connections, what="the connection")
    assert asdict(consumer.health()) == {
        "connections": [nsqd.tcp_address],
        "in_flight": 0,
        "backoff_level": 0,
        "idle_s": None,
    }
    nsqd.publish(TOPIC, b"x")
    [message] = consumer.next_batch(patience_s(5)) or []
    health = consumer.health()
    assert health.in_flight == 1
    assert health.idle_s is not None
    wait_until(lambda: (consumer.health().idle_s or 0) > health.idle_s, what="time to pass")
    message.requeue()
    wait_until(lambda: consumer.health().backoff_level == 1, what="backoff")
    assert consumer.health().in_flight == 0
    nsqd.stop()
    wait_until(lambda: not consumer.health().connections, what="the loss")


def test_health_of_a_producer_tells_connections_and_what_waits(
    scripted_nsqd: ScriptedNsqd, produce: Produce
) -> None:
    producer = produce(scripted_nsqd.address)
    assert asdict(producer.health()) == {"connections": [], "under_way": 0, "oldest_s": 0}
    publications = [producer.submit(TOPIC, [b"x"]) for _ in range(2)]
    conn = scripted_nsqd.identified()
    wait_until(lambda: producer.health().oldest_s > 0.1, what="time to pass")
    wait_until(
        lambda: producer.health().connections == [scripted_nsqd.address], what="the connection"
    )
    assert producer.health().under_way == 2
    for publication in publications:
        conn.expect(f"PUB {TOPIC}")
        conn.ok()
        publication.wait(patience_s(5))
    wait_until(lambda: not producer.health().under_way, what="both outcomes")
