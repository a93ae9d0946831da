"""When a file of an archive is full or old enough. Pure: told sizes and clock readings.

An interval is aligned to the clock: with 1h files change on the hour, whenever they were begun. An
age counts from a file's first moment. Sizes are limits that a file passes by at most one flush.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Rotation:
    """Limits of a file; each None means without. Sizes are bytes, times seconds.

    ``size`` is what the file takes on disk, ``uncompressed_size`` what was put in. An interval
    begins at midnight of the clock that is ``utc_offset_s`` ahead of UTC.
    """

    size: int | None = None
    uncompressed_size: int | None = None
    interval_s: float | None = None
    age_s: float | None = None

    def is_full(self, size: int, uncompressed_size: int) -> bool:
        """Tell whether a file of these sizes takes no more."""
        return (self.size is not None and size >= self.size) or (
            self.uncompressed_size is not None and uncompressed_size >= self.uncompressed_size
        )

    def is_over(self, opened_at_s: float, now_s: float, utc_offset_s: float = 0) -> bool:
        """Tell whether the time of a file opened at ``opened_at_s`` (since 1970) is over."""
        if self.age_s is not None and now_s - opened_at_s >= self.age_s:
            return True
        return self.interval_s is not None and (
            self.period(opened_at_s, utc_offset_s) != self.period(now_s, utc_offset_s)
        )

    def period(self, at_s: float, utc_offset_s: float = 0) -> int:
        """Return the number of the interval that a time since 1970 falls in; 0 without one."""
        if self.interval_s is None:
            return 0
        return int((at_s + utc_offset_s) // self.interval_s)
