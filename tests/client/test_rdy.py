"""RDY and backoff: decisions on a simulated clock, and their effect on nsqd."""

import queue
import random
import sys
from typing import Any

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule
from plugins.clients import Consume, Dialog, Handle
from plugins.scripted_nsqd import ScriptedNsqd
from plugins.waiting import patience_s, wait_until

from nsqtools import ClientOptions, Message, RequeueWithoutBackoff
from nsqtools.client.io_loop import Timer
from nsqtools.client.rdy import NORMAL, PROBE_S, TEST, WAIT, ReadyControl


def control(max_in_flight: int, *names: str, cap: int = 2500, seed: int = 1) -> ReadyControl[str]:
    rdy: ReadyControl[str] = ReadyControl(max_in_flight, ClientOptions(), rng=random.Random(seed))
    for name in names:
        rdy.add(name, cap, 0.0)
    rdy.take_changes()
    return rdy


def end_backoff(rdy: ReadyControl[Any], now: float) -> None:
    rdy.mode, rdy.level = TEST, 1
    assert rdy.succeeded(now) == 0


def test_returned_rdy_is_not_taken_again() -> None:
    rdy = control(1, "a", "b")
    rdy.received("a", 1, 1.0)
    rdy.redistribute(40.0)
    rdy.received("a", 1, 40.1)  # the message was already sent
    rdy.take_changes()
    rdy.answered("a", 2, 41.0)
    assert rdy.take_changes() == [("b", 1)]


LASTS_S = 30


