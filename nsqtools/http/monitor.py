"""The HTTP side of a service: /metrics for Prometheus, probes for Kubernetes and load balancers.

It uses the standard library's server on a daemon thread, and a few threads for requests.

Traps: a slow client must not occupy a thread forever, and slow clients together must occupy only a
few threads. While the process has no free descriptor the socket stays ready, so accepting must not
be retried in a hot loop.
"""

from __future__ import annotations

import logging
import socket
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager, suppress
from http import HTTPStatus
from http.server import BaseHTTPRequestHandler
from socketserver import ThreadingTCPServer
from typing import Any

from nsqtools.errors import ConfigurationError
from nsqtools.protocol.names import Address, parse_address
from nsqtools.records.prometheus import CONTENT_TYPE, Metric, encode_metrics

log = logging.getLogger("nsqtools")

# From the first byte of a request to the last.
REQUEST_TIMEOUT_S = 5.0
# How soon the server notices its end, and requests that exceed the timeout.
POLL_S = 0.1
# Concurrent requests. Further ones are refused.
MAX_REQUESTS = 8
# The pause after a failed accept.
ACCEPT_RETRY_S = 0.5

PLAIN = "text/plain; charset=utf-8"

# Status, content type and text.
MonitorReply = tuple[HTTPStatus, str, str]


@contextmanager
def serving_monitor(
    listen: str,
    metrics: Callable[[], Iterable[Metric]],
    probes: Mapping[str, Callable[[], tuple[bool, str]]],
) -> Iterator[str]:
    """Serve inside; the value is the address. ``probes`` are by path.

    Raises `ConfigurationError` when it cannot listen.
    """

    def answer(path: str) -> MonitorReply:
        if path == "/metrics":
            return HTTPStatus.OK, CONTENT_TYPE, encode_metrics(metrics())
        if probe := probes.get(path):
            is_well, text = probe()
            status = HTTPStatus.OK if is_well else HTTPStatus.SERVICE_UNAVAILABLE
            return status, PLAIN, f"{text}\n"
        return HTTPStatus.NOT_FOUND, PLAIN, f"the paths are {', '.join(['/metrics', *probes])}\n"

    address = _address(listen)
    try:
        server = _Server(address, answer)
    except OSError as exc:
        raise ConfigurationError(
            f"cannot listen on {address} ({exc.strerror or exc})",
            hint="Give --listen-http another port; 0 takes any free one.",
        ) from exc
    thread = threading.Thread(
        target=server.serve_forever, args=(POLL_S,), name="nsq-monitor", daemon=True
    )
    thread.start()
    try:
        yield str(Address(*server.socket.getsockname()[:2]))
    finally:
        server.shutdown()
        thread.join()
        server.server_close()


def _address(text: str) -> Address:
    """``PORT`` and ``:PORT`` are on loopback. Port 0, unlike elsewhere, is fine."""
    host, colon, port = text.strip().rpartition(":")
    if port.isdecimal() and int(port[:6]) == 0:
        return Address(host.strip("[]") or "127.0.0.1", 0)
    return parse_address(text if colon and host else f"127.0.0.1:{port}")


class _Server(ThreadingTCPServer):  # HTTPServer looks the host's name up, and can take seconds
    allow_reuse_address = True
    daemon_threads = True
    block_on_close = False
    request_queue_size = 64

    def __init__(self, address: Address, answer: Callable[[str], MonitorReply]) -> None:
        self.address_family = socket.AF_INET6 if ":" in address.host else socket.AF_INET
        self.answer = answer
        self._began: dict[socket.socket, float] = {}
        super().__init__((address.host, address.port), _Request)

    def get_request(self) -> tuple[socket.socket, Any]:
        try:
            return super().get_request()
        except OSError:
            time.sleep(ACCEPT_RETRY_S)
            raise

    def verify_request(self, request: Any, client_address: Any) -> bool:
        if has_room := len(self._began) < MAX_REQUESTS:
            self._began[request] = time.monotonic()
        return has_room

    def shutdown_request(self, request: Any) -> None:
        self._began.pop(request, None)
        super().shutdown_request(request)

    def service_actions(self) -> None:
        latest = time.monotonic() - REQUEST_TIMEOUT_S
        for request, began in list(self._began.items()):
            if began < latest:
                with suppress(OSError):  # it has just ended by itself
                    request.shutdown(socket.SHUT_RDWR)

    def handle_error(self, request: Any, client_address: Any) -> None:
        log.debug("a request from %s failed", client_address, exc_info=True)


class _Request(BaseHTTPRequestHandler):
    server: _Server
    timeout = REQUEST_TIMEOUT_S
    server_version = "nsq"
    sys_version = ""

    def do_GET(self) -> None:
        status, kind, text = self.server.answer(self.path.partition("?")[0])
        body = text.encode()
        self.send_response(status)
        self.send_header("Content-Type", kind)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(body)

    do_HEAD = do_GET

    def log_message(self, format: str, *args: Any) -> None:
        log.debug("http %s: %s", self.address_string(), format % args)
