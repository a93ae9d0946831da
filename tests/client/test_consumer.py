"""The public behavior of a consumer."""

import asyncio
import time
from collections import Counter
from collections.abc import AsyncIterator, Callable, Iterator
from concurrent.futures import Future
from dataclasses import asdict
from functools import partial
from typing import Any

import pytest
from plugins.archives import unfinished
from plugins.clients import CHANNEL, TOPIC, Consume, InBackground, Produce, fill, run_program, take
from plugins.scripted_nsqd import ScriptedNsqd
from plugins.servers import AnyNsqd, GoNsqd, MakeNsqd, Nsqd
from plugins.waiting import patience_s, wait_until

from nsqtools import ClientOptions, Consumer, ProducerHealth
from nsqtools.client import consumer_io
from nsqtools.client.backlog import Delivery
from nsqtools.client.consumer import COLLECT_CHECK_S
from nsqtools.client.handling import RequeueWithoutBackoff
from nsqtools.client.message import Message
from nsqtools.client.producer import Producer
from nsqtools.client.publication import Publication
from nsqtools.errors import ConfigurationError, ConnectionFailed


@pytest.mark.parametrize(
    "arguments",
    [
        *({"topic": topic} for topic in ("bad topic", [], ["a", "b!"])),
        {"channel": "bad\n"},
        {"nsqd_tcp_addresses": []},
        {"nsqd_tcp_addresses": ["http://localhost"]},
        {"nsqd_tcp_addresses": [], "lookupd_http_addresses": ["ftp://localhost"]},
        {"lookupd_http_addresses": ["localhost"], "address_map": {"a:1": "b:x"}},
        {"options": ClientOptions(heartbeat_interval_s=-1)},
        {"dead_letter": TOPIC},
    ],
    ids=str,
)
def test_invalid_arguments_of_a_consumer(arguments: dict[str, Any]) -> None:
    usable = {"topic": TOPIC, "channel": CHANNEL, "nsqd_tcp_addresses": ["localhost"]}
    with pytest.raises(ConfigurationError):
        Consumer(**(usable | arguments))
    assert Consumer(**usable | {"topic": ["a", "b", "a"]}).topics == ["a", "b"]


@pytest.mark.parametrize("host", ["nsqd..example", 64 * "n" + ".example"], ids=["dots", "long"])
def test_a_malformed_host_name_is_a_connection_error(consume: Consume, host: str) -> None:
    consumer = consume(f"{host}:4150", started=False)
    with pytest.raises(ConnectionFailed, match="not a host name"):
        consumer.start(fail_fast=True)


def test_invalid_batches_and_handlers(consume: Consume, in_background: InBackground) -> None:
    consumer = consume("127.0.0.1:1", started=False, max_in_flight=1000)
    for size, within_s in ((0, 1.0), (-1, 1.0), (1001, 1.0), (5, 0.0), (5, float("nan"))):
        with pytest.raises(ConfigurationError):
            consumer.batches(size=size, within_s=within_s)
    for delay_s in (-1, float("nan")):
        with pytest.raises(ConfigurationError, match="delay_s must be >= 0"):
            RequeueWithoutBackoff(delay_s)
    with pytest.raises(ConfigurationError, match="the handler is None"):
        consumer.run(None)  # as in run(handle())
    with pytest.raises(ConfigurationError, match="workers must be a whole number >= 1, not 0"):
        consumer.run(lambda message: None, workers=0)
    with pytest.raises(ConfigurationError, match="main thread"):
        in_background(consumer.run, lambda message: None, signals=True).result(patience_s(5))


def requeue_and_return_false(message: Message) -> bool:
    message.requeue(0, backoff=False)
    return False


def raising(error: Exception) -> Callable[[Message], object]:
    def handle(message: Message) -> object:
        raise error

    return handle


@pytest.mark.parametrize(
    ("handle", "error", "is_requeued"),
    [
        (lambda message: True, None, False),
        (lambda message: None, None, False),
        (lambda message: False, None, True),
        (requeue_and_return_false, None, True),
        (raising(LookupError()), LookupError, True),
        (raising(RequeueWithoutBackoff(0)), RequeueWithoutBackoff, True),
    ],
)
def test_the_outcome_of_a_handler_is_the_answer(
    nsqd: GoNsqd,
    consume: Consume,
    in_background: InBackground,
    handle: Callable[[Message], object],
    error: type[Exception] | None,
    is_requeued: bool,
) -> None:
    nsqd.create_channel(TOPIC, CHANNEL)
    nsqd.publish(TOPIC, b"x")
    errors: list[type[BaseException] | None] = []

    def on_handled(message: Message, seconds: float, exception: BaseException | None) -> None:
        assert message.is_answered
        assert 0 <= seconds < patience_s(5)
        errors.append(type(exception) if exception else None)
        raise ValueError("an error of the hook")

    def first_only(message: Message) -> object:
        return handle(message) if message.attempts == 1 else None

    consumer = consume(nsqd.tcp_address, default_requeue_delay_s=0.0, backoff_multiplier_s=0.01)
    in_background(consumer.run, first_only, on_handled=on_handled)
    wait_until(lambda: consumer.stats.finished == 1, what="the message")
    wait_until(lambda: errors == [error] + [None] * is_requeued, what="the hook")


