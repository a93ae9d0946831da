"""What a benchmark compares: programs, started with an argument list made for one measurement."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

FEW_IN_FLIGHT = ("--max-in-flight=100",)  # of benchmarks with more connections than that


@dataclass(frozen=True, slots=True)
class Job:
    """One measurement: where the messages are, or go."""

    tcp_address: str
    topic: str
    channel: str

    def many_addresses(self, count: int) -> list[str]:
        """As many addresses of the same nsqd, which listens on all that the loopback has."""
        port = self.tcp_address.rpartition(":")[2]
        return [f"127.0.{n // 200}.{n % 200 + 1}:{port}" for n in range(count)]


@dataclass(frozen=True, slots=True)
class Contestant:
    """`command` makes the argument list. A slow one gets only a `share` of the messages. NSQ's own
    benchmarks leave some FINs unsent, or publish without end."""

    name: str
    command: Callable[[Job], Sequence[str]]
    share: float = 1.0
    leaves: int = 0
    is_endless: bool = False

    def portion(self, messages: int) -> int:
        return max(1, round(messages * self.share))
