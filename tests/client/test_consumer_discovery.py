"""Finding nsqd, and finding them again.

The forms of an address are in tests/protocol/test_names.py, when to retry one is in
test_reconnect.py. One nsqd under two names is connected twice, as in all clients.
"""

from __future__ import annotations

import logging
import random
import socket
import statistics
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import pytest
from plugins.archives import unfinished
from plugins.clients import CHANNEL, OPTIONS, TOPIC, Consume, Handle
from plugins.daemons import GoNsqd
from plugins.scripted_lookupd import MakeScripted
from plugins.scripted_nsqd import ScriptedNsqd
from plugins.servers import MakeLookupd, MakeNsqd
from plugins.waiting import patience_s, wait_until

from nsqtools import Consumer
from nsqtools.client import discovery as discovery_module
from nsqtools.client.connection import http_access
from nsqtools.client.discovery import EARLY_AFTER_S, EARLY_ROUNDS_APART_S, Discovery
from nsqtools.client.options import ClientOptions
from nsqtools.errors import ConfigurationError, ConnectionFailed, ProtocolError
from nsqtools.http.http_api import HTTPAccess, decode_lookup
from nsqtools.protocol.names import Address


def test_a_topic_that_is_not_there_yet_is_not_an_error(
    nsqlookupd: MakeLookupd, go_nsqd: MakeNsqd, consume: Consume, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO)
    lookupd = nsqlookupd()
    nsqd = go_nsqd(f"-lookupd-tcp-address={lookupd.tcp_address}")
    consumer = consume(lookupd=lookupd.http_address, fail_fast=True)
    wait_until(lambda: "does not know topic" in caplog.text, what="a line that says so")
    nsqd.create_topic(TOPIC)
    wait_until(lambda: consumer.connections == [nsqd.tcp_address], what="the nsqd")
    assert caplog.text.count("does not know topic") == 1
    assert [r for r in caplog.records if r.levelno >= logging.WARNING] == []


def test_all_lookupd_are_asked_and_those_that_refuse_or_hang_delay_no_other(
    deaf_address: str, scripted_lookupd: MakeScripted, go_nsqd: MakeNsqd, consume: Consume
) -> None:
    nsqds = [go_nsqd(), go_nsqd()]
    lookupds = [scripted_lookupd(), scripted_lookupd()]
    for lookupd, nsqd in zip(lookupds, nsqds, strict=True):
        lookupd.list_nsqd(nsqd.tcp_address)
    bad = ["127.0.0.1:1", deaf_address]
    options = {"lookupd_poll_timeout_s": patience_s(0.5), "fail_fast": True}
    consumer = consume(lookupd=[*bad, *(lookupd.address for lookupd in lookupds)], **options)
    assert set(consumer.connections) == {nsqd.tcp_address for nsqd in nsqds}
    wait_until(lambda: all(len(each.requests) > 1 for each in lookupds), what="another round")
    assert consumer.stop(timeout_s=patience_s(2))
    with pytest.raises(ConnectionFailed):
        consume(lookupd=bad, **options)


def test_fifty_polls_leak_nothing(scripted_lookupd: MakeScripted, consume: Consume) -> None:
    def descriptors() -> int:
        return len(list(Path("/proc/self/fd").iterdir()))

    lookupd = scripted_lookupd()
    consume(lookupd=[lookupd.address, "127.0.0.1:1"], lookupd_poll_interval_s=0.01)
    wait_until(lambda: len(lookupd.requests) > 5, what="some polls")
    before = descriptors()
    wait_until(lambda: len(lookupd.requests) > 55, what="50 polls", timeout_s=20)
    # but for what is under way
    wait_until(lambda: descriptors() <= before + 2, what="no more descriptors than before")


