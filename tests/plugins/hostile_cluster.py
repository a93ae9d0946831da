"""A cluster that sends `EVIL` in every text: in names, ids, versions, bodies and errors.

One HTTP server answers as nsqlookupd and as nsqd, and refuses every change with an evil text. A TCP
server delivers evil messages, refuses each FIN and confirms no publish.
"""

import json
import socket
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, NamedTuple
from urllib.parse import urlsplit

import pytest
from plugins.http_server import Answer, HttpServer, Request, serving, talking
from plugins.raw_client import ERROR, MAGIC, RESPONSE, frame, message_frame, split_commands
from plugins.scripted_nsqd import IDENTIFY_REPLY

EVIL = "\x1b]0;pwned\x07\x9b31m\x7f\u202e\r\nnsq: forged\u2028\ud800"
"""Sets the title, colors, reverses, begins a line that looks like ours, and is not UTF-8."""

SCRIPT = f"</title><script>document.title='pwned'</script>\"'><img src=x onerror=alert(1)>/..{EVIL}"
"""The same for a browser, with an address of another page."""

BODY = EVIL.encode("utf-8", "replace")
RAW_BODY = BODY + b"\x9b\xff"


class HostileCluster(NamedTuple):
    """``answers`` are the HTTP responses by path; a test may replace and restore them."""

    http_address: str  # nsqd's and nsqlookupd's
    tcp_address: str
    answers: dict[str, Any]


@pytest.fixture(scope="session")
def hostile_cluster() -> Iterator[HostileCluster]:
    with _cluster(EVIL) as cluster:
        yield cluster


@pytest.fixture(scope="session")
def scripting_cluster() -> Iterator[HostileCluster]:
    """A cluster that sends `SCRIPT`."""
    with _cluster(SCRIPT) as cluster:
        yield cluster


@pytest.fixture(scope="session")
def polite_cluster() -> Iterator[HostileCluster]:
    """A cluster with harmless texts, for tests that replace its responses."""
    with _cluster("polite") as cluster:
        yield cluster


@contextmanager
def _cluster(evil: str) -> Iterator[HostileCluster]:
    with talking(_nsqd) as nsqd, serving(_API()) as api:
        api.answers = _answers(api.server_port, int(nsqd.rpartition(":")[2]), evil)
        yield HostileCluster(api.address, nsqd, api.answers)


def _answers(http: int, tcp: int, evil: str) -> dict[str, Any]:
    node = {
        **dict.fromkeys(("hostname", "version", "remote_address"), evil),
        "broadcast_address": "127.0.0.1",
        "tcp_port": tcp,
        "http_port": http,
        "topics": ["clicks", evil],
        "tombstones": [True, True],
    }
    client = {
        **dict.fromkeys(("client_id", "hostname", "user_agent", "remote_address", "version"), evil),
        **dict.fromkeys(("ready_count", "in_flight_count", "message_count", "finish_count"), 1),
    }
    channel = {"depth": 5, "message_count": 5, "clients": [client], "client_count": 1}
    channels = [{**channel, "channel_name": name} for name in ("archive", evil)]
    topics = [
        {"topic_name": name, "depth": 7, "message_count": 7, "channels": channels}
        for name in ("clicks", evil)
    ]
    producers = [node, {**node, "broadcast_address": evil}, {"broadcast_address": "["}]
    return {
        "/ping": evil,
        "/info": {**node, "start_time": 1},
        "/stats": {"version": evil, "health": evil, "start_time": 1, "topics": topics},
        "/nodes": {"producers": producers},
        "/topics": {"topics": ["clicks", evil]},
        "/channels": {"channels": ["archive", evil]},
        "/lookup": {"channels": ["archive", evil], "producers": producers},
        "/config/log_level": evil,
    }


class _API(HttpServer):
    reason = "\x1b]0;pwned\x07"
    answers: dict[str, Any]

    def take(self, request: Request) -> Answer:
        answer = self.answers.get(urlsplit(request.target).path)
        if request.method != "GET" or answer is None:
            return 500, {}, json.dumps({"message": EVIL}).encode()
        return 200, {}, RAW_BODY if isinstance(answer, str) else json.dumps(answer).encode()


NSQD_ANSWERS = {
    "IDENTIFY": frame(RESPONSE, json.dumps(IDENTIFY_REPLY).encode()),
    "SUB": frame(RESPONSE, b"OK"),
    "CLS": frame(RESPONSE, b"CLOSE_WAIT"),
    **dict.fromkeys(("PUB", "MPUB", "DPUB"), frame(ERROR, b"E_BAD_TOPIC " + RAW_BODY)),
}
for word in ("FIN", "REQ", "TOUCH"):
    NSQD_ANSWERS[word] = frame(ERROR, f"E_{word}_FAILED ".encode() + RAW_BODY)


def _nsqd(accepted: socket.socket) -> None:
    """Deliver two messages to a ready consumer, and let no command succeed."""
    incomplete, has_delivered = b"", False
    accepted.settimeout(30)
    while data := accepted.recv(1 << 16):
        commands, incomplete = split_commands((incomplete + data).removeprefix(MAGIC), 0)
        for command in commands:
            word, _, argument = command.line.partition(" ")
            accepted.sendall(NSQD_ANSWERS.get(word, b""))
            if word == "RDY" and argument != "0" and not has_delivered:
                has_delivered = True
                accepted.sendall(b"".join(map(_message, enumerate((BODY, RAW_BODY)))))


def _message(numbered: tuple[int, bytes]) -> bytes:
    number, body = numbered
    return message_frame(body, f"\x1b]0;pwned\x07\r\n\x7fx{number}xx", attempts=1, timestamp_ns=1)


def raw_marks(shown: bytes, *, is_one_line: bool = True) -> list[str]:
    """The parts of `EVIL` that the output has unescaped; with ``is_one_line`` also forged lines."""
    text = shown.decode("utf-8", "replace")
    marks = ["\x1b]0", "\x07", "\x9b", "\x7f", "\u202e", "\u2028"]
    unescaped = [ascii(mark) for mark in marks if mark in text]
    if b"\x9b" in shown.replace("\x9b".encode(), b""):
        unescaped.append("a bare byte 0x9b")
    if is_one_line and any(line.startswith("nsq: forged") for line in text.splitlines()):
        unescaped.append("a forged line")
    return unescaped
