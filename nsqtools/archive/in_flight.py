"""How many messages may be in flight, so that their bodies fit into memory. Pure.

NSQ counts messages, not bytes: 2500 of 200 bytes are nothing, 2500 of a megabyte are more than many
machines have. A topic begins with few, and is allowed as many as fit going by what came last.
"""

from __future__ import annotations

FIRST_COUNT = 64
MEMORY_BYTES = 32 << 20


class InFlight:
    """``count`` messages may be in flight now, and never more than ``most``."""

    def __init__(self, most: int) -> None:
        self._most = most
        self.count = min(most, FIRST_COUNT)

    def saw(self, count: int, size: int) -> bool:
        """``count`` messages took ``size`` bytes of text; return whether `count` has changed.

        It changes when it is wrong by half: RDY is not sent anew for every little difference.
        """
        fitting = min(self._most, max(1, MEMORY_BYTES * count // max(1, size)))
        is_near = self.count <= fitting * 2 and fitting <= self.count * 2
        if fitting == self.count or (is_near and fitting != self._most):
            return False
        self.count = fitting
        return True
