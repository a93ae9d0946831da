"""What an nsqd says of its queues and clients: /stats, gathered in steps, as JSON and text, and
/metrics.

There may be thousands of each, so topics that come or go meanwhile may be in it or not.

The text is column for column what nsqd prints. Metrics begin with ``nsqd_`` and ``nsqlookupd_``.
Their samples are generators, so that a page of 10,000 channels can be made in steps.

statsd gets the figures over UDP at an interval, spread over it. Counters are differences to the
push before. Datagrams carry whole lines up to a size; a longer line goes alone.
"""

from __future__ import annotations

import asyncio
import gc
import os
import socket
import sys
import time
from asyncio import AbstractEventLoop
from collections import defaultdict
from collections.abc import Awaitable, Callable, Collection, Iterable, Iterator
from datetime import datetime

from nsqtools.protocol.names import is_ephemeral, parse_address
from nsqtools.protocol.stats import ChannelStats, ClientStats, LatencyStats, NsqdStats, TopicStats
from nsqtools.protocol.text import go_duration
from nsqtools.records.prometheus import Histogram, Metric
from nsqtools.server.daemon_log import NSQ_VERSION, DaemonLog
from nsqtools.server.loop_meter import BOUNDS_S, LoopMeter, in_steps, meter_of
from nsqtools.server.options import NsqdOptions
from nsqtools.server.queues.channel import Channel
from nsqtools.server.queues.nsqd_queues import NsqdQueues
from nsqtools.server.queues.queued_message import latency_stats
from nsqtools.server.queues.topic import Topic
from nsqtools.server.registrations import Registrations, steady_ns
from nsqtools.server.tcp.protocol_v2 import ProtocolV2

Families = Iterator[Metric | Histogram]


def nsqd_metrics(nsqd: NsqdQueues, connections: int) -> Families:
    """Yield the metrics of an nsqd with this number of TCP connections."""
    topics = list(nsqd.topics.values())
    channels = [channel for topic in topics for channel in topic.channels.values()]
    yield from _topic_metrics(topics)
    yield from _channel_metrics(channels)
    yield Histogram(
        "nsqd_message_latency_seconds",
        "From publish to FIN, of one message in each read of FINs.",
        *nsqd.latencies.shown(),
    )
    yield _gauge("nsqd_connections", "TCP connections.", connections)
    yield _gauge(
        "nsqd_healthy",
        "1 unless the disk is full, or the last write to it failed.",
        nsqd.health.is_well,
    )
    yield _gauge("nsqd_start_time_seconds", "When it started.", nsqd.start_time_s)
    refused = nsqd.health.refused_count
    yield _counter("nsqd_refused_total", "Publishes while the disk was nearly full.", refused)
    yield from _disk_metrics(nsqd)
    yield from loop_metrics("nsqd", meter_of(nsqd.loop))


def _topic_metrics(topics: list[Topic]) -> Families:
    def metric(name: str, kind: str, help: str, value: Callable[[Topic], int]) -> Metric:
        samples = (({"topic": topic.name}, value(topic)) for topic in topics)
        return Metric(f"nsqd_topic_{name}", kind, help, samples)

    yield metric("depth", "gauge", "Messages that wait for a channel.", lambda t: t.depth)
    yield metric("disk_depth", "gauge", "Of these, on disk.", lambda t: t.backlog.disk_depth)
    yield metric("messages_total", "counter", "Messages published.", lambda t: t.message_count)
    yield metric("bytes_total", "counter", "Bytes of their bodies.", lambda t: t.message_bytes)
    yield metric("paused", "gauge", "1 when it is paused.", lambda t: int(t.is_paused))


