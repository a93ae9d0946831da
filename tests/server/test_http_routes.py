"""Routing by httprouter's rules."""

from __future__ import annotations

import pytest

from nsqtools.server.daemon_log import DaemonLog
from nsqtools.server.http.foundation import Call, HTTPApi, Reply, plain_reply

API = HTTPApi(
    {
        ("GET", "/ping"): lambda call: plain_reply("ping"),
        ("POST", "/topic/create"): lambda call: plain_reply("create"),
        ("GET", "/config/:option"): lambda call: plain_reply(f"show {call.option}"),
        ("PUT", "/config/:option"): lambda call: plain_reply("set"),
        ("GET", "/debug/pprof/"): lambda call: plain_reply("index"),
    },
    DaemonLog(None, ""),
)


@pytest.mark.parametrize(
    ("method", "path", "status", "answer"),
    [
        ("GET", "/ping", 200, b"ping"),
        ("GET", "/config/log_level", 200, b"show log_level"),
        ("PUT", "/config/log_level", 200, b"set"),
        ("GET", "/ping/", 301, b"Location: /ping\r\n"),
        ("GET", "/PING", 301, b"Location: /ping\r\n"),
        ("GET", "//a/..//ping", 301, b"Location: /ping\r\n"),
        ("GET", "/debug/pprof", 301, b"Location: /debug/pprof/\r\n"),
        ("GET", "/config/a\r\nX: y/", 301, b"Location: /config/a%0D%0AX:%20y\r\n"),
        ("PUT", "/CONFIG/x/", 404, b"NOT_FOUND"),
        ("PUT", "/config/x/", 307, b"Location: /config/x\r\n"),
        ("POST", "/ping/", 404, b"NOT_FOUND"),
        ("POST", "/ping", 405, b"Allow: GET, OPTIONS\r\n"),
        ("GET", "/topic/create", 405, b"Allow: OPTIONS, POST\r\n"),
        ("OPTIONS", "/config/x", 200, b"Allow: GET, OPTIONS, PUT\r\n"),
        ("GET", "/", 404, b"NOT_FOUND"),
        ("GET", "/config/", 404, b"NOT_FOUND"),
        ("GET", "/config/a/b", 404, b"NOT_FOUND"),
    ],
)
def test_a_request_finds_its_way(method: str, path: str, status: int, answer: bytes) -> None:
    call = Call(method, path, path, {})
    API.find(call)
    reply = API.answer(call)
    assert isinstance(reply, Reply)
    assert reply.status == status
    assert answer in reply.fields or answer in reply.body
