"""What a benchmark compares: programs, started with an argument list made for one measurement."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Job:
    """One measurement: where the messages are, or go."""

    tcp_address: str
    topic: str
    channel: str


@dataclass(frozen=True, slots=True)
class Contestant:
    """`command` makes the argument list. A slow one gets only a `share` of the messages."""

    name: str
    command: Callable[[Job], Sequence[str]]
    share: float = 1.0

    def portion(self, messages: int) -> int:
        return max(1, round(messages * self.share))