def test_a_deleted_topic_is_not_recreated_by_reconnecting(
    scripted_lookupd: MakeScripted, scripted_nsqd: ScriptedNsqd, consume: Consume
) -> None:
    lookupd = scripted_lookupd()
    lookupd.list_nsqd(scripted_nsqd.address)
    consumer = consume(lookupd=lookupd.address, lookupd_poll_interval_s=0.05)
    conn = scripted_nsqd.subscribed("RDY 1")
    conn.heartbeat()
    conn.skip_to("NOP")
    lookupd.list_nsqd()
    polls = len(lookupd.requests)
    wait_until(lambda: len(lookupd.requests) > polls + 1, what="a lookup without it")
    assert consumer.connections == [scripted_nsqd.address]
    conn.close()
    with pytest.raises(AssertionError, match="no connection"):
        scripted_nsqd.accept(timeout_s=0.5)
    lookupd.list_nsqd(scripted_nsqd.address)
    scripted_nsqd.accept()


def test_a_name_is_resolved_at_every_connect(
    consume: Consume, monkeypatch: pytest.MonkeyPatch
) -> None:
    resolve = socket.getaddrinfo
    with ScriptedNsqd() as first, ScriptedNsqd() as second:
        places = [first.address, second.address]

        def moved(host: str, port: int, **more: Any) -> Any:
            if host != "nsqd.test":
                return resolve(host, port, **more)
            place_host, _, place_port = places.pop(0).rpartition(":")
            return resolve(place_host, int(place_port), **more)

        monkeypatch.setattr(socket, "getaddrinfo", moved)
        consume("nsqd.test:4150")
        first.subscribed().close()
        second.accept()


def test_an_unreachable_broadcast_address_is_mapped(
    scripted_lookupd: MakeScripted, nsqd: GoNsqd, consume: Consume
) -> None:
    lookupd = scripted_lookupd()
    lookupd.list_nsqd("nsqd.internal:4150")
    consumer = consume(
        lookupd=lookupd.address,
        more={"address_map": {"nsqd.internal:4150": nsqd.tcp_address}},
        fail_fast=True,
    )
    assert consumer.connections == [nsqd.tcp_address]


# -- what nsqlookupd answers, and when it is asked -------------------------------------------------


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
    found = decode_lookup({"channels": ["c"], "producers": producers}, "url", HTTPAccess()).nsqd
    assert set(found) == {Address(each, 4150) for each in ("good", host) if each}


@pytest.mark.parametrize(
    "answer",
    [None, [], "x", {}, {"channels": []}, {"producers": []}, {"channels": 1, "producers": []}],
    ids=str,
)
def test_another_answer_is_a_protocol_error_that_names_the_url(answer: object) -> None:
    with pytest.raises(ProtocolError, match="http://h:1") as caught:
        decode_lookup(answer, "http://h:1", HTTPAccess())
    assert "4161" in caught.value.hint


def test_every_delay_is_drawn_afresh() -> None:
    polls = Discovery(["localhost"], "t", ClientOptions(), rng=random.Random(1))
    delays = [polls.next_delay_s() for _ in range(100)]
    assert all(60 <= delay <= 78 for delay in delays)
    assert statistics.pstdev(delays) > 1


def test_an_address_map_that_cannot_be_used_is_refused_at_once() -> None:
    with pytest.raises(ConfigurationError):
        Discovery(["localhost"], "t", ClientOptions(), {"a:1": "b:x"})


