"""Outcomes are true, whatever nsqd does: confirmed is stored, not sent is not."""

import asyncio
import sys
import threading
import time
from collections.abc import Iterator
from concurrent.futures import FIRST_EXCEPTION, ThreadPoolExecutor, as_completed, wait
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any
from unittest.mock import Mock, patch

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from plugins.clients import OPTIONS, TOPIC, InBackground, Produce
from plugins.examples import examples
from plugins.scripted_nsqd import Connection, ScriptedNsqd
from plugins.servers import GoNsqd, MakeNsqd
from plugins.waiting import patience_s

from nsqtools import Producer, PublishError, PublishNotSent, PublishRejected, PublishUnknown, aio
from nsqtools.client import outcomes, producer_io
from nsqtools.client.connection_settings import ConnectionSettings
from nsqtools.client.publication import MAX_JOINED, Parts, PendingPublication, PublishQueue
from nsqtools.errors import ServerError
from nsqtools.forward.dispatcher import Dispatcher
from nsqtools.forward.nsq_sink import NsqSink, outcome_of
from nsqtools.forward.parcel import Counters, Fate, Parcel
from nsqtools.protocol.commands import mpub_size
from nsqtools.protocol.requests import BodiesReader
from nsqtools.publish import publisher as publishing
from nsqtools.publish.publisher import PublishBatch, Publisher, PublishOptions, PublishOutcome
from nsqtools.testing import fake_batch

# a later answer makes the outcome unknown, which is true
HASTY = replace(OPTIONS, publish_max_body_size=60, publish_timeout_s=0.3)

# -- a peer with all possible behavior of an nsqd and a network -----------------------------------


@dataclass(frozen=True)
class Step:
    """The fate of one publish: the number of stored messages, and the response.

    ``stored`` counts from the first message; ``reply`` None is no response. After any response
    except OK the connection is closed, or reset.
    """

    stored: int
    reply: str | None
    resets: bool = False


SILENT = st.builds(Step, st.integers(0, 6), st.none(), st.booleans())
FULL = "E_{0}_FAILED {0} failed write: no space left on device"
FAILED = st.builds(Step, st.integers(0, 2), st.just(FULL))
REFUSED = st.builds(Step, st.just(0), st.sampled_from(["E_BAD_MESSAGE no", "E_BAD_BODY no"]))
EXITING = st.just(Step(0, "E_{0}_FAILED {0} failed exiting"))
OK = st.just(Step(99, "OK"))
STEPS = st.lists(st.one_of(SILENT, FAILED, REFUSED, EXITING, OK), max_size=8)


def bodies_of(line: str, body: bytes) -> list[bytes]:
    if not line.startswith("MPUB"):
        return [body]
    reader = BodiesReader(1000, 10_000)
    reader.read(body, 0)
    return reader.bodies


class FickleNsqd:
    """Takes one step for each publish, then stores everything, or stops listening."""

    def __init__(self, peer: ScriptedNsqd, steps: list[Step], *, then_gone: bool) -> None:
        self.stored: set[bytes] = set()
        self.is_over = threading.Event()
        self._peer = peer
        self._steps = list(steps)
        self._then_gone = then_gone

    def run(self) -> None:
        while not self.is_over.is_set() and not (self._then_gone and not self._steps):
            try:
                connection = self._peer.accept(timeout_s=0.02)
            except AssertionError:
                continue
            try:
                connection.expect("IDENTIFY")
                connection.reply_identify()
                while self._publish(connection):
                    pass
            except (AssertionError, OSError):  # the client has closed it
                pass
        self._peer.stop_listening()

    def _publish(self, connection: Connection) -> bool:
        """Process a command; return whether the connection continues."""
        command = connection.take()
        name = command.line.split()[0]
        if "PUB" not in name:
            return True
        bodies = bodies_of(command.line, command.body)
        step = self._steps.pop(0) if self._steps else Step(99, "OK")
        # a single message is stored or refused, and nsqd reports it
        if name == "MPUB" or step.reply != FULL:
            self.stored.update(bodies[: step.stored])
        if step.reply == "OK":
            connection.ok()
            return bool(self._steps) or not self._then_gone
        if step.reply is not None:
            connection.error(step.reply.format(name))
        (connection.reset if step.resets else connection.close)()
        return False


