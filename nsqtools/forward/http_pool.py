"""Send requests to HTTP endpoints on one thread with persistent connections.

`http_sink.open_pool` chooses the engine: libcurl, where the extra ``http`` is installed, and
httpcore, on which httpx runs, elsewhere. libcurl needs a fraction of the CPU. Both follow these
rules:

- Only `HttpPool.call_soon` and `HttpPool.stop` are for other threads.
- Proxies of the environment are ignored, because a proxy would resolve names and the check for
  private addresses would not apply. An address is checked before the connection is opened.
- Redirects are not followed; `http_sink` decides about them.
- Only the head of a response counts. Once it has arrived, no error in the body changes the decision
  of the server. The body is discarded, and if it is too long the connection is closed.
- A request is sent again when a connection that was kept alive turns out to be closed.
"""

from __future__ import annotations

import collections
import ipaddress
import threading
import time
from abc import ABC, abstractmethod
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

from nsqtools.errors import ConfigurationError
from nsqtools.forward.http_requests import HttpRequest
from nsqtools.transport.stream import TLSOptions, make_context

MAX_BODY = 1 << 20  # of a response; reading more costs more than a new connection
MAX_IDLE = 1000  # connections kept alive
TICK_S = 0.1
PRIVATE = "a private address, which is not allowed"


class HttpReply(NamedTuple):
    """Response of a server.

    Without a response, ``error`` is the reason, ``was_sent`` is whether the server may have
    processed the request, and ``is_forbidden`` whether its address is not allowed.
    """

    status: int
    retry_after: str = ""
    location: str = ""
    error: str = ""
    was_sent: bool = True
    is_forbidden: bool = False


OnReply = Callable[[HttpReply, bool], None]
"""Called with the response, and with whether the request was sent twice."""


def http_tls(
    ca_file: Path | None, cert: Path | None, key: Path | None, *, is_insecure: bool
) -> TLSOptions:
    """Return the TLS of endpoints, with the certificates of the system or of ``ca_file``.

    Raises `ConfigurationError` for invalid files.
    """
    if (cert is None) != (key is None):
        raise ConfigurationError("--http-cert and --http-key are given together or not at all")
    tls = TLSOptions(
        str(ca_file or ""), str(cert or ""), str(key or ""), insecure_skip_verify=is_insecure
    )
    make_context(tls)  # raises an error that names the invalid file
    return tls


def may_connect_to(ip: str, *, allows_private: bool) -> bool:
    """Return whether a request may go to an address."""
    return allows_private or ipaddress.ip_address(ip).is_global


class HttpPool(ABC):
    """Sends all requests of a sink. Call `start` once."""

    engine: str

    def __init__(
        self, connect_timeout_s: float, request_timeout_s: float, tls: TLSOptions | None
    ) -> None:
        self.connect_timeout_s = connect_timeout_s
        self.request_timeout_s = request_timeout_s
        self.tls = tls
        self.failure: Exception | None = None
        self._calls: collections.deque[Callable[[], None]] = collections.deque()
        self._is_asleep = False
        self._is_stopping = False
        self._next_tick_s = 0.0
        self._thread = threading.Thread(target=self._run, name="nsq-http", daemon=True)

    def start(self, on_tick: Callable[[float], None], after_turn: Callable[[], None]) -> None:
        """Start the thread.

        The thread calls ``on_tick`` ten times a second with the monotonic time, and ``after_turn``
        at the end of each iteration of its loop.
        """
        self._on_tick, self._after_turn = on_tick, after_turn
        self._thread.start()

    def call_soon(self, call: Callable[[], None]) -> None:
        """Schedule a call on the pool's thread (any thread)."""
        self._calls.append(call)
        if self._is_asleep:
            self._is_asleep = False
            self._wake()

    def stop(self) -> None:
        """Close all connections and join the thread (any other thread)."""
        self._is_stopping = True
        self.call_soon(lambda: None)
        self._thread.join()

    @abstractmethod
    def send(self, request: HttpRequest, done: OnReply) -> None:
        """Send a request; ``done`` is called once, on this thread."""

    @abstractmethod
    def _run(self) -> None:
        """Run the loop until the pool stops; an exception goes to ``failure``."""

    @abstractmethod
    def _wake(self) -> None:
        """Wake the loop (any thread)."""

    def _run_calls(self) -> None:
        for _ in range(len(self._calls)):
            self._calls.popleft()()

    def _end_turn(self) -> None:
        self._after_turn()
        if (now := time.monotonic()) >= self._next_tick_s:
            self._next_tick_s = now + TICK_S
            self._on_tick(now)