def test_on_published_sees_publications_and_may_fail(nsqd: GoNsqd) -> None:
    published: list[tuple[str, object]] = []

    def on_published(publication: Publication) -> None:
        published.append((publication.topic, publication.error))
        raise ValueError("an error of the hook")

    with Producer(nsqd.tcp_address, on_published=on_published) as producer:
        for _ in range(2):
            producer.publish(TOPIC, b"x")
    assert published == [(TOPIC, None)] * 2


def test_messages_above_max_rdy_count_of_one_nsqd_come_from_others(
    go_nsqd: MakeNsqd, consume: Consume
) -> None:
    nsqds = [go_nsqd(*flags) for flags in (["-max-rdy-count=7"], [], [])]
    consumer = consume([nsqd.tcp_address for nsqd in nsqds], max_in_flight=50)
    wait_until(lambda: len(consumer.connections) == 3, what="all are connected")
    for nsqd in nsqds:
        fill(nsqd, 60)

    def in_flight() -> list[int]:
        return sorted(nsqd.channel_stats(TOPIC, CHANNEL)["in_flight_count"] for nsqd in nsqds)

    wait_until(lambda: in_flight() == [7, 21, 22], what="50 messages are in flight")


def test_is_starved_when_max_in_flight_is_unanswered(nsqd: GoNsqd, consume: Consume) -> None:
    nsqd.create_channel(TOPIC, CHANNEL)
    consumer = consume(nsqd.tcp_address, max_in_flight=4)
    assert not consumer.is_starved
    nsqd.publish(TOPIC, *[b"x"] * 10)
    wait_until(lambda: consumer.is_starved and consumer.stats.received == 4, what="starving")
    consumer.set_max_in_flight(0)
    for message in take(consumer, 4):
        message.finish()
    wait_until(lambda: not consumer.is_starved, what="room")
    with pytest.raises(ConfigurationError):
        consumer.set_max_in_flight(-1)


def test_single_answers_are_sent_immediately(
    nsqd: GoNsqd, consume: Consume, in_background: InBackground, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The test would take minutes if each answer waited for a second."""
    monkeypatch.setattr(consumer_io, "COLLECT_S", 1.0)
    fill(nsqd, 200)
    consumer = consume(nsqd.tcp_address, max_in_flight=1)
    finished = in_background(lambda: [take(consumer, 1)[0].finish() for _ in range(200)])
    assert sum(finished.result(patience_s(10))) == 200


def test_consumer_health(nsqd: GoNsqd, consume: Consume) -> None:
    consumer = consume(nsqd.tcp_address, default_requeue_delay_s=3600, backoff_multiplier_s=3600)
    wait_until(lambda: consumer.connections, what="the connection")
    quiet = {"connections": [nsqd.tcp_address], "in_flight": 0, "backoff_level": 0, "idle_s": None}
    assert asdict(consumer.health()) == {**quiet, "overdue": []}
    nsqd.publish(TOPIC, b"x")
    [message] = consumer.next_batch(patience_s(5)) or []
    health = consumer.health()
    assert health.in_flight == 1
    wait_until(lambda: (consumer.health().idle_s or 0) > health.idle_s, what="time to pass")
    message.requeue()
    wait_until(lambda: consumer.health().backoff_level == 1, what="backoff")
    assert consumer.health().in_flight == 0
    nsqd.stop()
    wait_until(lambda: not consumer.health().connections, what="the loss")


def test_producer_health(scripted_nsqd: ScriptedNsqd, dead_address: str, produce: Produce) -> None:
    # with a second address, a hanging nsqd is set aside
    producer = produce([scripted_nsqd.address, dead_address])
    assert producer.health() == ProducerHealth([], 0, 0.0, None)
    publications = [producer.submit(TOPIC, [b"x"]) for _ in range(2)]
    conn = scripted_nsqd.identified()
    wait_until(lambda: producer.health().oldest_s > 1.0, what="time to pass")
    assert "2 publishes outstanding" in repr(producer)
    assert producer.health().connections == [scripted_nsqd.address]
    assert producer.health().under_way == 2
    for publication in publications:
        conn.expect(f"PUB {TOPIC}")
        conn.ok()
        publication.wait(patience_s(5))
    wait_until(lambda: not producer.health().under_way, what="both outcomes")


# -- run: signals, refused handlers, automatic TOUCH, hooks ---------------------------------------


IDLE_WORKER = """
import os, signal, sys, threading
from nsqtools import Consumer
consumer = Consumer("clicks", "archive", nsqd_tcp_addresses=sys.argv[1])
# The kernel hands the signal to another thread: the main thread sleeps on, as it does when a signal
# comes in the moment before it falls asleep.
signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGTERM])
def stop():
    signal.pthread_sigmask(signal.SIG_UNBLOCK, [signal.SIGTERM])
    os.kill(os.getpid(), signal.SIGTERM)
