"""The application: what is in front of every route, and the routes.

gate     Host, other sites, size of the body, who asks; safety headers on every answer
/ping    OK
/api     nsqadmin's, for scripts
/metrics the whole cluster for Prometheus
the rest the pages

`WebServer` serves it until it is stopped: uvicorn, in the ordinary way, on a socket of our own.

Traps: an answer that goes on (server-sent events) would keep the server from ending. Stopping the
watcher ends those, and what is left is cut off after a moment. And without a descriptor for a new
connection asyncio waits a second, but first logs a traceback for each connection it has room for.
"""

from __future__ import annotations

import asyncio
import errno
import logging
import os
import socket
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

import uvicorn
from starlette.applications import Starlette
from starlette.concurrency import run_in_threadpool
from starlette.datastructures import Headers, MutableHeaders
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import PlainTextResponse, RedirectResponse, Response
from starlette.routing import BaseRoute, Mount, Route
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from nsqtools.client.options import ClientOptions
from nsqtools.cluster.directory import Cluster
from nsqtools.cluster.problems import problems_of
from nsqtools.cluster.stats_documents import node_metrics, sample_metrics
from nsqtools.errors import ConfigurationError, NsqError, TLSError
from nsqtools.protocol.names import Address
from nsqtools.protocol.text import go_json
from nsqtools.records.prometheus import Metric, encode_metrics
from nsqtools.web import api_routes, pages
from nsqtools.web.access import (
    HEADERS,
    Identities,
    TooManyFailures,
    WebSettings,
    own_names,
    refusal,
)
from nsqtools.web.actions import AuditLog, Notifier, WebContext
from nsqtools.web.watcher import Watcher

MAX_BODY_BYTES = 1 << 20

LOG_IN = {"WWW-Authenticate": 'Basic realm="nsq web", charset="UTF-8"'}


def create_app(
    settings: WebSettings, cluster: Cluster, watcher: Watcher, options: ClientOptions
) -> ASGIApp:
    """Return the ASGI application; the caller starts the watcher.

    ``options`` are those of connections to nsqd, for the pages that show or move messages.

    Raises `ConfigurationError` for a password file, `OutputError` for an audit log.
    """
    notifier = Notifier(settings.notification_http_endpoint)
    notifier.start()
    context = WebContext(
        settings,
        cluster,
        watcher,
        Identities(settings),
        AuditLog(settings.audit_log),
        notifier,
        options,
    )
    return make_app(context)


def make_app(context: WebContext) -> ASGIApp:
    """Return the application for a context."""
    own: list[BaseRoute] = [
        Route("/ping", ping),
        *api_routes.routes(context),
        Route("/metrics", _metrics(context)),
        *pages.routes(context),
    ]
    base = context.settings.base_path
    routes = own
    if base:
        routes = [Route(f"{base}/", _redirect_to(base)), Mount(base, routes=own)]
    app = Starlette(routes=routes, exception_handlers={NsqError: _nsq_error})
    return Gate(app, context)


async def ping(_: Request) -> Response:
    """Say that the console runs, as nsqadmin does."""
    return PlainTextResponse("OK")


def _redirect_to(path: str) -> Callable[[Request], Response]:
    return lambda _: RedirectResponse(path, 301)


async def _nsq_error(_: Request, error: Exception) -> Response:
    """The cluster failed, and the view did not handle it."""
    return PlainTextResponse(f"{error}\n", 502)


class Gate:
    """Refuses what may not pass, and says who asks (``scope["nsq.user"]``)."""

    def __init__(self, app: ASGIApp, context: WebContext) -> None:
        self._app = app
        self._context = context
        self._names = own_names(context.settings)
        self._open = context.path("/ping")

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            return
        headers = Headers(scope=scope)
        send = _with_headers(send)
        refused = await self._refuse(scope, headers)
        if refused is not None:
            await refused(scope, receive, send)
            return
        await self._app(scope, _bounded(receive), send)

    async def _refuse(self, scope: Scope, headers: Headers) -> Response | None:
        if why := refusal(scope["method"], headers, self._names):
            return _answer(scope, why, 403)
        length = headers.get("content-length", "0")
        if not length.isdecimal() or int(length[:20]) > MAX_BODY_BYTES:
            return _answer(scope, "the request is too large", 413)
        peer = scope["client"][0] if scope.get("client") else ""
        if scope["path"] == self._open:
            return None
        try:
            identities = self._context.identities
            user = await run_in_threadpool(identities.authenticate, headers, peer)
        except TooManyFailures as exc:
            wait = {"Retry-After": str(int(exc.wait_s) + 1)}
            return _answer(scope, "too many wrong passwords", 429, wait)
        if user is None:
            return _answer(scope, "log in", 401, LOG_IN)
        scope["nsq.user"] = user
        return None


