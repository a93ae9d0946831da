"""Messages as a handler sees them, and the batches they travel in.

A message is answered once: `finish` or `requeue`, from any thread; later calls do nothing and
return 0. Taking the message out of its connection's ``in_flight`` is the one atomic step that
decides which call was first, so no lock is needed per message. Answers are only queued here; the
I/O thread joins those of a turn in one write.

A message is identified by (topic, nsqd, id): ids repeat between nsqd.

The same classes serve threads and asyncio: an answer is only queued, so `await message.finish()`
has nothing to wait for.
"""

from __future__ import annotations

import time
from collections.abc import Generator, Iterable
from itertools import chain
from typing import Literal, Protocol

from nsqtools.errors import ConfigurationError
from nsqtools.protocol import commands

TOUCH_SHARE = 0.5  # of msg_timeout


AnswerKind = Literal["touch", "requeue", "fail", "late", "give_up", "requeue_undelivered"]
"""What is sent for a message besides the FIN of a handler. ``requeue`` is without backoff and
``fail`` with it; a ``late`` requeue, of a delivery that a newer one has superseded, is only noted;
a message is given up unhandled, and given back when no handler has got it."""


class MessageSource(Protocol):
    """Where a message was delivered, and where its answer goes (a consumer's connection)."""

    topic: str
    nsqd: str
    in_flight: dict[bytes, Message]
    released: set[bytes]
    """Ids of messages in ``in_flight`` that nsqd has taken back while a worker has them."""
    msg_timeout_s: float
    """How long a message may stay unanswered and untouched, as negotiated."""
    received_at: float
    """The time after which nsqd sent what was read last, by the monotonic clock."""

    def finish(self, message_id: bytes) -> None: ...
    def finish_many(self, ids: list[bytes]) -> None: ...
    def requeue(self, message: Message, delay_s: float | None, backoff: bool) -> None: ...
    def answer(self, message_id: bytes, kind: AnswerKind, command: bytes) -> None: ...


class Answered(int):
    """How many messages a call finished, requeued or touched: 0 if they were answered before.

    The number is there at once; a program of asyncio may await it all the same.
    """

    def __await__(self) -> Generator[None, None, Answered]:
        yield from ()
        return self


_YES, _NO = Answered(1), Answered(0)


