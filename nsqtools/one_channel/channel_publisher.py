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
from collections.abc import Callable, Iterable, Iterator, Sequence
from hashlib import blake2b

from nsqtools.client.message import Message
from nsqtools.client.options import ClientOptions
from nsqtools.errors import (
    ConfigurationError,
    NsqError,
    OutputError,
    PublishError,
    PublishNotSent,
)
from nsqtools.one_channel.temporary_nsqd import TemporaryNsqd
from nsqtools.protocol.text import counted
from nsqtools.publish.publisher import POLL_S, PublishBatch, Publisher, PublishOptions
from nsqtools.records.envelope import MessageLike
from nsqtools.server.job_nsqd import JobChannel, JobMessage

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
    ) -> Iterator[JobMessage]:
        if not origins:
            now_ns = time.time_ns()
            for message_id, body in zip(self._nsqd.new_ids(len(bodies)), bodies, strict=True):
                yield JobMessage(message_id, now_ns, body)
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
            yield JobMessage(message_id, origin.timestamp_ns, body)

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
