"""The statistics of an nsqd: /stats as JSON and text, /metrics, and pushes to statsd.

There may be thousands of queues and clients, so statistics are collected in steps. Topics that are
created or deleted meanwhile may be missing or included.

The text has the same columns as that of nsqd. The names of metrics begin with ``nsqd_`` and
``nsqlookupd_``. Their samples are generators, so that a page of 10,000 channels can be written in
steps.

statsd gets the statistics over UDP, spread over each interval. Counters are the differences to the
previous push. Datagrams contain complete lines up to a size. A longer line has its own datagram.
"""

from __future__ import annotations

import asyncio
import gc
import os
import socket
import sys
import time
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator
from contextlib import suppress
from datetime import datetime
from itertools import tee
from operator import attrgetter
from typing import TypeVar

from nsqtools.errors import ConfigurationError
from nsqtools.http.loop_meter import LoopMeter, in_steps, list_in_steps, meter_of
from nsqtools.protocol.names import is_ephemeral, parse_address
from nsqtools.protocol.requests import PeerInfo
from nsqtools.protocol.stats import (
    NO_LATENCY,
    ChannelStats,
    ClientStats,
    LatencyStats,
    NsqdStats,
    TopicStats,
)
from nsqtools.protocol.text import go_duration
from nsqtools.records.prometheus import Metric, metric_of
from nsqtools.server.daemon_log import NSQ_VERSION, version_line
from nsqtools.server.protocol_v2 import ClientContext, ProtocolV2
from nsqtools.server.queues.channel import Channel
from nsqtools.server.queues.queued_message import latency_stats
from nsqtools.server.queues.topic import Topic

Families = Iterator[Metric]

Q = TypeVar("Q")
QueueMetrics = tuple[tuple[str, str, Callable[[Q], int]], ...]

_TOPIC_METRICS: QueueMetrics[Topic] = (
    ("depth", "Messages that wait for a channel.", attrgetter("depth")),
    ("disk_depth", "Of these, on disk.", attrgetter("backlog.disk_depth")),
    ("messages_total", "Messages published.", attrgetter("message_count")),
    ("bytes_total", "Bytes of their bodies.", attrgetter("message_bytes")),
    ("paused", "1 when it is paused.", lambda topic: int(topic.is_paused)),
)
_CHANNEL_METRICS: QueueMetrics[Channel] = (
    ("depth", "Messages that wait.", lambda channel: len(channel.backlog)),
    ("disk_depth", "Of these, on disk.", attrgetter("backlog.disk_depth")),
    ("in_flight", "Messages with consumers.", attrgetter("in_flight_count")),
    ("deferred", "Messages that are not due.", attrgetter("backlog.deferred_count")),
    ("clients", "Consumers.", lambda channel: len(channel.consumers)),
    ("messages_total", "Messages received.", attrgetter("message_count")),
    ("requeued_total", "Given back.", attrgetter("requeue_count")),
    ("timed_out_total", "Not answered in time.", attrgetter("timeout_count")),
    ("paused", "1 when it is paused.", lambda channel: int(channel.is_paused)),
)


def nsqd_metrics(context: ClientContext) -> Families:
    """Yield the metrics of an nsqd."""
    nsqd = context.nsqd
    topics = list(nsqd.topics.values())
    labeled_topics = (({"topic": topic.name}, topic) for topic in topics)
    labeled_channels = (
        ({"topic": topic.name, "channel": channel.name}, channel)
        for topic in topics
        for channel in list(topic.channels.values())
    )
    yield from _queue_metrics("topic", _TOPIC_METRICS, labeled_topics)
    yield from _queue_metrics("channel", _CHANNEL_METRICS, labeled_channels)
    yield single("nsqd_connections", "TCP connections.", len(context.connections))
    health = nsqd.health
    help = "1 unless the disk is full, or the last write to it failed."
    yield single("nsqd_healthy", help, int(health.is_well))
    yield single("nsqd_start_time_seconds", "When it started.", nsqd.start_time_s)
    help = "Publishes while the disk was nearly full."
    yield single("nsqd_refused_total", help, health.refused_publishes)
    with suppress(OSError):
        yield single("nsqd_disk_free_bytes", "Of the data path.", health.free_bytes())
    thread = nsqd.disk_thread
    yield single("nsqd_syncs_total", "Syncs of queues.", thread.sync_count)
    yield single("nsqd_sync_seconds_total", "Time in them.", thread.sync_s)
    yield single("nsqd_longest_sync_seconds", "The longest.", thread.longest_sync_s)
    if nsqd.durable is not None:
        transactions = nsqd.durable.database.transactions
        yield single("nsqd_durable_transactions_total", "Committed.", transactions)
    yield from loop_metrics("nsqd", meter_of(nsqd.loop))


