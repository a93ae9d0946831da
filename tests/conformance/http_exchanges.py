"""HTTP requests to an nsqd, to which the embedded one must answer what the Go one answered.

A case is a list of requests, sent one after the other. Compared are status, body and the headers
that clients look at; times, ports and memory figures are masked. ``TOPIC`` is a topic of
the case's own.
"""

from __future__ import annotations

import http.client
import re
import socket
from contextlib import closing
from dataclasses import dataclass, field
from typing import Any

from plugins.http_api import Nsqd, answer
from plugins.waiting import patience_s

TIMEOUT_S = patience_s(10.0)


@dataclass(frozen=True, slots=True)
class Ask:
    """One request."""

    method: str
    target: str
    body: bytes = b""
    headers: dict[str, str] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Case:
    """Requests in a row."""

    name: str
    asks: tuple[Ask | bytes, ...]  # bytes have a connection of their own
    flags: tuple[str, ...] = ()


def get(target: str, *flags: str) -> Case:
    return Case(f"GET {target}", (Ask("GET", target),), flags)


def post(target: str, body: bytes = b"", *flags: str, name: str = "") -> Case:
    return Case(name or f"POST {target} {body[:20]!r}", (Ask("POST", target, body),), flags)


def row(name: str, *asks: Ask, flags: tuple[str, ...] = ()) -> Case:
    return Case(name, asks, flags)


def posts(*targets: str) -> list[Ask]:
    return [Ask("POST", target) for target in targets]


SMALL = ("-max-msg-size=10", "-max-body-size=50", "-max-req-timeout=1s")
TWO = b"\0\0\0\2\0\0\0\1a\0\0\0\2bc"
CHANNEL = "topic=TOPIC&channel=ch"
CREATE, CREATE_CHANNEL = posts("/topic/create?topic=TOPIC", f"/channel/create?{CHANNEL}")
STATS = Ask("GET", "/stats?format=json&topic=TOPIC&include_mem=false")

ROUTES = [
    *(get(path) for path in ("/ping", "/", "/nothing", "/PING", "/ping/", "//ping", "/a/../ping")),
    *(
        get(path)
        for path in ("/ping/?a=b", "/Topic/Create", "/pub", "/topic", "/config", "/config/")
    ),
    get("/config/a%0D%0AX:%20y/"),
    *(get(path) for path in ("/config/a/b", "/debug/pprof", "/debug/pprof/allocs", "/STATS/")),
    *(post(path) for path in ("/ping", "/PUB", "/pub/", "/stats", "/info", "/nothing", "//pub")),
    *(
        row(f"{method} {path}", Ask(method, path))
        for method in ("OPTIONS", "HEAD", "PUT", "DELETE", "PATCH")
        for path in ("/ping", "/pub", "/config/log_level", "/nothing", "/debug/pprof/symbol")
    ),
]

PUBLISH = """
    /pub /pub?topic= /pub?topic=TOPIC /pub?topic=bad%20name /pub?topic=%zz /pub?topic=a;b
    /pub?topic=TOPIC&topic=other /mpub /mpub?topic=TOPIC /mpub?topic=bad%25
"""

PUBLISHING = [
    *(
        post(target, body, *SMALL)
        for target in PUBLISH.split()
        for body in (b"", b"body", b"x" * 10, b"x" * 11, b"x" * 50, b"x" * 51)
    ),
    *(
        post(f"/pub?topic=TOPIC&defer={delay}", b"x", *SMALL)
        for delay in ("", "0", "1", "+5", "-1", "1000", "1001", "1.5", "1e3", "x", "%2B5", "0x5")
    ),
    *(
        post("/mpub?topic=TOPIC", body, *SMALL)
        for body in (b"\n", b"a\nb\n", b"a\r\nb", b"\n\na\n\n", b"12345678901\n", b"\n" * 51)
    ),
    *(
        post(f"/mpub?topic=TOPIC&binary={flag}", body, *SMALL)
        for flag in ("true", "1", "false", "0", "", "True", "x")
        for body in (TWO, b"a\nb")
    ),
    *(
        post("/mpub?topic=TOPIC&binary=true", body, *SMALL)
        for body in (
            b"",
            b"\0\0",
            b"\0\0\0\0",
            b"\xff\xff\xff\xff",
            b"\0\0\0\x7f",
            b"\0\0\0\1",
            b"\0\0\0\1\0\0\0\0",
            b"\0\0\0\1\xff\xff\xff\xff",
            b"\0\0\0\1\0\0\0\x0b12345678901",
            b"\0\0\0\1\0\0\0\5abc",
            TWO + b"rest",
        )
    ),
]

