"""RDY and messages in flight, as nsqd sees them.

Decisions on a clock that the test turns are in test_rdy.py, and under random events in
test_rdy_machine.py. The share of an idle nsqd is not lent to others, as in all reference clients.
"""

from __future__ import annotations

from plugins.clients import CHANNEL, TOPIC, Consume, take
from plugins.daemons import GoNsqd
from plugins.scripted_nsqd import ScriptedNsqd


def test_rdy_is_a_window_on_unanswered_messages(nsqd: GoNsqd, consume: Consume) -> None:
    nsqd.create_channel(TOPIC, CHANNEL)
    nsqd.publish(TOPIC, *[b"x"] * 20)
    consumer = consume(nsqd.tcp_address, max_in_flight=5)

    def in_flight() -> int:
        count: int = nsqd.channel_stats(TOPIC, CHANNEL)["in_flight_count"]
        return count

    first = take(consumer, 5)
    assert consumer.next_batch(timeout_s=0.1) is None
    for message in first[:2]:
        message.finish()
    take(consumer, 2)
    assert consumer.next_batch(timeout_s=0.1) is None
    consumer.set_max_in_flight(7)
    take(consumer, 2)
    assert consumer.next_batch(timeout_s=0.1) is None
    assert in_flight() == 7


def test_a_new_connection_waits_until_the_others_were_lowered(
    scripted_nsqd: ScriptedNsqd, consume: Consume
) -> None:
    with ScriptedNsqd() as second:
        addresses = [scripted_nsqd.address, second.address]
        consumer = consume(addresses, max_in_flight=10, reconnect_base_s=0.3)
        conn = scripted_nsqd.subscribed()
        late = second.accept()
        conn.expect("RDY 1")
        conn.skip_to("RDY 10")
        late.subscribe(TOPIC, CHANNEL)
        conn.expect("RDY 5")
        late.expect("RDY 1")
        late.skip_to("RDY 5")
        second.stop_listening()
        late.close()
        conn.expect("RDY 10")
        assert consumer.connections == [scripted_nsqd.address]
