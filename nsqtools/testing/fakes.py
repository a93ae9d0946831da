"""Messages that came from nowhere and record how they are answered, and producers without an nsqd.

    message = fake_message(b"42", attempts=3)
    handle(message)
    assert message.answers == ["touch", "requeue"]
    assert message.requeue_delay_s == 30

    producer = FakeProducer()
    bill(producer, order)
    assert producer.published == [Published("bills", b"42")]

    producer.error = PublishNotSent("nsqd is away")  # until it is None again
    with pytest.raises(PublishNotSent):
        bill(producer, order)

They are `Message`, `Batch` and `Producer` objects with a recorder in the place of the connection:
what a program can do with them, what is refused before it is sent, the window and the outcomes are
the real code. A publish has settled when its call returns.
"""

from __future__ import annotations

import itertools
import time
from collections.abc import Iterable
from typing import Any, NamedTuple

from nsqtools import aio
from nsqtools.client.message import AnswerKind, Batch, Message
from nsqtools.client.producer import Producer, ProducerCore
from nsqtools.client.publication import PendingPublication
from nsqtools.errors import PublishError
from nsqtools.protocol.arguments import check_argument

_ids = itertools.count(1)


class _Recorder:
    """Records answers by message: what `Message` sees in place of a connection."""

    def __init__(self, topic: str, nsqd: str, msg_timeout_s: float) -> None:
        self.topic = topic
        self.nsqd = nsqd
        self.msg_timeout_s = msg_timeout_s
        self.received_at = time.monotonic()
        self.in_flight: dict[bytes, Message] = {}
        self.released: set[bytes] = set()
        self.answers: dict[bytes, list[str]] = {}
        self.requeues: dict[bytes, tuple[float | None, bool]] = {}

    def deliver(
        self,
        body: bytes,
        attempts: int = 1,
        timestamp_ns: int | None = None,
        id: bytes | None = None,
    ) -> FakeMessage:
        when_ns = time.time_ns() if timestamp_ns is None else timestamp_ns
        message_id = b"%016x" % next(_ids) if id is None else id
        message = FakeMessage(self, when_ns, attempts, message_id, body)
        self.in_flight[message_id] = message
        self.answers[message_id] = []
        return message

    def finish(self, message_id: bytes) -> None:
        self.answers[message_id].append("finish")

    def finish_many(self, ids: list[bytes]) -> None:
        for message_id in ids:
            self.finish(message_id)

    def requeue(self, message: Message, delay_s: float | None, backoff: bool) -> None:
        self.answers[message.id].append("requeue")
        self.requeues[message.id] = delay_s, backoff

    def answer(self, message_id: bytes, kind: AnswerKind, command: bytes) -> None:
        if kind in ("touch", "give_up"):
            self.answers[message_id].append(kind)


class FakeMessage(Message):
    """A `Message` that records its answers. `fake_message` and `fake_batch` make it."""

    __slots__ = ()

    _source: _Recorder

    @property
    def answers(self) -> list[str]:
        """What was sent for the message, in order: touch, finish, requeue or give_up.

        A call that came after the final answer sent nothing, and is not in the list.
        """
        return self._source.answers[self.id]

    @property
    def requeue_delay_s(self) -> float | None:
        """The delay of the requeue; None when it named none, or there was no requeue."""
        return self._source.requeues.get(self.id, (None, False))[0]

    @property
    def has_backoff(self) -> bool:
        """Tell whether the message was requeued as a failure, which slows the consumer down."""
        return self._source.requeues.get(self.id, (None, False))[1]


def fake_message(
    body: bytes = b"",
    *,
    topic: str = "topic",
    nsqd: str = "127.0.0.1:4150",
    attempts: int = 1,
    timestamp_ns: int | None = None,
    id: bytes | None = None,
    msg_timeout_s: float = 60.0,
) -> FakeMessage:
    """Make a message in flight. Without ``timestamp_ns`` it was published now.

    Without ``id`` it gets the next of a sequence.
    """
    check_argument("body", body, bytes)
    return _Recorder(topic, nsqd, msg_timeout_s).deliver(body, attempts, timestamp_ns, id)


def fake_batch(
    bodies: Iterable[bytes],
    *,
    topic: str = "topic",
    nsqd: str = "127.0.0.1:4150",
    msg_timeout_s: float = 60.0,
) -> Batch:
    """Make a batch of `FakeMessage`, as `Consumer.batches` yields it."""
    recorder = _Recorder(topic, nsqd, msg_timeout_s)
    messages = [recorder.deliver(body) for body in bodies]
    for message in messages:
        check_argument("each of bodies", message.body, bytes)
    return Batch(recorder, messages)


class Published(NamedTuple):
    """A message that a fake producer has confirmed."""

    topic: str
    body: bytes
    defer_s: float | None = None


class _Fake(ProducerCore):
    def __init__(self, *args: Any, **more: Any) -> None:
        super().__init__(*args, **more)
        self.published: list[Published] = []
        self.error: PublishError | None = None

    def _send(self, publication: PendingPublication) -> None:
        if self.error is None:
            topic, defer_s = publication.topic, publication.defer_s
            self.published += [Published(topic, body, defer_s) for body in publication.bodies]
        publication.settle(self.error)
        with self._lock:  # what is one thread's there, the I/O thread's
            self._on_settled([publication])
        publication._call_back()

    def start(self) -> None:
        """Begin nothing."""


class FakeProducer(_Fake, Producer):
    """Takes the parameters of `Producer`, and connects to no address.

    ``published`` has what was confirmed, in order. While ``error`` is set, everything ends with it:
    `PublishNotSent`, `PublishRejected`, `PublishUnknown`.
    """


class AsyncFakeProducer(_Fake, aio.Producer):
    """The same for asyncio, with the parameters of `nsqtools.aio.Producer`."""
