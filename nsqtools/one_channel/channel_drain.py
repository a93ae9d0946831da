"""Move the channels of an nsqd to a temporary one, each exactly: nothing is copied to the others.

A consumer of each channel takes what the nsqd delivers, and finishes it when the temporary nsqd has
stored it, with its id, its time and its attempts. What waits comes at once; what is in flight
elsewhere when it comes back, and what is deferred when it is due: nsqd shows neither. A message
that is delivered again, after a kill between the two, is known by id and time while it is there.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Container
from contextlib import ExitStack
from dataclasses import replace
from threading import Event
from typing import NamedTuple

from nsqtools.client.backlog import Backlog
from nsqtools.client.consumer import Consumer
from nsqtools.client.options import ClientOptions
from nsqtools.cluster.drain import tcp_address
from nsqtools.cluster.inventory import messages_of
from nsqtools.errors import NotFoundError
from nsqtools.http.http_api import NsqdHTTPClient
from nsqtools.one_channel.channel_publisher import ChannelPublisher
from nsqtools.protocol.names import is_ephemeral
from nsqtools.protocol.stats import TopicStats
from nsqtools.protocol.text import counted

_IDLE_S = 0.5


Queue = tuple[str, str]
"""Topic and channel."""


class ChannelMove(NamedTuple):
    """What a channel has, before it is moved."""

    topic: str
    channel: str
    waiting: int
    in_flight: int
    deferred: int

    @property
    def messages(self) -> int:
        return self.waiting + self.in_flight + self.deferred

    def line(self) -> str:
        """Describe it."""
        text = f"move {self.topic}/{self.channel}: {self.waiting} waiting"
        if self.in_flight:
            text += f", {self.in_flight} in flight (moved if they come back)"
        if self.deferred:
            text += f", {self.deferred} deferred (moved when due)"
        return text


def plan_channel_moves(nsqd: NsqdHTTPClient, only: str) -> tuple[list[ChannelMove], list[str]]:
    """Return what is moved, and a line for each queue that stays, with the reason."""
    moves, stays = [], []
    topics = _topics(nsqd)
    names = {channel.channel_name for topic in topics for channel in topic.channels}
    if only and (only not in names or is_ephemeral(only)):
        raise NotFoundError(f"{nsqd.url} has no channel {only}")
    for topic in topics:
        name = topic.topic_name
        if topic.depth and (topic.paused or not topic.channels):  # else they are on their way
            why = "paused" if topic.paused else "without a channel"
            stays.append(f"topic {name} is {why}, with {counted(topic.depth, 'message')} in it")
        for channel in topic.channels:
            if is_ephemeral(channel.channel_name) or only not in ("", channel.channel_name):
                continue
            if not channel.paused:
                counts = channel.depth, channel.in_flight_count, channel.deferred_count
                moves.append(ChannelMove(name, channel.channel_name, *counts))
            elif messages := messages_of(channel):
                stays.append(f"channel {name}/{channel.channel_name} is paused, with {messages}")
    return moves, stays


class ChannelDrain:
    """One move. The publisher's `stop` ends it, after the present batch. ``moved`` counts by topic
    and channel."""

    def __init__(
        self, source: NsqdHTTPClient, publisher: ChannelPublisher, options: ClientOptions
    ) -> None:
        self._source = source
        self._publisher = publisher
        self._options = options
        self.moved: Counter[Queue] = Counter()

    def run(self, moves: list[ChannelMove], show: Callable[[], None] = lambda: None) -> int:
        """Move everything, also what arrives meanwhile; return how many messages are left there.

        Raises as `TemporaryNsqd.join`, and `OutputError`; what was not stored is on the nsqd still.
        """
        if not moves:
            return 0
        address = tcp_address(self._source)
        arrived = Event()
        consumers: dict[Queue, Consumer] = {}
        keys = [(move.topic, move.channel) for move in moves]
        share = -(-self._options.max_in_flight_bytes // len(keys))  # each would hold that much
        options = replace(self._options, max_in_flight_bytes=share)
        for key in keys:  # before any message waits here, as its attempts would count
            self._publisher.join(*key)
        with ExitStack() as stack:
            for key in keys:
                consumers[key] = Consumer(
                    *key,
                    nsqd_tcp_addresses=address,
                    options=options,
                    _backlog=Backlog(arrived.set),
                )
                stack.callback(consumers[key].abort)
                consumers[key].gather(self, self._options.max_in_flight)  # they are stored together
                consumers[key].start(fail_fast=True)
            while not self._publisher.is_stopped:
                arrived.clear()
                took = [self._take(key, consumer) for key, consumer in consumers.items()]
                show()
                if any(took) or arrived.wait(_IDLE_S):
                    continue
                if not self._left(consumers, paused=False):
                    break
        for consumer in consumers.values():
            consumer.wait_for_end()
        return self._left(consumers)

    def _take(self, key: Queue, consumer: Consumer) -> bool:
        """Move a batch, if one is there and no stop was asked for: then it is another's turn."""
        batch = None if self._publisher.is_stopped else consumer.next_batch(0)
        if batch is None:
            return False
        try:
            self._publisher.take_over(*key, list(batch))
        except BaseException:
            batch.requeue(0, backoff=False)
            raise
        self.moved[key] += len(batch)
        batch.finish()
        return True

    def _left(self, keys: Container[Queue], *, paused: bool = True) -> int:
        """Count what is there; without ``paused``, what comes: none does where that is set."""
        return sum(
            count
            for topic in _topics(self._source)
            for channel in topic.channels
            if (topic.topic_name, channel.channel_name) in keys
            for count, waits in (
                (topic.depth, topic.paused),
                (messages_of(channel), channel.paused),
            )
            if paused or not waits
        )


def _topics(nsqd: NsqdHTTPClient) -> tuple[TopicStats, ...]:
    return tuple(each for each in nsqd.stats().topics or () if not is_ephemeral(each.topic_name))
