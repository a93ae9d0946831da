"""What a measurement is to do, the part of it that one worker process does, and its messages.

Bodies are text that compresses as log lines do, preceded by stamps. A stamp is two numbers of 64
bits in the machine's own order, for both sides are on one machine: the time, and a word that no
other message of the run has. The sum of all words, modulo 2**64, is the checksum by which what came
is compared with what went. Pure.
"""

from __future__ import annotations

import random
import struct
from collections.abc import Sequence
from dataclasses import dataclass
from enum import Enum
from typing import NamedTuple

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


class Bodies:
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


class Job(NamedTuple):
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
