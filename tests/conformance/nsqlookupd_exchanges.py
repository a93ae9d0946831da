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
    """A peer sends commands and waits for a response to each; a new name is a new connection."""

    data: bytes
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
OTHER = identify(broadcast_address="other", hostname="x", http_port=1)
LOOK = tuple(map(Ask, ("/topics", "/channels?topic=t", "/lookup?topic=t", "/nodes", "/debug")))


def life(name: str, *steps: Step | bytes, flags: tuple[str, ...] = ()) -> Case:
    """A peer identifies itself, says and does this, and then everything is looked at."""
    found = [Say(step) if isinstance(step, bytes) else step for step in steps]
    return Case(name, (Say(HELLO), *found, *LOOK), flags)


def b(data: bytes) -> Say:
    """A second peer says it."""
    return Say(data, "b")


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
        life(line.decode("latin-1"), Leave(line + b"\n"))
        for command in (b"REGISTER", b"UNREGISTER")
        for line in (
            *(command + more for more in (b"", b" t", b" t c", b" t c more", b"  t", b" t  c")),
            *(command + more for more in (b" \t t", b" bad% c", b" t bad%", b" t *", b" *")),
            *(command + more for more in (b" t c\xff", b" it's", b" " + b"x" * 64)),
            *(command + more for more in (b" " + b"x" * 65, b" t#ephemeral c#ephemeral")),
            command + b" #ephemeral",
        )
    ),
    life("a topic", b"REGISTER t\n"),
    life("a channel", b"REGISTER t c\n"),
    life("again", b"REGISTER t c\nREGISTER t c\nREGISTER t\n"),
    life("several", b"REGISTER t c\nREGISTER t d\nREGISTER u\n"),
    life("two peers", b(OTHER), b"REGISTER t c\n", b(b"REGISTER t d\n"), *LOOK, Leave()),
    life("names stay", b"REGISTER t c\n", Leave()),
    life(
        "ephemeral names stay, too, when the peer just leaves",
        b"REGISTER t#ephemeral c#ephemeral\n",
        Leave(),
        Ask("/lookup?topic=t%23ephemeral"),
    ),
    life("unregister a channel", b"REGISTER t c\nREGISTER t d\nUNREGISTER t c\n"),
    life("unregister a topic", b"REGISTER t c\nREGISTER t d\nUNREGISTER t\n"),
    life(
        "unregister an ephemeral channel",
        b(HELLO),
        b"REGISTER t c#ephemeral\n",
        b(b"REGISTER t c#ephemeral\n"),
        b"UNREGISTER t c#ephemeral\n",
        Ask("/channels?topic=t"),
        b(b"UNREGISTER t c#ephemeral\n"),
    ),
    life(
        "unregister an ephemeral topic",
        b(HELLO),
        b"REGISTER t#ephemeral c\n",
        b(b"REGISTER t#ephemeral\n"),
        b"UNREGISTER t#ephemeral\n",
        Ask("/channels?topic=t%23ephemeral"),
        b(b"UNREGISTER t#ephemeral\n"),
        Ask("/lookup?topic=t%23ephemeral"),
    ),
    life(
        "unregister what another peer has",
        b(HELLO),
        b"REGISTER t c\n",
        b(b"UNREGISTER t\nUNREGISTER t c\nUNREGISTER never seen\n"),
    ),
]

INACTIVE = ("-inactive-producer-timeout=1ns",)
UNMARKED = ("-tombstone-lifetime=1ns",)
TOMBSTONE = post("/topic/tombstone?topic=t&node=nsqd.example:4151")

LIFETIMES = [
    life("inactive", b"REGISTER t c\n", flags=INACTIVE),
    life("never inactive", b"REGISTER t c\nPING\n"),
    life("tombstone", b"REGISTER t c\nREGISTER u\n", TOMBSTONE),
    life("tombstone that is over", b"REGISTER t\n", TOMBSTONE, flags=UNMARKED),
    life("tombstone before a registration", TOMBSTONE, b"REGISTER t\n"),
    life("registering again lifts no tombstone", b"REGISTER t c\n", TOMBSTONE, b"REGISTER t c\n"),
    life(
        "unregistering and registering lifts it",
        b"REGISTER t c\n",
        TOMBSTONE,
        b"UNREGISTER t\nREGISTER t\n",
    ),
    life(
        "tombstone of one of two",
        b(identify(http_port=1)),
        b"REGISTER t\n",
        b(b"REGISTER t\n"),
        TOMBSTONE,
    ),
    *(
        life(f"tombstone {query}", b"REGISTER t\n", post(target))
        for query in ("", "topic=t", "node=x", "topic=t&node=", "topic=u&node=x", "topic=%zz")
        for target in (f"/topic/tombstone?{query}",)
    ),
]

QUERIES = """
    ?topic= ?topic=t ?topic=bad%25 ?topic=%zz ?topic=a;b ?channel=c ?topic=t&channel=
    ?topic=t&channel=bad%25 ?topic=t&channel=c ?topic=t&topic=u&channel=c&channel=d
    ?topic=*&channel=c ?topic=t&channel=* ?topic=t%23ephemeral&channel=c%23ephemeral
"""

ADMINISTRATION = [
    *(
        Case(f"POST {path}{query}", (post(path + query), *LOOK))
        for path in ("/topic/create", "/topic/delete", "/channel/create", "/channel/delete")
        for query in ["", *QUERIES.split()]
    ),
    life(
        "delete a topic that is announced",
        b"REGISTER t c\n",
        post("/topic/delete?topic=t"),
        *LOOK,
        b"REGISTER t d\n",
    ),
    life(
        "delete a channel that is announced",
        b"REGISTER t c\n",
        post("/channel/delete?topic=t&channel=c"),
        post("/channel/delete?topic=t&channel=c"),
    ),
    life(
        "wildcards",
        b"REGISTER t c\nREGISTER u d\nREGISTER u c\n",
        Ask("/lookup?topic=*"),
        Ask("/channels?topic=*"),
        post("/topic/delete?topic=*"),
        *LOOK,
        Ask("/lookup?topic=*"),
        Ask("/channels?topic=*"),
    ),
]

PATHS = """
    /ping /info /lookup /topics /channels /nodes /debug / /lookup?topic= /channels?topic=
    /lookup?topic=none /lookup?topic=* /channels?topic=* /lookup?%zz /ping/ /PING /topic/create/
    /Topic/Delete?topic=t //ping /stats /debug/pprof/ /debug/pprof/allocs /debug/pprof/symbol/
    /nothing
"""

ROUTES = [
    Case(f"{method} {path}", (Ask(path, method),))
    for method in ("GET", "POST", "HEAD", "PUT", "OPTIONS")
    for path in PATHS.split()
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
                    found += [
                        masked(peer(step).read_response()) for _ in range(step.data.count(b"\n"))
                    ]
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
