"""Fake messages and producers record what became of them, and behave as real ones do."""

from __future__ import annotations

import asyncio

import pytest

from nsqtools import (
    ConfigurationError,
    Message,
    Publication,
    PublishError,
    PublishNotSent,
    PublishUnknown,
)
from nsqtools.testing import (
    AsyncFakeProducer,
    FakeMessage,
    FakeProducer,
    Published,
    fake_batch,
    fake_message,
)


def test_a_fake_message_is_a_message_with_what_it_was_given() -> None:
    message = fake_message(
        b"42", topic="clicks", nsqd="a:1", attempts=3, timestamp_ns=7, id=b"0123456789abcdef"
    )
    assert isinstance(message, Message)
    assert (message.body, message.topic, message.nsqd) == (b"42", "clicks", "a:1")
    assert (message.attempts, message.timestamp_ns) == (3, 7)
    assert message.id == b"0123456789abcdef"
    assert "0123456789abcdef of clicks" in repr(message)
    ids = [fake_message().id for _ in range(3)]
    assert len(set(ids)) == 3
    assert all(len(id) == 16 and int(id, 16) for id in ids)


def test_answers_are_recorded_in_order_and_there_is_one() -> None:
    message = fake_message()
    assert message.answers == []
    assert message.touch()
    assert message.touch()
    assert not message.is_answered
    assert message.finish()
    assert message.is_answered
    assert not message.finish()  # as a real message
    assert not message.requeue()
    assert not message.touch()
    assert message.answers == ["touch", "touch", "finish"]


@pytest.mark.parametrize(("delay_s", "backoff"), [(None, True), (30.0, True), (0, False)], ids=repr)
def test_a_requeue_is_recorded_with_its_delay(delay_s: float | None, backoff: bool) -> None:
    message = fake_message()
    with pytest.raises(ConfigurationError):
        message.requeue(-1)
    assert message.requeue(delay_s, backoff=backoff)
    assert message.answers == ["requeue"]
    assert message.requeue_delay_s == delay_s
    assert message.has_backoff is backoff


def test_the_answers_of_a_batch_are_recorded_by_message() -> None:
    batch = fake_batch([b"a", b"b", b"c"], topic="clicks")
    assert batch.topic == "clicks"
    batch[1].requeue(5)
    assert batch.finish() == 2
    messages = [message for message in batch if isinstance(message, FakeMessage)]
    assert [message.answers for message in messages] == [["finish"], ["requeue"], ["finish"]]


# -- producers without an nsqd ---------------------------------------------------------------------


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
            producer.error = PublishNotSent("nsqd is away")
            with pytest.raises(PublishNotSent):
                await producer.publish_many("orders", [b"x", b"y"])
        return producer

    published = asyncio.run(publish()).published
    assert published == [Published("orders", b"%d" % n) for n in range(3)]