threading.Timer(0.3, stop).start()
consumer.run(print, signals=True)
"""


def test_a_signal_that_does_not_wake_the_main_thread_stops_an_idle_worker(nsqd: GoNsqd) -> None:
    nsqd.create_channel(TOPIC, CHANNEL)
    run_program(IDLE_WORKER, nsqd.tcp_address)


async def handle_async(message: Message) -> None:
    await asyncio.sleep(0)


async def generate_async(message: Message) -> AsyncIterator[None]:
    yield


def generate(message: Message) -> Iterator[None]:
    yield


class Service:
    async def handle(self, message: Message) -> None: ...
    async def __call__(self, message: Message) -> None: ...


PARTIAL = [partial(handle_async), partial(partial(Service()))]


@pytest.mark.parametrize(
    "handler", [handle_async, generate_async, generate, Service().handle, Service(), *PARTIAL]
)
def test_async_handlers_are_refused(consume: Consume, handler: Callable[[Message], object]) -> None:
    consumer = consume("127.0.0.1:1", started=False)
    with pytest.raises(ConfigurationError, match=r"use nsqtools\.aio\.Consumer"):
        consumer.run(handler)
    assert not consumer._is_started


@pytest.mark.parametrize("workers", [1, 3])
@pytest.mark.parametrize("work", [handle_async, generate, generate_async, lambda message: Future()])
def test_a_handler_that_returns_pending_work_finishes_no_message(
    nsqd: GoNsqd, consume: Consume, workers: int, work: Callable[[Message], object]
) -> None:
    fill(nsqd, 20)
    consumer = consume(nsqd.tcp_address)
    with pytest.raises(ConfigurationError, match=r"use nsqtools\.aio\.Consumer"):
        consumer.run(lambda message: work(message), workers=workers)
    assert consumer.stop(timeout_s=patience_s(10))
    assert unfinished(nsqd, TOPIC, CHANNEL) == 20


def test_a_long_handler_keeps_its_message_with_auto_touch(
    embedded_nsqd: AnyNsqd, consume: Consume, in_background: InBackground
) -> None:
    """Use the embedded nsqd, which scans a new channel for timeouts immediately."""
    nsqd = embedded_nsqd("--msg-timeout=2s")
    fill(nsqd, 1)
    attempts: list[int] = []

    def handler(message: Message) -> None:
        attempts.append(message.attempts)
        if len(attempts) == 1:
            time.sleep(2.8)  # longer than msg_timeout, and less than twice as long

    consumer = consume(nsqd.tcp_address)
    in_background(consumer.run, handler, auto_touch=True)
    wait_until(lambda: consumer.stats.finished == 1, what="the FIN")
    assert nsqd.channel_stats(TOPIC, CHANNEL)["timeout_count"] == 0


# -- batches by size and time, as for bulk inserts ------------------------------------------------


LIMIT = ClientOptions(max_in_flight=1000, output_buffer_timeout_s=0.025)


def make_consumer(*servers: Nsqd) -> Consumer:
    addresses = [nsqd.tcp_address for nsqd in servers]
    return Consumer(TOPIC, CHANNEL, nsqd_tcp_addresses=addresses, options=LIMIT)


@pytest.mark.parametrize("msg_timeout", ["60s", "4s"])
def test_batches_have_the_requested_size(go_nsqd: MakeNsqd, msg_timeout: str) -> None:
    """Sizes are kept if a batch takes longer than `COLLECT_SHARE` of msg_timeout."""
    nsqd = go_nsqd(f"--msg-timeout={msg_timeout}")
    fill(nsqd, 1500)
    sizes = list[int]()
    with make_consumer(nsqd) as consumer:
        for batch in consumer.batches(size=500, within_s=3600):
            sizes.append(len(batch))
            time.sleep(0.6 if msg_timeout == "4s" else 0.0)
            assert batch.finish() == len(batch)
            if sum(sizes) >= 1500:
                break
        assert consumer.stats.late == consumer.stats.expired == 0
    # one second to collect
    assert sizes == [500] * 3 or (msg_timeout == "4s" and sum(sizes) == 1500)
    assert unfinished(nsqd, TOPIC, CHANNEL) == 0


@pytest.mark.parametrize("late", ["set_batch_size", "_hand_over"])
def test_a_late_batch_is_complete(nsqd: GoNsqd, monkeypatch: pytest.MonkeyPatch, late: str) -> None:
    """The I/O thread may learn its size late, or deliver counted messages late."""
    original = getattr(Delivery, late)

    def later(*arguments: Any) -> None:
        time.sleep(5 * COLLECT_CHECK_S)
        original(*arguments)

    monkeypatch.setattr(Delivery, late, later)
    fill(nsqd, 500)
    with make_consumer(nsqd) as consumer:
        wait_until(lambda: consumer.stats.received, what="the first, of a limit of one")
        batch = next(iter(consumer.batches(size=500, within_s=3600)))
        assert len(batch) == batch.finish() == 500


def test_a_batch_waits_for_connections_with_room(
    go_nsqd: MakeNsqd, in_background: InBackground
) -> None:
    full, late = go_nsqd(), go_nsqd()
    late.create_channel(TOPIC, CHANNEL)
    fill(full, 250)
    with make_consumer(full, late) as consumer:
        wait_until(lambda: len(consumer.connections) == 2, what="both connections")
        gathering = in_background(next, iter(consumer.batches(size=500, within_s=3600)))
        wait_until(lambda: consumer.stats.received == 250, what="the messages of one")
        time.sleep(5 * COLLECT_CHECK_S)
        late.publish(TOPIC, *[b"late"] * 250)
        assert gathering.result(patience_s(10)).finish() == 500


def test_a_batch_has_messages_of_several_nsqd(go_nsqd: MakeNsqd) -> None:
    """The limit grows until the shares of connections add up to the size: a third of 500 is 166."""
    servers = [go_nsqd(), go_nsqd(), go_nsqd()]
    for nsqd in servers:
        fill(nsqd, 300)
    with make_consumer(*servers) as consumer:
        wait_until(lambda: len(consumer.connections) == 3, what="all connections")
        batch = next(iter(consumer.batches(size=500, within_s=3600)))
        assert {message.nsqd for message in batch} == {nsqd.tcp_address for nsqd in servers}
        assert batch[0].requeue(0, backoff=False)
        assert (len(batch), batch.finish()) == (500, 499)
        wait_until(lambda: consumer.stats.finished == 499, what="the FINs")
    assert sum(unfinished(nsqd, TOPIC, CHANNEL) for nsqd in servers) == 900 - 499


def test_no_batch_waits_for_impossible_messages(nsqd: GoNsqd, in_background: InBackground) -> None:
    """Another thread has a batch, and no further messages may be in flight."""
    fill(nsqd, 2000)
    options = ClientOptions(max_in_flight=500, output_buffer_timeout_s=0.025)
    with Consumer(TOPIC, CHANNEL, nsqd_tcp_addresses=nsqd.tcp_address, options=options) as consumer:
        first = next(iter(consumer.batches(size=400, within_s=3600)))
        gathering = in_background(next, iter(consumer.batches(size=400, within_s=3600)))
        second = gathering.result(patience_s(10))
        assert (second.finish(), first.finish()) == (100, 400)


def test_a_drain_ends_with_a_partial_batch(nsqd: GoNsqd) -> None:
    fill(nsqd, 700)
    sizes = []
    with make_consumer(nsqd) as consumer:
        for batch in consumer.batches(size=500, within_s=3600):
            sizes.append(len(batch))
            batch.finish()
            wait_until(lambda: consumer.stats.received == 700, what="all messages")
            consumer.begin_stop(drain=True)
    assert sizes == [500, 200]
    assert unfinished(nsqd, TOPIC, CHANNEL) == 0


def test_a_batch_has_one_topic(nsqd: GoNsqd) -> None:
    topics = ["clicks", "orders"]
    for topic in topics:
        nsqd.create_channel(topic, CHANNEL)
        nsqd.publish(topic, *[topic.encode()] * 5)
    counts = Counter[str]()
    with Consumer(topics, CHANNEL, nsqd_tcp_addresses=nsqd.tcp_address, options=LIMIT) as consumer:
        for batch in consumer.batches(size=10, within_s=patience_s(0.2)):
            assert [message.body for message in batch] == [batch.topic.encode()] * len(batch)
            counts[batch.topic] += batch.finish()
            if counts.total() == 10:
                break
    assert counts == dict.fromkeys(topics, 5)
