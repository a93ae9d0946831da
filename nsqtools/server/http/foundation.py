"""What the HTTP sides of nsqd and nsqlookupd share: Go-like routing, errors, headers and logs.

A handler is a coroutine from a `Call` to a ``Response``, or raises `Refusal`. Clients depend on
details here: go-nsq reads a body only with the X-NSQ-Content-Type header, nsqadmin parses
``{"message": ...}``, and a plain port of an nsqd that requires TLS answers 403 with the HTTPS port.
"""

from __future__ import annotations

import re
import time
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass
from email.utils import formatdate
from html import escape
from urllib.parse import unquote_plus

from starlette.requests import ClientDisconnect, Request
from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from nsqtools.protocol.durations import go_duration
from nsqtools.protocol.go_text import go_json
from nsqtools.protocol.names import is_valid_name
from nsqtools.server.daemon_log import DaemonLog
from nsqtools.server.http.foreign_calls import ForeignCalls
from nsqtools.server.http.routes import Found, OtherMethods, Redirect, Routes

Handler = Callable[["Call"], Awaitable[Response]]

_NSQ_HEADERS = {"X-NSQ-Content-Type": "nsq; version=1.0"}
_JSON = "application/json; charset=utf-8"
_TEXT = "text/plain; charset=utf-8"
_METRICS = "text/plain; version=0.0.4; charset=utf-8"
_BAD_ESCAPE = re.compile(r"%(?![0-9a-fA-F]{2})")
_NOT_LOGGED = ("/pub", "/mpub")


class Refusal(Exception):
    """Answer with an error status and ``{"message": code}``."""

    def __init__(self, status: int, code: str) -> None:
        super().__init__(status, code)
        self.status = status
        self.code = code


class TooLarge(Exception):
    """A request body is longer than the caller wants to read."""


@dataclass(frozen=True, slots=True)
class Call:
    """A request that has found its handler; ``option`` is the route's parameter."""

    request: Request
    option: str = ""

    def query(self) -> dict[str, str]:
        """Return the parameters of the query string, the first of each name.

        Raises `Refusal` 400 INVALID_REQUEST when it does not parse.
        """
        text = self.request.scope["query_string"].decode("latin-1")
        if ";" in text or _BAD_ESCAPE.search(text):
            raise Refusal(400, "INVALID_REQUEST")
        query: dict[str, str] = {}
        for pair in text.split("&"):
            key, _, value = pair.partition("=")
            if pair:
                query.setdefault(unquote_plus(key), unquote_plus(value))
        return query

    async def body(self, limit: int) -> bytes:
        """Read the request's body. Raises `TooLarge` when it has more than ``limit`` bytes."""
        chunks = []
        left = limit
        async for chunk in self.request.stream():
            left -= len(chunk)
            if left < 0:
                raise TooLarge
            chunks.append(chunk)
        return b"".join(chunks)

    @property
    def declared_length(self) -> int:
        """The Content-Length, -1 without one."""
        return int(self.request.headers.get("content-length", -1))


def required(query: Mapping[str, str], name: str) -> str:
    """Return a parameter, which may be empty. Raises `Refusal` 400 MISSING_ARG_NAME."""
    if name not in query:
        raise Refusal(400, f"MISSING_ARG_{name.upper()}")
    return query[name]


def topic_argument(query: Mapping[str, str]) -> str:
    """Return the topic. Raises `Refusal` 400 MISSING_ARG_TOPIC or INVALID_ARG_TOPIC."""
    return _name_argument(query, "topic")


def topic_and_channel_arguments(query: Mapping[str, str]) -> tuple[str, str]:
    """Return the topic and the channel. Raises `Refusal` 400 with the code of the first fault."""
    return _name_argument(query, "topic"), _name_argument(query, "channel")


def _name_argument(query: Mapping[str, str], name: str) -> str:
    value = required(query, name)
    if not is_valid_name(value):
        raise Refusal(400, f"INVALID_ARG_{name.upper()}")
    return value


def text_reply(text: str | bytes, status: int = 200) -> Response:
    """Answer with plain text."""
    return Response(text, status, {**_NSQ_HEADERS, "Content-Type": _TEXT} if text else _NSQ_HEADERS)


