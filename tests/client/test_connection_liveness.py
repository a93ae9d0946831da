"""Connections that die, or must not. The clock of silence alone is in test_connection.py."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from pathlib import Path

import pytest
from plugins.clients import CHANNEL, TOPIC, Consume, Handle, Produce
from plugins.daemons import GoNsqd
from plugins.embedded import EmbeddedServer
from plugins.network import TO_CLIENT, Proxy
from plugins.scripted_nsqd import ScriptedNsqd
from plugins.waiting import patience_s, wait_until

import nsqtools
from nsqtools.errors import NsqError

WAIT_S = patience_s(15.0)
# nsqd closes when a process does not run for two of them
BEAT_S = min(2.0, max(1.0, patience_s(0.5)))


def clients_seen(nsqd: GoNsqd) -> int:
    nsqd.wait_for_log("TCP: new client")
    return nsqd.log.count("TCP: new client")


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
    handle(consumer, lambda message: is_over.wait(WAIT_S))
    wait_until(lambda: consumer.stats.received > 3, what="a second delivery")
    time.sleep(max(0.0, began + 2.5 * BEAT_S - time.monotonic()))
    assert errors == []
    assert consumer.connections == [nsqd.tcp_address]
    is_over.set()
    wait_until(lambda: nsqd.depth(TOPIC, CHANNEL) == 0, what="an empty channel")
    wait_until(
        lambda: nsqd.channel_stats(TOPIC, CHANNEL)["in_flight_count"] == 0, what="nothing in flight"
    )


def test_a_silent_peer_is_given_up(
    nsqd: GoNsqd, proxy_to: Callable[[str], Proxy], consume: Consume
) -> None:
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


def test_an_idle_producer_is_not_timed_out_by_its_last_write_nor_without_heartbeats(
    nsqd: GoNsqd, produce: Produce
) -> None:
    producer = produce(
        nsqd.tcp_address, heartbeat_interval_s=-1, read_timeout_s=0.1, write_timeout_s=0.1
    )
    producer.publish(TOPIC, b"x")
    time.sleep(1.3)  # longer than the time-out, and than the second in which a loss is noticed
    producer.publish(TOPIC, b"x")
    assert clients_seen(nsqd) == 1


@pytest.mark.parametrize("floor", ["client", "transport"])
def test_no_wall_clock_decides_anything(floor: str) -> None:
    for path in (Path(nsqtools.__file__).parent / floor).glob("*.py"):
        assert "time.time(" not in path.read_text("utf-8"), path
        assert "datetime" not in path.read_text("utf-8"), path


def cpu_share(seconds: float) -> float:
    """The share of a CPU that this process took while it had nothing to do."""
    began, used = time.monotonic(), time.process_time()
    threading.Event().wait(seconds)
    return (time.process_time() - used) / (time.monotonic() - began)


@pytest.mark.alone
def test_nothing_to_do_takes_no_cpu(
    scripted_nsqd: ScriptedNsqd, nsqd: GoNsqd, consume: Consume, produce: Produce
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
    assert cpu_share(1.0) < 0.05


@pytest.mark.parametrize("compression", ["snappy", "deflate"])
@pytest.mark.alone
def test_an_ended_compressed_stream_takes_no_cpu(
    nsqd: GoNsqd, proxy_to: Callable[[str], Proxy], consume: Consume, compression: str
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
    assert cpu_share(0.5) < 0.1
    assert "closed the connection" in str(errors[0])
