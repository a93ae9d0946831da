"""The life of a connection: liveness, messages, answers and errors."""

import math
import queue
import socket
import threading
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import pytest
from plugins.archives import unfinished
from plugins.clients import (
    CHANNEL,
    TOPIC,
    Consume,
    Dialog,
    Handle,
    InBackground,
    Produce,
    fill,
    take,
)
from plugins.network import TO_CLIENT, TO_SERVER, ProxyTo
from plugins.raw_client import RESPONSE, frame
from plugins.scripted_nsqd import ScriptedNsqd
from plugins.servers import EmbeddedServer, GoNsqd
from plugins.waiting import patience_s, wait_until

import nsqtools
from nsqtools import Batch, ClientOptions, Consumer, Message, NsqError, PublishUnknown, ServerError
from nsqtools.client.connection import Connection, identify_body, open_connection, silence_limit_s
from nsqtools.client.io_loop import IOThread, LoopMember
from nsqtools.client.opening import Opening
from nsqtools.protocol.names import Address, parse_address
from nsqtools.testing import fake_message


def test_silence_beyond_two_heartbeats_closes_the_connection() -> None:
    limits_s = {(1, 60): 3, (10, 60): 21, (30, 60): 60, (30, 300): 61, (60, 60): 61, (1, 1): 2}
    for (interval_s, read_timeout_s), limit_s in {**limits_s, (-1, 60): math.inf}.items():
        options = ClientOptions(heartbeat_interval_s=interval_s, read_timeout_s=read_timeout_s)
        assert silence_limit_s(options) == limit_s, interval_s
    root = Path(nsqtools.__file__).parent
    for path in [*(root / "client").glob("*.py"), *(root / "transport").glob("*.py")]:
        assert "time.time(" not in path.read_text("utf-8"), path
        assert "datetime.now" not in path.read_text("utf-8"), path


def test_a_failed_send_reports_the_reason_that_nsqd_gave(dialog: Dialog) -> None:
    errors: list[NsqError] = []
    consumer, conn = dialog("RDY 200", more={"on_error": errors.append})
    (subscription,) = consumer._io.subscriptions
    is_busy, is_gone = threading.Event(), threading.Event()

    def send() -> None:  # before it reads the pending bytes
        is_busy.set()
        is_gone.wait(patience_s(5))
        subscription.connection.write(b"NOP\n")

    consumer._io.loop.call_soon(send)
    assert is_busy.wait(patience_s(5))
    conn.error("E_INVALID bad")
    conn.reset()
    is_gone.set()
    wait_until(lambda: errors, what="the loss")
    assert "E_INVALID bad" in str(errors[0])


# nsqd closes the connection of a process that is stalled for two intervals
BEAT_S = min(2.0, max(1.0, patience_s(0.5)))


def test_heartbeats_continue_during_a_slow_handler(
    quick_nsqd: EmbeddedServer, consume: Consume, handle: Handle
) -> None:
    nsqd = quick_nsqd
    fill(nsqd, 3)
    is_over = threading.Event()
    errors: list[NsqError] = []
    options: dict[str, Any] = {"heartbeat_interval_s": BEAT_S, "more": {"on_error": errors.append}}
    consumer = consume(nsqd.tcp_address, max_in_flight=3, **options)
    began = time.monotonic()
    handle(consumer, lambda message: is_over.wait(patience_s(15)))
    wait_until(lambda: consumer.stats.received > 3, what="a second delivery")
    time.sleep(max(0.0, began + 2.5 * BEAT_S - time.monotonic()))
    assert errors == []
    assert consumer.connections == [nsqd.tcp_address]
    is_over.set()
    wait_until(lambda: not unfinished(nsqd, TOPIC, CHANNEL), what="an empty channel")


def test_a_silent_peer_is_disconnected(nsqd: GoNsqd, proxy_to: ProxyTo, consume: Consume) -> None:
    errors: list[NsqError] = []
    proxy = proxy_to(nsqd.tcp_address)
    callbacks = {"on_error": errors.append}
    consumer = consume(proxy.address, heartbeat_interval_s=1, read_timeout_s=1, more=callbacks)
    wait_until(lambda: consumer.connections, what="a connection")
    proxy.pause(TO_CLIENT)
    silent = f"{proxy.address} was silent for 2 s"
    wait_until(lambda: silent in map(str, errors), what="the loss")
    proxy.resume(TO_CLIENT)
    wait_until(lambda: consumer.connections, what="a new connection")


