"""The parts of a measurement: latencies, bodies, shared counters, plans, and what a report says."""

from __future__ import annotations

import os
import pickle
import random
from dataclasses import replace
from typing import Any

import pytest

from nsqtools.bench.bench import Bench
from nsqtools.bench.bench_plan import (
    BACKLOG,
    HEAD_SIZE,
    BenchMode,
    BenchPlan,
    BodyMaker,
    first_word,
    has_stamp,
    latency_figures,
    limits,
    new_sketch,
    read_stamps,
)
from nsqtools.bench.crew import UNKNOWN, SharedCounts
from nsqtools.client.connection_settings import ConnectionSettings
from nsqtools.client.options import ClientOptions
from nsqtools.errors import ConfigurationError

PLAN = BenchPlan(
    mode=BenchMode.PUB,
    connection=ConnectionSettings(),
    producer_options=ClientOptions(),
    consumer_options=ClientOptions(),
    count=10,
)


def test_figures_are_those_of_all_parts_exact_to_a_percent() -> None:
    parts = [new_sketch(), new_sketch()]
    for number in range(1, 2001):
        parts[number % 3 == 0].add(number / 2, 3)

    figures: dict[str, Any] = dict(latency_figures(pickle.loads(pickle.dumps(parts)), "batch"))

    expected = {"min": 0.5, "mean": 500.25, "p50": 500, "p90": 900, "p99": 990, "p99.9": 999}
    assert {"of", "count", "max", *expected} == figures.keys()
    for name, value in {**expected, "count": 6000, "max": 1000}.items():
        assert figures[name] == pytest.approx(value, rel=0.0101), name
    assert set(latency_figures([], "batch").values()) == {"batch", 0}


@pytest.mark.parametrize("size", [(1, 1), (10, 300), (1 << 16, 1 << 16)])
def test_bodies_have_the_size_and_come_again_the_same(size: tuple[int, int]) -> None:
    bodies, again = BodyMaker(size, seed=1), BodyMaker(size, seed=1)

    made = [body for _ in range(3) for body in bodies.batch(7)]

    assert made == [body for _ in range(3) for body in again.batch(7)]
    assert all(size[0] <= len(body) <= size[1] for body in made)
    assert [len(bodies.batch(count)) for count in (3, 9)] == [3, 9]


def test_stamps_are_read_as_they_were_put() -> None:
    bodies = BodyMaker((HEAD_SIZE, 100), 3, HEAD_SIZE)
    word = first_word(0xBEEF, 7)

    stamped = [*bodies.stamped(3, 11, word), *bodies.stamped(2, 12, word + 3)]

    assert read_stamps(stamped) == ([11, 11, 11, 12, 12], [word + n for n in range(5)])
    assert all(has_stamp(body, 0xBEEF) for body in stamped)
    assert not any(has_stamp(body, 0xBEE0) for body in [*stamped, b"", b"short"])
    assert read_stamps([]) == ([], [])


def test_counters_are_shared_by_their_file() -> None:
    first = SharedCounts(2)
    second = SharedCounts(2, first.fileno)

    second.published[1] += 5
    second.consumed[0] += 3
    first.published[0] += 1

    assert (list(first.published), list(first.consumed)) == ([1, 5], [3, 0])
    assert (second.on_the_way, second.target) == (3, UNKNOWN)
    first.target = 6
    first.stop_consuming()
    assert (second.target, second.may_publish, second.may_consume) == (6, True, False)
    os.close(first.fileno)
    first.stop_publishing()  # a signal may come late


def test_a_plan_that_cannot_be_is_refused() -> None:
    for change in (
        {"size": (10, 5)},
        {"mode": BenchMode.E2E, "size": (HEAD_SIZE - 1, 100)},
        {"connections": 0},
        {"connections": 1000},
        {"for_s": 0.0},
        {"connection": ConnectionSettings(("host:nonsense",))},
    ):
        with pytest.raises(ConfigurationError):
            replace(PLAN, **change)  # type: ignore[arg-type]


def test_shares_of_a_count_are_even_and_add_up() -> None:
    for _ in range(20):
        connections, count = random.randint(1, 9), random.randint(0, 100)
        plan = replace(PLAN, connections=connections, count=count)
        shares = [plan.share(number) or 0 for number in range(connections)]
        assert sum(shares) == count
        assert max(shares) - min(shares) <= 1


def test_a_report_says_what_was_the_limit() -> None:
    assert limits(0.5, 0.5, 99.0, rate=100.0) == []
    client, machine, rate = limits(0.97, 0.99, 50.0, rate=100.0)
    assert client.startswith(
        "the client was the limit: its busiest process used 97% of a processor"
    )
    assert machine.startswith("this machine was the limit")
    assert rate == "the rate of 100 messages/s was not reached"


def test_consumers_that_have_just_begun_have_not_stalled() -> None:
    """Else the publishers of e2e end at once where the machine is busy, and nobody knows why."""
    bench = Bench(replace(PLAN, mode=BenchMode.E2E))
    bench._counters.published[0] = BACKLOG
    bench._phase = "publishing and consuming"
    bench._look()
    assert bench._counters.may_publish
    os.close(bench._counters.fileno)
