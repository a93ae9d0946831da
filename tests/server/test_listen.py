"""Go's addresses as listening sockets."""

from __future__ import annotations

import socket

import pytest

from nsqtools.errors import ConfigurationError
from nsqtools.server.listen import is_open_to_all, listen, real_address, real_port


@pytest.mark.parametrize("address", ["127.0.0.1:0", "localhost:0", ":0", "0.0.0.0:0", "[::]:0"])
def test_an_ipv4_client_is_accepted_and_answered_without_delay(address: str) -> None:
    with listen(address) as listener:
        port = real_port(listener)
        assert real_address(listener) in [
            f"{each}:{port}" for each in ("127.0.0.1", "0.0.0.0", "[::]")
        ]
        with socket.create_connection(("127.0.0.1", port), timeout=5):
            connection, _ = listener.accept()
            with connection:
                assert connection.getsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY)
                assert connection.getsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE)


@pytest.mark.parametrize("address", ["127.0.0.1:" + "9" * 5000, "/" + "x" * 200])
def test_an_address_beyond_all_bounds_is_refused(address: str) -> None:
    with pytest.raises(ConfigurationError, match=r"invalid port|AF_UNIX path too long"):
        listen(address)


def test_an_address_of_all_interfaces_is_recognized() -> None:
    assert all(map(is_open_to_all, (":4150", "0.0.0.0:4150", "[::]:4150")))
    assert not any(map(is_open_to_all, ("127.0.0.1:4150", "[::1]:4150", "/run/nsqd.sock")))
