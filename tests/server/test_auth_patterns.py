"""Patterns of auth servers, beside what conformance/test_security.py compares with Go."""

from __future__ import annotations

import sys
import time

import pytest

from nsqtools.errors import ConfigurationError
from nsqtools.server import EmbeddedNsqd
from nsqtools.server.auth import AuthFailed, compile_pattern


@pytest.mark.parametrize("pattern", ["((a{99}){99}){9}", r"\pL{1000}", "(" * 9999 + ")" * 9999])
def test_an_oversized_pattern_is_refused_and_named(pattern: str) -> None:
    with pytest.raises(AuthFailed, match=r"^unable to compile channel '.+' - .+"):
        compile_pattern("channel", pattern)


@pytest.mark.parametrize("pattern", ["^(([a-z])+.)+[A-Z]([a-z])+$", "(a*)*b", "(.*.*.*.*.*)*="])
def test_no_name_takes_long(pattern: str) -> None:
    matches = compile_pattern("topic", pattern)
    started_s = time.process_time()
    assert not matches("a" * 64)
    assert time.process_time() - started_s < 0.5


def test_without_the_library_an_auth_server_is_refused_at_the_start(
    monkeypatch: pytest.MonkeyPatch, tmp_path: object
) -> None:
    monkeypatch.setitem(sys.modules, "re2", None)
    options = {"data_path": str(tmp_path)}
    nsqd = EmbeddedNsqd(auth_http_address=("127.0.0.1:1",), **options)
    with pytest.raises(ConfigurationError, match="auth-http-address needs") as caught:
        nsqd.start()
    assert caught.value.hint == "Install it with: pip install 'nsqtools[server]'"
    with EmbeddedNsqd(**options):  # the data path is free
        pass