def _queue_metrics(
    kind: str, metrics: QueueMetrics[Q], queues: Iterable[tuple[dict[str, str], Q]]
) -> Families:
    # The labels are made with the samples of the first metric, and kept for the others.
    for (name, help, value), items in zip(metrics, tee(queues, len(metrics)), strict=True):
        samples = ((labels, value(queue)) for labels, queue in items)
        yield metric_of(f"nsqd_{kind}_{name}", help, samples)


def loop_metrics(program: str, meter: LoopMeter) -> Families:
    """Yield the measurements of the loop of a daemon, and of its process."""
    stall = f"{program}_longest_stall"
    help = "The longest that other clients waited while some were served."
    yield single(f"{stall}_seconds", help, meter.longest_s)
    yield single(f"{stall}_cpu_seconds", "The most CPU in one turn.", meter.longest_cpu_s)
    yield single(f"{program}_cpu_seconds_total", "CPU time of the process.", time.process_time())
    yield single(f"{program}_resident_bytes", "Memory of the process.", resident_bytes())


def single(name: str, help: str, value: float) -> Metric:
    return metric_of(name, help, [({}, value)])


def stats_lines(stats: NsqdStats, start_ns: int) -> Iterator[str]:
    """Yield the lines of the text page."""
    now_ns = time.time_ns()
    started = datetime.fromtimestamp(start_ns // 1_000_000_000).astimezone()
    yield version_line("nsqd")
    yield f"start_time {started.isoformat().replace('+00:00', 'Z')}"
    yield f"uptime {go_duration(now_ns - start_ns)}"
    yield ""
    yield f"Health: {stats.health}"
    if stats.memory is not None:
        yield from ("", "Memory:")
        for name, value in stats.memory.items():
            yield f"   {name:<25}\t{value}"
    yield from ("", "Topics:" if stats.topics else "Topics: None")
    now_s = now_ns // 1_000_000_000
    separator = ""
    for topic in stats.topics or ():
        prefix = separator + ("*P " if topic.paused else "   ")
        latency = _latency(topic.e2e_processing_latency)
        yield _TOPIC_LINE % (prefix, *_topic_values(topic), latency)
        separator = "\n"
        for channel in topic.channels:
            yield _channel(channel)
            for client in channel.clients or ():
                yield "        " + _client(client, now_s)
    yield from ("", "Producers:" if stats.producers else "Producers: None")
    for client in stats.producers or ():
        yield "   " + _client(client, now_s)


# The operator % takes two thirds of the time of an f-string with widths.
_TOPIC_LINE = "%s[%-15s] depth: %-5d be-depth: %-5d msgs: %-8d e2e%%: %s"
_topic_values = attrgetter("topic_name", "depth", "backend_depth", "message_count")
_CHANNEL_LINE = (
    "%s[%-25s] depth: %-5d be-depth: %-5d inflt: %-4d def: %-4d re-q: %-5d timeout: %-5d "
    "msgs: %-8d e2e%%: %s"
)
_channel_values = attrgetter(
    "channel_name",
    "depth",
    "backend_depth",
    "in_flight_count",
    "deferred_count",
    "requeue_count",
    "timeout_count",
    "message_count",
)


def _channel(channel: ChannelStats) -> str:
    prefix = "   *P " if channel.paused else "      "
    latency = _latency(channel.e2e_processing_latency)
    return _CHANNEL_LINE % (prefix, *_channel_values(channel), latency)


def _client(client: ClientStats, now_s: int) -> str:
    port = client.remote_address.rpartition(":")[2]
    name = f"{client.hostname}:{port} {client.user_agent}"
    connected = go_duration((now_s - client.connect_ts) * 1_000_000_000)
    head = f"[{client.version} {name:<21}]"
    if client.pub_counts:
        topics = ",".join(f"{topic}={count}" for topic, count in client.pub_counts)
        published = sum(count for _, count in client.pub_counts)
        return f"{head} msgs: {published:<8} topics: {topics} connected: {connected}"
    return (
        f"{head} state: {client.state} inflt: {client.in_flight_count:<4} "
        f"rdy: {client.ready_count:<4} fin: {client.finish_count:<8} "
        f"re-q: {client.requeue_count:<8} msgs: {client.message_count:<8} connected: {connected}"
    )


def _latency(latency: LatencyStats) -> str:
    percentiles = latency.percentiles
    return ", ".join([_with_unit(value) for _, value in percentiles]) if percentiles else ""


def _with_unit(nanoseconds: float) -> str:
    for unit, size in (("s", 1e9), ("ms", 1e6), ("us", 1e3)):
        if nanoseconds > size:
            return f"{nanoseconds / size:.1f}{unit}"
    return f"{nanoseconds:.1f}ns"


_CHANNELS_AT_ONCE = 20  # between looks at the clock
Consumers = dict[Channel, list[ClientStats]]
_by_name = attrgetter("name")


async def gather_stats(
    context: ClientContext,
    *,
    topic: str = "",
    channel: str = "",
    with_clients: bool = True,
    with_memory: bool = True,
) -> NsqdStats:
    """Return the statistics of all topics, or of one topic or channel."""
    nsqd = context.nsqd
    topics: tuple[TopicStats, ...] | None = None
    producers: list[ClientStats] = []
    if not topic or topic in nsqd.topics:
        selected = [nsqd.topics[topic]] if topic else sorted(nsqd.topics.values(), key=_by_name)
        consumers: Consumers | None = defaultdict(list) if with_clients else None
        async for client in in_steps(list(context.clients) if with_clients else ()):
            stats = client_stats(client, topic)
            if consumers is not None and client.subscription is not None:
                consumers[client.subscription.channel].append(stats)
            if client.publishing.counts:
                producers.append(stats)
        named = [item for item in selected if not channel or channel in item.channels]
        tracks_latency = bool(nsqd.options.e2e_processing_latency_percentile)
        items = _topics_stats(named, channel, consumers, tracks_latency=tracks_latency)
        topics = tuple(filter(None, await list_in_steps(items)))
    return NsqdStats(
        version=NSQ_VERSION,
        health=nsqd.health.text,
        start_time=int(nsqd.start_time_s),
        topics=topics,
        memory=memory_stats() if with_memory else None,
        producers=tuple(producers) or None,
    )


def _topics_stats(
    topics: Iterable[Topic], channel: str, consumers: Consumers | None, *, tracks_latency: bool
) -> Iterator[TopicStats | None]:
    """Yield the statistics of topics, and None after several channels of a topic."""
    for topic in topics:
        selected = list(topic.channels.values())
        if len(selected) > 1:
            selected.sort(key=_by_name)
        channels: list[ChannelStats] = []
        for candidate in selected:
            if candidate.name == channel or not channel:
                channels.append(_channel_stats(candidate, consumers))
                if not len(channels) % _CHANNELS_AT_ONCE:
                    yield None
        depth, disk_depth = topic.backlog.depths()
        yield TopicStats(
            topic_name=topic.name,
            channels=tuple(channels),
            depth=depth + topic.deferred_count,
            backend_depth=disk_depth,
            message_count=topic.message_count,
            message_bytes=topic.message_bytes,
            paused=topic.is_paused,
            e2e_processing_latency=latency_stats(
                [item.latency for item in selected if item.latency is not None]
            )
            if tracks_latency
            else NO_LATENCY,
        )


def _channel_stats(channel: Channel, consumers: Consumers | None) -> ChannelStats:
    latency, backlog = channel.latency, channel.backlog
    depth, disk_depth = backlog.depths()
    return ChannelStats(
        channel_name=channel.name,
        depth=depth,
        backend_depth=disk_depth,
        in_flight_count=channel.in_flight_count,
        deferred_count=backlog.deferred_count,
        message_count=channel.message_count,
        requeue_count=channel.requeue_count,
        timeout_count=channel.timeout_count,
        client_count=len(channel.consumers),
        clients=None if consumers is None else tuple(consumers.get(channel, ())),
        paused=channel.is_paused,
        e2e_processing_latency=latency_stats([latency]) if latency is not None else NO_LATENCY,
    )


def client_stats(client: ProtocolV2, topic_filter: str) -> ClientStats:
    """Return the statistics of one client; ``topic_filter`` selects a topic of ``pub_counts``."""
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
    """Return the memory statistics of Go, with 0 where Python has no equivalent."""
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
    """Return the resident memory of this process, 0 where the system does not provide it."""
    try:
        with open("/proc/self/statm", "rb") as statm:
            return int(statm.read().split()[1]) * os.sysconf("SC_PAGE_SIZE")
    except (OSError, IndexError, ValueError):  # another system than Linux
        return 0


# -- statsd ----------------------------------------------------------------------------------------

_MEMORY_COUNTER = "gc_total_runs"  # the only counter of the memory statistics
_COUNTERS = ("message_count", "message_bytes", "requeue_count", "timeout_count")
_OF_TOPIC = ("message_count", "message_bytes", "depth", "backend_depth")
_OF_CHANNEL: tuple[str, ...] = ("message_count", "depth", "backend_depth", "in_flight_count")
_OF_CHANNEL += ("deferred_count", "requeue_count", "timeout_count", "client_count")
# Datagrams are spread over an interval except its last second, which is a margin for delays.
_MARGIN_S = 1.0
_STATSD_PORT = 8125

Counters = dict[str, int]


def expand_prefix(prefix: str, info: PeerInfo) -> str:
    """Return the prefix of all keys, with ``%s`` replaced by this host and a dot at the end."""
    if not prefix:
        return ""
    host = f"{info.broadcast_address}_{info.http_port}".replace(".", "_").replace(":", "_")
    return prefix.replace("%s", host).removesuffix(".") + "."


def statsd_lines(
    stats: NsqdStats, counters: Counters, prefix: str, *, exclude_ephemeral: bool
) -> Iterator[str]:
    """Yield a line for each metric.

    ``counters`` has the values of the last push, and is replaced by the current ones.
    """
    last = counters.copy()
    counters.clear()  # drop the counters of deleted queues

    def line(key: str, value: int, kind: str) -> str:
        if kind == "c":
            counters[key] = value
            previous = last.get(key, 0)
            # A queue that was deleted and created again counts from 0.
            value -= previous if previous <= value else 0
        return f"{prefix}{key}:{value}|{kind}\n"

    for topic in stats.topics or ():
        if exclude_ephemeral and is_ephemeral(topic.topic_name):
            continue
        queues: list[tuple[str, TopicStats | ChannelStats]] = [("", topic)]
        queues += [(f"channel.{channel.channel_name}.", channel) for channel in topic.channels]
        for part, queue in queues:
            if exclude_ephemeral and is_ephemeral(part.removesuffix(".")):
                continue
            key = f"topic.{topic.topic_name}.{part}"
            for name in _OF_TOPIC if queue is topic else _OF_CHANNEL:
                metric = "clients" if name == "client_count" else name
                kind = "c" if name in _COUNTERS else "g"
                yield line(f"{key}{metric}", getattr(queue, name), kind)
            for quantile, value in queue.e2e_processing_latency.percentiles or ():
                yield line(f"{key}e2e_processing_latency_{quantile * 100:.0f}", int(value), "g")
    for name, value in (stats.memory or {}).items():
        if name == _MEMORY_COUNTER:
            yield line("mem.gc_runs", value, "c")
        else:
            yield line(f"mem.{name}", value, "g")


def pack_datagrams(lines: Iterable[str], size: int) -> list[bytes]:
    """Join lines to datagrams of at most ``size`` bytes, or one longer line."""
    datagrams: list[bytes] = []
    packed = b""
    for line in lines:
        encoded = line.encode()
        if packed and len(packed) + len(encoded) > size:
            datagrams.append(packed)
            packed = b""
        packed += encoded
    return [*datagrams, packed] if packed else datagrams


async def push_to_statsd(context: ClientContext, prefix: str) -> None:
    """Push the statistics of an nsqd until cancelled."""
    options, log = context.nsqd.options, context.nsqd.log
    address, interval_s = options.statsd_address, options.statsd_interval
    counters: Counters = {}
    loop = asyncio.get_running_loop()
    next_s = loop.time() + interval_s
    while True:
        await asyncio.sleep(max(0.0, next_s - loop.time()))
        next_s += interval_s
        log.info(f"STATSD: pushing stats to {address}")
        with_memory = options.statsd_mem_stats
        stats = await gather_stats(context, with_clients=False, with_memory=with_memory)
        lines = statsd_lines(
            stats, counters, prefix, exclude_ephemeral=options.statsd_exclude_ephemeral
        )
        datagrams = pack_datagrams(lines, options.statsd_udp_packet_size)
        try:
            await _send(datagrams, address, max(0.0, interval_s - _MARGIN_S))
        except (OSError, ConfigurationError, UnicodeError) as exc:  # of the address or its name
            log.error(f"failed to create UDP socket to statsd({address}) - {exc}")


async def _send(datagrams: list[bytes], address: str, spread_s: float) -> None:
    host, port = parse_address(address, _STATSD_PORT)
    addresses = await asyncio.get_running_loop().getaddrinfo(host, port, type=socket.SOCK_DGRAM)
    family, kind, protocol, _, target = addresses[0]
    with socket.socket(family, kind, protocol) as udp:
        udp.connect(target)
        for datagram in datagrams:
            # The error is that of the previous datagram, and statsd may be running again.
            with suppress(ConnectionRefusedError):
                udp.send(datagram)
            await asyncio.sleep(spread_s / len(datagrams))
