"""A running ``nsq web``.

console       a factory: ``console("--nsqd-http-address=127.0.0.1:4151", "--allow-changes")``;
              ``.url``, and ``.get("/ping")`` to ask it
"""

import http.client
import json
import re
import ssl
import threading
from collections.abc import Callable, Mapping
from contextlib import closing, suppress
from typing import Any, NamedTuple
from urllib.parse import urlsplit

import pytest
from plugins.cli import NsqProcess, SpawnNsq
from plugins.waiting import patience_s, wait_until


class Answer(NamedTuple):
    """``headers`` have lower-case names."""

    status: int
    headers: Mapping[str, str]
    body: bytes

    @property
    def text(self) -> str:
        return self.body.decode()

    def json(self) -> Any:
        return json.loads(self.body)


def ask(
    url: str,
    method: str = "GET",
    *,
    headers: Mapping[str, str] | None = None,
    body: bytes | str | None = None,
    tls: ssl.SSLContext | None = None,
) -> Answer:
    """Send one request, and follow no redirect."""
    parts = urlsplit(url)
    connection = http.client.HTTPConnection(parts.netloc, timeout=patience_s(20))
    if tls is not None:
        connection = http.client.HTTPSConnection(parts.netloc, timeout=patience_s(20), context=tls)
    path = parts.path + (f"?{parts.query}" if parts.query else "")
    with closing(connection):
        connection.request(method, path or "/", body, dict(headers or {}))
        response = connection.getresponse()
        names = {name.lower(): value for name, value in response.getheaders()}
        return Answer(response.status, names, response.read())


class Console:
    """One process. ``url`` has no slash at its end; ``log`` is its stderr."""

    def __init__(self, process: NsqProcess) -> None:
        self.process = process
        self.lines: list[str] = []
        threading.Thread(target=self._read, daemon=True).start()
        serving = re.compile(r"nsq: serving (\S+)/\n")
        self.url = wait_until(lambda: serving.search(self.log), what="it serves", timeout_s=20)[1]

    @property
    def log(self) -> str:
        return "".join(self.lines)

    def get(self, path: str, **more: Any) -> Answer:
        return ask(self.url + path, **more)

    def post(self, path: str, body: bytes | str | None = None, **more: Any) -> Answer:
        return ask(self.url + path, "POST", body=body, **more)

    def _read(self) -> None:
        with suppress(ValueError):  # closed at the end of the test
            for line in self.process.stderr:
                self.lines.append(line.decode("utf-8", "replace"))


MakeConsole = Callable[..., Console]


@pytest.fixture
def console(spawn_nsq: SpawnNsq) -> MakeConsole:
    def start(*arguments: str) -> Console:
        words = ["web", "--listen", "127.0.0.1:0", *arguments]
        # daemons are as slow as this machine
        return Console(spawn_nsq(words, {"NSQ_TIMEOUT": f"{patience_s(2):g}s"}))

    return start
