"""A producer that finds its nsqd through nsqlookupd, and goes on while one of them works."""

from __future__ import annotations

import time
from concurrent.futures import wait
from contextlib import suppress
from typing import Any

import pytest
from plugins.clients import TOPIC, Consume, InBackground, Produce
from plugins.http_server import AuthServer, MakeScripted
from plugins.scripted_nsqd import ScriptedNsqd
from plugins.servers import MakeLookupd, MakeNsqd
from plugins.waiting import patience_s, wait_until

from nsqtools import Producer, Publication, errors
from nsqtools.client import producer_io
from nsqtools.client.producer_io import ProducerLink

DEAD = "127.0.0.1:1"
IN_TURN = {"mode": "round-robin", "retry_timeout_s": 10}


def links(producer: Producer) -> dict[str, ProducerLink]:
    return {str(link.address): link for link in producer._io.links}


def connected(producer: Producer) -> list[str]:
    return [name for name, link in links(producer).items() if link.connection is not None]


def test_round_robin_spreads_over_all_and_takes_in_a_new_one(
    nsqlookupd: MakeLookupd, go_nsqd: MakeNsqd, produce: Produce
) -> None:
    lookupds = [nsqlookupd(), nsqlookupd()]
    nsqds = [go_nsqd(f"-lookupd-tcp-address={lookupd.tcp_address}") for lookupd in lookupds]
    for nsqd in nsqds:
        nsqd.create_topic(TOPIC)
    addresses = [lookupd.http_address for lookupd in lookupds]
    producer = produce(lookupd=[DEAD, *addresses], more=IN_TURN)

    def publish_to_all() -> bool:
        producer.publish(TOPIC, b"x")
        return len(connected(producer)) == len(nsqds)

    for _ in range(2):
        wait_until(publish_to_all, what="a connection to each", timeout_s=15)
        before = {nsqd: nsqd.depth(TOPIC) for nsqd in nsqds}
        for _ in range(5 * len(nsqds)):
            producer.publish(TOPIC, b"x")
        assert {nsqd.depth(TOPIC) - count for nsqd, count in before.items()} == {5}
        if len(nsqds) == 2:
            nsqds.append(go_nsqd(f"-lookupd-tcp-address={lookupds[0].tcp_address}"))
            nsqds[-1].create_topic(TOPIC)


def test_a_connection_outlives_what_nsqlookupd_says(
    scripted_lookupd: MakeScripted, go_nsqd: MakeNsqd, produce: Produce
) -> None:
    """One that was just started knows no nsqd yet; then it fails, and then it is gone."""
    lookupd, nsqd = scripted_lookupd(), go_nsqd()
    lookupd.list_nsqd(nsqd.tcp_address)
    producer = produce(lookupd=lookupd.address, more={"retry_timeout_s": 10})
    producer.publish(TOPIC, b"x")
    for lookupd.status in (200, 500):
        lookupd.list_nsqd()
        asked = len(lookupd.requests)
        wait_until(lambda: len(lookupd.requests) > asked + 2, what="rounds")  # noqa: B023
        producer.publish(TOPIC, b"x")
    lookupd.server_close()
    producer.publish(TOPIC, b"x")
    assert nsqd.depth(TOPIC) == 4


def test_an_nsqd_that_is_being_emptied_gets_nothing(
    nsqlookupd: MakeLookupd, go_nsqd: MakeNsqd, produce: Produce
) -> None:
    lookupd = nsqlookupd()
    flag = f"-lookupd-tcp-address={lookupd.tcp_address}"
    leaving, staying = go_nsqd(flag), go_nsqd(flag)
    leaving.create_topic(TOPIC)
    node = f"127.0.0.1:{leaving.http_address.rpartition(':')[2]}"
    wait_until(lambda: lookupd.producers(TOPIC), what="the topic")
    lookupd.post("/topic/tombstone", topic=TOPIC, node=node)
    producer = produce(lookupd=lookupd.http_address, more=IN_TURN)
    for _ in range(10):
        producer.publish(TOPIC, b"x")
    assert (leaving.depth(TOPIC), staying.depth(TOPIC)) == (0, 10)


def test_given_nsqd_come_before_those_that_are_found(
    scripted_lookupd: MakeScripted, go_nsqd: MakeNsqd, produce: Produce
) -> None:
    lookupd, given, found = scripted_lookupd(), go_nsqd(), go_nsqd()
    lookupd.list_nsqd(found.tcp_address, given.tcp_address)
    producer = produce([given.tcp_address], lookupd=lookupd.address, more={"retry_timeout_s": 10})
    producer.publish(TOPIC, b"x")
    wait_until(lambda: len(links(producer)) == 2, what="both")
    given.stop()
    producer.publish(TOPIC, b"y")
    assert found.depth(TOPIC) == 1


def test_without_nsqd_the_error_says_so(scripted_lookupd: MakeScripted, produce: Produce) -> None:
    empty = "know no nsqd that messages can be published to"
    for lookupd, complaint in ((scripted_lookupd().address, empty), (DEAD, DEAD)):
        with pytest.raises(errors.PublishNotSent, match=complaint):
            produce(lookupd=lookupd).publish(TOPIC, b"x")


