"""Turns: when topics have them, and the threads."""

import threading
import time
from collections.abc import Iterator
from queue import SimpleQueue

import pytest
from plugins.waiting import patience_s, wait_until

from nsqtools.archive.topic_archiver import Scheduled, Turns


@pytest.fixture
def turns() -> Iterator[Turns]:
    made = Turns(max_threads=2)
    yield made
    made.end()


class Topic:
    """Notes its turns, and says then when the next one is due, as it was told."""

    def __init__(self, turns: Turns, *due_in_s: float) -> None:
        self.due_in_s = list(due_in_s)
        self.due: list[float | None] = []
        self.began: SimpleQueue[float] = SimpleQueue()
        self.scheduled = Scheduled(turns, self.turn)

    def turn(self) -> float | None:
        now = time.monotonic()
        self.due.append(now + self.due_in_s.pop(0) if self.due_in_s else None)
        self.began.put(now)
        return self.due[-1]

    def next_turn(self) -> float:
        return self.began.get(timeout=patience_s(10))


def test_a_turn_is_had_when_it_is_due_and_not_before(turns: Turns) -> None:
    far, near = Topic(turns, 3600.0), Topic(turns, 0.05, 0.03)
    far.scheduled.soon()
    far.next_turn()  # a thread waits for its time now, which is a later one
    near.scheduled.soon()
    near.next_turn()
    for number in range(2):
        assert near.next_turn() >= near.due[number]
    near.scheduled.soon()  # also after it had none due
    near.next_turn()
    assert far.began.empty()
    assert near.began.empty()


def test_who_waits_for_a_later_time_hears_of_an_earlier_one(turns: Turns) -> None:
    go_on = threading.Event()

    def far() -> float:
        go_on.wait(patience_s(10))
        return time.monotonic() + 3600

    Topic(turns).scheduled.soon()
    wait_until(lambda: turns._idle == 1, what="a thread")
    with turns._changed:  # it hears of both
        Scheduled(turns, far).soon()
        Topic(turns).scheduled.soon()  # by the other thread, which is the first to be idle
    wait_until(lambda: turns._idle == 1, what="an idle thread")
    go_on.set()
    wait_until(lambda: turns._idle == 2, what="threads that wait for a time")
    near = Topic(turns, 0.3)  # not over while its thread looks for more to do
    near.scheduled.soon()
    near.next_turn()
    assert near.next_turn() >= near.due[0]


def test_no_topic_has_two_turns_at_once_and_no_more_run_than_threads(turns: Turns) -> None:
    lock, go_on = threading.Lock(), threading.Event()
    at_work: list[int] = []
    most = 0
    done: SimpleQueue[int] = SimpleQueue()

    def turn(number: int) -> None:
        nonlocal most
        with lock:
            assert number not in at_work
            at_work.append(number)
            most = max(most, len(at_work))
        go_on.wait(patience_s(10))
        with lock:
            at_work.remove(number)
        done.put(number)

    topics = [Scheduled(turns, lambda number=number: turn(number)) for number in range(3)]  # type: ignore[misc]
    for _ in range(3):
        for topic in topics:
            topic.soon()
    wait_until(lambda: len(at_work) == 2, what="two turns")
    for topic in topics:
        topic.soon()  # two of them run: once more for each, however often it is asked for
    go_on.set()
    assert sorted(done.get(timeout=patience_s(10)) for _ in range(5)) == [0, 0, 1, 1, 2]
    assert most == 2
    turns.end()
    assert done.empty()


def test_a_turn_that_fails_ends_no_other(turns: Turns, caplog: pytest.LogCaptureFixture) -> None:
    ended = threading.Event()

    def fails() -> None:
        ended.set()
        raise RuntimeError("a defect")

    Scheduled(turns, fails).soon()
    assert ended.wait(patience_s(10))
    topic = Topic(turns)
    topic.scheduled.soon()
    topic.next_turn()
    turns.end()
    assert caplog.messages == ["a turn failed"]
