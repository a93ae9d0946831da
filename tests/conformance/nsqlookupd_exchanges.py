"""Conversations with a nsqlookupd; the embedded one must answer what the Go one answered.

A case is a row of steps on a nsqlookupd that has just started: what a peer sends over TCP, that it
leaves, an HTTP request. Compared are the bytes of every response, and of HTTP answers the status,
the body and the headers that clients look at. Addresses, ports and times are masked; Go lists maps
in random order, so lists of several items are compared sorted.
"""

from __future__ import annotations

import http.client
import json
import re
import socket
from contextlib import ExitStack, closing
from dataclasses import dataclass
from typing import Any

from plugins.http_api import Nsqlookupd, answer
from plugins.raw_client import sized
from plugins.raw_peer import DESCRIPTION, RawPeer, identify
from plugins.waiting import patience_s

TIMEOUT_S = patience_s(10.0)


@dataclass(frozen=True, slots=True)
class Say:
    """A peer sends commands and waits for as many responses; a new name is a new connection."""

    data: bytes
    responses: int = 1
    peer: str = "a"


@dataclass(frozen=True, slots=True)
class Leave:
    """A peer sends its last bytes, stops sending and reads to the end."""

    data: bytes = b""
    peer: str = "a"
    magic: bytes = b"  V1"


@dataclass(frozen=True, slots=True)
class Ask:
    """An HTTP request."""

    target: str
    method: str = "GET"


Step = Say | Leave | Ask


@dataclass(frozen=True, slots=True)
class Case:
    name: str
    steps: tuple[Step, ...]
    flags: tuple[str, ...] = ()


def last_words(name: str, data: bytes) -> Case:
    """A connection of one breath."""
    return Case(name, (Leave(data),))


def raw_identify(body: str) -> bytes:
    return b"IDENTIFY\n" + sized(body.encode())


def post(target: str) -> Ask:
    return Ask(target, "POST")


HELLO = identify()
LOOK = tuple(map(Ask, ("/topics", "/channels?topic=t", "/lookup?topic=t", "/nodes", "/debug")))

LINES = [
    last_words("nothing", b""),
    last_words("PING", b"PING\n"),
    last_words("PING with words", b"PING a b\n"),
    last_words("several", b"PING\nPING\nPING\n"),
    last_words("lower case", b"ping\n"),
    last_words("blanks around", b" \t PING \r\n"),
    last_words("empty line", b"\n"),
    last_words("blank line", b"   \n"),
    last_words("unknown", b"NOP\n"),
    last_words("unknown with words", b"SUB t c\n"),
    last_words("no text", b"\xff\x00\xfe\n"),
    last_words("long line", b"B" * 16000 + b"\n"),
    last_words("cut off line", b"PING"),
    last_words("after an error", b"BAD\nPING\n"),
    Case("bad magic", (Leave(b"", magic=b"  V2"),)),
    Case("HTTP on the TCP port", (Leave(b"", magic=b"GET "),)),
    Case("half a magic", (Leave(b"", magic=b"  "),)),
]

IDENTIFIES = [
    last_words("complete", HELLO),
    last_words("twice", HELLO + HELLO),
    last_words("extra words", HELLO.replace(b"IDENTIFY\n", b"IDENTIFY a b\n")),
    *(
        last_words(f"{name} {value!r}", identify(**{name: value}))
        for name in DESCRIPTION
        for value in (None, "", 0, "text", 5, True, [], -1, 70000, 1.5, 1 << 63)
    ),
    last_words("remote address", identify(remote_address="forged")),
    last_words("remote address that is a number", identify(remote_address=5)),
    last_words("unknown keys", identify(nonsense={"a": [1.5]})),
    last_words("markup and other scripts", identify(hostname="<&>\u2028é")),
    *(
        last_words(f"body {body}", raw_identify(body))
        for body in ("", "null", "[]", "1", "{", "{}", '"a"', '{"a":NaN}', "{} x", "{} \n")
    ),
    last_words(
        "other case",
        raw_identify('{"Broadcast_Address":"a","TCP_PORT":1,"http_port":2,"vErsion":"1"}'),
    ),
    last_words("no size", b"IDENTIFY\n"),
    last_words("half a size", b"IDENTIFY\n\0\0"),
    last_words("short body", b"IDENTIFY\n\0\0\0\5{}"),
    last_words("rest is a command", HELLO + b"PING\n"),
]

