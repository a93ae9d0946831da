"""nsqd stopped and started again, and connections cut, under a consumer and a producer.

Nothing that was confirmed may be missing. Kills are in tests/faults.
"""

from __future__ import annotations

import random
import threading
from collections import Counter
from collections.abc import Callable

from plugins.clients import CHANNEL, TOPIC, Consume, Handle, InBackground, Produce
from plugins.embedded import EmbeddedServer
from plugins.network import Proxy
from plugins.waiting import patience_s, wait_until

from nsqtools.client.message import Message
from nsqtools.client.producer import Producer
from nsqtools.errors import PublishError, PublishUnknown


class Publisher:
    """Publishes numbers until it is told to stop, and notes what became of each."""

    def __init__(self, producer: Producer) -> None:
        self._producer = producer
        self.is_over = threading.Event()
        self.confirmed: set[bytes] = set()
        self.unknown: set[bytes] = set()

    def run(self) -> None:
        number = 0
        while not self.is_over.is_set():
            number += 1
            body = b"%d" % number
            try:
                self._producer.publish(TOPIC, body)
            except PublishUnknown:
                self.unknown.add(body)
            except PublishError:
                self.is_over.wait(0.01)  # not sent: nsqd is away
            else:
                self.confirmed.add(body)

    def confirms_more(self) -> Callable[[], bool]:
        before = len(self.confirmed)
        return lambda: len(self.confirmed) > before + 20


def test_connections_cut_at_any_moment_lose_nothing(
    quick_nsqd: EmbeddedServer,
    proxy_to: Callable[[str], Proxy],
    consume: Consume,
    handle: Handle,
    produce: Produce,
    in_background: InBackground,
) -> None:
    """What was in flight comes again after its timeout; what was not sent is never seen."""
    rng = random.Random(1)
    nsqd = quick_nsqd
    nsqd.create_channel(TOPIC, CHANNEL)
    proxy = proxy_to(nsqd.tcp_address)
    publisher = Publisher(produce(proxy.address))
    consumer = consume(proxy.address, max_attempts=0, max_backoff_duration_s=0)
    seen: Counter[bytes] = Counter()

    def fail_sometimes(message: Message) -> None:
        seen[message.body] += 1
        if rng.random() < 0.05:
            message.requeue(0)
        elif rng.random() < 0.5:
            message.touch()

    handle(consumer, fail_sometimes, workers=3)
    publishing = in_background(publisher.run)
    for number in range(12):
        wait_until(publisher.confirms_more(), what="confirmed publishes", timeout_s=10)
        proxy.piece_size = rng.choice([7, 100, 65536])
        proxy.cut(reset=bool(number % 2))
    publisher.is_over.set()
    publishing.result(patience_s(10))
    wait_until(lambda: publisher.confirmed <= set(seen), what="all confirmed", timeout_s=15)
    assert set(seen) <= publisher.confirmed | publisher.unknown
    wait_until(lambda: nsqd.depth(TOPIC, CHANNEL) == 0, what="an empty channel", timeout_s=15)
    wait_until(lambda: consumer._io.rdy.in_flight == 0, what="nothing counted as in flight")
