"""HTTP/1.1 in the daemon's own loop, as Go's net/http and httprouter serve it.

A handler returns a `Response` to a `Request`, or a coroutine for one, or raises `HTTPRefusal`.
Clients depend on details: go-nsq reads a body only with the X-NSQ-Content-Type header, nsqadmin
parses ``{"message": ...}``, and the plain port of an nsqd that requires TLS answers 403 with the
HTTPS port. Routing follows Go's httprouter. A path that differs from a route only by case, by a
final slash, or by superfluous slashes and dots is redirected to the route. A route that does not
have the requested method is refused with a list of its methods.

httptools parses the requests. A connection answers its requests in order, most of them immediately.
While an answer waits for the disk, or is computed in steps, the connection reads no more requests.

Each step of a client has a time limit: sending a head, sending a body, reading a response. The
server closes a connection that exceeds its limit, and the oldest of too many idle connections.

The server also serves `nsq web`, where an `Api` may answer with a `StreamedResponse`.
"""

from __future__ import annotations

import asyncio
import posixpath
import re
import socket
import time
from collections import deque
from collections.abc import AsyncGenerator, Awaitable, Callable, Collection, Iterable, Mapping
from contextlib import aclosing
from dataclasses import dataclass, field
from email.utils import formatdate
from functools import lru_cache
from html import escape
from http import HTTPStatus
from itertools import islice
from ssl import SSLContext
from typing import NamedTuple, Protocol, cast
from urllib.parse import quote, unquote, unquote_plus, urlsplit

import httptools

from nsqtools.http.cross_site import cross_site_refusal
from nsqtools.http.listen import (
    accept,
    client_of,
    common_name_of,
    read_in_pieces,
    real_address,
    stop_listening,
)
from nsqtools.http.loop_meter import page_in_steps
from nsqtools.protocol.names import Address, is_valid_name
from nsqtools.protocol.text import go_duration, go_json
from nsqtools.records.prometheus import Metric, metric_lines

_JSON = b"Content-Type: application/json; charset=utf-8\r\n"
_TEXT = b"Content-Type: text/plain; charset=utf-8\r\n"
_HTML = b"Content-Type: text/html; charset=utf-8\r\n"
_METRICS = b"Content-Type: text/plain; version=0.0.4; charset=utf-8\r\n"
_NSQ = b"X-Nsq-Content-Type: nsq; version=1.0\r\n"
BAD_ESCAPE = re.compile(r"%(?![0-9a-fA-F]{2})")
_LENGTH = re.compile(rb"(?<=\n)content-length:[ \t]*([0-9]+)[ \t]*\r\n", re.I)
_NOT_LOGGED = ("/pub", "/mpub")


class HTTPRefusal(Exception):
    """Answer with an error status and ``{"message": code}``: these are its arguments."""


class Response(NamedTuple):
    """A response; ``fields`` are header lines, each with its CRLF."""

    status: int
    fields: bytes
    body: bytes = b""


_EMPTY = Response(200, _NSQ)


class StreamedResponse(NamedTuple):
    """A response without a length, whose pieces are sent as they are produced."""

    status: int
    fields: bytes
    pieces: AsyncGenerator[bytes, None]


RouteHandler = Callable[["Request"], Response | Awaitable[Response | None] | None]
"""None is an empty response."""


