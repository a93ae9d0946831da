"""What a measurement is to do, and the part of it that one worker process does. Plain data."""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum
from typing import NamedTuple

from nsqtools.bench.bodies import HEAD_SIZE
from nsqtools.client.options import ClientOptions
from nsqtools.errors import ConfigurationError
from nsqtools.protocol.names import parse_address

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
