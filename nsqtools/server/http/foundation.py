"""What the HTTP sides of nsqd and nsqlookupd share: Go-like routing, errors, headers and logs.

A handler is a function from a `Call` to a `Reply` or to a coroutine that returns one, or raises
`HTTPRefusal`. Clients depend on details here: go-nsq reads a body only with the X-NSQ-Content-Type
header, nsqadmin parses ``{"message": ...}``, and a plain port of an nsqd that requires TLS answers
403 with the HTTPS port. Paths belong to handlers by the rules of Go's httprouter: one that differs
from a route by its case, a slash at the end, or superfluous slashes and dots is redirected to the
route; a known path with another method is refused with the methods it has.

Go's profiles (/debug/pprof) are of a program in Go, and are not there.
"""

from __future__ import annotations

import posixpath
import re
import time
from collections.abc import AsyncGenerator, Awaitable, Callable, Collection, Mapping
from dataclasses import dataclass, field
from html import escape
from typing import NamedTuple
from urllib.parse import quote, unquote_plus

from nsqtools.protocol.names import is_valid_name
from nsqtools.protocol.text import go_duration, go_json
from nsqtools.server.daemon_log import DaemonLog

_JSON = b"Content-Type: application/json; charset=utf-8\r\n"
_TEXT = b"Content-Type: text/plain; charset=utf-8\r\n"
_HTML = b"Content-Type: text/html; charset=utf-8\r\n"
_METRICS = b"Content-Type: text/plain; version=0.0.4; charset=utf-8\r\n"
_NSQ = b"X-Nsq-Content-Type: nsq; version=1.0\r\n"
BAD_ESCAPE = re.compile(r"%(?![0-9a-fA-F]{2})")
_NOT_LOGGED = ("/pub", "/mpub")
_SAFE_METHODS = ("GET", "HEAD", "OPTIONS")
_OWN_SITES = ("same-origin", "none")
_LOCAL = re.compile(
    r"(?:[^.]*|\d+\.\d+\.\d+\.\d+|\[.*\]|(?:.*\.)?localhost\.?)(?::\d*)?", re.IGNORECASE
)


class HTTPRefusal(Exception):
    """Answer with an error status and ``{"message": code}``."""

    def __init__(self, status: int, code: str) -> None:
        super().__init__(status, code)
        self.status = status
        self.code = code


class Reply(NamedTuple):
    """An answer; ``fields`` are lines of the head, each with its end."""

    status: int
    fields: bytes
    body: bytes = b""


class Stream(NamedTuple):
    """An answer that goes on: its pieces leave as they come."""

    status: int
    fields: bytes
    pieces: AsyncGenerator[bytes, None]


Handler = Callable[["Call"], Reply | Awaitable[Reply]]


@dataclass(slots=True, eq=False)
class Call:
    """A request; ``option`` is the route's parameter, ``path`` has no escapes any more.

    ``body`` is None if the request's has more than the ``limit`` that its handler reads.
    """

    method: str
    target: str
    path: str
    query_string: str
    headers: dict[str, str]
    is_old: bool  # of HTTP/1.0
    closes: bool  # the last one of its connection
    client: str  # host:port, "" on a unix socket
    option: str = ""
    body: bytes | None = b""
    handler: Handler = lambda call: _not_found(call)
    limit: int = 0
    started_s: float = field(default_factory=time.monotonic)

    def query(self) -> dict[str, str]:
        """Return the parameters of the query string, the first of each name.

        Raises `HTTPRefusal` 400 INVALID_REQUEST when it does not parse.
        """
        text = self.query_string
        is_plain = "%" not in text and "+" not in text  # as most are
        if ";" in text or (not is_plain and BAD_ESCAPE.search(text)):
            raise HTTPRefusal(400, "INVALID_REQUEST")
        query: dict[str, str] = {}
        for pair in text.split("&"):
            key, _, value = pair.partition("=")
            if is_plain and pair:
                query.setdefault(key, value)
            elif pair:
                query.setdefault(unquote_plus(key), unquote_plus(value))
        return query

    @property
    def declared_length(self) -> int:
        """The Content-Length, -1 without one."""
        return int(self.headers.get("content-length", -1))