class Message:
    """One delivery of a message, for threads and for asyncio.

    It is answered once, with or without ``await``, on any thread: what comes later does nothing.

    ``timestamp_ns`` is the time of publishing in nanoseconds since 1970, ``attempts`` counts the
    deliveries including this one, ``id`` is 16 bytes of hexadecimal text, ``body`` is bytes.
    ``received_at`` is when it arrived, or was touched last, by the monotonic clock.

    While a handler has it the message stands for later deliveries as well: ``attempts`` and
    ``received_at`` are those of the last one, which an answer is for.
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
        """When nsqd will deliver the message again, by `time.monotonic`, unless it is answered or
        touched before."""
        return self.received_at + self._source.msg_timeout_s

    @property
    def is_answered(self) -> bool:
        """Tell whether it was finished or requeued, or its connection is gone."""
        return self._source.in_flight.get(self.id) is not self

    def finish(self) -> Answered:
        """Report the message as handled. Returns 0 when it was answered before."""
        if not self._take():
            return _NO
        self._source.finish(self.id)
        return _YES

    def requeue(self, delay_s: float | None = None, *, backoff: bool = True) -> Answered:
        """Deliver the message again, after ``delay_s`` seconds (0: at once).

        Without a delay it is default_requeue_delay times the attempts, at most max_requeue_delay.
        With ``backoff`` it counts as a failure of the handler and slows the whole consumer down.
        Returns 0 when the message was answered before. Raises `ConfigurationError` for a negative
        delay. nsqd cuts a delay above its --max-req-timeout (an hour by default) to that, and does
        not report it.
        """
        if delay_s is not None and not delay_s >= 0:
            raise ConfigurationError(f"requeue delay {delay_s!r} is negative")
        if not self._take():
            if self.id in self._source.in_flight:  # as a newer delivery
                self._source.answer(self.id, "late", b"")
            return _NO
        self._source.requeue(self, delay_s, backoff)
        return _YES

    def touch(self) -> Answered:
        """Restart the message's timeout. Returns 0 when it was answered before.

        nsqd delivers it again all the same when its max_msg_timeout has passed (15 minutes unless
        set).
        """
        if self.is_answered or self.id in self._source.released:
            return _NO
        self._source.answer(self.id, "touch", commands.touch(self.id))
        self.received_at = time.monotonic()
        return _YES

    def give_up(self) -> Answered:
        """Finish the message without having handled it: backoff does not count a success."""
        if not self._take():
            return _NO
        self._source.answer(self.id, "give_up", commands.finish(self.id))
        return _YES

    def _take(self) -> bool:
        """Claim the right to answer; a newer delivery of the same message has taken it over."""
        in_flight = self._source.in_flight
        return in_flight.get(self.id) is self and in_flight.pop(self.id, None) is not None

    def __repr__(self) -> str:
        shown = self.id.decode("ascii", "backslashreplace")
        return (
            f"<Message {shown} of {self.topic} from {self.nsqd},"
            f" {len(self.body)} bytes, attempt {self.attempts}>"
        )


def source_of(message: Message) -> MessageSource:
    """Return the connection that delivered a message, or delivered it again last."""
    return message._source


def adopt_redelivery(message: Message, redelivery: Message) -> None:
    """Let a message that a worker has stand for a newer delivery: an answer is for that one."""
    message.received_at = redelivery.received_at
    message.attempts = redelivery.attempts
    message._source = redelivery._source


class Batch(list[Message]):
    """Messages that arrived together from one nsqd. Answering them together costs one write."""

    __slots__ = ("source",)

    def __init__(self, source: MessageSource, messages: Iterable[Message]) -> None:
        self += messages  # a third of the cost of `list.__init__`, for a batch of one
        self.source = source

    @property
    def topic(self) -> str:
        return self.source.topic

    @property
    def nsqd(self) -> str:
        """The address of the nsqd that delivered them, ``host:port``."""
        return self.source.nsqd

    def finish(self) -> Answered:
        """Finish every message not answered yet; return how many those were."""
        ids = [message.id for message in self]
        pop = self.source.in_flight.pop
        taken = [pop(message_id, None) for message_id in ids]
        moved = 0
        if taken != self:  # some were answered one by one, or delivered again meanwhile
            ids = self._sort_out(taken)
            moved = self._finish_moved()
        if ids:
            self.source.finish_many(ids)
        return Answered(len(ids) + moved)

    def _finish_moved(self) -> int:
        """Finish what was delivered again on another connection since; return how many."""
        return sum(message.finish() for message in self if message._source is not self.source)

    def _sort_out(self, taken: list[Message | None]) -> list[bytes]:
        ids = []
        for message, other in zip(self, taken, strict=True):
            if other is message:
                ids.append(message.id)
            elif other is not None:
                self.source.in_flight[message.id] = other
        return ids

    def requeue(self, delay_s: float | None = None, *, backoff: bool = True) -> Answered:
        """Requeue every message not answered yet; return how many those were."""
        return Answered(sum(message.requeue(delay_s, backoff=backoff) for message in self))


class Gathered(Batch):
    """Messages of one topic, from several nsqd and reads: `nsqd` is that of the first."""

    __slots__ = ("_parts",)

    def __init__(self, parts: list[Batch]) -> None:
        """``parts`` hold a message at least."""
        self._parts = [Batch(part.source, [m for m in part if not m.is_answered]) for part in parts]
        super().__init__(parts[0].source, chain(*self._parts))

    def finish(self) -> Answered:
        """Finish every message not answered yet; return how many those were."""
        return Answered(sum(part.finish() for part in self._parts))


def touch_when_due(messages: Iterable[Message], now: float) -> None:
    """Restart the timeouts of messages, each before it has passed."""
    for message in messages:
        deadline = message.deadline
        if deadline - now < (1 - TOUCH_SHARE) * (deadline - message.received_at):
            message.touch()


def max_attempts_of(messages: list[Message]) -> int:
    """Return the greatest number of attempts. A single message is usual with many connections."""
    if len(messages) == 1:
        return messages[0].attempts
    return max([message.attempts for message in messages])


def batches_from(batches: list[Batch], reached: int) -> list[Batch]:
    """Return what comes after the first ``reached`` messages of batches."""
    rest = []
    for batch in batches:
        if reached < len(batch):
            rest.append(Batch(batch.source, batch[reached:]))
        reached = max(0, reached - len(batch))
    return rest


def requeue_undelivered(batch: Batch, *, in_time: bool = True) -> int:
    """Return to nsqd what no handler has got; return how many messages that were.

    If it is not ``in_time`` for a REQ, nsqd takes them back by their timeout.
    """
    taken = [message.id for message in batch if message._take()]
    for message_id in taken:
        command = commands.requeue(message_id, 0) if in_time else b""
        batch.source.answer(message_id, "requeue_undelivered", command)
    return len(taken)