def test_a_stuck_producer_times_out(nsqd: GoNsqd, proxy_to: ProxyTo, produce: Produce) -> None:
    """Without heartbeats. An idle producer has no timeout, however long ago its last write was."""
    proxy = proxy_to(nsqd.tcp_address)
    times = {"heartbeat_interval_s": -1, "read_timeout_s": 0.1, "write_timeout_s": 1}
    times["publish_timeout_s"] = 600
    producer = produce(proxy.address, publish_max_msg_size=1 << 24, **times)
    producer.publish(TOPIC, b"x")
    time.sleep(1.3)  # longer than the timeout, and than the second in which a loss is noticed
    producer.publish(TOPIC, b"x")
    nsqd.wait_for_log("TCP: new client")
    assert nsqd.log.count("TCP: new client") == 1
    proxy.pause(TO_SERVER)
    time.sleep(1.3)
    began = time.monotonic()
    with pytest.raises(PublishUnknown, match="accepted no bytes for 1 s"):
        producer.publish(TOPIC, bytes(15 << 20))
    assert time.monotonic() - began >= 1


@pytest.fixture
def turns_a_second(monkeypatch: pytest.MonkeyPatch) -> Callable[[], float]:
    """Count the iterations of the I/O loop, which do not depend on the load of the machine."""
    turns, take_turn = [0], IOThread._turn

    def count(thread: IOThread) -> None:
        turns[0] += 1
        take_turn(thread)

    def ask() -> float:
        began, turns[0] = time.monotonic(), 0
        time.sleep(0.5)
        return turns[0] / (time.monotonic() - began)

    monkeypatch.setattr(IOThread, "_turn", count)
    return ask


def test_idle_clients_use_no_cpu(
    scripted_nsqd: ScriptedNsqd,
    nsqd: GoNsqd,
    consume: Consume,
    produce: Produce,
    turns_a_second: Callable[[], float],
) -> None:
    """A regression took 40 iterations a second while a message was unanswered.

    The socket had a write buffer that was full, and then empty.
    """
    scripted_nsqd.stop_listening()
    consume(scripted_nsqd.address, reconnect_base_s=5, rdy_redistribute_interval_s=5)
    idle = consume(nsqd.tcp_address, rdy_redistribute_interval_s=5)
    held = consume(nsqd.tcp_address, topic="held", rdy_redistribute_interval_s=5)
    producer = produce(nsqd.tcp_address)
    producer.publish_many("held", [b"finished", b"held"])
    take(held, 2)[0].finish()
    for _ in range(16):
        producer.submit("large", [bytes(1 << 20)])
    assert producer.flush(patience_s(10))
    wait_until(lambda: idle.connections, what="a connection")
    assert turns_a_second() < 32  # timers cause about 18 iterations; a busy loop has 10,000


@pytest.mark.parametrize("compression", ["snappy", "deflate"])
def test_an_ended_compressed_stream_uses_no_cpu(
    nsqd: GoNsqd,
    proxy_to: ProxyTo,
    consume: Consume,
    compression: str,
    turns_a_second: Callable[[], float],
) -> None:
    """The end of the stream is not confused with a decoder that needs more bytes."""
    proxy = proxy_to(nsqd.tcp_address)
    errors: list[NsqError] = []
    options: dict[str, Any] = {compression: True, "more": {"on_error": errors.append}}
    consumer = consume(proxy.address, reconnect_base_s=5, reconnect_max_s=5, **options)
    wait_until(lambda: consumer.connections, what="a connection")
    clients = partial(nsqd.channel_stats, TOPIC, CHANNEL)
    reason = "RDY: what the proxy had not read would make its close a reset"
    wait_until(lambda: any(client["ready_count"] for client in clients()["clients"]), what=reason)
    proxy.cut(reset=False)
    wait_until(lambda: errors, what="the loss")
    assert turns_a_second() < 100
    assert "closed the connection" in str(errors[0])


