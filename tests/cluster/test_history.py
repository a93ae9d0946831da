"""The history of a cluster: its retention, resolution and gaps."""

from typing import Any

import pytest

from nsqtools.cluster.history import QUANTITIES, History
from nsqtools.cluster.queue_rows import QueueRow, Rates, totals
from nsqtools.cluster.sampling import Sample

START_S = 1_800_000_000.0
CHANNEL = ("", "clicks", "archive")


def row(**changed: Any) -> QueueRow:
    rates = Rates(ingress=5.0, egress=4.0, finish=3.0, requeue=2.0, timed_out=1.0)
    fields = {"node": "a:1", "topic": "clicks", "channel": "archive", "depth": 7, "disk": 0}
    return QueueRow(**{**fields, "messages": 9, "paused": False, "rates": rates, **changed})


def sample(at_s: float, *rows: QueueRow) -> Sample:
    return Sample(START_S + at_s, list(rows), totals(rows), (), ())


def test_every_quantity_is_kept_for_queues_nsqd_and_the_cluster() -> None:
    history = History()
    busy = row(in_flight=1, deferred=2, clients=3, latency=((0.5, 0.1), (0.99, 0.25)))
    history.add(sample(0, busy, row(node="b:1", depth=1)))

    def now(key: tuple[str, str, str]) -> dict[str, float | None]:
        series = {name: history.series([key], name, since_s=START_S - 1) for name in QUANTITIES}
        return {name: points[0][1] for name, points in series.items()}

    expected = dict(zip(QUANTITIES, (8, 1, 3, 10, 6, 4, 0.25), strict=True))
    assert now(CHANNEL) == expected
    assert now(("b:1", "", ""))["depth"] == 1
    # no message was sent to topics
    assert list(now(("", "", "")).values())[:6] == [8, 1, 3, 0, 6, 4]

    # several series are added, except latencies, of which the worst counts
    history = History()
    queues = [row(latency=((0.99, 0.25),)), row(channel="billing", depth=3, latency=((0.5, 2.0),))]
    history.add(sample(0, *queues))
    history.add(sample(2, queues[0]))
    both = [CHANNEL, ("", "clicks", "billing"), ("", "clicks", "unknown")]
    assert [value for _, value in history.series(both, "depth", since_s=START_S)] == [10, 7]
    assert [value for _, value in history.series(both, "latency", since_s=START_S)] == [2.0, 0.25]


def test_older_samples_are_kept_in_coarser_points() -> None:
    history = History(interval_s=5)
    for at_s in range(0, 5400, 5):
        history.add(sample(at_s, row(depth=at_s)))
    now_s = START_S + 5400

    minute = history.series([CHANNEL], "depth", since_s=now_s - 60)
    hour = history.series([CHANNEL], "depth", since_s=now_s - 3500)
    everything = history.series([CHANNEL], "depth", since_s=now_s - 5400)

    assert [at_s - START_S for at_s, _ in minute] == list(range(5340, 5400, 5))
    assert hour[1][0] - hour[0][0] == 10
    assert everything[1][0] - everything[0][0] == 60
    assert len(everything) < 110
    # a mean lies in the middle of its interval, up to where finer points begin
    assert all(abs((at_s - START_S) - (value or 0)) <= 2.5 for at_s, value in everything)
    assert [at_s for at_s, _ in everything] == sorted({at_s for at_s, _ in everything})
    assert everything[-1][0] == now_s - 5


GONE, PAUSED = [(0, 7), (2, None), (4, 7)], [(36, 7), (84, None), (132, 7)]
UNKNOWN = [(8, None), (10, None), (20, None)]


@pytest.mark.parametrize(
    ("samples", "since_s", "points"),
    [
        # a queue that was deleted, a late sample, and a pause
        ([*GONE, (36, 7), (132, 7)], 0, [*GONE, *PAUSED]),
        # a clock that was set back continues from the earlier time
        ([*((at_s, at_s) for at_s in range(0, 60, 2)), (10, 1)], 7, [(8, 8), (10, 1)]),
        ([(0, 1), (2, 2), (-600, 3), (-598, 4)], -700, [(-600, 3), (-598, 4)]),
        # means leave out unknown values
        ([(0, 2), (4, 4), *UNKNOWN], -3000, [(5, 3), (15, None), (20, None)]),
        # numbers are exact
        ([(0, 16_777_217), (2, 2**53 - 1)], 0, [(0, 16_777_217), (2, 2**53 - 1)]),
    ],
)
def test_points_match_the_samples_and_their_gaps(
    samples: list[tuple[float, int | None]],
    since_s: float,
    points: list[tuple[float, float | None]],
) -> None:
    history = History()
    for at_s, depth in samples:
        history.add(sample(at_s, *([] if depth is None else [row(depth=depth)])))

    series = history.series([CHANNEL], "depth", since_s=START_S + since_s)

    assert series == [(START_S + at_s, value) for at_s, value in points]


def test_a_full_history_replaces_its_oldest_series(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr("nsqtools.cluster.history.MAX_SERIES", 4)  # two are the sums
    history = History()
    history.add(sample(0, row(topic="old", depth=1), row(topic="stays", depth=2)))
    history.add(sample(2, row(topic="stays", depth=2)))
    new = [row(topic="new", depth=3), row(topic="newer", depth=4)]
    history.add(sample(4, row(topic="stays", depth=2), *new))

    def depths(topic: str) -> list[float | None]:
        points = history.series([("", topic, "archive")], "depth", since_s=START_S)
        return [value for _, value in points]

    assert depths("old") == []
    assert depths("stays") == [2, 2, 2]
    assert depths("new") == [3]
    assert depths("newer") == []
    assert "no room for 1 more queues" in caplog.text
