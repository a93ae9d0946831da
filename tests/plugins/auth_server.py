"""The HTTP auth server that nsqd asks about secrets: answers by secret, remembers the questions.

    auth_server.allow("s3cret", topic="clicks", permissions=["subscribe"])
    nsqd = go_nsqd(f"-auth-http-address={auth_server.address}")
    assert auth_server.questions[0]["secret"] == "s3cret"

A secret it has not been told about is answered with 401, and nsqd then says E_AUTH_FAILED.
"""

from __future__ import annotations

import json
import time
from collections.abc import Iterator, Sequence
from http.server import ThreadingHTTPServer
from urllib.parse import parse_qsl, urlsplit

import pytest
from plugins.http_server import Handler, serving


class AuthServer(ThreadingHTTPServer):
    """Listens on a free port from the start; what it knows may change at any time."""

    daemon_threads = True

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), _QuestionHandler)
        self.address = f"127.0.0.1:{self.server_port}"
        self.questions: list[dict[str, str]] = []
        self.answers: dict[str, tuple[int, bytes]] = {}
        self.after_s = 0.0

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
        """Answer questions about `secret` with anything, well-formed or not."""
        self.answers[secret] = status, body


class _QuestionHandler(Handler):
    def do_GET(self) -> None:
        question = dict(parse_qsl(urlsplit(self.path).query, keep_blank_values=True))
        self.server.questions.append(question)
        time.sleep(self.server.after_s)
        self.reply(*self.server.answers.get(question.get("secret", ""), (401, b"{}")))


@pytest.fixture
def auth_server() -> Iterator[AuthServer]:
    with serving(AuthServer()) as server:
        yield server