QUERIES = """
    ?topic= ?topic=bad%25 ?topic=unknown ?topic=unknown&channel= ?topic=unknown&channel=bad%25
    ?topic=unknown&channel=ch ?%zz
"""

ADMINISTRATION = [
    *(
        post(f"/topic/{action}{query}")
        for action in ("create", "delete", "empty", "pause", "unpause")
        for query in ("", "?topic=", "?topic=bad%25", "?topic=unknown", "?topic=%zz")
        if (action, query) != ("create", "?topic=unknown")
    ),
    *(
        post(f"/channel/{action}{query}")
        for action in ("create", "delete", "empty", "pause", "unpause")
        for query in ["", *QUERIES.split()]
    ),
    *(
        row(
            f"{action} a channel that is not there",
            CREATE,
            *posts(f"/channel/{action}?topic=TOPIC&channel=ch"),
        )
        for action in ("delete", "empty", "pause", "unpause")
    ),
    row(
        "life of a topic",
        CREATE,
        STATS,
        *posts("/topic/pause?topic=TOPIC"),
        STATS,
        Ask("POST", "/pub?topic=TOPIC", b"body"),
        STATS,
        *posts("/topic/empty?topic=TOPIC"),
        STATS,
        *posts("/topic/unpause?topic=TOPIC"),
        *posts("/topic/delete?topic=TOPIC", "/topic/delete?topic=TOPIC"),
        STATS,
    ),
    row(
        "life of a channel",
        CREATE,
        CREATE_CHANNEL,
        CREATE_CHANNEL,
        *posts(f"/channel/pause?{CHANNEL}"),
        STATS,
        *posts(f"/channel/unpause?{CHANNEL}", f"/channel/empty?{CHANNEL}"),
        STATS,
        *posts(f"/channel/delete?{CHANNEL}", f"/channel/delete?{CHANNEL}"),
        STATS,
    ),
    row(
        "ephemeral topic",
        *posts("/topic/create?topic=T%23ephemeral", "/topic/delete?topic=T%23ephemeral"),
    ),
]

LATENCY = "e2e-processing-latency-percentile"
STATS_QUERIES = """
    topic=TOPIC topic=TOPIC&include_mem=false topic=TOPIC&format=json
    topic=TOPIC&format=JSON&include_mem=0 topic=TOPIC&format=json&include_clients=false
    topic=TOPIC&format=json&include_clients=0&include_mem=0
    topic=TOPIC&format=json&channel=ch&include_mem=false
    topic=TOPIC&format=json&channel=other&include_mem=false topic=none&format=json&include_mem=false
    topic=none&include_mem=false format=json&%zz
"""
STATISTICS = [
    *(
        row(f"stats {query}", CREATE, CREATE_CHANNEL, Ask("GET", f"/stats?{query}"), flags=flags)
        for flags in ((), (f"-{LATENCY}=0.5,1.0", f"-{LATENCY}=0.99"))
        for query in STATS_QUERIES.split()
    ),
    get("/stats?include_mem=false", "-node-id=1"),
    get("/stats?format=json&include_mem=false", "-node-id=1"),
    get("/info"),
    get("/config/id", "-node-id=1"),
    row("one line a message", Ask("POST", "/mpub?topic=TOPIC", b"a\nbb\nccc"), STATS),
]