# -- answers, errors and invalid peers ------------------------------------------------------------


def batch_of(consumer: Consumer) -> Batch:
    batch = consumer.next_batch(timeout_s=patience_s(5))
    assert batch is not None
    return batch


def test_a_late_answer_is_counted(
    dialog: Dialog,
) -> None:
    consumer, conn = dialog("RDY 200")
    conn.send(3 * HEARTBEAT)
    conn.expect("NOP")
    message_id = conn.message(b"x")
    batch_of(consumer).finish()
    conn.expect(f"FIN {message_id}")
    conn.error(f"E_FIN_FAILED FIN {message_id} failed ID not in flight")
    conn.error("E_REQ_FAILED whatever it says")
    conn.error("E_TOUCH_FAILED")
    wait_until(lambda: consumer.stats.late == 3, what="three late answers")
    conn.heartbeat()
    conn.expect("NOP")


def test_only_the_first_of_two_fatal_errors_is_reported(
    scripted_nsqd: ScriptedNsqd, consume: Consume
) -> None:
    on_error = Mock(side_effect=LookupError("of the callback: it harms nothing"))
    consume(scripted_nsqd.address, more={"on_error": on_error})
    conn = scripted_nsqd.subscribed("RDY 200")
    conn.send(b"\x00\x00\x00\x0d\x00\x00\x00\x01E_INVALID" * 2)
    conn.expect_closed()
    scripted_nsqd.subscribed("RDY 200")
    [[error]] = [call.args for call in on_error.call_args_list]
    assert isinstance(error, ServerError)
    assert error.code == "E_INVALID"
    assert scripted_nsqd.address in str(error)


def test_zero_is_a_delay_and_seconds_become_milliseconds(dialog: Dialog) -> None:
    """nsqd limits delays, not the client. By default no message is given up."""
    consumer, conn = dialog("RDY 200", max_attempts=3)
    delays: dict[float | None, int] = {
        0: 0,
        0.0015: 2,
        3600: 3_600_000,
        7200: 7_200_000,
        1e99: 9 * 10**12,
    }
    by_attempts = {1: 90_000, 4: 360_000, 5: 450_000, 60_000: 900_000}
    cases = [(1, *case) for case in delays.items()]
    cases += [(attempts, None, delay_ms) for attempts, delay_ms in by_attempts.items()]
    message_id = conn.new_id()
    for attempts, delay_s, delay_ms in cases:
        conn.message(b"x", message_id=message_id, attempts=attempts)
        [message] = batch_of(consumer)
        message.requeue(delay_s, backoff=False)
        conn.skip_to(f"REQ {message_id} {delay_ms}")


def test_only_one_of_two_simultaneous_answers_counts(in_background: InBackground) -> None:
    both = threading.Barrier(2)

    class SeenByBoth(dict[bytes, Message]):
        def get(self, *arguments: Any) -> Any:
            message = super().get(*arguments)
            both.wait(patience_s(5))
            return message

    message = fake_message()
    message._source.in_flight = SeenByBoth(message._source.in_flight)
    answers = [in_background(message.finish) for _ in range(2)]
    assert sorted(int(answer.result(patience_s(5))) for answer in answers) == [0, 1]
    assert message.answers == ["finish"]


def test_an_answer_stays_with_its_connection(scripted_nsqd: ScriptedNsqd, consume: Consume) -> None:
    consumer = consume(scripted_nsqd.address)
    conn = scripted_nsqd.subscribed("RDY 200")
    message_id = conn.message(b"x")
    [old] = batch_of(consumer)
    conn.close()
    scripted_nsqd.accept()  # a connection that checks whether the topic was deleted
    second = scripted_nsqd.subscribed()
    second.take()  # an RDY: the count decreases while `old` is unanswered
    second.message(b"x", message_id=message_id, attempts=2)
    [new] = batch_of(consumer)
    assert not old.finish()
    assert not [line for line in second.not_yet_expected if line.startswith("FIN")]
    assert new.finish()
    second.skip_to(f"FIN {message_id}")


