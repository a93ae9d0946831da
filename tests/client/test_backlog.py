"""What waits for handlers: how it is announced, taken by parts, put back and withdrawn."""

from __future__ import annotations

from itertools import chain
from types import SimpleNamespace
from typing import Any

from nsqtools.client.backlog import EXPIRED_SHARE, Arrival, Backlog
from nsqtools.client.consumer import Consumer
from nsqtools.client.consumer_io import Subscription
from nsqtools.client.message import Batch, Message, batches_after
from nsqtools.testing import fake_batch


class Owner:
    def __init__(self) -> None:
        self.waiting: dict[Arrival, None] = {}
        self.given_up: list[Batch] = []

    def is_current(self, now: float) -> bool:
        return True

    def catch_up(self) -> None: ...

    def give_up(self, batch: Batch) -> None:
        self.given_up.append(batch)


# -- what a turn of the I/O thread has read is one entry -------------------------------------------


def deliver(backlog: Backlog, owner: Any, *sizes: int) -> list[Batch]:
    """Batches of so many messages, received at time 0, with bodies such as ``1-0``."""
    batches = [fake_batch([b"%d-%d" % (n, k) for k in range(sizes[n])]) for n in range(len(sizes))]
    for message in chain(*batches):
        message.received_at = 0.0
    backlog.put(Arrival(owner, list(batches)))
    return batches


def taken(entry: object) -> list[list[bytes]]:
    assert isinstance(entry, list)
    batches = [entry] if isinstance(entry, Batch) else entry
    return [[message.body for message in batch] for batch in batches]


def test_one_batch_at_a_time_or_as_many_as_fit() -> None:
    backlog, owner = Backlog(), Owner()
    deliver(backlog, owner, 1, 3, 2)
    assert taken(backlog.get(0)) == [[b"0-0"]]
    assert taken(backlog.get_some(0, most=1)) == [[b"1-0"]]
    assert taken(backlog.get_some(0, most=3)) == [[b"1-1", b"1-2"]]  # the next does not fit whole
    assert taken(backlog.get_some(0, most=3)) == [[b"2-0", b"2-1"]]
    assert backlog.get(0) is None
    assert not owner.waiting


def test_entries_of_one_owner_are_taken_together_and_in_order() -> None:
    backlog, owner, other = Backlog(), Owner(), Owner()
    deliver(backlog, owner, 1, 1)
    deliver(backlog, owner, 1)
    deliver(backlog, other, 1)
    backlog.put("last")
    assert len(taken(backlog.get_some(0, most=10))) == 3
    assert len(taken(backlog.get_some(0, most=10))) == 1
    assert backlog.get(0) == "last"
    assert backlog.get(0) is None


def test_what_is_dropped_of_an_entry_leaves_the_rest() -> None:
    backlog, owner = Backlog(), Owner()
    (a,), (b, c) = batches = deliver(backlog, owner, 1, 2)
    assert backlog.discard(owner, batches[0].source) == {a.id}
    assert backlog.discard(owner, batches[1].source, {b.id}) == {b.id}
    assert backlog.get(0) == [c]
    [[message]] = batches = deliver(backlog, owner, 1)
    assert backlog.discard(owner, batches[0].source) == {message.id}
    assert backlog.is_empty
    assert not owner.waiting


def test_what_is_withdrawn_is_returned_once() -> None:
    backlog, owner = Backlog(), Owner()
    deliver(backlog, owner, 1, 2)
    assert backlog.withdraw(owner, expired_at=60.0 * EXPIRED_SHARE) == []
    assert list(map(len, backlog.withdraw(owner, expired_at=60.0))) == [1, 2]
    assert backlog.withdraw(owner) == []
    deliver(backlog, owner, 2)
    deliver(backlog, owner, 1, 1)
    assert list(map(len, backlog.withdraw(owner))) == [2, 1, 1]
    assert backlog.get(0) is None


def test_what_was_not_reached_comes_first_again() -> None:
    backlog, owner = Backlog(), Owner()
    deliver(backlog, owner, 2, 1)
    batches = backlog.get_some(0, most=10)
    assert isinstance(batches, list)
    backlog.put("other")
    backlog.put(Arrival(owner, batches_after(batches, 1)), is_first=True)
    assert taken(backlog.get_some(0, most=10)) == [[b"0-1"], [b"1-0"]]


# -- a thread that takes from many connections -----------------------------------------------------


def test_quick_answers_to_many_connections_wake_the_io_thread_once() -> None:
    """That each of them was the only message of its connection is no reason."""
    consumer = Consumer("clicks", "archive", nsqd_tcp_addresses="nsqd:4150")
    consumer._is_started = True  # nothing connects
    io, woken = consumer._io, []
    io.now = lambda: 0.0  # type: ignore[method-assign]
    io.wake = lambda: woken.append(1)  # type: ignore[method-assign]
    batches = []
    for n in range(5):
        connection: Any = SimpleNamespace(nsqd=f"nsqd{n}", reply=SimpleNamespace(msg_timeout=1000))
        subscription = Subscription(io, "clicks", connection)
        message = Message(subscription, 0, 1, b"%016d" % n, b"")
        subscription.in_flight[message.id] = message
        batches.append(Batch(subscription, [message]))
    consumer.backlog.put(Arrival(io.delivery, batches[:1]))
    consumer.backlog.put(Arrival(io.delivery, batches[1:]))
    messages = iter(consumer)

    woken_after = []
    for _ in batches:
        assert next(messages).finish()
        woken_after.append(len(woken))

    assert woken_after == [1, 1, 1, 1, 2]  # for the first, as none came for a while, and the last
