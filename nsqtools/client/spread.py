"""Which of several nsqd get a batch. Pure.

``all``: every one of them, and a record counts as confirmed when all have confirmed it (what to_nsq
does with several addresses). ``round-robin``: one of them, in turn. ``failover``: the first, and
the next one only while it fails.
"""

from __future__ import annotations

import enum
from collections.abc import Sequence


class PublishMode(enum.Enum):
    """How batches are spread over several nsqd."""

    ALL = "all"
    ROUND_ROBIN = "round-robin"
    FAILOVER = "failover"


class Targets:
    """Chooses from ``addresses`` for each batch, and for each retry."""

    def __init__(self, addresses: Sequence[str], mode: PublishMode) -> None:
        self._addresses = list(dict.fromkeys(addresses))
        self._mode = mode
        self._turn = 0

    def choose(self) -> list[str]:
        """Return where a new batch goes."""
        if self._mode is PublishMode.ALL:
            return self._addresses
        chosen = self._addresses[self._turn % len(self._addresses)]
        if self._mode is PublishMode.ROUND_ROBIN:
            self._turn += 1
        return [chosen]

    def choose_again(self, failed: str) -> str:
        """Return where a batch goes that one nsqd could not take."""
        if self._mode is PublishMode.ALL:
            return failed
        if self._addresses[self._turn % len(self._addresses)] == failed:
            self._turn += 1
        return self._addresses[self._turn % len(self._addresses)]