@contextmanager
def fickle(steps: list[Step], *, then_gone: bool) -> Iterator[tuple[str, set[bytes]]]:
    quick = patch.multiple(producer_io, RECONNECT_BASE_S=0.005, RECONNECT_MAX_S=0.02)
    with ScriptedNsqd() as peer, quick:
        nsqd = FickleNsqd(peer, steps, then_gone=then_gone)
        with ThreadPoolExecutor() as threads:
            threads.submit(nsqd.run)
            try:
                yield peer.address, nsqd.stored
            finally:
                nsqd.is_over.set()


def assert_true(stored: set[bytes], body: bytes, error: PublishError | None) -> None:
    if error is None:
        assert body in stored, "confirmed, and not there"
    elif not isinstance(error, PublishUnknown):
        assert body not in stored, f"there, and called {error!r}"


@settings(max_examples=examples(25))
@given(
    steps=STEPS,
    then_gone=st.booleans(),
    retry_unknown=st.booleans(),
    retry_timeout_s=st.sampled_from([0.0, 0.2]),
    linger_s=st.sampled_from([0.0, 0.01]),
    timeout_s=st.sampled_from([None, 0.1]),
)
def test_outcomes_of_a_producer_are_true(
    steps: list[Step], then_gone: bool, timeout_s: float | None, **policy: Any
) -> None:
    with fickle(steps, then_gone=then_gone) as (address, stored):
        with Producer(address, HASTY, **policy) as producer:
            submit = partial(producer.submit, TOPIC, timeout_s=timeout_s)
            single = [submit([b"single %d" % n]) for n in range(5)]
            many = [b"many %d" % n for n in range(8)]
            failure = None
            try:
                producer.publish_many(TOPIC, many, timeout_s=timeout_s)
            except PublishError as exc:
                failure = exc
        for publication in single:
            assert_true(stored, publication.bodies[0], publication.error)
        parts = failure.outcomes if failure is not None else [None] * len(many)
        for body, error in zip(many, parts, strict=True):
            assert_true(stored, body, error)
            assert_true(stored, body, failure)  # the class of the error is true for each message


@settings(max_examples=examples(25))
@given(steps=STEPS, then_gone=st.booleans(), retry_unknown=st.booleans())
def test_outcomes_of_jobs_are_true(steps: list[Step], then_gone: bool, retry_unknown: bool) -> None:
    ended: list[PublishBatch] = []
    with fickle(steps, then_gone=then_gone) as (address, stored):
        options = PublishOptions(retry_timeout_s=0.1, retry_unknown=retry_unknown)
        publisher = Publisher([address], HASTY, options)
        for number in range(5):
            if not publisher.has_given_up:
                publisher.publish(TOPIC, [b"%d.%d" % (number, n) for n in range(5)], ended.append)
        publisher.finish()
        counts = publisher.counts
        assert counts.confirmed + counts.unconfirmed == sum(len(batch.bodies) for batch in ended)
        for batch in ended:
            failures = batch.failures()
            for place, body in enumerate(batch.bodies):
                match publishing.classify_error(failures.get(place)):
                    case PublishOutcome.CONFIRMED:
                        assert body in stored, "confirmed, and not there"
                    case PublishOutcome.UNSENT | PublishOutcome.REJECTED as outcome:
                        assert body not in stored, f"there, and called {outcome.name}"


@settings(max_examples=examples(15))
@given(
    steps=STEPS,
    then_gone=st.booleans(),
    retry_unknown=st.booleans(),
    linger_s=st.sampled_from([0.0, 0.01]),
)
def test_outcomes_in_asyncio_are_true(steps: list[Step], then_gone: bool, **policy: Any) -> None:
    many = [b"many %d" % n for n in range(8)]

    async def publish(address: str) -> list[PublishError | BaseException | None]:
        async with aio.Producer(address, HASTY, retry_timeout_s=0.1, **policy) as producer:
            single = (producer.publish(TOPIC, b"single %d" % n) for n in range(5))
            together = producer.publish_many(TOPIC, many)
            return await asyncio.gather(*single, together, return_exceptions=True)

    with fickle(steps, then_gone=then_gone) as (address, stored):
        *single, failure = asyncio.run(publish(address))
        for number, error in enumerate(single):
            assert error is None or isinstance(error, PublishError)
            assert_true(stored, b"single %d" % number, error)
        assert failure is None or isinstance(failure, PublishError)
        parts = failure.outcomes if failure is not None else [None] * len(many)
        for body, error in zip(many, parts, strict=True):
            assert_true(stored, body, error)


