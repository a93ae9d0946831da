"""An nsqlookupd that answers what the test says."""

from __future__ import annotations

import json
import threading
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any, cast

import pytest


class ScriptedLookupd(ThreadingHTTPServer):
    """Answers every request with ``status`` and ``answer``; ``requests`` are (path, headers)."""

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), _LookupHandler)
        self.address = f"127.0.0.1:{self.server_port}"
        self.status = 200
        self.answer: Any = {"channels": [], "producers": []}
        self.requests: list[tuple[str, dict[str, str]]] = []

    def list_nsqd(self, *addresses: str) -> None:
        """Answer with these nsqd."""
        producers = []
        for address in addresses:
            host, _, port = address.rpartition(":")
            producers.append({"broadcast_address": host.strip("[]"), "tcp_port": int(port)})
        self.answer = {"channels": [], "producers": producers}


class _LookupHandler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    wbufsize = 1 << 16  # head and body in one write: two would wait for an acknowledgement

    def do_GET(self) -> None:
        lookupd = cast(ScriptedLookupd, self.server)
        lookupd.requests.append((self.path, dict(self.headers)))
        body = json.dumps(lookupd.answer).encode()
        self.send_response(lookupd.status)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, *arguments: object) -> None:
        """Say nothing: the requests are kept."""


@pytest.fixture
def scripted_lookupd() -> Iterator[Callable[[], ScriptedLookupd]]:
    """A factory."""
    with ExitStack() as stack:

        def make() -> ScriptedLookupd:
            server = stack.enter_context(ScriptedLookupd())
            server.daemon_threads = True
            thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01})
            thread.start()
            stack.callback(thread.join)
            stack.callback(server.shutdown)
            return server

        yield make
