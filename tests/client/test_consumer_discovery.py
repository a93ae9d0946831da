"""Lookups, connecting and reconnecting."""

import logging
import random
import socket
import statistics
import time
from dataclasses import replace
from functools import partial
from itertools import pairwise
from typing import Any
from unittest.mock import Mock

import pytest
from plugins.archives import unfinished
from plugins.clients import CHANNEL, OPTIONS, TOPIC, Consume, Handle, take
from plugins.http_server import MakeScripted
from plugins.scripted_nsqd import ScriptedNsqd
from plugins.servers import AnyNsqd, GoNsqd, MakeLookupd, MakeNsqd, Nsqd
from plugins.waiting import patience_s, wait_until

from nsqtools import ClientOptions, ConnectionFailed, Consumer, errors
from nsqtools.client import connecting
from nsqtools.client import discovery as discovery_module
from nsqtools.client.connecting import KnownNsqd, RetryDelays
from nsqtools.client.connection import http_access
from nsqtools.client.discovery import EARLY_AFTER_S, EARLY_ROUNDS_APART_S, Discovery
from nsqtools.http.http_api import HTTPAccess, decode_lookup
from nsqtools.protocol.names import Address, parse_address


def test_a_missing_topic_is_not_an_error(
    nsqlookupd: MakeLookupd, go_nsqd: MakeNsqd, consume: Consume, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO)
    lookupd = nsqlookupd()
    nsqd = go_nsqd(f"-lookupd-tcp-address={lookupd.tcp_address}")
    consumer = consume(lookupd=lookupd.http_address, fail_fast=True)
    wait_until(lambda: "does not list topic" in caplog.text, what="a line that says so")
    nsqd.create_topic(TOPIC)
    wait_until(lambda: consumer.connections == [nsqd.tcp_address], what="the nsqd")
    assert caplog.text.count("does not list topic") == 1
    assert [r for r in caplog.records if r.levelno >= logging.WARNING] == []


