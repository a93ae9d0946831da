"""The client of the HTTP APIs: every failure is an error of nsqtools and names the address."""

import json
import logging
import os
import ssl
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import pytest
from plugins.certificates import Certificates
from plugins.clients import InBackground
from plugins.http_server import MakeScripted, Serves, http
from plugins.servers import MakeNsqd
from plugins.waiting import patience_s, wait_until

from nsqtools.errors import (
    ConfigurationError,
    ConnectionFailed,
    DeadlineExceeded,
    HTTPError,
    NsqError,
    ProtocolError,
)
from nsqtools.http.http_api import (
    HTTPAPI,
    HTTPAccess,
    NsqdHTTPClient,
    NsqlookupdHTTPClient,
    decode_lookup,
)


def get(url: str, **access: Any) -> Any:
    with HTTPAPI(url, HTTPAccess(**access)) as api:
        return api.get("/x")


def test_a_refused_connection_and_a_missing_answer_are_errors(
    dead_address: str, deaf_address: str
) -> None:
    refused = f"cannot connect to http://{dead_address} .connection refused"
    with pytest.raises(ConnectionFailed, match=refused):
        get(f"http://{dead_address}")
    with pytest.raises(DeadlineExceeded, match=f"http://{deaf_address}: no answer in time"):
        get(f"http://{deaf_address}", timeout_s=0.1)


def test_an_unresponsive_name_server_ends_with_the_deadline(silent_name_server: None) -> None:
    with pytest.raises(DeadlineExceeded, match="http://nsqd-1:4151: no answer in time"):
        get("http://nsqd-1:4151", timeout_s=0.1)


def test_an_error_status_has_a_category_and_the_code_of_nsq(scripted_lookupd: MakeScripted) -> None:
    lookupd = scripted_lookupd()
    lookupd.answer = {"message": "SOME_WORD"}
    categories = {401: "refused", 403: "refused", 404: "not_found", 500: "failed"}
    for lookupd.status, category in categories.items():
        message = f"{lookupd.address}: SOME_WORD .HTTP {lookupd.status}"
        with pytest.raises(HTTPError, match=message) as caught:
            get(f"http://{lookupd.address}")
        assert (caught.value.category, caught.value.code) == (category, "SOME_WORD")
    with NsqlookupdHTTPClient(f"http://{lookupd.address}") as api:
        lookupd.status, lookupd.answer = 404, {"message": "TOPIC_NOT_FOUND"}
        assert not api.lookup("t").is_known  # an answer, not an error
        lookupd.answer = {"message": "PAGE_NOT_FOUND"}
        with pytest.raises(HTTPError):
            api.lookup("t")


def test_json_of_old_and_new_nsq_is_read(scripted_lookupd: MakeScripted) -> None:
    lookupd, data = scripted_lookupd(), {"topics": ["a"]}
    for lookupd.answer in (data, {"status_code": 200, "status_txt": "OK", "data": data}):
        assert get(f"http://{lookupd.address}") == data
    headers = lookupd.requests[0].headers
    assert headers["Accept"] == "application/vnd.nsq; version=1.0"
    assert "Authorization" not in headers


@pytest.mark.parametrize("scheme", ["http", "https"])
def test_closing_during_a_request_waits_for_its_answer(
    go_nsqd: MakeNsqd, certificates: Certificates, in_background: InBackground, scheme: str
) -> None:
    """Over TLS, it is closed while the connection is being established."""
    nsqd = go_nsqd(*certificates.server.nsqd_flags)
    address = nsqd.http_address if scheme == "http" else nsqd.https_address
    trusting = ssl.create_default_context(cafile=certificates.ca)
    access = HTTPAccess(tls=trusting, timeout_s=patience_s(10))
    api = HTTPAPI(f"{scheme}://{address}", access)
    nsqd.pause()
    response = in_background(api.get, "/info")
    wait_until(lambda: connections_to(address), what="a connection")
    api.close()
    nsqd.resume()
    assert response.result(patience_s(10))["version"]
    assert connections_to(address) == []


def connections_to(address: str) -> list[str]:
    """Return the kernel's lines of established (01) connections to the port of ``address``."""
    mark = f":{int(address.rpartition(':')[2]):04X} 01 "
    return [line for line in Path("/proc/net/tcp").read_text().splitlines() if mark in line]