def test_early_rounds_are_spaced_however_often_connections_break(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A flapping nsqd must not have nsqlookupd asked each second."""
    monkeypatch.setattr(discovery_module, "run_in_background", lambda peer, work, threads: None)
    loop = Mock()
    polls = Discovery(["127.0.0.1:1"], "clicks", ClientOptions())
    loop.now.return_value = 1000.0
    polls.begin(loop, lambda *_: None)

    def lost(at_s: float) -> float:
        """A connection is lost; the time of the next round."""
        loop.now.return_value, polls._next_at = at_s, 5000.0
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


# -- a connection that worked is lost --------------------------------------------------------------


PATIENT = {"reconnect_base_s": 3600, "reconnect_max_s": 3600}


def test_a_consumer_is_back_when_its_nsqd_is(
    nsqd: GoNsqd, consume: Consume, handle: Handle
) -> None:
    """It took eight seconds, the first delay between tries, which is an hour here."""
    nsqd.create_channel(TOPIC, CHANNEL)
    nsqd.publish(TOPIC, b"before")
    bodies: list[bytes] = []
    consumer = consume(nsqd.tcp_address, **PATIENT)
    handle(consumer, lambda m: bodies.append(m.body))
    wait_until(lambda: bodies == [b"before"], what="a message")
    nsqd.stop()
    wait_until(lambda: not consumer.connections, what="the loss")
    nsqd.start()
    nsqd.publish(TOPIC, b"after")
    wait_until(lambda: bodies[-1] == b"after", what="the next message", timeout_s=20)


@pytest.mark.parametrize("what", ["topic", "channel"])
def test_what_is_deleted_is_not_brought_back_at_once(
    nsqd: GoNsqd, consume: Consume, handle: Handle, what: str, caplog: pytest.LogCaptureFixture
) -> None:
    """nsqd closes the connection of who consumes it, and a SUB would create it again."""
    caplog.set_level(logging.INFO, "nsqtools")
    nsqd.publish(TOPIC, b"before")
    bodies: list[bytes] = []
    handle(consume(nsqd.tcp_address, **PATIENT), lambda m: bodies.append(m.body))
    wait_until(lambda: bodies == [b"before"], what="a message")
    if what == "topic":
        nsqd.post("/topic/delete", topic=TOPIC)
    else:
        nsqd.post("/channel/delete", topic=TOPIC, channel=CHANNEL)
    wait_until(lambda: "is there, and ended the connection" in caplog.text, what="the look")
    topics = nsqd.stats()["topics"]
    assert [each["channels"] for each in topics] == ([] if what == "topic" else [[]])


# -- several topics: each is looked up, and all share what may be in flight ------------------------


def test_topics_are_found_and_share_what_may_be_in_flight(
    nsqlookupd: MakeLookupd, go_nsqd: MakeNsqd
) -> None:
    lookupd, topics = nsqlookupd(), ["clicks", "orders"]
    nsqds = [go_nsqd(f"-lookupd-tcp-address={lookupd.tcp_address}") for _ in range(2)]
    channels = [(nsqd, topic) for nsqd in nsqds for topic in topics]
    for nsqd, topic in channels:
        nsqd.create_channel(topic, CHANNEL)
        nsqd.publish(topic, *[f"{topic} {number}".encode() for number in range(50)])
    bodies: list[bytes] = []
    options = replace(OPTIONS, max_in_flight=8)
    with Consumer(
        topics, CHANNEL, lookupd_http_addresses=lookupd.http_address, options=options
    ) as consumer:
        addresses = {nsqd.tcp_address for nsqd in nsqds}
        wait_until(
            lambda: all(
                set(each) == addresses for each in consumer.connections_by_topic().values()
            ),
            what="both nsqd for both topics",
        )
        assert sorted(consumer.connections) == sorted(addresses)
        for message in consumer:
            assert message.body.startswith(message.topic.encode())
            if not len(bodies) % 20:
                stats = [nsqd.channel_stats(topic, CHANNEL) for nsqd, topic in channels]
                assert sum(each["in_flight_count"] for each in stats) <= 8
            bodies.append(message.body)
            message.finish()
            if len(bodies) == 200:
                break
    assert {bodies.count(body) for body in bodies} == {2}  # of the two nsqd
    assert {unfinished(nsqd, topic, CHANNEL) for nsqd, topic in channels} == {0}


def test_a_topic_counts_once_and_there_must_be_one() -> None:
    assert Consumer(["a", "b", "a"], "c", nsqd_tcp_addresses="127.0.0.1:1").topics == ["a", "b"]
    for topics in ([], ["a", "b!"]):
        with pytest.raises(ConfigurationError):
            Consumer(topics, "c", nsqd_tcp_addresses="127.0.0.1:1")
