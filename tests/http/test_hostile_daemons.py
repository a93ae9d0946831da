"""What a hostile or broken daemon sends costs a bounded time and memory, and is its own error."""

from __future__ import annotations

import gzip
import json
import logging
import os
import socket
import struct
import threading
import time
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path

import pytest
from plugins.cli import RunNsq
from plugins.daemons import GoNsqd, GoNsqlookupd
from plugins.waiting import patience_s, wait_until

from nsqtools.errors import DeadlineExceeded, HTTPError, NsqError, ProtocolError
from nsqtools.http.http_api import HTTPAPI, NsqdHTTPClient, NsqlookupdHTTPClient, decode_lookup
from nsqtools.protocol.commands import decode_identify_reply
from nsqtools.protocol.stats import read_stats

Sends = Callable[[Iterable[bytes]], str]

NESTED = b"[" * 100_000 + b"]" * 100_000


@pytest.fixture
def sends() -> Iterator[Sends]:
    """``sends(pieces)``: the URL of a server that sends the pieces to whoever connects first."""
    listeners: list[socket.socket] = []
    threads: list[threading.Thread] = []

    def serve(pieces: Iterable[bytes]) -> str:
        listener = socket.create_server(("127.0.0.1", 0))
        listeners.append(listener)

        def answer() -> None:
            accepted, _ = listener.accept()
            with accepted:
                accepted.recv(10_000)
                try:
                    for piece in pieces:
                        accepted.sendall(piece)
                except OSError:
                    pass  # the client has had enough

        threads.append(threading.Thread(target=answer))
        threads[-1].start()
        return "http://{}:{}".format(*listener.getsockname())

    yield serve
    for thread in threads:
        thread.join(patience_s(10))
    for listener in listeners:
        listener.close()


def answer(body: bytes, *headers: str) -> list[bytes]:
    head = ["HTTP/1.1 200 OK", f"Content-Length: {len(body)}", *headers]
    return ["\r\n".join(head).encode() + b"\r\n\r\n", body]


def slowly(pieces: Iterable[bytes]) -> Iterator[bytes]:
    for piece in pieces:
        yield piece
        time.sleep(0.1)


@pytest.mark.parametrize(
    ("answer", "kind"),
    [
        (b"", ProtocolError),
        (b"\x00\x00\x00\x0eE_BAD_PROTOCOL", ProtocolError),
        (b"HTTP/1.1 200 OK\r\nContent-Length: 5\r\n\r\nhello", ProtocolError),
        (b"HTTP/1.1 200 OK\r\nContent-Length: 50\r\n\r\n{", NsqError),
        (b"HTTP/1.1 200 OK\r\nContent-Length: 2\r\n\r\n\xff\xfe", ProtocolError),
        (b"HTTP/1.1 500 Oh\r\nContent-Length: 0\r\n\r\n", HTTPError),
        (b"HTTP/1.1 302 Away\r\nLocation: /\r\nContent-Length: 0\r\n\r\n", HTTPError),
    ],
)
def test_a_server_that_is_no_nsq(answer: bytes, kind: type[NsqError], sends: Sends) -> None:
    url = sends([answer])
    with HTTPAPI(url) as api, pytest.raises(kind, match=url):
        api.get("/x")


@pytest.mark.parametrize(
    "pieces",
    [
        [b"HTTP/1.1 200 OK\r\n", *[b"X-A: b\r\n"] * 100],
        [b"HTTP/1.1 200 OK\r\nContent-Length: 100\r\n\r\n", *[b" "] * 100],
    ],
    ids=["head", "body"],
)
def test_an_answer_that_drips_ends_with_the_timeout(pieces: list[bytes], sends: Sends) -> None:
    began_s = time.monotonic()

    with (
        NsqlookupdHTTPClient(sends(slowly(pieces)), timeout_s=0.5) as lookupd,
        pytest.raises(DeadlineExceeded, match="no answer in time"),
    ):
        lookupd.topics()

    assert time.monotonic() - began_s < patience_s(2)


