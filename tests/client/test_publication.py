"""What waits to be published: which messages are joined, in which groups, and for how long."""

from __future__ import annotations

import pytest

from nsqtools.client.publication import MAX_JOINED, Publication, PublishQueue
from nsqtools.protocol.commands import mpub_size

LINGER_S = 2.0
ROOM = 100


def publication(*bodies: bytes, at: float = 10.0, defer_s: float | None = None) -> Publication:
    return Publication("clicks", bodies, sum(map(len, bodies)), at, defer_s)


def alone(body: bytes) -> Publication:
    made = publication(body)
    made.is_alone = True
    return made


def settled(*bodies: bytes) -> Publication:
    made = publication(*bodies)
    made.settle(None)
    return made


def queue_of(*publications: Publication, linger_s: float = LINGER_S) -> PublishQueue:
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
    made: Publication, linger_s: float, is_joined: bool
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


def test_everything_is_taken_at_once_and_in_order() -> None:
    several, one = publication(b"a", b"b"), publication(b"c")
    queue = queue_of(one, several)
    assert queue.take_all() == [several, one]
    assert queue.take_all() == []


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
