"""The stream over a real socket: blocking and not, with every failure mapped once."""

from __future__ import annotations

import contextlib
import select
import socket
import struct
import time
from collections.abc import Iterator

import pytest

from nsqtools.errors import ConnectionFailed, ConnectionLost, DeadlineExceeded
from nsqtools.protocol.names import Address, parse_address
from nsqtools.transport.stream import Deadline, Stream, connect


@pytest.fixture
def pair() -> Iterator[tuple[Stream, socket.socket]]:
    """A connected stream and the other end of it."""
    with socket.create_server(("127.0.0.1", 0)) as listener:
        stream = connect(Address(*listener.getsockname()), Deadline(5))
        peer, _ = listener.accept()
        with peer:
            yield stream, peer
        stream.close()


def reset(peer: socket.socket) -> None:
    peer.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
    peer.close()


def receive(stream: Stream) -> bytes | None:
    """What is there, waiting until something is."""
    buffer = memoryview(bytearray(100))
    assert select.select([stream], [], [], 5)[0]
    return stream.receive_ready(buffer)


def test_a_blocking_stream_sends_and_receives_in_time(pair: tuple[Stream, socket.socket]) -> None:
    stream, peer = pair
    stream.send_all(b"ping", Deadline(5))
    assert peer.recv(10) == b"ping"
    peer.sendall(b"pong")
    assert stream.receive(Deadline(5)) == b"pong"
    with pytest.raises(DeadlineExceeded, match=f"{stream.address}: no answer in time"):
        stream.receive(Deadline(0.01))
    with pytest.raises(DeadlineExceeded):
        stream.receive(Deadline(-1))
    with pytest.raises(DeadlineExceeded):
        stream.send_all(bytes(1 << 25), Deadline(0.05))


@pytest.mark.parametrize(
    ("is_reset", "what"), [(False, " closed the connection"), (True, ": connection reset")]
)
def test_the_end_of_a_blocking_stream_names_the_peer(
    pair: tuple[Stream, socket.socket], is_reset: bool, what: str
) -> None:
    stream, peer = pair
    if is_reset:
        reset(peer)
    else:
        peer.close()
    with pytest.raises(ConnectionLost, match=f"{stream.address}{what}"):
        stream.receive(Deadline(5))


def test_ready_bytes_nothing_and_the_end_are_three_things(
    pair: tuple[Stream, socket.socket],
) -> None:
    stream, peer = pair
    stream.set_nonblocking()
    assert stream.receive_ready(memoryview(bytearray(100))) is None
    peer.sendall(b"abc")
    assert receive(stream) == b"abc"
    peer.sendall(b"x" * 150)
    received = (receive(stream) or b"") + (receive(stream) or b"")
    assert received == b"x" * 150
    stream.shutdown_write()
    assert peer.recv(10) == b""
    peer.sendall(b"last")
    assert receive(stream) == b"last"
    peer.close()
    assert receive(stream) == b""


def test_a_full_socket_takes_nothing_and_a_lost_one_is_an_error(
    pair: tuple[Stream, socket.socket],
) -> None:
    stream, peer = pair
    stream.set_nonblocking()
    while stream.send_ready(bytes(1 << 20)):
        pass
    assert stream.send_ready(b"x") == 0
    reset(peer)
    with pytest.raises(ConnectionLost, match=str(stream.address)):
        receive(stream)
    with pytest.raises(ConnectionLost, match=str(stream.address)):
        stream.send_ready(b"x")
    stream.shutdown_write()
    stream.close()
    stream.close()


def test_a_refused_connection_names_address_reason_and_remedy(dead_address: str) -> None:
    address = parse_address(dead_address)
    with pytest.raises(ConnectionFailed) as caught:
        connect(address, Deadline(5))
    assert str(caught.value) == f"cannot connect to {address} (connection refused)"
    assert "4150" in caught.value.hint


def test_a_connect_without_an_answer_ends_in_time(unreachable_address: str) -> None:
    deadline = Deadline(0.1)
    with pytest.raises(DeadlineExceeded, match=f"{unreachable_address} .timed out"):
        connect(parse_address(unreachable_address), deadline)
    assert deadline.has_passed


@pytest.mark.parametrize("host", ["no-such-host.invalid", "a" * 300, "nul\0host"])
def test_a_name_that_cannot_be_resolved_is_named(host: str) -> None:
    with pytest.raises(ConnectionFailed, match="cannot connect to") as caught:
        connect(Address(host, 4150), Deadline(5))
    assert caught.value.hint == "Check the host name."


def test_a_name_server_that_does_not_answer_holds_nobody_up(silent_name_server: None) -> None:
    with pytest.raises(DeadlineExceeded, match=r"nsqd-1:4150 \(the name server"):
        connect(Address("nsqd-1", 4150), Deadline(0.1))


def test_the_local_address_is_used() -> None:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        stream = connect(Address(*listener.getsockname()), Deadline(5), "127.0.0.2")
        peer, (host, _) = listener.accept()
        with peer:
            assert host == "127.0.0.2"
        stream.close()


@pytest.fixture
def black_hole() -> Iterator[tuple[str, int]]:
    """An address that accepts no connection and refuses none: its backlog is full."""
    with contextlib.ExitStack() as sockets:
        listener = sockets.enter_context(socket.socket())
        listener.bind(("127.0.0.1", 0))
        listener.listen(0)
        for _ in range(3):
            filler = sockets.enter_context(socket.socket())
            filler.setblocking(False)
            filler.connect_ex(listener.getsockname())
        yield listener.getsockname()


def resolve_to(monkeypatch: pytest.MonkeyPatch, *targets: tuple[str, int]) -> None:
    found = [(socket.AF_INET, socket.SOCK_STREAM, 6, "", target) for target in targets]
    monkeypatch.setattr(socket, "getaddrinfo", lambda *args, **kwargs: found)


@pytest.mark.alone
def test_a_first_address_that_drops_packets_costs_a_quarter_of_a_second(
    monkeypatch: pytest.MonkeyPatch, black_hole: tuple[str, int]
) -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        resolve_to(monkeypatch, black_hole, black_hole, server.getsockname())
        began = time.monotonic()
        stream = connect(Address("two-addresses", 4150), Deadline(5))
        took_s = time.monotonic() - began
        stream.close()
    assert 0.45 < took_s < 2


@pytest.mark.alone
def test_an_address_that_refuses_costs_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        resolve_to(monkeypatch, ("127.0.0.1", 1), server.getsockname())
        times_s = []
        for _ in range(3):
            began = time.monotonic()
            connect(Address("two-addresses", 4150), Deadline(5)).close()
            times_s.append(time.monotonic() - began)
    assert min(times_s) < 0.25


def test_addresses_that_all_drop_packets_end_with_the_deadline(
    monkeypatch: pytest.MonkeyPatch, black_hole: tuple[str, int]
) -> None:
    resolve_to(monkeypatch, black_hole, black_hole)
    with pytest.raises(DeadlineExceeded, match="timed out"):
        connect(Address("two-addresses", 4150), Deadline(0.6))
