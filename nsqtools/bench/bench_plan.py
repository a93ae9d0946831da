"""What a measurement is to do, the part of it that one worker process does, and its messages.

Bodies are text that compresses as log lines do, preceded by stamps. A stamp is two numbers of 64
bits in the machine's own order, for both sides are on one machine: the time, and a word that no
other message of the run has. The sum of all words, modulo 2**64, is the checksum by which what came
is compared with what went.

A report is what came of it: rates, latencies, whether the counts agree, what was the limit.

Percentiles come from a DDSketch, exact to one percent whatever the number of values.
"""

from __future__ import annotations

import random
import struct
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from enum import Enum
from typing import Any, NamedTuple

from ddsketch import DDSketch

from nsqtools.client.options import ClientOptions
from nsqtools.errors import ConfigurationError
from nsqtools.protocol.names import parse_address

HEAD = struct.Struct("=QQ")
HEAD_SIZE = HEAD.size
MAX_TAG = 0xFFFF

POOL_SIZE = 1 << 20
KEPT_BATCHES = 32
KEPT_TAILS = 1024

_WORDS = [
    "GET",
    "POST",
    "200",
    "304",
    "/",
    "/pricing",
    "/docs/install",
    "/cart",
    "HTTP/1.1",
    "user",
    "session",
    "Firefox/145.0",
    "Chrome/142.0",
    "latency_ms",
    "region",
    "eu-west",
    "us-east",
]


class BodyMaker:
    """Makes bodies of ``low`` to ``high`` bytes, the same ones for the same ``seed``."""

    def __init__(self, size: tuple[int, int], seed: int) -> None:
        self._low, self._high = size
        self._rng = random.Random(seed)
        self._pool = _text(self._rng, max(POOL_SIZE, 2 * self._high))
        self._batches: list[list[bytes]] = []
        self._tails: list[bytes] = []
        self._turn = 0

    def batch(self, count: int) -> list[bytes]:
        """``count`` bodies without a stamp. They repeat: making them is not measured."""
        if not self._batches or len(self._batches[0]) < count:
            self._batches = [
                [self._cut(self._size()) for _ in range(count)] for _ in range(KEPT_BATCHES)
            ]
        self._turn += 1
        bodies = self._batches[self._turn % KEPT_BATCHES]
        return bodies if len(bodies) == count else bodies[:count]

    def stamped(self, count: int, time_ns: int, first_word: int) -> list[bytes]:
        """``count`` bodies with the same time and words that count up from ``first_word``."""
        if not self._tails:
            self._tails = [self._cut(self._size() - HEAD_SIZE) for _ in range(KEPT_TAILS)]
        start, tails, pack = self._turn, self._tails, HEAD.pack
        self._turn += count
        return [
            pack(time_ns, first_word + i) + tails[(start + i) % KEPT_TAILS] for i in range(count)
        ]

    def _size(self) -> int:
        return self._rng.randint(self._low, self._high)

    def _cut(self, size: int) -> bytes:
        start = self._rng.randrange(len(self._pool) - size)
        return self._pool[start : start + size]


def first_word(tag: int, publisher: int) -> int:
    """The word of a publisher's first message; it has 2**32 of them."""
    return tag << 48 | publisher << 32


def read_stamps(bodies: Sequence[bytes]) -> tuple[list[int], list[int]]:
    """Times and words of bodies that all have a stamp."""
    numbers = memoryview(b"".join([body[:HEAD_SIZE] for body in bodies])).cast("Q")
    return numbers[0::2].tolist(), numbers[1::2].tolist()


def has_stamp(body: bytes, tag: int) -> bool:
    """Tell whether a body is one of the run with this tag."""
    return len(body) >= HEAD_SIZE and HEAD.unpack_from(body)[1] >> 48 == tag


def _text(rng: random.Random, size: int) -> bytes:
    words: list[str] = []
    length = 0
    while length < size:
        word = rng.choice(_WORDS) if rng.random() < 0.75 else str(rng.randrange(10**6))
        words.append(word)
        length += len(word) + 1
    return " ".join(words).encode()[:size]


BACKLOG = 2500
"""How many messages may be on their way in e2e. Without a bound a full-speed run would time a queue
that grows, and an ephemeral channel discards what exceeds nsqd's memory queue (10,000)."""

MAX_CONNECTIONS = 256


class BenchMode(Enum):
    """What is measured."""

    PUB = "pub"
    SUB = "sub"
    E2E = "e2e"


