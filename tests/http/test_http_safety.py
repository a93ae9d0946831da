"""Listening addresses of daemons, access to their HTTP API, idle connections, and /metrics."""

import io
import re
import socket
from contextlib import ExitStack
from functools import partial
from typing import Any
from unittest.mock import Mock

import httpx
import pytest
from plugins.raw_client import TIMEOUT_S, RawClient, RawPeer, subscribed

from nsqtools.errors import ConfigurationError
from nsqtools.http import http_server as server
from nsqtools.http.cross_site import cross_site_refusal, is_own_host
from nsqtools.http.listen import (
    is_open_to_all,
    listen,
    real_address,
    real_port,
)
from nsqtools.server import EmbeddedNsqd, EmbeddedNsqlookupd


def ask(address: str, method: str, path: str, **more: Any) -> httpx.Response:
    with httpx.Client(trust_env=False, timeout=TIMEOUT_S) as client:
        return client.request(method, f"http://{address}{path}", **more)


def test_a_name_may_have_only_an_ipv6_address(monkeypatch: pytest.MonkeyPatch) -> None:
    look_up = socket.getaddrinfo
    monkeypatch.setattr(
        socket, "getaddrinfo", lambda _, *port, **more: look_up("::1", *port, **more)
    )
    with listen("six.example:0") as listener:
        assert real_address(listener) == f"[::1]:{real_port(listener)}"


@pytest.mark.parametrize("address", ["127.0.0.1:", "localhost:0", ":0", "0.0.0.0:0", "[::]:0"])
def test_an_ipv4_client_is_accepted_with_nodelay_and_keepalive(address: str) -> None:
    with listen(address) as listener:
        port = real_port(listener)
        assert real_address(listener) in [f"{ip}:{port}" for ip in ("127.0.0.1", "0.0.0.0", "[::]")]
        with socket.create_connection(("127.0.0.1", port), timeout=5):
            connection, _ = listener.accept()
            with connection:
                assert connection.getsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY)
                assert connection.getsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE)


@pytest.mark.parametrize(
    "address", ["127.0.0.1:415O", "[::1]:-1", "127.0.0.1:" + "9" * 5000, "/" + "x" * 200, "a..b:1"]
)
def test_an_invalid_address_is_refused_and_a_wildcard_recognized(address: str) -> None:
    with pytest.raises(
        ConfigurationError, match=r"invalid port|AF_UNIX path too long|no such host"
    ):
        listen(address)
    assert all(map(is_open_to_all, (":4150", "0.0.0.0:4150", "[::]:4150")))
    assert not any(map(is_open_to_all, ("127.0.0.1:4150", "[::1]:4150", "/run/nsqd.sock")))


OWN = {"host": "localhost:4151"}


@pytest.mark.parametrize(
    ("headers", "code"),
    [
        *(({"host": host}, "") for host in ("127.0.0.1:4151", "localhost", "[::1]:4151")),
        *(({"host": host}, "") for host in ("nsqd:4151", "nsqd-1.example.org:4151", "10.0.0.7:1")),
        *(({"host": host}, "") for host in ("a.localhost", "nsqd-1.example.org.", "")),
        ({"host": "evil.example.com:1"}, "FOREIGN_HOST"),
        ({"host": "127.0.0.1.evil.com"}, "FOREIGN_HOST"),
        (OWN | {"origin": "http://localhost:4151"}, ""),
        (OWN | {"origin": "http://evil.example.com"}, "FOREIGN_ORIGIN"),
        (OWN | {"origin": "http://localhost"}, "FOREIGN_ORIGIN"),
        (OWN | {"origin": "null"}, "FOREIGN_ORIGIN"),
        (OWN | {"sec-fetch-site": "same-origin", "origin": "https://of.a.proxy"}, ""),
        (OWN | {"sec-fetch-site": "cross-site"}, "FOREIGN_ORIGIN"),
        (OWN | {"sec-fetch-site": "same-site"}, "FOREIGN_ORIGIN"),
    ],
)
def test_a_cross_site_request_is_refused(headers: dict[str, str], code: str) -> None:
    names = ["NSQD-1.example.org"]
    assert cross_site_refusal("POST", headers, names) == code
    assert cross_site_refusal("GET", headers, names) == ""
    assert cross_site_refusal("POST", {"host": "nsqd.example.com"}, None) == ""  # any host
    assert not is_own_host("", names)  # HTTP/1.1 requires a Host


def test_another_site_can_neither_publish_nor_change_the_configuration() -> None:
    calls = ("POST", "/pub?topic=t"), ("PUT", "/config/log_level")
    foreign = {"Origin": "http://evil.example.com"}, {"Sec-Fetch-Site": "cross-site"}
    with EmbeddedNsqd() as nsqd:
        requests = [(*calls[0], {}), *((*call, headers) for call in calls for headers in foreign)]
        requests.append((*calls[0], {"Host": "rebound.example.com"}))
        statuses = [
            ask(nsqd.http_address, method, path, content=b"warn", headers=headers).status_code
            for method, path, headers in requests
        ]
        with subscribed(nsqd.tcp_address, "t", "ch", ready=10) as client:
            client.read_message()
            client.settle()
        for place in ("[[[:x", "a:b", "http://a:1", "a:0", "a b:1", ""):
            path = "/config/nsqlookupd_tcp_addresses"
            answer = ask(nsqd.http_address, "PUT", path, json=[place])
            assert (answer.status_code, "INVALID_VALUE" in answer.text) == (400, True), place
    assert statuses == [200, *[403] * 5]


