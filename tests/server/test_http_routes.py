"""Routing by httprouter's rules."""

from __future__ import annotations

import pytest

from nsqtools.server.http.routes import Found, OtherMethods, Redirect, Routes

ROUTES = Routes(
    {
        ("GET", "/ping"): "ping",
        ("POST", "/topic/create"): "create",
        ("GET", "/config/:option"): "show",
        ("PUT", "/config/:option"): "set",
        ("GET", "/debug/pprof/"): "index",
    }
)


@pytest.mark.parametrize(
    ("method", "path", "outcome"),
    [
        ("GET", "/ping", Found("ping")),
        ("GET", "/config/log_level", Found("show", "log_level")),
        ("PUT", "/config/log_level", Found("set", "log_level")),
        ("GET", "/ping/", Redirect("/ping")),
        ("GET", "/PING", Redirect("/ping")),
        ("GET", "//a/..//ping", Redirect("/ping")),
        ("GET", "/debug/pprof", Redirect("/debug/pprof/")),
        ("POST", "/ping/", OtherMethods("")),
        ("POST", "/ping", OtherMethods("GET, OPTIONS")),
        ("GET", "/topic/create", OtherMethods("OPTIONS, POST")),
        ("OPTIONS", "/config/x", OtherMethods("GET, OPTIONS, PUT")),
        ("GET", "/", OtherMethods("")),
        ("GET", "/config/", OtherMethods("")),
        ("GET", "/config/a/b", OtherMethods("")),
    ],
)
def test_a_request_finds_its_way(method: str, path: str, outcome: object) -> None:
    assert ROUTES.find(method, path) == outcome
