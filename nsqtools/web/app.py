"""The web application: a gate in front of all routes, and the routes.

gate     checks Host, other sites, the size of the body and the user; adds security headers
/ping    OK
/api     nsqadmin's API, for scripts
/metrics the whole cluster for Prometheus
others   the pages

`Console` consists of the gate and the routes. `WebServer` serves it until it is stopped, with the
HTTP server of the embedded daemons, which limits the time of each step and the connections of each
address.

Trap: an unbounded response (server-sent events) would keep the server from ending. Stopping the
watcher ends such responses, and remaining ones are aborted after a moment.
"""

from __future__ import annotations

import asyncio
import logging
import socket
import threading
import time
from collections.abc import AsyncGenerator, Awaitable, Callable, Iterator, Mapping
from contextlib import aclosing, contextmanager
from functools import partial
from typing import Any, NamedTuple
from urllib.parse import parse_qsl, quote

from starlette.applications import Starlette
from starlette.concurrency import run_in_threadpool
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import HTMLResponse, PlainTextResponse, RedirectResponse, Response
from starlette.routing import BaseRoute, Mount, Route
from starlette.types import ASGIApp, Message, Scope

from nsqtools.authd import users
from nsqtools.authd.passwords import TooManyFailures
from nsqtools.authd.views import visible_answer
from nsqtools.cluster.stats_documents import sample_metrics
from nsqtools.errors import NsqError
from nsqtools.http import http_server
from nsqtools.http.http_server import HTTPServer, Limits, StreamedResponse, plain_response
from nsqtools.http.listen import server_certificate
from nsqtools.http.service import serve_until
from nsqtools.protocol.names import Address
from nsqtools.records.prometheus import CONTENT_TYPE, encode_metrics, metric_of
from nsqtools.web import api, pages
from nsqtools.web.access import (
    COOKIE,
    HEADERS,
    ConsoleUser,
    Notices,
    authorization_of,
    basic_credentials,
    refusal_reason,
)
from nsqtools.web.actions import WebContext
from nsqtools.web.pages.site import Addresses, Packed, Site, environment, packed_response, theme_of

MAX_BODY_BYTES = 1 << 20

REFUSED = (401, 403, 413, 429)
TOO_MANY = "too many wrong passwords"

LOG_IN = {"WWW-Authenticate": 'Basic realm="nsq web", charset="UTF-8"'}

log = logging.getLogger("nsqtools.web")

LIMITS = Limits(idle_s=15.0, most_idle=256, most_idle_of_one=64, finish_s=3.0)
# Concurrent requests, including open streams of events.
MAX_REQUESTS = 512
LENGTH = b"content-length"


