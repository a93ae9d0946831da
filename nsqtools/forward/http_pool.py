"""Connections to HTTP endpoints, kept alive, on one thread.

Everything but `HttpPool.call_soon` belongs to that thread. A request takes an idle connection of
its endpoint, or waits for one that is being made: resolving, connecting and the TLS handshake
block, so they run on a few threads of their own.
"""

from __future__ import annotations

import collections
import ipaddress
import selectors
import socket
import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING, NamedTuple

from nsqtools.forward.http_connection import READ_SIZE, Broken, Connection, Done, Request

if TYPE_CHECKING:
    from nsqtools.transport.tls import RenewedContext

MAX_CONNECTING = 8
TICK_S = 0.1


class Origin(NamedTuple):
    """Where to connect. ``allows_private`` is False for what must not be on a private network."""

    host: str
    port: int
    is_tls: bool
    allows_private: bool = True

    def __str__(self) -> str:
        return f"{self.host}:{self.port}"


class HttpPool:
    """All connections. `start` it once; ``timeouts`` are seconds to connect and for a request."""

    def __init__(
        self, connect_timeout_s: float, request_timeout_s: float, tls: RenewedContext | None
    ) -> None:
        self.connect_timeout_s = connect_timeout_s
        self._request_timeout_s = request_timeout_s
        self._tls = tls
        self._places: dict[Origin, _Place] = {}
        self._calls: collections.deque[Callable[[], None]] = collections.deque()
        self._is_asleep = False
        self.is_stopping = False
        self.failure: Exception | None = None
        self._tickers: list[Callable[[float], None]] = []
        self.after_turn: Callable[[], None] = lambda: None
        """Called on the thread after what has come was read."""
        self.busy: dict[Connection, None] = {}  # in the order of their deadlines
        self._thread = threading.Thread(target=self._run, name="nsq-http", daemon=True)

    def start(self) -> None:
        """Start the thread."""
        self.selector: selectors.BaseSelector = selectors.DefaultSelector()
        self._wake_receiver, self._wake_sender = socket.socketpair()
        self._wake_receiver.setblocking(False)
        self._wake_sender.setblocking(False)
        self.selector.register(self._wake_receiver, selectors.EVENT_READ)
        self._connectors = ThreadPoolExecutor(MAX_CONNECTING, thread_name_prefix="nsq-http-connect")
        self._thread.start()

    def call_soon(self, call: Callable[[], None]) -> None:
        """Have a call made on the pool's thread, from any thread."""
        self._calls.append(call)
        if self._is_asleep:
            self._is_asleep = False
            try:
                self._wake_sender.send(b"w")
            except OSError:
                pass  # full: it is being woken; closed: it has ended

    def each_tick(self, call: Callable[[float], None]) -> None:
        """Have a call made ten times a second, with the time."""
        self._tickers.append(call)

    def stop(self) -> None:
        """Close everything; from any thread but the pool's."""
        if self._thread.ident is None:
            return
        self.is_stopping = True
        self.call_soon(lambda: None)
        self._thread.join()

    def send(self, origin: Origin, payload: bytes, done: Done) -> None:
        """Send a request; ``done`` is called once, on this thread."""
        request = Request(payload, done, time.monotonic() + self._request_timeout_s)
        self._place(origin).send(request)

    def _place(self, origin: Origin) -> _Place:
        place = self._places.get(origin)
        if place is None:
            place = self._places[origin] = _Place(self, origin)
        return place

    # -- the thread -----------------------------------------------------------------------------

    def _run(self) -> None:
        next_tick = 0.0
        try:
            while not self.is_stopping:
                self._is_asleep = not self._calls
                events = self.selector.select(0 if self._calls else TICK_S)
                self._is_asleep = False
                for key, mask in events:
                    if key.data is None:
                        self._wake_receiver.recv(READ_SIZE)
                    else:
                        key.data.on_ready(mask)
                for _ in range(len(self._calls)):
                    self._calls.popleft()()
                self.after_turn()
                if (now := time.monotonic()) >= next_tick:
                    next_tick = now + TICK_S
                    self._tick(now)
        except Exception as exc:
            self.failure = exc
        finally:
            self._close()

    def _tick(self, now: float) -> None:
        for connection in list(self.busy):
            if connection.request is None or connection.request.deadline > now:
                break
            connection.fail(f"no answer within {self._request_timeout_s:.3g} s")
        for place in self._places.values():
            place.expire(now)
        for call in self._tickers:
            call(now)

    def _close(self) -> None:
        for connection in list(self.busy):
            connection.fail("stopped")
        for place in self._places.values():
            place.close()
        self._connectors.shutdown(cancel_futures=True)
        while self._calls:  # what has been connected meanwhile
            self._calls.popleft()()
        self.after_turn()
        self._wake_receiver.close()
        self._wake_sender.close()
        self.selector.close()

    def connect(self, origin: Origin, opened: Callable[[socket.socket | str], None]) -> None:
        """Connect on another thread; ``opened`` is called on this one with the socket or a
        reason."""

        def connect() -> None:
            try:
                result: socket.socket | str = self._open(origin)
            except OSError as exc:  # those of TLS are among them
                reason = getattr(exc, "verify_message", "") or exc.strerror or str(exc)
                result = f"cannot connect to {origin} ({reason})"
            except UnicodeError:  # of a label that is empty or too long
                result = f"cannot connect to {origin} (no name of a host)"
            self.call_soon(lambda: opened(result))

        self._connectors.submit(connect)

    def _open(self, origin: Origin) -> socket.socket:
        until = time.monotonic() + self.connect_timeout_s
        last: OSError = OSError("the host has no address")
        for family, kind, protocol, _, address in socket.getaddrinfo(
            origin.host, origin.port, type=socket.SOCK_STREAM
        ):
            if not origin.allows_private and not ipaddress.ip_address(address[0]).is_global:
                last = OSError("a private address, which is not allowed")
                continue
            sock = socket.socket(family, kind, protocol)
            try:
                sock.settimeout(max(0.001, until - time.monotonic()))
                sock.connect(address)
                sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
                if origin.is_tls:
                    assert self._tls is not None
                    sock = self._tls.get().wrap_socket(sock, server_hostname=origin.host)
                sock.setblocking(False)
            except OSError as exc:
                sock.close()
                last = exc
            else:
                return sock
        raise last


