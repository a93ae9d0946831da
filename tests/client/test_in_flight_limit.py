"""The control law of messages in flight, with simulated handlers and a simulated clock.

Times of the simulation are in units of msg_timeout.
"""

import heapq
import itertools
import random
from collections.abc import Callable
from typing import Any, Literal

import pytest
from plugins.clients import CHANNEL, TOPIC, InBackground
from plugins.servers import AnyNsqd
from plugins.waiting import patience_s, wait_until

from nsqtools import ClientOptions, Consumer
from nsqtools.client.backlog import EXPIRED_SHARE, MAX_TICK_S
from nsqtools.client.in_flight_limit import START, TARGET_SHARE, InFlightLimit

TRANSIT = 0.001
TICK = 0.125

Kind = Literal["threads", "pool", "collector"]


class Simulation:
    """A channel that is never empty, and ``count`` handlers of ``handler_s``.

    ``threads`` take messages themselves: run, iteration, tasks. A ``pool`` gets them from a loop
    that takes all it can. A ``collector`` answers ``count`` messages together.
    """

    def __init__(self, kind: Kind, count: int, handler_s: float, jitter: float, seed: int) -> None:
        self.limit = InFlightLimit(ClientOptions())
        self.limit.msg_timeout_s = 1.0
        self.limit.connections = 1
        self.limit.is_busy = True
        self.limit.iterators = count if kind == "threads" else 1
        self.kind, self.count = kind, count
        self.answered = self.late = self.expired = 0
        self._free = 1 if kind == "collector" else count
        self._handler_s, self._jitter = handler_s, jitter
        self._random = random.Random(seed)
        self._in_flight: list[float] = []  # times of arrival
        self._waiting: list[float] = []
        self._coming = 0
        self._events: list[tuple[float, int, Callable[..., None], tuple[Any, ...]]] = []
        self._order = itertools.count()
        self.now = 0.0
        self._request()
        self._later(TICK, self._tick)

    def run(self, until: int) -> float:
        """Run until this many messages are answered; return the time that it took."""
        began = self.now
        while self.answered < until:
            assert self.now < 100_000, f"a deadlock at {self.limit.current} in flight"
            self.now, _, call, arguments = heapq.heappop(self._events)
            call(*arguments)
        return self.now - began

    def _later(self, delay_s: float, call: Callable[..., None], *taken: Any) -> None:
        heapq.heappush(self._events, (self.now + delay_s, next(self._order), call, taken))

    def _request(self) -> None:
        while len(self._in_flight) + self._coming < self.limit.current:
            self._coming += 1
            self._later(TRANSIT, self._arrive)

    def _arrive(self) -> None:
        self.limit.advance_clock(self.now, len(self._in_flight))
        self._coming -= 1
        self._in_flight.append(self.now)
        self._waiting.append(self.now)
        self.limit.was_used |= len(self._in_flight) >= self.limit.current
        self._serve()

    def _serve(self) -> None:
        together = self.count if self.kind == "collector" else 1
        while self._free and len(self._waiting) >= together:
            taken, self._waiting = self._waiting[:together], self._waiting[together:]
            self._free -= 1
            takes_s = self._handler_s * self._random.uniform(1 - self._jitter, 1 + self._jitter)
            self._later(takes_s, self._answer, taken)

    def _answer(self, taken: list[float]) -> None:
        self.limit.advance_clock(self.now, len(self._in_flight))
        late = sum(self.now - came > 1 for came in taken)
        for came in taken:
            self._in_flight.remove(came)
        self.late += late
        self.answered += len(taken)
        self._free += 1
        self.limit.answered(len(taken))
        if late:
            self.limit.timed_out(len(self._in_flight) + len(taken), self.now)
        self._serve()
        self._adapt()

    def _tick(self) -> None:
        self.limit.advance_clock(self.now, len(self._in_flight))
        if self.kind == "threads":
            for came in [
                arrival for arrival in self._waiting if self.now - arrival > EXPIRED_SHARE
            ]:
                self._waiting.remove(came)
                self._in_flight.remove(came)
                self.expired += 1
        asks = self.kind != "threads" or (self._free > 0 and not self._waiting)
        self.limit.sample(len(self._in_flight), is_starved=asks)
        self._adapt()
        self._later(TICK, self._tick)

    def _adapt(self) -> None:
        waits, came = self.kind == "threads" and bool(self._waiting), self._in_flight
        self.limit.adapt(
            len(came), lambda: sum(self.now - arrival for arrival in came), is_pending=waits
        )
        self._request()