@dataclass(frozen=True, slots=True, kw_only=True)
class BenchPlan:
    """One measurement. Sizes are bytes, times seconds; None means no limit.

    Each nsqd of ``nsqd_tcp_addresses`` gets at least one of the ``connections``, and as many
    publishers as consumers where there are both. ``topic`` is one of the user's, or None for one of
    our own that is gone afterwards. ``rate`` is messages a second, all connections together, 0 for
    full speed. What happens in the first ``warm_up_s`` is not measured.

    Raises `ConfigurationError` for what cannot be.
    """

    mode: BenchMode
    nsqd_tcp_addresses: tuple[str, ...]
    producer_options: ClientOptions
    consumer_options: ClientOptions
    nsqd_http_addresses: tuple[str, ...] = ()
    topic: str | None = None
    size: tuple[int, int] = (200, 200)
    batch: int = 100
    connections: int = 1
    rate: float = 0.0
    count: int | None = None
    for_s: float | None = None
    warm_up_s: float = 0.0

    def __post_init__(self) -> None:
        for address in self.nsqd_tcp_addresses:
            parse_address(address)
        low, high = self.size
        least = HEAD_SIZE if self.mode is BenchMode.E2E else 1
        if not least <= low <= high:
            raise ConfigurationError(
                f"messages of {low} to {high} bytes cannot be measured",
                hint=f"The smallest size is {least}, and a range is written 100-2000.",
            )
        if high > self.producer_options.publish_max_msg_size:
            raise ConfigurationError(
                f"messages of {high} bytes are above nsqd's usual limit",
                hint=f"Where nsqd takes them: --producer-opt publish_max_msg_size={high}.",
            )
        if self.batch * (4 + high) + 4 > self.producer_options.publish_max_body_size:
            raise ConfigurationError(
                f"{self.batch} messages of {high} bytes are above nsqd's usual limit for a batch",
                hint="Take a smaller --batch.",
            )
        if not len(self.nsqd_tcp_addresses) <= self.connections <= MAX_CONNECTIONS:
            raise ConfigurationError(
                f"{self.connections} connections cannot be spread over "
                f"{len(self.nsqd_tcp_addresses)} nsqd",
                hint=f"At least one for each, and at most {MAX_CONNECTIONS}.",
            )
        if self.count is None and self.for_s is None:
            raise ConfigurationError("a measurement needs a count of messages or a time")

    def share(self, number: int) -> int | None:
        """How many of the messages the connection ``number`` takes."""
        if self.count is None:
            return None
        each, rest = divmod(self.count, self.connections)
        return each + (number < rest)

    @property
    def transport(self) -> list[str]:
        """What is between us and nsqd besides TCP."""
        options = self.producer_options
        used = {"tls": options.tls_v1, "snappy": options.snappy, "deflate": options.deflate}
        return [name for name, is_on in used.items() if is_on]


class BenchJob(NamedTuple):
    """What one process does of a plan: it publishes, or it consumes until all have everything.

    The messages of e2e carry the ``tag``, which distinguishes them from those of other programs.
    """

    plan: BenchPlan
    number: int
    publishes: bool
    topic: str
    channel: str
    tag: int

    @property
    def nsqd_tcp_address(self) -> str:
        addresses = self.plan.nsqd_tcp_addresses
        return addresses[self.number % len(addresses)]

    @property
    def is_stamped(self) -> bool:
        return self.plan.mode is BenchMode.E2E


RELATIVE_ACCURACY = 0.01
PERCENTILES = {"p50": 0.5, "p90": 0.9, "p99": 0.99, "p99.9": 0.999}

CLIENT_IS_BUSY = 0.9
"""Of a processor: a Python process does not take much more than one, whatever there are."""

BEHIND_SCHEDULE = 0.95


class Latencies:
    """Values in milliseconds. Plain data, which processes send to each other."""

    def __init__(self, parts: Iterable[Latencies] = ()) -> None:
        self._sketch = DDSketch(RELATIVE_ACCURACY)
        self.count = 0
        self.min_ms = float("inf")
        self.max_ms = 0.0
        for part in parts:
            self._sketch.merge(part._sketch)
            self.count += part.count
            self.min_ms = min(self.min_ms, part.min_ms)
            self.max_ms = max(self.max_ms, part.max_ms)

    def add(self, value_ms: float, count: int = 1) -> None:
        """Enter a value, once or several times."""
        value_ms = max(0.0, value_ms)
        self._sketch.add(value_ms, count)
        self.count += count
        self.min_ms = min(self.min_ms, value_ms)
        self.max_ms = max(self.max_ms, value_ms)

    def figures_ms(self) -> dict[str, float]:
        """The figures that are reported, by name; all are 0 without values."""
        if not self.count:
            return dict.fromkeys(("min", "mean", *PERCENTILES, "max"), 0.0)
        figures = {"min": self.min_ms, "mean": float(self._sketch.avg)}
        for name, quantile in PERCENTILES.items():
            value = float(self._sketch.get_quantile_value(quantile) or 0.0)
            figures[name] = min(max(value, self.min_ms), self.max_ms)
        return {**figures, "max": self.max_ms}