@dataclass(slots=True, eq=False)
class Request:
    """A request; ``option`` is the parameter of the route, ``path`` is unescaped.

    ``body`` is None if it is longer than ``limit``, the bytes that the handler reads.
    """

    method: str
    target: str
    path: str
    query_string: str
    headers: dict[str, str]
    is_http10: bool  # of HTTP/1.0
    closes: bool  # the connection closes after it
    client: Address | None  # None on a unix socket
    common_name: str = ""  # of the client's certificate
    option: str = ""
    body: bytes | None = b""
    handler: RouteHandler = lambda request: _refuse(404, "NOT_FOUND")
    limit: int = 0
    started_s: float = field(default_factory=time.monotonic)

    def repeated(self, client: Address | None, common_name: str, body: bytes) -> Request:
        """Return a request with the same head."""
        return Request(
            self.method,
            self.target,
            self.path,
            self.query_string,
            self.headers,
            self.is_http10,
            self.closes,
            client,
            common_name,
            self.option,
            body,
            self.handler,
            self.limit,
        )

    def query(self) -> dict[str, str]:
        """Return the parameters of the query string, the first of each name.

        Raises `HTTPRefusal` 400 INVALID_REQUEST when it does not parse.
        """
        return dict(_parse_query(self.query_string))

    def argument(self, name: str, invalid: str = "") -> str:
        """Return a parameter, which may be empty. Raises `HTTPRefusal` 400 MISSING_ARG_NAME.

        With a code ``invalid`` the value must be the name of a topic or channel.
        """
        query = self.query()
        if name not in query:
            raise HTTPRefusal(400, f"MISSING_ARG_{name.upper()}")
        if invalid and not is_valid_name(query[name]):
            raise HTTPRefusal(400, invalid)
        return query[name]

    def topic_and_channel(self) -> tuple[str, str]:
        """Return both names. Raises `HTTPRefusal` 400 MISSING_ARG_NAME or INVALID_ARG_NAME."""
        topic = self.argument("topic", "INVALID_ARG_TOPIC")
        return topic, self.argument("channel", "INVALID_ARG_CHANNEL")

    @property
    def declared_length(self) -> int:
        """The Content-Length, -1 without one."""
        return int(self.headers.get("content-length", -1))


@lru_cache(256)  # publishers repeat a few
def _parse_query(text: str) -> Mapping[str, str]:
    if ";" in text or BAD_ESCAPE.search(text):
        raise HTTPRefusal(400, "INVALID_REQUEST")
    query: dict[str, str] = {}
    for pair in filter(None, text.split("&")):
        key, _, value = pair.partition("=")
        query.setdefault(unquote_plus(key), unquote_plus(value))
    return query


Handlers = Mapping[tuple[str, str], RouteHandler]


def text_response(text: str | bytes) -> Response:
    """Answer with plain text."""
    body = text.encode() if isinstance(text, str) else text
    return Response(200, _TEXT + _NSQ if body else _NSQ, body)


def json_response(document: object, status: int = 200) -> Response:
    """Answer with compact JSON."""
    return raw_json_response(go_json(document), status)


def raw_json_response(content: bytes, status: int = 200) -> Response:
    """Answer with encoded JSON."""
    return Response(status, _JSON + _NSQ, content)


def plain_response(text: str, status: int = 200) -> Response:
    """Answer with text and without NSQ's header: /ping."""
    return Response(status, _TEXT, text.encode())


async def metrics_response(metrics: Iterable[Metric]) -> Response:
    """Answer with a page in Prometheus' text format, which is encoded in steps."""
    return Response(200, _METRICS, await page_in_steps(metric_lines(metrics)))


class RequestLog(Protocol):
    """The log of a daemon that serves an API."""

    def info(self, text: str) -> None:
        """Log an answered request."""

    def error(self, text: str) -> None:
        """Log a handler that raised an unexpected exception."""