def _answer(
    scope: Scope, text: str, status: int, headers: dict[str, str] | None = None
) -> Response:
    """Answer in words, a program in JSON."""
    is_api = "/api/" in scope["path"]
    body = go_json({"message": text}) if is_api else f"{text}\n"
    kind = "application/json; charset=utf-8" if is_api else "text/plain; charset=utf-8"
    return Response(body, status, {**(headers or {}), "Content-Type": kind})


def _with_headers(send: Send) -> Send:
    async def send_with_headers(message: Message) -> None:
        if message["type"] == "http.response.start":
            headers = MutableHeaders(scope=message)
            for name, value in HEADERS.items():
                headers.setdefault(name, value)
        await send(message)

    return send_with_headers


def _bounded(receive: Receive) -> Receive:
    """A body may be sent without saying how long it is."""
    left = MAX_BODY_BYTES

    async def receive_some() -> Message:
        nonlocal left
        message = await receive()
        left -= len(message.get("body", b""))
        if left < 0:
            raise HTTPException(413, "the request is too large")
        return message

    return receive_some


CONTENT_TYPE = "text/plain; version=0.0.4; charset=utf-8"
FIRST_SAMPLE_S = 10.0


def _metrics(context: WebContext) -> Callable[[Request], Response]:
    def metrics(_: Request) -> Response:
        # a hostile nsqd may send what is not text
        text = metrics_text(context).encode("utf-8", "backslashreplace")
        return Response(text, media_type=CONTENT_TYPE)

    return metrics


def metrics_text(context: WebContext) -> str:
    """Return /metrics: every topic and channel of all nsqd; waits for the first sample.

    It shows the last sample, which is at most an interval old (``nsq_sample_age_seconds``): however
    many scrape, nsqd is asked once. An nsqd that does not answer has ``nsq_up`` 0 and nothing else,
    and is no reason for a scrape to fail.
    """
    watcher = context.watcher
    sample = watcher.latest or watcher.wait_newer(0, FIRST_SAMPLE_S)
    own = [
        Metric(
            "nsq_scrape_duration_seconds",
            "gauge",
            "How long all nsqd took to answer.",
            [({}, f"{watcher.took_s:.6g}")],
        ),
        Metric(
            "nsq_sample_interval_seconds",
            "gauge",
            "Time between two samples.",
            [({}, f"{watcher.interval_s:g}")],
        ),
    ]
    if sample is None:
        return encode_metrics(own)
    age_s = max(0.0, time.time() - sample.time_ns / 1e9)
    own.append(
        Metric(
            "nsq_sample_age_seconds", "gauge", "How old these numbers are.", [({}, f"{age_s:.3f}")]
        )
    )
    names = ("severity", "kind", "topic", "channel", "node")
    found = dict.fromkeys(
        (each.severity.word, each.kind, each.topic, each.channel, each.node)
        for each in problems_of(sample, watcher.earlier(sample))
    )
    own.append(
        Metric(
            "nsq_problem",
            "gauge",
            "What is wrong, in the words of the console and nsq check.",
            [(dict(zip(names, each, strict=True)), 1) for each in found],
        )
    )
    lookupds = list(context.cluster.lookupds)
    return encode_metrics([*sample_metrics(sample, lookupds), *node_metrics(sample), *own])


log = logging.getLogger("nsqtools")

BACKLOG = 128
FINISH_S = 3.0
TURN_S = 1.0
MAX_CONNECTIONS = 512
EXHAUSTED = (errno.EMFILE, errno.ENFILE, errno.ENOBUFS, errno.ENOMEM)
ACCEPT_RETRY_S = 0.5  # less than asyncio's own
REPEAT_S = 60.0


