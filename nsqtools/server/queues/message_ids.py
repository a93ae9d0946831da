"""Message ids: 16 hexadecimal digits of time, node and sequence, increasing within a topic.

A tick is 2^20 ns; in each there are 4096 ids. Where nsqd sleeps a millisecond when they run out or
the clock goes back, this generator goes on in the next tick: the ids stay unique and increasing,
and the loop never waits. Two topics can produce the same id, as in nsqd.
"""

from __future__ import annotations

_FIRST_TICK = 1288834974288  # nsqd's epoch, in ticks
_PER_TICK = 4096
_SEQUENCES = [b"%03x" % number for number in range(_PER_TICK)]


class MessageIds:
    """The ids of one topic. ``node_id`` is 0 to 1023."""

    def __init__(self, node_id: int) -> None:
        self._node_id = node_id
        self._tick = 0
        self._next = 0  # sequence number in this tick

    def take(self, count: int, now_ns: int) -> list[bytes]:
        """Return ``count`` new ids."""
        tick = (now_ns >> 20) - _FIRST_TICK
        if tick > self._tick:
            self._tick = tick
            self._next = 0
        ids: list[bytes] = []
        while count:
            if self._next == _PER_TICK:
                self._tick += 1
                self._next = 0
            # the last three digits are the sequence number, the rest is the same in a tick
            head = b"%013x" % (self._tick << 10 | self._node_id)
            run = _SEQUENCES[self._next : self._next + count]
            ids += [head + sequence for sequence in run]
            self._next += len(run)
            count -= len(run)
        return ids
