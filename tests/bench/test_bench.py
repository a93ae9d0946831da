"""The parts of a measurement: latencies, limits in the report, workers, and stalls."""

import os
import pickle
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest

from nsqtools.bench.bench import Bench
from nsqtools.bench.bench_plan import (
    BACKLOG,
    BenchMode,
    BenchPlan,
    latency_figures,
    limits,
    new_sketch,
)
from nsqtools.bench.worker import Crew, SharedCounts
from nsqtools.client.connection_settings import ConnectionSettings
from nsqtools.client.options import ClientOptions

OPTIONS = {"producer_options": ClientOptions(), "consumer_options": ClientOptions()}
PLAN = BenchPlan(mode=BenchMode.PUB, connection=ConnectionSettings(), count=10, **OPTIONS)


def test_figures_cover_all_parts_with_an_error_below_1_percent() -> None:
    parts = [new_sketch(), new_sketch()]
    for number in range(1, 2001):
        parts[number % 3 == 0].add(number / 2, 3)

    figures: dict[str, Any] = dict(latency_figures(pickle.loads(pickle.dumps(parts)), "batch"))

    expected = {"min": 0.5, "mean": 500.25, "p50": 500, "p90": 900, "p99": 990, "p99.9": 999}
    assert {"of", "count", "max", *expected} == figures.keys()
    for name, value in {**expected, "count": 6000, "max": 1000}.items():
        assert figures[name] == pytest.approx(value, rel=0.0101), name
    assert set(latency_figures([], "batch").values()) == {"batch", 0}


def test_a_report_names_the_limit() -> None:
    assert limits(0.5, 0.5, 99.0, rate=100.0) == []
    client, machine, rate = limits(0.97, 0.99, 50.0, rate=100.0)
    assert client.startswith(
        "the client was the limit: its busiest process used 97% of a processor"
    )
    assert machine.startswith("this machine was the limit")
    assert rate == "the rate of 100 messages/s was not reached"


def test_the_error_of_a_worker_is_raised_unchanged() -> None:
    job: Any = SimpleNamespace(plan=SimpleNamespace(connections=1))
    with pytest.raises(AttributeError, match="publishes"):
        Crew([job], SharedCounts(1), lambda: None)


def test_consumers_that_have_just_begun_have_not_stalled() -> None:
    """Otherwise the publishers of e2e would end immediately on a busy machine, without a reason."""
    bench = Bench(replace(PLAN, mode=BenchMode.E2E))
    bench._counters.published[0] = BACKLOG
    bench._phase = "publishing and consuming"
    bench._check_progress()
    assert bench._counters.may_publish
    os.close(bench._counters.fileno)
