"""nsqd accepts what the auth server says, and only that."""

from __future__ import annotations

import socket
from collections.abc import Callable

import pytest
from plugins.auth_server import AuthServer
from plugins.daemons import GoNsqd


@pytest.fixture
def authorized_nsqd(go_nsqd: Callable[..., GoNsqd], auth_server: AuthServer) -> GoNsqd:
    return go_nsqd(f"-auth-http-address={auth_server.address}")


def answer_to(nsqd: GoNsqd, secret: bytes, then: bytes = b"") -> bytes:
    """All that nsqd sends after AUTH and `then`, until it closes."""
    host, port = nsqd.tcp_address.split(":")
    with socket.create_connection((host, int(port)), timeout=5) as sock, sock.makefile("rb") as f:
        sock.sendall(b"  V2AUTH\n" + len(secret).to_bytes(4, "big") + secret + then)
        sock.shutdown(socket.SHUT_WR)
        return f.read()


def test_a_known_secret_is_authorized_and_asked_about(
    authorized_nsqd: GoNsqd, auth_server: AuthServer
) -> None:
    auth_server.allow("s3cret &=", topic="^clicks$", permissions=["publish"], identity="bob")

    answer = answer_to(authorized_nsqd, b"s3cret &=", b"PUB clicks\n\0\0\0\1x")
    assert b'"identity":"bob"' in answer
    assert answer.endswith(b"OK")
    assert b"E_UNAUTHORIZED" in answer_to(authorized_nsqd, b"s3cret &=", b"SUB clicks c\n")
    assert auth_server.questions[0] == {
        "common_name": "",
        "remote_ip": "127.0.0.1",
        "secret": "s3cret &=",
        "tls": "false",
    }


def test_an_unknown_secret_and_a_broken_answer_are_refused(
    authorized_nsqd: GoNsqd, auth_server: AuthServer
) -> None:
    assert b"E_AUTH_FAILED" in answer_to(authorized_nsqd, b"guess")
    auth_server.answer("broken", 200, b"{not json")
    assert b"E_AUTH_FAILED" in answer_to(authorized_nsqd, b"broken")
