"""Producers without an nsqd, which keep what they were given.

    producer = FakeProducer()
    bill(producer, order)
    assert producer.published == [Published("bills", b"42")]

    producer.error = PublishNotSent("nsqd is away")  # until it is None again
    with pytest.raises(PublishNotSent):
        bill(producer, order)

They are a `Producer` with a record in the place of the connections: what is refused before it is
sent, the window and the outcomes are the real code. Everything has settled when a call returns.
"""

from __future__ import annotations

from typing import Any, NamedTuple

from nsqtools import aio
from nsqtools.client.producer import Producer
from nsqtools.client.publication import PendingPublication, call_back
from nsqtools.errors import PublishError


class Published(NamedTuple):
    """A message that a fake producer has confirmed."""

    topic: str
    body: bytes
    defer_s: float | None = None


class FakeProducer(Producer):
    """Takes the parameters of `Producer`, and connects to no address.

    ``published`` has what was confirmed, in order. While ``error`` is set, everything ends with it:
    `PublishNotSent`, `PublishRejected`, `PublishUnknown`.
    """

    def __init__(self, *args: Any, **more: Any) -> None:
        super().__init__(*args, **more)
        self.published: list[Published] = []
        self.error: PublishError | None = None

    def _send(self, publication: PendingPublication) -> None:
        self._wait_for_room(publication)
        if self.error is None:
            self.published += [
                Published(publication.topic, body, publication.defer_s)
                for body in publication.bodies
            ]
        publication.settle(self.error)
        self._on_settled([publication])
        call_back([publication])

    def start(self) -> None:
        """Begin nothing."""


class AsyncFakeProducer(aio.Producer):
    """The same for asyncio, with the parameters of `nsqtools.aio.Producer`.

    ``fake.published`` and ``fake.error`` are those of a `FakeProducer`.
    """

    def __init__(self, *args: Any, **more: Any) -> None:
        super().__init__(*args, **more)
        self._producer = self.fake = FakeProducer(*args, **more)
