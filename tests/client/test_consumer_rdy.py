"""RDY and messages in flight, as nsqd sees them.

Decisions on a clock that the test turns are in test_rdy.py, and under random events in
test_rdy_machine.py. The share of an idle nsqd is not lent to others, as in all reference clients.
"""

from __future__ import annotations

from plugins.clients import CHANNEL, TOPIC, Consume
from plugins.scripted_nsqd import ScriptedNsqd


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
