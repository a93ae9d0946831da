"""How busy this machine's processors were, where the system says so (Linux)."""

from __future__ import annotations

from types import TracebackType
from typing import Self


class BusyProcessors:
    """Measures from entering to leaving: ``share`` is 1.0 when no processor had a pause."""

    def __init__(self) -> None:
        self.share: float | None = None
        self._before: tuple[int, int] | None = None

    def __enter__(self) -> Self:
        self._before = _busy_and_total()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        after = _busy_and_total()
        if self._before is not None and after is not None and after[1] > self._before[1]:
            self.share = (after[0] - self._before[0]) / (after[1] - self._before[1])


def _busy_and_total() -> tuple[int, int] | None:
    """Ticks of all processors since the start of the machine: those with work, and all."""
    try:
        with open("/proc/stat", encoding="ascii") as file:
            ticks = [int(word) for word in file.readline().split()[1:9]]
    except (OSError, ValueError):
        return None
    idle = sum(ticks[3:5])  # waiting for a disk is not work
    return sum(ticks) - idle, sum(ticks)