class Console:
    """The application of the HTTP server, with the gate in front of every route.

    The gate refuses invalid requests, and sets the user and address (``scope["nsq.user"]``,
    ``"client"``). Each refusal, including those of pages, is logged. Responses are buffered, except
    the events that a page stores in ``scope["nsq.events"]``, which are sent until the client
    disconnects.
    """

    def __init__(self, context: WebContext, scheme: str) -> None:
        self._context = context
        self._scheme = scheme
        self._app = routed(context)
        self._views = UserViews(context)
        settings = context.settings
        # In addition, addresses and names without a dot are allowed.
        self._names = {settings.host, socket.gethostname(), *settings.allowed_hosts}
        self._to = Addresses(settings.base_path)
        self._ping_path, self._static_path = self._to.page("/ping"), self._to.page("/static/")
        self._login_paths = self._to.page("/login"), self._to.page("/logout")
        self._notices = Notices()
        # Requests in progress.
        self._count = 0

    def route(self, request: http_server.Request) -> None:
        request.limit = MAX_BODY_BYTES

    def report(self, request: http_server.Request, status: int) -> None:
        """Log nothing: refusals are logged by `answer`."""

    async def answer(self, request: http_server.Request) -> http_server.Response | StreamedResponse:
        if self._count >= MAX_REQUESTS:
            return plain_response("too many connections\n", 503)
        scope = self._scope(request)
        messages = await self._messages(scope, request.body)
        # Without messages the application has failed, and its traceback is in the log.
        if not messages:
            return plain_response("internal error\n", 500)
        status, headers = messages[0]["status"], dict(messages[0]["headers"])
        if status in REFUSED:
            self._log_refusal(Request(scope), status)
        headers.pop(LENGTH, None)
        fields = b"".join(b"%b: %b\r\n" % item for item in (HEADERS | headers).items())
        if "nsq.events" in scope and request.method != "HEAD":
            return StreamedResponse(status, fields, self._events(scope))
        return http_server.Response(
            status, fields, b"".join(message.get("body", b"") for message in messages)
        )

    def _scope(self, request: http_server.Request) -> Scope:
        peer, port = request.client or ("", 0)
        forwarded = request.headers.get("x-forwarded-for", "")
        address = self._context.identities.real_address(peer, forwarded)
        return {
            "type": "http",
            "asgi": {"version": "3.0", "spec_version": "2.4"},
            "http_version": "1.0" if request.is_http10 else "1.1",
            # The server omits the body of an answer to HEAD.
            "method": request.method if request.method != "HEAD" else "GET",
            "scheme": self._scheme,
            "path": request.path,
            "raw_path": request.target.partition("?")[0].encode("latin-1"),
            "query_string": request.query_string.encode("latin-1"),
            "root_path": "",
            "headers": [
                (name.encode(), value.encode("latin-1")) for name, value in request.headers.items()
            ],
            "client": (address, port if address == peer else 0),
            "nsq.peer": peer,
        }

    async def _messages(self, scope: Scope, body: bytes | None) -> list[Message]:
        """Call the application; return its messages."""
        messages: list[Message] = []

        async def receive() -> Message:
            return {"type": "http.request", "body": body or b"", "more_body": False}

        async def send(message: Message) -> None:
            messages.append(message)

        with self._counted(scope):
            refusal = scope["nsq.refused"] = await self._refuse(scope, body)
            await (refusal or self._app_of(scope))(scope, receive, send)
        return messages

    def _app_of(self, scope: Scope) -> ASGIApp:
        """Return the application that answers a user."""
        user: ConsoleUser | None = scope.get("nsq.user")
        if user is None or user.entry is None:
            return self._app
        return self._views.app_of(user.entry)

    def drop_unused_views(self) -> None:
        """End the views of users who have left. Call it once in a while, on any thread."""
        self._views.drop_unused()

    def stop(self) -> None:
        """End what goes on for users."""
        self._views.stop()

    async def _events(self, scope: Scope) -> AsyncGenerator[bytes, None]:
        with self._counted(scope):
            async with aclosing(scope["nsq.events"]) as events:
                async for piece in events:
                    if (user := scope["nsq.user"]).entry is not None:
                        self._views.touch(user.entry)
                    yield piece

    @contextmanager
    def _counted(self, scope: Scope) -> Iterator[None]:
        """Count a request in progress, and log its failure."""
        self._count += 1
        try:
            yield
        except Exception:
            log.exception("%s %s failed", scope["method"], scope["path"])
        finally:
            self._count -= 1

    async def _refuse(self, scope: Scope, body: bytes | None) -> Response | None:
        """Return the response to a request that gets to no route: a refusal, or a login."""
        request = Request(scope)
        if reason := refusal_reason(request.method, request.headers, self._names):
            return _answer(scope, reason, 403)
        if body is None:
            return _answer(scope, "the request is too large", 413)
        path = scope["path"]
        # Load balancers query it without a login, and the page of the login needs its style.
        if path == self._ping_path or path.startswith(self._static_path):
            return None
        try:
            if self._context.settings.has_login and path in self._login_paths:
                return await self._log_in_or_out(request, body)
            user = await self._context.identities.authenticate(request)
        except TooManyFailures as exc:
            wait = {"Retry-After": str(int(exc.args[0]) + 1)}
            return _answer(scope, TOO_MANY, 429, wait)
        if user is None:
            is_form = self._context.settings.has_login and is_browser(request)
            return to_login(request, self._to) if is_form else _refuse_login(scope)
        scope["nsq.user"] = user
        return None

    async def _log_in_or_out(self, request: Request, body: bytes) -> Response:
        sessions, to = self._context.identities.sessions, self._to
        is_login = request.url.path == self._login_paths[0]
        if request.method != "POST":
            return login_page(request, to, {}) if is_login else RedirectResponse(to.page("/"))
        sessions.end(request.cookies.get(COOKIE, ""))
        if not is_login:
            return logged_out(to)
        fields = dict(parse_qsl(body.decode("utf-8", "replace")))
        authorization = request.scope["nsq.authorization"] = authorization_of(fields)
        if await self._context.identities.authenticate(request, authorization) is None:
            return login_page(request, to, fields, "Wrong user or password")
        token = sessions.begin(authorization)
        return logged_in(fields, to, token, is_secure=self._scheme == "https")

    def _log_refusal(self, request: Request, status: int) -> None:
        scope, address = request.scope, request.client.host if request.client else ""
        if "nsq.user" in scope:
            name = scope["nsq.user"].name
        else:
            header = scope.get("nsq.authorization") or request.headers.get("authorization", "")
            credentials = basic_credentials(header)
            name = credentials[0] if credentials else ""
        # A browser always sends a request without credentials before it logs in.
        if status == 401 and not name:
            return
        client = f"{name[:80]!r} at {address}" if name else address
        response = scope["nsq.refused"]
        reason = bytes(response.body).decode().strip()[:200] if response else "not allowed"
        if status == 401:
            reason = "wrong user or password"
        self._notices.log(f"refused {client}: {scope['method']} {scope['path'][:200]} ({reason})")


