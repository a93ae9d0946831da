"""Batches by size and time, as a bulk inserter wants them, on real servers."""

from __future__ import annotations

import time
from collections import Counter
from typing import Any

import pytest
from plugins.archives import unfinished
from plugins.clients import CHANNEL, TOPIC, InBackground, fill
from plugins.daemons import GoNsqd
from plugins.http_api import Nsqd
from plugins.servers import MakeNsqd
from plugins.waiting import patience_s, wait_until

from nsqtools import ClientOptions, Consumer
from nsqtools.client.backlog import Delivery
from nsqtools.client.consumer import GATHER_LOOK_S

LIMIT = ClientOptions(max_in_flight=1000, output_buffer_timeout_s=0.025)


def consumer_of(*servers: Nsqd) -> Consumer:
    addresses = [nsqd.tcp_address for nsqd in servers]
    return Consumer(TOPIC, CHANNEL, nsqd_tcp_addresses=addresses, options=LIMIT)


@pytest.mark.parametrize("msg_timeout", ["60s", "4s"])
def test_batches_have_the_size_that_was_asked_for(go_nsqd: MakeNsqd, msg_timeout: str) -> None:
    """Also with an insert that takes longer than its message's share of msg_timeout."""
    nsqd = go_nsqd(f"--msg-timeout={msg_timeout}")
    fill(nsqd, 1500)
    sizes = list[int]()
    with consumer_of(nsqd) as consumer:
        for batch in consumer.batches(size=500, within_s=3600):
            sizes.append(len(batch))
            time.sleep(0.6 if msg_timeout == "4s" else 0.0)
            assert batch.finish() == len(batch)
            if sum(sizes) >= 1500:
                break
        assert consumer.stats.late == consumer.stats.expired == 0
    assert sizes == [500] * 3 or (msg_timeout == "4s" and sum(sizes) == 1500)  # a second to gather
    assert unfinished(nsqd, TOPIC, CHANNEL) == 0


@pytest.mark.parametrize("late", ["gather", "_hand_over"])
def test_a_late_batch_is_whole(nsqd: GoNsqd, monkeypatch: pytest.MonkeyPatch, late: str) -> None:
    """With what it is told, and with handing over what it has counted."""
    usual = getattr(Delivery, late)

    def later(*arguments: Any) -> None:
        time.sleep(5 * GATHER_LOOK_S)
        usual(*arguments)

    monkeypatch.setattr(Delivery, late, later)
    fill(nsqd, 500)
    with consumer_of(nsqd) as consumer:
        wait_until(lambda: consumer.stats.received, what="the first, of a limit of one")
        batch = next(iter(consumer.batches(size=500, within_s=3600)))
        assert len(batch) == batch.finish() == 500


def test_a_batch_waits_for_who_has_room(go_nsqd: MakeNsqd, in_background: InBackground) -> None:
    full, late = go_nsqd(), go_nsqd()
    late.create_channel(TOPIC, CHANNEL)
    fill(full, 250)
    with consumer_of(full, late) as consumer:
        wait_until(lambda: len(consumer.connections) == 2, what="both connections")
        gathering = in_background(next, iter(consumer.batches(size=500, within_s=3600)))
        wait_until(lambda: consumer.stats.received == 250, what="the messages of one")
        time.sleep(5 * GATHER_LOOK_S)
        late.publish(TOPIC, *[b"late"] * 250)
        assert gathering.result(patience_s(10)).finish() == 500


def test_a_batch_gathers_from_several_nsqd_and_answers_to_each(go_nsqd: MakeNsqd) -> None:
    """Their shares are raised until they add up to its size: a third of 500 is 166."""
    servers = [go_nsqd(), go_nsqd(), go_nsqd()]
    for nsqd in servers:
        fill(nsqd, 300)
    with consumer_of(*servers) as consumer:
        wait_until(lambda: len(consumer.connections) == 3, what="all connections")
        batch = next(iter(consumer.batches(size=500, within_s=3600)))
        assert {message.nsqd for message in batch} == {nsqd.tcp_address for nsqd in servers}
        assert batch[0].requeue(0, backoff=False)
        assert (len(batch), batch.finish()) == (500, 499)
        wait_until(lambda: consumer.stats.finished == 499, what="the FINs")
    assert sum(unfinished(nsqd, TOPIC, CHANNEL) for nsqd in servers) == 900 - 499


def test_no_batch_waits_for_what_cannot_come(nsqd: GoNsqd, in_background: InBackground) -> None:
    """Another batch is in the hands of another thread, and no more may be in flight."""
    fill(nsqd, 2000)
    options = ClientOptions(max_in_flight=500, output_buffer_timeout_s=0.025)
    with Consumer(TOPIC, CHANNEL, nsqd_tcp_addresses=nsqd.tcp_address, options=options) as consumer:
        first = next(iter(consumer.batches(size=400, within_s=3600)))
        gathering = in_background(next, iter(consumer.batches(size=400, within_s=3600)))
        second = gathering.result(patience_s(10))
        assert (second.finish(), first.finish()) == (100, 400)


def test_a_drain_ends_with_the_rest(nsqd: GoNsqd) -> None:
    fill(nsqd, 700)
    sizes = []
    with consumer_of(nsqd) as consumer:
        for batch in consumer.batches(size=500, within_s=3600):
            sizes.append(len(batch))
            batch.finish()
            wait_until(lambda: consumer.stats.received == 700, what="all messages")
            consumer.begin_stop(drain=True)
    assert sizes == [500, 200]
    assert unfinished(nsqd, TOPIC, CHANNEL) == 0


def test_a_batch_is_of_one_topic(nsqd: GoNsqd) -> None:
    topics = ["clicks", "orders"]
    for topic in topics:
        nsqd.create_channel(topic, CHANNEL)
        nsqd.publish(topic, *[topic.encode()] * 5)
    counts = Counter[str]()
    with Consumer(topics, CHANNEL, nsqd_tcp_addresses=nsqd.tcp_address, options=LIMIT) as consumer:
        for batch in consumer.batches(size=10, within_s=patience_s(0.2)):
            assert [message.body for message in batch] == [batch.topic.encode()] * len(batch)
            counts[batch.topic] += batch.finish()
            if counts.total() == 10:
                break
    assert counts == dict.fromkeys(topics, 5)
