"""Stopping a consumer: no message lost, no thread stuck, nsqd asked once."""

from __future__ import annotations

import threading
from contextlib import suppress
from pathlib import Path

import pytest
from plugins.clients import CHANNEL, TOPIC, Consume, Dialog, InBackground, fill
from plugins.daemons import GoNsqd
from plugins.scripted_nsqd import ScriptedNsqd
from plugins.waiting import patience_s, wait_until

from nsqtools.client.message import Message
from nsqtools.errors import ConnectionFailed


def left(nsqd: GoNsqd) -> tuple[int, int]:
    """Messages waiting, and messages in flight."""
    stats = nsqd.channel_stats(TOPIC, CHANNEL)
    return stats["depth"], stats["in_flight_count"]


@pytest.mark.parametrize("run", range(2))
def test_no_finish_is_lost_by_the_close(nsqd: GoNsqd, consume: Consume, run: int) -> None:
    fill(nsqd, 1000)
    consumer = consume(nsqd.tcp_address, max_in_flight=250)
    finished = 0
    for message in consumer:
        message.finish()
        finished += 1
        if finished == 250 + run:
            break
    assert consumer.stop(timeout_s=patience_s(5))
    depth, in_flight = left(nsqd)
    assert (depth, in_flight) == (1000 - finished, 0)


def test_a_handler_that_never_answers_is_waited_for_and_its_message_requeued(
    nsqd: GoNsqd, consume: Consume
) -> None:
    fill(nsqd, 1)
    consumer = consume(nsqd.tcp_address, drain_timeout_s=0.3)
    [message] = consumer.next_batch(timeout_s=patience_s(5)) or []
    assert consumer.stop(timeout_s=patience_s(5))
    assert message.is_answered
    assert not message.finish()
    assert left(nsqd) == (1, 0)


@pytest.mark.parametrize("place", ["handler", "loop"])
def test_a_stop_in_the_midst_returns_and_ends_it(
    nsqd: GoNsqd, consume: Consume, in_background: InBackground, place: str
) -> None:
    fill(nsqd, 100)
    consumer = consume(nsqd.tcp_address, max_in_flight=50)
    stopped: list[bool] = []

    def stop(message: Message) -> None:
        if place == "loop":
            message.finish()
        stopped.append(consumer.stop())

    def work() -> None:
        if place == "handler":
            consumer.run(stop)
        else:
            for message in consumer:
                stop(message)

    in_background(work).result(patience_s(5))
    assert stopped == [place == "loop"]  # whose message is answered
    assert consumer.stop(timeout_s=patience_s(5))
    assert left(nsqd) == (99, 0)


def test_stop_before_the_start(consume: Consume) -> None:
    before = set(Path("/proc/self/fd").iterdir())
    consumer = consume("127.0.0.1:1", started=False)
    assert set(Path("/proc/self/fd").iterdir()) <= before
    assert consumer.stop()
    consumer.start()
    assert list(consumer) == []
    assert consumer.next_batch() is None
    assert not consumer._is_started


def test_stop_while_connecting(unreachable_address: str, consume: Consume) -> None:
    consumer = consume(unreachable_address, dial_timeout_s=patience_s(20))
    assert consumer.stop(timeout_s=patience_s(5))
    assert list(consumer) == []


def test_stop_during_the_handshake_closes_the_connection(
    scripted_nsqd: ScriptedNsqd, consume: Consume
) -> None:
    consumer = consume(scripted_nsqd.address)
    conn = scripted_nsqd.accept()
    conn.expect("IDENTIFY")
    assert consumer.stop(timeout_s=patience_s(2))
    conn.reply_identify()
    conn.expect(f"SUB {TOPIC} {CHANNEL}")
    conn.ok()
    conn.expect_closed()


def test_cls_goes_out_once_and_rdy_no_more(dialog: Dialog) -> None:
    consumer, conn = dialog("RDY 200")
    late = conn.message(b"x")
    [message] = consumer.next_batch(timeout_s=patience_s(5)) or []
    consumer.begin_stop()
    consumer.begin_stop(drain=True)
    consumer.set_max_in_flight(5)
    conn.expect("CLS")
    after = conn.message(b"y")
    conn.expect(f"REQ {after} 0")
    message.finish()
    conn.expect(f"FIN {late}")
    conn.close_wait()
    conn.half_close()
    conn.expect_closed()


def test_a_message_after_close_wait_is_requeued_too(dialog: Dialog) -> None:
    consumer, conn = dialog("RDY 200")
    consumer.begin_stop()
    conn.expect("CLS")
    conn.close_wait()
    straggler = conn.message(b"x")
    conn.expect(f"REQ {straggler} 0")
    conn.half_close()
    conn.expect_closed()


def test_nothing_is_connected_after_a_stop(scripted_nsqd: ScriptedNsqd, consume: Consume) -> None:
    consumer = consume(scripted_nsqd.address, reconnect_base_s=0.2)
    scripted_nsqd.subscribed("RDY 1").close()
    wait_until(lambda: not consumer.connections, what="the loss")
    assert consumer.stop(timeout_s=patience_s(5))
    with suppress(AssertionError):  # it may have connected again before the stop
        scripted_nsqd.accept(timeout_s=0.01).close()
    with pytest.raises(AssertionError, match="no connection"):
        scripted_nsqd.accept(timeout_s=0.4)


def test_a_start_that_fails_fast_says_why_and_leaves_nothing(
    scripted_nsqd: ScriptedNsqd, consume: Consume
) -> None:
    address = scripted_nsqd.address
    scripted_nsqd.stop_listening()
    consumer = consume(address, started=False)
    with pytest.raises(ConnectionFailed, match=f"cannot connect to {address}") as caught:
        consumer.start(fail_fast=True)
    assert caught.value.hint
    assert consumer.stop(timeout_s=0)
    assert list(consumer) == []


def test_a_start_with_one_of_two_nsqd_goes_on_and_says_which_failed(
    scripted_nsqd: ScriptedNsqd, nsqd: GoNsqd, consume: Consume, caplog: pytest.LogCaptureFixture
) -> None:
    address = scripted_nsqd.address
    scripted_nsqd.stop_listening()
    consumer = consume([address, nsqd.tcp_address], fail_fast=True)
    assert consumer.connections == [nsqd.tcp_address]
    assert [r for r in caplog.records if f"cannot connect to {address}" in r.getMessage()]


def test_a_handler_thread_that_dies_ends_the_others(
    nsqd: GoNsqd, consume: Consume, in_background: InBackground
) -> None:
    fill(nsqd, 50)
    consumer = consume(nsqd.tcp_address)
    was_interrupted = threading.Event()

    def interrupt(message: Message) -> None:
        if threading.current_thread().name.startswith("nsq-worker"):
            was_interrupted.wait(patience_s(5))  # so that the next batch is for the other thread
        else:
            was_interrupted.set()
            raise KeyboardInterrupt

    def run() -> str:
        try:
            consumer.run(interrupt, workers=2)
        except KeyboardInterrupt:
            return "interrupted"
        return "ended"

    assert in_background(run).result(patience_s(5)) == "interrupted"
    assert consumer.stop(timeout_s=patience_s(5))