def test_a_password_of_nsqlookupd_is_shown_nowhere(
    nsqlookupd: MakeLookupd, produce: Produce, consume: Consume, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level("DEBUG")
    lookupd = f"http://me:hush@{nsqlookupd().http_address}"
    producer = produce(lookupd=lookupd)
    with pytest.raises(errors.PublishNotSent):
        producer.publish(TOPIC, b"x")
    producer.stop()
    with pytest.raises(errors.PublishNotSent) as caught:
        producer.publish(TOPIC, b"x")
    consume(lookupd=lookupd)
    wait_until(lambda: "does not know topic" in caplog.text, what="an answer")
    assert "hush" not in f"{producer!r} {caught.value} {caplog.text}"


def test_silent_nsqlookupd_hold_up_nobody(scripted_nsqd: ScriptedNsqd, produce: Produce) -> None:
    """It accepts, and says nothing."""
    producer = produce(lookupd=scripted_nsqd.address, lookupd_poll_timeout_s=patience_s(20))
    with pytest.raises(errors.PublishNotSent, match=f"{scripted_nsqd.address}: no answer within"):
        producer.publish(TOPIC, b"x", timeout_s=0.5)


def test_of_too_many_nsqd_some_are_used_and_a_stop_ends_the_polling(
    scripted_lookupd: MakeScripted, produce: Produce
) -> None:
    lookupds = [scripted_lookupd() for _ in range(3)]
    for number, lookupd in enumerate(lookupds):
        lookupd.list_nsqd(*(f"127.0.{number}.{n}:1" for n in range(1, 11)))
    producer = produce(lookupd=[lookupd.address for lookupd in lookupds], max_discovered_nsqd=12)
    producer.start()
    wait_until(lambda: all(len(each.requests) > 1 for each in lookupds), what="rounds")
    assert len(links(producer)) <= 12
    assert producer.stop(patience_s(5))
    asked = len(lookupds[0].requests)
    time.sleep(0.3)
    assert len(lookupds[0].requests) <= asked + 1  # one may have been under way


# -- publishes go on while one nsqd works ----------------------------------------------------------


def test_threads_that_publish_in_turn_are_not_all_held_by_one_that_hangs(
    go_nsqd: MakeNsqd, in_background: InBackground, produce: Produce
) -> None:
    nsqds = [go_nsqd() for _ in range(3)]
    addresses = [nsqd.tcp_address for nsqd in nsqds]
    producer = produce(addresses, publish_timeout_s=600, more={"mode": "round-robin"})
    confirmed: list[None] = []

    def publish() -> None:
        with suppress(errors.PublishError):
            while True:
                confirmed.append(producer.publish(TOPIC, b"x"))  # type: ignore[func-returns-value]

    for _ in range(8):
        in_background(publish)
    wait_until(lambda: len(confirmed) > 100, what="publishes")
    nsqds[0].pause()
    wait_until(lambda: len(confirmed) > 700, what="more of them", timeout_s=60)
    producer.stop(0)
    nsqds[0].resume()


def test_failover_leaves_one_that_hangs_and_comes_back(go_nsqd: MakeNsqd, produce: Produce) -> None:
    first, second = go_nsqd(), go_nsqd()
    options = {"publish_timeout_s": 600, "max_outstanding": 4}
    producer = produce([first.tcp_address, second.tcp_address], **options)
    producer.publish(TOPIC, b"x")
    first.pause()
    stuck = [producer.submit(TOPIC, [b"stuck"]) for _ in range(4)]  # the window is full

    def goes_on() -> bool:
        return not wait([producer.submit(TOPIC, [b"x"])], patience_s(0.2)).not_done

    wait_until(goes_on, what="the second to be used", timeout_s=20)
    assert not any(each.is_settled for each in stuck)
    first.resume()
    assert producer.flush(patience_s(20))
    assert all(each.error is None for each in stuck)
    before = second.depth(TOPIC)
    producer.publish(TOPIC, b"back")
    assert second.depth(TOPIC) == before


def test_an_nsqd_that_was_listed_lately_is_the_last_resort(
    scripted_lookupd: MakeScripted, go_nsqd: MakeNsqd, produce: Produce
) -> None:
    """All nsqlookupd have restarted and know none, and the nsqd in use stops."""
    lookupd, nsqds = scripted_lookupd(), [go_nsqd() for _ in range(3)]
    lookupd.list_nsqd(*(nsqd.tcp_address for nsqd in nsqds))
    producer = produce(lookupd=lookupd.address, publish_timeout_s=600)
    producer.publish(TOPIC, b"x")
    lookupd.list_nsqd()
    asked = len(lookupd.requests)
    wait_until(lambda: len(lookupd.requests) > asked + 2, what="empty answers")
    used = max(nsqds, key=lambda nsqd: nsqd.depth(TOPIC) if nsqd.stats()["topics"] else 0)
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


def test_what_is_listed_no_longer_is_forgotten_in_time(
    scripted_lookupd: MakeScripted, produce: Produce, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(producer_io, "LATELY_S", 0.5)
    lookupd = scripted_lookupd()
    lookupd.list_nsqd("127.0.0.1:1")
    producer = produce(lookupd=lookupd.address)
    producer.start()
    wait_until(lambda: len(producer._io.links) == 1, what="the one that is listed")
    lookupd.list_nsqd()
    wait_until(lambda: len(producer._io.links) == 0, what="it to be forgotten")


def test_retries_outlast_auth(go_nsqd: MakeNsqd, auth_server: AuthServer, produce: Produce) -> None:
    """nsqd asks again when an identity has expired, and refuses what it cannot ask about."""
    auth_server.allow("sesame", ttl_s=1)
    nsqd = go_nsqd(f"-auth-http-address={auth_server.address}")
    options: dict[str, Any] = {"auth_secret": "sesame", "more": {"retry_timeout_s": 600}}
    producer = produce(nsqd.tcp_address, **options)
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
    with pytest.raises(errors.PublishRefused, match="E_AUTH_FAILED"):  # it never worked
        produce(nsqd.tcp_address, **options).publish(TOPIC, b"x")