@pytest.mark.parametrize(
    ("pieces", "complaint"),
    [
        ([b"HTTP/1.1 200 OK\r\n\r\n", *[b" " * (1 << 20)] * 9], f"longer than {2 << 20} bytes"),
        (answer(gzip.compress(b" " * 9999), "Content-Encoding: gzip"), "is compressed"),
        (answer(NESTED), "does not answer like NSQ"),
        ([b"HTTP/1.1 500 Oops\r\nContent-Length: %d\r\n\r\n" % len(NESTED), NESTED], "Oops"),
    ],
    ids=["long", "compressed", "nested", "a nested error"],
)
def test_an_answer_beyond_all_bounds_is_an_error(
    pieces: list[bytes], complaint: str, sends: Sends
) -> None:
    with (
        NsqlookupdHTTPClient(sends(pieces), max_body_bytes=2 << 20) as lookupd,
        pytest.raises(NsqError, match=complaint),
    ):
        lookupd.topics()


def test_a_reply_to_identify_that_is_nested_deeply_is_refused() -> None:
    with pytest.raises(ProtocolError):
        decode_identify_reply(NESTED)


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


def test_absurd_numbers_of_statistics_count_as_nothing() -> None:
    huge = 10**400
    percentiles = [{"quantile": huge, "value": 1}, {"quantile": 0.5, "value": float("inf")}]
    topic = {
        "topic_name": "t",
        "depth": huge,
        "e2e_processing_latency": {"count": huge, "percentiles": percentiles},
    }

    [read] = read_stats({"start_time": huge, "topics": [topic]}).topics or ()

    assert read.depth == 0
    assert (read.e2e_processing_latency.count, read.e2e_processing_latency.percentiles) == (0, ())


def test_of_too_many_nsqd_some_are_believed(caplog: pytest.LogCaptureFixture) -> None:
    producers = [{"broadcast_address": f"h{n}", "tcp_port": 1} for n in range(20)]

    drawn = [
        decode_lookup({"channels": [], "producers": producers}, "url", 10).nodes for _ in range(20)
    ]

    assert {len(each) for each in drawn} == {10}
    assert len({node for each in drawn for node in each}) == 20  # nobody is kept out for good
    assert "url announces 20 nsqd; 10 of them" in caplog.text


def test_what_is_no_topic_is_left_out_though_it_is_tombstoned(sends: Sends) -> None:
    """Of a list no set can be made."""
    topics = [["t"], {}, None, "a b", "gone", "here"]
    producer = {"broadcast_address": "h", "tcp_port": 1, "topics": topics}
    body = json.dumps({"producers": [{**producer, "tombstones": [True] * 5 + [False]}]}).encode()

    [known] = NsqlookupdHTTPClient(sends(answer(body))).nodes()

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


def announce(lookupd: GoNsqlookupd, address: str) -> socket.socket:
    """Announce an nsqd and its topic, as anybody can: nsqlookupd asks for no secret."""
    host, _, port = lookupd.tcp_address.rpartition(":")
    rogue = socket.create_connection((host, int(port)))
    info = {
        "broadcast_address": address,
        "hostname": "rogue",
        "tcp_port": 1,
        "http_port": 2,
        "version": "1.3.0",
    }
    body = json.dumps(info).encode()
    rogue.sendall(b"  V1IDENTIFY\n" + struct.pack(">I", len(body)) + body + b"REGISTER good\n")
    return rogue


def test_one_malformed_announcement_stops_no_command(
    go_nsqd: Callable[..., GoNsqd],
    nsqlookupd: Callable[..., GoNsqlookupd],
    run_nsq: RunNsq,
    tmp_path: Path,
) -> None:
    lookupd = nsqlookupd()
    nsqd = go_nsqd(f"-lookupd-tcp-address={lookupd.tcp_address}", "-broadcast-address=127.0.0.1")
    nsqd.create_channel("good", "c")
    nsqd.publish("good", b"one")
    where = [f"--lookupd-http-address={lookupd.http_address}"]
    with announce(lookupd, "["):
        wait_until(lambda: len(lookupd.producers("good")) == 2, what="both are announced")

        nodes = run_nsq(["nodes", *where])
        stat = run_nsq(["stat", "--once", *where])
        topics = run_nsq(["topic", "list", *where])
        tail = run_nsq(["tail", "-t", "good", "-c", "c", "-n", "1", *where])
        out = ["--output-dir", str(tmp_path), "--for", "1s"]
        to_file = run_nsq(["to-file", "--topic-pattern", ".", *where, *out])

    assert [each.status for each in (nodes, stat, topics, tail, to_file)] == [0] * 5, tail.err
    assert tail.out == b"one\n"
    assert "announces an nsqd at '['" in nodes.err
