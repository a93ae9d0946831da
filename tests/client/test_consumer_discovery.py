"""Finding nsqd, and finding them again.

The forms of an address are in tests/protocol/test_names.py, when to retry one is in
test_reconnect.py, jitter in test_discovery.py. One nsqd under two names is connected twice, as in
all clients.
"""

from __future__ import annotations

import logging
import socket
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from plugins.clients import TOPIC, Consume, Handle
from plugins.daemons import GoNsqd, GoNsqlookupd
from plugins.scripted_nsqd import ScriptedNsqd
from plugins.waiting import patience_s, wait_until

from nsqtools.errors import ConnectionFailed

GoNsqdFactory = Callable[..., GoNsqd]
LookupdFactory = Callable[..., GoNsqlookupd]
ScriptedLookupdFactory = Callable[[], Any]


def test_a_topic_that_is_not_there_yet_is_not_an_error(
    nsqlookupd: LookupdFactory,
    go_nsqd: GoNsqdFactory,
    consume: Consume,
    caplog: pytest.LogCaptureFixture,
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


def test_all_lookupd_are_asked_and_a_dead_one_hides_nothing(
    scripted_lookupd: ScriptedLookupdFactory, go_nsqd: GoNsqdFactory, consume: Consume
) -> None:
    nsqds = [go_nsqd(), go_nsqd()]
    lookupds = [scripted_lookupd(), scripted_lookupd()]
    for lookupd, nsqd in zip(lookupds, nsqds, strict=True):
        lookupd.list_nsqd(nsqd.tcp_address)
    consumer = consume(
        lookupd=["127.0.0.1:1", *(lookupd.address for lookupd in lookupds)],
        lookupd_poll_interval_s=60,
        fail_fast=True,
    )
    assert set(consumer.connections) == {nsqd.tcp_address for nsqd in nsqds}
    assert all(len(lookupd.requests) == 1 for lookupd in lookupds)


def test_fifty_polls_leak_nothing(
    scripted_lookupd: ScriptedLookupdFactory, consume: Consume
) -> None:
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
    scripted_lookupd: ScriptedLookupdFactory, scripted_nsqd: ScriptedNsqd, consume: Consume
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


def test_a_lookupd_that_hangs_delays_no_other(
    deaf_address: str, scripted_lookupd: ScriptedLookupdFactory, nsqd: GoNsqd, consume: Consume
) -> None:
    lookupd = scripted_lookupd()
    lookupd.list_nsqd(nsqd.tcp_address)
    consumer = consume(
        lookupd=[deaf_address, lookupd.address],
        lookupd_poll_interval_s=0.1,
        lookupd_poll_timeout_s=0.5,
    )
    wait_until(lambda: consumer.connections, what="the nsqd", timeout_s=2)
    polls = len(lookupd.requests)
    wait_until(lambda: len(lookupd.requests) > polls, what="another round", timeout_s=2)
    assert consumer.stop(timeout_s=patience_s(2))


def test_no_lookupd_that_answers_is_an_error_when_failing_fast(
    deaf_address: str, consume: Consume
) -> None:
    consumer = consume(
        lookupd=["127.0.0.1:1", deaf_address], lookupd_poll_timeout_s=0.5, started=False
    )
    with pytest.raises(ConnectionFailed):
        consumer.start(fail_fast=True)


def test_an_unreachable_broadcast_address_is_mapped(
    scripted_lookupd: ScriptedLookupdFactory, nsqd: GoNsqd, consume: Consume, handle: Handle
) -> None:
    lookupd = scripted_lookupd()
    lookupd.list_nsqd("nsqd.internal:4150")
    consumer = consume(
        lookupd=lookupd.address,
        more={"address_map": {"nsqd.internal:4150": nsqd.tcp_address}},
        fail_fast=True,
    )
    assert consumer.connections == [nsqd.tcp_address]
