"""Stopping a consumer: no message is lost, no thread is stuck, and CLS is sent once."""

import itertools
import threading
from contextlib import suppress
from pathlib import Path
from unittest.mock import Mock

import pytest
from plugins.clients import CHANNEL, TOPIC, Consume, Dialog, InBackground, fill
from plugins.daemons import GoNsqd
from plugins.scripted_nsqd import ScriptedNsqd
from plugins.waiting import patience_s, wait_until

from nsqtools import ConnectionFailed, Message
from nsqtools.client.consumer import start_all
from nsqtools.client.consumer_io import Stopping


def left(nsqd: GoNsqd) -> tuple[int, int]:
    """Return the depth and the number of messages in flight."""
    stats = nsqd.channel_stats(TOPIC, CHANNEL)
    return stats["depth"], stats["in_flight_count"]


@pytest.mark.parametrize("count", [250, 251])
def test_closing_loses_no_finish(nsqd: GoNsqd, consume: Consume, count: int) -> None:
    fill(nsqd, 1000)
    consumer = consume(nsqd.tcp_address, max_in_flight=250)
    for message in itertools.islice(consumer, count):
        message.finish()
    assert consumer.stop(timeout_s=patience_s(5))
    assert left(nsqd) == (1000 - count, 0)


def test_a_stop_waits_for_an_unanswered_message_and_requeues_it(
    nsqd: GoNsqd, consume: Consume
) -> None:
    fill(nsqd, 1)
    consumer = consume(nsqd.tcp_address, started=False, drain_timeout_s=0.3)
    [message] = consumer.next_batch(timeout_s=patience_s(5)) or []  # next_batch starts the consumer
    assert consumer.stop(timeout_s=patience_s(5))
    assert not message.finish()
    assert left(nsqd) == (1, 0)


