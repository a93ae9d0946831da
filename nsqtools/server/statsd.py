"""Pushing stats to statsd over UDP, every so often, spread over the interval.

Counters are differences to the push before. Datagrams carry whole lines up to a size; a longer line
goes alone.
"""

from __future__ import annotations

import asyncio
import socket
from collections.abc import Awaitable, Callable, Iterable, Iterator

from nsqtools.protocol.names import is_ephemeral, parse_address
from nsqtools.protocol.stats import ChannelStats, LatencyStats, NsqdStats, TopicStats
from nsqtools.server.daemon_log import DaemonLog
from nsqtools.server.settings.nsqd_options import NsqdOptions

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
        for name, value, kind in _topic_metrics(topic):
            yield line(f"topic.{topic.topic_name}.{name}", value, kind)
        for channel in topic.channels:
            if exclude_ephemeral and is_ephemeral(channel.channel_name):
                continue
            key = f"topic.{topic.topic_name}.channel.{channel.channel_name}"
            for name, value, kind in _channel_metrics(channel):
                yield line(f"{key}.{name}", value, kind)
    for name, value in (stats.memory or {}).items():
        if name == _MEMORY_COUNTER:
            yield line("mem.gc_runs", value, "c")
        else:
            yield line(f"mem.{name}", value, "g")


def _topic_metrics(topic: TopicStats) -> Iterator[tuple[str, int, str]]:
    yield "message_count", topic.message_count, "c"
    yield "message_bytes", topic.message_bytes, "c"
    yield "depth", topic.depth, "g"
    yield "backend_depth", topic.backend_depth, "g"
    yield from _latency_metrics(topic.e2e_processing_latency)


def _channel_metrics(channel: ChannelStats) -> Iterator[tuple[str, int, str]]:
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


class StatsdPusher:
    """Pushes what ``gather`` returns for as long as `run` runs."""

    def __init__(
        self,
        options: NsqdOptions,
        prefix: str,
        gather: Callable[[], Awaitable[NsqdStats]],
        log: DaemonLog,
    ) -> None:
        self._options = options
        self._prefix = prefix
        self._gather = gather
        self._log = log
        self._before: Counters = {}

    async def run(self) -> None:
        """Push until cancelled."""
        interval_s = self._options.statsd_interval
        loop = asyncio.get_running_loop()
        next_s = loop.time() + interval_s
        while True:
            await asyncio.sleep(max(0.0, next_s - loop.time()))
            next_s += interval_s
            try:
                await self._push(max(0.0, interval_s - _TAIL_S))
            except OSError as exc:
                address = self._options.statsd_address
                self._log.error(f"failed to create UDP socket to statsd({address}) - {exc}")

    async def _push(self, spread_s: float) -> None:
        address = self._options.statsd_address
        self._log.info(f"STATSD: pushing stats to {address}")
        lines = statsd_lines(
            await self._gather(),
            self._before,
            self._prefix,
            exclude_ephemeral=self._options.statsd_exclude_ephemeral,
        )
        datagrams = pack_datagrams(lines, self._options.statsd_udp_packet_size)
        loop = asyncio.get_running_loop()
        host, port = parse_address(address, _STATSD_PORT)
        found = await loop.getaddrinfo(host, port, type=socket.SOCK_DGRAM)
        family, kind, protocol, _, target = found[0]
        with socket.socket(family, kind, protocol) as udp:
            udp.connect(target)
            for datagram in datagrams:
                udp.send(datagram)
                await asyncio.sleep(spread_s / len(datagrams))
