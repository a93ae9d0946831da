"""The registrations of an nsqlookupd: topics and channels, and the nsqd that have them.

A registration is a topic or a channel with its producers. It stays when the last producer
disconnects, so that consumers find a topic whose nsqd restarts. UNREGISTER removes ephemeral names,
and an administrator can remove any. Nothing is written to disk, because every nsqd registers again
when nsqlookupd was restarted.

A producer that has not pinged for some time is inactive, and hidden until its next ping. A
tombstone hides a producer of one topic from lookups for some time, so that consumers disconnect
before the topic is deleted there. Only UNREGISTER followed by REGISTER removes it earlier.

The topic of a query may be ``*`` for all topics.

`steady_ns` returns a time since 1970 that never jumps, for periods whose start is also shown as a
time. It is the wall clock at the start of the program plus the monotonic clock, which Go compares
as well. With the wall clock alone, a step of NTP would hide all nsqd from lookups.
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import NamedTuple, TypeVar

from nsqtools.http.loop_meter import in_steps
from nsqtools.protocol.names import is_ephemeral
from nsqtools.protocol.requests import PeerInfo

_AHEAD_NS = time.time_ns() - time.monotonic_ns()


def steady_ns() -> int:
    """Return nanoseconds since 1970."""
    return time.monotonic_ns() + _AHEAD_NS


ALL = "*"

T = TypeVar("T")


@dataclass(eq=False, slots=True)
class RegisteredNsqd:
    """An nsqd that has identified itself, from the address of its connection."""

    remote_address: str
    info: PeerInfo
    last_update_ns: int = field(default_factory=steady_ns)  # the time of the last PING
    encoded: bytes = b""  # the JSON object in answers, cached


class Registration(NamedTuple):
    """The name of an entry, as /debug prints it."""

    category: str
    key: str = ""
    subkey: str = ""


Producers = dict[RegisteredNsqd, int | None]
"""The producers of an entry, with the time of a tombstone in ns or None."""


class Registrations:
    """All registrations. Times are in nanoseconds since 1970."""

    def __init__(self, inactive_producer_timeout_ns: int, tombstone_lifetime_ns: int) -> None:
        self._inactive_producer_timeout_ns = inactive_producer_timeout_ns
        self._tombstone_lifetime_ns = tombstone_lifetime_ns
        self._clients: Producers = {}
        self._topics: dict[str, Producers] = {}
        self._channels: dict[str, dict[str, Producers]] = {}  # by topic

    # commands of nsqd

    def identify(self, peer: RegisteredNsqd) -> None:
        """Add a peer."""
        self._clients[peer] = None

    def register(self, peer: RegisteredNsqd, topic: str, channel: str) -> None:
        """Add a topic of a peer, and a channel unless that is ``""``."""
        # `setdefault` keeps the tombstone of an existing entry.
        self._topics.setdefault(topic, {}).setdefault(peer, None)
        if channel:
            self._channels.setdefault(topic, {}).setdefault(channel, {}).setdefault(peer, None)

    def unregister(self, peer: RegisteredNsqd, topic: str, channel: str) -> None:
        """Remove a channel of a peer, or if that is ``""`` the topic with all its channels."""
        channels = self._channels.get(topic, {})
        if channel:
            channels.get(channel, {}).pop(peer, None)
            _drop_if_ephemeral(channels, channel)
            return
        for producers in (self._topics.get(topic, {}), *channels.values()):
            producers.pop(peer, None)
        _drop_if_ephemeral(self._topics, topic)

    def disconnect(self, peer: RegisteredNsqd) -> None:
        """Remove a peer, and keep all names."""
        for _, producers in self.entries():
            producers.pop(peer, None)

    # queries

    def topics(self) -> list[str]:
        """Return the names of all topics."""
        return list(self._topics)

    def channels(self, topic: str) -> list[str]:
        """Return the names of a topic's channels, none for an unknown topic."""
        return [name for channels in _matching(self._channels, topic) for name in channels]

    def producers(self, topic: str) -> list[RegisteredNsqd]:
        """Return the active producers of a topic without a tombstone.

        Raises ``KeyError`` for an unknown topic.
        """
        entries = _matching(self._topics, topic)
        if not entries:
            raise KeyError(topic)
        merged: Producers = {}
        for producers in entries:
            for peer, tombstoned_ns in producers.items():
                merged.setdefault(peer, tombstoned_ns)
        return [
            peer
            for peer, tombstoned_ns in merged.items()
            if self._is_active(peer) and not self._is_hidden(tombstoned_ns)
        ]

    def active(self) -> list[RegisteredNsqd]:
        """Return all active peers."""
        return list(filter(self._is_active, self._clients))

    async def nodes(self) -> dict[RegisteredNsqd, dict[str, bool]]:
        """Return all active peers, each with its topics and whether these have a tombstone.

        Other work of the loop runs in between.
        """
        nodes: dict[RegisteredNsqd, dict[str, bool]] = {peer: {} for peer in self.active()}
        async for topic, producers in in_steps(list(self._topics.items())):
            for peer, tombstoned_ns in producers.items():
                if peer in nodes:
                    nodes[peer][topic] = self._is_hidden(tombstoned_ns)
        return nodes

    def entries(self) -> Iterator[tuple[Registration, Producers]]:
        """Yield all entries, including inactive producers and those with tombstones."""
        yield Registration("client"), self._clients
        for topic, producers in self._topics.items():
            yield Registration("topic", topic), producers
        for topic, channels in self._channels.items():
            for channel, producers in channels.items():
                yield Registration("channel", topic, channel), producers

    def _is_active(self, peer: RegisteredNsqd) -> bool:
        return steady_ns() - peer.last_update_ns <= self._inactive_producer_timeout_ns

    def _is_hidden(self, tombstoned_ns: int | None) -> bool:
        hidden_ns = self._tombstone_lifetime_ns
        return tombstoned_ns is not None and steady_ns() - tombstoned_ns < hidden_ns

    # administration

    def create_topic(self, topic: str) -> None:
        """Add a topic without producers."""
        self._topics.setdefault(topic, {})

    def create_channel(self, topic: str, channel: str) -> None:
        """Add a channel and its topic, without producers."""
        self._channels.setdefault(topic, {}).setdefault(channel, {})
        self.create_topic(topic)

    def delete_topic(self, topic: str) -> None:
        """Remove a topic and its channels."""
        for name in [*self._topics, *self._channels] if topic == ALL else [topic]:
            self._topics.pop(name, None)
            self._channels.pop(name, None)

    def delete_channel(self, topic: str, channel: str) -> None:
        """Remove a channel. Raises ``KeyError`` for an unknown one."""
        del self._channels[topic][channel]

    def tombstone(self, topic: str, node: str) -> None:
        """Hide the producers at ``broadcast_address:http_port`` from lookups of a topic."""
        for producers in _matching(self._topics, topic):
            for peer in producers:
                if f"{peer.info.broadcast_address}:{peer.info.http_port}" == node:
                    producers[peer] = steady_ns()


def _matching(entries: Mapping[str, T], topic: str) -> list[T]:
    if topic == ALL:
        return list(entries.values())
    return [entries[topic]] if topic in entries else []


def _drop_if_ephemeral(entries: dict[str, Producers], name: str) -> None:
    """Remove an ephemeral name without producers."""
    if is_ephemeral(name) and not entries.get(name):
        entries.pop(name, None)
