"""A real HTTP server that does what a test says: answers by plan, remembers every request.

    def test_...(http_server):
        server = http_server(503, 503)          # then 200 for ever
        server.requests[0].headers["X-Nsq-Topic"]

``server.answer`` may be a function of the request that returns a status, or a status and headers.
`serves` is for a server that speaks no HTTP, or a bad one.
"""

from __future__ import annotations

import socket
import socketserver
import ssl
import threading
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import ExitStack, contextmanager, suppress
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any, NamedTuple, TypeVar

import pytest
from plugins.certificates import Credentials

S = TypeVar("S", bound=socketserver.BaseServer)
Serves = Callable[[Callable[[socket.socket], None]], str]


@contextmanager
def serving(server: S) -> Iterator[S]:
    """Serve on a thread of its own meanwhile."""
    with server:
        thread = threading.Thread(target=server.serve_forever, args=(0.02,), daemon=True)
        thread.start()
        yield server
        server.shutdown()
        thread.join()


class Handler(BaseHTTPRequestHandler):
    """``self.read()`` and ``self.reply(...)``; requests are kept by the server, and not logged."""

    protocol_version = "HTTP/1.1"
    wbufsize = 1 << 16  # head and body in one write: two would wait for an acknowledgement
    disable_nagle_algorithm = True
    server: Any

    def read(self) -> bytes:
        return self.rfile.read(int(self.headers.get("Content-Length") or 0))

    def reply(self, status: int, body: bytes, headers: Mapping[str, str] | None = None) -> None:
        self.send_response(status)
        for name, value in (headers or {}).items():
            self.send_header(name, value)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, *arguments: object) -> None:
        """Silent."""


class _ManyAtOnce(socketserver.ThreadingTCPServer):
    daemon_threads = True
    request_queue_size = 100


def http(pieces: Iterable[bytes]) -> Callable[[socket.socket], None]:
    """Send the pieces whatever is asked."""

    def talk(accepted: socket.socket) -> None:
        accepted.recv(10_000)
        for piece in pieces:
            accepted.sendall(piece)

    return talk


@pytest.fixture
def serves() -> Iterator[Serves]:
    """``serves(talk)``: the address of a server that calls ``talk`` with each connection."""
    with ExitStack() as stack:

        def serve(talk: Callable[[socket.socket], None]) -> str:
            class Talk(socketserver.BaseRequestHandler):
                def handle(self) -> None:
                    with suppress(OSError):  # the client has had enough
                        talk(self.request)

            server = stack.enter_context(serving(_ManyAtOnce(("127.0.0.1", 0), Talk)))
            return "{}:{}".format(*server.server_address)

        yield serve


class Request(NamedTuple):
    """What came."""

    method: str
    target: str
    headers: dict[str, str]
    body: bytes


Answer = int | tuple[int, dict[str, str]]


class HttpServer(ThreadingHTTPServer):
    """Listens on a free port from the start."""

    daemon_threads = True
    request_queue_size = 128

    def __init__(self, plan: tuple[Answer, ...], credentials: Credentials | None) -> None:
        super().__init__(("127.0.0.1", 0), _Planned)
        self.url = f"{'https' if credentials else 'http'}://127.0.0.1:{self.server_port}"
        self.requests: list[Request] = []
        self.connections = 0
        self._plan = list(plan)
        self._lock = threading.Lock()
        self.answer: Callable[[Request], Answer] = lambda request: 200
        if credentials is not None:
            context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
            context.load_cert_chain(credentials.cert, credentials.key)
            self.socket = context.wrap_socket(self.socket, server_side=True)

    @property
    def bodies(self) -> list[bytes]:
        return sorted(request.body for request in self.requests)

    def take(self, request: Request) -> Answer:
        with self._lock:
            self.requests.append(request)
            if self._plan:
                return self._plan.pop(0)
        return self.answer(request)

    def handle_error(self, request: object, client_address: object) -> None:
        """A client that went away is no news."""


class _Planned(Handler):
    def setup(self) -> None:
        super().setup()
        self.server.connections += 1

    def do_GET(self) -> None:
        request = Request(self.command, self.path, dict(self.headers), self.read())
        answer = self.server.take(request)
        status, headers = answer if isinstance(answer, tuple) else (answer, {})
        if status == 0:  # no answer at all
            self.close_connection = True
        else:
            self.reply(status, b"ok", headers)

    do_POST = do_GET


MakeServer = Callable[..., HttpServer]


@pytest.fixture
def http_server() -> Iterator[MakeServer]:
    with ExitStack() as stack:
        yield lambda *plan, credentials=None: stack.enter_context(
            serving(HttpServer(plan, credentials))
        )