Handlers = Mapping[tuple[str, str], Handler]


def required(query: Mapping[str, str], name: str) -> str:
    """Return a parameter, which may be empty. Raises `HTTPRefusal` 400 MISSING_ARG_NAME."""
    if name not in query:
        raise HTTPRefusal(400, f"MISSING_ARG_{name.upper()}")
    return query[name]


def topic_argument(query: Mapping[str, str]) -> str:
    """Return the topic. Raises `HTTPRefusal` 400 MISSING_ARG_TOPIC or INVALID_ARG_TOPIC."""
    return _name_argument(query, "topic")


def topic_and_channel_arguments(query: Mapping[str, str]) -> tuple[str, str]:
    """Return topic and channel. Raises `HTTPRefusal` 400 with the code of the first fault."""
    return _name_argument(query, "topic"), _name_argument(query, "channel")


def _name_argument(query: Mapping[str, str], name: str) -> str:
    value = required(query, name)
    if not is_valid_name(value):
        raise HTTPRefusal(400, f"INVALID_ARG_{name.upper()}")
    return value


def text_reply(text: str | bytes) -> Reply:
    """Answer with plain text."""
    body = text.encode() if isinstance(text, str) else text
    return Reply(200, _TEXT + _NSQ if body else _NSQ, body)


def json_reply(document: object, status: int = 200) -> Reply:
    """Answer with compact JSON."""
    return raw_json_reply(go_json(document), status)


def raw_json_reply(content: bytes, status: int = 200) -> Reply:
    """Answer with JSON that is encoded already."""
    return Reply(status, _JSON + _NSQ, content)


EMPTY_REPLY = Reply(200, _NSQ)


def plain_reply(text: str, status: int = 200) -> Reply:
    """Answer with text and without NSQ's header: /ping."""
    return Reply(status, _TEXT, text.encode())


def html_reply(page: str, status: int = 200, fields: bytes = b"") -> Reply:
    """Answer with a page."""
    return Reply(status, _HTML + fields, page.encode())


def metrics_reply(page: bytes) -> Reply:
    """Answer with a page in Prometheus' text format."""
    return Reply(200, _METRICS, page)


class ForeignCalls:
    """Calls that a web page made a browser send: the API has no passwords, so these are refused.

    A page of any site can POST to a port of the machine that shows it, and after DNS rebinding it
    can call the API under the page's own name. Browsers say so: ``Sec-Fetch-Site`` and ``Origin``
    of a state-changing call name the page, and ``Host`` is a name that is not ours. Programs send
    neither of the first two. The host is looked at only when only this machine can connect,
    and only DNS names with a dot are foreign: an address cannot be rebound, and names such as
    ``nsqd`` are those of containers. ``names`` are those of this host; None lets every ``Host``
    pass.
    """

    def __init__(self, names: Collection[str] | None) -> None:
        self._names = None if names is None else {name.lower() for name in names}

    def refusal(self, method: str, headers: Mapping[str, str]) -> str:
        """Return the code to refuse a call with, ``""`` when it may pass."""
        if method in _SAFE_METHODS:
            return ""
        host = headers.get("host", "")
        if self._names is not None and not _LOCAL.fullmatch(host):
            name = re.sub(r":\d*$", "", host).lower()
            if name not in self._names:
                return "FOREIGN_HOST"
        if headers.get("sec-fetch-site", "none").lower() not in _OWN_SITES:
            return "FOREIGN_ORIGIN"
        origin = headers.get("origin")
        if origin is not None and origin.partition("://")[2].lower() != host.lower():
            return "FOREIGN_ORIGIN"
        return ""


