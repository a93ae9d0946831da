"""A producer is as available as its nsqd: publishes go on while one of them works."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
from plugins.auth_server import AuthServer
from plugins.clients import TOPIC
from plugins.daemons import EmbeddedNsqdProcess, GoNsqd, GoNsqlookupd
from plugins.scripted_lookupd import ScriptedLookupd
from plugins.servers import Serve
from plugins.waiting import patience_s, wait_until

from nsqtools import ClientOptions, Producer, Publication, PublishError, PublishRefused
from nsqtools.client import producer_io

Lookupds = Callable[..., GoNsqlookupd]
# what hangs is never given up in these tests
PATIENT = ClientOptions(publish_timeout_s=600, lookupd_poll_interval_s=0.2)


@contextmanager
def aborted(producer: Producer) -> Iterator[Producer]:
    """A producer that does not wait for what is under way."""
    try:
        yield producer
    finally:
        producer.stop(0)


class Threads:
    """Threads that publish one message after the other, as requests of a service do."""

    def __init__(self, producer: Producer, count: int) -> None:
        self.confirmed = 0
        self._producer = producer
        self._threads = [threading.Thread(target=self._publish) for _ in range(count)]
        for thread in self._threads:
            thread.start()

    def _publish(self) -> None:
        try:
            while True:
                self._producer.publish(TOPIC, b"x")
                self.confirmed += 1
        except PublishError:
            pass

    def wait_for_more(self, count: int) -> None:
        enough = self.confirmed + count
        wait_until(lambda: self.confirmed >= enough, what="publishes", timeout_s=20)

    def end(self) -> None:
        self._producer.stop(0)
        for thread in self._threads:
            thread.join()


def used_of(nsqds: list[Any]) -> Any:
    """The one that has taken the most."""
    return max(nsqds, key=lambda nsqd: nsqd.depth(TOPIC) if nsqd.stats()["topics"] else 0)


def test_threads_that_publish_in_turn_are_not_all_held_by_one_that_hangs(
    go_nsqd: Callable[..., GoNsqd],
) -> None:
    nsqds = [go_nsqd() for _ in range(3)]
    addresses = [nsqd.tcp_address for nsqd in nsqds]
    with aborted(Producer(addresses, PATIENT, mode="round-robin")) as producer:
        threads = Threads(producer, 8)
        threads.wait_for_more(100)
        nsqds[0].pause()
        for _ in range(3):
            threads.wait_for_more(200)
        threads.end()
        nsqds[0].resume()


def test_a_failover_producer_leaves_one_that_hangs_and_comes_back(
    go_nsqd: Callable[..., GoNsqd],
) -> None:
    first, second = go_nsqd(), go_nsqd()
    options = replace(PATIENT, max_outstanding=4)
    with aborted(Producer([first.tcp_address, second.tcp_address], options)) as producer:
        producer.publish(TOPIC, b"x")
        first.pause()
        stuck = [producer.submit(TOPIC, [b"stuck"]) for _ in range(4)]  # the window is full

        def goes_on() -> bool:
            publication = producer.submit(TOPIC, [b"x"])
            publication.wait(patience_s(0.2))
            return publication.error is None

        wait_until(lambda: _in_time(goes_on), what="the second to be used", timeout_s=20)
        assert not any(each.is_settled for each in stuck)
        first.resume()
        assert producer.flush(patience_s(20))
        assert all(each.error is None for each in stuck)
        before = second.depth(TOPIC)
        producer.publish(TOPIC, b"back")
        assert second.depth(TOPIC) == before


def _in_time(call: Callable[[], bool]) -> bool:
    try:
        return call()
    except TimeoutError:
        return False


def test_an_nsqd_that_was_listed_lately_is_the_last_resort(
    scripted_lookupd: Callable[[], ScriptedLookupd], go_nsqd: Callable[..., GoNsqd]
) -> None:
    """All nsqlookupd have restarted and know none, and the nsqd in use stops."""
    lookupd, nsqds = scripted_lookupd(), [go_nsqd() for _ in range(3)]
    lookupd.list_nsqd(*(nsqd.tcp_address for nsqd in nsqds))
    with aborted(Producer(None, PATIENT, lookupd_http_addresses=lookupd.address)) as producer:
        producer.publish(TOPIC, b"x")
        lookupd.list_nsqd()
        asked = len(lookupd.requests)
        wait_until(lambda: len(lookupd.requests) > asked + 2, what="empty answers")
        used = used_of(nsqds)
        used.kill()
        wait_until(lambda: used.tcp_address not in connected(producer), what="the loss")
        for _ in range(10):
            producer.publish(TOPIC, b"y")
        lookupd.list_nsqd(used.tcp_address)
        used.start()

        def is_back() -> bool:  # what is listed goes first
            producer.publish(TOPIC, b"z")
            return connected(producer) == [used.tcp_address]

        wait_until(is_back, what="what is listed to be used again", timeout_s=20)


def connected(producer: Producer) -> list[str]:
    return [str(link.address) for link in producer._io.links if link.connection is not None]


def test_what_is_listed_no_longer_is_forgotten_in_time(
    scripted_lookupd: Callable[[], ScriptedLookupd], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(producer_io, "LATELY_S", 0.5)
    lookupd = scripted_lookupd()
    lookupd.list_nsqd("127.0.0.1:1")
    options = ClientOptions(lookupd_poll_interval_s=0.1)
    with aborted(Producer(None, options, lookupd_http_addresses=lookupd.address)) as producer:
        producer.start()
        wait_until(lambda: len(producer._io.links) == 1, what="the one that is listed")
        lookupd.list_nsqd()
        wait_until(lambda: len(producer._io.links) == 0, what="it to be forgotten")


def test_the_retry_time_covers_the_auth_server(
    go_nsqd: Callable[..., GoNsqd], auth_server: AuthServer
) -> None:
    """nsqd asks again when an identity has expired, and refuses what it cannot ask about."""
    auth_server.allow("sesame", ttl_s=1)
    nsqd = go_nsqd(f"-auth-http-address={auth_server.address}")
    options = ClientOptions(auth_secret="sesame")
    with aborted(Producer(nsqd.tcp_address, options, retry_timeout_s=600)) as producer:
        producer.publish(TOPIC, b"x")
        auth_server.answer("sesame", 500, b"")
        waiting: list[Publication] = []

        def is_refused() -> bool:
            waiting.append(producer.submit(TOPIC, [b"y"]))
            return nsqd.log.count("AUTH failed") > 2

        wait_until(is_refused, what="refusals of PUB and of AUTH", timeout_s=20)
        auth_server.allow("sesame", ttl_s=3600)
        for publication in waiting:
            publication.wait(patience_s(20))
        assert nsqd.depth(TOPIC) == 1 + len(waiting)
        auth_server.answer("sesame", 500, b"")
    with (
        aborted(Producer(nsqd.tcp_address, options, retry_timeout_s=600)) as producer,
        pytest.raises(PublishRefused, match="E_AUTH_FAILED"),  # it never worked: not an outage
    ):
        producer.publish(TOPIC, b"x")


@pytest.mark.alone
@pytest.mark.parametrize(
    ("kind", "mode"),
    [
        (GoNsqd, "failover"),
        pytest.param(GoNsqd, "round-robin", marks=pytest.mark.slow),
        pytest.param(EmbeddedNsqdProcess, "failover", marks=pytest.mark.slow),
        pytest.param(EmbeddedNsqdProcess, "round-robin", marks=pytest.mark.slow),
    ],
)
def test_no_second_without_a_confirmed_publish_while_one_nsqd_is_up(
    kind: type[GoNsqd], mode: str, nsqlookupd: Lookupds, serve: Serve, data_path: Callable[[], Path]
) -> None:
    lookupd = nsqlookupd()
    flag = f"-lookupd-tcp-address={lookupd.tcp_address}"
    nsqds = [serve(kind(data_path(), flag)) for _ in range(3)]
    options = ClientOptions(publish_timeout_s=2, lookupd_poll_interval_s=0.5)
    at: list[float] = []

    def note(publication: Publication) -> None:
        if publication.error is None:
            at.append(time.monotonic())

    is_over = threading.Event()
    with Producer(
        None, options, lookupd_http_addresses=lookupd.http_address, mode=mode
    ) as producer:

        def publish() -> None:  # as requests come, whatever became of those before
            while not is_over.wait(0.01):
                producer.submit(TOPIC, [b"x"], on_settled=note)

        wait_until(lambda: len(producer._io.links) == 3, what="all nsqd")
        thread = threading.Thread(target=publish)
        thread.start()
        try:
            wait_until(lambda: len(at) > 50, what="publishes")
            for fault in ("hang", "kill", "forget"):
                used = used_of(nsqds)
                if fault == "forget":
                    lookupd.kill()
                    lookupd.start()  # nsqd come back to it after 15 s
                    time.sleep(1)  # twice what passes between two lookups
                if fault == "hang":
                    used.pause()
                else:
                    used.kill()
                time.sleep(1.2)
                if fault == "hang":
                    used.resume()
                else:
                    used.start()
        finally:
            is_over.set()
            thread.join()
    assert max(late - early for early, late in pairwise(at)) < 1