@dataclass(slots=True)
class WorkerResult:
    """What a publisher or a consumer did: all it published or consumed, and of that what was
    measured.

    ``redelivered`` messages had been delivered before. ``began_at`` and ``ended_at`` are monotonic
    times of the first and the last batch that was measured. ``cpu_s`` is the processor time of
    ``cpu_messages``, and ``cpu_share`` that over its duration.
    """

    messages: int = 0
    checksum: int = 0
    redelivered: int = 0
    measured: int = 0
    measured_bytes: int = 0
    began_at: float = 0.0
    ended_at: float = 0.0
    cpu_s: float = 0.0
    cpu_messages: int = 0
    cpu_share: float = 0.0
    latencies: Latencies = field(default_factory=Latencies)


@dataclass(frozen=True, slots=True, kw_only=True)
class BenchReport:
    """One measurement. ``published`` and ``consumed`` include the warm-up; the rest does not.

    ``client_cpu`` is the processor time of the busiest of our processes over the time that passed,
    and ``machine_cpu`` that of everything on this machine, 1.0 being all processors (None where it
    is not known). ``cpu_us_per_message`` is what a message cost all of our processes, in
    microseconds of processor time.
    """

    plan: BenchPlan
    topic: str
    seconds: float
    messages: int
    bytes: int
    latencies: Latencies | None
    published: int
    consumed: int | None
    redelivered: int
    is_intact: bool
    cpu_us_per_message: float
    client_cpu: float
    machine_cpu: float | None
    interrupted: bool

    @property
    def messages_per_s(self) -> float:
        return self.messages / self.seconds if self.seconds else 0.0

    @property
    def bytes_per_s(self) -> float:
        return self.bytes / self.seconds if self.seconds else 0.0

    @property
    def missing(self) -> int:
        """Messages that were published and not consumed."""
        return 0 if self.consumed is None else max(0, self.published - self.consumed)

    @property
    def repeated(self) -> int:
        """Messages that were consumed more than once."""
        return 0 if self.consumed is None else max(0, self.consumed - self.published)

    @property
    def latency_of(self) -> str:
        """What a latency is that of."""
        return "message" if self.plan.mode is BenchMode.E2E else "batch"

    @property
    def limits(self) -> list[str]:
        """What held the figures down, as far as it can be seen from here, in a line each."""
        lines = []
        if self.client_cpu >= CLIENT_IS_BUSY:
            lines.append(
                f"the client was the limit: its busiest process used {self.client_cpu:.0%} of a "
                "processor; add --connections"
            )
        if self.machine_cpu is not None and self.machine_cpu >= CLIENT_IS_BUSY:
            lines.append(
                f"this machine was the limit: its processors were {self.machine_cpu:.0%} busy; "
                "nsqd on another machine would show more"
            )
        asked = self.plan.rate
        if asked and self.messages_per_s < BEHIND_SCHEDULE * asked and not self.interrupted:
            lines.append(f"the rate of {asked:,.0f} messages/s was not reached")
        return lines

    def document(self) -> dict[str, Any]:
        """The report as JSON; times are seconds, but for latencies."""
        plan = self.plan
        latency: dict[str, Any] | None = None
        if self.latencies is not None:
            latency = {"of": self.latency_of, "count": self.latencies.count}
            latency |= {key: round(ms, 4) for key, ms in self.latencies.figures_ms().items()}
        return {
            "mode": plan.mode.value,
            "nsqds": list(plan.nsqd_tcp_addresses),
            "topic": self.topic,
            "connections": plan.connections,
            "size": {"min": plan.size[0], "max": plan.size[1]},
            "batch": plan.batch,
            "window": plan.producer_options.max_outstanding,
            "max_in_flight": plan.consumer_options.max_in_flight,
            "rate": plan.rate or None,
            "warm_up_s": plan.warm_up_s,
            "transport": plan.transport,
            "seconds": round(self.seconds, 6),
            "messages": self.messages,
            "bytes": self.bytes,
            "messages_per_s": round(self.messages_per_s, 1),
            "bytes_per_s": round(self.bytes_per_s, 1),
            "latency_ms": latency,
            "published": self.published,
            "consumed": self.consumed,
            "redelivered": self.redelivered,
            "missing": self.missing,
            "repeated": self.repeated,
            "intact": self.is_intact,
            "cpu_us_per_message": round(self.cpu_us_per_message, 3),
            "client_cpu": round(self.client_cpu, 3),
            "machine_cpu": None if self.machine_cpu is None else round(self.machine_cpu, 3),
            "limits": self.limits,
            "interrupted": self.interrupted,
        }
