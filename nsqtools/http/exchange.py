"""One HTTP exchange with a time limit and a size limit, without compression.

httpx applies its timeouts to each read, so a daemon that sends a byte now and then could block a
caller forever. Here each read and write gets the remaining time of the whole exchange. Only the
network backend of httpcore, on which httpx runs, can enforce that for the head of an answer as
well, and httpx's own transport accepts no backend. A longer answer than the limit is refused, and
so is a compressed one, because a megabyte of gzip can be a gigabyte of JSON.
"""

from __future__ import annotations

import math
import ssl
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import closing, contextmanager
from contextvars import ContextVar
from dataclasses import dataclass
from typing import Any, NamedTuple

import httpcore
import httpx

from nsqtools.errors import DeadlineExceeded, ProtocolError
from nsqtools.protocol.names import Address
from nsqtools.transport.stream import Deadline, look_up

KEEP_ALIVE_S = 5.0


@dataclass(slots=True)
class _Exchange:
    """An exchange: its deadline on the monotonic clock, and whether a byte has arrived."""

    ends_at_s: float
    has_answered: bool = False


# Of this thread, and of this greenlet: gevent may patch `threading.local` after this was imported.
_exchange: ContextVar[_Exchange] = ContextVar("exchange")
_latest_s: ContextVar[float] = ContextVar("latest_s", default=math.inf)


class HTTPAnswer(NamedTuple):
    """The answer of a server, which may be a redirect.

    ``reason`` is the reason phrase of the status, and ``date`` is the Date header.
    """

    status: int
    reason: str
    body: bytearray
    date: str


@contextmanager
def within(latest_s: float) -> Iterator[None]:
    """End all exchanges of this thread by a time on the monotonic clock."""
    token = _latest_s.set(latest_s)
    try:
        yield
    finally:
        _latest_s.reset(token)


class Exchanges:
    """Connections to one server, which stay open for `KEEP_ALIVE_S`. Thread-safe."""

    def __init__(
        self,
        headers: Mapping[str, str],
        tls: ssl.SSLContext | None,
        connect_timeout_s: float,
        timeout_s: float,
        max_body_bytes: int,
    ) -> None:
        self._max_body_bytes = max_body_bytes
        self._connect_timeout_s = connect_timeout_s
        self._timeout_s = timeout_s
        self._lock = threading.Lock()
        self._open = 0  # requests
        self._is_closed = False
        self._transport = _Transport(tls)
        headers = {"Accept-Encoding": "identity", "User-Agent": "nsqtools", **headers}
        encoded = [(n.encode(), v.encode("utf-8", "surrogateescape")) for n, v in headers.items()]
        self._headers = httpx.Headers(encoded, encoding="utf-8")

    def close(self) -> None:
        """Close the connections after the open requests. Later requests keep no connection.

        Closing the pool during a connection attempt would leak that connection.
        """
        with self._lock:
            self._is_closed = True
            self._close_if_idle()

    @contextmanager
    def _counted(self) -> Iterator[None]:
        with self._lock:
            self._open += 1
        try:
            yield
        finally:
            with self._lock:
                self._open -= 1
                self._close_if_idle()

    def _close_if_idle(self) -> None:
        if self._is_closed and not self._open:
            self._transport.close()

    def request(
        self, method: str, url: str, content: bytes | None, headers: Mapping[str, str]
    ) -> HTTPAnswer:
        """Send a request and read the answer.

        Raises what httpx and httpcore raise, `DeadlineExceeded` and `ProtocolError`.
        """
        _exchange.set(_Exchange(min(time.monotonic() + self._timeout_s, _latest_s.get())))
        timeout = httpx.Timeout(self._timeout_s, connect=_left_s(self._connect_timeout_s))
        # `httpx.Client` logs the URL of each request, with a token in its query.
        merged = self._headers.copy()
        merged.update(headers)
        extensions = {"timeout": timeout.as_dict()}
        request = httpx.Request(method, url, headers=merged, content=content, extensions=extensions)
        with self._counted(), closing(self._transport.handle_request(request)) as response:
            if response.headers.get("Content-Encoding", "identity").lower() != "identity":
                raise ProtocolError("the answer is compressed, which was not asked for")
            # A bytearray grows in place. Joining a list of parts would need the memory twice.
            body = bytearray()
            assert isinstance(response.stream, httpx.SyncByteStream)
            for part in response.stream:
                body += part
                if len(body) > self._max_body_bytes:
                    raise ProtocolError(
                        f"the answer is longer than {self._max_body_bytes} bytes",
                        hint="Raise max_http_body (nsq: -X) if this daemon has so much to say.",
                    )
            date = response.headers.get("Date", "")
            return HTTPAnswer(response.status_code, response.reason_phrase, body, date)


