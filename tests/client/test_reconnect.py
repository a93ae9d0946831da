"""When addresses are tried again, on a clock that the test turns."""

from __future__ import annotations

import random

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule
from plugins.examples import examples

from nsqtools.client.connecting import KnownNsqd, RetryDelays
from nsqtools.protocol.names import Address

DIRECT = Address("direct", 4150)
FOUND = Address("found", 4150)


class NoJitter(random.Random):
    def uniform(self, a: float, b: float) -> float:
        return a


def known_nsqd(*direct: Address) -> KnownNsqd:
    return KnownNsqd(direct, 0.0, rng=NoJitter())


def test_direct_addresses_wait_8_to_120_seconds() -> None:
    delays = RetryDelays(8, 120, rng=NoJitter())
    assert [delays.next_delay_s() for _ in range(7)] == [8, 16, 32, 64, 120, 120, 120]
    assert [delays.next_delay_s() for _ in range(2000)][-1] == 120
    delays.reset()
    assert delays.next_delay_s() == 8


def test_jitter_takes_off_a_tenth_at_most_and_spreads() -> None:
    rng = random.Random(1)
    drawn = [RetryDelays(8, 120, rng=rng).next_delay_s() for _ in range(1000)]
    assert 7.2 <= min(drawn) < 7.3
    assert 7.9 < max(drawn) <= 8


def test_delays_restart_only_when_a_connection_has_proven_itself() -> None:
    known = known_nsqd(DIRECT)
    known.take_due(0)
    known.failed(DIRECT, 0)
    known.take_due(8)
    assert known.failed(DIRECT, 9) == 16
    known.take_due(25)
    known.failed(DIRECT, 30, was_proven=True)
    known.take_due(30)
    assert known.failed(DIRECT, 30) == 8


def test_an_address_that_worked_is_looked_at_at_once_and_tried_when_nsqd_is_back() -> None:
    known = known_nsqd(DIRECT)
    known.take_due(0)
    now, delays = 1000.0, []
    assert known.failed(DIRECT, now, was_proven=True) == 0
    assert known.take_due(now) == [DIRECT]
    assert known[DIRECT].is_looked_for
    delays.append(known.failed(DIRECT, now, is_away=True))
    for _ in range(8):
        now += delays[-1]
        assert known.take_due(now) == [DIRECT]
        assert not known[DIRECT].is_looked_for
        delays.append(known.failed(DIRECT, now))
    assert delays == [0.125, 0.25, 0.5, 1, 2, 4, 8, 16, 32]


def test_a_listed_nsqd_that_refuses_is_tried_at_1_2_4_seconds() -> None:
    known = known_nsqd()
    tries = []
    now = 0.0
    while now < 16:
        known.listed([FOUND], now)  # lookups that never stop listing it
        if known.take_due(now):
            tries.append(now)
            known.failed(FOUND, now)
        now += 0.25
    assert tries == [0, 1, 3, 7, 15]


class NsqdMachine(RuleBasedStateMachine):
    """Random lookups, tries and losses: never two at once, never out of turn, never forgotten."""

    def __init__(self) -> None:
        super().__init__()
        self.now = 0.0
        self.direct = [Address("d1", 1), Address("d2", 2)]
        self.others = [Address(f"n{i}", i) for i in range(3, 6)]
        self.known = KnownNsqd(self.direct, 0.0, rng=random.Random(1))
        self.busy: set[Address] = set()
        self.not_before: dict[Address, float] = {}

    @rule(seconds=st.floats(min_value=0, max_value=200))
    def wait(self, seconds: float) -> None:
        self.now += seconds

    @rule(data=st.data())
    def lookup(self, data: st.DataObject) -> None:
        found = data.draw(st.sets(st.sampled_from(self.others + self.direct)))
        self.known.listed(found, self.now)

    @rule()
    def connect(self) -> None:
        for address in self.known.take_due(self.now):
            assert address not in self.busy
            assert self.now >= self.not_before.get(address, 0)
            self.busy.add(address)

    @precondition(lambda self: self.busy)
    @rule(data=st.data(), proven=st.booleans())
    def lose(self, data: st.DataObject, proven: bool) -> None:
        address = data.draw(st.sampled_from(sorted(self.busy)))
        looks = self.known[address].is_looked_for
        delay_s = self.known.failed(address, self.now, was_proven=proven and not looks)
        assert self.known[address].is_looked_for or 0 < delay_s <= 120
        self.busy.discard(address)
        self.not_before[address] = self.now + delay_s

    @invariant()
    def direct_addresses_are_never_forgotten(self) -> None:
        due = self.known.next_due()
        if not set(self.direct) <= self.busy:
            assert due is not None
            assert due <= self.now + 120


NsqdMachine.TestCase.settings = settings(max_examples=examples(30), stateful_step_count=40)
TestNsqdMachine = NsqdMachine.TestCase


@pytest.mark.parametrize("poll_interval_s", [0.01, 60])
def test_the_floor_of_a_listed_nsqd_ends_at_the_poll_interval(poll_interval_s: float) -> None:
    known = KnownNsqd([], 0.0, discovered_maximum_s=poll_interval_s, rng=NoJitter())
    known.listed([FOUND], 0)
    known.take_due(0)
    delays = [known.failed(FOUND, 0) for _ in range(20)]
    assert max(delays) == poll_interval_s


def test_a_discovered_nsqd_that_is_gone_is_forgotten_after_its_delay() -> None:
    known = known_nsqd(DIRECT)
    for number in range(100):
        known.listed([Address(f"pod-{number}", 4150)], number * 100.0)
        for address in known.take_due(number * 100.0):
            known.failed(address, number * 100.0)
    assert len(known._nsqds) == 2
    known.listed([], 20_000)
    assert len(known._nsqds) == 1


def test_of_too_many_listed_nsqd_some_are_drawn_and_connected_ones_stay() -> None:
    known = KnownNsqd([DIRECT], 0.0, max_discovered=10)
    many = [Address(f"n{number:02}", 4150) for number in range(50)]

    assert known.listed(many[:5], 0) == 0
    first = set(known.take_due(0))
    assert known.listed(many, 1) == 40
    second = set(known.take_due(1))

    assert first == {DIRECT, *many[:5]}
    assert len(second) == 5
    for address in second:
        known.failed(address, 2)
    drawn = set[Address]()
    for now in range(10, 200, 10):
        known.listed(many, now)
        taken = known.take_due(now)
        drawn.update(taken)
        assert len(taken) == 5
        for address in taken:
            known.failed(address, now)
    assert len(drawn) > 30  # nobody is kept out for good
