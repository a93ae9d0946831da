"""POST /pub and /mpub and GET /ping without a framework, on connections that send nothing else.

These are what publishers and health checks call thousands of times. A request that is exactly as
expected (topic first in the query, body of a declared length, no unusual header, not much at once)
is answered here, with what the framework would answer. At the first one that is not, the connection
is given to the framework for the rest of its life, together with the bytes that were not used.

With ``--durable`` the answer comes when the disk has the messages. The connection waits for that
before it looks at its next request, so answers come in order.
"""

from __future__ import annotations

import asyncio
import re
import time
from collections.abc import Callable
from email.utils import formatdate
from typing import NamedTuple, cast

from nsqtools.protocol.durations import go_duration
from nsqtools.protocol.error_codes import RequestError
from nsqtools.protocol.requests import BodiesReader, Incomplete
from nsqtools.server.http.foreign_calls import ForeignCalls
from nsqtools.server.listen import read_in_pieces
from nsqtools.server.queues.backlog import BackendError
from nsqtools.server.queues.nsqd_queues import NsqdQueues

_HEAD = re.compile(
    rb"(?:POST /(?:pub|(mpub))\?topic=([.a-zA-Z0-9_-]{1,64})"
    rb"(?:&defer=([0-9]{1,10})|&(binary)=true)?|GET /ping) HTTP/1\.1\r\n"
    rb"((?i:(?:(?:Host|Content-Length|User-Agent|Accept|Accept-Encoding|Content-Type):[^\r\n]*"
    rb"|Connection: keep-alive)\r\n)*)\r\n"
)
_HEADER = re.compile(rb"^(Host|Content-Length): *([^\r\n]*?) *\r$", re.IGNORECASE | re.MULTILINE)
_MAX_HEAD = 4096
_MAX_BODY = 1 << 17
_MAX_COUNT = 1000  # messages
_BEGINNINGS = (b"POST /pub?", b"POST /mpub", b"GET /ping ")

_PUBLISHED = (
    b"HTTP/1.1 200 OK\r\nx-nsq-content-type: nsq; version=1.0\r\n"
    b"content-type: text/plain; charset=utf-8\r\ncontent-length: 2\r\ndate: %b\r\n\r\nOK"
)
_ALIVE = (
    b"HTTP/1.1 200 OK\r\ncontent-type: text/plain; charset=utf-8\r\n"
    b"content-length: 2\r\ndate: %b\r\n\r\nOK"
)


class Wanted(NamedTuple):
    """What a request asks for: without a topic it is a ping. ``size`` is that of its body."""

    topic: str
    size: int
    delay_s: float
    is_multiple: bool
    is_binary: bool


Answered = Callable[[bytes | None], None]


class QuickPaths:
    """What the connections of one listener share."""

    def __init__(self, nsqd: NsqdQueues, foreign: ForeignCalls) -> None:
        self.nsqd = nsqd
        self.connections: set[QuickConnection] = set()
        self._foreign = foreign
        self._date = b""
        self._date_of = 0

    def read_head(self, head: bytes) -> Wanted | None:
        """Return what a request asks for, None if it is not for here."""
        match = _HEAD.fullmatch(head)
        if match is None:
            return None
        multiple, topic, defer, binary, fields = match.groups(b"")
        found = [(name.lower(), value) for name, value in _HEADER.findall(fields)]
        headers = dict(found)
        length = headers.get(b"content-length", b"0")
        if len(headers) != len(found) or not length.isdigit() or len(length) > 6:
            return None
        host = headers.get(b"host")
        if host is None or not self._foreign.is_own_host(host.decode("latin-1")):
            return None
        options = self.nsqd.options
        delay_s = int(defer or 0) / 1000
        size = int(length)
        limit = min(_MAX_BODY, options.max_body_size if multiple else options.max_msg_size)
        is_whole = 0 < size <= limit if topic else size == 0
        fits = bool(defer and multiple) + bool(binary and not multiple) == 0
        if not (is_whole and fits and delay_s <= options.max_req_timeout):
            return None
        return Wanted(topic.decode(), size, delay_s, bool(multiple), bool(binary))

    def publish(self, wanted: Wanted, body: bytes, later: Answered) -> bytes | None:
        """Publish, and return the answer; None when that takes more than a moment.

        An empty answer says that ``later`` will be called with the answer, or with None when
        nothing was stored.
        """
        topic = self.nsqd.get_topic(wanted.topic)
        if not topic.started.is_set():
            return None
        bodies = self._bodies(wanted, body)
        if bodies is None:
            return None
        if topic.journal is not None and bodies:

            def done(error: BackendError | None) -> None:
                answer = _PUBLISHED % self._now() if error is None else None
                self.nsqd.loop.call_soon(later, answer)

            topic.put_durably(topic.new_messages(bodies), wanted.delay_s, done)
            return b""
        try:
            if wanted.delay_s:
                topic.put_deferred(topic.new_messages(bodies)[0], wanted.delay_s)
            else:
                topic.put(topic.new_messages(bodies))
        except BackendError:
            return None  # nothing was stored: the framework says why
        return _PUBLISHED % self._now()

    def _bodies(self, wanted: Wanted, body: bytes) -> list[bytes] | None:
        """Return the messages, None if the framework has to look at them."""
        if not wanted.is_multiple:
            return [body]
        options = self.nsqd.options
        count = int.from_bytes(body[:4], "big") if wanted.is_binary else body.count(b"\n")
        if count > _MAX_COUNT:
            return None
        if wanted.is_binary:
            reader = BodiesReader(options.max_msg_size, options.max_body_size)
            try:
                reader.read(body, 0)
            except (RequestError, Incomplete):
                return None
            return reader.bodies
        bodies = [line for line in body.split(b"\n") if line]
        return None if max(map(len, bodies), default=0) > options.max_msg_size else bodies

    def ping(self) -> bytes | None:
        """Return the answer, None when all is not well."""
        return _ALIVE % self._now() if self.nsqd.health.is_well else None

    def _now(self) -> bytes:
        now_s = int(time.time())
        if now_s != self._date_of:
            self._date_of, self._date = now_s, formatdate(now_s, usegmt=True).encode()
        return self._date


