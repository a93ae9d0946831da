"""WorkerPool: when tasks run, and on how many threads."""

import threading
import time
from collections.abc import Iterator
from queue import SimpleQueue

import pytest
from plugins.waiting import patience_s, wait_until

from nsqtools.archive.topic_archiver import Task, WorkerPool


@pytest.fixture
def pool() -> Iterator[WorkerPool]:
    pool = WorkerPool(max_threads=2)
    yield pool
    pool.end()


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


def test_a_task_runs_when_it_is_due_and_not_earlier(pool: WorkerPool) -> None:
    far, near = Topic(pool, 3600.0), Topic(pool, 0.05, 0.03)
    far.task.soon()
    far.next_turn()  # Now a thread waits for the time of this task, which is a later one.
    near.task.soon()
    near.next_turn()
    for number in range(2):
        assert near.next_turn() >= near.due[number]
    near.task.soon()  # also when it had no next time
    near.next_turn()
    assert far.began.empty()
    assert near.began.empty()


def test_a_thread_that_waits_for_a_later_time_is_woken_for_an_earlier_one(pool: WorkerPool) -> None:
    release = threading.Event()

    def far() -> float:
        release.wait(patience_s(10))
        return time.monotonic() + 3600

    Topic(pool).task.soon()
    wait_until(lambda: pool._idle == 1, what="a thread")
    with pool._changed:  # so that the idle thread sees both tasks
        Task(pool, far).soon()
        Topic(pool).task.soon()  # run by the second thread, which is idle first
    wait_until(lambda: pool._idle == 1, what="an idle thread")
    release.set()
    wait_until(lambda: pool._idle == 2, what="threads that wait for a time")
    near = Topic(pool, 0.3)  # long enough for its thread to look for another task
    near.task.soon()
    near.next_turn()
    assert near.next_turn() >= near.due[0]


def test_a_task_never_runs_twice_at_once_and_the_pool_bounds_its_threads(pool: WorkerPool) -> None:
    lock, release = threading.Lock(), threading.Event()
    running: list[int] = []
    max_running = 0
    finished: SimpleQueue[int] = SimpleQueue()

    def run(number: int) -> None:
        nonlocal max_running
        with lock:
            assert number not in running
            running.append(number)
            max_running = max(max_running, len(running))
        release.wait(patience_s(10))
        with lock:
            running.remove(number)
        finished.put(number)

    topics = [Task(pool, lambda number=number: run(number)) for number in range(3)]  # type: ignore[misc]
    for _ in range(3):
        for topic in topics:
            topic.soon()
    wait_until(lambda: len(running) == 2, what="two turns")
    for topic in topics:
        topic.soon()  # Two of them run: each task runs once more, however often it is scheduled.
    release.set()
    assert sorted(finished.get(timeout=patience_s(10)) for _ in range(5)) == [0, 0, 1, 1, 2]
    assert max_running == 2
    pool.end()
    assert finished.empty()


def test_a_task_that_fails_does_not_stop_the_others(
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
