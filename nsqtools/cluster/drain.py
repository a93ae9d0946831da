"""Move the remaining messages of an nsqd to another one before the first is retired.

Each message is published to its topic on the other nsqd, and finished here only after that is
confirmed. So none is lost, but if the connection breaks in between, a message may be published
twice. The copy has a new id and timestamp, and no attempts.

Trap: NSQ publishes to topics and not to channels. On the other nsqd every channel of the topic gets
the message, even if it had finished it here. So a topic with several channels is left alone;
`one_channel` moves the messages of each channel to its consumers.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Iterable
from typing import NamedTuple

from nsqtools.client.consumer import Consumer
from nsqtools.client.options import ClientOptions
from nsqtools.client.producer import Producer
from nsqtools.cluster.admin import require_well
from nsqtools.cluster.inventory import messages_of
from nsqtools.errors import ConfigurationError, HTTPError, NsqError
from nsqtools.http.http_api import NsqdHTTPClient
from nsqtools.protocol.names import is_ephemeral
from nsqtools.protocol.stats import TopicStats
from nsqtools.protocol.text import counted

log = logging.getLogger("nsqtools")

DRAIN_CHANNEL = "nsq-drain"
"""Gets the messages that wait in a topic without channels; deleted when it is empty."""

# nsqd delivers a waiting message within milliseconds, so a second without one means that none
# waits. Then the statistics decide.
IDLE_S = 1.0


class Move(NamedTuple):
    """The messages of one topic. ``channel`` holds them, or "" if the topic itself does.

    ``receiver`` is the channel that gets them on the other nsqd, with a note if it is paused.
    """

    topic: str
    channel: str
    messages: int
    receiver: str = ""

    def line(self) -> str:
        """Return the move in words."""
        channel = f" from {self.channel}" if self.channel else ""
        receiver = f"; they go to {self.receiver}" if self.receiver else ""
        messages = counted(self.messages, "message")
        return f"move about {messages} of topic {self.topic}{channel}{receiver}"


class DrainPlan(NamedTuple):
    """The possible moves, and a line for each queue that cannot be moved, with the reason."""

    moves: tuple[Move, ...]
    unmovable: tuple[str, ...]


def plan_moves(source: Iterable[TopicStats], target: Iterable[TopicStats]) -> DrainPlan:
    """Plan the moves from the statistics of both nsqd. Pure."""
    target_channels = {
        topic.topic_name: {channel.channel_name: channel.paused for channel in topic.channels}
        for topic in target
    }
    moves, unmovable = [], []
    for topic in source:
        name = topic.topic_name
        # An earlier drain may have left `DRAIN_CHANNEL`: its messages are the topic's own.
        is_bare = all(channel.channel_name == DRAIN_CHANNEL for channel in topic.channels)
        waiting = topic.depth + (sum(map(messages_of, topic.channels)) if is_bare else 0)
        if topic.paused and (waiting or is_bare):
            cause = f" by a drain that was killed, or by you (nsq topic unpause {name})"
            cause = cause if is_bare else ""
            unmovable.append(
                f"topic {name} is paused{cause}, with {counted(waiting, 'message')} in it"
            )
        channels = () if is_bare else topic.channels
        holding = []
        for channel in channels:
            if not messages_of(channel) or is_ephemeral(channel.channel_name):
                continue
            if channel.paused:
                count = messages_of(channel)
                unmovable.append(
                    f"channel {name}/{channel.channel_name} is paused, with {count} in it"
                )
            else:
                holding.append(channel)
        if topic.paused or not is_bare:
            waiting = 0
        if not holding and not waiting:
            continue
        paused = target_channels.get(name, {})
        receivers = sorted({*paused, *(channel.channel_name for channel in channels)})
        messages = waiting + sum(map(messages_of, holding))
        if len(receivers) > 1:
            unmovable.append(
                f"topic {name} has {len(receivers)} channels, with {counted(messages, 'message')}"
            )
            continue
        receiver = "".join(f"{name}/{c}{' (paused)' if paused.get(c) else ''}" for c in receivers)
        holder = holding[0].channel_name if holding else ""
        moves.append(Move(name, holder, messages, receiver))
    return DrainPlan(tuple(moves), tuple(unmovable))


class Drain:
    """Moves messages from one nsqd to another. `run` it on one thread; `stop` it from any."""

    def __init__(
        self, source: NsqdHTTPClient, target: NsqdHTTPClient, options: ClientOptions
    ) -> None:
        self._source = source
        self._target = target
        self._options = options
        self._stopped = threading.Event()
        self.moved = 0
        self.bare: list[str] = []  # topics that had `DRAIN_CHANNEL`

    def stop(self) -> None:
        """Make `run` end after the present batch."""
        self._stopped.set()

    def plan(self) -> DrainPlan:
        """Plan the moves.

        Raises `ConfigurationError` if both nsqd are the same one, and `NsqError` for a target with
        a full disk.
        """
        # One nsqd may have several addresses.
        if self._source.info() == self._target.info():
            raise ConfigurationError("an nsqd cannot be drained into itself")
        source, target = self._source.stats(), self._target.stats()
        require_well(self._target)
        plan = plan_moves(source.topics or (), target.topics or ())
        if source.is_well:
            return plan
        # The messages of a topic without channels have to move to a channel, and would be dropped.
        bare = [
            f"topic {move.topic} has no channel, and its nsqd is not well ({source.health})"
            for move in plan.moves
            if not move.channel
        ]
        moves = tuple(move for move in plan.moves if move.channel)
        return DrainPlan(moves, (*plan.unmovable, *bare))

    def run(self, plan: DrainPlan) -> int:
        """Carry out the plan; return the number of messages left on the source.

        Messages that arrive meanwhile are moved too; messages in flight or deferred stay. Raises
        the errors of publishing; every message that was not published is still on the source.
        """
        with Producer(tcp_address(self._target), self._options) as producer:
            for move in plan.moves:
                self._move(move, producer)
        stats = self._source.stats()
        return sum(
            topic.depth + sum(map(messages_of, topic.channels)) for topic in stats.topics or ()
        )

    def _move(self, move: Move, producer: Producer) -> None:
        self._target.administer("create", move.topic)
        if move.channel:  # before the messages, or it would miss them
            self._target.administer("create", move.topic, move.channel)
            self._empty(move, move.channel, producer)
            return
        self._source.administer("create", move.topic, DRAIN_CHANNEL)
        self._empty(move, DRAIN_CHANNEL, producer)
        if not self._stopped.is_set():
            self._remove_channel(move.topic)

    def _remove_channel(self, topic: str) -> None:
        """Delete `DRAIN_CHANNEL`, unless it has messages: deferred ones, or new ones."""
        try:
            # Messages published from here on stay in the paused topic. Even if this fails, the
            # topic may be paused.
            self._source.administer("pause", topic)
            topics = self._source.stats(topic).topics or ()
            if not any(messages_of(channel) for stats in topics for channel in stats.channels):
                self._source.administer("delete", topic, DRAIN_CHANNEL)
                self.bare.append(topic)
        finally:
            try:
                self._source.administer("unpause", topic)
            except NsqError as exc:
                # An ephemeral topic is deleted with its last channel.
                if not (isinstance(exc, HTTPError) and exc.status == 404):
                    log.warning("topic %s may still be paused: nsq topic unpause %s", topic, topic)
                    raise

    def _empty(self, move: Move, channel: str, producer: Producer) -> None:
        address, planned = tcp_address(self._source), self.moved + move.messages
        consumer = Consumer(move.topic, channel, nsqd_tcp_addresses=address, options=self._options)
        consumer.start(fail_fast=True)
        with consumer:
            while not self._stopped.is_set():
                batch = consumer.next_batch(IDLE_S if self.moved < planned else IDLE_S / 10)
                if batch is None:
                    if not (consumer.connections and self._waits(move.topic, channel)):
                        return
                    continue
                try:
                    producer.publish_many(move.topic, [message.body for message in batch])
                except BaseException:
                    batch.requeue(0, backoff=False)
                    raise
                self.moved += len(batch)
                batch.finish()

    def _waits(self, topic: str, channel: str) -> bool:
        """Return whether a message waits for delivery: a busy nsqd is silent, too."""
        topics = self._source.stats(topic, channel).topics or ()
        return any(
            not stats.paused
            and (stats.depth or any(c.depth and not c.paused for c in stats.channels))
            for stats in topics
        )


def tcp_address(nsqd: NsqdHTTPClient) -> str:
    """Return the TCP address of an nsqd, at the host of its HTTP address."""
    return str(nsqd.tcp_beside(nsqd.info()))