def test_requests_may_arrive_in_pieces_and_answers_keep_their_order() -> None:
    with EmbeddedNsqd() as nsqd, subscribed(nsqd.tcp_address, "t", "ch", ready=100) as client:
        head = b"POST /pub?topic=t HTTP/1.1\r\nHost: 127.0.0.1\r\nContent-Length: 2\r\n\r\n"
        data = b"".join(head + b"%02d" % number for number in range(20))
        with RawClient(nsqd.http_address, magic=b"") as web:
            web.socket.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            for start in range(0, len(data), 77):
                web.send(data[start : start + 77])
            bodies = [client.read_message().body for _ in range(20)]
    assert bodies == [b"%02d" % number for number in range(20)]
    page = b"GET /metrics HTTP/1.1\r\nHost: x\r\n\r\n"
    ping = b"GET /ping HTTP/1.1\r\nHost: x\r\n\r\n"
    with EmbeddedNsqd() as nsqd, RawClient(nsqd.http_address, magic=b"") as client:
        client.send((page + ping) * 500)
        client.socket.shutdown(socket.SHUT_WR)
        answer = client.socket.makefile("rb").read()
    assert re.findall(rb"plain; (version|charset)", answer) == [b"version", b"charset"] * 500
    assert len(answer) > 1 << 20


def test_cached_heads_are_correct_wherever_requests_are_split() -> None:
    bodies: list[bytes | None] = []

    def publish(request: server.Request) -> None:
        bodies.append(request.body)

    transport = Mock(get_extra_info=lambda name: None, is_closing=lambda: False)
    api = server.HTTPApi({("POST", "/pub"): publish}, Mock(), {publish: 10})
    http_server = server.HTTPServer(api, Mock(), None, server.Limits())
    head = b"POST /pub HTTP/1.1\r\nHost: x\r\nContent-Length: 2\r\n\r\n"
    requests = [head + b"a1", head + b"a2", head.replace(b"2", b"1") + b"b", head + b"a3"]
    stream = b"".join(requests)
    for cut in range(len(stream)):
        connection = server._Connection(http_server)
        connection.connection_made(transport)
        for piece in (stream[:cut], stream[cut:], *requests):
            connection.data_received(piece)
        assert bodies == [b"a1", b"a2", b"b", b"a3"] * 2, cut
        bodies.clear()
    assert len(http_server.heads) == 2


def metric(page: str, sample: str) -> float:
    match = re.search(rf"^{re.escape(sample)} (\S+)$", page, re.MULTILINE)
    assert match, sample
    return float(match[1])


def test_metrics_show_queues_clients_disk_stalls_and_registrations() -> None:
    log, everywhere = io.StringIO(), "0.0.0.0:0"
    with (
        EmbeddedNsqd(http_address=everywhere, log=log) as nsqd,
        subscribed(nsqd.tcp_address, "t", "ch", ready=2) as client,
    ):
        client.publish("other", b"12345", b"1")
        with RawClient(nsqd.tcp_address) as producer:
            producer.publish("t", b"a", b"b", b"c")
        first, _ = client.read_messages(2)
        client.finish([first])
        client.read_message()
        local = f"127.0.0.1:{nsqd.http_address.rpartition(':')[2]}"
        page = ask(local, "GET", "/metrics").text

    assert re.search(
        r"200 GET /metrics \(127\.0\.0\.1:[0-9]+\) ", log.getvalue()
    )  # an IPv4 address
    assert metric(page, 'nsqd_topic_depth{topic="other"}') == 2
    assert metric(page, 'nsqd_topic_bytes_total{topic="other"}') == 6
    labels = '{topic="t",channel="ch"}'
    assert metric(page, f"nsqd_channel_in_flight{labels}") == 2
    assert metric(page, f"nsqd_channel_messages_total{labels}") == 3
    assert metric(page, f"nsqd_channel_clients{labels}") == 1
    assert metric(page, "nsqd_healthy") == 1
    assert metric(page, "nsqd_disk_free_bytes") > 0
    assert metric(page, "nsqd_longest_stall_seconds") >= 0
    with EmbeddedNsqlookupd() as lookupd, RawPeer(lookupd.tcp_address) as peer:
        peer.identify()
        assert peer.ask(b"REGISTER t ch\n") == b"OK"
        page = ask(lookupd.http_address, "GET", "/metrics").text
    for name in ("topics", "channels", "producers", 'topic_producers{topic="t"}'):
        assert metric(page, f"nsqlookupd_{name}") == 1


BEGUN = (
    b"",
    b"GET /ping HTTP/1.1\r\nHost:",
    b"POST /pub?topic=t HTTP/1.1\r\nHost: a\r\nContent-Length: 9\r\n\r\nxx",
    b"GET /ping HTTP/1.1\r\nHost: a\r\n\r\n",  # answered, and then nothing
)


def test_a_client_that_stops_sending_is_closed(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("_HEAD_S", "_BODY_S"):
        monkeypatch.setattr(server, name, 0.1)
    monkeypatch.setattr(server, "Limits", partial(server.Limits, idle_s=0.1))
    with EmbeddedNsqd() as nsqd, ExitStack() as stack:
        clients = [
            stack.enter_context(RawClient(nsqd.http_address, magic=begun)) for begun in BEGUN
        ]
        for client in clients:
            while client.socket.recv(1 << 16):
                pass  # until it is closed, or the timeout fails the test
        assert ask(nsqd.http_address, "GET", "/ping").status_code == 200