OPTIONS = """
    tcp_address http_address auth_http_addresses broadcast_address broadcast_tcp_port
    broadcast_http_port nsqlookupd_tcp_addresses http_client_connect_timeout
    http_client_request_timeout data_path mem_queue_size max_bytes_per_file sync_every
    sync_timeout queue_scan_worker_pool_max queue_scan_selection_count msg_timeout
    max_msg_timeout max_msg_size max_req_timeout max_body_size max_heartbeat_interval
    max_rdy_count max_output_buffer_size max_output_buffer_timeout min_output_buffer_timeout
    output_buffer_timeout max_channel_consumers statsd_address statsd_interval statsd_mem_stats
    statsd_prefix statsd_udp_packet_size statsd_exclude_ephemeral
    e2e_processing_latency_percentiles e2e_processing_latency_window_time tls_cert tls_key
    tls_client_auth_policy tls_root_ca_file tls_required tls_min_version deflate
    max_deflate_level snappy log_level log_prefix node_id client_timeout lookupd_tcp_address
    nonsense
"""

CONFIGURATION = [
    *(get(f"/config/{option}") for option in OPTIONS.split()),
    *(
        row(f"set {option} to {value!r}", Ask("PUT", f"/config/{option}", value))
        for option, values in {
            "log_level": (b"debug", b"WARN", b"warning", b'"info"', b"", b"1", b"info"),
            "nsqlookupd_tcp_addresses": (b"null", b"[]", b"[1]", b"{", b'"a"', b"", b"x" * 1048577),
            "mem_queue_size": (b"5",),
            "nonsense": (b"5",),
        }.items()
        for value in values
    ),
    *(row(f"rate{query}", Ask("PUT", f"/debug/setblockrate{query}")) for query in ("", "?rate=x")),
]

CLOSE = b"Host: x\r\nConnection: close\r\n"
BIG = 300_000  # more than either reads of a body that nothing takes
PUB, PING = b"POST /pub?topic=t HTTP/1.1\r\n", b"GET /ping HTTP/1.1\r\n"
POST_PING, GO_AHEAD = b"POST /ping HTTP/1.1\r\n", b"Expect: 100-continue\r\n"
CHUNKED = b"Transfer-Encoding: chunked\r\n\r\n"
HOST, ONE, ELEVEN = b"Host: x\r\n", b"Content-Length: 1\r\n", b"Content-Length: 11\r\n"

WIRE = [
    Case(name, (data,), ("-max-msg-size=10",))
    for name, data in {
        "unknown header": PUB + b"X-Trace: 1\r\n" + ONE + CLOSE + b"\r\nx",
        "two requests": PUB + HOST + b"X-Trace: 1\r\n" + ONE + b"\r\nx" + PING + CLOSE + b"\r\n",
        "pipelined": (PING + HOST + b"\r\n") * 2 + PING + CLOSE + b"\r\n",
        "chunks": PUB + CLOSE + CHUNKED + b"3\r\nabc\r\n2\r\nde\r\n0\r\n\r\n",
        "chunks too large": PUB + CLOSE + CHUNKED + b"6\r\nabcdef\r\n" * 3 + b"0\r\n\r\n",
        "HTTP 1.0": b"GET /ping HTTP/1.0\r\n\r\n",
        "HTTP 1.0 kept open": b"GET /ping HTTP/1.0\r\nConnection: keep-alive\r\n\r\n"
        b"GET /ping HTTP/1.0\r\n\r\n",
        "HEAD": b"HEAD /ping HTTP/1.1\r\n" + CLOSE + b"\r\n",
        "a body for a GET path": POST_PING + b"Content-Length: 3\r\n" + CLOSE + b"\r\nabc",
        "a whole URL": b"GET http://y/ping HTTP/1.1\r\n" + CLOSE + b"\r\n",
        "upgrade": PING + b"Upgrade: h2c\r\nHost: x\r\nConnection: Upgrade, close\r\n\r\n",
        "bad escape": b"GET /%zz HTTP/1.1\r\n" + CLOSE + b"\r\n",
        "header too large": PING + b"X: " + b"y" * 1_200_000 + b"\r\n" + CLOSE + b"\r\n",
        "unknown transfer coding": PUB + b"Transfer-Encoding: gzip\r\n" + CLOSE + b"\r\n",
        "go-ahead, body too large": PUB + GO_AHEAD + ELEVEN + HOST + b"\r\n" + b"x" * 11,
        "go-ahead, body not read": POST_PING + GO_AHEAD + ELEVEN + HOST + b"\r\n" + b"x" * 11,
        "go-ahead": PUB + GO_AHEAD + ONE + CLOSE + b"\r\nx",
        "too large, then another": PUB
        + HOST
        + ELEVEN
        + b"\r\n"
        + b"x" * 11
        + PING
        + CLOSE
        + b"\r\n",
        "go-ahead, no body": PING + GO_AHEAD + CLOSE + b"\r\n",
        "unknown expectation": PING + b"Expect: more\r\n" + CLOSE + b"\r\n",
        "body too large": PUB + HOST + b"Content-Length: %d\r\n\r\n" % BIG + b"x" * BIG,
        "chunk too large": PUB + HOST + CHUNKED + b"%x\r\n%b\r\n0\r\n\r\n" % (BIG, b"x" * BIG),
    }.items()
]