class UserView(NamedTuple):
    """The application for one user, with the time of the last request, monotonic."""

    context: WebContext
    app: ASGIApp
    used_s: float


class UserViews:
    """An application for each user of ``--users``, whose cluster has only what the user may see.

    Each samples the cluster for itself, because pages, problems, sums and rates are then made of
    nothing that is hidden. So a view ends when its user has left. Thread-safe.
    """

    def __init__(self, context: WebContext) -> None:
        self._context = context
        self._lock = threading.Lock()
        self._views: dict[users.User, UserView] = {}  # the last one used is the last

    def app_of(self, user: users.User) -> ASGIApp:
        """Return the application of a user; its watcher runs."""
        with self._lock:
            view = self._views.pop(user, None)
            if view is None:
                cluster = self._context.cluster.limited_to(partial(visible_answer, user))
                context = self._context.limited_to(cluster)
                context.watcher.start()
                view = UserView(context, routed(context), 0.0)
            self._views[user] = view._replace(used_s=time.monotonic())
        return view.app

    def touch(self, user: users.User) -> None:
        """Note that a page of a user is open."""
        with self._lock:
            if (view := self._views.pop(user, None)) is not None:
                self._views[user] = view._replace(used_s=time.monotonic())

    def drop_unused(self) -> None:
        """End the views that were not used lately, and the oldest of too many."""
        with self._lock:
            oldest_s = time.monotonic() - VIEW_KEPT_S
            surplus = len(self._views) - MAX_VIEWS
            dropped = [
                user
                for number, (user, view) in enumerate(self._views.items())
                if view.used_s < oldest_s or number < surplus
            ]
            views = [self._views.pop(user) for user in dropped]
        for view in views:
            view.context.stop()
            view.context.cluster.close()

    def stop(self) -> None:
        """End the pages that are open. The clusters end with the process."""
        with self._lock:
            views = list(self._views.values())
        for view in views:
            view.context.stop()


VIEW_KEPT_S = 600.0
"""A view keeps its history for someone who looks again within ten minutes."""

MAX_VIEWS = 50
"""Each has a thread, connections to all daemons, and a sample every --refresh."""


def routed(context: WebContext) -> ASGIApp:
    """Return the routes of a context."""
    site = Site(context)
    routes: list[BaseRoute] = [
        Route("/ping", lambda _: PlainTextResponse("OK")),
        api.routes(context),
        Route("/metrics", _metrics(site)),
        *pages.routes(site),
    ]
    if base := context.settings.base_path:
        to_pages = Route(base, lambda _: RedirectResponse(f"{base}/", 301))
        routes = [to_pages, Mount(base, routes=routes)]
    handlers: dict[Any, Any] = {NsqError: site.failed, HTTPException: site.failed}
    return Starlette(routes=routes, exception_handlers=handlers)


def _refuse_login(scope: Scope) -> Response:
    return _answer(scope, "log in", 401, LOG_IN)


def _answer(
    scope: Scope, text: str, status: int, headers: dict[str, str] | None = None
) -> Response:
    """Return a response with a text, as JSON for the API."""
    is_api = "/api/" in scope["path"]
    plain = PlainTextResponse(f"{text}\n", status)
    answer = api.reply({"message": text}, status) if is_api else plain
    answer.headers.update(headers or {})
    return answer


FIRST_SAMPLE_S = 10.0
PROBLEM_LABELS = ("severity", "kind", "topic", "channel", "node")


def _metrics(site: Site) -> Callable[[Request], Awaitable[Response]]:
    """Return the view of /metrics: every topic and channel of all nsqd.

    It shows the last sample, which is at most an interval old (``nsq_sample_age_seconds``). So nsqd
    is queried once, and the text is formatted once, for any number of scrapes. An nsqd that does
    not answer has only ``nsq_up`` 0, and the scrape succeeds. The first scrape waits for the first
    sample.
    """
    watcher = site.context.watcher

    def format_sample(_: Packed | None) -> Packed:
        snapshot = site.snapshot()
        label_rows = dict.fromkeys(
            (problem.severity.word, problem.kind, problem.topic, problem.channel, problem.node)
            for problem in snapshot.problems
        )
        problems = metric_of(
            "nsq_problem",
            "Problems, as the console and nsq check report them.",
            [(dict(zip(PROBLEM_LABELS, row, strict=True)), 1) for row in label_rows],
        )
        lookupds = list(site.context.cluster.lookupds)
        return Packed(encode_metrics([*sample_metrics(snapshot.sample, lookupds), problems]))

    async def metrics(request: Request) -> Response:
        sample = watcher.latest or await watcher.newer(None, FIRST_SAMPLE_S)
        took, interval = f"{watcher.took_s:.6g}", f"{watcher.interval_s:g}"
        gauges = [
            ("nsq_scrape_duration_seconds", "How long all nsqd took to answer.", took),
            ("nsq_sample_interval_seconds", "Time between two samples.", interval),
        ]
        pieces = []
        if sample is not None:
            age = f"{max(0.0, time.time() - sample.time_s):.3f}"
            gauges.append(("nsq_sample_age_seconds", "How old these numbers are.", age))
            pieces.append(await run_in_threadpool(site.recent, "metrics", format_sample))
        text = encode_metrics(
            metric_of(name, help_, [({}, value)]) for name, help_, value in gauges
        )
        return packed_response(request, [*pieces, Packed(text)], CONTENT_TYPE)

    return metrics


