"""A publication is a future; which of those that wait are joined, in which groups, for how long."""

from __future__ import annotations

import asyncio
import threading
from concurrent.futures import FIRST_EXCEPTION, as_completed, wait

import pytest
from plugins.clients import TOPIC, Produce
from plugins.daemons import GoNsqd
from plugins.scripted_nsqd import ScriptedNsqd
from plugins.waiting import patience_s

from nsqtools import PublishNotSent, PublishRejected
from nsqtools.client.publication import MAX_JOINED, Parts, PendingPublication, PublishQueue
from nsqtools.protocol.commands import mpub_size

LINGER_S = 2.0
ROOM = 100


def publication(
    *bodies: bytes, at: float = 10.0, defer_s: float | None = None
) -> PendingPublication:
    return PendingPublication("clicks", bodies, sum(map(len, bodies)), at, defer_s)


def alone(body: bytes) -> PendingPublication:
    made = publication(body)
    made.is_alone = True
    return made


def settled(*bodies: bytes) -> PendingPublication:
    made = publication(*bodies)
    made.settle(None)
    return made


def queue_of(*publications: PendingPublication, linger_s: float = LINGER_S) -> PublishQueue:
    queue = PublishQueue(linger_s=linger_s, max_body_size=mpub_size(()) + ROOM)
    for each in publications:
        queue.add(each)
    return queue


@pytest.mark.parametrize(
    ("made", "linger_s", "is_joined"),
    [
        (publication(b"x"), LINGER_S, True),
        (publication(b"x"), 0.0, False),
        (publication(b"x", b"y"), LINGER_S, False),
        (publication(b"x", defer_s=0.0), LINGER_S, False),
        (alone(b"x"), LINGER_S, False),
    ],
    ids=["one", "no linger", "several", "deferred", "alone"],
)
def test_only_what_may_be_joined_waits_for_others(
    made: PendingPublication, linger_s: float, is_joined: bool
) -> None:
    queue = queue_of(made, linger_s=linger_s)
    assert queue
    assert (list(queue.single), queue.gathered.get("clicks", [])) == (
        ([], [made]) if is_joined else ([made], [])
    )
    assert queue.take_single() is (None if is_joined else made)


def test_what_has_settled_goes_nowhere() -> None:
    assert not queue_of(settled(b"x"), settled(b"x", b"y"))
    late, joined, last = publication(b"a", b"b"), publication(b"c"), publication(b"d", b"e")
    queue = queue_of(late, joined, last)
    late.settle(None)
    joined.settle(None)
    assert list(queue.take_groups("clicks")) == []
    assert queue.take_single() is last
    assert not queue


@pytest.mark.parametrize(
    ("sizes", "groups"),
    [
        ([46, 46], [2]),  # with four bytes of length each, they fill a body
        ([46, 47], [1, 1]),
        ([200, 1, 1], [1, 2]),  # too large for any: nsqd is to say so, of it alone
        ([1] * 45, [20, 20, 5]),
    ],
)
def test_groups_are_as_large_as_a_body_allows(sizes: list[int], groups: list[int]) -> None:
    publications = [publication(b"x" * size) for size in sizes]
    taken = list(queue_of(*publications).take_groups("clicks"))
    assert list(map(len, taken)) == groups
    assert [each for group in taken for each in group] == publications


def test_groups_have_no_more_than_a_number_of_messages() -> None:
    queue = PublishQueue(linger_s=LINGER_S, max_body_size=1 << 20)
    for _ in range(MAX_JOINED - 1):
        queue.add(publication(b"x"))
    assert queue.lingers_for_s("clicks", 11.5) == 0.5
    for _ in range(2):
        queue.add(publication(b"x"))
    assert queue.lingers_for_s("clicks", 11.5) == 0.0  # there is no room for more
    assert list(map(len, queue.take_groups("clicks"))) == [MAX_JOINED, 1]


def test_the_first_of_a_topic_says_how_long_it_waits() -> None:
    queue = queue_of(publication(b"x", at=10), publication(b"y", at=11))
    assert [queue.lingers_for_s("clicks", now) for now in (10, 11.5, 12, 13)] == [2, 0.5, 0, 0]


# -- a future -------------------------------------------------------------------------------------


def test_what_waits_for_futures_waits_for_publications(nsqd: GoNsqd, produce: Produce) -> None:
    producer = produce(nsqd.tcp_address)
    sent = [producer.submit(TOPIC, [b"%d" % n]) for n in range(200)]
    bad = producer.submit("bad", [b"x", b"y"])
    done, not_done = wait(sent, patience_s(10))
    assert (done, not_done) == (set(sent), set())
    assert set(as_completed(sent, patience_s(10))) == done
    assert [each.result() for each in sent] == [None] * 200
    assert bad.exception(patience_s(10)) is None
    assert (bad.done(), bad.cancel(), bad.cancelled(), bad.running()) == (True, False, False, False)
    assert nsqd.depth(TOPIC) == 200


def test_waiting_ends_with_the_outcome_and_the_first_failure(
    scripted_nsqd: ScriptedNsqd, produce: Produce
) -> None:
    producer = produce(scripted_nsqd.address)
    first, second = producer.submit(TOPIC, [b"1"]), producer.submit(TOPIC, [b"2"])
    connection = scripted_nsqd.identified()
    connection.expect(f"PUB {TOPIC}")
    assert wait([first, second], 0.05).done == set()
    assert (first.running(), first.error) == (True, None)
    with pytest.raises(TimeoutError, match="not settled yet"):
        first.result(0.01)
    seen: list[object] = []
    ended = threading.Event()
    first.add_done_callback(seen.append)
    first.add_done_callback(lambda publication: 1 / 0)  # hurts no other
    first.add_done_callback(lambda publication: ended.set())
    connection.error("E_BAD_MESSAGE no")
    done, not_done = wait([first, second], patience_s(10), FIRST_EXCEPTION)
    assert (done, not_done) == ({first}, {second})
    assert isinstance(first.exception(), PublishRejected)
    with pytest.raises(PublishRejected):
        first.result()
    assert ended.wait(patience_s(10))
    first.add_done_callback(seen.append)  # at once
    assert seen == [first, first]


def test_asyncio_awaits_it(nsqd: GoNsqd, produce: Produce) -> None:
    async def publish() -> None:
        producer = produce(nsqd.tcp_address)
        assert await producer.submit(TOPIC, [b"x"]) is None  # type: ignore[func-returns-value]
        await asyncio.gather(*(producer.submit(TOPIC, [b"y"]) for _ in range(10)))
        with pytest.raises(PublishNotSent):
            await produce("127.0.0.1:1").submit(TOPIC, [b"x"])

    asyncio.run(publish())
    assert nsqd.depth(TOPIC) == 11


def test_what_may_be_stored_stays_so_in_both_halves() -> None:
    whole = publication(b"0", b"1")
    whole.may_be_stored = True
    assert [half.may_be_stored for half in Parts(whole).split(whole, 1)] == [True, True]
