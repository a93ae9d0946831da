"""The embedded daemons answer as the Go daemons did when the exchanges were recorded.

``exchanges/`` has a table in each file and a case in each line: its name, the flags of the daemon,
and the requests, each followed by the answer of Go. Bytes are latin-1, and ``{x*300}`` is x 300
times. Values that differ between runs or machines are masked. ``TOPIC`` is a topic that only this
case uses, ``{a 0}`` the id of the first message delivered to client a.

    tcp          {client: bytes}, and the frames to wait for; a client that ends sends no more, and
                 its answer is everything until nsqd closes
    clients      several clients; [method, target, body]; final statistics of a channel or of the
                 topic; "restart"
    http         [method, target, body] on one connection; bytes have their own connection
    nsqlookupd   {peer: bytes}, which waits for an answer to each line, or for the end if the peer
                 leaves; [method, target]

Go lists maps in random order, so lists of nsqlookupd with several items are sorted. One test plays
the cases with the Go daemons again. To add a case, add a line with null for each answer, and run

    NSQTOOLS_RECORD_EXCHANGES=1 pytest tests/conformance/test_exchanges.py -k go
"""

import http.client
import json
import os
import re
import socket
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, closing
from functools import partial
from itertools import chain, count
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import pytest
from plugins.daemons import EmbeddedLookupServer, GoNsqlookupd, Nsqlookupd, answer
from plugins.raw_client import MESSAGE, RawClient, RawPeer
from plugins.servers import EmbeddedServer, GoNsqd, Nsqd
from plugins.waiting import patience_s

TIMEOUT_S = patience_s(10.0)
FOLDER = Path(__file__).with_name("exchanges")
TABLES = sorted(path.stem for path in FOLDER.iterdir())
GO = {"nsqd": GoNsqd, "nsqlookupd": GoNsqlookupd}
EMBEDDED = {"nsqd": EmbeddedServer, "nsqlookupd": EmbeddedLookupServer}

CHARACTER = r"(\\u[0-9a-f]{4}|\\.|[^\\])"  # in JSON
SHORT, LONG = rf"\{{{CHARACTER}\*(\d+)\}}", rf"{CHARACTER}\1{{99,}}"

Steps = list[list[Any]]


@pytest.mark.parametrize("table", TABLES)
def test_the_embedded_daemon_answers_as_recorded(table: str) -> None:
    lines = differences(table, EMBEDDED)
    assert not lines, "\n".join(lines)


@pytest.mark.real_nsqd
def test_the_go_daemons_answer_as_recorded() -> None:
    if os.environ.get("NSQTOOLS_RECORD_EXCHANGES"):
        for table in TABLES:
            (FOLDER / f"{table}.jsonl").write_text("".join(play(table, GO)))
    with ThreadPoolExecutor(4) as pool:  # They mostly wait.
        lines = list(chain(*pool.map(partial(differences, kinds=GO), TABLES)))
    assert not lines, "\n".join(lines)


def differences(table: str, kinds: dict[str, Any]) -> list[str]:
    """A line for each case whose answers differ from the recorded ones."""
    recorded = (FOLDER / f"{table}.jsonl").read_text().splitlines(keepends=True)
    pairs = zip(play(table, kinds), recorded, strict=True)
    return [f"{table}: {now}recorded: {then}" for now, then in pairs if now != then]


def play(table: str, kinds: dict[str, Any]) -> Iterator[str]:
    """Play all cases; cases of nsqd with equal flags share one, each of nsqlookupd has its own."""
    with ExitStack() as stack:
        nsqds: dict[tuple[str, ...], Any] = {}
        for line in (FOLDER / f"{table}.jsonl").read_text().splitlines():
            name, flags, steps = json.loads(re.sub(SHORT, lambda run: run[1] * int(run[2]), line))
            topic = re.sub(r"[^a-zA-Z0-9]", "_", name)[:50]
            if table.startswith("nsqlookupd"):
                with kinds["nsqlookupd"](*flags) as lookupd:
                    answers = lookup(lookupd, steps)
            else:
                if (nsqd := nsqds.get(tuple(flags))) is None:
                    path = Path(stack.enter_context(TemporaryDirectory(prefix="nsqd-")))
                    nsqd = nsqds[tuple(flags)] = stack.enter_context(kinds["nsqd"](path, *flags))
                answers = (ask if table.startswith("http") else act)(nsqd, steps, topic)
            played = [[sent, now] for (sent, _), now in zip(steps, answers, strict=True)]
            out = json.dumps([name, flags, played])
            yield (
                re.sub(LONG, lambda run: f"{{{run[1]}*{len(run[0]) // len(run[1])}}}", out) + "\n"
            )


# -- nsqd, TCP ------------------------------------------------------------------------------------


def act(nsqd: Nsqd, steps: Steps, topic: str) -> list[Any]:
    clients: dict[str, RawClient] = {}
    ids: dict[str, str] = {}  # by client and number

    def figures(channel: str, *names: str) -> list[int]:
        stats = nsqd.channel_stats(topic, channel) if channel else nsqd.topic_stats(topic)
        return [stats[name] for name in names]

    def step(sent: Any, answered: Any) -> Any:
        until_s = time.monotonic() + TIMEOUT_S
        if sent == "restart":
            nsqd.stop()
            nsqd.start()
            return "restarted"
        if isinstance(sent, list) and sent[0] == "stats":
            while (statistics := figures(*sent[1:])) != answered and time.monotonic() < until_s:
                time.sleep(0.01)
            return statistics
        if isinstance(sent, list):
            method, target, body = (*sent, "")[:3]
            status, text = nsqd.request(method, target.replace("TOPIC", topic), body.encode())
            return [status, text.decode()]
        (name, text), *more = sent.items()
        if name not in clients:
            clients[name] = stack.enter_context(RawClient(nsqd.tcp_address, magic=b""))
        text = re.sub(r"\{\w+ \d\}", lambda which: ids[which[0]], text)
        clients[name].send(text.replace("TOPIC", topic).encode("latin-1"))
        if more:
            clients[name].socket.shutdown(socket.SHUT_WR)
            answered = None
        return list(map(partial(shown, name), frames_of(clients[name], answered)))

    def shown(name: str, frame: tuple[int, bytes]) -> str:
        kind, data = frame
        if kind == MESSAGE:
            number = sum(known_id.startswith(f"{{{name} ") for known_id in ids)
            ids[f"{{{name} {number}}}"] = data[10:26].decode()
            data = data[8:10] + data[26:]
        text = data.decode("latin-1")
        for place, message_id in ids.items():
            text = text.replace(message_id, place)
        return f"{kind} {text}"

    with ExitStack() as stack:
        return [step(sent, answered) for sent, answered in steps]


