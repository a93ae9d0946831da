"""What /metrics of the daemons shows; the names begin with ``nsqd_`` and ``nsqlookupd_``.

The samples are generators, so that a page of 10,000 channels can be made in steps.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterable, Iterator

from nsqtools.records.prometheus import Histogram, Metric
from nsqtools.server.lookup.registrations import Registrations
from nsqtools.server.lookup.steady_clock import steady_ns
from nsqtools.server.loop_meter import BOUNDS_S, LoopMeter, meter_of
from nsqtools.server.queues.channel import Channel
from nsqtools.server.queues.nsqd_queues import NsqdQueues
from nsqtools.server.queues.topic import Topic
from nsqtools.server.stats.gather import resident_bytes

Families = Iterator[Metric | Histogram]


def nsqd_metrics(nsqd: NsqdQueues, connections: int) -> Families:
    """Yield the metrics of an nsqd with so many TCP connections."""
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
    refused, dropped = nsqd.limits.refused_count, nsqd.limits.dropped_count
    yield _counter("nsqd_refused_total", "Publishes over a limit.", refused)
    yield _counter("nsqd_dropped_total", "Messages dropped to keep a limit.", dropped)
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
    yield metric("dead_letters_total", "counter", "Moved away.", lambda c: c.dead_letter_count)
    yield metric("paused", "gauge", "1 when it is paused.", lambda c: int(c.is_paused))


def _disk_metrics(nsqd: NsqdQueues) -> Families:
    try:
        found = os.statvfs(nsqd.options.data_path or ".")
        yield _gauge("nsqd_disk_free_bytes", "Of the data path.", found.f_bavail * found.f_frsize)
    except OSError:
        pass
    threads = [nsqd.disk_thread, *([nsqd.durable.thread] if nsqd.durable is not None else [])]
    yield _counter("nsqd_syncs_total", "Syncs of queues.", sum(t.sync_count for t in threads))
    yield _counter("nsqd_sync_seconds_total", "Time in them.", sum(t.sync_s for t in threads))
    longest_s = max(thread.longest_sync_s for thread in threads)
    yield _gauge("nsqd_longest_sync_seconds", "The longest.", longest_s)
    if nsqd.durable is not None and nsqd.checkpoints is not None:
        written = nsqd.durable.written_bytes
        yield _gauge("nsqd_durable_log_bytes", "Size of the durable log.", written)
        made = nsqd.checkpoints.count
        yield _counter("nsqd_durable_checkpoints_total", "Checkpoints made.", made)


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
    """Yield the metrics of an nsqlookupd with so many TCP connections."""
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