REGISTRATIONS = [
    *(
        last_words(f"{command!r} first", command + b"\nPING\n")
        for command in (b"REGISTER", b"REGISTER t", b"UNREGISTER t c", b"REGISTER bad%")
    ),
    *(
        Case(line.decode("latin-1"), (Say(HELLO), Leave(line + b"\n"), *LOOK))
        for command in (b"REGISTER", b"UNREGISTER")
        for line in (
            command,
            command + b" t",
            command + b" t c",
            command + b" t c more",
            command + b"  t",
            command + b" t  c",
            command + b" \t t",
            command + b" bad% c",
            command + b" t bad%",
            command + b" t *",
            command + b" *",
            command + b" t c\xff",
            command + b" it's",
            command + b" " + b"x" * 64,
            command + b" " + b"x" * 65,
            command + b" t#ephemeral c#ephemeral",
            command + b" #ephemeral",
        )
    ),
    Case("a topic", (Say(HELLO), Say(b"REGISTER t\n"), *LOOK)),
    Case("a channel", (Say(HELLO), Say(b"REGISTER t c\n"), *LOOK)),
    Case("again", (Say(HELLO), Say(b"REGISTER t c\nREGISTER t c\nREGISTER t\n", 3), *LOOK)),
    Case("several", (Say(HELLO), Say(b"REGISTER t c\nREGISTER t d\nREGISTER u\n", 3), *LOOK)),
    Case(
        "two peers",
        (
            Say(HELLO),
            Say(identify(broadcast_address="other", hostname="x", http_port=1), peer="b"),
            Say(b"REGISTER t c\n"),
            Say(b"REGISTER t d\n", peer="b"),
            *LOOK,
            Leave(),
            *LOOK,
        ),
    ),
    Case("names stay", (Say(HELLO), Say(b"REGISTER t c\n"), Leave(), *LOOK)),
    Case(
        "ephemeral names stay, too, when the peer just leaves",
        (
            Say(HELLO),
            Say(b"REGISTER t#ephemeral c#ephemeral\n"),
            Leave(),
            Ask("/topics"),
            Ask("/lookup?topic=t%23ephemeral"),
        ),
    ),
    Case(
        "unregister a channel",
        (Say(HELLO), Say(b"REGISTER t c\nREGISTER t d\nUNREGISTER t c\n", 3), *LOOK),
    ),
    Case(
        "unregister a topic",
        (Say(HELLO), Say(b"REGISTER t c\nREGISTER t d\nUNREGISTER t\n", 3), *LOOK),
    ),
    Case(
        "unregister an ephemeral channel",
        (
            Say(HELLO),
            Say(HELLO, peer="b"),
            Say(b"REGISTER t c#ephemeral\n"),
            Say(b"REGISTER t c#ephemeral\n", peer="b"),
            Say(b"UNREGISTER t c#ephemeral\n"),
            Ask("/channels?topic=t"),
            Say(b"UNREGISTER t c#ephemeral\n", peer="b"),
            *LOOK,
        ),
    ),
    Case(
        "unregister an ephemeral topic",
        (
            Say(HELLO),
            Say(b"REGISTER t#ephemeral c\n"),
            Say(b"UNREGISTER t#ephemeral\n"),
            Ask("/topics"),
            Ask("/channels?topic=t%23ephemeral"),
            Ask("/lookup?topic=t%23ephemeral"),
        ),
    ),
    Case(
        "unregister what another peer has",
        (
            Say(HELLO),
            Say(HELLO, peer="b"),
            Say(b"REGISTER t c\n"),
            Say(b"UNREGISTER t\nUNREGISTER t c\n", 2, peer="b"),
            *LOOK,
        ),
    ),
]

INACTIVE = ("-inactive-producer-timeout=1ns",)
UNMARKED = ("-tombstone-lifetime=1ns",)
TOMBSTONE = post("/topic/tombstone?topic=t&node=nsqd.example:4151")

LIFETIMES = [
    Case("inactive", (Say(HELLO), Say(b"REGISTER t c\n"), *LOOK), INACTIVE),
    Case("never inactive", (Say(HELLO), Say(b"REGISTER t c\nPING\n", 2), *LOOK)),
    Case("tombstone", (Say(HELLO), Say(b"REGISTER t c\nREGISTER u\n", 2), TOMBSTONE, *LOOK)),
    Case("tombstone that is over", (Say(HELLO), Say(b"REGISTER t\n"), TOMBSTONE, *LOOK), UNMARKED),
    Case(
        "tombstone before a registration",
        (Say(HELLO), TOMBSTONE, Say(b"REGISTER t\n"), *LOOK),
    ),
    Case(
        "registering again lifts no tombstone",
        (Say(HELLO), Say(b"REGISTER t c\n"), TOMBSTONE, Say(b"REGISTER t c\n"), *LOOK),
    ),
    Case(
        "unregistering and registering lifts it",
        (
            Say(HELLO),
            Say(b"REGISTER t c\n"),
            TOMBSTONE,
            Say(b"UNREGISTER t\nREGISTER t\n", 2),
            *LOOK,
        ),
    ),
    Case(
        "tombstone of one of two",
        (
            Say(HELLO),
            Say(identify(http_port=1), peer="b"),
            Say(b"REGISTER t\n"),
            Say(b"REGISTER t\n", peer="b"),
            TOMBSTONE,
            *LOOK,
        ),
    ),
    *(
        Case(f"tombstone {query}", (Say(HELLO), Say(b"REGISTER t\n"), post(target), *LOOK))
        for query in ("", "topic=t", "node=x", "topic=t&node=", "topic=u&node=x", "topic=%zz")
        for target in (f"/topic/tombstone?{query}",)
    ),
]