def json_reply(document: object, status: int = 200) -> Response:
    """Answer with compact JSON."""
    return raw_json_reply(go_json(document), status)


def raw_json_reply(content: bytes, status: int = 200) -> Response:
    """Answer with JSON that is encoded already."""
    return Response(content, status, {**_NSQ_HEADERS, "Content-Type": _JSON})


def empty_reply() -> Response:
    """Answer 200 and nothing else."""
    return Response(b"", 200, _NSQ_HEADERS)


def plain_reply(text: str, status: int = 200) -> Response:
    """Answer with text and without NSQ's header: /ping and /debug/pprof."""
    return Response(text, status, {"Content-Type": _TEXT})


def metrics_reply(page: bytes) -> Response:
    """Answer with a page in Prometheus' text format."""
    return Response(page, 200, {"Content-Type": _METRICS})


class HTTPApi:
    """The ASGI application.

    With a ``tls_required_port`` every plain request is refused with this HTTPS port.
    """

    def __init__(
        self,
        handlers: Mapping[tuple[str, str], Handler],
        log: DaemonLog,
        *,
        tls_required_port: int | None = None,
        foreign: ForeignCalls | None = None,
    ) -> None:
        self._routes: Routes[Handler] = Routes(handlers)
        self._log = log
        self._tls_required_port = tls_required_port
        self._foreign = foreign or ForeignCalls(None)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            return
        started_s = time.monotonic()
        request = Request(scope, receive)
        try:
            response = await self._answer(request)
        except ClientDisconnect:
            return
        response.headers["Date"] = formatdate(usegmt=True)
        await response(scope, receive, send)
        if request.url.path not in _NOT_LOGGED:
            took = go_duration(int((time.monotonic() - started_s) * 1e9))
            client = f"{request.client.host}:{request.client.port}" if request.client else ""
            self._log.info(
                f"{response.status_code} {request.method} {_target(request)} ({client}) {took}"
            )

    async def _answer(self, request: Request) -> Response:
        if self._tls_required_port is not None and request.url.scheme == "http":
            body = f'{{"message": "TLS_REQUIRED", "https_port": {self._tls_required_port}}}'
            headers = {**_NSQ_HEADERS, "Content-Type": _JSON}
            return Response(body, 403, headers)
        if refusal := self._foreign.refusal(request.method, request.headers):
            return _refuse(403, refusal)
        path = request.scope["path"]
        match self._routes.find(request.method, path):
            case Found(handler, option):
                return await self._handle(handler, Call(request, option))
            case Redirect(canonical):
                return _redirect(request, canonical)
            case OtherMethods(allow) if not allow:
                return _refuse(404, "NOT_FOUND")
            case OtherMethods(allow):
                if request.method == "OPTIONS":
                    return Response(b"", 200, {"Allow": allow})
                refused = _refuse(405, "METHOD_NOT_ALLOWED")
                refused.headers["Allow"] = allow
                return refused

    async def _handle(self, handler: Handler, call: Call) -> Response:
        try:
            return await handler(call)
        except Refusal as refusal:
            return _refuse(refusal.status, refusal.code)
        except ClientDisconnect:
            raise
        except Exception as exc:
            self._log.error(f"panic in HTTP handler - {exc!r}")
            return _refuse(500, "INTERNAL_ERROR")


def _refuse(status: int, code: str) -> Response:
    return json_reply({"message": code}, status)


def _target(request: Request) -> str:
    """Return path and query as they stood in the request: escaped, so that a log line is one."""
    path: bytes = request.scope["raw_path"]
    query: bytes = request.scope["query_string"]
    return (path + b"?" + query if query else path).decode("latin-1")


def _redirect(request: Request, path: str) -> Response:
    query = request.scope["query_string"].decode("latin-1")
    location = f"{path}?{query}" if query else path
    if request.method != "GET":
        return Response(b"", 307, {"Location": location})
    page = f'<a href="{escape(location)}">Moved Permanently</a>.\n\n'
    headers = {"Location": location, "Content-Type": "text/html; charset=utf-8"}
    return Response(page, 301, headers)
