"""Real HTTP servers with scripted responses, which record every request.

    def test_...(http_server):
        server = http_server(503, 503)          # then always 200
        server.requests[0].headers["X-Nsq-Topic"]

``server.answer`` may be a function of the request that returns a status, or a status and headers.
`serves` is for servers without HTTP or with malformed HTTP; `HttpServer` is for subclasses.
"""

import json
import socket
import socketserver
import ssl
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import ExitStack, contextmanager, suppress
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any, NamedTuple, TypeVar
from urllib.parse import parse_qsl, urlsplit

import pytest
from plugins.certificates import Credentials

S = TypeVar("S", bound=socketserver.BaseServer)
Serves = Callable[[Callable[[socket.socket], None]], str]
Planned = int | tuple[int, dict[str, str]]


@contextmanager
def serving(server: S) -> Iterator[S]:
    """Serve on another thread during the block."""
    with server:
        thread = threading.Thread(target=server.serve_forever, args=(0.02,), daemon=True)
        thread.start()
        yield server
        server.shutdown()
        thread.join()


class Request(NamedTuple):
    method: str
    target: str
    headers: dict[str, str]
    body: bytes


Answer = tuple[int, dict[str, str], bytes]
"""Status (0: no answer at all), headers and body."""


class HttpServer(ThreadingHTTPServer):
    """Listens on a free port from the start, and records the ``requests``."""

    daemon_threads = True
    request_queue_size = 128
    reason: str | None = None  # sent with every status

    def __init__(self, credentials: Credentials | None = None) -> None:
        super().__init__(("127.0.0.1", 0), _Handler)
        self.address = f"127.0.0.1:{self.server_port}"
        self.url = f"{'https' if credentials else 'http'}://{self.address}"
        self.requests: list[Request] = []
        self.connections = 0
        if credentials is not None:
            context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
            context.load_cert_chain(credentials.cert, credentials.key)
            self.socket = context.wrap_socket(self.socket, server_side=True)

    def get_request(self) -> tuple[socket.socket, Any]:
        try:
            return super().get_request()
        finally:
            self.connections += 1  # including failed handshakes

    def take(self, request: Request) -> Answer:
        """Choose the response."""
        raise NotImplementedError

    def handle_error(self, request: object, client_address: object) -> None:
        """Ignore clients that have disconnected."""


class _Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    wbufsize = 1 << 16  # head and body in one write: two would wait for an acknowledgement
    disable_nagle_algorithm = True
    server: HttpServer

    def do_GET(self) -> None:
        body = self.rfile.read(int(self.headers.get("Content-Length") or 0))
        request = Request(self.command, self.path, dict(self.headers), body)
        self.server.requests.append(request)
        status, headers, text = self.server.take(request)
        if status == 0:
            self.close_connection = True
            return
        self.send_response(status, self.server.reason)
        for name, value in {**headers, "Content-Length": str(len(text))}.items():
            self.send_header(name, value)
        self.end_headers()
        self.wfile.write(text)

    do_POST = do_PUT = do_GET

    def log_message(self, *arguments: object) -> None:
        """Log nothing."""


class PlannedServer(HttpServer):
    """Answers by plan, then with ``answer``: a status, or a status and headers."""

    def __init__(self, plan: Iterable[Planned], credentials: Credentials | None) -> None:
        super().__init__(credentials)
        self._plan = iter(plan)
        self.answer: Callable[[Request], Planned] = lambda request: 200

    @property
    def bodies(self) -> list[bytes]:
        return sorted(request.body for request in self.requests)

    def take(self, request: Request) -> Answer:
        planned = next(self._plan, None)
        if planned is None:
            planned = self.answer(request)
        status, headers = planned if isinstance(planned, tuple) else (planned, {})
        return status, headers, b"ok"


MakeServer = Callable[..., PlannedServer]


@pytest.fixture
def http_server() -> Iterator[MakeServer]:
    with ExitStack() as stack:
        yield lambda *plan, credentials=None: stack.enter_context(
            serving(PlannedServer(plan, credentials))
        )