@pytest.mark.parametrize("handler_s", [0.001, 0.1, 0.35, 0.7])
@pytest.mark.parametrize("kind", ["threads", "pool"])
def test_handlers_are_busy_and_answer_in_time(kind: Kind, handler_s: float) -> None:
    """Only the answers of a pool are known, so finding its size costs a few late ones."""
    for count, jitter, seed in [(1, 0.1, 1), (2, 0.0, 1), (4, 0.1, 2), (12, 0.0, 2), (32, 0.1, 1)]:
        simulated = Simulation(kind, count, handler_s, jitter, seed)
        simulated.run(1000)
        learned = simulated.late + simulated.expired
        took_s = simulated.run(3000)
        rate = 2000 * handler_s / count / took_s
        late = simulated.late + simulated.expired - learned
        about = f"{count} of {handler_s} +- {jitter}: {rate:.2f}, {late}, before {learned}"
        assert rate > (0.9 if handler_s <= 0.35 or kind == "threads" else 0.75), about
        assert late <= 20, about
        assert learned <= (10 if kind == "threads" or handler_s < 0.5 else 20 + count), about


@pytest.mark.parametrize("handler_s", [0.02, 0.1])
def test_one_round_reaches_the_fixed_point_of_the_law(handler_s: float) -> None:
    """With k handlers and a queue the limit is k W* / s."""
    limit = InFlightLimit(ClientOptions(max_in_flight=10_000))
    limit.msg_timeout_s, limit.iterators, limit.is_busy = 1.0, 4, True
    limit._law = in_flight = int(1.5 * 4 * TARGET_SHARE / handler_s)
    now = 0.0
    for _ in range(in_flight // 4 + 1):  # 4 answers in each handler_s
        now += handler_s
        limit.advance_clock(now, in_flight)
        limit.answered(4)
    limit.was_used = True
    limit.adapt(in_flight, lambda: 0.0, is_pending=True)
    assert limit.current == pytest.approx(4 * TARGET_SHARE / handler_s, abs=1 + 0.1 * in_flight)


@pytest.mark.parametrize("handler_s", [0.001, 0.1])
@pytest.mark.parametrize("count", [2, 10, 100, 150])
def test_a_collector_gets_its_batches(count: int, handler_s: float) -> None:
    simulated = Simulation("collector", count, handler_s, 0.1, 1)
    simulated.run(10 * count)
    assert simulated.late <= count  # only messages of the first batch
    took_s = simulated.run(30 * count)
    assert took_s < 20 * handler_s * 1.5 + 1


@pytest.mark.parametrize(
    ("iterators", "is_starved", "in_flight", "expected"),
    [
        (1, True, None, {0: 8, 1: 64, 2: 200}),  # a collector has all messages within a second
        (1, False, None, {33: 1}),  # a busy iterator has one
        (4, False, 1, {0: 1, 20: 1, 38: 4}),  # the first message hangs
    ],
)
def test_growth_without_an_answer(
    iterators: int, is_starved: bool, in_flight: int | None, expected: dict[int, int]
) -> None:
    limit = InFlightLimit(ClientOptions())  # with a msg_timeout of 60 s
    limit.connections, limit.iterators, limit.is_busy = 1, iterators, True
    limits = []
    for tick in range(1, 40):
        count = in_flight or limit.current
        limit.advance_clock(MAX_TICK_S * tick, count)
        limit.sample(count, is_starved=is_starved)
        limit.adapt(count, lambda: 0.0, is_pending=False)
        limits.append(limit.current)
    assert {at: limits[at] for at in expected} == expected


def test_the_limit_follows_the_speed_of_handlers() -> None:
    for kind in ("threads", "pool"):
        simulated = Simulation(kind, 4, 0.0001, 0.1, 1)  # type: ignore[arg-type]
        fits: Any = {10_000: (0.0001, 5, 200), 10_500: (0.2, 4, 12), 20_000: (0.0001, 5, 200)}
        for until, (simulated._handler_s, least, most) in fits.items():
            simulated.run(until)
            assert least <= simulated.limit.current <= most


@pytest.mark.parametrize(
    ("rate", "connections", "least", "most"),
    [(20_000, 1, 500, 1000), (20_000, 1000, 2500, 2500), (100, 1, 1, 5), (100, 1000, 20, 50)],
)
def test_more_messages_may_be_pending_while_they_wait_briefly(
    rate: int, connections: int, least: int, most: int
) -> None:
    limit, now = InFlightLimit(ClientOptions(max_in_flight=2500)), 0.0
    limit.connections, limit.iterators, limit.is_busy = connections, 1, True
    for _ in range(20):
        demand = limit.current
        now += demand / rate
        limit.advance_clock(now, demand)
        limit.was_used = True
        limit.answered(demand)
        limit.adapt(demand, lambda: 0.0, is_pending=True)
    assert least <= limit.current <= most


def test_a_brief_stall_of_handlers_does_not_count_as_slow() -> None:
    limit = InFlightLimit(ClientOptions(max_in_flight=2500))
    limit.iterators, limit.is_busy = 1, True
    limit.answered(1)
    limit._law = 2500
    counts = []
    for now in (0, 0.5, 1.5):
        limit.advance_clock(now, 2500)
        limit.adapt(2500, lambda: 0.0, is_pending=True)
        counts.append(limit.current)
    assert counts[:2] == [2500, 2500]
    assert counts[2] < 100


def test_the_first_message_is_alone_until_its_answer() -> None:
    limit = InFlightLimit(ClientOptions())
    limit.connections, limit.iterators, limit.is_busy = 30, 8, True
    assert (limit.current, START) == (1, 1)
    limit.answered(1)
    assert limit.current == 8
    limit = InFlightLimit(ClientOptions())
    limit.batch_size = 150
    assert limit.current == 150


def test_each_connection_may_have_a_message_while_handlers_are_idle() -> None:
    limit = InFlightLimit(ClientOptions(max_in_flight=150))
    limit.connections, limit.iterators = 200, 1
    assert limit.current == 200 // 20  # RDY rotates through all connections in two seconds
    limit.iterators = 0
    assert limit.current == 150  # for a consumer of batches
    limit.iterators = 1
    limit.answered(1)
    limit.is_busy = True
    assert limit.current == 1
    limit.is_busy = False
    assert limit.current == 10  # because it is not known to be fast
    limit.was_used = True
    limit.advance_clock(1.0, 1)
    limit.adapt(0, lambda: 0.0, is_pending=False)
    assert limit.current == 10


def test_timeouts_with_handlers_halve_the_limit_once_in_a_timeout() -> None:
    limit = InFlightLimit(ClientOptions())
    limit._law = 200
    counts = []
    for now in (0, 1, 59, 60, 120):
        limit.timed_out(limit.current, now)
        counts.append(limit.current)
    assert counts == [100, 100, 100, 50, 25]
    limit.timed_out(limit.current // 2, 180)
    assert limit.current == 25  # many timeouts do not halve it repeatedly


def test_a_pause_leaves_the_limit_as_it_was() -> None:
    """A regression lowered it to 0 permanently, which ended the I/O thread."""
    limit = InFlightLimit(ClientOptions())
    limit.is_busy = limit.was_used = True
    limit._law = 8
    limit.maximum = 0
    for now in range(1, 20):
        limit.advance_clock(now, 8)
        limit.sample(8, is_starved=True)
        if now == 10:
            limit.answered(8)
        limit.adapt(8, lambda: 0.0, is_pending=False)
        assert limit.current == 0
    limit.maximum = 200
    assert limit.current == 8


# -- max_in_flight_bytes: the memory for large messages, on real servers ---------------------------


LARGE = 500_000


def test_few_large_messages_are_in_flight(any_nsqd: AnyNsqd, in_background: InBackground) -> None:
    servers = [any_nsqd() for _ in range(3)]
    for nsqd in servers:
        nsqd.create_channel(TOPIC, CHANNEL)
        for _ in range(6):
            nsqd.publish(TOPIC, *[bytes(LARGE)] * 8)
    options = ClientOptions(output_buffer_timeout_s=0.025, max_in_flight_bytes=10 * LARGE)
    addresses = [nsqd.tcp_address for nsqd in servers]
    consumer = Consumer(TOPIC, CHANNEL, nsqd_tcp_addresses=addresses, options=options)
    delivery, in_flight = consumer._io.delivery, list[int]()

    def has_all_of_200() -> bool:
        servers[0].publish(TOPIC, *[b"small"] * 100)
        return delivery.in_flight_limit.current == 200

    running = in_background(consumer.run, lambda _: in_flight.append(consumer._io.rdy.in_flight))
    try:
        wait_until(lambda: len(in_flight) == 3 * 6 * 8, what="the large ones", timeout_s=20)
        assert max(in_flight) <= 2 * 10  # instead of 200
        assert delivery.in_flight_limit.current <= 10
        wait_until(has_all_of_200, what="all of 200 again")
    finally:
        consumer.begin_stop()
    running.result(patience_s(20))


def test_the_size_of_messages_limits_their_number() -> None:
    limit = InFlightLimit(ClientOptions(max_in_flight_bytes=1000))
    limit._law = 200
    assert (limit.current, limit.is_by_bytes) == (200, False)
    for size, count, expected in [(1000, 10, 10), (5000, 1, 1), (10, 10, 200), (0, 5, 200)]:
        limit.weigh(size, count)
        assert (limit.current, limit.is_by_bytes) == (expected, expected < 200)
    unlimited = InFlightLimit(ClientOptions(max_in_flight_bytes=0))
    unlimited._law = 200
    unlimited.weigh(1 << 40, 1)
    assert unlimited.current == 200
