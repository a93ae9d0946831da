"""The plan of a measurement, the job of one worker process, the messages and the report.

Bodies are text that compresses like log lines, preceded by a stamp. A stamp is two 64-bit numbers
in the machine's byte order, since both sides run on one machine: the time, and a word that is
unique within the run. The sum of all words, modulo 2**64, is a checksum that compares the messages
received with those sent.

Percentiles come from a DDSketch, accurate to one percent for any number of values.
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
MAX_KEPT_BODIES = 4096
MAX_KEPT_BYTES = 64 << 20  # bounds the bodies kept when they are large

LOG_WORDS = (
    "GET POST 200 304 / /pricing /docs/install /cart HTTP/1.1 user session Firefox/145.0 "
    "Chrome/142.0 latency_ms region eu-west us-east"
)


class BodyMaker:
    """Makes bodies of ``size`` (smallest, largest) bytes; the same ``seed`` makes the same bodies.

    Bodies repeat, so that making them is not measured. Each one leaves ``head`` bytes for a stamp.
    """

    def __init__(self, size: tuple[int, int], seed: int, head: int = 0) -> None:
        self._size = size
        self._head = head
        self._rng = random.Random(seed)
        self._pool = _text(self._rng, max(POOL_SIZE, 2 * size[1]))
        self._kept: list[bytes] = []
        self._begin = 0

    def batch(self, count: int) -> list[bytes]:
        """Return the next ``count`` bodies."""
        if self._begin + count > len(self._kept):
            self._begin = 0
        if count > len(self._kept):
            kept = max(count, min(MAX_KEPT_BODIES, MAX_KEPT_BYTES // self._size[1]))
            self._kept = [self._cut(self._rng.randint(*self._size)) for _ in range(kept)]
        begin, self._begin = self._begin, self._begin + count
        return self._kept[begin : begin + count]

    def stamped(self, count: int, time_ns: int, first_word: int) -> list[bytes]:
        """Return ``count`` bodies with one time and consecutive words from ``first_word``."""
        pack = HEAD.pack
        return [pack(time_ns, first_word + n) + tail for n, tail in enumerate(self.batch(count))]

    def _cut(self, size: int) -> bytes:
        start = self._rng.randrange(len(self._pool) - size)
        return self._pool[start : start + size - self._head]


def first_word(tag: int, publisher: int) -> int:
    """Return the word of a publisher's first message; each publisher has 2**32 words."""
    return tag << 48 | publisher << 32


def read_stamps(bodies: Sequence[bytes]) -> tuple[list[int], list[int]]:
    """Return the times and words of bodies that all have a stamp."""
    numbers = memoryview(b"".join([body[:HEAD_SIZE] for body in bodies])).cast("Q")
    return numbers[0::2].tolist(), numbers[1::2].tolist()


def has_stamp(body: bytes, tag: int) -> bool:
    """Return whether a body belongs to the run with this tag."""
    return len(body) >= HEAD_SIZE and HEAD.unpack_from(body)[1] >> 48 == tag


def _text(rng: random.Random, size: int) -> bytes:
    vocabulary, words, length = LOG_WORDS.split(), [], 0
    while length < size:
        words.append(rng.choice(vocabulary) if rng.random() < 0.75 else str(rng.randrange(10**6)))
        length += len(words[-1]) + 1
    return " ".join(words).encode()[:size]


BACKLOG = 2500
"""Messages that publishers of e2e may be ahead of the consumers.

Without a bound a run at full speed measures the time in a growing queue, and an ephemeral channel
discards messages beyond nsqd's memory queue. A quarter of that queue (10,000 messages by default)
leaves room for batches that are sent at the same moment.
"""

MAX_CONNECTIONS = 256


class BenchMode(StrEnum):
    """A kind of measurement."""

    PUB = "pub"
    SUB = "sub"
    E2E = "e2e"


@dataclass(frozen=True, slots=True, kw_only=True)
class BenchPlan:
    """One measurement. Sizes are bytes, times seconds; None means no limit.

    Each nsqd of the ``connection`` gets at least one of the ``connections``, and in e2e as many
    publishers as consumers. ``topic`` is a topic of the user, or None for a temporary one. ``rate``
    is in messages per second over all connections, 0 for full speed. The first ``warm_up_s`` are
    not measured.

    Raises `ConfigurationError` for a plan that cannot be measured.
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
        """Return how many of ``count`` messages connection ``number`` handles."""
        if self.count is None:
            return None
        share, remainder = divmod(self.count, self.connections)
        return share + (number < remainder)

    @property
    def transport(self) -> list[str]:
        """Layers above TCP: tls, snappy, deflate."""
        options = self.producer_options
        layers = {"tls": options.tls_v1, "snappy": options.snappy, "deflate": options.deflate}
        return [name for name, is_on in layers.items() if is_on]


class BenchJob(NamedTuple):
    """The part of one process: it publishes, or consumes until all messages have been consumed.

    Messages of e2e carry the ``tag``, which distinguishes them from messages of other programs.
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
"""Share of one processor above which a process was the limit.

Python's lock keeps a process near one processor, however many there are.
"""

BEHIND_SCHEDULE = 0.95  # share of the requested rate below which the report mentions it

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
    """Return an empty sketch of latencies in ms. It can be pickled, and merged."""
    from ddsketch import DDSketch

    return DDSketch(RELATIVE_ACCURACY)


def latency_figures(parts: Iterable[DDSketch], of: Literal["batch", "message"]) -> LatencyFigures:
    """Return the figures of all latencies, in ms; without any, all figures are 0."""
    merged = new_sketch()
    for part in parts:
        merged.merge(part)

    def at(quantile: float) -> float:
        return round(float(merged.get_quantile_value(quantile) or 0.0), 4)

    return {
        "of": of,
        "count": int(merged.count),
        "min": at(0),
        "mean": round(float(merged.avg), 4) if merged.count else 0.0,
        "p50": at(0.5),
        "p90": at(0.9),
        "p99": at(0.99),
        "p99.9": at(0.999),
        "max": at(1),
    }


@dataclass(slots=True)
class WorkerResult:
    """The counts of one worker: ``messages`` in all, and ``measured`` after the warm-up.

    ``redelivered`` counts messages with more than one attempt. ``ended_at`` is the monotonic time
    of the last measured batch. ``cpu_s`` is the processor time for ``cpu_messages``, and
    ``cpu_share`` that time divided by the time that passed.
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
    """The result of a measurement. Times are in seconds, latencies in ms.

    ``published`` and ``consumed`` include the warm-up; the other counts do not. ``client_cpu`` is
    the share of one processor that the busiest worker used, and ``machine_cpu`` the share of all
    processors that all programs used (None if unknown). ``cpu_us_per_message`` is the processor
    time of all workers for one message, in microseconds. ``limits`` lists what limited the figures,
    as far as a client can see it.
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
    """Return a line for each limit that was reached; ``rate`` is the requested rate, or 0."""
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