@settings(max_examples=examples(15))
@given(steps=STEPS, then_gone=st.booleans())
def test_a_forwarder_finishes_only_stored_messages(steps: list[Step], then_gone: bool) -> None:
    with fickle(steps, then_gone=then_gone) as (address, stored):
        options = {"publish_timeout": "0.3s", "publish_max_body_size": "60"}
        sink = NsqSink(ConnectionSettings((address,), options=options))
        ends: Any = {"dead_letters": None, "on_circuit": lambda is_open: None}
        dispatcher = Dispatcher(sink, Counters(), max_attempts=1, **ends)
        bodies = [b"%d" % number for number in range(12)]
        batch: Any = fake_batch(bodies, topic=TOPIC, msg_timeout_s=1e9)
        dispatcher.send(Parcel(batch, bodies, TOPIC, 0.0))
        until = time.monotonic() + (0.3 if then_gone else patience_s(20))
        now = 0.0
        while not dispatcher.is_idle and time.monotonic() < until:
            dispatcher.changed.wait(0.02)
            now += 0.2
            dispatcher.process_outcomes(now)
            dispatcher.tick(now)
        dispatcher.drain(0.1, lambda: None)
    assert stored.issuperset(message.body for message in batch if message.answers == ["finish"])
    assert all(message.is_answered for message in batch)


# -- messages that may be stored ------------------------------------------------------------------


@pytest.mark.parametrize("ends_by", ["retry_timeout_s", "timeout_s", "stop"])
def test_a_publish_that_may_be_stored_never_ends_as_not_sent(
    scripted_nsqd: ScriptedNsqd, produce: Produce, ends_by: str
) -> None:
    """The answer is lost, and then all connects fail until the timeout or a stop."""
    retry_timeout_s = 0.3 if ends_by == "retry_timeout_s" else 60
    policy = {"retry_unknown": True, "retry_timeout_s": retry_timeout_s}
    producer = produce(scripted_nsqd.address, more=policy)
    timeout_s = patience_s(0.3) if ends_by == "timeout_s" else None
    began = time.monotonic()
    submitted = producer.submit(TOPIC, [b"pay"], timeout_s=timeout_s)
    connection = scripted_nsqd.identified(f"PUB {TOPIC}")
    scripted_nsqd.stop_listening()
    connection.close()
    producer.stop(0.3 if ends_by == "stop" else patience_s(10))
    with pytest.raises(PublishUnknown, match="an earlier attempt may have been stored"):
        submitted.wait()
    assert time.monotonic() - began >= 0.3


def test_a_partly_stored_batch_is_unknown_and_not_split(
    go_nsqd: MakeNsqd, small_disk: Path, produce: Produce
) -> None:
    nsqd = go_nsqd("-mem-queue-size=0", f"-data-path={small_disk}")
    producer = produce(nsqd.tcp_address)
    with pytest.raises(PublishUnknown, match="E_MPUB_FAILED"):
        producer.publish_many(TOPIC, [b"x" * 1000] * 100)
    assert 0 < nsqd.depth(TOPIC) < 100
    depth = nsqd.depth(TOPIC)
    with pytest.raises(PublishRejected, match="E_PUB_FAILED"):  # a single message is stored, or not
        producer.publish(TOPIC, b"x" * 10_000)
    assert nsqd.depth(TOPIC) == depth


def test_a_partly_stored_batch_is_retried_one_by_one(
    scripted_nsqd: ScriptedNsqd, produce: Produce
) -> None:
    """Otherwise each retry would store its first messages again while the disk has little room."""
    producer = produce(scripted_nsqd.address, more={"retry_timeout_s": 600, "retry_unknown": True})
    submitted = producer.submit(TOPIC, [b"a", b"b", b"c"])
    connection = scripted_nsqd.identified(f"MPUB {TOPIC}")
    connection.error("E_MPUB_FAILED MPUB failed: no space left on device")
    connection.close()
    connection = scripted_nsqd.identified()
    for body in (b"a", b"b", b"c"):
        assert connection.expect(f"PUB {TOPIC}").body == body
        connection.ok()
    submitted.wait(patience_s(10))
    assert producer.repeated == 3


