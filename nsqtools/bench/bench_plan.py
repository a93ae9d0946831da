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
from enum import StrEnum
from typing import TYPE_CHECKING, Literal, NamedTuple, TypedDict

from nsqtools.client.connection_settings import ConnectionSettings
from nsqtools.client.options import ClientOptions
from nsqtools.errors import ConfigurationError
from nsqtools.protocol.names import parse_address

if TYPE_CHECKING:
    from ddsketch import DDSketch

HEAD = struct.Struct("=QQ")
HEAD_SIZE = HEAD.size
MAX_TAG = 0xFFFF

POOL_SIZE = 1 << 20
KEPT = 4096  # bodies; fewer where they are large
KEPT_BYTES = 64 << 20

LOG_WORDS = (
    "GET POST 200 304 / /pricing /docs/install /cart HTTP/1.1 user session Firefox/145.0 "
    "Chrome/142.0 latency_ms region eu-west us-east"
)


class BodyMaker:
    """Makes bodies of ``low`` to ``high`` bytes, the same ones for the same ``seed``; they repeat,
    so that making them is not measured. Each begins with ``head`` bytes for a stamp, left out here.
    """

    def __init__(self, size: tuple[int, int], seed: int, head: int = 0) -> None:
        self._size = size
        self._head = head
        self._rng = random.Random(seed)
        self._pool = _text(self._rng, max(POOL_SIZE, 2 * size[1]))
        self._kept: list[bytes] = []
        self._begin = 0

    def batch(self, count: int) -> list[bytes]:
        """The next ``count`` bodies."""
        if self._begin + count > len(self._kept):
            self._begin = 0
        if count > len(self._kept):
            most = max(count, min(KEPT, KEPT_BYTES // self._size[1]))
            self._kept = [self._cut(self._rng.randint(*self._size)) for _ in range(most)]
        begin, self._begin = self._begin, self._begin + count
        return self._kept[begin : begin + count]

    def stamped(self, count: int, time_ns: int, first_word: int) -> list[bytes]:
        """``count`` bodies with the same time and words that count up from ``first_word``."""
        pack = HEAD.pack
        return [pack(time_ns, first_word + n) + tail for n, tail in enumerate(self.batch(count))]

    def _cut(self, size: int) -> bytes:
        start = self._rng.randrange(len(self._pool) - size)
        return self._pool[start : start + size - self._head]


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
    known, words, length = LOG_WORDS.split(), [], 0
    while length < size:
        words.append(rng.choice(known) if rng.random() < 0.75 else str(rng.randrange(10**6)))
        length += len(words[-1]) + 1
    return " ".join(words).encode()[:size]


BACKLOG = 2500
"""How many messages may be on their way in e2e. Without a bound a full-speed run would time a queue
that grows, and an ephemeral channel discards what exceeds nsqd's memory queue (10,000)."""

MAX_CONNECTIONS = 256


class BenchMode(StrEnum):
    """What is measured."""

    PUB = "pub"
    SUB = "sub"
    E2E = "e2e"


@dataclass(frozen=True, slots=True, kw_only=True)
class BenchPlan:
    """One measurement. Sizes are bytes, times seconds; None means no limit.

    Each nsqd of the ``connection`` gets at least one of the ``connections``, and as many
    publishers as consumers where there are both. ``topic`` is one of the user's, or None for one of
    our own that is gone afterwards. ``rate`` is messages a second, all connections together, 0 for
    full speed. What happens in the first ``warm_up_s`` is not measured.

    Raises `ConfigurationError` for what cannot be.
    """

    mode: BenchMode
    connection: ConnectionSettings
    producer_options: ClientOptions
    consumer_options: ClientOptions
    topic: str | None = None
    size: tuple[int, int] = (200, 200)
    batch: int = 100
    connections: int = 1
    rate: float = 0.0
    count: int | None = None
    for_s: float | None = None
    warm_up_s: float = 0.0

    def __post_init__(self) -> None:
        addresses = self.connection.nsqd_tcp_addresses
        for address in addresses:
            parse_address(address)
        low, high = self.size
        least = HEAD_SIZE if self.mode is BenchMode.E2E else 1
        if not least <= low <= high:
            raise ConfigurationError(
                f"messages of {low} to {high} bytes cannot be measured",
                hint=f"The smallest size is {least}, and a range is written 100-2000.",
            )
        if self.for_s == 0:
            raise ConfigurationError("nothing can be measured in 0 seconds")
        if not (nsqds := len(addresses)) <= self.connections <= MAX_CONNECTIONS:
            raise ConfigurationError(
                f"{self.connections} connections cannot be spread over {nsqds} nsqd",
                hint=f"At least one for each, and at most {MAX_CONNECTIONS}.",
            )

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
        addresses = self.plan.connection.nsqd_tcp_addresses
        return addresses[self.number % len(addresses)]

    @property
    def is_stamped(self) -> bool:
        return self.plan.mode is BenchMode.E2E


RELATIVE_ACCURACY = 0.01

CLIENT_IS_BUSY = 0.9
"""Of a processor: a Python process does not take much more than one, whatever there are."""

BEHIND_SCHEDULE = 0.95

LatencyFigures = TypedDict(
    "LatencyFigures",
    {
        "of": Literal["batch", "message"],
        "count": int,
        "min": float,
        "mean": float,
        "p50": float,
        "p90": float,
        "p99": float,
        "p99.9": float,
        "max": float,
    },
)


def new_sketch() -> DDSketch:
    """What collects latencies in ms; processes send it to each other."""
    from ddsketch import DDSketch

    return DDSketch(RELATIVE_ACCURACY)


def latency_figures(parts: Iterable[DDSketch], of: Literal["batch", "message"]) -> LatencyFigures:
    """The figures of latencies in ms; all are 0 without any."""
    whole = new_sketch()
    for part in parts:
        whole.merge(part)

    def at(quantile: float) -> float:
        return round(float(whole.get_quantile_value(quantile) or 0.0), 4)

    return {
        "of": of,
        "count": int(whole.count),
        "min": at(0),
        "mean": round(float(whole.avg), 4) if whole.count else 0.0,
        "p50": at(0.5),
        "p90": at(0.9),
        "p99": at(0.99),
        "p99.9": at(0.999),
        "max": at(1),
    }


@dataclass(slots=True)
class WorkerResult:
    """What a publisher or a consumer did: all it published or consumed, and of that what was
    measured.

    ``redelivered`` messages had been delivered before. ``ended_at`` is the monotonic time of the
    last batch that was measured. ``cpu_s`` is the processor time of ``cpu_messages``, and
    ``cpu_share`` that over its duration.
    """

    messages: int = 0
    checksum: int = 0
    redelivered: int = 0
    measured: int = 0
    measured_bytes: int = 0
    ended_at: float = 0.0
    cpu_s: float = 0.0
    cpu_messages: int = 0
    cpu_share: float = 0.0
    latencies: DDSketch = field(default_factory=new_sketch)


class Size(TypedDict):
    """Bytes of a message."""

    min: int
    max: int


class BenchReport(NamedTuple):
    """What came of a measurement. Times are seconds, but for latencies.

    ``published`` and ``consumed`` include the warm-up; the rest does not. ``client_cpu`` is the
    processor time of the busiest of our processes over the time that passed, and ``machine_cpu``
    that of everything on this machine, 1.0 being all processors (None where it is not known).
    ``cpu_us_per_message`` is what a message cost all of our processes, in microseconds of processor
    time. ``limits`` says what held the figures down, as far as it can be seen from here.
    """

    mode: BenchMode
    nsqds: list[str]
    topic: str
    connections: int
    size: Size
    batch: int
    window: int
    max_in_flight: int
    rate: float | None
    warm_up_s: float
    transport: list[str]
    seconds: float
    messages: int
    bytes: int
    messages_per_s: float
    bytes_per_s: float
    latency_ms: LatencyFigures | None
    published: int
    consumed: int | None
    redelivered: int
    missing: int
    repeated: int
    intact: bool
    cpu_us_per_message: float
    client_cpu: float
    machine_cpu: float | None
    limits: list[str]
    interrupted: bool


def limits(client_cpu: float, machine_cpu: float | None, per_s: float, rate: float) -> list[str]:
    """What held the figures down, in a line each; ``rate`` is what was asked for, or 0."""
    lines = []
    if client_cpu >= CLIENT_IS_BUSY:
        lines.append(
            f"the client was the limit: its busiest process used {client_cpu:.0%} of a processor; "
            "add --connections"
        )
    if machine_cpu is not None and machine_cpu >= CLIENT_IS_BUSY:
        lines.append(
            f"this machine was the limit: its processors were {machine_cpu:.0%} busy; "
            "nsqd on another machine would show more"
        )
    if per_s < BEHIND_SCHEDULE * rate:
        lines.append(f"the rate of {rate:,.0f} messages/s was not reached")
    return lines
