"""A publisher that delivers messages to one channel, through a temporary nsqd.

A message is confirmed when the temporary nsqd has stored it. `wait_until_consumed` waits until
consumers have finished all of them. Messages keep their ids and timestamps. Ids repeat between
nsqd, and no nsqd distinguishes two messages with the same id in flight. So a message gets a new id
when the channel already has that id, and when nsqd could not have generated it.

Each batch is stored together with the progress of the job: for each topic the number of messages
stored so far and a digest of them. The next run on the same data path offers the same messages from
the beginning. It skips that many of them, and fails when the digest shows other messages. So a kill
at any moment stores no message twice.
"""

from __future__ import annotations

import json
import re
import time
from collections import Counter
from collections.abc import Callable, Container, Iterable, Iterator, Sequence
from contextlib import ExitStack
from dataclasses import replace
from hashlib import blake2b
from threading import Event
from typing import NamedTuple

from nsqtools.client.backlog import Backlog
from nsqtools.client.consumer import Consumer
from nsqtools.client.message import Message
from nsqtools.client.options import ClientOptions
from nsqtools.cluster.drain import tcp_address
from nsqtools.cluster.inventory import messages_of
from nsqtools.errors import (
    ConfigurationError,
    NotFoundError,
    NsqError,
    OutputError,
    PublishError,
    PublishNotSent,
)
from nsqtools.http.http_api import NsqdHTTPClient
from nsqtools.one_channel.temporary_nsqd import TemporaryNsqd
from nsqtools.protocol.frames import WireMessage
from nsqtools.protocol.names import is_ephemeral
from nsqtools.protocol.stats import TopicStats
from nsqtools.protocol.text import counted
from nsqtools.publish.publisher import POLL_S, PublishBatch, Publisher, PublishOptions
from nsqtools.records.envelope import MessageLike
from nsqtools.server.job_nsqd import JobChannel

# nsqd writes 16 hexadecimal digits. The first is below 4 here: the database keeps an id as an
# integer of 63 bits, next to row numbers that grow beyond the largest id.
_NSQD_ID = re.compile(rb"[0-3][0-9a-f]{15}")
REPORTED_AFTER_S = 5.0  # without a consumer; users who see nothing for a minute suspect a fault
_REPORTED_NEW_IDS = 10  # lines of output; a replay of another cluster may change every id


class _TopicProgress:
    """The messages of a topic that all runs stored together: ``count``, and ``digest`` of them.

    ``to_skip`` of them have not been offered again in this run. When all have been, ``digest`` must
    be ``stored_digest``, the one in the note of the run before.
    """

    def __init__(self, topic: str, count: int = 0, stored_digest: str = "") -> None:
        self.topic = topic
        self.count = self.to_skip = count
        self.stored_digest = stored_digest
        self.digest = blake2b(digest_size=16)

    def as_json(self) -> tuple[int, str]:
        return self.count, self.stored_digest if self.to_skip else self.digest.hexdigest()

    def add(self, bodies: Sequence[bytes], origins: Sequence[MessageLike]) -> None:
        for body, origin in zip(bodies, origins, strict=True):
            head = f"{len(body)} {origin.timestamp_ns} ".encode()
            self.digest.update(b"%b%b %b" % (head, origin.id, body))


