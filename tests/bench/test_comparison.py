"""When two sides differ, and when that is noise; charts that a browser can read."""

from __future__ import annotations

import random
from itertools import combinations
from xml.etree import ElementTree

import pytest
from hypothesis import given
from hypothesis import strategies as st

from nsqtools.bench.bench_plan import BenchMode
from nsqtools.bench.comparison import Comparison, Round, Side, chance, least_chance
from nsqtools.bench.latency import Latencies
from nsqtools.cli.render.compare_output import _figures_table, comparison_page


def side(name: str, rates: list[float], what: str = "pub") -> Side:
    rounds = [Round(1000, 1000 / rate, 200_000, 2e6 / rate, latencies(rate)) for rate in rates]
    return Side(name, what, is_program=False, nsqds=("127.0.0.1:4150",), rounds=rounds)


def latencies(rate: float) -> Latencies:
    made = Latencies()
    made.add(1000 / rate, 10)
    made.add(1e6, 1)  # a minute and more: the open class
    return made


@pytest.mark.parametrize(
    ("a", "b", "verdict"),
    [
        ([100, 101, 102, 103, 104], [110, 111, 112, 113, 114], "different"),
        ([100, 110, 102, 112, 104], [101, 111, 103, 113, 105], "within the noise"),
        ([100, 100, 100, 100], [100, 100, 100, 100], "within the noise"),
        ([100, 101, 102], [200, 201, 202], "too few rounds"),
    ],
)
def test_sides_differ_when_their_rounds_hardly_overlap(
    a: list[float], b: list[float], verdict: str
) -> None:
    comparison = Comparison(BenchMode.PUB, side("A", a), side("B", b))

    rates = comparison.differences[0]
    assert (rates.figure, rates.verdict) == ("messages_per_s", verdict)
    assert rates.ratio == pytest.approx(rates.b.median / rates.a.median)
    costs = comparison.differences[2]
    assert (costs.figure, costs.verdict) == ("cpu_us_per_message", verdict)


VALUES = st.lists(st.integers(0, 8).map(float), min_size=2, max_size=5)


@given(VALUES, VALUES)
def test_the_chance_is_that_of_all_ways_to_deal_the_ranks(a: list[float], b: list[float]) -> None:
    together = sorted([*a, *b])
    ranks = [
        (together.index(each) + len(together) - together[::-1].index(each) - 1) / 2
        for each in together
    ]
    mean = len(a) * sum(ranks) / len(ranks)
    mine = sum(ranks[together.index(each)] for each in a)
    dealt = [abs(sum(chosen) - mean) for chosen in combinations(ranks, len(a))]

    as_far = sum(distance >= abs(mine - mean) - 1e-9 for distance in dealt)
    assert chance(a, b) == pytest.approx(as_far / len(dealt))


def test_equal_sides_seldom_seem_different() -> None:
    rng = random.Random(18)
    different = sum(
        chance([rng.random() for _ in range(5)], [rng.random() for _ in range(5)]) <= 0.05
        for _ in range(400)
    )

    assert different < 30
    assert least_chance(4, 4) <= 0.05 < least_chance(3, 3)


def test_the_page_is_whole_and_loads_nothing_from_elsewhere() -> None:
    evil = "pub <script>alert(1)</script> --x 'https://example.com'"
    a, b = side("A", [100.0, 120.0], evil), side("B", [50.0])

    page = comparison_page(Comparison(BenchMode.PUB, a, b), "2026-11-22T00:00:00Z")

    _, _, rest = page.partition("<body>")
    body = ElementTree.fromstring("<body>" + rest.partition("</html>")[0])
    svg = "{http://www.w3.org/2000/svg}"
    assert len(list(body.iter(f"{svg}svg"))) == 6  # a chart of each figure, and the histogram
    circles = list(body.iter(f"{svg}circle"))
    assert len(circles) == 5 * 3
    assert "<script" not in page
    assert "script&gt;" in page
    assert not [each for each in body.iter() if {"src", "href"} & set(each.attrib)]
    assert "default-src 'none'" in page


@pytest.mark.parametrize(("width", "spreads"), [(80, 0), (140, 2)])
def test_no_figure_is_cut_on_a_terminal(width: int, spreads: int) -> None:
    comparison = Comparison(BenchMode.PUB, side("A", [123_456.0]), side("B", [1_234_567.0]))

    head, *rows = _figures_table(comparison, width)

    assert head.count("from - to") == spreads
    assert [row.split()[1:3] for row in rows[:1]] == [
        ["123,456", "123,456" if spreads else "1,234,567"]
    ]
    assert all(len(row) <= width and "…" not in row for row in rows)