@pytest.mark.parametrize(
    ("connections", "allowed", "busy"),
    [(8, 2, 2), (8, 2, 5), (8, 1, 1), (40, 10, 12), (40, 10, 1), (5, 10, 1), (10, 10, 2)],
)
def test_no_idle_nsqd_waits_long(connections: int, allowed: int, busy: int) -> None:
    """Busy nsqd lose little. Handling takes 5 ms; an idle nsqd gets a message about every 7 s."""
    names = [f"n{i}" for i in range(connections)]
    rdy = control(allowed, *names)
    rng = random.Random(1)
    sparse: dict[str, list[float]] = {name: [] for name in names[busy:]}  # times of queueing
    waits: list[float] = []
    handled = dict.fromkeys(names, 0)
    ticks = 0
    for step in range(LASTS_S * 200):
        now = step / 200
        for name in names:
            if count := rdy.states[name].in_flight:
                rdy.answered(name, count, now)
        if now >= ticks * PROBE_S:
            ticks += 1
            rdy.redistribute(now)
        for name, queued in sparse.items():
            if rng.random() < 1 / (7 * 200):
                queued.append(now)
            if queued and rdy.states[name].rdy > rdy.states[name].in_flight:
                waits.append(now - queued.pop(0))
                rdy.received(name, 1, now)
        for name in names[:busy]:
            if (room := rdy.states[name].rdy - rdy.states[name].in_flight) > 0:
                rdy.received(name, room, now)
                handled[name] += room
        assert sum(max(rdy.states[n].rdy, rdy.states[n].in_flight) for n in names) <= allowed
    unserved = [LASTS_S - at for queued in sparse.values() for at in queued]
    if sparse:
        limit_s = 5 if allowed > 1 else 10
        assert sorted([*waits, *unserved])[int(0.95 * len(waits + unserved))] < limit_s
    least = min(allowed, busy * max(1, allowed // 2 // busy))
    assert sum(handled.values()) >= 0.9 * least * LASTS_S * 200
    assert min(handled[name] for name in names[:busy]) > 0


def test_is_starved_at_85_percent() -> None:
    """With RDY 2 it takes two messages, where go-nsq rounds the threshold down to one."""
    states = control(1000, "a")
    state = states.states["a"]
    for rdy, enough in ((1, 1), (2, 2), (100, 85), (0, 1)):
        for in_flight in (enough - 1, enough):
            state.rdy, state.in_flight, state.is_idle = rdy, in_flight, False
            assert states.is_starved is (in_flight == enough), rdy
            state.is_idle = True
            assert not states.is_starved
    states = control(10, "a", "b")  # at 0
    states.received("a", 5, 1.0)
    assert not states.is_full(1.9, 2.0)
    assert states.is_full(2.0, 2.0)
    states.failed(3.0)
    end_backoff(states, 4.0)
    assert not states.is_full(5.9, 2.0)  # RDY was returned at 4
    states.received("b", 1, 6.0)
    assert not states.is_full(60.0, 2.0)
    states.received("b", 4, 60.0)
    assert states.is_full(60.0, 2.0)


def test_rdy_is_sent_again_when_a_quarter_is_left() -> None:
    rdy = control(8, "a")
    rdy.redistribute(5.0)
    rdy.take_changes()
    for count in range(1, 6):
        rdy.received("a", 1, 6.0)
        rdy.answered("a", 1, 6.0)
        assert rdy.take_changes() == [], count
    rdy.received("a", 1, 6.0)
    assert rdy.take_changes() == []  # a separate write would double the cost of a message
    rdy.answered("a", 1, 6.0)
    assert rdy.take_changes() == [("a", 8)]
    rdy = control(2, "a", "b", "c")
    rdy.take_changes()
    for key, state in rdy.states.items():
        if state.rdy:
            rdy.received(key, 1, 0.01)
            rdy.answered(key, 1, 0.01)
    assert rdy.take_changes() == []


def test_the_tested_connection_may_be_lost() -> None:
    rdy = control(10, "a")
    rdy.failed(1.0)
    rdy.test(2.0)
    rdy.remove("a", 3.0)
    rdy.take_changes()
    rdy.add("b", 2500, 4.0)
    assert rdy.take_changes() == [("b", 1)]
    rdy = control(10, "a")
    rdy.failed(1.0)
    rdy.set_max_in_flight(0, 2.0)
    assert rdy.test(3.0)
    rdy.take_changes()
    rdy.redistribute(5.0)
    assert rdy.take_changes() == []
    rdy.set_max_in_flight(10, 6.0)
    assert rdy.take_changes() == [("a", 1)]
    rdy.set_max_in_flight(0, 7.0)
    assert rdy.take_changes() == [("a", 0)]


def test_an_idle_test_visits_all_connections() -> None:
    names = [f"n{number}" for number in range(25)]
    rdy = control(100, *names)
    rdy.failed(1.0)
    rdy.test(2.0)
    rdy.take_changes()
    tested = {name for name in names if rdy.states[name].rdy}
    for tick in range(1, 25):
        rdy.redistribute(2.0 + tick * PROBE_S)
        [(_, none), (name, one)] = rdy.take_changes()
        assert (none, one) == (0, 1)
        tested.add(name)
    assert tested == set(names)


@pytest.mark.parametrize("connections", [10, 500])
def test_the_cost_of_an_event_does_not_depend_on_connections(connections: int) -> None:
    """The cost is counted in lines of Python, independent of the load of the machine."""
    names = [f"n{number}" for number in range(connections)]
    rdy = control(connections // 2, *names)
    ready = [name for name, state in rdy.states.items() if state.rdy]
    rdy.redistribute(5.0)  # now all other connections want RDY
    lines = 0

    def count(*_: object) -> object:
        nonlocal lines
        lines += 1
        return count

    for name in ready[:5]:
        rdy.received(name, 1, 6.0)
    tracer = sys.gettrace()  # the tracer of a coverage run
    sys.settrace(count)
    try:
        for name in ready[:5]:
            rdy.answered(name, 1, 6.0)
            rdy.add(f"new {name}", 2500, 6.0)
            rdy.remove(name, 6.0)
    finally:
        sys.settrace(tracer)
    assert lines < 300


# -- backoff: every row of its table, and its delays -----------------------------------------------


@pytest.mark.parametrize(
    ("multiplier_s", "maximum_s", "delays"),
    [
        (1, 120, [2, 4, 8, 16, 32, 64, 120]),
        (1, 3, [2, 3]),
        (1, 1, [1]),  # a cap below the first delay caps it, and disables nothing
        (0.5, 120, [1, 2, 4, 8, 16, 32, 64, 120]),
        (0, 120, [0]),
        (3600, 3600, [3600]),
        (1, 0, []),
    ],
)
def test_backoff_doubles_up_to_its_maximum(
    multiplier_s: float, maximum_s: float, delays: list[float]
) -> None:
    options = ClientOptions(backoff_multiplier_s=multiplier_s, max_backoff_duration_s=maximum_s)
    rdy: ReadyControl[str] = ReadyControl(1, options)
    rdy.add("a", 1, 0.0)
    for delay_s in delays + delays[-1:] * 50:
        assert rdy.failed(0.0) == delay_s
        assert rdy.test(0.0)
    assert rdy.level == len(delays)
    if not delays:  # backoff is disabled
        assert rdy.failed(0.0) is None
        assert rdy.mode is NORMAL


@pytest.mark.parametrize(
    ("mode", "event", "action", "level", "then"),
    [
        *((NORMAL, event, None, 0, NORMAL) for event in ("succeeded", "requeued_without_backoff")),
        (NORMAL, "failed", 2, 1, WAIT),
        *(
            (WAIT, event, None, 2, WAIT)
            for event in ("succeeded", "requeued_without_backoff", "failed")
        ),
        (TEST, "failed", 8, 3, WAIT),
        (TEST, "requeued_without_backoff", 4, 2, WAIT),
        (TEST, "succeeded", 2, 1, WAIT),
    ],
)
def test_events_by_mode(mode: str, event: str, action: float | None, level: int, then: str) -> None:
    rdy = control(1, "a")
    rdy.level, rdy.mode = 0 if mode is NORMAL else 2, mode
    assert getattr(rdy, event)(1.0) == action
    assert (rdy.level, rdy.mode) == (level, then)


def test_jitter_is_spread_over_the_whole_delay() -> None:
    options = ClientOptions(backoff_strategy="full_jitter")
    rdy: ReadyControl[str] = ReadyControl(1, options, random.Random(1))
    delays_s = set()
    for _ in range(200):
        rdy.level, rdy.mode = 5, TEST
        delays_s.add(rdy.requeued_without_backoff(0.0) or 0.0)
    assert 0 <= min(delays_s) < 3.2
    assert 28.8 < max(delays_s) <= 32
    assert len(delays_s) == 200


MOST = 8


class ReadyMachine(RuleBasedStateMachine):
    def __init__(self) -> None:
        super().__init__()
        self.now = 0.0
        self.was_allowed = 0  # by the previous max_in_flight, until its RDY is replaced
        self.begin(0, 0)
        self.caps: dict[int, int] = {}
        self.is_closed = False
        self.at_nsqd: dict[int, int] = {}  # the last RDY that nsqd received
        self.in_flight: dict[int, int] = {}
        self.next_name = 0

    @initialize(max_in_flight=st.integers(0, 20), seed=st.integers(0, 1000))
    def begin(self, max_in_flight: int, seed: int) -> None:
        self.max_in_flight = max_in_flight
        self.rdy = ReadyControl[int](max_in_flight, ClientOptions(), rng=random.Random(seed))

    # Deliver pending commands to nsqd, and check them.
    def deliver(self) -> None:
        for name, count in self.rdy.take_changes():
            assert name in self.caps, "RDY for a connection that is gone"
            assert not self.is_closed, "RDY for a connection that closes"
            assert 0 <= count <= self.caps[name]
            if count > self.at_nsqd[name]:
                used = {n: max(self.at_nsqd[n], self.in_flight[n]) for n in self.caps}
                used_by_others = sum(used.values()) - used[name]
                assert count <= self.in_flight[name] or count + used_by_others <= self.max_in_flight
            self.at_nsqd[name] = count
            assert sum(self.at_nsqd.values()) <= max(self.max_in_flight, self.was_allowed)

    @precondition(lambda self: len(self.caps) < MOST)
    @rule(caps=st.lists(st.integers(1, 8) | st.just(2500), min_size=1, max_size=3))
    def connect(self, caps: list[int]) -> None:
        for cap in caps:
            name = self.next_name
            self.next_name += 1
            self.caps[name], self.at_nsqd[name], self.in_flight[name] = cap, 0, 0
            self.rdy.add(name, cap, self.now)
        self.deliver()

    @precondition(lambda self: self.caps)
    @rule(data=st.data())
    def lose(self, data: st.DataObject) -> None:
        name = data.draw(st.sampled_from(sorted(self.caps)))
        del self.caps[name], self.at_nsqd[name], self.in_flight[name]
        self.rdy.remove(name, self.now)
        if data.draw(st.booleans()):  # more events may happen in this iteration
            self.deliver()

    @precondition(lambda self: self.caps and not self.is_closed)
    @rule(is_rare=st.integers(0, 9))
    def close(self, is_rare: int) -> None:
        if is_rare == 9:
            self.is_closed = True
            self.at_nsqd = dict.fromkeys(self.caps, 0)
            self.rdy.close()

    @precondition(lambda self: any(self.room(name) for name in self.caps))
    @rule(data=st.data())
    def message(self, data: st.DataObject) -> None:
        name = data.draw(st.sampled_from([n for n in sorted(self.caps) if self.room(n)]))
        self.receive(name, data.draw(st.integers(1, self.room(name))))

    def receive(self, name: int, count: int) -> None:
        self.in_flight[name] += count
        self.rdy.received(name, count, self.now)
        self.deliver()

    @precondition(lambda self: self.caps)
    @rule(data=st.data())
    def late_message(self, data: st.DataObject) -> None:
        """A message that nsqd sent before RDY was lowered, or a redelivery."""
        self.receive(data.draw(st.sampled_from(sorted(self.caps))), 1)

    def room(self, name: int) -> int:
        return max(0, self.at_nsqd[name] - self.in_flight[name])

    @precondition(lambda self: any(self.in_flight.values()))
    @rule(
        data=st.data(),
        result=st.sampled_from(["succeeded", "failed", "requeued_without_backoff", ""]),
    )
    def answer(self, data: st.DataObject, result: str) -> None:
        name = data.draw(st.sampled_from([n for n in sorted(self.caps) if self.in_flight[n]]))
        count = data.draw(st.integers(1, self.in_flight[name]))
        self.in_flight[name] -= count
        self.rdy.answered(name, count, self.now)
        if result:
            getattr(self.rdy, result)(self.now)
        self.deliver()

    @precondition(lambda self: self.rdy.mode is WAIT)
    @rule()
    def wait_ends(self) -> None:
        self.rdy.test(self.now)
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
        assert sum(self.at_nsqd.values()) <= self.max_in_flight

    @invariant()
    def both_sides_agree(self) -> None:
        for name in self.caps:
            assert self.rdy.states[name].rdy == self.at_nsqd[name]
            assert self.rdy.states[name].in_flight == self.in_flight[name]

    @invariant()
    def backoff_stops_the_flow(self) -> None:
        if self.rdy.mode is not NORMAL:
            most = 0 if self.rdy.mode is WAIT else 1
            assert sum(self.at_nsqd.values()) <= most

    def teardown(self) -> None:
        """At rest all messages are answered, backoff has ended, and no connection starves."""
        for name, count in self.in_flight.items():
            self.in_flight[name] = 0
            self.rdy.answered(name, count, self.now)
        if not (self.is_closed or self.rdy.mode is NORMAL):
            end_backoff(self.rdy, self.now)
        for later_s in (100, 200):
            self.rdy.redistribute(self.now + later_s)
        self.deliver()
        live = set() if self.is_closed else set(self.caps)
        if live and self.max_in_flight >= len(live):
            ready = {n: self.at_nsqd[n] for n in live}
            room = sum(self.caps[n] for n in live)
            assert sum(ready.values()) == min(self.max_in_flight, room)
            assert all(
                max(ready.values()) - 1 <= ready[n] or ready[n] == self.caps[n] for n in live
            )
        elif live:
            assert sum(self.at_nsqd.values()) == self.max_in_flight


ReadyMachine.TestCase.settings = settings(stateful_step_count=40)
TestReadyMachine = ReadyMachine.TestCase


# -- backoff and RDY as nsqd sees them ------------------------------------------------------------


QUICK = {"backoff_multiplier_s": 0.02}  # first delays: 40, 80, 160 ms


def as_the_body_says(message: Message) -> bool:
    if message.body == b"neutral":
        raise RequeueWithoutBackoff(0)
    return message.body == b"good"


def test_the_backoff_scenario_of_go_nsq(dialog: Dialog, handle: Handle) -> None:
    """Fail, fail, good, good: RDY 0 before each answer, RDY 1 after each wait, all at the end.

    A requeue without backoff is tested again.
    """
    consumer, conn = dialog("RDY 5", max_in_flight=5, **QUICK)
    handle(consumer, as_the_body_says)
    first = conn.message(b"bad")
    # in one write, because otherwise nsqd would send one more message in between
    assert conn.expect("RDY 0").read == conn.expect(f"REQ {first} 90000").read
    conn.expect("RDY 1")
    answers = {b"bad": "REQ {} 90000", b"neutral": "REQ {} 0", b"good": "FIN {}"}
    for body, answer in answers.items():
        message_id = conn.message(body)
        conn.expect("RDY 0")
        conn.expect(answer.format(message_id))
        conn.expect("RDY 1")
    last = conn.message(b"good")
    conn.expect("RDY 5")
    conn.expect(f"FIN {last}")


def test_giving_up_is_neither_success_nor_failure(
    scripted_nsqd: ScriptedNsqd, consume: Consume, handle: Handle
) -> None:
    given_up: queue.SimpleQueue[bytes] = queue.SimpleQueue()

    def take(message: Message) -> bool:
        given_up.put(message.body)
        return message.attempts > 4 and (message.attempts < 9 or not consumer.stop())

    options = {"max_in_flight": 5, "max_attempts": 3, "more": {"on_giving_up": take}, **QUICK}
    consumer = consume(scripted_nsqd.address, **options)
    handle(consumer, as_the_body_says)
    conn = scripted_nsqd.subscribed("RDY 5")
    hopeless = conn.message(b"bad")
    conn.skip_to("RDY 1")
    conn.message(b"bad", message_id=hopeless, attempts=4)
    conn.skip_to(f"REQ {hopeless} 360000")
    conn.skip_to("RDY 1")
    conn.message(b"bad", message_id=hopeless, attempts=5)
    conn.expect(f"FIN {hopeless}")
    assert given_up.get(timeout=patience_s(5)) == b"bad"
    wait_until(lambda: consumer._io.rdy.level == 2, what="backoff level 2")
    assert (consumer.stats.given_up, consumer.stats.requeued) == (1, 2)
    for ready in (1, 5):
        conn.message(b"good")
        conn.skip_to(f"RDY {ready}")
    conn.message(b"bad", message_id=hopeless, attempts=9)
    conn.skip_to("CLS")  # CLS need not wait for this message, which is answered
    conn.expect(f"FIN {hopeless}")


def test_an_nsqd_without_messages_does_not_delay_backoff(
    scripted_nsqd: ScriptedNsqd, consume: Consume, handle: Handle
) -> None:
    with ScriptedNsqd() as second:
        patient = {"low_rdy_idle_timeout_s": 300, "rdy_redistribute_interval_s": 5}
        consumer = consume([scripted_nsqd.address, second.address], **patient, **QUICK)
        handle(consumer, as_the_body_says)
        conns = [peer.subscribed() for peer in (scripted_nsqd, second)]
        for conn in conns:
            conn.skip_to("RDY 100")
        conns[0].message(b"bad")
        for conn in conns:
            conn.skip_to("RDY 0")
        for conn in conns:
            conn.skip_to("RDY 1")


def test_rdy_rotates_as_soon_as_it_is_scarce(scripted_nsqd: ScriptedNsqd, consume: Consume) -> None:
    """A regression would start the rotation with the next tick, up to 5 s later."""
    with ScriptedNsqd() as second:
        addresses = [scripted_nsqd.address, second.address]
        consumer = consume(addresses, max_in_flight=1, rdy_redistribute_interval_s=5)
        for peer in (scripted_nsqd, second):
            peer.subscribed()
        wait_until(lambda: len(consumer.connections) == 2, what="two connections")
        ticks: queue.SimpleQueue[Timer | None] = queue.SimpleQueue()
        consumer._io.loop.call_soon(lambda: ticks.put(consumer._io._redistributes))
        tick = ticks.get(timeout=patience_s(5))
        assert tick.interval_s == PROBE_S
