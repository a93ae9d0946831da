"""RDY and messages in flight, as nsqd sees them.

Decisions on a clock that the test turns are in test_rdy.py, and under random events in
test_rdy_machine.py. The share of an idle nsqd is not lent to others, as in all reference clients.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import ExitStack

import pytest
from plugins.clients import CHANNEL, TOPIC, Consume, Handle
from plugins.daemons import GoNsqd
from plugins.scripted_nsqd import Connection, ScriptedNsqd
from plugins.waiting import patience_s, wait_until

from nsqtools.client.consumer import Consumer
from nsqtools.client.message import Message


def requeue(message: Message) -> bool:
    return False


def take(consumer: Consumer, count: int) -> list[Message]:
    """Wait for so many messages and leave them unanswered."""
    taken: list[Message] = []
    while len(taken) < count:
        batch = consumer.next_batch(timeout_s=patience_s(5))
        assert batch is not None, f"{len(taken)} of {count} messages"
        taken += batch
    return taken


def connected(nsqd: ScriptedNsqd, **identify_fields: object) -> Connection:
    conn = nsqd.accept()
    conn.subscribe(TOPIC, CHANNEL, **identify_fields)
    return conn


@pytest.fixture
def nsqds() -> object:
    """Three scripted nsqd."""
    with ExitStack() as stack:
        yield [stack.enter_context(ScriptedNsqd()) for _ in range(3)]


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


def test_rdy_zero_precedes_req(
    scripted_nsqd: ScriptedNsqd, consume: Consume, handle: Handle
) -> None:
    consumer = consume(scripted_nsqd.address, max_in_flight=1)
    handle(consumer, requeue)
    conn = connected(scripted_nsqd)
    conn.expect("RDY 1")
    message_id = conn.message(b"bad")
    conn.skip_to("RDY 0")
    conn.expect(f"REQ {message_id} 90000")
    written = {command.line: command.read for command in conn.commands}
    assert written["RDY 0"] == written[f"REQ {message_id} 90000"]


def test_one_message_allowed_is_one_rdy_on_three_nsqd(
    nsqds: list[ScriptedNsqd], consume: Consume
) -> None:
    consumer = consume(
        [nsqd.address for nsqd in nsqds], max_in_flight=1, rdy_redistribute_interval_s=0.01
    )
    conns = [connected(nsqd) for nsqd in nsqds]
    wait_until(lambda: len(consumer.connections) == 3, what="three connections")

    def one_of_them_after_a_move() -> bool:
        # they are read in turn while it moves, so a single look may see it twice or not at all
        sent = [conn.not_yet_expected for conn in conns]
        latest = [lines[-1] for lines in sent if lines]
        return any("RDY 0" in lines for lines in sent) and latest.count("RDY 1") == 1

    wait_until(one_of_them_after_a_move, what="one RDY 1 that has moved")
    assert {line for conn in conns for line in conn.not_yet_expected} == {"RDY 0", "RDY 1"}


def test_messages_in_flight_count_when_rdy_moves(
    nsqds: list[ScriptedNsqd], consume: Consume
) -> None:
    first, second = nsqds[:2]
    consumer = consume(
        [first.address, second.address],
        max_in_flight=1,
        low_rdy_timeout_s=1,
        low_rdy_idle_timeout_s=1,
    )
    conns = [connected(first), connected(second)]
    wait_until(lambda: any(conn.not_yet_expected for conn in conns), what="RDY")
    holder, other = conns if conns[0].not_yet_expected else conns[::-1]
    for _ in range(10):  # on a busy machine RDY may have moved before the message comes
        holder.skip_to("RDY 1")
        holder.message(b"slow")
        [message] = take(consumer, 1)
        holder.skip_to("RDY 0")
        if "RDY 1" not in other.not_yet_expected:
            break
        message.finish()
        holder, other = other, holder
    else:
        pytest.fail("RDY 1 while the one message is in flight")
    message.finish()
    other.skip_to("RDY 1")


def test_a_new_connection_waits_until_the_others_were_lowered(
    nsqds: list[ScriptedNsqd], consume: Consume
) -> None:
    first, second = nsqds[:2]
    second_address = second.address
    consumer = consume([first.address, second_address], max_in_flight=10, reconnect_base_s=0.3)
    conn = connected(first)
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
    assert consumer.connections == [first.address]


def test_max_in_flight_is_sent_at_once_and_zero_pauses(
    scripted_nsqd: ScriptedNsqd, consume: Consume
) -> None:
    consumer = consume(scripted_nsqd.address, max_in_flight=10)
    conn = connected(scripted_nsqd)
    conn.skip_to("RDY 10")
    consumer.set_max_in_flight(0)
    conn.expect("RDY 0")
    consumer.set_max_in_flight(10)
    conn.expect("RDY 10")


def test_a_pause_holds_through_backoff(
    scripted_nsqd: ScriptedNsqd, consume: Consume, handle: Handle
) -> None:
    consumer = consume(scripted_nsqd.address, max_in_flight=10, backoff_multiplier_s=0.02)
    handle(consumer, requeue)
    conn = connected(scripted_nsqd)
    conn.skip_to("RDY 10")
    message_id = conn.message(b"bad")
    conn.expect("RDY 0")
    consumer.set_max_in_flight(0)
    conn.skip_to(f"REQ {message_id} 90000")
    # The pause may come before or after the end of the wait: RDY 1 must be taken back then.
    wait_until(
        lambda: [c.line for c in conn.commands if c.line.startswith("RDY")][-1] == "RDY 0",
        what="a pause",
    )
    consumer.set_max_in_flight(10)
    conn.skip_to("RDY 1")


def test_a_scripted_limit_of_rdy_is_kept(scripted_nsqd: ScriptedNsqd, consume: Consume) -> None:
    consume(scripted_nsqd.address, max_in_flight=100)
    conn = connected(scripted_nsqd, max_rdy_count=3)
    conn.expect("RDY 1")
    conn.expect("RDY 3")


def test_the_limit_of_a_real_nsqd_is_kept(
    go_nsqd: Callable[..., GoNsqd], consume: Consume, handle: Handle
) -> None:
    nsqd = go_nsqd("-max-rdy-count=3")
    nsqd.create_channel(TOPIC, CHANNEL)
    nsqd.publish(TOPIC, *[b"x"] * 50)
    consumer = consume(nsqd.tcp_address, max_in_flight=100)
    handle(consumer, lambda message: True)
    wait_until(lambda: consumer.stats.finished == 50, what="50 messages")
    assert consumer.connections == [nsqd.tcp_address]
    assert "E_INVALID" not in nsqd.log