def test_non_ascii_addresses_and_secrets_are_encoded_for_http(
    scripted_lookupd: MakeScripted,
) -> None:
    lookupd = scripted_lookupd()
    lookupd.answer = {"topics": []}
    base = f"http://{lookupd.address}"

    access = HTTPAccess(bearer="geheimnüß")
    for url in (f"{base}/zürich", base.replace("//", "//user:p%40ss@")):
        with NsqlookupdHTTPClient(url, access) as api:
            api.topics()
    with pytest.raises(ConnectionFailed):
        get("http://zürich.invalid:1")

    paths = [request.target for request in lookupd.requests]
    assert paths == ["/z%C3%BCrich/topics", "/topics"]
    assert lookupd.requests[1].headers["Authorization"] == "Basic dXNlcjpwQHNz"


def test_a_secret_and_a_login_of_any_bytes_are_sent(scripted_lookupd: MakeScripted) -> None:
    lookupd, access = scripted_lookupd(), HTTPAccess(bearer=os.fsdecode(b"\xff"))
    lookupd.answer = {"topics": []}
    base = f"http://{lookupd.address}"

    for url in (base, base.replace("//", "//%ff:%fe@")):
        with NsqlookupdHTTPClient(url, access) as api:
            api.topics()
    secrets = [request.headers["Authorization"] for request in lookupd.requests]
    assert secrets == ["Bearer \xff", "Basic /zr+"]


def test_an_address_that_is_not_utf_8_is_refused() -> None:
    with pytest.raises(ConfigurationError, match="invalid HTTP address"):
        get("http://127.0.0.1:1/" + os.fsdecode(b"\xff"))


def test_a_secret_that_no_header_can_have_is_not_in_the_error(
    scripted_lookupd: MakeScripted,
) -> None:
    access, url = HTTPAccess(bearer="hush\nhush"), f"http://{scripted_lookupd().address}"
    with NsqlookupdHTTPClient(url, access) as api, pytest.raises(ConfigurationError) as caught:
        api.topics()
    assert "hush" not in f"{caught.value!r} {caught.value.__cause__!r}"


@pytest.mark.parametrize(
    ("address", "paths"),
    [
        ("", ["/lookup?topic=x%23ephemeral", "/topics"]),
        ("/nsq/lookup", ["/nsq/lookup?topic=x%23ephemeral", "/nsq/lookup/topics"]),
        ("?token=a%20b", ["/lookup?token=a%20b&topic=x%23ephemeral", "/topics?token=a%20b"]),
        ("/l?topic=y&x=", ["/l?x=&topic=x%23ephemeral", "/l/topics?topic=y&x="]),
    ],
)
def test_each_request_has_the_path_and_the_query_of_the_address(
    scripted_lookupd: MakeScripted, address: str, paths: list[str]
) -> None:
    lookupd = scripted_lookupd()
    lookupd.answer = {"topics": [], "channels": [], "producers": []}
    with NsqlookupdHTTPClient(f"http://{lookupd.address}{address}") as api:
        api.lookup("x#ephemeral")
        api.topics()
    assert [request.target for request in lookupd.requests] == paths


# -- answers of hostile or broken daemons ----------------------------------------------------------

Sends = Callable[[Iterable[bytes]], str]

NESTED = b"[" * 100_000 + b"]" * 100_000
OOPS = b"HTTP/1.1 500 Oops\r\nContent-Length: %d\r\n\r\n" % len(NESTED)


@pytest.fixture
def sends(serves: Serves) -> Sends:
    """``sends(pieces)``: the URL of a server that sends the pieces to each client."""
    return lambda pieces: f"http://{serves(http(pieces))}"


def answer(body: bytes, *headers: str) -> list[bytes]:
    head = ["HTTP/1.1 200 OK", f"Content-Length: {len(body)}", *headers]
    return ["\r\n".join(head).encode() + b"\r\n\r\n", body]


@pytest.mark.parametrize(
    ("answer", "kind"),
    [
        (b"", ConnectionFailed),  # a server that is stopping
        (b"\x00\x00\x00\x0eE_BAD_PROTOCOL", ProtocolError),
        (b"HTTP/1.1 200 OK\r\nContent-Length: 5\r\n\r\nhello", ProtocolError),
        (b"HTTP/1.1 200 OK\r\nContent-Length: 50\r\n\r\n{", ConnectionFailed),
        (b"HTTP/1.1 200 OK\r\nContent-Length: 2\r\n\r\n\xff\xfe", ProtocolError),
        (b"HTTP/1.1 500 Oh\r\nContent-Length: 0\r\n\r\n", HTTPError),
        (OOPS + NESTED, HTTPError),
        (b"HTTP/1.1 302 Away\r\nLocation: /\r\nContent-Length: 0\r\n\r\n", HTTPError),
    ],
    ids=lambda value: repr(value)[:30],
)
def test_a_server_that_is_not_nsq_is_an_error(
    answer: bytes, kind: type[NsqError], sends: Sends
) -> None:
    url = sends([answer])
    with HTTPAPI(url) as api, pytest.raises(kind, match=url):
        api.get("/x")


