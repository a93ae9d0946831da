"""Backoff as nsqd sees it; the state machine alone is in test_rdy.py."""

from __future__ import annotations

import queue

from plugins.clients import CHANNEL, TOPIC, Consume, Dialog, Handle
from plugins.scripted_nsqd import ScriptedNsqd
from plugins.waiting import patience_s, wait_until

from nsqtools.client.consumer import Consumer
from nsqtools.client.handling import RequeueWithoutBackoff
from nsqtools.client.io_loop import Timer
from nsqtools.client.message import Message
from nsqtools.client.rdy import PROBE_S

QUICK = {"backoff_multiplier_s": 0.02}  # first delays: 40, 80, 160 ms


def as_the_body_says(message: Message) -> bool:
    if message.body == b"neutral":
        raise RequeueWithoutBackoff(0)
    return message.body == b"good"


def is_at(consumer: Consumer, level: int) -> None:
    wait_until(lambda: consumer._io.backoff.level == level, what=f"backoff level {level}")


def test_the_order_of_go_nsqs_own_scenario(dialog: Dialog, handle: Handle) -> None:
    """Fail, fail, good, good: RDY 0 before each answer, RDY 1 after each wait, all at the end.

    A requeue without backoff is tested again.
    """
    consumer, conn = dialog("RDY 5", max_in_flight=5, **QUICK)
    handle(consumer, as_the_body_says)
    first = conn.message(b"bad")
    # in one write: nsqd would send one more message in between
    assert conn.expect("RDY 0").read == conn.expect(f"REQ {first} 90000").read
    conn.expect("RDY 1")
    second = conn.message(b"bad")
    conn.expect("RDY 0")
    conn.expect(f"REQ {second} 90000")
    conn.expect("RDY 1")
    neutral = conn.message(b"neutral")
    conn.expect("RDY 0")
    conn.expect(f"REQ {neutral} 0")
    conn.expect("RDY 1")
    assert consumer._io.backoff.level == 2
    third = conn.message(b"good")
    conn.expect("RDY 0")
    conn.expect(f"FIN {third}")
    conn.expect("RDY 1")
    fourth = conn.message(b"good")
    conn.expect("RDY 5")
    conn.expect(f"FIN {fourth}")


def test_giving_up_is_neither_success_nor_failure(
    scripted_nsqd: ScriptedNsqd, consume: Consume, handle: Handle
) -> None:
    given_up: queue.SimpleQueue[bytes] = queue.SimpleQueue()

    def take(message: Message) -> bool:
        given_up.put(message.body)
        return True

    consumer = consume(
        scripted_nsqd.address, max_in_flight=5, max_attempts=3, more={"on_giving_up": take}, **QUICK
    )
    handle(consumer, as_the_body_says)
    conn = scripted_nsqd.subscribed("RDY 5")
    hopeless = conn.message(b"bad")
    conn.skip_to("RDY 1")
    conn.message(b"bad", message_id=hopeless, attempts=4)
    conn.expect(f"FIN {hopeless}")
    assert given_up.get(timeout=patience_s(5)) == b"bad"
    is_at(consumer, 1)
    conn.message(b"good")
    conn.expect("RDY 5")


def test_an_nsqd_without_messages_holds_up_no_test(
    scripted_nsqd: ScriptedNsqd, consume: Consume, handle: Handle
) -> None:
    with ScriptedNsqd() as second:
        patient = {"low_rdy_idle_timeout_s": 300, "rdy_redistribute_interval_s": 5}
        consumer = consume([scripted_nsqd.address, second.address], **patient, **QUICK)
        handle(consumer, as_the_body_says)
        conns = [each.subscribed() for each in (scripted_nsqd, second)]
        for conn in conns:
            conn.skip_to("RDY 100")
        conns[0].message(b"bad")
        for conn in conns:
            conn.skip_to("RDY 0")
        for conn in conns:
            conn.skip_to("RDY 1")


# -- RDY; decisions on a clock that the test turns are in test_rdy.py ------------------------------


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


def test_rdy_rotates_as_soon_as_there_are_more_nsqd_than_messages_allowed(
    scripted_nsqd: ScriptedNsqd, consume: Consume
) -> None:
    """It began with the next tick, up to 5 s later."""
    with ScriptedNsqd() as second:
        addresses = [scripted_nsqd.address, second.address]
        consumer = consume(addresses, max_in_flight=1, rdy_redistribute_interval_s=5)
        for each in (scripted_nsqd, second):
            each.subscribed()
        wait_until(lambda: len(consumer.connections) == 2, what="two connections")
        ticks: queue.SimpleQueue[Timer | None] = queue.SimpleQueue()
        consumer._io.loop.call_soon(lambda: ticks.put(consumer._io._redistributes))
        tick = ticks.get(timeout=patience_s(5))
        assert tick is not None
        assert tick.interval_s == PROBE_S
