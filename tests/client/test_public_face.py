"""The public interface of consumers and producers besides messages, in threads and asyncio."""

import asyncio
import contextvars
import gc
import re
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Coroutine
from datetime import UTC, datetime, timedelta
from typing import Any
from unittest.mock import Mock

import pytest
from plugins.clients import CHANNEL, TOPIC, Consume, Produce, fill, take
from plugins.servers import AnyNsqd, GoNsqd
from plugins.waiting import patience_s, wait_until

from nsqtools import ClientOptions, Consumer, Producer, PublishInvalid, aio, errors, forward_to
from nsqtools.testing import FakeProducer, fake_batch, fake_message

NSQD = "127.0.0.1:1"


def of_consumer(**more: Any) -> Any:
    return Consumer(**{"topic": "t", "channel": "c", "nsqd_tcp_addresses": NSQD} | more)


def run(**more: Any) -> None:
    of_consumer().run(**{"handler": print} | more)


def publish(**more: Any) -> None:
    FakeProducer().publish(**{"topic": "t", "body": b"x"} | more)


def submit(**more: Any) -> None:
    FakeProducer().submit(**{"topic": "t", "bodies": [b"x"]} | more)


def forward(**more: Any) -> None:
    forward_to(**{"sink": Mock(), "topic": "t", "channel": "c", "nsqd_tcp_addresses": NSQD} | more)


WRONG: list[tuple[Callable[..., object], dict[str, Any]]] = [
    *((of_consumer, {name: 5}) for name in ("channel", "options", "address_map", "dead_letter")),
    *((of_consumer, {name: 5}) for name in ("on_error", "on_connected", "on_lost", "on_giving_up")),
    *((of_consumer, {"topic": topic}) for topic in (b"t", None, 5, [b"t"])),
    *((of_consumer, {"nsqd_tcp_addresses": wrong}) for wrong in (5, None, ("h", 4150))),
    (of_consumer, {"lookupd_http_addresses": ("h", 4161)}),
    (of_consumer, {"options": {"max_in_flight": 5}}),
    (Producer, {"nsqd_tcp_addresses": ("h", 4150)}),
    *((Producer, {name: "5ms"}) for name in ("linger_s", "retry_timeout_s", "retry_unknown")),
    *((Producer, {name: 5}) for name in ("options", "on_published", "on_connected", "on_lost")),
    (aio.Producer, {"options": {"max_outstanding": 5}}),
    (run, {"signals": "TERM"}),
    (run, {"on_handled": 5}),
    (run, {"workers": "5"}),
    (of_consumer().stop, {"timeout_s": "5"}),
    (of_consumer().next_batch, {"timeout_s": "5"}),
    (of_consumer().batches, {"timeout_s": "5"}),
    (of_consumer().batches, {"size": 5, "within_s": "1"}),
    (of_consumer().set_max_in_flight, {"count": "5"}),
    (fake_message().requeue, {"delay_s": "5"}),
    (publish, {"topic": 5}),
    (publish, {"topic": ["t"]}),
    (publish, {"timeout_s": "5"}),
    (publish, {"defer_s": "5"}),
    (publish, {"at": "tomorrow"}),
    (submit, {"on_settled": 5}),
    (FakeProducer().flush, {"timeout_s": "5"}),
    (forward, {"sink": 5}),
    *((forward, {name: 5}) for name in ("topic", "channel", "options", "nsqd_tcp_addresses")),
    *((forward, {name: "5"}) for name in ("max_attempts", "exit_idle_s")),
    (fake_message, {"body": "text"}),
    (fake_batch, {"bodies": ["text"]}),
    (fake_batch, {"bodies": b"x"}),
]


def test_a_wrong_type_is_reported_with_the_parameter_in_one_line() -> None:
    for call, arguments in WRONG:
        name = list(arguments)[-1]
        with pytest.raises(errors.NsqError) as caught:
            call(**arguments)
        assert re.search(rf"\b{name}\b.* not ", str(caught.value)), (call, arguments)


current = contextvars.ContextVar("current", default="nothing")


def test_handlers_run_in_a_copy_of_the_context_of_their_caller(
    nsqd: GoNsqd, consume: Consume
) -> None:
    fill(nsqd, 60)
    consumer = consume(nsqd.tcp_address)
    values_by_thread: dict[str, list[str]] = {}

    def handle(message: object) -> None:
        values_by_thread.setdefault(threading.current_thread().name, []).append(current.get())
        current.set("a handler's")
        if sum(map(len, values_by_thread.values())) == 60:
            consumer.begin_stop()
        time.sleep(0.01)

    current.set("the caller's")
    consumer.run(handle, workers=3, signals=False)
    assert len(values_by_thread) == 3
    for values in values_by_thread.values():
        assert values == ["the caller's"] + (len(values) - 1) * ["a handler's"]
    assert current.get() == "the caller's"


def collect_after(main: Coroutine[Any, Any, None]) -> None:
    asyncio.run(main)
    gc.collect()


