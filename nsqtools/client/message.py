"""Messages as a handler sees them, and the batches in which they travel.

A message is answered once, with `finish` or `requeue`, from any thread; later calls do nothing and
return 0. Removing the message from its connection's ``in_flight`` is the one atomic step that
decides which call was first, so a message needs no lock. An answer is only queued here; the I/O
thread joins the answers of a loop iteration in one write.

A message is identified by (topic, nsqd, id), because ids repeat between nsqd.

The same classes serve threads and asyncio: an answer is only queued, so `await message.finish()`
has nothing to wait for.
"""

from __future__ import annotations

import time
from collections.abc import Generator, Iterable
from itertools import chain, groupby
from typing import Literal, Protocol

from nsqtools.client.former_names import former_names
from nsqtools.protocol import commands
from nsqtools.protocol.arguments import check_times

# Share of msg_timeout after which a message is touched. The other half is left for a touch that is
# delayed by a busy loop or a slow connection.
TOUCH_SHARE = 0.5


AnswerKind = Literal["touch", "requeue", "fail", "late", "give_up", "undelivered"]
"""The kind of an answer other than the FIN of a handler.

``requeue`` is without backoff and ``fail`` with it. A ``late`` requeue belongs to a superseded
delivery and is only recorded. ``give_up`` finishes a message that no handler handled, and
``undelivered`` requeues one that no handler has received.
"""


class MessageSource(Protocol):
    """The connection of a consumer that delivered a message and takes its answer."""

    topic: str
    nsqd: str
    in_flight: dict[bytes, Message]
    released: set[bytes]
    """Ids of messages in ``in_flight`` that timed out at nsqd while a worker has them."""
    msg_timeout_s: float
    """How long a message may stay unanswered and untouched, as negotiated."""
    received_at: float
    """The monotonic time of the last poll: nsqd sent the last bytes read after it."""

    def finish(self, message_id: bytes) -> None: ...
    def finish_many(self, ids: list[bytes]) -> None: ...
    def requeue(self, message: Message, delay_s: float | None, backoff: bool) -> None: ...
    def answer(self, message_id: bytes, kind: AnswerKind, command: bytes) -> None: ...


class Answered(int):
    """The number of messages that a call finished, requeued or touched: 0 if answered before.

    Nothing is pending; it is awaitable so that asyncio programs may write ``await`` everywhere.
    """

    def __await__(self) -> Generator[None, None, Answered]:
        yield from ()
        return self


_YES, _NO = Answered(1), Answered(0)


@former_names("give_up")
class Message:
    """One delivery of a message, for threads and for asyncio.

    It is answered once, with or without ``await``, on any thread; later answers do nothing.

    ``timestamp_ns`` is the time of publishing in nanoseconds since 1970, ``attempts`` counts the
    deliveries including this one, ``id`` is 16 bytes of hexadecimal text, ``body`` is bytes.
    ``received_at`` is the monotonic time of its arrival or its last touch.

    While a handler has it, the message represents later deliveries as well: ``attempts`` and
    ``received_at`` are updated, and an answer is for the last delivery.
    """

    __slots__ = ("_source", "attempts", "body", "id", "received_at", "timestamp_ns")

    def __init__(
        self, source: MessageSource, timestamp_ns: int, attempts: int, id: bytes, body: bytes
    ) -> None:
        self._source = source
        self.received_at = source.received_at
        self.timestamp_ns = timestamp_ns
        self.attempts = attempts
        self.id = id
        self.body = body

    @property
    def topic(self) -> str:
        return self._source.topic

    @property
    def nsqd(self) -> str:
        """The address of the nsqd that delivered it, ``host:port``."""
        return self._source.nsqd

    @property
    def deadline(self) -> float:
        """The monotonic time at which nsqd requeues the message unless answered or touched."""
        return self.received_at + self._source.msg_timeout_s

    @property
    def is_answered(self) -> bool:
        """Return whether it was finished or requeued, or its connection was lost."""
        return self._source.in_flight.get(self.id) is not self

    def finish(self) -> Answered:
        """Report the message as handled. Returns 0 when it was answered before."""
        source, message_id = self._source, self.id
        in_flight = source.in_flight  # like `_take`, without its call
        if in_flight.get(message_id) is not self or in_flight.pop(message_id, None) is None:
            return _NO
        source.finish(message_id)
        return _YES

    def requeue(self, delay_s: float | None = None, *, backoff: bool = True) -> Answered:
        """Have the message delivered again after ``delay_s`` seconds (0: immediately).

        The default delay is default_requeue_delay times the attempts, at most max_requeue_delay.
        With ``backoff`` it counts as a failure of the handler and slows the whole consumer down.
        Returns 0 when the message was answered before. Raises `ConfigurationError` for a negative
        delay. nsqd silently reduces a delay above its --max-req-timeout (an hour by default).
        """
        if delay_s is not None:
            check_times(delay_s=delay_s)
        if not self._take():
            # A newer delivery is in flight. The failure counts for max_attempts nevertheless.
            if self.id in self._source.in_flight:
                self._source.answer(self.id, "late", b"")
            return _NO
        self._source.requeue(self, delay_s, backoff)
        return _YES

    def touch(self) -> Answered:
        """Restart the message's timeout. Returns 0 when it was answered before.

        nsqd requeues it regardless when its max_msg_timeout has passed (15 minutes by default).
        """
        if self.is_answered or self.id in self._source.released:
            return _NO
        self._source.answer(self.id, "touch", commands.touch(self.id))
        self.received_at = time.monotonic()
        return _YES

    def _give_up(self) -> Answered:
        """Finish the message unhandled: backoff does not count it as a success."""
        if not self._take():
            return _NO
        self._source.answer(self.id, "give_up", commands.finish(self.id))
        return _YES

    def _take(self) -> bool:
        """Claim the right to answer; return False if it was answered or delivered again."""
        in_flight = self._source.in_flight
        return in_flight.get(self.id) is self and in_flight.pop(self.id, None) is not None

    def __repr__(self) -> str:
        text = self.id.decode("ascii", "backslashreplace")
        return (
            f"<Message {text} of {self.topic} from {self.nsqd},"
            f" {len(self.body)} bytes, attempt {self.attempts}>"
        )


