"""An nsqlookupd that answers what the test says."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from typing import Any

import pytest
from plugins.http_server import Answer, HttpServer, Request, serving


class ScriptedLookupd(HttpServer):
    """Answers every request with ``status`` and ``answer``."""

    def __init__(self) -> None:
        super().__init__()
        self.status = 200
        self.list_nsqd()

    def list_nsqd(self, *addresses: str) -> None:
        """Answer with these nsqd."""
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
    """A factory."""
    with ExitStack() as stack:
        yield lambda: stack.enter_context(serving(ScriptedLookupd()))