class ChannelPublisher(Publisher):
    """Fills ``channel`` of each topic that is published to.

    Args:
        max_depth: How many messages of the channel may be in the temporary nsqd.
        wait_s: How long messages may wait while no consumer of their channel is connected.
            `wait_until_consumed` then ends, and ``abandoned`` is the channel.
        resumes: Whether the next run would offer the same messages again.
        report: Called with each notice to the user.
    """

    def __init__(
        self,
        temporary: TemporaryNsqd,
        channel: str,
        options: ClientOptions,
        rate: float = 0.0,
        *,
        max_depth: int,
        wait_s: float,
        resumes: bool,
        defer_s: float | None = None,
        report: Callable[[str], None],
    ) -> None:
        super().__init__([], options, PublishOptions(defer_s=defer_s), rate)
        self.new_id_count = 0
        self.delivered_count = 0
        self.abandoned: JobChannel | None = None
        self._temporary = temporary
        self._nsqd = temporary.nsqd
        self._channel = channel
        self._max_depth = max_depth
        self._wait_s = wait_s
        self._report = report
        self._joined: set[tuple[str, str]] = set()
        self._consumers_seen_s: dict[tuple[str, str], float] = {}
        self._reported: set[tuple[str, str]] = set()  # channels without consumers
        self._resumes = resumes
        self._note_number, note = self._nsqd.read_note()
        stored = json.loads(note) if note and resumes else {}
        self._progress = {topic: _TopicProgress(topic, *values) for topic, values in stored.items()}
        self._has_input = False
        self._failure: NsqError | None = None
        channels = self._nsqd.unfinished_channels()
        self._stored_count = sum(counts.unfinished for counts in channels)

    def publish(
        self,
        topic: str,
        bodies: Sequence[bytes],
        on_ended: Callable[[PublishBatch], None] = lambda batch: None,
        *,
        defer_s: float | None = None,
        origins: Sequence[MessageLike] = (),
    ) -> None:
        """Store a batch; block while the channel is full.

        Messages that are not stored count as unsent. `wait_until_consumed` raises the reason,
        unless it is a `stop`.
        """
        defer_s = defer_s or self._options.defer_s or 0.0
        self.spend(len(bodies))
        batch = PublishBatch(topic, bodies, 0, on_ended)
        start = 0
        try:
            self.join(topic, self._channel)
            while start < len(bodies):
                progress = self._progress.setdefault(topic, _TopicProgress(topic))
                room = progress.to_skip or self._wait_for_room(topic)
                if not room:
                    self.has_given_up = True
                    break
                end = min(len(bodies), start + room)
                self._store(progress, bodies[start:end], origins[start:end], defer_s)
                start = end
        except OutputError as exc:
            # No stop: the caller reads its input to the end and keeps the rest in --unsent-file.
            self._failure, self.has_given_up = exc, True
            self._report(str(exc))
        except NsqError as exc:
            self._failure = exc
            self.stop()
        error: PublishError = PublishNotSent(f"{topic}/{self._channel} took no more")
        batch.errors = {position: {"": error} for position in range(start, len(bodies))}
        self._count_batch(batch)

    def store_received(self, topic: str, channel: str, messages: Sequence[Message]) -> None:
        """Store messages that another nsqd delivered, with their attempts, in a channel.

        A message that is stored already was delivered again, and is skipped. Raises `OutputError`.
        """
        timestamps = self._nsqd.stored_timestamps(
            topic, channel, {message.id for message in messages}
        )
        new = [
            message for message in messages if timestamps.get(message.id) != message.timestamp_ns
        ]
        if not new:
            return
        unique = self._with_unique_ids(
            f"{topic}/{channel}", [message.body for message in new], new, timestamps
        )
        # The delivery to this program does not count as one to the consumer that gets the message.
        stored = [
            message._replace(attempts=received.attempts - 1)
            for message, received in zip(unique, new, strict=True)
        ]
        self._nsqd.put(topic, channel, stored)
        self._stored_count += len(new)

    def join(self, topic: str, channel: str) -> None:
        """Register a topic with all its channels, once. Raises as `TemporaryNsqd.join`."""
        if (topic, channel) not in self._joined:
            self._temporary.join(topic, channel)
            self._joined.add((topic, channel))

    def _wait_for_room(self, topic: str) -> int:
        """Return how many messages the channel has room for, 0 after a stop or without consumer."""
        while not self.is_stopped and self.abandoned is None:
            channels = self._nsqd.unfinished_channels()
            depths = {counts[:2]: counts.unfinished for counts in channels}
            room = self._max_depth - depths.get((topic, self._channel), 0)
            if room > 0:
                return room
            self._check_consumers(channels)
            self.stopped.wait(POLL_S)
        return 0

    def _store(
        self,
        progress: _TopicProgress,
        bodies: Sequence[bytes],
        origins: Sequence[MessageLike],
        defer_s: float,
    ) -> None:
        self._has_input = True
        note = None
        if self._resumes:
            progress.add(bodies, origins)
        if progress.to_skip:
            progress.to_skip -= len(bodies)
            if not progress.to_skip and progress.digest.hexdigest() != progress.stored_digest:
                raise self._different_input()
            return
        topic, channel = progress.topic, self._channel
        ids = self._nsqd.stored_timestamps(topic, channel, {origin.id for origin in origins})
        messages = list(self._with_unique_ids(f"{topic}/{channel}", bodies, origins, ids))
        progress.count += len(bodies)
        if self._resumes:
            content = {name: progress.as_json() for name, progress in self._progress.items()}
            old_number, self._note_number = self._note_number, self._note_number + len(bodies)
            note = old_number, self._note_number, json.dumps(content).encode()
        self._nsqd.put(topic, channel, messages, delay_s=defer_s, note=note)
        self._stored_count += len(bodies)

    def _with_unique_ids(
        self,
        queue: str,
        bodies: Sequence[bytes],
        origins: Sequence[MessageLike],
        stored_ids: Iterable[bytes],
    ) -> Iterator[WireMessage]:
        if not origins:
            now_ns = time.time_ns()
            for message_id, body in zip(self._nsqd.new_ids(len(bodies)), bodies, strict=True):
                yield WireMessage(now_ns, 0, message_id, body)
            return
        used_ids = set(stored_ids)
        for body, origin in zip(bodies, origins, strict=True):
            message_id = origin.id
            if message_id in used_ids or not _NSQD_ID.fullmatch(message_id):
                [message_id] = self._nsqd.new_ids(1)
                self.new_id_count += 1
                if self.new_id_count <= _REPORTED_NEW_IDS:
                    old_id = origin.id.decode("latin-1")
                    self._report(f"{queue}: message {old_id} is {message_id.decode()} here")
            used_ids.add(message_id)
            yield WireMessage(origin.timestamp_ns, 0, message_id, body)

    def _different_input(self) -> ConfigurationError:
        return ConfigurationError(
            f"{self._nsqd.data_path} has the rest of a run with other messages",
            hint="Run it with the same files and options, or give another --data-path.",
        )

    # -- delivery --------------------------------------------------------------------------------

    def wait_until_consumed(self, show: Callable[[int], None]) -> None:
        """Wait until all messages are consumed, then leave the cluster.

        ``show`` is called with the number of consumed messages. Some messages remain after `stop`,
        or when `abandoned` is set.

        Raises as `TemporaryNsqd.join`, `OutputError` when a message could not be stored, and
        `ConfigurationError` when an earlier run on this data path had other messages.
        """
        if self._failure is not None:
            raise self._failure
        is_complete = not (self.is_stopped or self.has_given_up)
        has_skipped_all = not any(progress.to_skip for progress in self._progress.values())
        # A run without any input only delivers the rest of an earlier run.
        if is_complete and self._has_input and not has_skipped_all:
            raise self._different_input()
        while (channels := self._nsqd.unfinished_channels()) and not self.is_stopped:
            for counts in channels:  # an earlier run may have left messages of other topics
                self.join(counts.topic, counts.channel)
            unfinished = sum(counts.unfinished for counts in channels)
            self.delivered_count = self._stored_count - unfinished
            self._check_consumers(channels)
            if self.abandoned is not None:
                break
            show(self.delivered_count)
            self.stopped.wait(POLL_S)
        # Only a run that has skipped the messages of an earlier run may remove the note of that.
        can_drop_note = self._resumes or not self._note_number
        self._temporary.leave(is_complete=is_complete and can_drop_note)
        self.delivered_count = self._stored_count - self._temporary.unfinished

    def leftovers_text(self) -> str:
        """Describe the data path after the delivery, and how to continue.

        Return ``""`` when the data path has been removed.
        """
        if not self._temporary.has_data_path:
            return ""
        advice = "which the next run delivers; its input may be empty"
        if self._resumes:
            advice = "and how far this came: run it again"
        elif self._note_number:
            advice = "and how far an earlier run came: run that again"
        messages = counted(self._temporary.unfinished, "message")
        return f"{self._nsqd.data_path} has {messages}, {advice}"

    def _check_consumers(self, channels: Sequence[JobChannel]) -> None:
        now_s = time.monotonic()
        for counts in channels:
            key = counts.topic, counts.channel
            if counts.consumers:
                self._consumers_seen_s[key] = now_s
                continue
            alone_s = now_s - self._consumers_seen_s.setdefault(key, now_s)
            if alone_s >= self._wait_s:
                self.abandoned = counts
            elif alone_s >= REPORTED_AFTER_S and key not in self._reported:
                self._reported.add(key)
                self._report(
                    f"waiting for consumers of {'/'.join(key)}: most ask nsqlookupd every minute"
                )


# -- drain ----------------------------------------------------------------------------------------

# A consumer of each channel receives its messages, and finishes them when the temporary nsqd has
# stored them with id, timestamp and attempts. Waiting messages move immediately. Messages in
# flight elsewhere move when they are requeued, and deferred messages when they are due, because
# nsqd delivers neither before. After a kill between storing and finishing, nsqd delivers a message
# again. `ChannelPublisher` then recognizes it by id and timestamp, as long as it is in the data
# path.

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
