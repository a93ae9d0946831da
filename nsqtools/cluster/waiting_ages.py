"""How long messages have waited, at least. Pure.

nsqd does not show the age of a message. But if more messages wait or are in flight than arrived
since a moment, the oldest is older than that moment, in whatever order they are delivered.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Mapping

from nsqtools.cluster.queue_rows import Key, QueueRow

# Moments kept of a queue. The older half has even distances, so an age is at most 4 % too low.
MAX_MOMENTS = 64


class WaitingAges:
    """Follows the message counts of the queues on each nsqd through successive samples.

    ``oldest_s`` has the least age of the oldest message of each nonempty queue, in seconds, by the
    key of the queue on all nsqd. It is replaced by `add` and never changed.
    """

    def __init__(self) -> None:
        self.oldest_s: Mapping[Key, float] = {}
        # Times with the message counts at them, the oldest first.
        self._moments: dict[Key, deque[tuple[float, int]]] = {}

    def add(self, at_s: float, rows: Iterable[QueueRow]) -> None:
        """Add the queues of a sample that was taken at a time on the monotonic clock."""
        moments_by_key: dict[Key, deque[tuple[float, int]]] = {}
        oldest_s: dict[Key, float] = {}
        for row in rows:
            if not (row.depth or row.in_flight):
                continue
            moments = moments_by_key[row.key] = self._moments.get(row.key) or deque()
            _follow(moments, at_s, row)
            key = ("", row.topic, row.channel)
            oldest_s[key] = max(oldest_s.get(key, 0.0), at_s - moments[0][0])
        self._moments, self.oldest_s = moments_by_key, oldest_s


def _follow(moments: deque[tuple[float, int]], at_s: float, row: QueueRow) -> None:
    """Add a moment, and drop those since which all present messages may have arrived."""
    if moments and row.messages < moments[-1][1]:  # created again, or nsqd was started again
        moments.clear()
    while moments and row.messages - moments[0][1] >= row.depth + row.in_flight:
        moments.popleft()
    if not moments or row.messages > moments[-1][1]:
        moments.append((at_s, row.messages))
    if len(moments) > MAX_MOMENTS:
        _thin_out(moments)


def _thin_out(moments: deque[tuple[float, int]]) -> None:
    """Leave about half of the moments, with even distances, and the last one."""
    everything, last = list(moments), moments.pop()
    step_s = (last[0] - everything[0][0]) * 2 / MAX_MOMENTS
    moments.clear()
    for moment in everything:
        if not moments or moment is last or moment[0] - moments[-1][0] >= step_s:
            moments.append(moment)