def test_a_redelivered_message_replaces_its_unanswered_delivery(dialog: Dialog) -> None:
    """A batch finishes all messages except redelivered and answered ones."""
    consumer, conn = dialog("RDY 200")
    ids = [conn.message(b"x") for _ in range(3)]
    source = batch_of(consumer)._source
    wait_until(lambda: len(source.in_flight) == 3, what="all of them")
    old, answered, _ = batch = Batch(source, source.in_flight.values())
    answered.requeue(0, backoff=False)
    conn.expect(f"REQ {ids[1]} 0")
    conn.message(b"x", message_id=ids[0], attempts=2)
    wait_until(lambda: old.is_answered, what="the new delivery")
    new = source.in_flight[old.id]
    assert (old.finish(), batch.finish()) == (False, 1)
    conn.expect(f"FIN {ids[2]}")
    assert (batch.finish(), batch.requeue()) == (0, 0)
    assert new.finish()
    conn.expect(f"FIN {ids[0]}")
    wait_until(lambda: consumer._io.rdy.in_flight == 0, what="nothing in flight")
    assert conn.not_yet_expected == []


HEARTBEAT = frame(RESPONSE, b"_heartbeat_")
OK_HEAD = b"\x00\x00\x00\x06\x00\x00\x00"
ANSWERS = {  # response to IDENTIFY -> error message
    OK_HEAD + b"\x00{}": "",  # all defaults: accepted
    HEARTBEAT + OK_HEAD + b"\x00OK": "",  # the response of old versions
    OK_HEAD + b"\x00[]": "neither OK nor JSON",
    b"\x00\x00\x00\x0d\x00\x00\x00\x01E_BAD_BOD": "E_BAD_BOD",
    b"\x00\x00\x00\x22\x00\x00\x00\x02" + bytes(30): "message before SUB",
    OK_HEAD + b"\x07OK": "unknown frame type 7",
    b"\x00\x00\x00": "closed the connection",
}


def open_on_loop(address: Address, options: ClientOptions) -> Connection:
    results: queue.Queue[Connection | NsqError] = queue.Queue()
    member = LoopMember("opening", Mock(), Mock())
    open_it = partial(
        Opening,
        member,
        address,
        options,
        (b"", identify_body(options)),
        is_announced=False,
        done=results.put,
    )
    member.start(open_it)
    result = results.get(timeout=patience_s(5))
    member.call_soon(member.stop)
    assert member.join(patience_s(5))
    if isinstance(result, NsqError):
        raise result
    return result


@pytest.mark.parametrize("open_it", [open_connection, open_on_loop])
def test_every_answer_to_identify_is_used_or_reported(
    in_background: InBackground, open_it: Callable[[Address, ClientOptions], Connection]
) -> None:
    for reply, complaint in ANSWERS.items():
        with ScriptedNsqd() as peer:
            address = parse_address(peer.address)
            opening = in_background(open_it, address, ClientOptions())
            conn = peer.accept()
            conn.expect("IDENTIFY")
            conn.send(reply)
            conn.half_close()
            if not complaint:
                opening.result(patience_s(5)).close()
                continue
            with pytest.raises(NsqError, match=complaint) as caught:
                opening.result(patience_s(5))
            assert str(address) in str(caught.value)
            conn.expect_closed()


def test_hanging_nsqd_delay_no_other_nsqd(nsqd: GoNsqd, consume: Consume) -> None:
    with socket.create_server(("", 0), backlog=200) as hanging:
        port = hanging.getsockname()[1]
        addresses = [f"127.0.1.{number}:{port}" for number in range(1, 101)]
        consumer = consume([*addresses, nsqd.tcp_address])
        nsqd.publish(TOPIC, b"x")
        [message] = take(consumer, 1)
        message.finish()
        assert consumer.errors() == []  # all other nsqd are still being tried
        consumer.stop()
        for _ in addresses:
            accepted, _ = hanging.accept()
            with accepted:
                accepted.settimeout(patience_s(5))
                while accepted.recv(4096):
                    pass