@dataclass(eq=False)
class HTTPApi:
    """The endpoints of one daemon, by ``(method, path)``; the end of a path may be ``:name``.

    ``own_names`` are the names for `cross_site_refusal`. ``body_limits`` has the longest body of
    each handler that reads one; bodies for other handlers are dropped. With ``tls_required_port``
    every request is refused, and the refusal names this HTTPS port.
    """

    handlers: Handlers
    log: RequestLog
    body_limits: Mapping[RouteHandler, int] = field(default_factory=dict)
    tls_required_port: int | None = None
    own_names: Collection[str] | None = None

    def route(self, request: Request) -> None:
        """Set the handler of a request, and how many bytes of its body to read."""
        if self.tls_required_port is not None:
            body = b'{"message": "TLS_REQUIRED", "https_port": %d}' % self.tls_required_port
            request.handler = lambda request: raw_json_response(body, 403)
        elif code := cross_site_refusal(request.method, request.headers, self.own_names):
            request.handler = lambda request: _refuse(403, code)
        elif found := self._match(request.method, request.path):
            request.handler, request.option = found
            request.limit = self.body_limits.get(request.handler, 0)
        elif request.method == "OPTIONS" and request.target == "*":
            request.handler = lambda request: Response(200, b"")
        elif canonical := self._canonical(request.method, request.path):
            request.handler = lambda request: _redirect(request, canonical)
        elif allowed := {name for name, _ in self.handlers if self._match(name, request.path)}:
            fields = b"Allow: %b\r\n" % ", ".join(sorted({*allowed, "OPTIONS"})).encode()
            response = Response(200, b"")
            if request.method != "OPTIONS":
                response = _refuse(405, "METHOD_NOT_ALLOWED")
            request.handler = lambda request: response._replace(fields=fields + response.fields)

    def _match(self, method: str, path: str) -> tuple[RouteHandler, str] | None:
        if (handler := self.handlers.get((method, path))) is not None:
            return handler, ""
        head, _, last = path.rpartition("/")
        handler = self.handlers.get((method, f"{head}/:option"))
        return (handler, last) if handler is not None and last else None

    def _canonical(self, method: str, path: str) -> str | None:
        if path == "/":
            return None
        clean = posixpath.normpath("/" + path.lstrip("/"))
        for candidate in (path.removesuffix("/"), path + "/", clean, clean + "/"):
            if candidate and self._match(method, candidate):
                return candidate
        spellings = (clean.lower(), clean.lower() + "/")
        routes = (route for known, route in self.handlers if known == method)
        return next((route for route in routes if route.lower() in spellings), None)

    def answer(self, request: Request) -> Response | Awaitable[Response]:
        """Answer a request, immediately if it needs neither the disk nor steps."""
        try:
            response = request.handler(request)
        except Exception as exc:
            return self._failure(exc)
        if response is None or isinstance(response, Response):
            return response or _EMPTY
        return self._wait_for(response)

    async def _wait_for(self, response: Awaitable[Response | None]) -> Response:
        try:
            return await response or _EMPTY
        except Exception as exc:
            return self._failure(exc)

    def _failure(self, exc: Exception) -> Response:
        if isinstance(exc, HTTPRefusal):
            return _refuse(*exc.args)
        self.log.error(f"panic in HTTP handler - {exc!r}")
        return _refuse(500, "INTERNAL_ERROR")

    def report(self, request: Request, status: int) -> None:
        """Log an answered request, with its target still escaped."""
        if request.path not in _NOT_LOGGED:
            took = go_duration(int((time.monotonic() - request.started_s) * 1e9))
            self.log.info(
                f"{status} {request.method} {request.target} ({request.client or ''}) {took}"
            )


def _refuse(status: int, code: str) -> Response:
    return json_response({"message": code}, status)


def _redirect(request: Request, path: str) -> Response:
    location = quote(path, "/:@!$&'()*+,;=~")
    if request.query_string:
        location += f"?{request.query_string}"
    field = b"Location: %b\r\n" % location.encode("latin-1")
    if request.method != "GET":
        return Response(307, field)
    page = f'<a href="{escape(location)}">Moved Permanently</a>.\n\n'
    return Response(301, _HTML + field, page.encode())


# -- connections -----------------------------------------------------------------------------------

_LINGER_S = 0.5  # a client that still sends can read the answer before the reset
_MAX_HEAD = (1 << 20) + 4096
_SURPLUS_S = 5.0  # a JVM that has just started takes 2 s to write on 2,000 connections
_HEAD_S = 10.0  # from the first byte of a request to the end of its head
_BODY_S = 30.0
_SLOWEST_BODY = 16 << 10  # bytes a second, in addition to _BODY_S
_READ_S = 60.0  # for an answer that fills the buffers of the system
_MAX_DRAINED = 256 << 10  # bytes of a body that no handler reads, to keep the connection
_MAX_TARGET = 1 << 16  # Go bounds the head only in sum; a target of 1 MB takes 0.2 s to read
_ANSWERS_OF_A_TURN = 100
_HOST = re.compile(r"[!$%&'()*+,\-.:;=\[\]_~0-9A-Za-z]*")
_CONTINUE = b"HTTP/1.1 100 Continue\r\n\r\n"
_REASONS = {int(status): status.phrase.encode() for status in HTTPStatus}
_REASONS[413] = b"Request Entity Too Large"  # Python has other names for it
_WITHOUT_BODY = (204, 304)
_MAX_HEADS = 256  # of at most 1 KiB: 1 MB as objects
_MAX_HEAD_KEPT = 1024


