"""Connections that die, or must not."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any
from unittest.mock import Mock, call

import pytest
from plugins.clients import CHANNEL, TOPIC, Consume, Handle, InBackground, Produce
from plugins.daemons import GoNsqd
from plugins.embedded import EmbeddedServer
from plugins.network import TO_CLIENT, TO_SERVER, ProxyTo
from plugins.scripted_nsqd import Connection, ScriptedNsqd
from plugins.waiting import patience_s, wait_until

import nsqtools
from nsqtools import PublishUnknown
from nsqtools.client.connection import open_connection, silence_limit_s
from nsqtools.client.io_loop import IOThread
from nsqtools.client.options import ClientOptions
from nsqtools.errors import NsqError
from nsqtools.protocol.names import parse_address


@pytest.mark.parametrize(
    ("heartbeat_interval_s", "read_timeout_s", "limit_s"),
    [
        (1, 60, 3),
        (10, 60, 21),
        (30, 60, 60),
        (30, 300, 61),
        (60, 60, 61),
        (1, 1, 2),
        (-1, 60, None),
    ],
)
def test_silence_beyond_two_heartbeats_is_death(
    heartbeat_interval_s: float, read_timeout_s: float, limit_s: float | None
) -> None:
    options = ClientOptions(
        heartbeat_interval_s=heartbeat_interval_s, read_timeout_s=read_timeout_s
    )
    assert silence_limit_s(options) == limit_s


# -- on a loop that the test turns -----------------------------------------------------------------


@pytest.fixture
def attached(
    scripted_nsqd: ScriptedNsqd, in_background: InBackground
) -> Iterator[tuple[Any, Connection]]:
    """A connection with a loop and a user that do nothing, and its other end."""
    options = ClientOptions(write_timeout_s=10, heartbeat_interval_s=-1)
    address = parse_address(scripted_nsqd.address)
    opening = in_background(open_connection, address, options, None)
    peer = scripted_nsqd.identified()
    connection = opening.result(patience_s(5))
    loop = Mock(buffer=memoryview(bytearray(1024)))
    loop.now.return_value = 0.0
    connection.attach(loop, Mock())
    yield connection, peer
    connection.close()


def test_what_is_about_to_be_sent_after_a_long_idle_time_is_not_stuck(
    attached: tuple[Any, Connection],
) -> None:
    connection, _ = attached
    connection._loop.now.return_value = 3600.0
    connection.write(b"NOP\n")  # a heartbeat is answered in the turn that checks
    connection.check_liveness()
    assert connection.is_open


def test_writes_are_watched_only_while_something_waits(attached: tuple[Any, Connection]) -> None:
    connection, peer = attached
    connection.write(bytes(1 << 25))
    connection.write(b"FIN 1\n")
    assert connection._loop.flush_soon.call_count == 1
    with peer._received:  # it reads no more than once
        connection.flush()

    def is_sent() -> bool:
        connection.flush()
        return not connection.has_unsent

    wait_until(is_sent, what="all of it to be sent")
    watched = [call(connection, True), call(connection, False)]
    assert connection._loop.watch_writes.call_args_list == watched


def test_a_failed_send_still_reports_the_reason_that_nsqd_gave(
    attached: tuple[Any, Connection],
) -> None:
    connection, peer = attached
    connection._user.on_server_error.side_effect = connection.lose
    peer.error("E_INVALID bad")
    peer.ok()
    peer.reset()

    def is_lost() -> bool:
        connection.write(b"RDY 1\n")
        connection.flush()
        return bool(connection._user.on_lost.called)

    wait_until(is_lost, what="the loss")
    assert "E_INVALID bad" in str(connection._user.on_lost.call_args)
    assert not connection._user.on_response.called


# -- on real servers -------------------------------------------------------------------------------


# nsqd closes when a process does not run for two of them
BEAT_S = min(2.0, max(1.0, patience_s(0.5)))


def test_a_slow_handler_and_redeliveries_do_not_stop_heartbeats(
    quick_nsqd: EmbeddedServer, consume: Consume, handle: Handle
) -> None:
    nsqd = quick_nsqd
    nsqd.create_channel(TOPIC, CHANNEL)
    nsqd.publish(TOPIC, b"a", b"b", b"c")
    is_over = threading.Event()
    errors: list[NsqError] = []
    consumer = consume(
        nsqd.tcp_address,
        max_in_flight=3,
        heartbeat_interval_s=BEAT_S,
        more={"on_error": errors.append},
    )
    began = time.monotonic()
    handle(consumer, lambda message: is_over.wait(patience_s(15)))
    wait_until(lambda: consumer.stats.received > 3, what="a second delivery")
    time.sleep(max(0.0, began + 2.5 * BEAT_S - time.monotonic()))
    assert errors == []
    assert consumer.connections == [nsqd.tcp_address]
    is_over.set()
    wait_until(lambda: nsqd.depth(TOPIC, CHANNEL) == 0, what="an empty channel")
    wait_until(
        lambda: nsqd.channel_stats(TOPIC, CHANNEL)["in_flight_count"] == 0, what="nothing in flight"
    )


def test_a_silent_peer_is_given_up(nsqd: GoNsqd, proxy_to: ProxyTo, consume: Consume) -> None:
    errors: list[NsqError] = []
    proxy = proxy_to(nsqd.tcp_address)
    consumer = consume(
        proxy.address, heartbeat_interval_s=1, read_timeout_s=1, more={"on_error": errors.append}
    )
    wait_until(lambda: consumer.connections, what="a connection")
    proxy.pause(TO_CLIENT)
    silent = f"{proxy.address} was silent for 2 s"
    wait_until(lambda: silent in map(str, errors), what="the loss")
    proxy.resume(TO_CLIENT)
    wait_until(lambda: consumer.connections, what="a new connection")


def test_an_idle_producer_is_not_timed_out_and_one_whose_peer_takes_no_bytes_is(
    nsqd: GoNsqd, proxy_to: ProxyTo, produce: Produce
) -> None:
    """Without heartbeats, and however long ago the last write was."""
    proxy = proxy_to(nsqd.tcp_address)
    producer = produce(
        proxy.address,
        heartbeat_interval_s=-1,
        read_timeout_s=0.1,
        write_timeout_s=1,
        publish_timeout_s=600,
        publish_max_msg_size=1 << 24,
    )
    producer.publish(TOPIC, b"x")
    time.sleep(1.3)  # longer than the time-out, and than the second in which a loss is noticed
    producer.publish(TOPIC, b"x")
    nsqd.wait_for_log("TCP: new client")
    assert nsqd.log.count("TCP: new client") == 1
    proxy.pause(TO_SERVER)
    time.sleep(1.3)
    began = time.monotonic()
    with pytest.raises(PublishUnknown, match="took no bytes for 1 s"):
        producer.publish(TOPIC, bytes(15 << 20))
    assert time.monotonic() - began >= 1


@pytest.mark.parametrize("floor", ["client", "transport"])
def test_no_wall_clock_decides_anything(floor: str) -> None:
    for path in (Path(nsqtools.__file__).parent / floor).glob("*.py"):
        assert "time.time(" not in path.read_text("utf-8"), path
        assert "datetime" not in path.read_text("utf-8"), path


@pytest.fixture
def turns_a_second(monkeypatch: pytest.MonkeyPatch) -> Callable[[], float]:
    """Ask how often the I/O thread looks for something to do: a busy machine adds none."""
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


def test_nothing_to_do_takes_no_cpu(
    scripted_nsqd: ScriptedNsqd,
    nsqd: GoNsqd,
    consume: Consume,
    produce: Produce,
    turns_a_second: Callable[[], float],
) -> None:
    address = scripted_nsqd.address
    scripted_nsqd.stop_listening()
    consume(address, reconnect_base_s=5)
    idle = consume(nsqd.tcp_address)
    held = consume(nsqd.tcp_address, topic="held")
    producer = produce(nsqd.tcp_address)
    producer.publish("held", b"x")
    assert held.next_batch(timeout_s=patience_s(5))
    wait_until(lambda: idle.connections, what="a connection")
    assert turns_a_second() < 100  # those of timers; one that spins has 10,000


@pytest.mark.parametrize("compression", ["snappy", "deflate"])
def test_an_ended_compressed_stream_takes_no_cpu(
    nsqd: GoNsqd,
    proxy_to: ProxyTo,
    consume: Consume,
    compression: str,
    turns_a_second: Callable[[], float],
) -> None:
    """The end of the stream is not taken for a decoder that wants more."""
    proxy = proxy_to(nsqd.tcp_address)
    errors: list[NsqError] = []
    consumer = consume(
        proxy.address,
        reconnect_base_s=5,
        reconnect_max_s=5,
        more={"on_error": errors.append},
        **{compression: True},
    )
    wait_until(lambda: consumer.connections, what="a connection")
    proxy.cut(reset=False)
    wait_until(lambda: errors, what="the loss")
    assert turns_a_second() < 100
    assert "closed the connection" in str(errors[0])