class _Place:
    """The connections to one origin, and the requests that wait for one."""

    def __init__(self, pool: HttpPool, origin: Origin) -> None:
        self._pool = pool
        self._origin = origin
        self.selector: selectors.BaseSelector = pool.selector
        self.busy = pool.busy
        self.name = str(origin)
        self.is_tls = origin.is_tls
        self._idle: list[Connection] = []
        self._waiting: collections.deque[Request] = collections.deque()
        self._connecting = 0

    def send(self, request: Request) -> None:
        while self._idle:
            connection = self._idle.pop()
            if connection.send(request):
                return
        self._waiting.append(request)
        self._connect()

    def send_afresh(self, request: Request) -> None:
        """Send again what met a connection that the server had closed."""
        request.is_resent = True
        self._waiting.appendleft(request)
        self._connect()

    def _connect(self) -> None:
        while self._connecting < min(len(self._waiting), MAX_CONNECTING):
            self._connecting += 1
            self._pool.connect(self._origin, self._opened)

    def _opened(self, result: socket.socket | str) -> None:
        self._connecting -= 1
        if self._pool.is_stopping and not isinstance(result, str):
            result.close()
            return
        if isinstance(result, str):
            failed = list(self._waiting)
            self._waiting.clear()
            for request in failed:
                request.end(Broken(result, was_sent=False))
            return
        connection = Connection(self, result)
        self.is_free(connection)

    def is_free(self, connection: Connection) -> None:
        """A connection can take another request."""
        while self._waiting:
            if connection.send(self._waiting.popleft()):
                self._connect()
                return
            if connection.is_closed:
                self._connect()
                return
        self._idle.append(connection)

    def forget(self, connection: Connection) -> None:
        if connection in self._idle:
            self._idle.remove(connection)

    def expire(self, now: float) -> None:
        while self._waiting and self._waiting[0].deadline <= now:
            request = self._waiting.popleft()
            request.end(Broken(f"no connection to {self.name} in time", was_sent=False))

    def close(self) -> None:
        for connection in list(self._idle):
            connection.close()
        while self._waiting:
            self._waiting.popleft().end(Broken("stopped", was_sent=False))
