"""nsqd stopped and started again, and connections cut, under a consumer and a producer.

Nothing that was confirmed may be missing. Kills are in tests/faults.
"""

from __future__ import annotations

import itertools
import random
import threading
from collections import Counter

from plugins.clients import CHANNEL, TOPIC, Consume, Handle, InBackground, Produce
from plugins.embedded import EmbeddedServer
from plugins.network import ProxyTo
from plugins.waiting import patience_s, wait_until

from nsqtools.client.message import Message
from nsqtools.errors import PublishError, PublishUnknown


def test_connections_cut_at_any_moment_lose_nothing(
    quick_nsqd: EmbeddedServer,
    proxy_to: ProxyTo,
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
    producer, is_over = produce(proxy.address), threading.Event()
    confirmed: set[bytes] = set()
    unknown: set[bytes] = set()

    def publish() -> None:
        for number in itertools.count():
            if is_over.is_set():
                return
            body = b"%d" % number
            try:
                producer.publish(TOPIC, body)
                confirmed.add(body)
            except PublishUnknown:
                unknown.add(body)
            except PublishError:
                is_over.wait(0.01)  # not sent: nsqd is away

    consumer = consume(proxy.address, max_attempts=0, max_backoff_duration_s=0)
    seen: Counter[bytes] = Counter()

    def fail_sometimes(message: Message) -> None:
        seen[message.body] += 1
        if rng.random() < 0.05:
            message.requeue(0)
        elif rng.random() < 0.5:
            message.touch()

    handle(consumer, fail_sometimes, workers=3)
    publishing = in_background(publish)
    for number in range(12):
        enough = len(confirmed) + 20
        wait_until(lambda: len(confirmed) > enough, what="confirmed publishes", timeout_s=10)  # noqa: B023
        proxy.piece_size = rng.choice([7, 100, 65536])
        proxy.cut(reset=bool(number % 2))
    is_over.set()
    publishing.result(patience_s(10))
    wait_until(lambda: confirmed <= set(seen), what="all confirmed", timeout_s=15)
    assert set(seen) <= confirmed | unknown
    wait_until(lambda: nsqd.depth(TOPIC, CHANNEL) == 0, what="an empty channel", timeout_s=15)
    wait_until(lambda: consumer._io.rdy.in_flight == 0, what="nothing counted as in flight")
