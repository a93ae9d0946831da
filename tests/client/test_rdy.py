"""RDY decisions, on a clock that the test turns."""

from __future__ import annotations

import random
import sys

import pytest

from nsqtools.client.rdy import PROBE_S, ReadyControl


def control(max_in_flight: int, *names: str, cap: int = 2500, seed: int = 1) -> ReadyControl[str]:
    rdy: ReadyControl[str] = ReadyControl(max_in_flight, rng=random.Random(seed))
    for name in names:
        rdy.add(name, cap, 0.0)
    return rdy


def sent(rdy: ReadyControl[str]) -> list[tuple[str, int]]:
    return rdy.take_changes()


def test_a_connection_that_gave_its_rdy_back_does_not_take_it_again() -> None:
    rdy = control(1, "a", "b")
    rdy.received("a", 1, 1.0)
    rdy.redistribute(40.0)
    rdy.received("a", 1, 40.1)  # it was on its way
    sent(rdy)
    rdy.answered("a", 2, 41.0)
    assert sent(rdy) == [("b", 1)]


LASTS_S = 30


@pytest.mark.parametrize(
    ("connections", "allowed", "busy"), [(8, 2, 2), (8, 2, 5), (8, 1, 1), (40, 10, 12)]
)
def test_a_message_on_a_quiet_nsqd_does_not_wait_long_and_the_busy_ones_lose_little(
    connections: int, allowed: int, busy: int
) -> None:
    """In a simulation: handling takes 5 ms, the quiet ones get a message every 7 s or so."""
    names = [f"n{i}" for i in range(connections)]
    rdy = control(allowed, *names)
    rng = random.Random(1)
    sparse: dict[str, list[float]] = {name: [] for name in names[busy:]}  # queued at
    waits: list[float] = []
    handled = dict.fromkeys(names, 0)
    ticks = 0
    for step in range(LASTS_S * 200):
        now = step / 200
        for name in names:
            if rdy[name].in_flight:
                rdy.answered(name, 1, now)
        if now >= ticks * PROBE_S:
            ticks += 1
            rdy.redistribute(now)
        for name, queued in sparse.items():
            if rng.random() < 1 / (7 * 200):
                queued.append(now)
            if queued and rdy[name].rdy > rdy[name].in_flight:
                waits.append(now - queued.pop(0))
                rdy.received(name, 1, now)
        for name in names[:busy]:
            if rdy[name].rdy > rdy[name].in_flight:
                rdy.received(name, 1, now)
                handled[name] += 1
        assert sum(max(rdy[name].rdy, rdy[name].in_flight) for name in names) <= allowed
    left = [LASTS_S - at for queued in sparse.values() for at in queued]
    if sparse:
        limit_s = 5 if allowed > 1 else 10
        assert sorted([*waits, *left])[int(0.95 * len(waits + left))] < limit_s
    assert sum(handled.values()) >= 0.9 * min(allowed, busy) * LASTS_S * 200
    assert min(handled[name] for name in names[:busy]) > 0


@pytest.mark.parametrize(
    ("rdy", "in_flight", "starved"),
    [
        (1, 0, False),
        (1, 1, True),
        (2, 1, False),  # go-nsq, which rounds the threshold down, says True
        (2, 2, True),
        (100, 84, False),
        (100, 85, True),
        (0, 0, False),
        (0, 1, True),  # RDY was taken away: nothing more comes before an answer
    ],
)
def test_a_connection_starves_at_85_percent(rdy: int, in_flight: int, starved: bool) -> None:
    states = control(1000, "a")
    states["a"].rdy, states["a"].in_flight = rdy, in_flight
    assert states.is_starved is starved


def test_all_are_full_but_for_those_that_were_idle_for_long() -> None:
    states = control(10, "a", "b")  # at 0
    states.received("a", 5, 1.0)
    assert not states.is_full(1.9, 2.0)
    assert states.is_full(2.0, 2.0)
    states.hold(3.0)
    states.resume(4.0)
    assert not states.is_full(5.9, 2.0)  # RDY came back at 4
    states.received("b", 1, 6.0)
    assert not states.is_full(60.0, 2.0)
    states.received("b", 4, 60.0)
    assert states.is_full(60.0, 2.0)


def test_rdy_is_sent_again_with_an_answer_when_a_quarter_is_left() -> None:
    rdy = control(8, "a")
    rdy.redistribute(5.0)
    sent(rdy)
    for count in range(1, 6):
        rdy.received("a", 1, 6.0)
        rdy.answered("a", 1, 6.0)
        assert sent(rdy) == [], count
    rdy.received("a", 1, 6.0)
    assert sent(rdy) == []  # in a write of its own it would double the cost of a message
    rdy.answered("a", 1, 6.0)
    assert sent(rdy) == [("a", 8)]


def test_rdy_that_rotates_is_not_sent_again_with_each_message() -> None:
    rdy = control(2, "a", "b", "c")
    owners = dict(sent(rdy))
    ready = [key for key, count in owners.items() if count]
    for key in ready:
        rdy.received(key, 1, 0.01)
        rdy.answered(key, 1, 0.01)
    assert sent(rdy) == []


def test_when_the_tested_connection_is_lost_the_next_one_is_tested() -> None:
    rdy = control(10, "a")
    rdy.hold(1.0)
    rdy.test(2.0)
    rdy.remove("a", 3.0)
    sent(rdy)
    rdy.add("b", 2500, 4.0)
    assert sent(rdy) == [("b", 1)]


def test_an_idle_test_moves_to_another_connection() -> None:
    rdy = control(10, "a", "b")
    rdy.hold(1.0)
    rdy.test(2.0)
    [tester] = [name for name in "ab" if rdy[name].rdy]
    sent(rdy)
    rdy.redistribute(13.0)
    other = "b" if tester == "a" else "a"
    assert sent(rdy) == [(tester, 0), (other, 1)]


def test_max_in_flight_may_change_in_backoff() -> None:
    rdy = control(10, "a")
    rdy.hold(1.0)
    rdy.set_max_in_flight(0, 2.0)
    assert rdy.test(3.0)
    sent(rdy)
    rdy.redistribute(5.0)
    assert sent(rdy) == []
    rdy.set_max_in_flight(10, 6.0)
    assert sent(rdy) == [("a", 1)]
    rdy.set_max_in_flight(0, 7.0)
    assert sent(rdy) == [("a", 0)]


@pytest.mark.parametrize("connections", [10, 500])
def test_an_answer_costs_the_same_however_many_connections_want_rdy(connections: int) -> None:
    """Counted in lines of Python, which a busy machine does not change."""
    names = [f"n{number}" for number in range(connections)]
    rdy = control(connections // 2, *names)
    ready = [name for name, _ in sent(rdy)]
    rdy.redistribute(5.0)  # now all others want some
    lines = 0

    def count(*_: object) -> object:
        nonlocal lines
        lines += 1
        return count

    for name in ready[:5]:
        rdy.received(name, 1, 6.0)
    before = sys.gettrace()  # that of a measurement of coverage
    sys.settrace(count)
    try:
        for name in ready[:5]:
            rdy.answered(name, 1, 6.0)
    finally:
        sys.settrace(before)
    assert lines < 300
