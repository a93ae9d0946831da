"""Send requests by httpcore on an event loop, by the rules of `http_pool`, without libcurl.

httpcore is used without httpx, which adds headers and rewrites URLs, and without its pool, which
polls every idle connection for each request (8 ms of CPU with 100 connections). Requests that may
not reach private addresses have connections of their own, because a shared one may lead to such an
address.
"""

from __future__ import annotations

import asyncio
import errno
import os
import socket
from collections.abc import Iterable
from contextlib import suppress
from functools import lru_cache, partial
from itertools import chain
from typing import TYPE_CHECKING, Any
from urllib.parse import urlsplit

import httpcore

from nsqtools.forward.http_pool import (
    MAX_BODY,
    MAX_IDLE,
    PRIVATE,
    TICK_S,
    HttpPool,
    HttpReply,
    OnReply,
    may_connect_to,
)
from nsqtools.forward.http_requests import HttpRequest, split_url
from nsqtools.http.exchange import with_time_shares
from nsqtools.http.loop_meter import MeteredLoop
from nsqtools.transport.stream import TLSOptions, renewed_context

if TYPE_CHECKING:
    from ssl import SSLContext

_IDLE_S = 118.0  # as libcurl: servers close idle connections after 2 minutes or earlier
_MAX_SENDS = 6  # as libcurl, for connections that the server has closed
_BROKEN = (httpcore.NetworkError, httpcore.ProtocolError, httpcore.TimeoutException, OSError)
_CLOSED = (httpcore.ReadError, httpcore.WriteError, httpcore.RemoteProtocolError)


class _Forbidden(httpcore.ConnectError):
    """All addresses of the host are private."""


class _Network(httpcore.AnyIOBackend):
    """Opens connections, to public addresses only unless ``allows_private``."""

    def __init__(self, *, allows_private: bool) -> None:
        self._allows_private = allows_private

    async def connect_tcp(
        self,
        host: str,
        port: int,
        timeout: float | None = None,
        local_address: str | None = None,
        socket_options: Iterable[Any] | None = None,
    ) -> httpcore.AsyncNetworkStream:
        loop = asyncio.get_running_loop()
        assert timeout is not None
        ends_at_s = loop.time() + timeout
        try:
            async with asyncio.timeout(timeout):
                infos = await loop.getaddrinfo(host, port, type=socket.SOCK_STREAM)
        except TimeoutError as exc:
            raise httpcore.ConnectTimeout("the name server does not answer") from exc
        except (OSError, UnicodeError) as exc:
            raise httpcore.ConnectError(str(exc)) from exc
        ips = [str(info[4][0]) for info in infos]
        ips = [ip for ip in ips if may_connect_to(ip, allows_private=self._allows_private)]
        error: Exception = _Forbidden(PRIVATE)
        for ip, share_s in with_time_shares(ips, lambda: ends_at_s - loop.time()):
            try:
                return await super().connect_tcp(ip, port, share_s, local_address, socket_options)
            except (httpcore.ConnectError, httpcore.ConnectTimeout) as exc:
                error = exc
        raise error


class _Transfer:
    """A request, with its response once that has arrived, and how often it was sent."""

    def __init__(self, request: HttpRequest) -> None:
        self.sent = 0
        self.head: httpcore.Response | None = None
        self.base, target = split_url(request.url)
        self.origin, *fields = _origin(self.base)
        for line in request.headers:
            name, _, value = line.partition(b":")
            if value := value.strip():  # libcurl would omit a header without a value
                fields.append((name, value))
        if request.body is not None:
            fields.append((b"Content-Length", b"%d" % len(request.body)))
        scheme, host, port = self.origin.scheme, self.origin.host, self.origin.port
        self._request = httpcore.Request(
            b"GET" if request.body is None else b"POST",
            httpcore.URL(scheme=scheme, host=host, port=port, target=target.encode()),
            headers=fields,
            content=request.body,
        )

    async def run(self, connection: httpcore.AsyncHTTP11Connection) -> None:
        """Send the request and read the response. Raises the errors of httpcore."""
        self.sent += 1
        self.head = await connection.handle_async_request(self._request)
        size = 0
        try:
            async for part in self.head.aiter_stream():
                size += len(part)
                if size > MAX_BODY:
                    break
        finally:
            await self.head.aclose()

    def answer(self) -> HttpReply:
        """Return the response that `run` has got."""
        assert self.head is not None
        fields = {name.lower(): value.decode("latin-1") for name, value in self.head.headers}
        return HttpReply(
            self.head.status, fields.get(b"retry-after", ""), fields.get(b"location", "")
        )


