"""The age of the oldest message is never stated too high, and close if messages keep arriving."""

from collections import deque

from hypothesis import given
from hypothesis import strategies as st

from nsqtools.cluster.history import MAX_MOMENTS, WaitingAges
from nsqtools.cluster.queue_rows import QueueRow

KEY = ("", "clicks", "archive")


def row(depth: int, messages: int, in_flight: int = 0) -> QueueRow:
    return QueueRow(
        node="a:4151",
        topic="clicks",
        channel="archive",
        depth=depth,
        disk=0,
        messages=messages,
        in_flight=in_flight,
        paused=False,
    )


@given(
    st.lists(st.tuples(st.integers(0, 5), st.integers(0, 5), st.integers(0, 3)), max_size=120),
    st.booleans(),
)
def test_the_age_never_exceeds_that_of_the_oldest_message(
    steps: list[tuple[int, int, int]], takes_newest: bool
) -> None:
    ages, queue, total = WaitingAges(), deque[float](), 0
    for at_s, (arrive, finish, in_flight) in enumerate(steps):
        queue.extend([at_s] * arrive)
        total += arrive
        for _ in range(min(finish, len(queue))):
            queue.pop() if takes_newest else queue.popleft()
        in_flight = min(in_flight, len(queue))
        ages.add(float(at_s), [row(len(queue) - in_flight, total, in_flight)])
        age_s = at_s - min(queue) if queue else 0.0
        assert 0.0 <= ages.oldest_s.get(KEY, 0.0) <= age_s


def test_a_steady_queue_has_a_constant_age_and_a_stuck_one_ages() -> None:
    steady, stuck = WaitingAges(), WaitingAges()
    for at_s in range(10_000):
        steady.add(float(at_s), [row(300, 1000 + at_s)])
        stuck.add(float(at_s), [row(1, 7)])
    assert 288 <= steady.oldest_s[KEY] <= 300
    assert stuck.oldest_s[KEY] == 9_999
    assert [len(moments) for moments in steady._moments.values()] <= [MAX_MOMENTS]


def test_a_recreated_queue_has_an_age_since_its_creation() -> None:
    ages = WaitingAges()
    ages.add(0.0, [row(5, 100)])
    ages.add(60.0, [row(5, 5)])
    ages.add(70.0, [row(5, 5)])
    assert ages.oldest_s[KEY] == 10.0
    ages.add(80.0, [row(0, 5)])
    assert ages.oldest_s == {}