def test_meaning_of_the_error_codes_of_nsqd() -> None:
    def error(code: str, count: int, text: str = "") -> PublishError:
        return outcomes.rejected(ServerError(code, text, fatal=True), count)

    assert type(error("E_BAD_MESSAGE", 9)) is type(error("E_BAD_TOPIC", 1)) is PublishRejected
    assert type(error("E_PUB_FAILED", 1)) is type(error("E_DPUB_FAILED", 1)) is PublishRejected
    assert type(error("E_MPUB_FAILED", 9, "MPUB failed exiting")) is PublishRejected
    assert type(error("E_MPUB_FAILED", 9, "MPUB failed disk")) is PublishUnknown
    assert type(error("E_NEW", 1)) is PublishUnknown
    assert outcome_of(error("E_MPUB_FAILED", 9)).fate is Fate.UNKNOWN
    full, large = outcome_of(error("E_PUB_FAILED", 1)), outcome_of(error("E_BAD_MESSAGE", 9))
    assert (full.fate, full.may_split) == (Fate.UNREACHABLE, False)
    assert (large.fate, large.may_split) == (Fate.REFUSED, True)


def test_the_error_of_a_split_batch_has_the_outcome_of_each_message(
    scripted_nsqd: ScriptedNsqd, in_background: InBackground, produce: Produce
) -> None:
    producer = produce(scripted_nsqd.address, publish_max_body_size=60, max_outstanding=1)
    bodies = [b"body %d" % n for n in range(15)]  # three parts of five
    done = in_background(producer.publish_many, TOPIC, bodies)
    connection = scripted_nsqd.identified(f"MPUB {TOPIC}")
    connection.ok()
    connection.expect(f"MPUB {TOPIC}")
    scripted_nsqd.stop_listening()
    connection.close()
    error = done.exception(patience_s(10))
    assert isinstance(error, PublishUnknown)
    kinds = [type(outcome) for outcome in error.outcomes]
    assert kinds == [type(None)] * 5 + [PublishUnknown] * 5 + [PublishNotSent] * 5
    assert str(error).startswith("of 15 messages 5 confirmed, 5 unknown, 5 not sent: ")


# -- publications: futures, and joining of pending publications -----------------------------------


LINGER_S = 2.0
ROOM = 100


def publication(*bodies: bytes, at: float = 10, defer_s: float | None = None) -> PendingPublication:
    return PendingPublication("clicks", bodies, sum(map(len, bodies)), at, defer_s)


def queue_of(*publications: PendingPublication, linger_s: float = LINGER_S) -> PublishQueue:
    queue = PublishQueue(linger_s=linger_s, max_body_size=mpub_size(()) + ROOM)
    for item in publications:
        queue.add(item)
    return queue


def test_only_joinable_publications_linger() -> None:
    one, soon, deferred = publication(b"x"), publication(b"x"), publication(b"x", defer_s=0.0)
    several, alone = publication(b"x", b"y"), publication(b"x")
    alone.is_alone = True
    tries = [(one, LINGER_S), (soon, 0.0), *((m, LINGER_S) for m in (several, deferred, alone))]
    for made, linger_s in tries:
        queue = queue_of(made, linger_s=linger_s)
        assert queue
        waits = queue.joinable.get("clicks", []), list(queue.single), queue.take_single()
        assert waits == (([made], [], None) if made is one else ([], [made], made))
    # publications of one topic, in their order
    assert list(queue_of(one, several).single) == [one, several]
    queue = PublishQueue(linger_s=LINGER_S, max_body_size=1 << 20)
    for number in range(MAX_JOINED - 1):
        queue.add(publication(b"x", at=10 + number))
    assert [queue.remaining_linger_s("clicks", now) for now in (10, 11.5, 12, 13)] == [2, 0.5, 0, 0]
    for _ in range(2):
        queue.add(publication(b"x"))
    assert queue.remaining_linger_s("clicks", 11.5) == 0.0  # the group is full
    assert list(map(len, queue.take_groups("clicks"))) == [MAX_JOINED, 1]


