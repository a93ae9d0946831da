"""What is wrong now, each reported when it begins and when it changes, and when it is over.

What is tried again every few seconds would else fill the log with the same line, and hide the rest.
"""

from __future__ import annotations

import logging
from collections.abc import Iterable

log = logging.getLogger("nsqtools")


SETTLED_S = 3.0


class WriteTrouble:
    """Whether writing fails, as it is reported.

    A disk that is nearly full takes a little now and then: it works again when nothing has failed
    for a while. Times are readings of the monotonic clock.
    """

    def __init__(self) -> None:
        self._reason = ""
        self._is_failing = False
        self._failed_at = 0.0

    def failed(self, reason: str, now: float) -> bool:
        """Return whether that is to be reported."""
        is_new = reason != self._reason
        self._reason, self._is_failing, self._failed_at = reason, True, now
        return is_new

    def worked(self) -> None:
        """Something was written after a failure."""
        self._is_failing = False

    @property
    def settles_at(self) -> float | None:
        """When `is_over` may be so; None while it fails, and without trouble."""
        return self._failed_at + SETTLED_S if self._reason and not self._is_failing else None

    def is_over(self, now: float) -> bool:
        """Return, once, whether it is to be reported that writing works again."""
        if self.settles_at is None or now < self.settles_at:
            return False
        self._reason = ""
        return True


class Troubles:
    """Keys are what is in trouble: a topic, an address."""

    def __init__(self) -> None:
        self._said: dict[str, str] = {}

    def has(self, key: str, what: str) -> None:
        """There is trouble; ``what`` is logged unless it was the last thing said of the key."""
        if self._said.get(key) != what:
            self._said[key] = what
            log.warning("%s", what)

    def over(self, key: str, what: str = "") -> None:
        """There is none; ``what`` is logged if there was."""
        if self._said.pop(key, None) is not None and what:
            log.warning("%s", what)

    def only(self, keys: Iterable[str], what: str) -> None:
        """All others are over; ``{}`` in ``what`` stands for the key."""
        for key in set(self._said).difference(keys):
            self.over(key, what.format(key))
