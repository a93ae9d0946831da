"""Tools for users' tests: fakes that behave like the real classes, and fixtures."""

import asyncio
from typing import Any

import pytest
from plugins.waiting import patience_s

from nsqtools import Message, Publication, errors
from nsqtools.testing import AsyncFakeProducer, FakeProducer, Published, fake_batch, fake_message


def test_a_fake_message_has_the_given_fields() -> None:
    fields: dict[str, Any] = {"topic": "clicks", "nsqd": "a:1", "id": b"0" * 16}
    fields |= {"attempts": 3, "timestamp_ns": 7}
    message = fake_message(b"42", **fields)
    assert isinstance(message, Message)
    assert message.body == b"42"
    assert {name: getattr(message, name) for name in fields} == fields
    assert "0000000000000000 of clicks" in repr(message)
    ids = {fake_message().id for _ in range(3)}
    assert [len(id) for id in ids] == [16] * 3


def test_a_fake_message_records_its_answers_and_the_delay_of_a_requeue() -> None:
    message = fake_message()
    assert (message.touch(), message.touch()) == (1, 1)
    assert not message.is_answered
    assert message.finish()
    assert message.is_answered
    for answer in (message.finish, message.requeue, message.touch):
        assert not answer()  # like a real message
    assert message.answers == ["touch", "touch", "finish"]
    for delay_s, backoff in ((None, True), (30.0, True), (0, False)):
        message = fake_message()
        with pytest.raises(errors.ConfigurationError):
            message.requeue(-1)
        assert message.requeue(delay_s, backoff=backoff)
        assert message.answers == ["requeue"]
        assert (message.requeue_delay_s, message.has_backoff) == (delay_s, backoff)
    batch: Any = fake_batch([b"a", b"b", b"c"], topic="clicks")
    assert batch.topic == "clicks"
    batch[1].requeue(5)
    assert batch.finish() == 2
    assert [message.answers for message in batch] == [["finish"], ["requeue"], ["finish"]]


def test_a_fake_producer_keeps_published_messages() -> None:
    reported: list[Publication] = []
    with FakeProducer(on_published=reported.append) as producer:
        producer.publish("orders", b"1")
        producer.publish_many("orders", [b"2", b"3"])
        producer.publish_deferred("orders", b"4", 2.5)
        producer.submit("bills", [b"5"]).result()
        assert producer.flush()
    assert producer.published == [
        *(Published("orders", body) for body in (b"1", b"2", b"3")),
        Published("orders", b"4", 2.5),
        Published("bills", b"5"),
    ]
    assert len(reported) == 4
    with pytest.raises(errors.PublishNotSent, match="has stopped"):
        producer.publish("orders", b"6")


def test_a_fake_producer_refuses_invalid_messages_and_fails_on_request() -> None:
    producer, reported = FakeProducer(), list[errors.PublishError | None]()
    with pytest.raises(errors.ConfigurationError):
        producer.publish("no topic", b"x")
    with pytest.raises(TypeError):
        producer.publish("orders", "text")  # type: ignore[arg-type]
    assert producer.published == []
    producer.error = errors.PublishUnknown("the connection broke")
    with pytest.raises(errors.PublishUnknown):
        producer.publish("orders", b"1")
    publication = producer.submit("orders", [b"2"], on_settled=lambda p: reported.append(p.error))
    assert reported == [publication.error] == [producer.error]
    producer.error = None
    producer.publish("orders", b"3")
    assert producer.published == [Published("orders", b"3")]


async def test_the_fake_asyncio_producer_behaves_the_same() -> None:
    async with AsyncFakeProducer() as producer:
        await asyncio.gather(*(producer.publish("orders", b"%d" % n) for n in range(3)))
        producer.error = errors.PublishNotSent("nsqd is away")
        with pytest.raises(errors.PublishNotSent):
            await producer.publish_many("orders", [b"x", b"y"])
    assert producer.published == [Published("orders", b"%d" % n) for n in range(3)]


@pytest.fixture
def project(pytester: pytest.Pytester, monkeypatch: pytest.MonkeyPatch) -> pytest.Pytester:
    """A project without other plugins."""
    monkeypatch.setenv("PYTEST_DISABLE_PLUGIN_AUTOLOAD", "1")
    monkeypatch.setenv("PYTEST_ADDOPTS", "-p nsqtools.testing.pytest_plugin -W error")
    return pytester


def test_servers_last_for_a_run_and_topics_for_a_test(project: pytest.Pytester) -> None:
    project.makepyfile(
        conftest="""
            import pytest

            @pytest.fixture(scope="session")
            def nsqd_options():
                return {"max_msg_size": 10}
            """,
        test_it="""
            import json, pytest, urllib.request
            from nsqtools import Consumer, Producer, PublishRejected

            seen = []

            def passes_a_message(nsqd, topic, **addresses):
                with Producer(nsqd.tcp_address) as producer:
                    producer.publish(topic, b"hello")
                with Consumer(topic, "check", **addresses) as consumer:
                    message = next(iter(consumer))
                    message.finish()
                    assert message.body == b"hello"

            def test_flags(nsqd, nsq_topic):
                with Producer(nsqd.tcp_address) as producer, pytest.raises(PublishRejected):
                    producer.publish(nsq_topic, b"eleven byte")

            def test_direct(nsqd, nsq_topic):
                seen.append((nsqd.tcp_address, nsq_topic))
                passes_a_message(nsqd, nsq_topic, nsqd_tcp_addresses=nsqd.tcp_address)

            def test_found_through_nsqlookupd(nsqd, nsqlookupd, nsq_topic):
                seen.append((nsqd.tcp_address, nsq_topic))
                found = {"lookupd_http_addresses": nsqlookupd.http_address}
                passes_a_message(nsqd, nsq_topic, **found)

            def test_afterwards(nsqd):
                (first, topic1), (second, topic2) = seen
                assert first == second == nsqd.tcp_address
                assert topic1 != topic2
                stats = urllib.request.urlopen(f"http://{nsqd.http_address}/stats?format=json")
                assert json.load(stats)["topics"] == []

            def test_that_deletes_its_topic(nsqd, nsq_topic):
                url = f"http://{nsqd.http_address}/topic/delete?topic={nsq_topic}"
                urllib.request.urlopen(urllib.request.Request(url, method="POST"))
            """,
    )
    project.runpytest_subprocess(timeout=patience_s(30)).assert_outcomes(passed=5)


def test_the_plugin_without_fixtures_imports_little_of_the_package(
    project: pytest.Pytester,
) -> None:
    project.makepyfile(
        """
        import sys

        def test_it():
            loaded = {name for name in sys.modules if name.startswith("nsqtools")}
            ours = {"", ".errors", ".testing", ".testing.pytest_plugin"}
            assert loaded == {f"nsqtools{name}" for name in ours}
        """
    )
    project.runpytest_subprocess(timeout=patience_s(30)).assert_outcomes(passed=1)
