"""An nsqlookupd that answers what the test says."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from http.server import ThreadingHTTPServer
from typing import Any

import pytest
from plugins.http_server import Handler, serving


class ScriptedLookupd(ThreadingHTTPServer):
    """Answers every request with ``status`` and ``answer``; ``requests`` are (path, headers)."""

    daemon_threads = True

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


MakeScripted = Callable[[], ScriptedLookupd]


class _LookupHandler(Handler):
    def do_GET(self) -> None:
        self.server.requests.append((self.path, dict(self.headers)))
        self.reply(self.server.status, json.dumps(self.server.answer).encode())


@pytest.fixture
def scripted_lookupd() -> Iterator[MakeScripted]:
    """A factory."""
    with ExitStack() as stack:
        yield lambda: stack.enter_context(serving(ScriptedLookupd()))
