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
        with socket.create_connection(("127.0.0.1", port), timeout=5):
            connection, _ = listener.accept()
            with connection:
                assert connection.getsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY)


def test_the_real_address_is_told() -> None:
    with listen("127.0.0.1:0") as listener:
        assert real_address(listener) == f"127.0.0.1:{real_port(listener)}"
    with listen(":0") as listener:
        assert real_address(listener) == f"[::]:{real_port(listener)}"


@pytest.mark.parametrize(
    ("address", "complaint"),
    [
        ("127.0.0.1:65536", "listen tcp: address 65536: invalid port"),
        ("127.0.0.1:" + "9" * 5000, "invalid port"),
        ("no.such.host.invalid:0", "listen tcp: lookup no.such.host.invalid: no such host"),
        (
            "192.0.2.1:0",
            "listen tcp 192.0.2.1:0: bind: cannot assign requested address",
        ),
        ("/no/such/directory/nsqd.sock", "bind: no such file or directory"),
        ("/" + "x" * 200, "bind: AF_UNIX path too long"),
    ],
)
def test_what_cannot_be_listened_on_is_refused_in_gos_words(address: str, complaint: str) -> None:
    with pytest.raises(ConfigurationError) as refused:
        listen(address)

    assert str(refused.value).startswith(f"listen ({address}) failed - ")
    assert complaint in str(refused.value)


def test_an_address_of_all_interfaces_is_recognized() -> None:
    assert all(map(is_open_to_all, (":4150", "0.0.0.0:4150", "[::]:4150")))
    assert not any(map(is_open_to_all, ("127.0.0.1:4150", "[::1]:4150", "/run/nsqd.sock")))
