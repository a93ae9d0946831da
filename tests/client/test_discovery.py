"""What nsqlookupd answers, and when it is asked."""

from __future__ import annotations

import random
import statistics
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest

from nsqtools.client import discovery as discovery_module
from nsqtools.client.connection import http_access
from nsqtools.client.discovery import EARLY_AFTER_S, EARLY_ROUNDS_APART_S, Discovery
from nsqtools.client.io_loop import Timer
from nsqtools.client.options import ClientOptions
from nsqtools.errors import ConfigurationError, ProtocolError
from nsqtools.http.http_api import decode_lookup
from nsqtools.protocol.names import Address

PRODUCER = {
    "remote_address": "10.0.0.9:5000",
    "hostname": "host",
    "broadcast_address": "nsqd.example.org",
    "tcp_port": 4150,
    "http_port": 4151,
    "version": "1.3.0",
}


NEXT_BEST = {"broadcast_address": "", "hostname": ""}


@pytest.mark.parametrize(
    ("changes", "host"),
    [
        ({}, "nsqd.example.org"),
        ({"broadcast_address": "fe80::1"}, "fe80::1"),
        ({"broadcast_address": ""}, "host"),
        ({"broadcast_address": None, "hostname": ""}, "10.0.0.9"),
        (NEXT_BEST | {"remote_address": "[::1]:5000"}, "::1"),
        (NEXT_BEST | {"remote_address": ""}, ""),
        ({"broadcast_address": 7}, ""),
        *(({"tcp_port": port}, "") for port in (0, -1, 65536, "4150", True)),
    ],
    ids=str,
)
def test_a_producer_is_where_it_says_or_hides_no_other(
    changes: dict[str, object], host: str
) -> None:
    good = PRODUCER | {"broadcast_address": "good"}
    producers = [PRODUCER | changes, good, None, 1, "x", [], {}]
    found = decode_lookup({"channels": ["c"], "producers": producers}, "url").nsqd
    assert set(found) == {Address(each, 4150) for each in ("good", host) if each}


@pytest.mark.parametrize(
    "answer",
    [None, [], "x", {}, {"channels": []}, {"producers": []}, {"channels": 1, "producers": []}],
    ids=str,
)
def test_another_answer_is_a_protocol_error_that_names_the_url(answer: object) -> None:
    with pytest.raises(ProtocolError, match="http://h:1") as caught:
        decode_lookup(answer, "http://h:1")
    assert "4161" in caught.value.hint


def discovery(**options: Any) -> Discovery:
    return Discovery(["localhost"], "t", ClientOptions(**options), rng=random.Random(1))


def test_every_delay_is_drawn_afresh() -> None:
    polls = discovery()
    delays = [polls.next_delay_s() for _ in range(100)]
    assert all(60 <= delay <= 78 for delay in delays)
    assert statistics.pstdev(delays) > 1


def test_an_address_map_that_cannot_be_used_is_refused_at_once() -> None:
    with pytest.raises(ConfigurationError):
        Discovery(["localhost"], "t", ClientOptions(), {"a:1": "b:x"})


class Loop:
    """The clock of an I/O thread that makes no calls."""

    def __init__(self) -> None:
        self.time = 1000.0

    def now(self) -> float:
        return self.time

    def call_later(
        self, delay_s: float, call: Callable[[], object], instead_of: object = None
    ) -> Timer:
        return Timer(self, self.time + delay_s, call, 0.0)  # type: ignore[arg-type]


def test_early_rounds_are_spaced_however_often_connections_break(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A flapping nsqd must not have nsqlookupd asked each second."""
    monkeypatch.setattr(discovery_module, "run_in_background", lambda peer, work, threads: None)
    loop = Loop()
    polls = Discovery(["127.0.0.1:1"], "clicks", ClientOptions())
    polls.begin(loop, lambda *_: None)  # type: ignore[arg-type]

    def lost(at_s: float) -> float:
        """A connection is lost; the time of the next round."""
        loop.time, polls._next_at = at_s, 5000.0
        polls.ask_soon()
        return polls._next_at

    first = lost(1000)
    again = lost(first + 0.1)
    later = lost(again + 10 * EARLY_ROUNDS_APART_S)

    assert first == 1000 + EARLY_AFTER_S
    assert again == first + EARLY_ROUNDS_APART_S
    assert later == again + 10 * EARLY_ROUNDS_APART_S + EARLY_AFTER_S


# -- how daemons are asked ------------------------------------------------------------------------


def test_a_secret_goes_to_nsqlookupd_only_where_that_was_asked_for() -> None:
    options = ClientOptions(auth_secret="s", auth_requires_tls=True)
    assert http_access(options, ["http://a:1"]).bearer == ""
    access = http_access(replace(options, lookupd_authorization=True), ["http://a:1"])
    assert (access.bearer, access.auth_requires_tls, access.tls) == ("s", True, None)
    assert not http_access(ClientOptions(auth_requires_tls=False), []).auth_requires_tls


@pytest.mark.parametrize(
    ("addresses", "mapped"), [(["https://a:1"], {}), (["http://a:1"], {"b": "https://c:1"})]
)
def test_a_context_for_tls_is_made_when_an_address_needs_one(
    addresses: list[str], mapped: dict[str, str]
) -> None:
    access = http_access(ClientOptions(), addresses, mapped)
    assert access.tls is not None
    assert access.address_map == mapped