class WebServer:
    """The server at ``url``. Call `run` on the main thread, and `stop` on any.

    Raises `ConfigurationError` for an invalid certificate.
    """

    def __init__(self, context: WebContext, listener: socket.socket) -> None:
        settings = context.settings
        scheme = "https" if settings.tls_cert else "http"
        host, port = listener.getsockname()[:2]
        if host in ("::", "0.0.0.0"):
            host = socket.gethostname()
        self.url = f"{scheme}://{Address(host, port)}{settings.base_path}/"
        self._context = context
        self._console = Console(context, scheme)
        self._certificate = None
        if settings.tls_cert is not None and settings.tls_key is not None:
            self._certificate = server_certificate(settings.tls_cert, settings.tls_key)
        self._listener = listener
        self._stopped = threading.Event()

    def run(self, on_tick: Callable[[], None]) -> None:
        """Serve until `stop`. ``on_tick`` is called every second on the serving loop."""
        if self._context.settings.users_file is None:
            self._context.watcher.start()
        try:
            asyncio.run(self._run(on_tick))
        finally:
            self._context.stop()
            self._context.notifier.stop()

    def stop(self) -> None:
        """Ask `run` to end."""
        self._stopped.set()
        self._context.stop()
        self._console.stop()

    async def _run(self, on_tick: Callable[[], None]) -> None:
        tls = self._certificate.get() if self._certificate else None
        server = HTTPServer(self._console, self._listener, tls, LIMITS)
        await serve_until(self._stopped, [server], on_tick, self._maintain, self._certificate)

    def _maintain(self) -> None:
        self._context.identities.refresh()
        self._console.drop_unused_views()


# -- logging in and out ---------------------------------------------------------------------------

# Scripts send HTTP basic authentication and get 401. Only requests for HTML are led to the form.
# The gate refuses forms of other sites, and ``SameSite`` keeps the cookie from them.


def is_browser(request: Request) -> bool:
    """Return whether a person waits for a page, who has not sent a user and a password."""
    accept, authorization = (request.headers.get(name, "") for name in ("accept", "authorization"))
    return "text/html" in accept and not authorization


def to_login(request: Request, to: Addresses) -> Response:
    """Return a redirect to the form, which leads back to the requested page."""
    path, query = request.url.path, request.url.query
    target = f"{path}?{query}" if query else path
    if request.method != "GET" or target == to.page("/"):  # a form is not sent again
        target = ""
    return RedirectResponse(to.page("/login", next=target), 303)


def login_page(
    request: Request, to: Addresses, fields: Mapping[str, str], error: str = ""
) -> Response:
    """Return the page with the form, and with the reason if a login failed."""
    page = environment().get_template("login.html")
    values = {"to": to, "theme": theme_of(request), "error": error, "user": fields.get("user", "")}
    text = page.render(**values, next=fields.get("next") or request.query_params.get("next", ""))
    return HTMLResponse(text, 401 if error else 200)


def logged_in(fields: Mapping[str, str], to: Addresses, token: str, *, is_secure: bool) -> Response:
    """Return a redirect to the requested page, with the cookie of a session."""
    target = fields.get("next", "")
    # An address of another site begins with two slashes or has a scheme.
    if not target.startswith("/") or target.startswith(("//", "/\\")):
        target = to.page("/")
    response = RedirectResponse(quote(target, safe="/%?&=#+:,.~"), 303)
    path = to.page("/")
    response.set_cookie(COOKIE, token, path=path, httponly=True, samesite="lax", secure=is_secure)
    return response


def logged_out(to: Addresses) -> Response:
    """Return a redirect to the form that removes the cookie."""
    response = RedirectResponse(to.page("/login"), 303)
    response.delete_cookie(COOKIE, path=to.page("/"))
    return response
