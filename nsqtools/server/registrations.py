"""Which nsqd announces which topics and channels: what nsqlookupd knows.

A registration is a topic or a channel with its producers. Its name stays when the last producer
goes, so that consumers find a topic whose nsqd is being restarted; only UNREGISTER takes ephemeral
names away, and an administrator any. Nothing is written to disk: every nsqd registers again with a
nsqlookupd that was restarted.

A producer that has not pinged for a while is inactive: it is hidden until it pings again. A
tombstone hides a producer of one topic from lookups for some time, so that consumers leave it
before the topic is deleted there. Only UNREGISTER and REGISTER together lift it earlier.

The topic of a query may be ``*``, for all.

`steady_ns` gives a time since 1970 that never jumps, for what must last a while and is also shown
as a time: the wall clock when the program started, and the monotonic clock since; what Go compares
goes by the latter, too. With the wall clock alone, a step of NTP would hide all nsqd from lookups.
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
    last_update_ns: int = field(default_factory=steady_ns)  # of the last PING
    described: bytes = b""  # as lookups show it, once that is encoded


class Registration(NamedTuple):
    """The name of an entry as /debug shows it."""

    category: str
    key: str = ""
    subkey: str = ""


Producers = dict[RegisteredNsqd, int | None]  # with the time of the tombstone in ns, None without


class Registrations:
    """Everything that is registered. Times are nanoseconds since 1970."""

    def __init__(self, inactive_producer_timeout_ns: int, tombstone_lifetime_ns: int) -> None:
        self._inactive_producer_timeout_ns = inactive_producer_timeout_ns
        self._tombstone_lifetime_ns = tombstone_lifetime_ns
        self._clients: Producers = {}
        self._topics: dict[str, Producers] = {}
        self._channels: dict[str, dict[str, Producers]] = {}  # by topic

    # what an nsqd says

    def identify(self, peer: RegisteredNsqd) -> None:
        """Add a peer."""
        self._clients[peer] = None

    def register(self, peer: RegisteredNsqd, topic: str, channel: str) -> None:
        """A peer has a topic, and a channel of it unless that is ``""``."""
        # one that is there keeps its tombstone
        self._topics.setdefault(topic, {}).setdefault(peer, None)
        if channel:
            self._channels.setdefault(topic, {}).setdefault(channel, {}).setdefault(peer, None)

    def unregister(self, peer: RegisteredNsqd, topic: str, channel: str) -> None:
        """A peer dropped a channel, or without one the topic with all its channels."""
        channels = self._channels.get(topic, {})
        if channel:
            channels.get(channel, {}).pop(peer, None)
            _drop_if_ephemeral(channels, channel)
            return
        for producers in (self._topics.get(topic, {}), *channels.values()):
            producers.pop(peer, None)
        _drop_if_ephemeral(self._topics, topic)

    def disconnect(self, peer: RegisteredNsqd) -> None:
        """Remove a peer; all names stay."""
        for _, producers in self.entries():
            producers.pop(peer, None)

    # what consumers and administrators ask

    def topics(self) -> list[str]:
        """Return the names of all topics."""
        return list(self._topics)

    def channels(self, topic: str) -> list[str]:
        """Return the names of a topic's channels; none when it is unknown."""
        return [name for channels in _matching(self._channels, topic) for name in channels]

    def producers(self, topic: str) -> list[RegisteredNsqd]:
        """Return the active producers of a topic that are not tombstoned.

        Raises ``KeyError`` when the topic is unknown.
        """
        entries = _matching(self._topics, topic)
        if not entries:
            raise KeyError(topic)
        found: Producers = {}
        for producers in entries:
            for peer, tombstoned_ns in producers.items():
                found.setdefault(peer, tombstoned_ns)
        return [
            peer
            for peer, tombstoned_ns in found.items()
            if self._is_active(peer) and not self._is_hidden(tombstoned_ns)
        ]

    def active(self) -> list[RegisteredNsqd]:
        """Return all active peers."""
        return list(filter(self._is_active, self._clients))

    async def nodes(self) -> dict[RegisteredNsqd, dict[str, bool]]:
        """Return all active peers, with whether they are tombstoned by topic; made in steps."""
        nodes: dict[RegisteredNsqd, dict[str, bool]] = {peer: {} for peer in self.active()}
        async for topic, producers in in_steps(list(self._topics.items())):
            for peer, tombstoned_ns in producers.items():
                if peer in nodes:
                    nodes[peer][topic] = self._is_hidden(tombstoned_ns)
        return nodes

    def entries(self) -> Iterator[tuple[Registration, Producers]]:
        """Yield everything there is, inactive and tombstoned producers included."""
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

    # what administrators change

    def create_topic(self, topic: str) -> None:
        """Make a topic known, without producers."""
        self._topics.setdefault(topic, {})

    def create_channel(self, topic: str, channel: str) -> None:
        """Make a channel known, and its topic."""
        self._channels.setdefault(topic, {}).setdefault(channel, {})
        self.create_topic(topic)

    def delete_topic(self, topic: str) -> None:
        """Forget a topic and its channels."""
        for name in [*self._topics, *self._channels] if topic == ALL else [topic]:
            self._topics.pop(name, None)
            self._channels.pop(name, None)

    def delete_channel(self, topic: str, channel: str) -> None:
        """Forget a channel. Raises ``KeyError`` when it is unknown."""
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
    """Forget an ephemeral name that has no producers any more."""
    if is_ephemeral(name) and not entries.get(name):
        entries.pop(name, None)