@pytest.mark.parametrize("face", [Consumer, aio.Consumer], ids=["threads", "asyncio"])
def test_a_dropped_consumer_warns_stops_and_requeues_its_messages(nsqd: GoNsqd, face: Any) -> None:
    fill(nsqd, 20)

    async def main() -> None:
        consumer = face(TOPIC, CHANNEL, nsqd_tcp_addresses=nsqd.tcp_address)
        for called in (consumer.start(), consumer.next_batch()):
            if face is aio.Consumer:
                await called

    with pytest.warns(ResourceWarning, match=f"unclosed .*Consumer of {TOPIC}/{CHANNEL}"):
        collect_after(main())

    def stats() -> Any:
        return nsqd.channel_stats(TOPIC, CHANNEL)

    wait_until(
        lambda: (stats()["client_count"], stats()["depth"]) == (0, 20), what="it has stopped"
    )


@pytest.mark.parametrize("face", [Producer, aio.Producer], ids=["threads", "asyncio"])
def test_a_dropped_producer_warns_and_publishes_submitted_messages(nsqd: GoNsqd, face: Any) -> None:
    nsqd.create_topic(TOPIC)

    async def main() -> None:
        producer = face(nsqd.tcp_address)
        for number in range(20):
            submitted = producer.submit(TOPIC, [b"%d" % number])
            if face is aio.Producer:  # the producer lives until its publications have settled
                await (await submitted)

    with pytest.warns(ResourceWarning, match="unclosed .*Producer to"):
        collect_after(main())
    wait_until(lambda: nsqd.depth(TOPIC) == 20, what="everything is published")


def test_connections_are_reported_and_errors_of_callbacks_are_logged(
    nsqd: GoNsqd, consume: Consume, produce: Produce, caplog: pytest.LogCaptureFixture
) -> None:
    events: list[tuple[str, str, str]] = []

    def on_connected(name: str) -> Callable[[str], None]:
        return lambda nsqd: events.append((name, "connected", nsqd))

    def on_lost(name: str) -> Callable[[str, errors.NsqError], None]:
        def lost(nsqd: str, error: errors.NsqError) -> None:
            events.append((name, "lost", nsqd))
            assert isinstance(error, errors.NsqError)
            sys.exit("the callback's")

        return lost

    def callbacks(name: str) -> dict[str, Any]:
        return {"on_connected": on_connected(name), "on_lost": on_lost(name)}

    consumer = consume(nsqd.tcp_address, more=callbacks("consumer"), fail_fast=True)
    producer = produce(nsqd.tcp_address, more=callbacks("producer"))
    producer.publish("other", b"x")
    nsqd.stop()
    nsqd.start()
    names = ("consumer", "producer")
    lost = {(name, "lost", nsqd.tcp_address) for name in names}
    wait_until(lambda: lost <= {*events}, what="both were lost")
    wait_until(lambda: consumer.connections, what="it is connected again")
    producer.publish("other", b"x")
    consumer.stop()
    producer.stop()
    for name in names:
        kinds = [kind for event, kind, _ in events if event == name]
        assert kinds == ["connected", "lost", "connected"]  # a stop is not a loss
    assert caplog.text.count("on_lost failed") == 2


async def test_a_paused_consumer_gets_no_message_until_it_resumes(
    nsqd: GoNsqd, consume: Consume
) -> None:
    """Threads and asyncio share this code."""
    consumer = consume(nsqd.tcp_address, fail_fast=True, max_in_flight=7)
    ready = lambda: nsqd.channel_stats(TOPIC, CHANNEL)["clients"][0]["ready_count"]  # noqa: E731
    consumer.pause()
    wait_until(lambda: ready() == 0, what="RDY 0")
    consumer.set_max_in_flight(5)  # applies after the resume
    nsqd.publish(TOPIC, b"x")
    assert consumer.next_batch(timeout_s=0.2) is None
    consumer.resume()
    [message] = take(consumer, 1)
    message.finish()
    wait_until(lambda: ready() == 5, what="RDY as before")


async def test_asyncio_has_stop_next_batch_and_submit(nsqd: GoNsqd) -> None:
    async with aio.Producer(nsqd.tcp_address, options=ClientOptions(max_outstanding=1)) as producer:
        submits = [producer.submit(TOPIC, [b"%d" % number]) for number in range(10)]
        for publication in await asyncio.gather(*submits):
            await publication
        await producer.publish(TOPIC, b"later", defer_s=3600)
    consumer = aio.Consumer(TOPIC, CHANNEL, nsqd_tcp_addresses=nsqd.tcp_address)
    bodies: list[bytes] = []
    while len(bodies) < 10:
        batch = await consumer.next_batch(timeout_s=patience_s(10))
        assert batch is not None
        bodies += [message.body for message in batch]
        batch.finish()
    assert sorted(bodies) == [b"%d" % number for number in range(10)]
    assert await consumer.next_batch(timeout_s=0.1) is None
    assert await consumer.stop()
    assert await consumer.next_batch() is None
    stats = nsqd.channel_stats(TOPIC, CHANNEL)
    assert (stats["client_count"], stats["depth"], stats["deferred_count"]) == (0, 0, 1)


