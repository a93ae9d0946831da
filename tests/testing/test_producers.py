"""Producers without an nsqd."""

from __future__ import annotations

import asyncio

import pytest

from nsqtools import Publication, PublishError, PublishNotSent, PublishUnknown
from nsqtools.errors import ConfigurationError
from nsqtools.testing import AsyncFakeProducer, FakeProducer, Published


def test_it_keeps_what_was_published() -> None:
    seen: list[Publication] = []
    with FakeProducer(on_published=seen.append) as producer:
        producer.publish("orders", b"1")
        producer.publish_many("orders", [b"2", b"3"])
        producer.publish_deferred("orders", b"4", 2.5)
        publication = producer.submit("bills", [b"5"])
        assert publication.result() is None  # type: ignore[func-returns-value]
        assert producer.flush()
    assert producer.published == [
        *(Published("orders", body) for body in (b"1", b"2", b"3")),
        Published("orders", b"4", 2.5),
        Published("bills", b"5"),
    ]
    assert len(seen) == 4
    with pytest.raises(PublishNotSent, match="has stopped"):
        producer.publish("orders", b"6")


def test_it_refuses_what_a_producer_refuses() -> None:
    producer = FakeProducer()
    with pytest.raises(ConfigurationError):
        producer.publish("no topic", b"x")
    with pytest.raises(TypeError):
        producer.publish("orders", "text")  # type: ignore[arg-type]
    assert producer.published == []


def test_it_fails_as_it_is_told() -> None:
    producer, called = FakeProducer(), list[PublishError | None]()
    producer.error = PublishUnknown("the connection broke")
    with pytest.raises(PublishUnknown):
        producer.publish("orders", b"1")
    publication = producer.submit("orders", [b"2"], on_settled=lambda p: called.append(p.error))
    assert called == [publication.error] == [producer.error]
    producer.error = None
    producer.publish("orders", b"3")
    assert producer.published == [Published("orders", b"3")]


def test_it_is_the_same_with_asyncio() -> None:
    async def publish() -> AsyncFakeProducer:
        async with AsyncFakeProducer() as producer:
            await asyncio.gather(*(producer.publish("orders", b"%d" % n) for n in range(3)))
            producer.fake.error = PublishNotSent("nsqd is away")
            with pytest.raises(PublishNotSent):
                await producer.publish_many("orders", [b"x", b"y"])
        return producer

    published = asyncio.run(publish()).fake.published
    assert published == [Published("orders", b"%d" % n) for n in range(3)]
