"""Whether this nsqd can write to its disk, as /ping and /stats tell it."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(slots=True)
class Health:
    """``error`` is the text of the last disk write if it failed, or ``""``."""

    error: str = ""

    @property
    def text(self) -> str:
        """``OK`` or ``NOK - reason``."""
        return f"NOK - {self.error}" if self.error else "OK"
