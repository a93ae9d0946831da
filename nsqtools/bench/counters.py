"""A few whole numbers that all processes of a measurement see, in memory that they share.

Each worker writes only its own number, so nothing is locked: a reader gets an old value or the new
one. (A number of eight bytes at a multiple of eight is written at once.)
"""

from __future__ import annotations

import mmap
import os
import tempfile

UNKNOWN = (1 << 64) - 1

_STOP_PUBLISHING, _STOP_CONSUMING, _TARGET, _FIRST = range(4)


class Counters:
    """What publishers have published and consumers consumed, when to stop, and what to reach.

    ``fileno`` is what another process, with as many connections, makes its own view from.
    """

    def __init__(self, connections: int, fileno: int | None = None) -> None:
        size = 8 * (_FIRST + 2 * connections)
        self._connections = connections
        is_first = fileno is None
        if fileno is None:
            with tempfile.TemporaryFile(prefix="nsq-bench-") as file:
                file.truncate(size)
                fileno = os.dup(file.fileno())
        self.fileno = fileno
        self._map = mmap.mmap(fileno, size)
        self._cells = memoryview(self._map).cast("Q")
        if is_first:
            self._cells[_TARGET] = UNKNOWN

    def close(self) -> None:
        """Give the memory back."""
        self._cells.release()
        self._map.close()
        os.close(self.fileno)

    def publishes(self, number: int, count: int) -> None:
        """The publisher ``number`` has sent so many messages more."""
        self._cells[_FIRST + number] += count

    def consumes(self, number: int, count: int) -> None:
        """The consumer ``number`` has taken so many messages more."""
        self._cells[_FIRST + self._connections + number] += count

    @property
    def published(self) -> int:
        """Messages sent by all, confirmed or not."""
        return sum(self._cells[_FIRST : _FIRST + self._connections])

    @property
    def consumed(self) -> int:
        """Messages consumed by all."""
        return sum(self._cells[_FIRST + self._connections :])

    @property
    def target(self) -> int:
        """How many messages there are to consume; `UNKNOWN` until the publishers are done."""
        return self._cells[_TARGET]

    @target.setter
    def target(self, count: int) -> None:
        self._cells[_TARGET] = count

    @property
    def is_target_unknown(self) -> bool:
        return self.target == UNKNOWN

    def stop_publishing(self) -> None:
        """Ask the publishers to end. (From any thread, also when all is over.)"""
        self._raise_flag(_STOP_PUBLISHING)

    def stop_consuming(self) -> None:
        """Ask the consumers to end, whatever is missing. (From any thread.)"""
        self._raise_flag(_STOP_CONSUMING)

    def _raise_flag(self, cell: int) -> None:
        try:
            self._cells[cell] = 1
        except ValueError:
            pass  # closed: there is nobody left to ask

    @property
    def may_publish(self) -> bool:
        return not self._cells[_STOP_PUBLISHING]

    @property
    def may_consume(self) -> bool:
        return not self._cells[_STOP_CONSUMING]
