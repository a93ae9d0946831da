"""The HTTP APIs of a daemon under test, as far as tests need them to prepare and to look.

`Nsqd` and `Nsqlookupd` are what each offers to a test, the Go program and the embedded one.
"""

import http.client
import json
from collections.abc import Callable, Mapping
from contextlib import closing
from pathlib import Path
from typing import Any, Self
from urllib.parse import urlencode

from plugins.ports import ReservedPort
from plugins.waiting import patience_s

REQUEST_TIMEOUT_S = patience_s(10.0)

CLIENT_HEADERS = ("Content-Type", "X-NSQ-Content-Type", "Allow", "Location")

Answer = tuple[int, dict[str, str], bytes]


def answer(
    connection: http.client.HTTPConnection,
    method: str,
    target: str,
    body: bytes = b"",
    headers: Mapping[str, str] | None = None,
) -> Answer:
    """Send a request; status, the headers that NSQ's clients look at, and body of the answer."""
    connection.request(method, target, body, dict(headers or {}))
    response = connection.getresponse()
    seen = {name: response.headers[name] for name in CLIENT_HEADERS if name in response.headers}
    return response.status, seen, response.read()


class Running:
    """A daemon on loopback ports, free ones at the first `start`, the same ones afterwards.

    `start` returns when it listens; `stop` is as SIGTERM, and `kill` as SIGKILL. A context manager:
    entering starts it, leaving kills it. GET and POST take parameters as keywords.
    """

    name: str  # of the program, for messages
    tcp_address: str
    http_address: str
    log: str  # of all runs
    start: Callable[[], None]
    stop: Callable[[], None]
    kill: Callable[[], None]
    _ports: list[ReservedPort]  # nobody has them between two runs

    def get(self, path: str, **query: object) -> bytes:
        """The body of the answer; an error status fails the test with what was answered."""
        return self._successful("GET", path, query)

    def post(self, path: str, body: bytes = b"", **query: object) -> bytes:
        """As `get`, with a body to send."""
        return self._successful("POST", path, query, body)

    def request(self, method: str, target: str, body: bytes = b"") -> tuple[int, bytes]:
        """Status and body of the answer, whatever it is."""
        connection = http.client.HTTPConnection(self.http_address, timeout=REQUEST_TIMEOUT_S)
        with closing(connection):
            status, _, said = answer(connection, method, target, body)
            return status, said

    def _successful(
        self, method: str, path: str, query: dict[str, object], body: bytes = b""
    ) -> bytes:
        target = f"{path}?{urlencode(query)}" if query else path
        status, answer = self.request(method, target, body)
        assert status < 400, f"{method} {target}: {status} {answer!r}"
        return answer

    def release_ports(self) -> None:
        """Let others have the ports: it is not to be started again."""
        for port in self._ports:
            port.release()

    def __enter__(self) -> Self:
        self.start()
        return self

    def __exit__(self, *exception: object) -> None:
        self.kill()
        self.release_ports()


class Nsqlookupd(Running):
    """A nsqlookupd."""

    def json(self, path: str, **query: object) -> Any:
        """The document at `path`."""
        return json.loads(self.get(path, **query))

    def producers(self, topic: str) -> list[str]:
        """Whom to consume from, as ``broadcast_address:tcp_port``; nobody for an unknown topic."""
        status, answer = self.request("GET", f"/lookup?{urlencode({'topic': topic})}")
        if status == 404:
            return []
        found = json.loads(answer)["producers"]
        return [f"{producer['broadcast_address']}:{producer['tcp_port']}" for producer in found]


class Nsqd(Running):
    """An nsqd with its own empty data directory; a restart keeps it, `kill` what is on disk.

    ``https_address`` is empty unless TLS is configured.
    """

    https_address: str
    data_path: Path

    @property
    def options(self) -> list[str]:
        """What a command is given to consume from it."""
        tcp, http = self.tcp_address, self.http_address
        return [f"--nsqd-tcp-address={tcp}", f"--nsqd-http-address={http}"]

    def create_topic(self, topic: str) -> None:
        self.post("/topic/create", topic=topic)

    def create_channel(self, topic: str, channel: str) -> None:
        """Create the channel, and the topic when it is not there."""
        self.create_topic(topic)
        self.post("/channel/create", topic=topic, channel=channel)

    def publish(self, topic: str, *bodies: bytes) -> None:
        """Publish all bodies in one request (binary mpub: bodies may hold any byte)."""
        packed = b"".join(len(body).to_bytes(4, "big") + body for body in bodies)
        self.post("/mpub", len(bodies).to_bytes(4, "big") + packed, topic=topic, binary="true")

    def stats(self, topic: str | None = None) -> dict[str, Any]:
        """The whole ``/stats`` document, or that of one topic."""
        query = {} if topic is None else {"topic": topic}
        document: dict[str, Any] = json.loads(self.get("/stats", format="json", **query))
        return document

    def topics(self) -> list[str]:
        return [topic["topic_name"] for topic in self.stats()["topics"] or []]

    def channels(self, topic: str) -> list[str]:
        return [channel["channel_name"] for channel in self.topic_stats(topic)["channels"]]

    def topic_stats(self, topic: str) -> dict[str, Any]:
        return _named(self.stats(topic)["topics"], "topic_name", topic)

    def channel_stats(self, topic: str, channel: str) -> dict[str, Any]:
        return _named(self.topic_stats(topic)["channels"], "channel_name", channel)

    def depth(self, topic: str, channel: str | None = None) -> int:
        """Messages waiting in the topic itself, or in the channel (in flight ones not counted)."""
        counted = self.topic_stats(topic) if channel is None else self.channel_stats(topic, channel)
        return int(counted["depth"])


def _named(entries: list[dict[str, Any]] | None, key: str, name: str) -> dict[str, Any]:
    named = {entry[key]: entry for entry in entries or []}
    return named[name]