class ScriptedLookupd(HttpServer):
    """An nsqlookupd that answers every request with ``status`` and ``answer``."""

    def __init__(self) -> None:
        super().__init__()
        self.status = 200
        self.list_nsqd()

    def list_nsqd(self, *addresses: str) -> None:
        """Answer with these nsqd as the producers."""
        places = [address.rpartition(":") for address in addresses]
        producers = [
            {"broadcast_address": host.strip("[]"), "tcp_port": int(port)}
            for host, _, port in places
        ]
        self.answer: Any = {"channels": [], "producers": producers}

    def take(self, request: Request) -> Answer:
        return self.status, {}, json.dumps(self.answer).encode()


MakeScripted = Callable[[], ScriptedLookupd]


@pytest.fixture
def scripted_lookupd() -> Iterator[MakeScripted]:
    with ExitStack() as stack:
        yield lambda: stack.enter_context(serving(ScriptedLookupd()))


class AuthServer(HttpServer):
    """The server that nsqd asks about secrets; its permissions may change at any time.

        auth_server.allow("s3cret", topic="clicks", permissions=["subscribe"])
        nsqd = go_nsqd(f"-auth-http-address={auth_server.address}")
        assert auth_server.questions[0]["secret"] == "s3cret"

    It answers with 401 for an unknown secret, and nsqd then with E_AUTH_FAILED.
    """

    def __init__(self) -> None:
        super().__init__()
        self.answers: dict[str, tuple[int, bytes]] = {}
        self.after_s = 0.0

    @property
    def questions(self) -> list[dict[str, str]]:
        return [self._question(request) for request in self.requests]

    def allow(
        self,
        secret: str,
        *,
        topic: str = ".*",
        channels: Sequence[str] = (".*",),
        permissions: Sequence[str] = ("subscribe", "publish"),
        ttl_s: int = 3600,
        identity: str = "tester",
        after_s: float = 0.0,
    ) -> None:
        """Authorize `secret`; topic and channels are regular expressions for nsqd's search."""
        self.after_s = after_s
        authorization = {"topic": topic, "channels": [*channels], "permissions": [*permissions]}
        document = {"ttl": ttl_s, "identity": identity, "authorizations": [authorization]}
        self.answer(secret, 200, json.dumps(document).encode())

    def answer(self, secret: str, status: int, body: bytes) -> None:
        """Answer questions about `secret` with any body, well-formed or not."""
        self.answers[secret] = status, body

    def take(self, request: Request) -> Answer:
        time.sleep(self.after_s)
        secret = self._question(request).get("secret", "")
        status, body = self.answers.get(secret, (401, b"{}"))
        return status, {}, body

    def _question(self, request: Request) -> dict[str, str]:
        return dict(parse_qsl(urlsplit(request.target).query, keep_blank_values=True))


@pytest.fixture
def auth_server() -> Iterator[AuthServer]:
    with serving(AuthServer()) as server:
        yield server


# -- servers without HTTP, or with malformed HTTP -------------------------------------------------


class _ManyAtOnce(socketserver.ThreadingTCPServer):
    daemon_threads = True
    request_queue_size = 100


@contextmanager
def talking(talk: Callable[[socket.socket], None]) -> Iterator[str]:
    """The address of a server that calls ``talk`` with each connection."""

    class Talk(socketserver.BaseRequestHandler):
        def handle(self) -> None:
            with suppress(OSError):  # the client has disconnected
                talk(self.request)

    with serving(_ManyAtOnce(("127.0.0.1", 0), Talk)) as server:
        yield "{}:{}".format(*server.server_address)


@pytest.fixture
def serves() -> Iterator[Serves]:
    with ExitStack() as stack:
        yield lambda talk: stack.enter_context(talking(talk))


def http(pieces: Iterable[bytes]) -> Callable[[socket.socket], None]:
    """Send the pieces in response to any request."""

    def talk(accepted: socket.socket) -> None:
        accepted.recv(10_000)
        for piece in pieces:
            accepted.sendall(piece)

    return talk