class QuickConnection(asyncio.Protocol):
    """One connection; ``make_framework`` returns the protocol that takes over."""

    def __init__(self, paths: QuickPaths, make_framework: Callable[[], asyncio.Protocol]) -> None:
        self._paths = paths
        self._make_framework = make_framework
        self._transport = cast(asyncio.Transport, None)  # until connection_made
        self._received = b""
        self._known_head = b""
        self._known: Wanted | None = None
        self._client = ""
        self._waiting_size = 0  # of the request whose answer comes later; the first in _received
        self._has_ended = False  # the client sends no more

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast(asyncio.Transport, transport)
        read_in_pieces(transport)
        self._paths.connections.add(self)
        peer = transport.get_extra_info("peername")
        self._client = f"{peer[0]}:{peer[1]}" if isinstance(peer, tuple) else ""

    def connection_lost(self, exc: Exception | None) -> None:
        self._paths.connections.discard(self)

    def data_received(self, data: bytes) -> None:
        if self._received:
            data = self._received + data
        if self._waiting_size:
            self._received = data
            self._transport.pause_reading()
        else:
            self._answer(data)

    def eof_received(self) -> bool:
        self._has_ended = True
        return bool(self._waiting_size)

    def _answer(self, data: bytes) -> None:
        position = 0
        answers: list[bytes] = []
        while position < len(data):
            taken = self._take(data, position)
            if taken is None:
                if answers:
                    self._transport.write(b"".join(answers))
                self._hand_over(data[position:])
                return
            answer, size = taken
            if not answer:
                self._waiting_size = size  # 0: more of it has to come
                break
            answers.append(answer)
            position += size
        self._received = data[position:]
        if answers:
            self._transport.write(b"".join(answers))

    def _published(self, answer: bytes | None) -> None:
        """Send the answer that was waited for; without one the framework says what is wrong."""
        data, self._received = self._received, b""
        size, self._waiting_size = self._waiting_size, 0
        if self._transport.is_closing():
            return
        self._transport.resume_reading()
        if answer is None and self._has_ended:
            self._transport.close()
        elif answer is None:
            self._hand_over(data)
        else:
            self._transport.write(answer)
            if len(data) > size:
                self._answer(data[size:])
            if self._has_ended and not self._waiting_size:
                self._transport.close()

    def _take(self, data: bytes, position: int) -> tuple[bytes, int] | None:
        """Return the answer to a request and its size; None: it is not for here.

        Without an answer the size is 0 when more of the request has to come.
        """
        head_size = len(self._known_head)
        wanted = self._known
        if wanted is None or not data.startswith(self._known_head, position):
            end = data.find(b"\r\n\r\n", position, position + _MAX_HEAD)
            if end < 0:
                start = data[position : position + len(_BEGINNINGS[0])]
                is_ours = any(start == each[: len(start)] for each in _BEGINNINGS)
                return (b"", 0) if is_ours and len(data) - position < _MAX_HEAD else None
            head = data[position : end + 4]
            wanted = self._paths.read_head(head)
            if wanted is None:
                return None
            self._known_head, self._known, head_size = head, wanted, len(head)
        body_at = position + head_size
        after = body_at + wanted.size
        if len(data) < after:
            return b"", 0
        if wanted.topic:
            answer = self._paths.publish(wanted, data[body_at:after], self._published)
        else:
            answer = self._ping()
        return None if answer is None else (answer, after - position)

    def _ping(self) -> bytes | None:
        started_s = time.monotonic()
        answer = self._paths.ping()
        if answer is not None:
            took = go_duration(int((time.monotonic() - started_s) * 1e9))
            self._paths.nsqd.log.info(f"200 GET /ping ({self._client}) {took}")
        return answer

    def _hand_over(self, data: bytes) -> None:
        self._paths.connections.discard(self)
        framework = self._make_framework()
        self._transport.set_protocol(framework)
        framework.connection_made(self._transport)
        framework.data_received(data)

    def pause_writing(self) -> None:
        self._transport.pause_reading()

    def resume_writing(self) -> None:
        self._transport.resume_reading()

    def close(self) -> None:
        """Close: the daemon stops."""
        self._transport.close()
