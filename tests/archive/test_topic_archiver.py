"""WorkerPool: when tasks run, and on which threads."""

import threading
import time
from collections.abc import Iterator
from queue import SimpleQueue

import pytest
from plugins.waiting import patience_s, wait_until

from nsqtools.archive.topic_archiver import Task, WorkerPool


@pytest.fixture
def pool() -> Iterator[WorkerPool]:
    made = WorkerPool(max_threads=2)
    yield made
    made.end()


class Topic:
    """Counts its runs, and returns the given delays of the next ones."""

    def __init__(self, pool: WorkerPool, *due_in_s: float) -> None:
        self.due_in_s = list(due_in_s)
        self.due: list[float | None] = []
        self.began: SimpleQueue[float] = SimpleQueue()
        self.task = Task(pool, self.turn)

    def turn(self) -> float | None:
        now = time.monotonic()
        self.due.append(now + self.due_in_s.pop(0) if self.due_in_s else None)
        self.began.put(now)
        return self.due[-1]

    def next_turn(self) -> float:
        return self.began.get(timeout=patience_s(10))


def test_a_turn_is_had_when_it_is_due_and_not_before(pool: WorkerPool) -> None:
    far, near = Topic(pool, 3600.0), Topic(pool, 0.05, 0.03)
    far.task.soon()
    far.next_turn()  # a thread waits for its time now, which is a later one
    near.task.soon()
    near.next_turn()
    for number in range(2):
        assert near.next_turn() >= near.due[number]
    near.task.soon()  # also after it had none due
    near.next_turn()
    assert far.began.empty()
    assert near.began.empty()


def test_who_waits_for_a_later_time_hears_of_an_earlier_one(pool: WorkerPool) -> None:
    go_on = threading.Event()

    def far() -> float:
        go_on.wait(patience_s(10))
        return time.monotonic() + 3600

    Topic(pool).task.soon()
    wait_until(lambda: pool._idle == 1, what="a thread")
    with pool._changed:  # it hears of both
        Task(pool, far).soon()
        Topic(pool).task.soon()  # by the other thread, which is the first to be idle
    wait_until(lambda: pool._idle == 1, what="an idle thread")
    go_on.set()
    wait_until(lambda: pool._idle == 2, what="threads that wait for a time")
    near = Topic(pool, 0.3)  # not over while its thread looks for more to do
    near.task.soon()
    near.next_turn()
    assert near.next_turn() >= near.due[0]


def test_no_topic_has_two_turns_at_once_and_no_more_run_than_threads(pool: WorkerPool) -> None:
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

    topics = [Task(pool, lambda number=number: turn(number)) for number in range(3)]  # type: ignore[misc]
    for _ in range(3):
        for topic in topics:
            topic.soon()
    wait_until(lambda: len(at_work) == 2, what="two turns")
    for topic in topics:
        topic.soon()  # two of them run: once more for each, however often it is asked for
    go_on.set()
    assert sorted(done.get(timeout=patience_s(10)) for _ in range(5)) == [0, 0, 1, 1, 2]
    assert most == 2
    pool.end()
    assert done.empty()


def test_a_turn_that_fails_ends_no_other(
    pool: WorkerPool, caplog: pytest.LogCaptureFixture
) -> None:
    ended = threading.Event()

    def fails() -> None:
        ended.set()
        raise RuntimeError("a defect")

    Task(pool, fails).soon()
    assert ended.wait(patience_s(10))
    topic = Topic(pool)
    topic.task.soon()
    topic.next_turn()
    pool.end()
    assert caplog.messages == ["a task of an archiver failed"]
