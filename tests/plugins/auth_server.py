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
from urllib.parse import parse_qsl, urlsplit

import pytest
from plugins.http_server import Answer, HttpServer, Request, serving


class AuthServer(HttpServer):
    """What it knows may change at any time."""

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
        """Answer questions about `secret` with anything, well-formed or not."""
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
