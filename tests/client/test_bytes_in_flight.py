"""max_in_flight_bytes: what large messages may cost, on real servers."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

from plugins.clients import CHANNEL, TOPIC
from plugins.http_api import Nsqd
from plugins.waiting import patience_s, wait_until

from nsqtools import ClientOptions, Consumer, Message
from nsqtools.client.in_flight_limit import InFlightLimit

LARGE = 500_000


class Run:
    """A consumer at work, and the most messages that it had in flight."""

    def __init__(self, *servers: Nsqd, **options: Any) -> None:
        self.most = 0
        self.handled = 0
        self.consumer = Consumer(
            TOPIC,
            CHANNEL,
            nsqd_tcp_addresses=[nsqd.tcp_address for nsqd in servers],
            options=ClientOptions(output_buffer_timeout_s=0.025, **options),
        )
        self._thread = threading.Thread(target=self.consumer.run, args=(self._handle,))

    def _handle(self, message: Message) -> None:
        self.most = max(self.most, self.consumer._io.rdy.in_flight)
        self.handled += 1

    def __enter__(self) -> Run:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self.consumer.begin_stop()
        self._thread.join(patience_s(20))
        assert not self._thread.is_alive()


def test_large_messages_are_few_at_a_time_and_small_ones_many_again(
    any_nsqd: Callable[..., Nsqd],
) -> None:
    servers = [any_nsqd() for _ in range(3)]
    for nsqd in servers:
        nsqd.create_channel(TOPIC, CHANNEL)
        for _ in range(6):
            nsqd.publish(TOPIC, *[bytes(LARGE)] * 8)
    with Run(*servers, max_in_flight_bytes=10 * LARGE) as run:
        wait_until(lambda: run.handled == 3 * 6 * 8, what="the large ones", timeout_s=20)
        assert run.most <= 2 * 10  # of 200
        delivery = run.consumer._io.delivery
        assert delivery.limit <= 10
        wait_until(
            lambda: delivery.limit == 200 or publish_more(servers[0]), what="all of 200 again"
        )


def publish_more(nsqd: Nsqd) -> bool:
    nsqd.publish(TOPIC, *[b"small"] * 100)
    return False


def test_the_size_of_messages_limits_their_number() -> None:
    limit = InFlightLimit(200, 1000)
    limit.adapted = 200
    assert (limit.current, limit.is_by_bytes) == (200, False)
    for size, count, expected in [(1000, 10, 10), (5000, 1, 1), (10, 10, 200), (0, 5, 200)]:
        limit.weighed(size, count)
        assert (limit.current, limit.is_by_bytes) == (expected, expected < 200)
    limit.maximum = 0
    assert limit.current == 0
    unlimited = InFlightLimit(200)
    unlimited.adapted = 200
    unlimited.weighed(1 << 40, 1)
    assert unlimited.current == 200