class _Refused(Exception):
    """Stop reading from this connection, and answer with this status."""

    def __init__(self, status: int, why: bytes = b"", *, text: bytes = b"") -> None:
        super().__init__(status)
        reason = b"%d %b%b" % (status, _REASONS[status], why and b": " + why)
        self.answer = (
            b"HTTP/1.1 %b\r\nContent-Type: text/plain; charset=utf-8\r\n"
            b"Connection: close\r\n\r\n%b" % (reason, text or reason)
        )


class Api(Protocol):
    """The application of a server; its methods must not block or raise."""

    def route(self, request: Request) -> None:
        """Set the body limit of a request whose head is complete."""

    def answer(self, request: Request) -> Response | Awaitable[Response | StreamedResponse]:
        """Answer a request."""

    def report(self, request: Request, status: int) -> None:
        """Log the status of an answered request."""


def _as_go_reads(data: bytes) -> bytes:
    """Return data with its head rewritten where llhttp refuses what Go accepts of old programs.

    A head with only LF gets CRLF: the leniency of llhttp for LF would also accept a lone CR, which
    moves boundaries. Of several equal Content-Length fields one is left.
    """
    line_end = data.find(b"\n")
    if line_end > 0 and data[line_end - 1] != ord("\r"):
        end = data.find(b"\n\n")
        if end >= 0 and data.find(b"\r", 0, end) < 0:
            data = data[:end].replace(b"\n", b"\r\n") + b"\r\n\r\n" + data[end + 2 :]
    end = data.find(b"\r\n\r\n")
    if data[: max(0, end)].lower().count(b"\ncontent-length:") > 1:
        lengths = _LENGTH.findall(data, 0, end + 2)
        if len(set(lengths)) == 1:
            head = _LENGTH.sub(b"", data[: end + 2])
            data = b"%bContent-Length: %b%b" % (head, lengths[0], data[end:])
    return data


class Limits(NamedTuple):
    """Limits of a server, in addition to the time of each step."""

    idle_s: float = 120.0  # between two requests
    most_idle: int = 8192
    most_idle_of_one: int = 1024
    finish_s: float = 1.0  # at the end, for requests that are being answered
    # For heads that Go accepts. Not where a proxy in front may read another head.
    is_lenient: bool = False


class IdleConnections:
    """Connections that wait for their client to send a request or a body, or to read a response.

    Without limits a silent client could occupy all connections of a server. Each wait has a time
    limit. If too many connections wait, in total or from one address, the oldest are closed.
    Connections whose request is being answered are not included.

    Trap: the request of a new connection may be on its way. A client that sends 2,000 requests at
    the same time opens 2,000 connections before it writes, so the limit of one address applies to
    connections that have waited for `_SURPLUS_S`. The total is limited immediately.
    """

    def __init__(self, most: int, most_of_one: int) -> None:
        self._most = most
        self._most_of_one = most_of_one
        # Begin and end of the wait, and the client's host; the oldest wait is first.
        self._waiting: dict[_Connection, tuple[float, float, str]] = {}
        self._of: dict[str, dict[_Connection, None]] = {}

    def add(self, connection: _Connection, host: str, now_s: float, limit_s: float) -> None:
        """Start the wait of a connection, which ends after ``limit_s``."""
        self.remove(connection)
        self._of.setdefault(host, {})[connection] = None
        self._waiting[connection] = now_s, now_s + limit_s, host
        if len(self._waiting) > self._most:
            self._close(next(iter(self._waiting)))

    def remove(self, connection: _Connection) -> None:
        """End the wait of a connection, because it is being answered or has closed."""
        if (wait := self._waiting.pop(connection, None)) is not None:
            of_host = self._of[wait[2]]
            del of_host[connection]
            if not of_host:
                del self._of[wait[2]]

    def close_late(self, now_s: float) -> None:
        """Close connections after their time limit, and the surplus of each address.

        Call this every second.
        """
        waiting = self._waiting
        late = [connection for connection, (_, ends_s, _) in waiting.items() if ends_s <= now_s]
        for of_host in self._of.values():
            surplus = islice(of_host, max(0, len(of_host) - self._most_of_one))
            late += [idle for idle in surplus if waiting[idle][0] + _SURPLUS_S <= now_s]
        for connection in late:
            self._close(connection)

    def _close(self, connection: _Connection) -> None:
        self.remove(connection)
        connection.abort()