ADMINISTRATION = [
    *(
        Case(f"POST {path}{query}", (post(path + query), *LOOK))
        for path in ("/topic/create", "/topic/delete", "/channel/create", "/channel/delete")
        for query in (
            "",
            "?topic=",
            "?topic=t",
            "?topic=bad%25",
            "?topic=%zz",
            "?topic=a;b",
            "?channel=c",
            "?topic=t&channel=",
            "?topic=t&channel=bad%25",
            "?topic=t&channel=c",
            "?topic=t&topic=u&channel=c&channel=d",
            "?topic=*&channel=c",
            "?topic=t&channel=*",
            "?topic=t%23ephemeral&channel=c%23ephemeral",
        )
    ),
    Case(
        "delete a topic that is announced",
        (
            Say(HELLO),
            Say(b"REGISTER t c\n"),
            post("/topic/delete?topic=t"),
            *LOOK,
            Say(b"REGISTER t d\n"),
            *LOOK,
        ),
    ),
    Case(
        "delete a channel that is announced",
        (Say(HELLO), Say(b"REGISTER t c\n"), post("/channel/delete?topic=t&channel=c"), *LOOK),
    ),
    Case(
        "wildcards",
        (
            Say(HELLO),
            Say(b"REGISTER t c\nREGISTER u d\nREGISTER u c\n", 3),
            Ask("/lookup?topic=*"),
            Ask("/channels?topic=*"),
            post("/topic/delete?topic=*"),
            *LOOK,
            Ask("/lookup?topic=*"),
        ),
    ),
]

ROUTES = [
    Case(
        f"{method} {path}",
        (Ask(path, method),),
    )
    for method in ("GET", "POST", "HEAD", "PUT", "OPTIONS")
    for path in (
        "/ping",
        "/info",
        "/lookup",
        "/topics",
        "/channels",
        "/nodes",
        "/debug",
        "/",
        "/lookup?topic=",
        "/channels?topic=",
        "/lookup?topic=none",
        "/lookup?%zz",
        "/ping/",
        "/PING",
        "/topic/create/",
        "/Topic/Delete?topic=t",
        "//ping",
        "/stats",
        "/debug/pprof/",
        "/debug/pprof/allocs",
        "/debug/pprof/symbol/",
        "/nothing",
    )
]

TABLES = {
    "lines": LINES,
    "identify": IDENTIFIES,
    "registrations": REGISTRATIONS,
    "lifetimes": LIFETIMES,
    "administration": ADMINISTRATION,
    "routes": ROUTES,
}


def play(lookupd: Nsqlookupd, case: Case) -> list[Any]:
    """Everything that came back: text over TCP; status, headers and body of HTTP."""
    peers: dict[str, RawPeer] = {}
    found: list[Any] = []
    with ExitStack() as stack:
        connection = http.client.HTTPConnection(lookupd.http_address, timeout=TIMEOUT_S)
        stack.enter_context(closing(connection))

        def peer(step: Say | Leave, magic: bytes = b"  V1") -> RawPeer:
            if step.peer not in peers:
                opened = RawPeer(lookupd.tcp_address, magic=magic)
                peers[step.peer] = stack.enter_context(opened)
            return peers[step.peer]

        for step in case.steps:
            match step:
                case Say():
                    peer(step).send(step.data)
                    found += [masked(peer(step).read_response()) for _ in range(step.responses)]
                case Leave():
                    peer(step, step.magic).send(step.data)
                    found.append(masked(peer(step).leave()))
                case Ask():
                    status, headers, body = answer(connection, step.method, step.target)
                    found.append((status, headers, in_order(masked(body))))
    return found


def masked(data: bytes) -> str:
    """Hide what differs from run to run, and from machine to machine."""
    data = data.replace(b'"hostname":"%b"' % socket.gethostname().encode(), b'"hostname":"OWN"')
    data = re.sub(rb"127\.0\.0\.1:\d+", b"ADDRESS", data)
    data = re.sub(rb'"http_port":\d{5},"tcp_port":\d{5}', b"OWN PORTS", data)
    data = re.sub(rb'"last_update":\d{19}', b'"last_update":"TIME"', data)
    data = re.sub(rb'"tombstoned_at":\d{19}', b'"tombstoned_at":"TIME"', data)
    return re.sub(rb"^\0\0\0.\{", b"SIZE{", data).decode("latin-1")


def in_order(body: str) -> str:
    """The document with its lists sorted; untouched when no list has several items."""
    if not body.startswith("{") or "," not in body:
        return body
    document, was_long = _sorted(json.loads(body))
    return json.dumps(document) if was_long else body


def _sorted(value: Any) -> tuple[Any, bool]:
    if isinstance(value, dict):
        parts = {key: _sorted(item) for key, item in value.items()}
        return {k: v for k, (v, _) in parts.items()}, any(long for _, long in parts.values())
    if isinstance(value, list):
        items = [_sorted(item) for item in value]
        return (
            sorted((item for item, _ in items), key=json.dumps),
            len(items) > 1 or any(long for _, long in items),
        )
    return value, False
