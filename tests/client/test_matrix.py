"""Every transport with every size of message and window, against the real nsqd.

The short form takes each transport with each size once; the whole matrix is slow.
"""

from __future__ import annotations

import itertools
import time
from collections.abc import Iterator
from typing import Any

import pytest
from plugins.certificates import Certificates
from plugins.clients import CHANNEL, TOPIC, Consume, Produce, take
from plugins.daemons import GoNsqd
from plugins.waiting import patience_s

from nsqtools.client.consumer import Consumer

COMPRESSION: list[dict[str, bool]] = [{}, {"snappy": True}, {"deflate": True}]
MODES = [{**compression, "tls_v1": tls} for tls in (False, True) for compression in COMPRESSION]
SIZES = [1, 200, (1 << 16) + 1, 1 << 20]
WINDOWS = [1, 2, 100, 2500]


def name(value: Any) -> str:
    if isinstance(value, dict):
        return "+".join(key for key, is_on in value.items() if is_on) or "plain"
    return str(value)


def cases() -> Iterator[Any]:
    for number, (mode, size) in enumerate(itertools.product(MODES, SIZES)):
        for window in WINDOWS:
            is_short = window == WINDOWS[number % len(WINDOWS)]
            yield pytest.param(mode, size, window, marks=[] if is_short else pytest.mark.slow)


def finished(consumer: Consumer, count: int) -> list[bytes]:
    bodies: list[bytes] = []
    while len(bodies) < count:  # more may come only when these are answered
        for message in take(consumer, 1):
            bodies.append(message.body)
            message.finish()
    return bodies


@pytest.mark.parametrize(("mode", "size", "window"), list(cases()), ids=name)
def test_what_is_published_is_consumed(
    tls_nsqd: GoNsqd,
    certificates: Certificates,
    produce: Produce,
    consume: Consume,
    mode: dict[str, bool],
    size: int,
    window: int,
) -> None:
    tls_nsqd.create_channel(TOPIC, CHANNEL)
    count = 100 if size < 1000 else 5
    bodies = [bytes([n]) * size for n in range(count)]
    options: dict[str, Any] = {"tls_root_ca_file": str(certificates.ca), **mode}
    producer = produce(tls_nsqd.tcp_address, **options)
    for body in bodies[: count // 2]:
        producer.submit(TOPIC, [body])
    producer.publish_many(TOPIC, bodies[count // 2 :])
    consumer = consume(tls_nsqd.tcp_address, max_in_flight=window, **options)
    assert sorted(finished(consumer, count)) == bodies
    assert consumer.stop(timeout_s=patience_s(5))
    stats = tls_nsqd.channel_stats(TOPIC, CHANNEL)
    assert (stats["depth"], stats["in_flight_count"], stats["requeue_count"]) == (0, 0, 0)


@pytest.mark.parametrize("mode", MODES, ids=name)
@pytest.mark.alone
def test_a_lone_message_does_not_wait_for_a_buffer(
    tls_nsqd: GoNsqd,
    certificates: Certificates,
    produce: Produce,
    consume: Consume,
    mode: dict[str, bool],
) -> None:
    """Without a flush in some layer it would come with the next heartbeat, in half a minute."""
    options: dict[str, Any] = {"tls_root_ca_file": str(certificates.ca), **mode}
    consumer = consume(tls_nsqd.tcp_address, fail_fast=True, **options)
    producer = produce(tls_nsqd.tcp_address, **options)
    for _ in range(3):
        began = time.monotonic()
        producer.publish(TOPIC, b"x")
        finished(consumer, 1)
        assert time.monotonic() - began < patience_s(1)