TABLES = {
    "wire": WIRE,
    "routes": ROUTES,
    "publishing": PUBLISHING,
    "administration": ADMINISTRATION,
    "statistics": STATISTICS,
    "configuration": CONFIGURATION,
}


def play(server: Nsqd, case: Case) -> list[Any]:
    """Status, headers and body of each answer."""
    topic = re.sub(r"[^a-zA-Z0-9]", "_", case.name)[:50]
    connection = http.client.HTTPConnection(server.http_address, timeout=TIMEOUT_S)
    with closing(connection):
        found: list[Any] = []
        for ask in case.asks:
            if isinstance(ask, bytes):
                found += in_order(talk(server, ask))
                continue
            target = ask.target.replace("TOPIC", topic)
            status, headers, body = answer(connection, ask.method, target, ask.body, ask.headers)
            found.append((status, headers, masked(body, server).decode("latin-1")))
        return found


def masked(body: bytes, server: Nsqd) -> bytes:
    """Hide what differs from run to run, and from machine to machine."""
    body = body.replace(b'"hostname":"%b"' % socket.gethostname().encode(), b'"hostname":"OWN"')
    # "127.0.0.1:0" is what one was given and another was not
    for own in (str(server.data_path), server.tcp_address, server.http_address, "127.0.0.1:0"):
        body = body.replace(own.encode(), b"OWN")
    ports = [each.rpartition(":")[2] for each in (server.tcp_address, server.http_address)]
    figures = "start_time|http_port|tcp_port|heap_\\w+|gc_\\w+|next_gc_bytes"
    for pattern in (
        rf"^({'|'.join(ports)})$",
        rf'"({figures})":\d+',
        r"(?<=built w/)\S+",
        r"(?m)^(start_time|uptime) .*",
        rf"(?m)^ +({figures}) *\t\d+",
        r"127_0_0_1_\d+",
    ):
        body = re.sub(pattern.encode(), b"*", body)
    return body


def talk(nsqd: Nsqd, data: bytes) -> bytes:
    """Send bytes, stop sending, and return all that comes back."""
    host, _, port = nsqd.http_address.rpartition(":")
    with socket.create_connection((host, int(port)), timeout=TIMEOUT_S) as connection:
        connection.sendall(data)
        received = b""
        while chunk := connection.recv(1 << 16):
            received += chunk
        return received


def in_order(data: bytes) -> list[tuple[str, list[str], str]]:
    """Each answer's status, headers by name, and body."""
    found = []
    for each in re.split(r"(?=HTTP/1\.\d \d{3} )", data.decode("latin-1")):
        head, _, body = re.sub(r"Date: [^\r]*", "Date:", each).partition("\r\n\r\n")
        status, *fields = head.split("\r\n")
        found.append((status, sorted(fields), body))
    return found