def test_a_strange_charset_and_an_impossible_date_are_ignored(sends: Sends) -> None:
    pieces = answer(b"OK", "Content-Type: text/plain; charset=zlib_codec")
    with NsqdHTTPClient(sends(pieces)) as nsqd:
        nsqd.ping()
    for date in ("Mon, 01 Jan 99999999999 00:00:00 GMT", "soon"):
        with HTTPAPI(sends(answer(b"OK", f"Date: {date}"))) as api:
            assert api.ping() is None


def test_a_malformed_info_is_refused_and_ipv6_brackets_are_optional(sends: Sends) -> None:
    wrong = {"tcp_port": "x"}, {"tcp_port": 10**400}, {"http_port": [1]}, {"broadcast_address": {}}
    for wrong_field in wrong:
        body = json.dumps({"tcp_port": 4150} | wrong_field).encode()
        with (
            NsqdHTTPClient(sends(answer(body))) as nsqd,
            pytest.raises(ProtocolError, match="does not answer like nsqd"),
        ):
            nsqd.info()
    for host in ("::1", "[::1]"):
        body = json.dumps({"tcp_port": 4150, "broadcast_address": host}).encode()
        with NsqdHTTPClient(sends(answer(body))) as nsqd:
            assert nsqd.info()["broadcast_address"] == "::1"


def test_topics_that_are_no_list_are_refused(sends: Sends) -> None:
    with (
        NsqdHTTPClient(sends(answer(b'{"version": "1.3.0", "topics": "x"}'))) as nsqd,
        pytest.raises(ProtocolError, match="does not answer like nsqd"),
    ):
        nsqd.stats()


def test_a_random_selection_is_used_of_too_many_nsqd(caplog: pytest.LogCaptureFixture) -> None:
    producers = [{"broadcast_address": f"h{n}", "tcp_port": 1} for n in range(20)]
    answer, access = {"channels": [], "producers": producers}, HTTPAccess(max_nodes=10)

    drawn = [decode_lookup(answer, "url", access).nodes for _ in range(20)]

    assert {len(nodes) for nodes in drawn} == {10}
    assert len({node for nodes in drawn for node in nodes}) == 20  # none is excluded permanently
    assert "url announces 20 nsqd; 10 of them" in caplog.text


def test_invalid_topics_and_nodes_are_left_out_even_if_tombstoned(sends: Sends) -> None:
    topics = [["t"], {}, None, "a b", "gone", "here"]
    producer = {"broadcast_address": "h", "tcp_port": 1, "topics": topics}
    producer["tombstones"] = [True] * 5 + [False]
    body = json.dumps({"producers": [{**producer, "broadcast_address": "["}, producer]}).encode()

    with NsqlookupdHTTPClient(sends(answer(body))) as lookupd:
        [node] = lookupd.nodes()

    assert (node.topics, node.tombstoned) == ({"gone", "here"}, {"gone"})


MALFORMED = ["[", "a b", "a/b", "u@h", "a?b", "\x1b[2J", "a..b", "::z", "1:2", "-"]
MALFORMED += ["a" * 64, "é" * 10, "x" * 300]


@pytest.mark.parametrize("address", MALFORMED, ids=ascii)
def test_a_node_with_a_malformed_address_is_reported_and_left_out(
    address: str, caplog: pytest.LogCaptureFixture
) -> None:
    bad, good = ({"broadcast_address": a, "tcp_port": 4150} for a in (address, "good"))
    answer = {"channels": [], "producers": [bad, good]}

    with caplog.at_level(logging.WARNING, "nsqtools"):
        for _ in range(2):
            lookup = decode_lookup(answer, f"http://{os.urandom(4).hex()}", HTTPAccess())
            assert [node.tcp.host for node in lookup.nodes] == ["good"]

    assert len(caplog.messages) == 2
    assert "is not an address; left out" in caplog.messages[0]
    assert caplog.messages[0].isprintable()