class HTTPApi:
    """The endpoints of one daemon, by ``(method, path)``; the end of a path may be ``:name``.

    ``body_limits`` are the most bytes that handlers read of a body; of one without a limit it is
    dropped. With a ``tls_required_port`` every request is refused with this HTTPS port.
    """

    def __init__(
        self,
        handlers: Handlers,
        log: DaemonLog,
        *,
        body_limits: Mapping[Handler, int] | None = None,
        tls_required_port: int | None = None,
        foreign: ForeignCalls | None = None,
    ) -> None:
        self._methods = sorted({method for method, _ in handlers})
        self._handlers = handlers
        self._body_limits = body_limits or {}
        self._log = log
        self._tls_required_port = tls_required_port
        self._foreign = foreign or ForeignCalls(None)

    def find(self, call: Call) -> None:
        """Set who answers a call of which the head is known, and how much of its body is read."""
        if self._tls_required_port is not None:
            body = b'{"message": "TLS_REQUIRED", "https_port": %d}' % self._tls_required_port
            call.handler = lambda call: raw_json_reply(body, 403)
        elif code := self._foreign.refusal(call.method, call.headers):
            call.handler = lambda call: _refuse(403, code)
        elif found := self._match(call.method, call.path):
            call.handler, call.option = found
            call.limit = self._body_limits.get(call.handler, 0)
        elif canonical := self._canonical(call.method, call.path):
            call.handler = lambda call: _redirect(call, canonical)
        elif allowed := {method for method in self._methods if self._match(method, call.path)}:
            fields = b"Allow: %b\r\n" % ", ".join(sorted({*allowed, "OPTIONS"})).encode()
            reply = Reply(200, b"")
            if call.method != "OPTIONS":
                reply = _refuse(405, "METHOD_NOT_ALLOWED")
            call.handler = lambda call: reply._replace(fields=fields + reply.fields)

    def _match(self, method: str, path: str) -> tuple[Handler, str] | None:
        if (handler := self._handlers.get((method, path))) is not None:
            return handler, ""
        head, _, last = path.rpartition("/")
        handler = self._handlers.get((method, f"{head}/:option"))
        return (handler, last) if handler is not None and last else None

    def _canonical(self, method: str, path: str) -> str | None:
        if path == "/":
            return None
        clean = posixpath.normpath("/" + path.lstrip("/"))
        for candidate in (path.removesuffix("/"), path + "/", clean, clean + "/"):
            if candidate and self._match(method, candidate):
                return candidate
        for known_method, route in self._handlers:
            if known_method == method and route.lower() in (clean.lower(), clean.lower() + "/"):
                return route
        return None

    def answer(self, call: Call) -> Reply | Awaitable[Reply]:
        """Answer a call, at once if it needs neither the disk nor steps."""
        try:
            reply = call.handler(call)
        except Exception as exc:
            return self._failure(exc)
        return reply if isinstance(reply, Reply) else self._wait_for(reply)

    async def _wait_for(self, reply: Awaitable[Reply]) -> Reply:
        try:
            return await reply
        except Exception as exc:
            return self._failure(exc)

    def _failure(self, exc: Exception) -> Reply:
        if isinstance(exc, HTTPRefusal):
            return _refuse(exc.status, exc.code)
        self._log.error(f"panic in HTTP handler - {exc!r}")
        return _refuse(500, "INTERNAL_ERROR")

    def report(self, call: Call, status: int) -> None:
        """Log a call that was answered, with its target as it was in the request, escaped."""
        if call.path not in _NOT_LOGGED:
            took = go_duration(int((time.monotonic() - call.started_s) * 1e9))
            self._log.info(f"{status} {call.method} {call.target} ({call.client}) {took}")


def _refuse(status: int, code: str) -> Reply:
    return json_reply({"message": code}, status)


def _not_found(call: Call) -> Reply:
    return _refuse(404, "NOT_FOUND")


def _redirect(call: Call, path: str) -> Reply:
    location = quote(path, "/:@!$&'()*+,;=~")
    if call.query_string:
        location += f"?{call.query_string}"
    field = b"Location: %b\r\n" % location.encode("latin-1")
    if call.method != "GET":
        return Reply(307, field)
    return html_reply(f'<a href="{escape(location)}">Moved Permanently</a>.\n\n', 301, field)
