"""The application: what is in front of every route, and the routes.

gate     Host, other sites, size of the body, who asks; safety headers on every answer
/ping    OK
/api     nsqadmin's, for scripts
/metrics the whole cluster for Prometheus
the rest the pages
"""

from __future__ import annotations

import time
from collections.abc import Callable

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
from nsqtools.cluster.stats_documents import node_metrics, sample_metrics
from nsqtools.errors import NsqError
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
from nsqtools.web.actions import AuditLog, Notifier
from nsqtools.web.context import WebContext
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
    lookupds = list(context.cluster.lookupds)
    return encode_metrics([*sample_metrics(sample, lookupds), *node_metrics(sample), *own])
