"""A batch of records on its way to one or more nsqd. Pure."""

from __future__ import annotations

import enum
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace

from nsqtools.errors import NsqError


class Outcome(enum.IntEnum):
    """What became of a record, the worst last: with several nsqd the worst of theirs counts."""

    CONFIRMED = 0
    UNKNOWN = 1
    UNSENT = 2
    REJECTED = 3


@dataclass(slots=True, eq=False)
class Batch:
    """Bodies for one topic, and what to call when all have their outcome.

    ``unsettled`` counts the answers still to come, one for each record and nsqd; ``failures`` holds
    the worst outcome of each record that was not confirmed everywhere, by its place among the
    bodies, and ``errors`` the reason.
    """

    topic: str
    bodies: Sequence[bytes]
    unsettled: int
    on_ended: Callable[[Batch], None]
    defer_s: float | None = None
    failures: dict[int, Outcome] = field(default_factory=dict)
    errors: dict[int, NsqError | None] = field(default_factory=dict)

    def settle(self, part: Part, outcome: Outcome, error: NsqError | None = None) -> bool:
        """Note the outcome of a part; return whether it was the last one awaited."""
        if outcome is not Outcome.CONFIRMED:
            for index in range(part.start, part.stop):
                if outcome >= self.failures.get(index, outcome):
                    self.failures[index] = outcome
                    self.errors[index] = error
        self.unsettled -= len(part)
        return self.unsettled == 0


@dataclass(frozen=True, slots=True, eq=False)
class Part:
    """What goes to one nsqd in one publish: a batch, or a range of it after nsqd refused more.

    ``give_up_at`` is set when it first failed.
    """

    batch: Batch
    start: int
    stop: int
    address: str
    give_up_at: float | None = None

    def __len__(self) -> int:
        return self.stop - self.start

    @property
    def bodies(self) -> Sequence[bytes]:
        return self.batch.bodies[self.start : self.stop]

    def halves(self) -> tuple[Part, Part]:
        """Return the part as two, to find a record that nsqd refuses."""
        middle = self.start + len(self) // 2
        return replace(self, stop=middle), replace(self, start=middle)


@dataclass(slots=True)
class Counts:
    """Records by outcome; ``skipped`` are empty ones, which NSQ cannot carry."""

    confirmed: int = 0
    rejected: int = 0
    unknown: int = 0
    unsent: int = 0
    skipped: int = 0

    def add(self, outcome: Outcome, count: int = 1) -> None:
        """Count records that ended so."""
        name = outcome.name.lower()
        setattr(self, name, getattr(self, name) + count)

    @property
    def unconfirmed(self) -> int:
        return self.rejected + self.unknown + self.unsent
