"""A connection on a loop, a socket and a clock that the test controls."""

from __future__ import annotations

from typing import Any

import pytest

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
    bench.connection.write(b"RDY 1\n")
    bench.connection.flush()
    bench.loop.time += 10
    bench.connection.check_liveness()
    assert bench.connection.is_open
    bench.loop.time += 0.1
    bench.connection.check_liveness()
    assert bench.user.events == ["lost: nsqd:4150 took no bytes for 10 s"]


def test_what_is_about_to_be_sent_after_a_long_idle_time_is_not_stuck() -> None:
    bench = Bench(write_timeout_s=10, heartbeat_interval_s=-1)
    bench.loop.time += 3600
    bench.connection.write(b"NOP\n")  # a heartbeat is answered in the turn that checks
    bench.connection.check_liveness()
    assert bench.connection.is_open


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
