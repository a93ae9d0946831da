"""A publisher that hands messages to one channel, by a temporary nsqd.

A stored message is confirmed. `wait_until_consumed` waits until consumers have finished the stored
messages. Messages keep their ids and timestamps, except that nsqd cannot have two messages with one
id in flight: a message whose id is already in the channel gets a new id, as does one without an id.

With each batch the number of messages taken so far of each topic is stored, and a digest of them.
The next run on the same data path offers the same messages from the beginning: as many are not
taken again, if they are the same ones. So a kill at any moment doubles nothing on the way in.
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
from nsqtools.one_channel.temporary_nsqd import QueueState, TemporaryNsqd
from nsqtools.protocol.text import counted
from nsqtools.publish.publisher import POLL_S, PublishBatch, Publisher, PublishOptions
from nsqtools.records.envelope import MessageLike
from nsqtools.server.queues.queued_message import new_messages, with_attempts

_ID = re.compile(rb"[0-3][0-9a-f]{15}")  # those of nsqd; the database has numbers of 63 bits
_NEW_IDS_TOLD = 10


class _Taken:
    """The messages of a topic that were taken in all runs: ``number``, and their digest.

    ``to_skip`` of them are still to be offered again.
    """

    def __init__(self, topic: str, number: int = 0, before: str = "") -> None:
        self.topic = topic
        self.number = self.to_skip = number
        self.before = before
        self.digest = blake2b(digest_size=16)

    def as_json(self) -> tuple[int, str]:
        return self.number, self.before if self.to_skip else self.digest.hexdigest()

    def add(self, bodies: Sequence[bytes], origins: Sequence[MessageLike]) -> None:
        for body, origin in zip(bodies, origins, strict=True):
            head = f"{len(body)} {origin.timestamp_ns} ".encode()
            self.digest.update(b"%b%b %b" % (head, origin.id, body))


class ChannelPublisher(Publisher):
    """Fills ``channel`` of each topic that is published to.

    ``max_depth`` messages of it are in the nsqd at most; ``wait_s`` is how long messages may wait
    while no consumer of the channel is connected (`lonely` then names it). ``resumes`` tells that
    the next run would offer the same messages again. ``tell`` gets what a user should know.
    """

    def __init__(
        self,
        nsqd: TemporaryNsqd,
        channel: str,
        options: ClientOptions,
        rate: float = 0.0,
        *,
        max_depth: int,
        wait_s: float,
        resumes: bool,
        defer_s: float | None = None,
        tell: Callable[[str], None],
    ) -> None:
        super().__init__([], options, PublishOptions(defer_s=defer_s), rate)
        self.new_ids = 0
        self.delivered = 0
        self.lonely: QueueState | None = None
        self._nsqd = nsqd
        self._channel = channel
        self._max_depth = max_depth
        self._wait_s = wait_s
        self._tell = tell
        self._ids = nsqd.new_ids()
        self._joined: set[tuple[str, str]] = set()
        self._visited_s: dict[tuple[str, str], float] = {}  # when a consumer was last seen
        self._resumes = resumes
        self._number, note = nsqd.note()
        before = json.loads(note) if note and resumes else {}
        self._taken = {topic: _Taken(topic, *values) for topic, values in before.items()}
        self._is_offered = False
        self._failure: NsqError | None = None
        self._stored = sum(each.left for each in nsqd.states())

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

        A message that is not stored counts as unsent. `wait_until_consumed` raises the reason,
        unless it is a `stop`.
        """
        defer_s = defer_s or self._options.defer_s or 0.0
        self.spend(len(bodies))
        batch = PublishBatch(topic, bodies, 0, on_ended)
        start = 0
        try:
            self.join(topic, self._channel)
            while start < len(bodies):
                taken = self._taken.setdefault(topic, _Taken(topic))
                room = taken.to_skip or self._room(topic)
                if not room:
                    self.has_given_up = True
                    break
                end = min(len(bodies), start + room)
                self._take(taken, bodies[start:end], origins[start:end], defer_s)
                start = end
        except OutputError as exc:  # the rest of the input may go where what is unsent is kept
            self._failure, self.has_given_up = exc, True
            self._tell(str(exc))
        except NsqError as exc:
            self._failure = exc
            self.stop()
        error: PublishError = PublishNotSent(f"{topic}/{self._channel} took no more")
        batch.errors = {place: {"": error} for place in range(start, len(bodies))}
        self._count_batch(batch)

    def take_over(self, topic: str, channel: str, messages: Sequence[Message]) -> None:
        """Store messages of another nsqd as they are, with their attempts, in a channel of it.

        One that is here already, delivered once more, is not stored again. Raises `OutputError`.
        """
        held = self._nsqd.held(topic, channel, {message.id for message in messages})
        new = [each for each in messages if held.get(each.id) != each.timestamp_ns]
        if not new:
            return
        frames = self._frames(f"{topic}/{channel}", [each.body for each in new], new, held)
        self._nsqd.put(
            topic,
            channel,
            # the attempts of a frame that waits count the delivery to come
            [with_attempts(f, each.attempts - 1) for f, each in zip(frames, new, strict=True)],
        )
        self._stored += len(new)

    def join(self, topic: str, channel: str) -> None:
        """Have a topic registered, with all its channels. Raises as `TemporaryNsqd.join`."""
        if (topic, channel) not in self._joined:
            self._nsqd.join(topic, channel)
            self._joined.add((topic, channel))

    def _room(self, topic: str) -> int:
        """Wait until the channel has room, and return how much; 0 at a stop or without consumer."""
        while not self.is_stopped and self.lonely is None:
            room = self._max_depth - self._nsqd.state(topic, self._channel).left
            if room > 0:
                return room
            self._look_for_consumers(self._nsqd.states())
            self.stopped.wait(POLL_S)
        return 0

    def _take(
        self, taken: _Taken, bodies: Sequence[bytes], origins: Sequence[MessageLike], defer_s: float
    ) -> None:
        self._is_offered = True
        note = None
        if self._resumes:
            taken.add(bodies, origins)
        if taken.to_skip:
            taken.to_skip -= len(bodies)
            if not taken.to_skip and taken.digest.hexdigest() != taken.before:
                raise self._other_messages()
            return
        queue = taken.topic, self._channel
        held = self._nsqd.held(*queue, {origin.id for origin in origins})
        messages = list(self._frames("/".join(queue), bodies, origins, held))
        taken.number += len(bodies)
        if self._resumes:
            content = {name: each.as_json() for name, each in self._taken.items()}
            before, self._number = self._number, self._number + len(bodies)
            note = before, self._number, json.dumps(content).encode()
        self._nsqd.put(*queue, messages, delay_s=defer_s, note=note)
        self._stored += len(bodies)

    def _frames(
        self,
        where: str,
        bodies: Sequence[bytes],
        origins: Sequence[MessageLike],
        held: Iterable[bytes],
    ) -> Iterator[bytes]:
        now_ns = time.time_ns()
        if not origins:
            yield from new_messages(bodies, self._ids.take(len(bodies), now_ns), now_ns)
            return
        taken = set(held)
        for body, origin in zip(bodies, origins, strict=True):
            message_id = origin.id
            if message_id in taken or not _ID.fullmatch(message_id):
                [message_id] = self._ids.take(1, now_ns)
                self.new_ids += 1
                if self.new_ids <= _NEW_IDS_TOLD:
                    old = origin.id.decode("latin-1")
                    self._tell(f"{where}: message {old} is {message_id.decode()} here")
            taken.add(message_id)
            yield new_messages([body], [message_id], origin.timestamp_ns)[0]

    def _other_messages(self) -> ConfigurationError:
        return ConfigurationError(
            f"{self._nsqd.data_path} has the rest of a run with other messages",
            hint="Run it with the same files and options, or give another --data-path.",
        )

    # delivery

    def wait_until_consumed(self, on_progress: Callable[[int], None]) -> None:
        """Wait until all is consumed, and leave the cluster.

        ``on_progress`` is called with the number of consumed messages. Some remain after `stop`, or
        when `lonely` is set.
        Raises as `TemporaryNsqd.join`, `OutputError` when something could not be stored, and
        `ConfigurationError` when an earlier run on this data path took other messages.
        """
        if self._failure is not None:
            raise self._failure
        is_over = not (self.is_stopped or self.has_given_up)
        if is_over and self._is_offered and any(each.to_skip for each in self._taken.values()):
            raise self._other_messages()
        while (states := self._nsqd.states()) and not self.is_stopped:
            for state in states:  # what an earlier run left, too
                self.join(state.topic, state.channel)
            self.delivered = self._stored - sum(each.left for each in states)
            self._look_for_consumers(states)
            if self.lonely is not None:
                break
            on_progress(self.delivered)
            self.stopped.wait(POLL_S)
        self._nsqd.leave(is_over=is_over and (self._resumes or not self._number))
        self.delivered = self._stored - self._nsqd.left

    def rest(self) -> str:
        """Say what the data path has after the end, and how to go on; ``""`` when it is gone."""
        if not self._nsqd.is_kept:
            return ""
        how = "which the next run delivers; its input may be empty"
        if self._resumes:
            how = "and how far this came: run it again"
        elif self._number:
            how = "and how far an earlier run came: run that again"
        return f"{self._nsqd.data_path} has {counted(self._nsqd.left, 'message')}, {how}"

    def _look_for_consumers(self, states: Sequence[QueueState]) -> None:
        now_s = time.monotonic()
        for state in states:
            key = state.topic, state.channel
            if state.consumers:
                self._visited_s[key] = now_s
            elif now_s - self._visited_s.setdefault(key, now_s) >= self._wait_s:
                self.lonely = state
