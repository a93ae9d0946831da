"""The network is as bad as it says it is."""

from __future__ import annotations

import socket
import sys
import time
from collections.abc import Callable, Iterator

import pytest
from plugins.network import TO_CLIENT, TO_SERVER, Proxy
from plugins.waiting import patience_s, wait_until

NOT_YET_S = 0.05
PATIENT_S = patience_s(5.0)


def connect(address: str, timeout_s: float = PATIENT_S) -> socket.socket:
    host, port = address.split(":")
    return socket.create_connection((host, int(port)), timeout_s)


@pytest.fixture
def listener() -> Iterator[socket.socket]:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        listener.settimeout(PATIENT_S)
        yield listener


@pytest.fixture
def proxy(listener: socket.socket, proxy_to: Callable[[str], Proxy]) -> Proxy:
    return proxy_to("{}:{}".format(*listener.getsockname()))


@pytest.fixture
def client(proxy: Proxy) -> Iterator[socket.socket]:
    with connect(proxy.address) as sock:
        yield sock


@pytest.fixture
def server(listener: socket.socket, client: socket.socket) -> Iterator[socket.socket]:
    sock, _ = listener.accept()
    sock.settimeout(PATIENT_S)
    with sock:
        yield sock


def test_forwards_both_ways_and_the_end_of_file(
    client: socket.socket, server: socket.socket
) -> None:
    client.sendall(b"ping")
    assert server.recv(10) == b"ping"
    client.shutdown(socket.SHUT_WR)
    assert server.recv(10) == b""
    server.sendall(b"pong")
    assert client.recv(10) == b"pong"


def test_forwards_a_reset(client: socket.socket, server: socket.socket, proxy: Proxy) -> None:
    proxy.cut(reset=True)
    for side in (client, server):
        with pytest.raises(ConnectionResetError):
            side.recv(1)


def test_cuts_with_end_of_file(client: socket.socket, server: socket.socket, proxy: Proxy) -> None:
    proxy.cut(reset=False)
    assert (client.recv(1), server.recv(1)) == (b"", b"")


def test_accepts_again_after_a_cut(
    client: socket.socket, server: socket.socket, proxy: Proxy, listener: socket.socket
) -> None:
    proxy.cut(reset=True)
    with connect(proxy.address) as again:
        again.sendall(b"ping")
        sock, _ = listener.accept()
        with sock:
            assert sock.recv(10) == b"ping"


def test_resets_the_client_when_the_server_is_gone(
    dead_address: str, proxy_to: Callable[[str], Proxy]
) -> None:
    proxy = proxy_to(dead_address)
    # The reset may come before connect() has returned.
    with pytest.raises(ConnectionResetError), connect(proxy.address) as sock:
        sock.recv(1)


def test_a_paused_direction_holds_bytes_back_and_the_other_does_not(
    client: socket.socket, server: socket.socket, proxy: Proxy
) -> None:
    proxy.pause(TO_CLIENT)
    server.sendall(b"held")
    client.sendall(b"ping")
    assert server.recv(10) == b"ping"
    client.settimeout(NOT_YET_S)
    with pytest.raises(TimeoutError):
        client.recv(10)

    proxy.resume(TO_CLIENT)
    client.settimeout(PATIENT_S)
    assert client.recv(10) == b"held"


def test_a_paused_direction_holds_the_end_back(
    client: socket.socket, server: socket.socket, proxy: Proxy
) -> None:
    proxy.pause(TO_SERVER)
    client.close()
    server.settimeout(NOT_YET_S)
    with pytest.raises(TimeoutError):
        server.recv(1)


def test_a_cut_ends_a_paused_connection(
    client: socket.socket, server: socket.socket, proxy: Proxy
) -> None:
    proxy.pause(TO_CLIENT)
    server.sendall(b"held")
    proxy.cut(reset=False)
    assert client.recv(10) == b""


def test_passes_on_small_pieces(client: socket.socket, server: socket.socket, proxy: Proxy) -> None:
    proxy.piece_size = 1
    proxy.delay_s = 0.02
    began = time.monotonic()
    proxy.pause_after(TO_CLIENT, 1)
    server.sendall(b"abc")
    for piece in (b"a", b"b", b"c"):  # one by one: a slow reader gets several at once
        assert client.recv(10) == piece
        proxy.pause_after(TO_CLIENT, 1)
    assert time.monotonic() - began > 0.05


def test_a_slow_reader_is_felt_by_the_sender(
    client: socket.socket, server: socket.socket, proxy: Proxy
) -> None:
    proxy.pause(TO_CLIENT)
    server.setblocking(False)

    def is_full() -> bool:
        try:
            server.send(bytes(1 << 20))
        except BlockingIOError:
            return True
        return False

    wait_until(is_full, what="the proxy to stop reading")


def test_a_deaf_peer_connects_and_says_nothing(deaf_address: str) -> None:
    with connect(deaf_address) as sock:
        sock.sendall(b"  V2")
        sock.settimeout(NOT_YET_S)
        with pytest.raises(TimeoutError):
            sock.recv(1)


@pytest.mark.skipif(sys.platform != "linux", reason="depends on how Linux treats a full backlog")
def test_an_unreachable_peer_does_not_even_connect(unreachable_address: str) -> None:
    with pytest.raises(TimeoutError):
        connect(unreachable_address, 0.2)
