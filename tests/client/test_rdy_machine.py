"""RDY under random events on up to eight connections: the invariants hold after every step.

A sum of RDY is never above max_in_flight, an increase fits beside what the others use, no
connection gets more than its nsqd allows, nothing is sent to one that closes or is gone, and once
all is quiet nobody starves.
"""

from __future__ import annotations

import random

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule
from plugins.examples import examples

from nsqtools.client.rdy import PROBE_S, Backoff, BackoffMode, ReadyControl

MOST = 8


class ReadyMachine(RuleBasedStateMachine):
    @initialize(max_in_flight=st.integers(0, 20), seed=st.integers(0, 1000))
    def begin(self, max_in_flight: int, seed: int) -> None:
        self.now = 0.0
        self.max_in_flight = max_in_flight
        self.was_allowed = 0  # by the max_in_flight before, until its RDY is replaced
        self.rdy: ReadyControl[int] = ReadyControl(max_in_flight, rng=random.Random(seed))
        self.backoff = Backoff()
        self.caps: dict[int, int] = {}
        self.closing: set[int] = set()
        self.at_nsqd: dict[int, int] = {}  # RDY as nsqd knows it
        self.in_flight: dict[int, int] = {}
        self.next_name = 0

    # What is sent reaches nsqd, and is checked on the way.
    def deliver(self) -> None:
        for name, count in self.rdy.take_changes():
            assert name in self.caps, "RDY for a connection that is gone"
            assert name not in self.closing, "RDY for a connection that closes"
            assert 0 <= count <= self.caps[name]
            if count > self.at_nsqd[name]:
                others = sum(
                    max(self.at_nsqd[other], self.in_flight[other])
                    for other in self.caps
                    if other != name
                )
                assert count <= self.in_flight[name] or count + others <= self.max_in_flight
            self.at_nsqd[name] = count
            assert sum(self.at_nsqd.values()) <= max(self.max_in_flight, self.was_allowed)

    def connections(self) -> st.SearchStrategy[int]:
        return st.sampled_from(sorted(self.caps))

    @precondition(lambda self: len(self.caps) < MOST)
    @rule(cap=st.integers(1, 8) | st.just(2500))
    def connect(self, cap: int) -> None:
        name = self.next_name
        self.next_name += 1
        self.caps[name], self.at_nsqd[name], self.in_flight[name] = cap, 0, 0
        self.rdy.add(name, cap, self.now)
        self.deliver()

    @precondition(lambda self: self.caps)
    @rule(data=st.data())
    def lose(self, data: st.DataObject) -> None:
        name = data.draw(self.connections())
        del self.caps[name], self.at_nsqd[name], self.in_flight[name]
        self.closing.discard(name)
        self.rdy.remove(name, self.now)
        self.deliver()

    @precondition(lambda self: set(self.caps) - self.closing)
    @rule(data=st.data())
    def close(self, data: st.DataObject) -> None:
        name = data.draw(st.sampled_from(sorted(set(self.caps) - self.closing)))
        self.closing.add(name)
        self.at_nsqd[name] = 0
        self.rdy.close(name, self.now)
        self.deliver()

    @precondition(lambda self: any(self.room(name) for name in self.caps))
    @rule(data=st.data())
    def message(self, data: st.DataObject) -> None:
        name = data.draw(st.sampled_from([n for n in sorted(self.caps) if self.room(n)]))
        count = data.draw(st.integers(1, self.room(name)))
        self.in_flight[name] += count
        self.rdy.received(name, count, self.now)
        self.deliver()

    @precondition(lambda self: self.caps)
    @rule(data=st.data())
    def late_message(self, data: st.DataObject) -> None:
        """One that was on its way when RDY was lowered, or comes again after its timeout."""
        name = data.draw(self.connections())
        self.in_flight[name] += 1
        self.rdy.received(name, 1, self.now)
        self.deliver()

    def room(self, name: int) -> int:
        return max(0, self.at_nsqd[name] - self.in_flight[name])

    @precondition(lambda self: any(self.in_flight.values()))
    @rule(data=st.data(), result=st.sampled_from(["success", "failure", "neutral", ""]))
    def answer(self, data: st.DataObject, result: str) -> None:
        name = data.draw(st.sampled_from([n for n in sorted(self.caps) if self.in_flight[n]]))
        count = data.draw(st.integers(1, self.in_flight[name]))
        self.in_flight[name] -= count
        self.rdy.answered(name, count, self.now)
        delay_s = getattr(self.backoff, result)() if result else None
        if delay_s is not None and self.backoff.mode is BackoffMode.WAIT:
            self.rdy.hold(self.now)
        elif delay_s is not None:
            self.rdy.resume(self.now)
        self.deliver()

    @precondition(lambda self: self.backoff.mode is BackoffMode.WAIT)
    @rule()
    def wait_ends(self) -> None:
        if self.rdy.test(self.now):
            self.backoff.expire()
        self.deliver()

    @rule(max_in_flight=st.integers(0, 20))
    def change_max_in_flight(self, max_in_flight: int) -> None:
        self.was_allowed, self.max_in_flight = self.max_in_flight, max_in_flight
        self.rdy.set_max_in_flight(max_in_flight, self.now)
        self.deliver()
        self.was_allowed = 0

    @rule(seconds=st.sampled_from([0.1, 1.0, 11.0, 31.0]))
    def pass_time(self, seconds: float) -> None:
        self.now += seconds

    @rule()
    def tick(self) -> None:
        self.rdy.redistribute(self.now)
        self.deliver()

    @invariant()
    def the_sum_is_bounded(self) -> None:
        if hasattr(self, "caps"):
            assert sum(self.at_nsqd.values()) <= self.max_in_flight

    @invariant()
    def both_sides_agree(self) -> None:
        if hasattr(self, "caps"):
            for name in self.caps:
                assert self.rdy[name].rdy == self.at_nsqd[name]
                assert self.rdy[name].in_flight == self.in_flight[name]

    @invariant()
    def backoff_stops_the_flow(self) -> None:
        if hasattr(self, "caps") and self.backoff.mode is not BackoffMode.NORMAL:
            most = 0 if self.backoff.mode is BackoffMode.WAIT else 1
            assert sum(self.at_nsqd.values()) <= most

    def teardown(self) -> None:
        """At rest nobody starves: all is answered, backoff over, and a tick has passed."""
        if not hasattr(self, "caps"):
            return
        for name, count in self.in_flight.items():
            self.in_flight[name] = 0
            self.rdy.answered(name, count, self.now)
        if self.backoff.mode is not BackoffMode.NORMAL:
            self.rdy.resume(self.now)
        self.rdy.redistribute(self.now + 100)
        self.backoff = Backoff()
        self.deliver()
        live = set(self.caps) - self.closing
        if live and self.max_in_flight >= len(live):
            share = self.max_in_flight // len(live)
            assert all(self.at_nsqd[n] == min(share, self.caps[n]) for n in live)
        elif live:
            assert sum(self.at_nsqd.values()) == self.max_in_flight
        self.everybody_has_a_turn(live)

    def everybody_has_a_turn(self, live: set[int]) -> None:
        """Even while some always have messages and each message takes a moment."""
        served: set[int] = set()
        now = self.now + 100
        busy = sorted(live)[: self.max_in_flight]
        for _ in range(60 * len(live) if self.max_in_flight else 0):
            now += PROBE_S
            for name in busy:
                if self.in_flight[name]:
                    self.in_flight[name] -= 1
                    self.rdy.answered(name, 1, now)
                    self.deliver()
                if self.room(name):
                    self.in_flight[name] += 1
                    self.rdy.received(name, 1, now)
                    self.deliver()
            self.rdy.redistribute(now)
            self.deliver()
            served |= {name for name in live if self.at_nsqd[name]}
            if served == live:
                return
        assert served == live or not self.max_in_flight


ReadyMachine.TestCase.settings = settings(max_examples=examples(50), stateful_step_count=40)
TestReadyMachine = ReadyMachine.TestCase