def test_failing_and_hanging_nsqlookupd_delay_no_other_nsqlookupd(
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
    wait_until(lambda: all(len(lookupd.requests) > 1 for lookupd in lookupds), what="another round")
    assert consumer.stop(timeout_s=patience_s(2))
    with pytest.raises(ConnectionFailed):
        consume(lookupd=bad, **options)


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


def test_a_name_is_resolved_each_time(consume: Consume, monkeypatch: pytest.MonkeyPatch) -> None:
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


# -- responses of nsqlookupd, and the times of lookups ---------------------------------------------


GOOD = {"broadcast_address": "good", "tcp_port": 4150, "http_port": 4151, "version": "1.3.0"}
BOTH_NAMES = {"broadcast_address": "nsqd.example.org", "hostname": "host"}
PRODUCER = GOOD | BOTH_NAMES | {"remote_address": "10.0.0.9:5000"}
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
def test_an_invalid_producer_hides_no_other_producer(changes: dict[str, object], host: str) -> None:
    producers = [PRODUCER | changes, GOOD, None, 1, "x", [], {}]
    addresses = decode_lookup({"channels": ["c"], "producers": producers}, "url", HTTPAccess()).nsqd
    assert set(addresses) == {Address(name, 4150) for name in ("good", host) if name}


def test_lookup_delays_are_random_and_early_lookups_are_spaced(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A flapping nsqd must not cause a lookup every second."""
    monkeypatch.setattr(discovery_module.thread_pool, "run", lambda *_: None)
    loop, rounds = Mock(), [1000.0]
    polls = Discovery(["127.0.0.1:1"], "clicks", ClientOptions())
    loop.now.return_value = 1000.0
    polls.begin(loop, lambda *_: None)
    for after_s in (0, 0.1, 10 * EARLY_ROUNDS_APART_S):  # a connection is lost
        loop.now.return_value, polls._next_at = rounds[-1] + after_s, 5000.0
        polls.ask_soon()
        rounds.append(polls._next_at)
    apart_s = [late - early for early, late in pairwise(rounds)]
    late_s = 10 * EARLY_ROUNDS_APART_S + EARLY_AFTER_S
    assert apart_s == pytest.approx([EARLY_AFTER_S, EARLY_ROUNDS_APART_S, late_s])
    polls = Discovery(["localhost"], "t", ClientOptions())
    delays = [polls.next_delay_s() for _ in range(100)]
    assert all(60 <= delay <= 78 for delay in delays)
    assert statistics.pstdev(delays) > 1


def test_the_secret_goes_to_nsqlookupd_only_on_request() -> None:
    options = ClientOptions(auth_secret="s", auth_requires_tls=True)
    assert http_access(options, ["http://a:1"]).bearer == ""
    access = http_access(replace(options, lookupd_authorization=True), ["http://a:1"])
    assert (access.bearer, access.auth_requires_tls, access.tls) == ("s", True, None)
    assert not http_access(ClientOptions(auth_requires_tls=False), []).auth_requires_tls
    # a TLS context is made if an address needs it
    assert http_access(ClientOptions(), ["https://a:1"]).tls is not None
    assert http_access(ClientOptions(), ["http://a:1"], {"b": "https://c:1"}).tls is not None


PATIENT = {"reconnect_base_s": 3600, "reconnect_max_s": 3600}


def test_a_consumer_reconnects_to_its_nsqd(
    nsqd: GoNsqd, consume: Consume, handle: Handle, caplog: pytest.LogCaptureFixture
) -> None:
    """A regression would wait for the first delay between attempts, which is an hour here."""
    nsqd.create_channel(TOPIC, CHANNEL)
    nsqd.publish(TOPIC, b"before")
    bodies: list[bytes] = []
    consumer = consume(nsqd.tcp_address, **PATIENT)
    handle(consumer, lambda m: bodies.append(m.body))
    wait_until(lambda: bodies == [b"before"], what="a message")
    nsqd.stop()
    # attempts begin before nsqd is back: an nsqd that answers then may have deleted the channel
    wait_until(lambda: "connection refused" in caplog.text, what="an attempt meanwhile")
    with socket.create_server(parse_address(nsqd.tcp_address)) as other:
        other.settimeout(patience_s(20))
        other.accept()[0].close()
    nsqd.start()
    nsqd.publish(TOPIC, b"after")
    wait_until(lambda: bodies[-1] == b"after", what="the next message", timeout_s=20)


def know_http_port(nsqd: Nsqd, monkeypatch: pytest.MonkeyPatch) -> None:
    """Replace the usual difference of nsqd's ports by that of this nsqd."""
    tcp, http = parse_address(nsqd.tcp_address), parse_address(nsqd.http_address)
    monkeypatch.setattr(connecting, "HTTP_PORT_OFFSET", http.port - tcp.port)


@pytest.mark.parametrize("cause", [ConnectionResetError(), None], ids=["reset", "end of stream"])
def test_a_cut_connection_of_a_healthy_nsqd_costs_no_delay(
    nsqd: GoNsqd, consume: Consume, monkeypatch: pytest.MonkeyPatch, cause: OSError | None
) -> None:
    """A reset is a fault of the network. After an end of stream nsqd is asked over HTTP."""
    if cause is None:
        know_http_port(nsqd, monkeypatch)
    nsqd.publish(TOPIC, b"before", b"after")
    consumer = consume(nsqd.tcp_address, **PATIENT, max_in_flight=1)
    take(consumer, 1)[0].finish()
    (subscription,) = consumer._io.subscriptions
    error = errors.ConnectionLost("cut")
    error.__cause__ = cause
    consumer._io.loop.call_soon(partial(subscription.connection.lose, error))
    wait_until(lambda: {*consumer._io.subscriptions} - {subscription}, what="another connection")


@pytest.mark.parametrize("is_given", [False, True])
@pytest.mark.parametrize("what", ["topic", "channel"])
def test_a_consumer_waits_for_a_deleted_topic_or_channel(
    any_nsqd: AnyNsqd,
    consume: Consume,
    monkeypatch: pytest.MonkeyPatch,
    what: str,
    is_given: bool,
) -> None:
    nsqd = any_nsqd()
    http_addresses: dict[str, Any] = {"_nsqd_http_addresses": ["other:4151", nsqd.http_address]}
    if not is_given:
        know_http_port(nsqd, monkeypatch)
    monkeypatch.setattr(connecting, "UPTIME_MARGIN_S", -600.0)  # as if nsqd had run for a long time
    nsqd.publish(TOPIC, b"before")
    arguments = http_addresses if is_given else {}
    consumer = consume(nsqd.tcp_address, more=arguments)  # it retries after 0.05 s
    take(consumer, 1)[0].finish()
    (dialer,) = consumer._io.dialers.values()
    nsqd.post(f"/{what}/delete", topic=TOPIC, channel=CHANNEL)
    wait_until(lambda: f"{what} " in str(dialer.errors), what="a look")
    time.sleep(0.3)  # several more attempts
    topics = nsqd.stats()["topics"]
    assert [entry["channels"] for entry in topics] == ([] if what == "topic" else [[]])
    if what == "topic":
        nsqd.publish(TOPIC, b"again")
    else:
        nsqd.create_channel(TOPIC, CHANNEL)
    wait_until(lambda: consumer.connections, what="the connection")


@pytest.mark.parametrize("what", ["topic", "channel"])
def test_a_deleted_topic_or_channel_is_not_recreated_immediately(
    nsqd: GoNsqd, consume: Consume, handle: Handle, what: str, caplog: pytest.LogCaptureFixture
) -> None:
    """nsqd closes the connections of its consumers, and a SUB would recreate it."""
    caplog.set_level(logging.INFO, "nsqtools")
    nsqd.publish(TOPIC, b"before")
    bodies: list[bytes] = []
    handle(consume(nsqd.tcp_address, **PATIENT), lambda m: bodies.append(m.body))
    wait_until(lambda: bodies == [b"before"], what="a message")
    nsqd.post(f"/{what}/delete", topic=TOPIC, channel=CHANNEL)
    wait_until(lambda: "ended the connection, and is running" in caplog.text, what="the look")
    topics = nsqd.stats()["topics"]
    assert [entry["channels"] for entry in topics] == ([] if what == "topic" else [[]])


def test_topics_are_found_and_share_the_limit(nsqlookupd: MakeLookupd, go_nsqd: MakeNsqd) -> None:
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
        addresses = sorted(nsqd.tcp_address for nsqd in nsqds)
        expected = dict.fromkeys(topics, addresses)
        wait_until(
            lambda: {k: sorted(v) for k, v in consumer.connections_by_topic().items()} == expected,
            what="both nsqd for both topics",
        )
        assert sorted(consumer.connections) == addresses
        for message in consumer:
            assert message.body.startswith(message.topic.encode())
            if not len(bodies) % 20:
                stats = [nsqd.channel_stats(topic, CHANNEL) for nsqd, topic in channels]
                assert sum(entry["in_flight_count"] for entry in stats) <= 8
            bodies.append(message.body)
            message.finish()
            if len(bodies) == 200:
                break
    assert {bodies.count(body) for body in bodies} == {2}  # one from each of the two nsqd
    assert {unfinished(nsqd, topic, CHANNEL) for nsqd, topic in channels} == {0}


# -- delays of reconnects, on a simulated clock ---------------------------------------------------


DIRECT = Address("direct", 4150)
FOUND = Address("found", 4150)


@pytest.fixture(autouse=True)
def no_jitter(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(connecting, "JITTER", 0.0)


def known_nsqd(*direct: Address) -> KnownNsqd:
    return KnownNsqd(direct, 0.0, ClientOptions())


def test_direct_addresses_wait_8_to_120_seconds_less_a_tenth_at_most(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    delays = RetryDelays(8, 120)
    assert [delays.next_delay_s() for _ in range(7)] == [8, 16, 32, 64, 120, 120, 120]
    assert [delays.next_delay_s() for _ in range(2000)][-1] == 120
    delays.reset()
    assert delays.next_delay_s() == 8
    monkeypatch.undo()
    monkeypatch.setattr(connecting, "rng", random.Random(1))
    drawn = [RetryDelays(8, 120).next_delay_s() for _ in range(1000)]
    assert 7.2 <= min(drawn) < 7.3
    assert 7.9 < max(drawn) <= 8


def test_a_proven_connection_resets_the_delays() -> None:
    nsqds = known_nsqd(DIRECT)
    nsqds.take_due(0)
    nsqds.failed(DIRECT, 0)
    nsqds.take_due(8)
    assert nsqds.failed(DIRECT, 9) == 16
    nsqds.take_due(25)
    nsqds.failed(DIRECT, 30, was_proven=True)
    nsqds.take_due(30)
    assert nsqds.failed(DIRECT, 30) == 8
    nsqds = known_nsqd(DIRECT)
    nsqds.take_due(0)
    now, delays = 1000.0, []
    assert nsqds.failed(DIRECT, now, was_proven=True) == 0
    assert nsqds.take_due(now) == [DIRECT]
    assert nsqds[DIRECT].was_just_lost
    delays.append(nsqds.failed(DIRECT, now, is_unreachable=True))
    for _ in range(8):
        now += delays[-1]
        assert nsqds.take_due(now) == [DIRECT]
        assert not nsqds[DIRECT].was_just_lost
        delays.append(nsqds.failed(DIRECT, now))
    assert delays == [0.125, 0.25, 0.5, 1, 2, 4, 8, 16, 32]


def test_a_listed_nsqd_is_tried_after_1_2_4_seconds() -> None:
    nsqds = known_nsqd()
    tries = []
    now = 0.0
    while now < 16:
        nsqds.listed([FOUND], now)  # lookups that never stop listing it
        if nsqds.take_due(now):
            tries.append(now)
            nsqds.failed(FOUND, now)
        now += 0.25
    assert tries == [0, 1, 3, 7, 15]
    nsqds = known_nsqd(DIRECT)
    for number in range(100):
        nsqds.listed([Address(f"pod-{number}", 4150)], number * 100.0)
        for address in nsqds.take_due(number * 100.0):
            nsqds.failed(address, number * 100.0)
    assert len(nsqds._nsqds) == 2
    nsqds.listed([], 20_000)
    assert len(nsqds._nsqds) == 1
    for interval_s in (0.01, 60):  # the interval of lookups is the longest delay
        options = ClientOptions(lookupd_poll_interval_s=interval_s)
        nsqds = KnownNsqd([], 0.0, options)
        nsqds.listed([FOUND], 0)
        nsqds.take_due(0)
        assert max(nsqds.failed(FOUND, 0) for _ in range(20)) == interval_s


def test_a_sample_of_too_many_listed_nsqd_is_used() -> None:
    nsqds = KnownNsqd([DIRECT], 0.0, ClientOptions(max_discovered_nsqd=10))
    many = [Address(f"n{number:02}", 4150) for number in range(50)]
    assert nsqds.listed(many[:5], 0) == 0
    first = set(nsqds.take_due(0))
    assert nsqds.listed(many, 1) == 40
    second = set(nsqds.take_due(1))
    assert first == {DIRECT, *many[:5]}
    assert len(second) == 5
    for address in second:
        nsqds.failed(address, 2)
    drawn = set[Address]()
    for now in range(10, 200, 10):
        nsqds.listed(many, now)
        due = nsqds.take_due(now)
        drawn.update(due)
        assert len(due) == 5
        for address in due:
            nsqds.failed(address, now)
    assert len(drawn) > 30  # no nsqd is excluded forever
