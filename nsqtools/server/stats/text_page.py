"""/stats as text, column for column what nsqd prints. Pure."""

from __future__ import annotations

from collections.abc import Iterator
from datetime import datetime

from nsqtools.protocol.durations import go_duration
from nsqtools.protocol.stats import ChannelStats, ClientStats, LatencyStats, NsqdStats, TopicStats


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