def _channel_metrics(channels: list[Channel]) -> Families:
    def metric(name: str, kind: str, help: str, value: Callable[[Channel], int]) -> Metric:
        samples = (
            ({"topic": each.topic_name, "channel": each.name}, value(each)) for each in channels
        )
        return Metric(f"nsqd_channel_{name}", kind, help, samples)

    yield metric("depth", "gauge", "Messages that wait.", lambda c: len(c.backlog))
    yield metric("disk_depth", "gauge", "Of these, on disk.", lambda c: c.backlog.disk_depth)
    yield metric("in_flight", "gauge", "Messages with consumers.", lambda c: c.in_flight_count)
    yield metric("deferred", "gauge", "Messages that are not due.", lambda c: len(c.deferred))
    yield metric("clients", "gauge", "Consumers.", lambda c: len(c.consumers))
    yield metric("messages_total", "counter", "Messages received.", lambda c: c.message_count)
    yield metric("requeued_total", "counter", "Given back.", lambda c: c.requeue_count)
    yield metric("timed_out_total", "counter", "Not answered in time.", lambda c: c.timeout_count)
    yield metric("paused", "gauge", "1 when it is paused.", lambda c: int(c.is_paused))


def _disk_metrics(nsqd: NsqdQueues) -> Families:
    try:
        found = os.statvfs(nsqd.options.data_path or ".")
        yield _gauge("nsqd_disk_free_bytes", "Of the data path.", found.f_bavail * found.f_frsize)
    except OSError:
        pass
    thread = nsqd.disk_thread
    yield _counter("nsqd_syncs_total", "Syncs of queues.", thread.sync_count)
    yield _counter("nsqd_sync_seconds_total", "Time in them.", thread.sync_s)
    yield _gauge("nsqd_longest_sync_seconds", "The longest.", thread.longest_sync_s)
    if nsqd.durable is not None:
        made = nsqd.durable.database.transactions
        yield _counter("nsqd_durable_transactions_total", "Committed.", made)


def loop_metrics(program: str, meter: LoopMeter) -> Families:
    """Yield what the loop of a daemon measured, and its process."""
    short = meter.turns - sum(meter.counts)
    yield Histogram(
        f"{program}_loop_turn_seconds",
        "How long other clients waited while some were served.",
        BOUNDS_S,
        [meter.counts[0] + short, *meter.counts[1:]],
        meter.busy_s,
    )
    yield _gauge(f"{program}_longest_stall_seconds", "The longest such turn.", meter.longest_s)
    yield _gauge(
        f"{program}_longest_stall_cpu_seconds", "The most CPU in one turn.", meter.longest_cpu_s
    )
    yield _counter(f"{program}_cpu_seconds_total", "CPU time of the process.", time.process_time())
    yield _gauge(f"{program}_resident_bytes", "Memory of the process.", resident_bytes())


def nsqlookupd_metrics(
    registrations: Registrations, connections: int, meter: LoopMeter
) -> Families:
    """Yield the metrics of an nsqlookupd with this number of TCP connections."""
    entries = list(registrations.entries())
    topics = [(name[1], producers) for name, producers in entries if name[0] == "topic"]
    yield _gauge("nsqlookupd_topics", "Topics registered.", len(topics))
    count = sum(name[0] == "channel" for name, _ in entries)
    yield _gauge("nsqlookupd_channels", "Channels registered.", count)
    nodes = registrations.nodes(steady_ns())
    yield _gauge("nsqlookupd_producers", "Active nsqd.", len(nodes))
    yield Metric(
        "nsqlookupd_topic_producers",
        "gauge",
        "Registered nsqd of a topic.",
        (({"topic": topic}, len(producers)) for topic, producers in topics),
    )
    tombstones = ((t, sum(at is not None for at in found.values())) for t, found in topics)
    yield Metric(
        "nsqlookupd_topic_tombstones",
        "gauge",
        "Of these, tombstoned.",
        (({"topic": topic}, count) for topic, count in tombstones if count),
    )
    yield _gauge("nsqlookupd_connections", "TCP connections.", connections)
    yield from loop_metrics("nsqlookupd", meter)


def _gauge(name: str, help: str, value: float) -> Metric:
    return Metric(name, "gauge", help, _single(value))