def frames_of(client: RawClient, answered: list[str] | None) -> Iterator[tuple[int, bytes]]:
    """As many frames as were recorded, or all until the end."""
    for _ in answered if answered is not None else count():
        try:
            yield client.read_frame()
        # Go closes with unread input, which may also cause a reset.
        except (EOFError, ConnectionError):
            if answered is not None:
                yield -1, b"closed"
            return


# -- nsqd, HTTP -----------------------------------------------------------------------------------


def ask(nsqd: Nsqd, steps: Steps, topic: str) -> list[Any]:
    """The status, headers and body of each answer."""
    answers: list[Any] = []
    with closing(http.client.HTTPConnection(nsqd.http_address, timeout=TIMEOUT_S)) as connection:
        for sent, _ in steps:
            if isinstance(sent, str):
                answers.append(answers_to_bytes(nsqd, sent.encode("latin-1")))
                continue
            method, target, body = (*sent, "")[:3]
            status, headers, text = answer(
                connection, method, target.replace("TOPIC", topic), body.encode("latin-1")
            )
            answers.append([status, headers, masked(text, nsqd).decode("latin-1")])
    return answers


def answers_to_bytes(nsqd: Nsqd, data: bytes) -> list[Any]:
    """Send bytes and shut down; return status, sorted headers and body of each answer."""
    host, _, port = nsqd.http_address.rpartition(":")
    with socket.create_connection((host, int(port)), timeout=TIMEOUT_S) as connection:
        connection.sendall(data)
        received = connection.makefile("rb").read().decode("latin-1")
    answers = []
    for text in re.split(r"(?=HTTP/1\.\d \d{3} )", received):
        head, _, body = re.sub(r"Date: [^\r]*", "Date:", text).partition("\r\n\r\n")
        status, *fields = head.split("\r\n")
        answers.append([status, sorted(fields), body])
    return answers


def masked(body: bytes, nsqd: Nsqd) -> bytes:
    body = body.replace(b'"hostname":"%b"' % socket.gethostname().encode(), b'"hostname":"OWN"')
    # "127.0.0.1:0" is the default of one daemon and was given to the other.
    for value in (str(nsqd.data_path), nsqd.tcp_address, nsqd.http_address, "127.0.0.1:0"):
        body = body.replace(value.encode(), b"OWN")
    ports = [address.rpartition(":")[2] for address in (nsqd.tcp_address, nsqd.http_address)]
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


# -- nsqlookupd -----------------------------------------------------------------------------------


def lookup(lookupd: Nsqlookupd, steps: Steps) -> list[Any]:
    """The text over TCP; the status, headers and body over HTTP."""
    peers: dict[str, RawPeer] = {}
    answers: list[Any] = []
    with ExitStack() as stack:
        connection = http.client.HTTPConnection(lookupd.http_address, timeout=TIMEOUT_S)
        stack.enter_context(closing(connection))
        for sent, _ in steps:
            if isinstance(sent, list):
                status, headers, body = answer(connection, *sent)
                answers.append([status, headers, in_order(masked_lookup(body))])
                continue
            [name] = sent.keys() - {"leaves", "magic"}
            if name not in peers:
                peer = RawPeer(lookupd.tcp_address, magic=sent.get("magic", "  V1").encode())
                peers[name] = stack.enter_context(peer)
            peer, data = peers[name], sent[name].encode("latin-1")
            peer.send(data)
            if "leaves" in sent:
                answers.append(masked_lookup(peer.leave()))
            else:
                responses = [peer.read_response() for _ in range(data.count(b"\n"))]
                answers.append(list(map(masked_lookup, responses)))
    return answers


def masked_lookup(data: bytes) -> str:
    data = data.replace(b'"hostname":"%b"' % socket.gethostname().encode(), b'"hostname":"OWN"')
    data = re.sub(rb"127\.0\.0\.1:\d+", b"ADDRESS", data)
    data = re.sub(rb'"http_port":\d{5},"tcp_port":\d{5}', b"OWN PORTS", data)
    data = re.sub(rb'"(last_update|tombstoned_at)":\d{19}', rb'"\1":"TIME"', data)
    return re.sub(rb"^\0\0\0.\{", b"SIZE{", data).decode("latin-1")


def in_order(body: str) -> str:
    """The document with its lists sorted; untouched when no list has several items."""
    if not body.startswith("{") or "," not in body:
        return body
    lengths: list[int] = []

    def ordered(value: Any) -> Any:
        if isinstance(value, dict):
            return {key: ordered(item) for key, item in value.items()}
        if isinstance(value, list):
            lengths.append(len(value))
            return sorted(map(ordered, value), key=json.dumps)
        return value

    document = json.dumps(ordered(json.loads(body)))
    return document if max(lengths, default=0) > 1 else body
