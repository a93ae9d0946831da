"""Copies of the messages that come to a topic, for a moment, without taking any from a channel.

nsqd shows a message only by delivering it. A channel of one's own gets a copy of every message that
comes from then on; an ephemeral one is gone with its last connection. The trap is a topic that has
no channel yet: its whole backlog would go to the first one, and be lost with it. So only those nsqd
are asked on which the topic has another channel.
"""

from __future__ import annotations

import secrets
import threading
import time
from dataclasses import dataclass, replace

from nsqtools.client.consumer import Consumer
from nsqtools.client.options import ClientOptions
from nsqtools.cluster.directory import Cluster
from nsqtools.errors import ConfigurationError, NotFoundError, NsqError
from nsqtools.protocol.addresses import Address
from nsqtools.protocol.names import EPHEMERAL, check_topic

MAX_LISTENERS = 4
MAX_MESSAGES = 100
MAX_LISTEN_S = 30.0

_listeners = threading.BoundedSemaphore(MAX_LISTENERS)


@dataclass(frozen=True, slots=True)
class Copy:
    """A message that came."""

    nsqd: str
    id: str
    timestamp_ns: int
    attempts: int
    body: bytes


@dataclass(frozen=True, slots=True)
class Copies:
    """What came, and why some nsqd were not listened to."""

    messages: tuple[Copy, ...]
    left_out: tuple[str, ...]


def listen(
    cluster: Cluster, options: ClientOptions, topic: str, *, count: int, for_s: float
) -> Copies:
    """Take copies until there are ``count`` or the time is over. Raises `NsqError`."""
    check_topic(topic)
    count = max(1, min(count, MAX_MESSAGES))
    for_s = max(0.5, min(for_s, MAX_LISTEN_S))
    addresses, left_out = addresses_with_channels(cluster, topic)
    if not _listeners.acquire(blocking=False):
        raise NsqError(
            f"{MAX_LISTENERS} others are listening already", hint="Try again in a moment."
        )
    try:
        return Copies(_take(addresses, options, topic, count, for_s), left_out)
    finally:
        _listeners.release()


def addresses_with_channels(cluster: Cluster, topic: str) -> tuple[list[str], tuple[str, ...]]:
    """Return where to connect to, and a line for each nsqd that has to be left out.

    Raises `NotFoundError` when no nsqd has the topic, `ConfigurationError` when none is left.
    """
    stats = cluster.stats(topic)
    infos, _ = cluster.ask(
        {report.address: cluster.nsqd(report.address) for report in stats.nodes},
        lambda client: client.info(),
    )
    found, left_out = [], [f"{failure.error}" for failure in stats.failures]
    is_known = False
    for report in stats.nodes:
        there = [each for each in report.stats.topics or () if each.topic_name == topic]
        if not there:
            continue
        is_known = True
        info = infos.get(report.address)
        if not there[0].channels:
            left_out.append(
                f"{report.address}: the topic has no channel there, and its backlog would be lost"
            )
        elif info is None:
            left_out.append(f"{report.address}: no answer")
        else:
            announced = Address(str(info.get("broadcast_address")), int(info["tcp_port"]))
            found.append(str(cluster.reachable(announced)))
    if not is_known:
        raise NotFoundError(f"no nsqd that answers has the topic {topic}")
    if not found:
        raise ConfigurationError(
            f"nobody can listen to {topic} without loss",
            hint="; ".join(left_out) + ". Create a channel first.",
        )
    return found, tuple(left_out)


def _take(
    addresses: list[str], options: ClientOptions, topic: str, count: int, for_s: float
) -> tuple[Copy, ...]:
    consumer = Consumer(
        topic,
        f"nsq-web-{secrets.token_hex(4)}{EPHEMERAL}",
        nsqd_tcp_addresses=addresses,
        options=replace(options, max_in_flight=max(count, len(addresses)), max_attempts=0),
    )
    taken: list[Copy] = []
    with consumer:
        consumer.start(fail_fast=True)
        ends_s = time.monotonic() + for_s
        while len(taken) < count and (left_s := ends_s - time.monotonic()) > 0:
            batch = consumer.next_batch(left_s)
            if batch is None:
                break
            taken += (
                Copy(
                    batch.nsqd,
                    message.id.decode(),
                    message.timestamp_ns,
                    message.attempts,
                    message.body,
                )
                for message in batch
            )
            batch.finish()
    return tuple(taken[:count])