class _Transport(httpx.BaseTransport):
    def __init__(self, tls: ssl.SSLContext | None) -> None:
        self._pool = httpcore.ConnectionPool(
            ssl_context=tls, keepalive_expiry=KEEP_ALIVE_S, network_backend=_Network()
        )

    def handle_request(self, request: httpx.Request) -> httpx.Response:
        url = request.url
        response = self._pool.handle_request(
            httpcore.Request(
                request.method,
                httpcore.URL(
                    scheme=url.raw_scheme, host=url.raw_host, port=url.port, target=url.raw_path
                ),
                headers=request.headers.raw,
                content=request.stream,
                extensions=request.extensions,
            )
        )
        return httpx.Response(
            response.status,
            headers=response.headers,
            stream=_Body(response),
            extensions=response.extensions,
        )

    def close(self) -> None:
        self._pool.close()


class _Body(httpx.SyncByteStream):
    def __init__(self, response: httpcore.Response) -> None:
        self._response = response

    def __iter__(self) -> Iterator[bytes]:
        return self._response.iter_stream()

    def close(self) -> None:
        self._response.close()


def _left_s(timeout_s: float | None) -> float:
    left_s = _exchange.get().ends_at_s - time.monotonic()
    if left_s <= 0:
        raise DeadlineExceeded("no answer in time")
    return left_s if timeout_s is None else min(left_s, timeout_s)


def with_time_shares(
    ips: Sequence[str], remaining_s: Callable[[], float]
) -> Iterator[tuple[str, float]]:
    """Pair each address with its share of the remaining time, in seconds.

    An address that drops packets leaves time for the others.
    """
    for left, ip in zip(range(len(ips), 0, -1), ips, strict=True):
        yield ip, max(0.001, remaining_s() / left)


class _Network(httpcore.SyncBackend):
    def connect_tcp(
        self,
        host: str,
        port: int,
        timeout: float | None = None,
        local_address: str | None = None,
        socket_options: Iterable[Any] | None = None,
    ) -> httpcore.NetworkStream:
        deadline = Deadline(_left_s(timeout))
        try:
            addresses = look_up(Address(host, port), deadline)
        except TimeoutError as exc:
            raise httpcore.ConnectTimeout(str(exc)) from exc
        except OSError as exc:
            raise httpcore.ConnectError(str(exc)) from exc
        error: Exception = httpcore.ConnectError(f"{host} has no address")
        ips = [str(address[4][0]) for address in addresses]
        for ip, share_s in with_time_shares(ips, deadline.remaining_s):
            try:
                stream = super().connect_tcp(ip, port, share_s, local_address, socket_options)
            except (httpcore.ConnectError, httpcore.ConnectTimeout) as exc:
                error = exc
            else:
                return _Stream(stream)
        raise error


class _Stream(httpcore.NetworkStream):
    def __init__(self, stream: httpcore.NetworkStream) -> None:
        self._stream = stream

    def read(self, max_bytes: int, timeout: float | None = None) -> bytes:
        data = self._stream.read(max_bytes, _left_s(timeout))
        # A server of another protocol sends something before it closes.
        if not data and not _exchange.get().has_answered:
            raise httpcore.ReadError("the connection was closed without an answer")
        _exchange.get().has_answered = True
        return data

    def write(self, buffer: bytes, timeout: float | None = None) -> None:
        self._stream.write(buffer, _left_s(timeout))

    def close(self) -> None:
        self._stream.close()

    def start_tls(
        self,
        ssl_context: ssl.SSLContext,
        server_hostname: str | None = None,
        timeout: float | None = None,
    ) -> httpcore.NetworkStream:
        return _Stream(self._stream.start_tls(ssl_context, server_hostname, _left_s(timeout)))

    def get_extra_info(self, info: str) -> Any:
        return self._stream.get_extra_info(info)