@dataclass(eq=False)
class HTTPServer:
    """One listening socket of an HTTP API."""

    api: Api
    listener: socket.socket
    tls_context: SSLContext | None
    limits: Limits
    connections: set[_Connection] = field(default_factory=set)

    def __post_init__(self) -> None:
        self.idle = IdleConnections(self.limits.most_idle, self.limits.most_idle_of_one)
        self.heads: dict[bytes, Request] = {}  # requests by their head, for `_Connection._repeat`

    async def start(self) -> None:
        """Start serving."""
        self._server = await accept(self.listener, lambda: _Connection(self), self.tls_context)
        self._sweeps = asyncio.create_task(self._sweep())

    async def stop(self) -> None:
        """Close everything, after at most ``finish_s`` for the requests that are being answered."""
        stop_listening(self._server)
        self._sweeps.cancel()
        tasks = [task for connection in list(self.connections) if (task := connection.stop())]
        if tasks:
            await asyncio.wait(tasks, timeout=self.limits.finish_s)
        for connection in list(self.connections):
            connection.close()

    async def _sweep(self) -> None:
        while True:
            await asyncio.sleep(1.0)
            self.idle.close_late(time.monotonic())


@lru_cache(1)
def _date(now_s: int) -> bytes:
    return formatdate(now_s, usegmt=True).encode()


