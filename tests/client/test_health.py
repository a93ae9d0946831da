"""health() of consumers and producers, as a probe of Kubernetes reads it."""

from __future__ import annotations

from dataclasses import asdict

from plugins.clients import TOPIC, Consume, Produce
from plugins.daemons import GoNsqd
from plugins.scripted_nsqd import ScriptedNsqd
from plugins.waiting import patience_s, wait_until


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
