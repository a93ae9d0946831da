"""Move all channels of an nsqd to a temporary one, and copy no message to another channel.

A consumer of each channel receives its messages, and finishes them when the temporary nsqd has
stored them with id, timestamp and attempts. Waiting messages move immediately. Messages in flight
elsewhere move when they are requeued, and deferred messages when they are due, because nsqd
delivers neither before. After a kill between storing and finishing, nsqd delivers a message again.
`ChannelPublisher` then recognizes it by id and timestamp, as long as it is in the data path.
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

# How long no message arrives before nsqd is asked whether it has any left.
_IDLE_S = 0.5


class ChannelMove(NamedTuple):
    """The messages of a channel before they are moved."""

    topic: str
    channel: str
    waiting: int
    in_flight: int
    deferred: int

    @property
    def messages(self) -> int:
        return self.waiting + self.in_flight + self.deferred

    def line(self) -> str:
        """Describe the move."""
        text = f"move {self.topic}/{self.channel}: {self.waiting} waiting"
        if self.in_flight:
            text += f", {self.in_flight} in flight (moved if they come back)"
        if self.deferred:
            text += f", {self.deferred} deferred (moved when due)"
        return text


def plan_channel_moves(nsqd: NsqdHTTPClient, only: str) -> tuple[list[ChannelMove], list[str]]:
    """Return the moves, and a line with the reason for each queue that cannot be moved.

    ``only`` is the name of a channel, or ``""`` for all. Raises `NotFoundError` when no topic has
    that channel.
    """
    moves, obstacles = [], []
    topics = _topics(nsqd)
    names = {channel.channel_name for topic in topics for channel in topic.channels}
    if only and (only not in names or is_ephemeral(only)):
        raise NotFoundError(f"{nsqd.url} has no channel {only}")
    for topic in topics:
        name = topic.topic_name
        # Messages of any other topic are about to be copied to its channels.
        if topic.depth and (topic.paused or not topic.channels):
            state = "paused" if topic.paused else "without a channel"
            messages = counted(topic.depth, "message")
            obstacles.append(f"topic {name} is {state}, with {messages} in it")
        for channel in topic.channels:
            if is_ephemeral(channel.channel_name) or only not in ("", channel.channel_name):
                continue
            if not channel.paused:
                counts = channel.depth, channel.in_flight_count, channel.deferred_count
                moves.append(ChannelMove(name, channel.channel_name, *counts))
            elif count := messages_of(channel):
                obstacles.append(f"channel {name}/{channel.channel_name} is paused, with {count}")
    return moves, obstacles


class ChannelDrain:
    """One run of the moves; ``moved`` counts messages by (topic, channel).

    `ChannelPublisher.stop` ends it after the current batch.
    """

    def __init__(
        self, source: NsqdHTTPClient, publisher: ChannelPublisher, options: ClientOptions
    ) -> None:
        self._source = source
        self._publisher = publisher
        self._options = options
        self.moved: Counter[tuple[str, str]] = Counter()

    def run(self, moves: list[ChannelMove], show: Callable[[], None]) -> int:
        """Move all messages, including those published meanwhile; return how many remain.

        ``show`` is called after each round. Raises as `TemporaryNsqd.join`, and `OutputError`.
        A message that was not stored remains on the nsqd.
        """
        if not moves:
            return 0
        address = tcp_address(self._source)
        arrived = Event()
        consumers: dict[tuple[str, str], Consumer] = {}
        keys = [(move.topic, move.channel) for move in moves]
        # Each consumer may have this many bytes in memory, so they share the budget of one.
        share = -(-self._options.max_in_flight_bytes // len(keys))
        options = replace(self._options, max_in_flight_bytes=share)
        # Before the first delivery: a message in flight during a slow registration could time out,
        # and the delivery would count as an attempt.
        for key in keys:
            self._publisher.join(*key)
        with ExitStack() as stack:
            for key in keys:
                consumers[key] = consumer = Consumer(
                    *key,
                    nsqd_tcp_addresses=address,
                    options=options,
                    _backlog=Backlog(arrived.set),
                )
                stack.callback(consumer.abort)
                # A batch is stored in one transaction: let many messages be in flight.
                consumer._gather(self, self._options.max_in_flight)
                consumer.start(fail_fast=True)
            while not self._publisher.is_stopped:
                arrived.clear()
                has_moved = [self._move_batch(key, consumer) for key, consumer in consumers.items()]
                show()
                if any(has_moved) or arrived.wait(_IDLE_S):
                    continue
                # A paused channel delivers nothing, so waiting for its messages would never end.
                if not self._count_remaining(consumers, includes_paused=False):
                    break
        for consumer in consumers.values():
            consumer.wait_for_end()
        return self._count_remaining(consumers, includes_paused=True)

    def _move_batch(self, key: tuple[str, str], consumer: Consumer) -> bool:
        """Move the messages that have arrived, unless a stop was requested; return if any were."""
        batch = None if self._publisher.is_stopped else consumer.next_batch(0)
        if batch is None:
            return False
        try:
            self._publisher.store_received(*key, list(batch))
        except BaseException:
            batch.requeue(0, backoff=False)
            raise
        self.moved[key] += len(batch)
        batch.finish()
        return True

    def _count_remaining(self, keys: Container[tuple[str, str]], *, includes_paused: bool) -> int:
        """Count the messages of the channels and of their topics on the nsqd."""
        return sum(
            count
            for topic in _topics(self._source)
            for channel in topic.channels
            if (topic.topic_name, channel.channel_name) in keys
            for count, is_paused in (
                (topic.depth, topic.paused),
                (messages_of(channel), channel.paused),
            )
            if includes_paused or not is_paused
        )


def _topics(nsqd: NsqdHTTPClient) -> tuple[TopicStats, ...]:
    topics = nsqd.stats().topics or ()
    return tuple(topic for topic in topics if not is_ephemeral(topic.topic_name))