class _Connections:
    """Connections for requests with the same certificates and the same view of addresses."""

    def __init__(self, context: SSLContext | None, connect_s: float, network: _Network) -> None:
        self._context = context
        self._connect_s = connect_s
        self._network = network
        # By scheme and host, the connection that was used last at the end.
        self._idle: dict[str, list[httpcore.AsyncHTTP11Connection]] = {}

    async def run(self, transfer: _Transfer) -> None:
        """Send a request. Raises the errors of httpcore."""
        while connection := await self._take(transfer.base):
            try:
                await self._run(connection, transfer)
            except _CLOSED:
                if transfer.head is not None or transfer.sent == _MAX_SENDS:
                    raise
            else:
                return
        await self._run(await self._connect(transfer.origin), transfer)

    async def _run(self, connection: httpcore.AsyncHTTP11Connection, transfer: _Transfer) -> None:
        try:
            await transfer.run(connection)
        finally:
            if connection.is_idle() and sum(map(len, self._idle.values())) < MAX_IDLE:
                self._idle.setdefault(transfer.base, []).append(connection)
            else:
                await connection.aclose()

    async def _take(self, base: str) -> httpcore.AsyncHTTP11Connection | None:
        while connections := self._idle.pop(base, None):
            connection = connections.pop()
            if connections:
                self._idle[base] = connections
            if not connection.has_expired():
                return connection
            await connection.aclose()
        return None

    async def _connect(self, origin: httpcore.Origin) -> httpcore.AsyncHTTP11Connection:
        host = origin.host.decode()
        stream = await self._network.connect_tcp(host, origin.port, self._connect_s)
        if origin.scheme == b"https":
            assert self._context is not None
            stream = await stream.start_tls(self._context, host, self._connect_s)
        return httpcore.AsyncHTTP11Connection(origin, stream, _IDLE_S)

    async def close(self) -> None:
        for connection in chain.from_iterable(self._idle.values()):
            await connection.aclose()


class HttpcorePool(HttpPool):
    """A pool on httpcore."""

    engine = f"httpcore {httpcore.__version__}"

    def __init__(
        self, connect_timeout_s: float, request_timeout_s: float, tls: TLSOptions | None
    ) -> None:
        super().__init__(connect_timeout_s, request_timeout_s, tls)
        self._context = None if tls is None else renewed_context(tls)
        self._connections: dict[tuple[SSLContext | None, bool], _Connections] = {}
        self._tasks: set[asyncio.Task[None]] = set()
        self._loop: asyncio.AbstractEventLoop
        self._woken = asyncio.Event()

    def send(self, request: HttpRequest, done: OnReply) -> None:
        task = self._loop.create_task(self._send(request, done))
        self._tasks.add(task)
        task.add_done_callback(self._ended)

    def _wake(self) -> None:
        with suppress(RuntimeError):  # the loop is closed
            self._loop.call_soon_threadsafe(self._woken.set)

    # -- the thread -----------------------------------------------------------------------------

    def _run(self) -> None:
        try:
            with asyncio.Runner(loop_factory=MeteredLoop) as runner:
                self._loop = runner.get_loop()
                runner.run(self._main())
        except Exception as exc:
            self.failure = exc

    async def _main(self) -> None:
        try:
            while not self._is_stopping and self.failure is None:
                self._is_asleep = not self._calls
                if self._calls:
                    await asyncio.sleep(0)
                else:
                    with suppress(TimeoutError):
                        async with asyncio.timeout(TICK_S):
                            await self._woken.wait()
                self._is_asleep = False
                self._woken.clear()
                self._run_calls()
                self._end_turn()
        finally:
            for task in self._tasks:  # not reported: a stop is no failure of an endpoint
                task.cancel()
            await asyncio.gather(*self._tasks, return_exceptions=True)
            self._after_turn()
            for connections in self._connections.values():
                await connections.close()

    def _ended(self, task: asyncio.Task[None]) -> None:
        self._tasks.discard(task)
        if not task.cancelled() and isinstance(exc := task.exception(), Exception):
            self.failure = exc

    async def _send(self, request: HttpRequest, done: OnReply) -> None:
        transfer = _Transfer(request)
        connections = self._connections_for(request)
        error, is_forbidden = "", False
        try:
            async with asyncio.timeout(self.request_timeout_s):
                await connections.run(transfer)
        except _BROKEN as exc:
            if transfer.head is None:
                error, is_forbidden = self._reason(exc), isinstance(exc, _Forbidden)
        name, was_sent = request.name, transfer.sent > 0
        if not error:
            answer = transfer.answer()
        elif was_sent:
            answer = HttpReply(0, error=f"{name}: {error}")
        else:
            error = f"cannot connect to {name} ({error})"
            answer = HttpReply(0, error=error, was_sent=False, is_forbidden=is_forbidden)
        self._calls.append(partial(done, answer, transfer.sent > 1))
        self._woken.set()

    def _connections_for(self, request: HttpRequest) -> _Connections:
        """Return the connections with the current certificates; older ones end with the pool."""
        context = None if self._context is None else self._context.get()
        key = context, request.allows_private
        if (connections := self._connections.get(key)) is None:
            network = _Network(allows_private=request.allows_private)
            connections = _Connections(context, self.connect_timeout_s, network)
            self._connections[key] = connections
        return connections

    def _reason(self, exc: BaseException) -> str:
        if isinstance(exc, TimeoutError):
            return f"no answer within {self.request_timeout_s:.3g} s"
        if isinstance(exc, httpcore.ConnectTimeout) and not str(exc):
            return f"no connection within {self.connect_timeout_s:.3g} s"
        while cause := exc.__cause__ or exc.__context__:
            exc = cause
        number = getattr(exc, "errno", None)
        is_of_ssl = hasattr(exc, "library")
        if isinstance(number, int) and number in errno.errorcode and not is_of_ssl:
            return os.strerror(number)  # asyncio has longer texts
        return str(exc) or type(exc).__name__


@lru_cache(maxsize=100)
def _origin(base: str) -> tuple[httpcore.Origin, tuple[bytes, bytes]]:
    """Return the origin of a URL without its path, and the header Host."""
    parts = urlsplit(base)
    port = parts.port if parts.port is not None else 443 if parts.scheme == "https" else 80
    origin = httpcore.Origin(parts.scheme.encode(), (parts.hostname or "").encode(), port)
    return origin, (b"Host", parts.netloc.encode())
