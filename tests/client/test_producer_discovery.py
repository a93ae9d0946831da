"""A producer that finds its nsqd through nsqlookupd: those that come, those that go, and whom it
believes."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from dataclasses import replace
from typing import Any

import pytest
from plugins.clients import OPTIONS, TOPIC
from plugins.daemons import GoNsqd, GoNsqlookupd
from plugins.scripted_lookupd import ScriptedLookupd
from plugins.scripted_nsqd import ScriptedNsqd
from plugins.waiting import patience_s, wait_until

from nsqtools import Producer, PublishError, PublishNotSent
from nsqtools.client.producer_io import ProducerLink

Make = Callable[..., Producer]
GoNsqdFactory = Callable[..., GoNsqd]
LookupdFactory = Callable[..., GoNsqlookupd]
ScriptedLookupdFactory = Callable[[], ScriptedLookupd]
DEAD = "127.0.0.1:1"


@pytest.fixture
def make() -> Iterator[Make]:
    """A factory of producers; keywords that are not the producer's are client options."""
    with ExitStack() as producers:

        def make(lookupd: Any, nsqd: Any = None, more: Any = None, **options: Any) -> Producer:
            producer = Producer(
                nsqd, replace(OPTIONS, **options), lookupd_http_addresses=lookupd, **(more or {})
            )
            producers.callback(producer.stop, 0)  # what a test leaves under way is not waited for
            return producer

        yield make


def links(producer: Producer) -> dict[str, ProducerLink]:
    return {str(link.address): link for link in producer._io.links}


def connected(producer: Producer) -> list[str]:
    return [name for name, link in links(producer).items() if link.connection is not None]


def test_round_robin_spreads_over_all_and_takes_in_a_new_one(
    nsqlookupd: LookupdFactory, go_nsqd: GoNsqdFactory, make: Make
) -> None:
    lookupds = [nsqlookupd(), nsqlookupd()]
    nsqds = [go_nsqd(f"-lookupd-tcp-address={lookupd.tcp_address}") for lookupd in lookupds]
    for nsqd in nsqds:
        nsqd.create_topic(TOPIC)
    addresses = [lookupd.http_address for lookupd in lookupds]
    producer = make([DEAD, *addresses], more={"mode": "round-robin", "retry_timeout_s": 10})

    def publish_to_all() -> bool:
        producer.publish(TOPIC, b"x")
        return len(connected(producer)) == len(nsqds)

    for _ in range(2):
        wait_until(publish_to_all, what="a connection to each", timeout_s=15)
        before = [nsqd.depth(TOPIC) for nsqd in nsqds]
        for _ in range(5 * len(nsqds)):
            producer.publish(TOPIC, b"x")
        assert [nsqd.depth(TOPIC) - n for nsqd, n in zip(nsqds, before, strict=True)] == [5] * len(
            nsqds
        )
        if len(nsqds) == 2:
            nsqds.append(go_nsqd(f"-lookupd-tcp-address={lookupds[0].tcp_address}"))
            nsqds[-1].create_topic(TOPIC)


def test_what_is_listed_no_longer_is_let_go_for_another(
    scripted_lookupd: ScriptedLookupdFactory, go_nsqd: GoNsqdFactory, make: Make
) -> None:
    lookupd, old, new = scripted_lookupd(), go_nsqd(), go_nsqd()
    lookupd.list_nsqd(old.tcp_address)
    producer = make(lookupd.address, more={"retry_timeout_s": 10})
    producer.publish(TOPIC, b"x")
    lookupd.list_nsqd(new.tcp_address)
    wait_until(lambda: new.tcp_address in links(producer), what="the new one")

    def has_moved() -> bool:
        producer.publish(TOPIC, b"x")
        return connected(producer) == [new.tcp_address]

    wait_until(has_moved, what="the move")
    before = old.depth(TOPIC)
    producer.publish(TOPIC, b"x")
    assert old.depth(TOPIC) == before