@pytest.mark.parametrize("way", ["run", "for", "batches"])
async def test_a_stop_in_an_asyncio_handler_does_not_wait_for_itself(
    nsqd: GoNsqd, way: str
) -> None:
    fill(nsqd, 1)
    consumer = aio.Consumer(TOPIC, CHANNEL, nsqd_tcp_addresses=nsqd.tcp_address)
    stopped: list[bool] = []

    async def handle(message: object) -> None:
        stopped.append(await consumer.stop())

    if way == "run":
        await consumer.run(handle, signals=False)
    elif way == "for":
        async for message in consumer:
            await handle(message)
            message.finish()
    else:
        async for batch in consumer.batches(1):
            await handle(batch)
            batch.finish()
    assert stopped == [False]
    assert await consumer.stop()
    assert nsqd.depth(TOPIC, CHANNEL) == 0


def test_a_delay_and_a_time_exclude_each_other() -> None:
    at = datetime.now(UTC) + timedelta(hours=1)
    with pytest.raises(PublishInvalid, match="at and defer_s exclude each other"):
        publish(at=at, defer_s=5)


def test_forward_to_accepts_strings_with_a_warning() -> None:
    with pytest.warns(DeprecationWarning, match="forward_to takes ClientOptions"):
        forward(options={"max_in_flight": "5"})


NO_POSIX = "import os; del os.register_at_fork"
EVENTLET = """
import sys, types
sys.modules["eventlet.patcher"] = types.SimpleNamespace(is_monkey_patched=lambda name: True)
"""


@pytest.mark.parametrize(
    ("platform", "program", "error"),
    [
        (NO_POSIX, "from nsqtools import Consumer", "nsqtools needs a POSIX system"),
        (NO_POSIX, "import nsqtools.aio", "nsqtools needs a POSIX system"),
        (
            EVENTLET,
            "from nsqtools import Producer; Producer('127.0.0.1:1').publish('t', b'x')",
            "does not work on sockets that eventlet has patched",
        ),
    ],
    ids=["threads on Windows", "asyncio on Windows", "eventlet"],
)
def test_an_unsupported_platform_is_reported_by_one_error(
    platform: str, program: str, error: str
) -> None:
    command = [sys.executable, "-c", f"{platform}\n{program}"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=patience_s(20))
    assert error in [*filter(None, done.stderr.splitlines())][-1 if platform == NO_POSIX else -2]


@pytest.mark.parametrize("way", ["run", "batches", "asyncio", "asyncio batches"])
async def test_a_consumer_delivers_no_more_than_max_rate(embedded_nsqd: AnyNsqd, way: str) -> None:
    nsqd = embedded_nsqd()
    fill(nsqd, 30)
    face: Any = aio.Consumer if "asyncio" in way else Consumer
    consumer = face(TOPIC, CHANNEL, nsqd_tcp_addresses=nsqd.tcp_address, max_rate=50)
    times: list[float] = []

    def handle(message: object) -> None:
        times.append(time.monotonic())
        if len(times) == 20:
            consumer.begin_stop()

    async def handle_in_task(message: object) -> None:
        handle(message)

    if way == "run":
        await asyncio.to_thread(consumer.run, handle, workers=3)
    elif way == "asyncio":
        await consumer.run(handle_in_task, signals=False)
    elif way == "batches":
        for batch in consumer.batches(timeout_s=5):
            [*map(handle, batch)]
            batch.finish()
        consumer.stop()
    else:
        async for batch in consumer.batches(5):
            [*map(handle, batch)]
            batch.finish()
        await consumer.stop()
    assert 20 <= len(times) < 30
    # 0.1 s of a stall may be caught up, and each worker has at most one message
    assert times[-1] - times[0] >= (len(times) - 1) / 50 - 0.2


@pytest.mark.parametrize("face", [Producer, aio.Producer], ids=["threads", "asyncio"])
async def test_a_producer_publishes_no_more_than_max_rate(
    embedded_nsqd: AnyNsqd, face: Any
) -> None:
    nsqd = embedded_nsqd()
    producer = face(nsqd.tcp_address, max_rate=50)
    began_at = time.monotonic()
    for number in range(11):
        published = producer.publish(TOPIC, b"%d" % number)
        if face is aio.Producer:
            await published
    submitted = producer.submit(TOPIC, [b"x"] * 100)  # uses the rate of the next two seconds
    if face is aio.Producer:
        await submitted
    assert time.monotonic() - began_at >= 11 / 50 - 0.1

    async def publish_late() -> None:
        late = producer.publish(TOPIC, b"late", timeout_s=0.1)
        if face is aio.Producer:
            await late

    with pytest.raises(errors.PublishNotSent, match="max_rate allows no message within 0"):
        await publish_late()
    stopped = producer.stop()
    assert (await stopped) if face is aio.Producer else stopped
    assert nsqd.depth(TOPIC) == 111
