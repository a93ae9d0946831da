"""Two things that were measured in turns: their figures, and whether they differ. Pure.

Each side has a figure of every round, and its median stands for it. Two sides differ when rounds of
equal sides would be as far apart in at most one of twenty comparisons: the exact rank sum test of
Wilcoxon, which asks nothing of how figures are spread. Fewer than four rounds of each cannot tell.
"""

from __future__ import annotations

import statistics
from bisect import bisect_left, bisect_right
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from nsqtools.bench.bench_plan import BenchMode
from nsqtools.bench.bench_report import latency_document
from nsqtools.bench.latency import Latencies

NOISE = 0.05


class Round(NamedTuple):
    """One measurement. ``cpu_us_per_message`` is processor time of the client in microseconds."""

    messages: int
    seconds: float
    bytes: int
    cpu_us_per_message: float
    latencies: Latencies | None = None

    @property
    def figures(self) -> dict[str, float]:
        """What is compared, by name."""
        seconds = self.seconds or 1e-9
        figures = {
            "messages_per_s": self.messages / seconds,
            "bytes_per_s": self.bytes / seconds,
            "cpu_us_per_message": self.cpu_us_per_message,
        }
        if self.latencies is not None:
            percentiles = self.latencies.percentiles_ms()
            figures |= {f"latency_{name}_ms": percentiles[name] for name in ("p50", "p99")}
        return figures


class Spread(NamedTuple):
    """The figures of all rounds of a side."""

    median: float
    min: float
    max: float

    @classmethod
    def of(cls, values: Sequence[float]) -> Spread:
        return cls(statistics.median(values), min(values), max(values))


@dataclass(slots=True)
class Side:
    """What is compared: settings of ``nsq bench``, or a program. ``limits`` says what held its
    last round down."""

    name: str
    what: str
    is_program: bool
    nsqds: tuple[str, ...]
    rounds: list[Round] = field(default_factory=list)
    limits: list[str] = field(default_factory=list)

    def values(self, figure: str) -> list[float]:
        """A figure of every round."""
        return [each.figures[figure] for each in self.rounds]

    @property
    def latencies(self) -> Latencies | None:
        """Those of all rounds; None where none were measured."""
        measured = [each.latencies for each in self.rounds if each.latencies is not None]
        return Latencies.merged(measured) if measured else None


class Difference(NamedTuple):
    """A figure on both sides. ``chance`` is how often equal sides would be as far apart."""

    figure: str
    a: Spread
    b: Spread
    chance: float
    can_tell: bool

    @property
    def ratio(self) -> float | None:
        """How many times A's median B's is."""
        return self.b.median / self.a.median if self.a.median else None

    @property
    def is_noise(self) -> bool | None:
        """Whether the sides may well be equal; None where there were too few rounds to tell."""
        return self.chance > NOISE if self.can_tell else None

    @property
    def verdict(self) -> str:
        """`is_noise` in words."""
        return {None: "too few rounds", True: "within the noise", False: "different"}[self.is_noise]


@dataclass(frozen=True, slots=True)
class Comparison:
    """Both sides with all their rounds, of which each has at least one."""

    mode: BenchMode
    a: Side
    b: Side
    interrupted: bool = False

    @property
    def differences(self) -> list[Difference]:
        """Every figure that both sides have."""
        return [
            Difference(
                figure,
                Spread.of(a := self.a.values(figure)),
                Spread.of(b := self.b.values(figure)),
                chance(a, b),
                least_chance(len(a), len(b)) <= NOISE,
            )
            for figure in self.a.rounds[0].figures
            if figure in self.b.rounds[0].figures
        ]

    def document(self) -> dict[str, Any]:
        """The comparison as JSON."""
        return {
            "mode": self.mode.value,
            "rounds": min(len(self.a.rounds), len(self.b.rounds)),
            "a": self._side(self.a),
            "b": self._side(self.b),
            "differences": [
                {
                    "figure": each.figure,
                    "a": _rounded(each.a),
                    "b": _rounded(each.b),
                    "ratio": None if each.ratio is None else round(each.ratio, 4),
                    "chance": round(each.chance, 4),
                    "is_noise": each.is_noise,
                }
                for each in self.differences
            ],
            "interrupted": self.interrupted,
        }

    def _side(self, side: Side) -> dict[str, Any]:
        return {
            "what": side.what,
            "program": side.is_program,
            "nsqds": list(side.nsqds),
            "rounds": [
                {
                    "messages": each.messages,
                    "seconds": round(each.seconds, 6),
                    **{figure: round(value, 4) for figure, value in each.figures.items()},
                }
                for each in side.rounds
            ],
            "latency_ms": latency_document(self.mode, side.latencies),
            "limits": side.limits,
        }


def _rounded(spread: Spread) -> dict[str, float]:
    return {name: round(value, 4) for name, value in spread._asdict().items()}


def chance(a: Sequence[float], b: Sequence[float]) -> float:
    """How likely the ranks of two equal sides are as far apart as these, or farther.

    Ranks are doubled: those of equal values are halves.
    """
    together = sorted([*a, *b])
    ranks = [bisect_left(together, each) + bisect_right(together, each) + 1 for each in together]
    ways: list[Counter[int]] = [Counter({0: 1}), *(Counter() for _ in a)]
    for rank in ranks:  # the number of choices of so many ranks, by their sum
        for size in range(len(a), 0, -1):
            for total, count in ways[size - 1].items():
                ways[size][total + rank] += count
    mean = len(a) * (len(together) + 1)
    sum_of_a = sum(bisect_left(together, each) + bisect_right(together, each) + 1 for each in a)
    far = abs(sum_of_a - mean)
    chosen = ways[len(a)]
    as_far = sum(count for total, count in chosen.items() if abs(total - mean) >= far)
    return as_far / chosen.total()


def least_chance(a: int, b: int) -> float:
    """The least `chance` that so many rounds can have."""
    return chance(range(a), range(a, a + b))