def _counter(name: str, help: str, value: float) -> Metric:
    return Metric(name, "counter", help, _single(value))


def _single(value: float) -> Iterable[tuple[dict[str, str], float]]:
    return [({}, int(value) if isinstance(value, bool) else value)]


def stats_lines(stats: NsqdStats, version_line: str, now_ns: int, start_ns: int) -> Iterator[str]:
    """Yield the lines of the page. ``version_line`` is its first one."""
    started = datetime.fromtimestamp(start_ns // 1_000_000_000).astimezone()
    yield version_line
    yield f"start_time {started.isoformat().replace('+00:00', 'Z')}"
    yield f"uptime {go_duration(now_ns - start_ns)}"
    yield ""
    yield f"Health: {stats.health}"
    if stats.memory is not None:
        yield from ("", "Memory:")
        for name, value in stats.memory.items():
            yield f"   {name:<25}\t{value}"
    yield from ("", "Topics:" if stats.topics else "Topics: None")
    for index, topic in enumerate(stats.topics or ()):
        if index:
            yield ""
        yield from _topic(topic, now_ns // 1_000_000_000)
    yield from ("", "Producers:" if stats.producers else "Producers: None")
    for client in stats.producers or ():
        yield "   " + _client(client, now_ns // 1_000_000_000)


def _topic(topic: TopicStats, now_s: int) -> Iterator[str]:
    prefix = "*P " if topic.paused else "   "
    yield (
        f"{prefix}[{topic.topic_name:<15}] depth: {topic.depth:<5} "
        f"be-depth: {topic.backend_depth:<5} msgs: {topic.message_count:<8} "
        f"e2e%: {_latency(topic.e2e_processing_latency)}"
    )
    for channel in topic.channels:
        yield _channel(channel)
        for client in channel.clients or ():
            yield "        " + _client(client, now_s)


def _channel(channel: ChannelStats) -> str:
    prefix = "   *P " if channel.paused else "      "
    return (
        f"{prefix}[{channel.channel_name:<25}] depth: {channel.depth:<5} "
        f"be-depth: {channel.backend_depth:<5} inflt: {channel.in_flight_count:<4} "
        f"def: {channel.deferred_count:<4} re-q: {channel.requeue_count:<5} "
        f"timeout: {channel.timeout_count:<5} msgs: {channel.message_count:<8} "
        f"e2e%: {_latency(channel.e2e_processing_latency)}"
    )


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
    return ", ".join(_with_unit(value) for _, value in latency.percentiles or ())


def _with_unit(nanoseconds: float) -> str:
    for unit, size in (("s", 1e9), ("ms", 1e6), ("us", 1e3)):
        if nanoseconds > size:
            return f"{nanoseconds / size:.1f}{unit}"
    return f"{nanoseconds:.1f}ns"


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


# -- statsd ----------------------------------------------------------------------------------------

_MEMORY_COUNTER = "gc_total_runs"  # pushed as gc_runs, and the only counter of /stats' memory
_TAIL_S = 1.0  # nothing is sent in the last second of an interval
_STATSD_PORT = 8125

Counters = dict[str, int]


def expand_prefix(prefix: str, broadcast_address: str, broadcast_http_port: int) -> str:
    """Return the prefix of all keys: ``%s`` is this host, and a dot ends it unless it is empty."""
    if not prefix:
        return ""
    host = f"{broadcast_address}:{broadcast_http_port}".replace(".", "_").replace(":", "_")
    expanded = prefix.replace("%s", host)
    return expanded if expanded.endswith(".") else expanded + "."


def statsd_lines(
    stats: NsqdStats, before: Counters, prefix: str, *, exclude_ephemeral: bool
) -> Iterator[str]:
    """Yield one line a metric; ``before`` holds the counters of the last push and is updated."""

    def line(key: str, value: int, kind: str) -> str:
        if kind == "c":
            before[key], value = value, value - before.get(key, 0)
        return f"{prefix}{key}:{value}|{kind}\n"

    for topic in stats.topics or ():
        if exclude_ephemeral and is_ephemeral(topic.topic_name):
            continue
        for name, value, kind in _topic_figures(topic):
            yield line(f"topic.{topic.topic_name}.{name}", value, kind)
        for channel in topic.channels:
            if exclude_ephemeral and is_ephemeral(channel.channel_name):
                continue
            key = f"topic.{topic.topic_name}.channel.{channel.channel_name}"
            for name, value, kind in _channel_figures(channel):
                yield line(f"{key}.{name}", value, kind)
    for name, value in (stats.memory or {}).items():
        if name == _MEMORY_COUNTER:
            yield line("mem.gc_runs", value, "c")
        else:
            yield line(f"mem.{name}", value, "g")


def _topic_figures(topic: TopicStats) -> Iterator[tuple[str, int, str]]:
    yield "message_count", topic.message_count, "c"
    yield "message_bytes", topic.message_bytes, "c"
    yield "depth", topic.depth, "g"
    yield "backend_depth", topic.backend_depth, "g"
    yield from _latency_metrics(topic.e2e_processing_latency)


def _channel_figures(channel: ChannelStats) -> Iterator[tuple[str, int, str]]:
    yield "message_count", channel.message_count, "c"
    yield "depth", channel.depth, "g"
    yield "backend_depth", channel.backend_depth, "g"
    yield "in_flight_count", channel.in_flight_count, "g"
    yield "deferred_count", channel.deferred_count, "g"
    yield "requeue_count", channel.requeue_count, "c"
    yield "timeout_count", channel.timeout_count, "c"
    yield "clients", channel.client_count, "g"
    yield from _latency_metrics(channel.e2e_processing_latency)


def _latency_metrics(latency: LatencyStats) -> Iterator[tuple[str, int, str]]:
    for quantile, value in latency.percentiles or ():
        yield f"e2e_processing_latency_{quantile * 100:.0f}", int(value), "g"


def pack_datagrams(lines: Iterable[str], size: int) -> list[bytes]:
    """Join lines to datagrams of at most ``size`` bytes."""
    datagrams: list[bytes] = []
    packed = b""
    for line in lines:
        encoded = line.encode()
        if packed and len(packed) + len(encoded) > size:
            datagrams.append(packed)
            packed = b""
        packed += encoded
    return [*datagrams, packed] if packed else datagrams


async def push_to_statsd(
    options: NsqdOptions,
    prefix: str,
    gather: Callable[[], Awaitable[NsqdStats]],
    log: DaemonLog,
) -> None:
    """Push what ``gather`` returns, until cancelled."""
    address, interval_s = options.statsd_address, options.statsd_interval
    before: Counters = {}
    loop = asyncio.get_running_loop()
    next_s = loop.time() + interval_s
    while True:
        await asyncio.sleep(max(0.0, next_s - loop.time()))
        next_s += interval_s
        log.info(f"STATSD: pushing stats to {address}")
        skips = options.statsd_exclude_ephemeral
        lines = statsd_lines(await gather(), before, prefix, exclude_ephemeral=skips)
        datagrams = pack_datagrams(lines, options.statsd_udp_packet_size)
        try:
            await _send(datagrams, address, max(0.0, interval_s - _TAIL_S))
        except OSError as exc:
            log.error(f"failed to create UDP socket to statsd({address}) - {exc}")


async def _send(datagrams: list[bytes], address: str, spread_s: float) -> None:
    host, port = parse_address(address, _STATSD_PORT)
    found = await asyncio.get_running_loop().getaddrinfo(host, port, type=socket.SOCK_DGRAM)
    family, kind, protocol, _, target = found[0]
    with socket.socket(family, kind, protocol) as udp:
        udp.connect(target)
        for datagram in datagrams:
            udp.send(datagram)
            await asyncio.sleep(spread_s / len(datagrams))