def source_of(message: Message) -> MessageSource:
    """Return the connection of a message's last delivery."""
    return message._source


def adopt_redelivery(message: Message, redelivery: Message) -> None:
    """Let a message that a worker has represent a newer delivery, which its answer will be for."""
    message.received_at = redelivery.received_at
    message.attempts = redelivery.attempts
    message._source = redelivery._source


@former_names("source")
class Batch(list[Message]):
    """Messages that arrived together from one nsqd. Answering them together costs one write."""

    __slots__ = ("_source",)

    def __init__(self, source: MessageSource, messages: Iterable[Message]) -> None:
        # For a batch of one, a third of the cost of `list.__init__`.
        self += messages
        self._source = source

    @property
    def topic(self) -> str:
        return self._source.topic

    @property
    def nsqd(self) -> str:
        """The address of the nsqd that delivered them, ``host:port``."""
        return self._source.nsqd

    def finish(self) -> Answered:
        """Finish every unanswered message; return their number."""
        ids = [message.id for message in self]
        pop = self._source.in_flight.pop
        popped = [pop(message_id, None) for message_id in ids]
        moved = 0
        if popped != self:  # some were answered one by one, or delivered again meanwhile
            ids = self._claimed_ids(popped)
            moved = self._finish_moved()
        if ids:
            self._source.finish_many(ids)
        return Answered(len(ids) + moved)

    def _finish_moved(self) -> int:
        """Finish messages that another connection has delivered again; return their number."""
        return sum(message.finish() for message in self if message._source is not self._source)

    def _claimed_ids(self, popped: list[Message | None]) -> list[bytes]:
        """Return the ids of our messages, and put newer deliveries back in flight."""
        ids = []
        for message, popped_message in zip(self, popped, strict=True):
            if popped_message is message:
                ids.append(message.id)
            elif popped_message is not None:
                self._source.in_flight[message.id] = popped_message
        return ids

    def requeue(self, delay_s: float | None = None, *, backoff: bool = True) -> Answered:
        """Requeue every unanswered message; return their number."""
        return Answered(sum(message.requeue(delay_s, backoff=backoff) for message in self))


class Gathered(Batch):
    """Messages of one topic, from several nsqd and reads; `nsqd` is that of the first message."""

    __slots__ = ("_parts",)

    def __init__(self, parts: list[Batch]) -> None:
        """``parts`` has at least one message."""
        self._parts = [
            Batch(part._source, [m for m in part if not m.is_answered]) for part in parts
        ]
        super().__init__(parts[0]._source, chain(*self._parts))

    def finish(self) -> Answered:
        """Finish every unanswered message; return their number."""
        return Answered(sum(part.finish() for part in self._parts))


def touch_when_due(messages: Iterable[Message], now: float) -> None:
    """Touch the messages of which `TOUCH_SHARE` of the timeout has passed."""
    for message in messages:
        deadline = message.deadline
        if deadline - now < (1 - TOUCH_SHARE) * (deadline - message.received_at):
            message.touch()


def max_attempts_of(messages: list[Message]) -> int:
    """Return the greatest number of attempts."""
    if len(messages) == 1:  # the usual case with many connections
        return messages[0].attempts
    return max([message.attempts for message in messages])


def batches_of(messages: Iterable[Message]) -> list[Batch]:
    """Return messages as batches, one for each run from the same connection."""
    return [Batch(source, run) for source, run in groupby(messages, key=source_of)]


def requeue_undelivered(batch: Batch, *, in_time: bool = True) -> int:
    """Requeue messages that no handler has received; return their number.

    Without ``in_time`` no REQ is sent: nsqd has requeued them by their timeout, or is about to.
    """
    ids = [message.id for message in batch if message._take()]
    for message_id in ids:
        command = commands.requeue(message_id, 0) if in_time else b""
        batch._source.answer(message_id, "undelivered", command)
    return len(ids)