def test_settled_publications_leave_the_queue() -> None:
    settled = [publication(b"x"), publication(b"x", b"y")]
    for item in settled:
        item.settle(None)
    assert not queue_of(*settled)
    late, joined, last = publication(b"a", b"b"), publication(b"c"), publication(b"d", b"e")
    queue = queue_of(late, last, joined)
    late.settle(None)
    leaves, stays = Mock(spec=["add_result"]), Mock(spec=["add_result"])
    leaves.add_result.side_effect = lambda publication: publication._waiters.remove(leaves)
    joined._waiters += [leaves, stays]  # `concurrent.futures.wait` takes itself out
    joined.settle(None)
    stays.add_result.assert_called_once()
    assert list(queue.take_groups("clicks")) == []
    assert queue.take_single() is last
    assert not queue
    batch = publication(b"0", b"1")
    batch.may_be_stored = True
    assert [half.may_be_stored for half in Parts(batch).split(batch, 1)] == [True, True]


@pytest.mark.parametrize(
    ("sizes", "groups"),
    [
        ([46, 46], [2]),  # they fill a body, with four bytes for each length
        ([46, 47], [1, 1]),
        ([200, 1, 1], [1, 2]),  # too large for any body, so nsqd must refuse it alone
        ([1] * 45, [20, 20, 5]),
    ],
)
def test_groups_are_as_large_as_a_body_allows(sizes: list[int], groups: list[int]) -> None:
    publications = [publication(b"x" * size) for size in sizes]
    joined = list(queue_of(*publications).take_groups("clicks"))
    assert list(map(len, joined)) == groups
    assert [item for group in joined for item in group] == publications


def test_concurrent_futures_waits_for_publications(nsqd: GoNsqd, produce: Produce) -> None:
    producer = produce(nsqd.tcp_address)
    publications = [producer.submit(TOPIC, [b"%d" % n]) for n in range(200)]
    bad = producer.submit("bad", [b"x", b"y"])
    done, not_done = wait(publications, patience_s(10))
    assert (done, not_done) == (set(publications), set())
    assert set(as_completed(publications, patience_s(10))) == done
    assert [item.result() for item in publications] == [None] * 200
    assert bad.exception(patience_s(10)) is None
    assert (bad.done(), bad.cancel(), bad.cancelled(), bad.running()) == (True, False, False, False)
    assert nsqd.depth(TOPIC) == 200


def test_waiting_ends_with_the_first_failure(scripted_nsqd: ScriptedNsqd, produce: Produce) -> None:
    producer = produce(scripted_nsqd.address, more={"on_published": sys.exit})
    first, second = producer.submit(TOPIC, [b"1"]), producer.submit(TOPIC, [b"2"])
    connection = scripted_nsqd.identified(f"PUB {TOPIC}")
    assert wait([first, second], 0.05).done == set()
    assert (first.running(), first.error) == (True, None)
    with pytest.raises(TimeoutError, match="not settled yet"):
        first.result(0.01)
    settled: list[object] = []
    ended = threading.Event()
    first.add_done_callback(settled.append)
    first.add_done_callback(lambda publication: sys.exit(1))  # affects no other callback
    first.add_done_callback(lambda publication: ended.set())
    connection.error("E_BAD_MESSAGE no")
    done, not_done = wait([first, second], patience_s(10), FIRST_EXCEPTION)
    assert (done, not_done) == ({first}, {second})
    assert isinstance(first.exception(), PublishRejected)
    with pytest.raises(PublishRejected):
        first.result()
    assert ended.wait(patience_s(10))
    first.add_done_callback(settled.append)  # called immediately
    assert settled == [first, first]


async def test_asyncio_can_await_a_publication(nsqd: GoNsqd, produce: Produce) -> None:
    producer = produce(nsqd.tcp_address)
    assert await producer.submit(TOPIC, [b"x"]) is None
    await asyncio.gather(*(producer.submit(TOPIC, [b"y"]) for _ in range(10)))
    with pytest.raises(PublishNotSent):
        await produce("127.0.0.1:1").submit(TOPIC, [b"x"])
    assert nsqd.depth(TOPIC) == 11
