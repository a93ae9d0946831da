"""Gather /stats from the queues and the clients, in steps: there may be thousands of each.

So topics that come or go meanwhile may be in it or not.
"""

from __future__ import annotations

import gc
import sys
from asyncio import AbstractEventLoop
from collections import defaultdict
from collections.abc import Collection

from nsqtools.protocol.stats import ChannelStats, ClientStats, NsqdStats, TopicStats
from nsqtools.server.daemon_log import NSQ_VERSION
from nsqtools.server.queues.channel import Channel
from nsqtools.server.queues.latency import latency_stats
from nsqtools.server.queues.nsqd_queues import NsqdQueues
from nsqtools.server.queues.steps import in_steps
from nsqtools.server.queues.topic import Topic
from nsqtools.server.tcp.protocol_v2 import ProtocolV2

Consumers = dict[Channel, list[ClientStats]]


async def gather_stats(
    nsqd: NsqdQueues,
    clients: Collection[ProtocolV2],
    *,
    topic: str = "",
    channel: str = "",
    with_clients: bool = True,
    with_memory: bool = True,
) -> NsqdStats:
    """Return the stats, of one topic or channel if they are named."""
    topics: tuple[TopicStats, ...] | None = None
    producers: tuple[ClientStats, ...] | None = None
    if not topic or topic in nsqd.topics:
        found = [nsqd.topics[topic]] if topic else sorted(nsqd.topics.values(), key=_by_name)
        consumers = await _consumers(clients, topic, nsqd.loop) if with_clients else None
        topics = tuple(
            [
                await _topic_stats(each, channel, consumers, nsqd.loop)
                async for each in in_steps(found, nsqd.loop)
                if not channel or channel in each.channels
            ]
        )
        if with_clients:
            producers = tuple(
                [
                    client_stats(each, topic)
                    async for each in in_steps(list(clients), nsqd.loop)
                    if each.publishing.counts
                ]
            )
    return NsqdStats(
        version=NSQ_VERSION,
        health=nsqd.health.text,
        start_time=int(nsqd.start_time_s),
        topics=topics,
        memory=memory_stats() if with_memory else None,
        producers=producers or None,
    )


def _by_name(named: Topic | Channel) -> str:
    return named.name


async def _consumers(
    clients: Collection[ProtocolV2], topic: str, loop: AbstractEventLoop
) -> Consumers:
    consumers: Consumers = defaultdict(list)
    async for client in in_steps(list(clients), loop):
        if client.subscription is not None:
            consumers[client.subscription.channel].append(client_stats(client, topic))
    return consumers


async def _topic_stats(
    topic: Topic, channel: str, consumers: Consumers | None, loop: AbstractEventLoop
) -> TopicStats:
    channels = (
        [topic.channels[channel]] if channel else sorted(topic.channels.values(), key=_by_name)
    )
    latencies = [each.latency for each in topic.channels.values() if each.latency is not None]
    return TopicStats(
        topic_name=topic.name,
        channels=tuple(
            [_channel_stats(each, consumers) async for each in in_steps(channels, loop)]
        ),
        depth=topic.depth,
        backend_depth=topic.backlog.disk_depth,
        message_count=topic.message_count,
        message_bytes=topic.message_bytes,
        paused=topic.is_paused,
        e2e_processing_latency=latency_stats(latencies),
    )


def _channel_stats(channel: Channel, consumers: Consumers | None) -> ChannelStats:
    return ChannelStats(
        channel_name=channel.name,
        depth=len(channel.backlog),
        backend_depth=channel.backlog.disk_depth,
        in_flight_count=channel.in_flight_count,
        deferred_count=len(channel.deferred),
        message_count=channel.message_count,
        requeue_count=channel.requeue_count,
        timeout_count=channel.timeout_count,
        client_count=len(channel.consumers),
        clients=None if consumers is None else tuple(consumers.get(channel, ())),
        paused=channel.is_paused,
        e2e_processing_latency=latency_stats([] if channel.latency is None else [channel.latency]),
    )


def client_stats(client: ProtocolV2, topic_filter: str = "") -> ClientStats:
    """Describe one connection; a topic filter leaves only that topic in ``pub_counts``."""
    terms, subscription, auth = client.terms, client.subscription, client.authorization.state
    tls = client.connection.tls
    return ClientStats(
        client_id=terms.client_id,
        hostname=terms.hostname,
        version="V2",
        remote_address=client.connection.remote_address,
        state=client.state,
        ready_count=subscription.ready_count if subscription else 0,
        in_flight_count=len(subscription.in_flight) if subscription else 0,
        message_count=subscription.message_count if subscription else 0,
        finish_count=subscription.finish_count if subscription else 0,
        requeue_count=subscription.requeue_count if subscription else 0,
        connect_ts=int(client.connected_s),
        sample_rate=terms.sample_rate,
        deflate=terms.deflate,
        snappy=terms.snappy,
        user_agent=terms.user_agent,
        authed=auth is not None and bool(auth.authorizations),
        auth_identity=auth.identity if auth else "",
        auth_identity_url=auth.identity_url if auth else "",
        pub_counts=tuple(
            (topic, count)
            for topic, count in sorted(client.publishing.counts.items())
            if not topic_filter or topic == topic_filter
        ),
        tls=tls is not None,
        tls_cipher_suite=tls.cipher_suite if tls else "",
        tls_version=tls.version if tls else "",
        tls_negotiated_protocol="",
        tls_negotiated_protocol_is_mutual=tls is not None,
    )


def memory_stats() -> dict[str, int]:
    """Return Go's keys. What Python has no counterpart for is 0."""
    collections = sum(generation["collections"] for generation in gc.get_stats())
    return {
        "heap_objects": sys.getallocatedblocks(),
        "heap_idle_bytes": 0,
        "heap_in_use_bytes": resident_bytes(),
        "heap_released_bytes": 0,
        "gc_pause_usec_100": 0,
        "gc_pause_usec_99": 0,
        "gc_pause_usec_95": 0,
        "next_gc_bytes": 0,
        "gc_total_runs": collections,
    }


def resident_bytes() -> int:
    """Return how much memory this process has, 0 where that is not known."""
    try:
        with open("/proc/self/statm", "rb") as statm:
            return int(statm.read().split()[1]) * 4096
    except (OSError, IndexError, ValueError):  # no Linux
        return 0