class _Connection(asyncio.Protocol):
    def __init__(self, server: HTTPServer) -> None:
        self._server = server
        self._api = server.api
        self._parser = self._new_parser()
        self._transport = cast(asyncio.Transport, None)  # until connection_made
        self._client: Address | None = None
        self._common_name = ""
        self._target = b""
        self._headers: dict[str, str] = {}
        self._request: Request | None = None  # whose body is being read
        self._body: bytes | bytearray = b""  # which may come in a million chunks
        self._body_size = 0
        self._declared = -1
        self._is_awaited = False  # whether _CONTINUE is due after the answers to earlier requests
        self._repeated: dict[str, list[str]] = {}  # fields whose name came again
        self._head_size = 0  # bytes that came since the last of a body
        self._is_between_requests = True  # whether the parser has no part of a request
        self._requests: deque[Request] = deque()  # to be answered
        self._task: asyncio.Task[None] | None = None  # answers one
        self._is_last = False  # no further bytes are read
        self._farewell: bytes | None = None  # sent after the answers, to a client that still sends
        self._stream_room: asyncio.Event | None = None  # of a stream: the client reads
        self._is_full = False  # the client reads too slowly
        self._waits_for_s = 0.0  # the time that the present step has

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast(asyncio.Transport, transport)
        read_in_pieces(transport)
        self._server.connections.add(self)
        self._client = client_of(transport)
        self._common_name = common_name_of(transport.get_extra_info("peercert"))
        self._wait_for(_HEAD_S)

    def connection_lost(self, exc: Exception | None) -> None:
        self._server.connections.discard(self)
        self._server.idle.remove(self)
        self._requests.clear()
        if self._task is not None and self._stream_room is not None:
            self._task.cancel()

    def eof_received(self) -> bool:
        is_busy = bool(self._requests) or (self._task is not None and self._stream_room is None)
        self._is_last = True
        return is_busy and self._transport.get_extra_info("sslcontext") is None

    def stop(self) -> asyncio.Task[None] | None:
        """Close immediately, or after the task that is answering, which is returned."""
        self._is_last = True
        self._requests.clear()
        if self._task is None:
            self._transport.close()
        return self._task

    def abort(self) -> None:
        """Close immediately, because the client has exceeded a limit."""
        self._requests.clear()
        self._transport.abort()

    def close(self) -> None:
        """Close, and cancel the task that is answering."""
        if self._task is not None:
            self._task.cancel()
        self._transport.close()

    def data_received(self, data: bytes) -> None:
        if self._is_last:
            return
        if self._repeat(data):
            self._answer()
            return
        self._head_size += len(data)
        try:
            self._parse_and_keep(data)
            if self._head_size > _MAX_HEAD:
                raise _Refused(431)
        except (httptools.HttpParserError, _Refused) as exc:
            if not self._is_last:
                refused = exc if isinstance(exc, _Refused) else exc.__context__
                if not isinstance(refused, _Refused):
                    refused = _Refused(400)
                self._end(refused.answer)
        self._answer()

    def _repeat(self, data: bytes) -> bool:
        """Accept a whole request with the same head as an earlier one, without the parser.

        Programs send the same few heads. The parser takes a third of the time of such a request.
        """
        if not self._is_between_requests or self._requests or self._task is not None:
            return False
        body_at = data.find(b"\r\n\r\n", 0, _MAX_HEAD_KEPT) + 4
        earlier = self._server.heads.get(data[:body_at])
        if earlier is None or len(data) - body_at != earlier.declared_length:
            return False
        self._requests.append(earlier.repeated(self._client, self._common_name, data[body_at:]))
        self._waits_for_s = 0.0
        return True

    def _parse_and_keep(self, data: bytes) -> None:
        """Parse what was read, and keep the head of a request that arrived alone and whole."""
        is_alone = self._is_between_requests and not self._requests
        if is_alone and self._server.limits.is_lenient:
            data = _as_go_reads(data)
        self._parse(data)
        if not (is_alone and self._is_between_requests and self._requests) or self._is_last:
            return
        request = self._requests[0]
        body_at = data.find(b"\r\n\r\n", 0, _MAX_HEAD_KEPT) + 4
        is_whole = 0 < len(data) - body_at == request.declared_length <= request.limit
        if is_whole and "expect" not in request.headers:
            if len(self._server.heads) == _MAX_HEADS:
                self._server.heads.clear()
            self._server.heads[data[:body_at]] = request.repeated(None, "", b"")

    def _new_parser(self) -> httptools.HttpRequestParser:
        parser = httptools.HttpRequestParser(self)
        # Go accepts these spaces, which some old programs send. They do not move a boundary.
        parser.set_dangerous_leniencies(lenient_spaces_after_chunk_size=True)
        return parser

    def _parse(self, data: bytes) -> None:
        """Parse what was read. No request is upgraded to another protocol.

        Java's HttpClient and ``curl --http2`` offer one with every first request, and RFC 9110 lets
        a server ignore that. llhttp ends at the head of such a request, whatever its body is, and
        has no way back: a new parser gets a head that declares the same body, and then the body.
        """
        while True:
            try:
                return self._parser.feed_data(data)
            except httptools.HttpParserUpgrade as upgrade:
                request = cast(Request, self._request)
                framing = ("content-length", "transfer-encoding")
                kept = [
                    f"{name}: {request.headers[name]}"
                    for name in framing
                    if name in request.headers
                ]
                connection = "Connection: close" if request.closes else "Connection: keep-alive"
                head = "\r\n".join(["POST / HTTP/1.1", connection, *kept, "", ""])
                self._parser = self._new_parser()
                data = head.encode("latin-1") + data[upgrade.args[0] :]

    def _end(self, farewell: bytes) -> None:
        self._is_last = True
        self._farewell = farewell

    # what the parser finds

    def on_message_begin(self) -> None:
        self._is_between_requests = False

    def on_url(self, piece: bytes) -> None:
        if self._request is None:  # else it is a head of `_parse`
            self._target += piece

    def on_header(self, name: bytes, value: bytes) -> None:
        if self._request is None:  # else it follows the chunks of a body, or is of `_parse`
            key = name.decode("latin-1").lower()
            if key == "host" and key in self._headers:
                raise _Refused(400)
            text = value.decode("latin-1")
            if key in self._headers:  # joined once: there may be 200,000 of them
                self._repeated.setdefault(key, [self._headers[key]]).append(text)
            else:
                self._headers[key] = text

    def on_headers_complete(self) -> None:
        if self._request is not None:
            return  # the replacement head that `_parse` feeds
        self._join_repeated_headers()
        self._check_head()
        target, path, query_string = self._parse_target()
        request = self._request = Request(
            self._parser.get_method().decode(),
            target,
            path,
            query_string,
            self._headers,
            is_http10=self._parser.get_http_version() == "1.0",
            closes=not self._parser.should_keep_alive(),
            client=self._client,
            common_name=self._common_name,
        )
        self._api.route(request)
        self._plan_body(request)

    def _join_repeated_headers(self) -> None:
        for key, texts in self._repeated.items():
            self._headers[key] = ", ".join(texts)
        self._repeated.clear()

    def _check_head(self) -> None:
        """Raise `_Refused` for a head that Go's net/http refuses."""
        version, headers = self._parser.get_http_version(), self._headers
        if version == "0.9":
            raise _Refused(400)
        if "host" not in headers and version != "1.0":
            raise _Refused(400, b"missing required Host header")
        if len(self._target) > _MAX_TARGET:
            raise _Refused(414)
        if headers.get("transfer-encoding", "chunked").lower() != "chunked":
            raise _Refused(501, text=b"Unsupported transfer encoding")

    def _parse_target(self) -> tuple[str, str, str]:
        """Return the target, its path without escapes, and its query string."""
        target = self._target.decode("latin-1")
        path, _, query_string = target.partition("?")
        # A client that takes this server for a proxy sends a whole URL.
        if not path.startswith("/"):
            parts = urlsplit(target)
            path = parts.path
            if parts.netloc:
                self._headers["host"] = parts.netloc
        if "%" in path:
            if BAD_ESCAPE.search(path):
                raise _Refused(400)
            path = unquote(path)
        if not _HOST.fullmatch(self._headers.get("host", "")):
            raise _Refused(400, b"malformed Host header")
        return target, path, query_string

    def _plan_body(self, request: Request) -> None:
        """Decide whether to read the body, and tell a client that waits for "100 Continue"."""
        length = self._declared = request.declared_length
        if length > max(request.limit, _MAX_DRAINED):
            self._refuse_body(request)
        if (expectation := request.headers.get("expect")) is None:
            return
        if expectation.lower() != "100-continue":
            request.handler = lambda request: Response(417, b"")
            self._refuse_body(request)
        if length > 0 or "transfer-encoding" in request.headers:
            if not 0 < max(length, 1) <= request.limit:
                self._refuse_body(request)
            if self._requests or self._task is not None:
                self._is_awaited = True
            else:
                self._transport.write(_CONTINUE)

    def _refuse_body(self, request: Request) -> None:
        """Answer without the body, and close: the parser is made to stop."""
        request.body, request.closes = None, True
        self._requests.append(request)
        self._end(b"")
        raise _Refused(413)

    def on_body(self, chunk: bytes) -> None:
        request = cast(Request, self._request)
        self._head_size = 0
        self._body_size += len(chunk)
        if self._body_size <= request.limit:
            if not self._body:
                self._body = chunk
            else:
                if isinstance(self._body, bytes):
                    self._body = bytearray(self._body)
                self._body += chunk
            return
        self._body = b""
        request.body = None
        if self._body_size > max(request.limit, _MAX_DRAINED):
            self._refuse_body(request)

    def on_message_complete(self) -> None:
        request = cast(Request, self._request)
        if self._parser.should_upgrade():
            return  # its body comes: see `_parse`
        if 0 < self._declared != self._body_size:
            raise _Refused(400)  # no handler takes a part for the whole
        if request.body is not None:
            request.body = bytes(self._body)
        self._requests.append(request)
        self._is_last = request.closes
        self._request = None
        self._target, self._headers, self._body = b"", {}, b""
        self._body_size = self._head_size = 0
        self._is_awaited = False  # the body came without it
        self._waits_for_s = 0.0  # the next request has its own time
        self._is_between_requests = True

    # answers

    def _answer(self) -> None:
        answers: list[bytes] = []
        while self._requests and self._task is None and not self._is_full:
            if len(answers) == _ANSWERS_OF_A_TURN:
                asyncio.get_running_loop().call_soon(self._answer)
                break
            request = self._requests.popleft()
            response = self._api.answer(request)
            if isinstance(response, Response):
                answers.append(self._encoded(request, response))
            else:
                self._task = asyncio.get_running_loop().create_task(self._wait(request, response))
        if answers:
            self._transport.write(b"".join(answers))
        if self._requests:
            self._transport.pause_reading()
        self._note()
        if self._requests or self._task is not None:
            return  # the end of that task calls this again
        if self._is_awaited:
            self._is_awaited = False
            self._transport.write(_CONTINUE)
        if self._farewell is not None:
            self._transport.write(self._farewell)
            self._farewell = None
            if self._transport.can_write_eof():
                self._transport.write_eof()
            self._transport.resume_reading()
            asyncio.get_running_loop().call_later(_LINGER_S, self._transport.close)
        elif self._is_last:
            self._transport.close()
        elif not self._is_full:
            self._transport.resume_reading()

    def _note(self) -> None:
        """Set the time limit for the next step of the client."""
        if self._is_full:
            self._wait_for(_READ_S)
        elif self._requests or self._task is not None:
            self._waits_for_s = 0.0
            self._server.idle.remove(self)
        elif (request := self._request) is not None:
            length = request.declared_length if request.declared_length >= 0 else request.limit
            self._wait_for(_BODY_S + length / _SLOWEST_BODY)
        elif self._head_size:
            self._wait_for(_HEAD_S)
        else:
            self._wait_for(self._server.limits.idle_s)

    def _wait_for(self, limit_s: float) -> None:
        if limit_s != self._waits_for_s and not self._transport.is_closing():
            self._waits_for_s = limit_s
            host = self._client.host if self._client is not None else ""
            self._server.idle.add(self, host, time.monotonic(), limit_s)

    async def _wait(
        self, request: Request, response: Awaitable[Response | StreamedResponse]
    ) -> None:
        try:
            answer = await response
            if isinstance(answer, StreamedResponse):
                await self._stream(request, answer)
        finally:
            self._task = self._stream_room = None
        if not self._transport.is_closing():
            if isinstance(answer, Response):
                self._transport.write(self._encoded(request, answer))
            self._answer()

    async def _stream(self, request: Request, stream: StreamedResponse) -> None:
        """Write the pieces of a response as fast as the client reads them."""
        self._stream_room = room = asyncio.Event()
        self._is_last |= request.is_http10
        framing = b"" if request.is_http10 else b"Transfer-Encoding: chunked\r\n"
        async with aclosing(stream.pieces):
            if self._transport.is_closing():  # the client left before there was an answer
                return
            self._transport.write(self._head(request, stream.status, stream.fields, framing))
            async for piece in stream.pieces:
                if piece:
                    self._transport.write(
                        piece if request.is_http10 else b"%x\r\n%b\r\n" % (len(piece), piece)
                    )
                while self._is_full:
                    room.clear()
                    await room.wait()
        if not request.is_http10:
            self._transport.write(b"0\r\n\r\n")

    def _encoded(self, request: Request, response: Response) -> bytes:
        status, fields, body = response
        length = b"" if status in _WITHOUT_BODY else b"Content-Length: %d\r\n" % len(body)
        head = self._head(request, status, fields, length)
        return head + body if request.method != "HEAD" else head

    def _head(self, request: Request, status: int, fields: bytes, framing: bytes) -> bytes:
        self._api.report(request, status)
        connection = b""
        if request.closes != request.is_http10:
            connection = (
                b"Connection: close\r\n" if request.closes else b"Connection: keep-alive\r\n"
            )
        return b"HTTP/1.%d %d %b\r\n%bDate: %b\r\n%b%b\r\n" % (
            not request.is_http10,
            status,
            _REASONS[status],
            fields,
            _date(int(time.time())),
            framing,
            connection,
        )

    def pause_writing(self) -> None:
        self._is_full = True
        self._transport.pause_reading()
        self._note()

    def resume_writing(self) -> None:
        self._is_full = False
        if self._stream_room is not None:
            self._stream_room.set()
        self._answer()


async def serve_api(
    name: str,
    listener: socket.socket,
    handlers: Handlers,
    log: RequestLog,
    broadcast_address: str,
    *,
    tls_context: SSLContext | None = None,
    body_limits: Mapping[RouteHandler, int] | None = None,
    tls_required_port: int | None = None,
) -> HTTPServer:
    """Start serving the API of a daemon.

    See `HTTPApi` for ``body_limits`` and ``tls_required_port``. If only this machine can connect,
    requests must name this host, which protects against DNS rebinding.
    """
    address = real_address(listener)
    is_local = address.startswith(("127.", "[::1]:"))
    names = {broadcast_address, socket.gethostname()} if is_local else None
    api = HTTPApi(handlers, log, body_limits or {}, tls_required_port, names)
    server = HTTPServer(api, listener, tls_context, Limits(is_lenient=True))
    await server.start()
    log.info(f"{name}: listening on {address}")
    return server