class Listener(socket.socket):
    """A listening socket that is tried no more for a moment after the system had no room."""

    _retry_s = 0.0
    _told_s = -REPEAT_S

    def accept(self) -> tuple[socket.socket, Any]:
        """Accept a connection. Raises ``OSError``."""
        now_s = time.monotonic()
        if now_s < self._retry_s:
            raise BlockingIOError(errno.EAGAIN, "tried again in a moment")
        try:
            return super().accept()
        except OSError as exc:
            if exc.errno in EXHAUSTED:
                self._retry_s = now_s + ACCEPT_RETRY_S
                if now_s - self._told_s >= REPEAT_S:
                    self._told_s = now_s
                    reason = os.strerror(exc.errno).lower()
                    log.warning("connections have to wait (%s): raise the limit, ulimit -n", reason)
            raise


def listen(settings: WebSettings) -> Listener:
    """Bind and listen. Raises `ConfigurationError`."""
    host = settings.host
    everywhere = host in ("", "0.0.0.0", "::")
    try:
        if everywhere and socket.has_dualstack_ipv6():
            made = socket.create_server(
                ("::", settings.port), family=socket.AF_INET6, dualstack_ipv6=True, backlog=BACKLOG
            )
        else:
            family = socket.AF_INET6 if ":" in host else socket.AF_INET
            made = socket.create_server((host, settings.port), family=family, backlog=BACKLOG)
    except OSError as exc:
        is_of_system = (exc.errno or 0) > 0  # not of getaddrinfo
        reason = os.strerror(exc.errno or 0) if is_of_system else exc.strerror
        raise ConfigurationError(
            f"cannot listen on {settings.listen} ({reason})",
            hint="Give --listen another port; 0 takes any free one.",
        ) from exc
    return Listener(made.family, made.type, made.proto, made.detach())


def url_of(listener: socket.socket, settings: WebSettings) -> str:
    """Return the address to open in a browser."""
    scheme = "https" if settings.tls_cert else "http"
    host, port = listener.getsockname()[:2]
    if host in ("::", "0.0.0.0"):
        host = socket.gethostname()
    return f"{scheme}://{Address(host, port)}{settings.base_path}/"


class WebServer:
    """One server. `run` it on the main thread; `stop` it from any. Raises `TLSError`."""

    def __init__(
        self, app: ASGIApp, settings: WebSettings, watcher: Watcher, listener: socket.socket
    ) -> None:
        config = uvicorn.Config(
            app,
            log_config=None,
            access_log=False,
            http="h11",
            ws="none",
            lifespan="off",
            server_header=False,
            proxy_headers=False,
            limit_concurrency=MAX_CONNECTIONS,
            timeout_graceful_shutdown=int(FINISH_S),
            ssl_certfile=_text(settings.tls_cert),
            ssl_keyfile=_text(settings.tls_key),
        )
        try:
            config.load()
        except (OSError, ValueError) as exc:
            reason = getattr(exc, "strerror", None) or exc
            raise TLSError(
                f"cannot use {settings.tls_cert} with {settings.tls_key} ({reason})",
                hint="Check --listen-tls-cert and --listen-tls-key.",
            ) from exc
        self._server = uvicorn.Server(config)
        self._watcher = watcher
        self._listener = listener

    def run(self, on_turn: Callable[[], None]) -> None:
        """Serve until `stop`. ``on_turn`` is called every second, on the loop that serves."""
        asyncio.run(self._run(on_turn))

    def stop(self) -> None:
        """Ask `run` to end."""
        self._server.should_exit = True
        self._watcher.stop()

    async def _run(self, on_turn: Callable[[], None]) -> None:
        asyncio.get_running_loop().set_exception_handler(_handle)
        turns = asyncio.create_task(self._turn(on_turn))
        try:
            await self._server.serve(sockets=[self._listener])
        finally:
            turns.cancel()
            with suppress(asyncio.CancelledError):
                await turns

    async def _turn(self, on_turn: Callable[[], None]) -> None:
        while True:
            if self._server.started:
                on_turn()
            await asyncio.sleep(TURN_S)


def _handle(loop: asyncio.AbstractEventLoop, context: dict[str, Any]) -> None:
    error = context.get("exception")
    if not (isinstance(error, OSError) and error.errno in EXHAUSTED and "socket" in context):
        loop.default_exception_handler(context)  # the listener has told of the others


def _text(path: Path | None) -> str | None:
    return None if path is None else str(path)