@pytest.mark.parametrize("answer", ["empty", "error", "gone"])
def test_a_connection_outlives_what_nsqlookupd_says(
    scripted_lookupd: ScriptedLookupdFactory, go_nsqd: GoNsqdFactory, make: Make, answer: str
) -> None:
    """One that was just started knows no nsqd yet."""
    lookupd, nsqd = scripted_lookupd(), go_nsqd()
    lookupd.list_nsqd(nsqd.tcp_address)
    producer = make(lookupd.address, more={"retry_timeout_s": 10})
    producer.publish(TOPIC, b"x")
    if answer == "empty":
        lookupd.list_nsqd()
    else:
        lookupd.status = 500
    if answer == "gone":
        lookupd.server_close()
    asked = len(lookupd.requests)
    if answer != "gone":
        wait_until(lambda: len(lookupd.requests) > asked + 2, what="rounds")
    producer.publish(TOPIC, b"x")
    assert nsqd.depth(TOPIC) == 2


def try_to_publish(producer: Producer) -> bool:
    try:
        producer.publish(TOPIC, b"x")
    except PublishError:
        return False
    return True


def test_an_nsqd_that_is_being_emptied_gets_nothing(
    nsqlookupd: LookupdFactory, go_nsqd: GoNsqdFactory, make: Make
) -> None:
    lookupd = nsqlookupd()
    flag = f"-lookupd-tcp-address={lookupd.tcp_address}"
    leaving, staying = go_nsqd(flag), go_nsqd(flag)
    leaving.create_topic(TOPIC)
    node = f"127.0.0.1:{leaving.http_address.rpartition(':')[2]}"
    wait_until(lambda: lookupd.producers(TOPIC), what="the topic")
    lookupd.post("/topic/tombstone", topic=TOPIC, node=node)
    producer = make(lookupd.http_address, more={"mode": "round-robin", "retry_timeout_s": 10})
    for _ in range(10):
        producer.publish(TOPIC, b"x")
    assert (leaving.depth(TOPIC), staying.depth(TOPIC)) == (0, 10)


def test_given_nsqd_come_before_those_that_are_found(
    scripted_lookupd: ScriptedLookupdFactory, go_nsqd: GoNsqdFactory, make: Make
) -> None:
    lookupd, given, found = scripted_lookupd(), go_nsqd(), go_nsqd()
    lookupd.list_nsqd(found.tcp_address, given.tcp_address)
    producer = make(lookupd.address, [given.tcp_address], more={"retry_timeout_s": 10})
    wait_until(lambda: try_to_publish(producer) and len(links(producer)) == 2, what="both")
    given.stop()
    producer.publish(TOPIC, b"y")
    assert found.depth(TOPIC) == 1


# -- nobody to publish to -------------------------------------------------------------------------


def test_without_any_nsqd_or_nsqlookupd_the_error_says_so(
    scripted_lookupd: ScriptedLookupdFactory, make: Make
) -> None:
    empty = "know no nsqd that messages can be published to"
    for lookupd, complaint in ((scripted_lookupd().address, empty), (DEAD, DEAD)):
        with pytest.raises(PublishNotSent, match=complaint):
            make(lookupd).publish(TOPIC, b"x")


def test_a_publish_does_not_outlast_nsqlookupd_that_are_silent(
    scripted_nsqd: ScriptedNsqd, make: Make
) -> None:
    """It accepts, and says nothing."""
    producer = make(scripted_nsqd.address, lookupd_poll_timeout_s=patience_s(20))
    with pytest.raises(PublishNotSent, match=f"{scripted_nsqd.address}: no answer within"):
        producer.publish(TOPIC, b"x", timeout_s=0.5)


def test_a_stop_ends_the_polling(scripted_lookupd: ScriptedLookupdFactory, make: Make) -> None:
    lookupd = scripted_lookupd()
    producer = make(lookupd.address)
    producer.start()
    wait_until(lambda: lookupd.requests, what="a round")
    assert producer.stop(patience_s(5))
    asked = len(lookupd.requests)
    time.sleep(0.3)
    assert len(lookupd.requests) <= asked + 1  # one may have been under way


# -- whom to believe: an announcement is only a claim ---------------------------------------------


def test_no_more_nsqd_are_believed_than_allowed(
    scripted_lookupd: ScriptedLookupdFactory, make: Make
) -> None:
    lookupds = [scripted_lookupd() for _ in range(3)]
    for number, lookupd in enumerate(lookupds):
        lookupd.list_nsqd(*(f"127.0.{number}.{n}:1" for n in range(1, 11)))
    producer = make([lookupd.address for lookupd in lookupds], max_discovered_nsqd=12)
    producer.start()
    wait_until(lambda: all(len(each.requests) > 1 for each in lookupds), what="rounds")
    assert len(links(producer)) <= 12