@pytest.mark.parametrize("place", ["handler", "loop"])
def test_a_stop_inside_a_loop_ends_it(
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
    assert stopped == [place == "loop"]  # the message of the loop is answered
    assert consumer.stop(timeout_s=patience_s(5))
    assert left(nsqd) == (99, 0)


def test_stops_before_the_start_and_connection(unreachable_address: str, consume: Consume) -> None:
    descriptors = set(Path("/proc/self/fd").iterdir())
    consumer = consume("127.0.0.1:1", started=False)
    assert set(Path("/proc/self/fd").iterdir()) <= descriptors
    assert consumer.stop()
    consumer.start()
    assert list(consumer) == []
    assert consumer.next_batch() is None
    assert not consumer._is_started
    consumer = consume(unreachable_address, dial_timeout_s=patience_s(20))
    assert consumer.stop(timeout_s=patience_s(5))
    assert list(consumer) == []


def test_a_signal_stops_a_starting_consumer(
    dead_address: str, consume: Consume, monkeypatch: pytest.MonkeyPatch
) -> None:
    consumer = consume(dead_address, started=False)
    start = consumer._io.start

    def interrupted(*, defer_warnings: bool) -> None:
        start(defer_warnings=defer_warnings)
        consumer.begin_stop(drain=True)

    monkeypatch.setattr(consumer._io, "start", interrupted)
    consumer.start()
    assert list(consumer) == []
    assert consumer.wait_for_end(patience_s(5))


def test_stop_during_the_handshake_closes_it(scripted_nsqd: ScriptedNsqd, consume: Consume) -> None:
    consumer = consume(scripted_nsqd.address)
    conn = scripted_nsqd.accept()
    conn.expect("IDENTIFY")
    assert consumer.stop(timeout_s=patience_s(2))
    conn.expect_closed()


def test_cls_is_sent_once(dialog: Dialog) -> None:
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
    straggler = conn.message(b"z")
    conn.expect(f"REQ {straggler} 0")
    conn.half_close()
    conn.expect_closed()


def test_a_message_that_arrives_behind_the_last_one_is_requeued_by_a_draining_stop(
    dialog: Dialog,
) -> None:
    consumer, conn = dialog("RDY 200")
    answered = conn.message(b"x")
    [message] = consumer.next_batch(timeout_s=patience_s(5)) or []
    consumer.begin_stop(drain=True)
    conn.expect("CLS")
    conn.close_wait()
    wait_until(lambda: consumer._is_delivered, what="everything has arrived")
    late = conn.message(b"y")
    conn.expect(f"REQ {late} 0")
    message.finish()
    conn.expect(f"FIN {answered}")


def test_no_connection_is_opened_after_a_stop(
    scripted_nsqd: ScriptedNsqd, consume: Consume
) -> None:
    consumer = consume(scripted_nsqd.address, reconnect_base_s=0.2)
    scripted_nsqd.subscribed("RDY 1").close()
    wait_until(lambda: not consumer.connections, what="the loss")
    assert consumer.stop(timeout_s=patience_s(5))
    with suppress(AssertionError):  # it may have reconnected before the stop
        scripted_nsqd.accept(timeout_s=0.01).close()
    with pytest.raises(AssertionError, match="no connection"):
        scripted_nsqd.accept(timeout_s=0.4)


@pytest.mark.parametrize("is_started", [False, True])
def test_fail_fast_raises_the_first_error(
    dead_address: str,
    nsqd: GoNsqd,
    consume: Consume,
    caplog: pytest.LogCaptureFixture,
    is_started: bool,
) -> None:
    consumer = consume(dead_address, started=is_started)  # as in a with statement
    with pytest.raises(ConnectionFailed, match=f"cannot connect to {dead_address}") as caught:
        consumer.start(fail_fast=True)
    assert caught.value.hint
    assert consumer.stop(timeout_s=0)
    assert list(consumer) == []
    caplog.clear()
    consumer = consume([dead_address, nsqd.tcp_address], fail_fast=True)
    assert consumer.connections == [nsqd.tcp_address]
    assert f"cannot connect to {dead_address}" in caplog.text


def test_several_topics_start_concurrently(
    unreachable_address: str, nsqd: GoNsqd, consume: Consume
) -> None:
    """One after the other, twenty topics would take 100 s if an nsqd dropped packets."""
    first = consume(unreachable_address, started=False, dial_timeout_s=0.5)
    second = consume(nsqd.tcp_address, started=False)
    with pytest.raises(ConnectionFailed, match="timed out"):
        start_all([first, second])
    wait_until(lambda: second.connections == [nsqd.tcp_address], what="the other")


def test_a_failure_of_several_consumers_is_logged_once(
    dead_address: str,
    scripted_nsqd: ScriptedNsqd,
    consume: Consume,
    in_background: InBackground,
    caplog: pytest.LogCaptureFixture,
) -> None:
    consumer = consume([dead_address, scripted_nsqd.address], started=False, reconnect_base_s=3600)
    started = in_background(start_all, [consumer])
    conn = scripted_nsqd.accept()
    wait_until(lambda: consumer._io.first_errors, what="the refusal")
    conn.subscribe(TOPIC, CHANNEL)
    started.result(patience_s(5))
    wait_until(lambda: dead_address in caplog.text, what="the warning")
    assert caplog.text.count(f"cannot connect to {dead_address}") == 1


@pytest.mark.parametrize("is_worker", [False, True])
def test_a_handler_thread_that_dies_ends_the_other_threads(
    nsqd: GoNsqd, consume: Consume, in_background: InBackground, is_worker: bool
) -> None:
    fill(nsqd, 50)
    consumer = consume(nsqd.tcp_address)
    was_interrupted = threading.Event()

    def interrupt(message: Message) -> None:
        if threading.current_thread().name.startswith("nsq-worker") is not is_worker:
            was_interrupted.wait(patience_s(5))  # so that the other thread gets the next batch
        else:
            was_interrupted.set()
            raise SystemExit

    def run() -> None:
        with pytest.raises(SystemExit):
            consumer.run(interrupt, workers=2)

    in_background(run).result(patience_s(5))
    assert consumer.stop(timeout_s=patience_s(5))


def steps(moments: dict[float, str]) -> list[str]:
    """The steps of a stop that began at 100, each after the change at its time."""
    stopping = Stopping(100.0, drain_timeout_s=30, drain=True)
    connection = Mock(saw_close_wait=False, is_drained=False)
    names = []
    for now, news in moments.items():
        if news:
            setattr(connection, news, True)
        names.append(stopping.next_step(connection, now))
    return names


def test_steps_of_a_stop() -> None:
    answered = {100: "", 101: "saw_close_wait", 102: "is_drained", 102.5: "", 103: ""}
    assert steps(answered) == ["wait", "wait", "shutdown", "wait", "close"]
    without_close_wait = {100.9: "is_drained", 101: ""}  # a second is enough
    assert steps(without_close_wait) == ["wait", "shutdown"]
    not_in_time = {129: "saw_close_wait", 130: "", 130.5: "", 131: ""}
    assert steps(not_in_time) == ["wait", "requeue", "wait", "close"]
    stopping = Stopping(100.0, drain_timeout_s=30, drain=True)
    connection = Mock(saw_close_wait=True, is_drained=True)
    assert stopping.next_change(100) == 101  # without CLOSE_WAIT a second is enough
    assert stopping.next_step(connection, 110) == "wait"  # for late messages
    quiet_at = stopping.next_change(110)
    assert 110 < quiet_at < 111
    assert stopping.next_step(connection, quiet_at) == "shutdown"
    closed_at = stopping.next_change(quiet_at)
    assert stopping.next_step(connection, closed_at) == "close"
    assert stopping.next_change(closed_at) == 130
    assert stopping.next_change(130) == 131
    assert stopping.next_change(131) is None


def test_a_second_stop_without_drain_requeues_what_the_first_would_have_handled(
    nsqd: GoNsqd, consume: Consume, in_background: InBackground
) -> None:
    fill(nsqd, 600)
    consumer = consume(nsqd.tcp_address, max_in_flight=100)
    is_slow, may_end = threading.Event(), threading.Event()

    def handle(message: Message) -> None:
        if consumer.stats.finished > 300:
            is_slow.set()
            may_end.wait(patience_s(10))

    work = in_background(consumer.run, handle, signals=False)
    assert is_slow.wait(patience_s(10))
    consumer.begin_stop(drain=True)
    wait_until(lambda: consumer._is_delivered, what="everything has arrived")
    consumer.begin_stop()
    wait_until(
        lambda: nsqd.channel_stats(TOPIC, CHANNEL)["in_flight_count"] == 1,
        what="all but one are requeued",
    )
    may_end.set()
    work.result(patience_s(10))
