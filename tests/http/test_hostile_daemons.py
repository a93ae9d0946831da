"""What a hostile or broken daemon sends costs a bounded time and memory, and is its own error."""

from __future__ import annotations

import json
import logging
import os
from collections.abc import Callable, Iterable

import pytest
from plugins.http_server import Serves, http

from nsqtools.errors import HTTPError, NsqError, ProtocolError
from nsqtools.http.http_api import HTTPAPI, NsqdHTTPClient, NsqlookupdHTTPClient, decode_lookup

Sends = Callable[[Iterable[bytes]], str]

NESTED = b"[" * 100_000 + b"]" * 100_000
OOPS = b"HTTP/1.1 500 Oops\r\nContent-Length: %d\r\n\r\n" % len(NESTED)


@pytest.fixture
def sends(serves: Serves) -> Sends:
    """``sends(pieces)``: the URL of a server that sends the pieces to whoever connects."""
    return lambda pieces: f"http://{serves(http(pieces))}"


def answer(body: bytes, *headers: str) -> list[bytes]:
    head = ["HTTP/1.1 200 OK", f"Content-Length: {len(body)}", *headers]
    return ["\r\n".join(head).encode() + b"\r\n\r\n", body]


@pytest.mark.parametrize(
    ("answer", "kind"),
    [
        (b"", ProtocolError),
        (b"\x00\x00\x00\x0eE_BAD_PROTOCOL", ProtocolError),
        (b"HTTP/1.1 200 OK\r\nContent-Length: 5\r\n\r\nhello", ProtocolError),
        (b"HTTP/1.1 200 OK\r\nContent-Length: 50\r\n\r\n{", NsqError),
        (b"HTTP/1.1 200 OK\r\nContent-Length: 2\r\n\r\n\xff\xfe", ProtocolError),
        (b"HTTP/1.1 500 Oh\r\nContent-Length: 0\r\n\r\n", HTTPError),
        (OOPS + NESTED, HTTPError),
        (b"HTTP/1.1 302 Away\r\nLocation: /\r\nContent-Length: 0\r\n\r\n", HTTPError),
    ],
    ids=lambda value: repr(value)[:30],
)
def test_a_server_that_is_no_nsq(answer: bytes, kind: type[NsqError], sends: Sends) -> None:
    url = sends([answer])
    with HTTPAPI(url) as api, pytest.raises(kind, match=url):
        api.get("/x")


def test_a_charset_is_not_believed(sends: Sends) -> None:
    pieces = answer(b"OK", "Content-Type: text/plain; charset=zlib_codec")

    with NsqdHTTPClient(sends(pieces)) as nsqd:
        nsqd.ping()


@pytest.mark.parametrize(
    "info",
    [
        {"tcp_port": "x"},
        {"tcp_port": 10**400},
        {"tcp_port": 4150, "http_port": [1]},
        {"tcp_port": 4150, "broadcast_address": {}},
    ],
    ids=str,
)
def test_an_info_that_makes_no_sense_is_not_an_answer_of_nsqd(info: object, sends: Sends) -> None:
    with (
        NsqdHTTPClient(sends(answer(json.dumps(info).encode()))) as nsqd,
        pytest.raises(ProtocolError, match="does not answer like nsqd"),
    ):
        nsqd.info()


def test_of_too_many_nsqd_some_are_believed(caplog: pytest.LogCaptureFixture) -> None:
    producers = [{"broadcast_address": f"h{n}", "tcp_port": 1} for n in range(20)]

    drawn = [
        decode_lookup({"channels": [], "producers": producers}, "url", 10).nodes for _ in range(20)
    ]

    assert {len(each) for each in drawn} == {10}
    assert len({node for each in drawn for node in each}) == 20  # nobody is kept out for good
    assert "url announces 20 nsqd; 10 of them" in caplog.text


def test_what_is_no_topic_or_no_nsqd_is_left_out_though_it_is_tombstoned(sends: Sends) -> None:
    """Of a list no set can be made."""
    topics = [["t"], {}, None, "a b", "gone", "here"]
    producer = {"broadcast_address": "h", "tcp_port": 1, "topics": topics}
    producer["tombstones"] = [True] * 5 + [False]
    body = json.dumps({"producers": [{**producer, "broadcast_address": "["}, producer]}).encode()

    with NsqlookupdHTTPClient(sends(answer(body))) as lookupd:
        [known] = lookupd.nodes()

    assert (known.topics, known.tombstoned) == ({"gone", "here"}, {"gone"})


@pytest.mark.parametrize(
    "address",
    ["[", "a b", "a/b", "u@h", "a?b", "\x1b[2J", "a..b", "a" * 64, "é" * 10, "x" * 300, "::z", "-"],
    ids=ascii,
)
def test_a_node_with_a_malformed_address_is_reported_and_left_out(
    address: str, caplog: pytest.LogCaptureFixture
) -> None:
    bad, good = ({"broadcast_address": a, "tcp_port": 4150} for a in (address, "good"))
    answer = {"channels": [], "producers": [bad, good]}

    with caplog.at_level(logging.WARNING, "nsqtools"):
        for _ in range(2):
            lookup = decode_lookup(answer, f"http://{os.urandom(4).hex()}")
            assert [node.tcp.host for node in lookup.nodes] == ["good"]

    assert len(caplog.messages) == 2
    assert "is not an address; left out" in caplog.messages[0]
    assert caplog.messages[0].isprintable()
