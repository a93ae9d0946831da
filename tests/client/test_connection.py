"""A connection on a loop, a socket and a clock that the test controls."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from plugins.clients import CHANNEL, TOPIC, Consume, Handle, Produce
from plugins.daemons import GoNsqd
from plugins.embedded import EmbeddedServer
from plugins.network import TO_CLIENT, Proxy
from plugins.scripted_nsqd import ScriptedNsqd
from plugins.waiting import patience_s, wait_until

import nsqtools
from nsqtools.client.connection import Connection
from nsqtools.client.options import ClientOptions
from nsqtools.errors import ConnectionLost, NsqError, ServerError
from nsqtools.protocol.commands import IdentifyReply
from nsqtools.protocol.frames import FrameBuffer
from nsqtools.protocol.names import Address


class Loop:
    def __init__(self) -> None:
        self.time = self.bytes_since = 100.0
        self.watched: list[bool] = []
        self.unflushed: list[Connection] = []

    def now(self) -> float:
        return self.time

    buffer = memoryview(bytearray(1024))

    def register(self, connection: Connection) -> None: ...
    def unregister(self, connection: Connection) -> None: ...

    def watch_writes(self, connection: Connection, wanted: bool) -> None:
        self.watched.append(wanted)

    def flush_soon(self, connection: Connection) -> None:
        self.unflushed.append(connection)


class Stream:
    """Takes ``room`` bytes, or fails with ``failure``; has ``unread`` to give."""

    address = Address("nsqd", 4150)

    def __init__(self) -> None:
        self.room = 0
        self.failure: NsqError | None = None
        self.unread: list[bytes] = []
        self.taken = b""

    def send_ready(self, data: memoryview) -> int:
        if self.failure is not None:
            raise self.failure
        taken = bytes(data[: self.room])
        self.room -= len(taken)
        self.taken += taken
        return len(taken)

    def receive_ready(self, buffer: memoryview) -> bytes | None:
        return self.unread.pop(0) if self.unread else None

    def close(self) -> None: ...


class User:
    make_message = staticmethod(tuple)

    def __init__(self) -> None:
        self.events: list[str] = []
        self.received_at = 0.0
        self.connection: Connection | None = None

    def on_messages(self, messages: list[Any]) -> None: ...

    def on_response(self, data: bytes) -> None:
        self.events.append(data.decode())

    def on_server_error(self, error: ServerError) -> None:
        self.events.append(error.code)
        assert self.connection is not None
        self.connection.lose(error)

    def on_lost(self, error: NsqError) -> None:
        self.events.append(f"lost: {error}")


class Bench:
    """A connection with all its neighbors."""

    def __init__(self, **options: Any) -> None:
        self.loop, self.stream, self.user = Loop(), Stream(), User()
        reply = IdentifyReply.__new__(IdentifyReply)
        self.connection: Any = Connection(
            self.stream,
            reply,
            None,
            FrameBuffer(),
            ClientOptions(**options),  # type: ignore[arg-type]
        )
        self.connection.attach(self.loop, self.user)
        self.user.connection = self.connection


def frame(kind: int, data: bytes) -> bytes:
    return (len(data) + 4).to_bytes(4, "big") + kind.to_bytes(4, "big") + data


@pytest.mark.parametrize(
    ("heartbeat_interval_s", "read_timeout_s", "limit_s"),
    [(1, 60, 3), (10, 60, 21), (30, 60, 60), (30, 300, 61), (60, 60, 61), (1, 1, 2)],
)
def test_silence_beyond_two_heartbeats_is_death(
    heartbeat_interval_s: float, read_timeout_s: float, limit_s: float
) -> None:
    bench = Bench(heartbeat_interval_s=heartbeat_interval_s, read_timeout_s=read_timeout_s)
    bench.loop.time += limit_s
    bench.connection.check_liveness()
    assert bench.user.events == []
    bench.loop.time += 0.1
    bench.connection.check_liveness()
    assert bench.user.events == [f"lost: nsqd:4150 was silent for {limit_s} s"]


def test_a_peer_that_takes_no_bytes_is_dead_after_the_write_timeout() -> None:
    bench = Bench(write_timeout_s=10, heartbeat_interval_s=-1)
    bench.loop.time += 3600  # a long idle time before the jam does not count
    bench.connection.write(b"NOP\n")
    bench.connection.check_liveness()  # in the turn that answers a heartbeat
    bench.connection.flush()
    bench.loop.time += 10
    bench.connection.check_liveness()
    assert bench.connection.is_open
    bench.loop.time += 0.1
    bench.connection.check_liveness()
    assert bench.user.events == ["lost: nsqd:4150 took no bytes for 10 s"]


def test_writes_are_watched_only_while_something_waits() -> None:
    bench = Bench()
    bench.stream.room = 4
    bench.connection.write(b"FIN 1\n")
    bench.connection.write(b"FIN 2\n")
    assert bench.loop.unflushed == [bench.connection]
    bench.connection.flush()
    assert bench.loop.watched == [True]
    bench.stream.room = 100
    bench.connection.flush()
    assert bench.loop.watched == [True, False]
    assert bench.stream.taken == b"FIN 1\nFIN 2\n"


def test_a_failed_send_still_reports_the_reason_that_nsqd_gave() -> None:
    bench = Bench()
    bench.stream.failure = ConnectionLost("nsqd:4150: broken pipe")
    bench.stream.unread = [frame(1, b"E_INVALID bad") + frame(0, b"OK")]
    bench.connection.write(b"RDY 1\n")
    bench.connection.flush()
    assert bench.user.events == ["E_INVALID", "lost: nsqd:4150: E_INVALID bad"]


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
    assert nsqd.log.count("TCP: new client") == 1


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
