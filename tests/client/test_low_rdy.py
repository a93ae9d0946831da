"""Fewer messages allowed than connections, on real nsqd: RDY 1 goes round, and nobody starves.

What is counted is turns of the rotation, not seconds: a slow machine makes longer turns, not more.
"""

from __future__ import annotations

from collections.abc import Callable

import pytest
from plugins.clients import CHANNEL, TOPIC, Consume, Handle
from plugins.daemons import GoNsqd
from plugins.waiting import wait_until

from nsqtools.client.consumer import Consumer
from nsqtools.client.message import Message


@pytest.fixture
def count_turns(monkeypatch: pytest.MonkeyPatch) -> Callable[[Consumer], Callable[[], int]]:
    """A factory of functions that tell how often RDY went round in a consumer."""

    def make(consumer: Consumer) -> Callable[[], int]:
        turns = [0]
        redistribute = consumer._io.rdy.redistribute

        def count(now: float) -> None:
            turns[0] += 1
            redistribute(now)

        monkeypatch.setattr(consumer._io.rdy, "redistribute", count)
        return lambda: turns[0]

    return make


def again_and_again(message: Message) -> None:
    message.requeue(0, backoff=False)  # the depth stays as it is


def test_many_busy_connections_are_all_served_with_few_messages_in_flight(
    go_nsqd: Callable[..., GoNsqd],
    consume: Consume,
    handle: Handle,
    count_turns: Callable[[Consumer], Callable[[], int]],
) -> None:
    """About one of them lends its RDY in a turn, so all others are served within some 25."""
    nsqd = go_nsqd("-tcp-address=0.0.0.0:0")
    nsqd.create_channel(TOPIC, CHANNEL)
    nsqd.publish(TOPIC, *[b"%d" % number for number in range(100)])
    port = nsqd.tcp_address.rpartition(":")[2]
    addresses = [f"127.0.0.{n}:{port}" for n in range(1, 26)]
    consumer = consume(addresses, max_in_flight=10, max_attempts=0)
    wait_until(lambda: len(consumer.connections) == 25, what="all connections", timeout_s=15)
    most_ready = 0

    def handle_one(message: Message) -> None:
        nonlocal most_ready
        most_ready = max(most_ready, consumer._io.rdy._rdy)
        again_and_again(message)

    turns = count_turns(consumer)
    handle(consumer, handle_one)

    def served() -> int:
        clients = nsqd.channel_stats(TOPIC, CHANNEL)["clients"]
        return sum(client["message_count"] > 0 for client in clients)

    wait_until(lambda: served() == 25 or turns() > 200, what="all to be served", timeout_s=60)
    assert served() == 25, f"{served()} of 25 are served after {turns()} turns"
    assert most_ready <= 10
