"""The last six hours of a cluster in bounded memory, for `nsq web`.

    history = History(interval_s=2.0)
    history.add(sample)                                   # each sample, as it is taken
    history.series([("", "clicks", "archive")], "finish", since_s=time.time() - 3600)

It keeps a point for each sample for 12 minutes (at 2 s), one for every 10 s for an hour, and one
for every minute for 6 hours. There is a series for each topic and channel on all nsqd together, for
each nsqd as a whole, and for the cluster. Coarser points are means.

A frame is one moment of all series: for each quantity a compressed column of doubles, one for each
series. A column without traffic takes almost nothing; a series with traffic takes at most 90 kB.

Trap: when all places in the columns are taken, a place passes to another series. So each place has
the time since which it belongs to its series; older numbers in it belong to another one.
"""

from __future__ import annotations

import functools
import logging
import math
import threading
import zlib
from array import array
from collections import defaultdict, deque
from collections.abc import Iterable, Mapping, Sequence
from typing import NamedTuple

from nsqtools.cluster.queue_rows import QueueKey, QueueRow, sums_of
from nsqtools.cluster.sampling import Sample

log = logging.getLogger("nsqtools")

QUANTITIES = ("depth", "in_flight", "clients", "ingress", "finish", "requeue", "latency")
"""The quantities of a queue. ``requeue`` includes time-outs, as everywhere. ``latency`` is the
highest percentile of nsqd in seconds, and sums have none."""

MAX_SERIES = 20_000
MAX_POINTS = 360  # of each level
COARSER_STEPS_S = (10.0, 60.0)
# A pause of more than three samples, or three steps, shows as a gap.
GAP_S = 90.0

Values = tuple[float, ...]


class Frame(NamedTuple):
    """The middle of its time, in seconds since 1970, and a compressed column per quantity."""

    at_s: float
    columns: tuple[bytes, ...]


class Level(NamedTuple):
    """Frames of ``step_s`` seconds, as many as fit into ``keep_s``."""

    step_s: float
    keep_s: float
    frames: deque[Frame]


class History:
    """See the module. Thread-safe."""

    def __init__(self, *, interval_s: float = 2.0) -> None:
        steps = [interval_s, *(step_s for step_s in COARSER_STEPS_S if step_s > interval_s)]
        self._lock = threading.Lock()
        # The place of each series in the columns, and since when (seconds since 1970).
        self._places: dict[QueueKey, tuple[int, float]] = {}
        self._levels = [Level(step_s, step_s * MAX_POINTS, deque()) for step_s in steps]
        self._is_full = False

    def add(self, sample: Sample) -> None:
        """Keep a sample's queues, and their sums."""
        values = {row.key: _values_of(row) for row in sample.totals}
        values.update(_sums_of_nodes(sample.rows))
        with self._lock:
            self._add(sample.time_s, values)

    def series(
        self, keys: Sequence[QueueKey], quantity: str, *, since_s: float
    ) -> list[tuple[float, float | None]]:
        """Return points of (seconds since 1970, value) from ``since_s`` on, the oldest first.

        A key is (node, topic, channel): ``("", topic, channel)`` is a queue on all nsqd, ``(node,
        "", "")`` one nsqd, and ``("", "", "")`` the cluster. Several keys are summed up, or the
        worst of their latencies counts. None is a gap. A shorter time has closer points. The result
        is empty for an unknown series. Raises ``ValueError`` for an unknown quantity.
        """
        column = QUANTITIES.index(quantity)
        with self._lock:
            places = [self._places[key] for key in keys if key in self._places]
            frames, step_s = self._since(since_s)
        begin_s = min((from_s for _, from_s in places), default=math.inf)
        join = max if quantity == "latency" else sum
        points: list[tuple[float, float | None]] = []
        before_s = math.inf
        for at_s, columns in frames:
            if at_s < begin_s:
                continue
            values = _unpacked(columns[column])
            numbers = [
                values[number]
                for number, from_s in places
                if at_s >= from_s and number < len(values) and values[number] == values[number]
            ]
            if at_s - before_s > max(GAP_S, 3 * step_s) and points[-1][1] is not None:
                points.append(((before_s + at_s) / 2, None))
            points.append((at_s, join(numbers) if numbers else None))
            before_s = at_s
        return points

    def _add(self, at_s: float, values: Mapping[QueueKey, Values]) -> None:
        """Add a frame. If the clock was set back, the frames of its future are dropped."""
        finest = self._levels[0].frames
        if finest and finest[-1].at_s >= at_s:
            of_all = self._places.items()
            self._places = {key: (place, min(from_s, at_s)) for key, (place, from_s) in of_all}
        self._assign(values, at_s)
        # Ordered by place, which is not the order of the dict after a place has passed on.
        rows: list[Values] = [(math.nan,) * len(QUANTITIES)] * len(self._places)
        for key, (number, _) in self._places.items():
            if key in values:
                rows[number] = values[key]
        columns = map(_pack, zip(*rows, strict=True) if rows else [()] * len(QUANTITIES))
        for level in self._levels:
            while level.frames and level.frames[-1].at_s >= at_s:
                level.frames.pop()
        for finer, coarser in zip(self._levels, self._levels[1:], strict=False):
            _average(finer.frames, coarser, at_s)
        self._levels[0].frames.append(Frame(at_s, tuple(columns)))
        for level in self._levels:
            while level.frames and level.frames[0].at_s < at_s - level.keep_s:
                level.frames.popleft()

    def _assign(self, present: Mapping[QueueKey, Values], at_s: float) -> None:
        """Give places to new series; the oldest series that have gone make room."""
        fresh = [key for key in present if key not in self._places]
        room = MAX_SERIES - len(self._places)
        gone = [key for key in self._places if key not in present] if len(fresh) > room else []
        for place, key in enumerate(fresh):
            if place < room:
                self._places[key] = len(self._places), at_s
            elif place - room < len(gone):
                self._places[key] = self._places.pop(gone[place - room])[0], at_s
        left_out = len(fresh) - room - len(gone)
        if left_out > 0 and not self._is_full:
            log.warning("the history has no room for %d more queues", left_out)
        self._is_full = left_out > 0

    def _since(self, since_s: float) -> tuple[list[Frame], float]:
        """Return frames from that time on, and how far apart the oldest are.

        The frames are of the finest level that reaches back so far, followed by finer ones.
        """
        finest = self._levels[0].frames
        now_s = finest[-1].at_s if finest else since_s
        finer = [level for level in self._levels if now_s - level.keep_s > since_s]
        levels = self._levels[: len(finer) + 1]
        frames: list[Frame] = []
        begin_s = since_s
        for level in reversed(levels):
            frames += [frame for frame in level.frames if frame.at_s >= begin_s]
            begin_s = frames[-1].at_s + level.step_s / 2 if frames else since_s
        return frames, levels[-1].step_s


def _average(finer: Sequence[Frame], level: Level, now_s: float) -> None:
    """Append the mean of the last bucket to a level, once the bucket is complete."""
    if not finer or now_s // level.step_s == finer[-1].at_s // level.step_s:
        return
    bucket = finer[-1].at_s // level.step_s
    middle_s = (bucket + 0.5) * level.step_s
    if level.frames and level.frames[-1].at_s >= middle_s:
        return
    parts = [frame.columns for frame in finer if frame.at_s // level.step_s == bucket]
    level.frames.append(Frame(middle_s, tuple(map(_mean, zip(*parts, strict=True)))))


def _mean(columns: tuple[bytes, ...]) -> bytes:
    """Return the means of columns, which may become longer with time. NaN is left out."""
    if len(set(columns)) == 1:
        return columns[0]
    unpacked = [_unpack(column) for column in columns]
    length = len(unpacked[-1])
    for values in unpacked:
        values.extend([math.nan] * (length - len(values)))
    means = []
    for moments in zip(*unpacked, strict=True):
        total, count = sum(moments), len(moments)
        if math.isnan(total):
            numbers = [value for value in moments if not math.isnan(value)]
            total, count = sum(numbers) if numbers else math.nan, len(numbers) or 1
        means.append(total / count)
    return _pack(means)


def _pack(values: Iterable[float]) -> bytes:
    return zlib.compress(array("d", values).tobytes(), 1)


def _unpack(column: bytes) -> array[float]:
    return array("d", zlib.decompress(column))


_unpacked = functools.lru_cache(256)(_unpack)
"""Cached, for callers that do not change the column: a page shows the trends of fifty queues."""


def _values_of(row: QueueRow) -> Values:
    rates = row.rates
    latency_s = max(row.latency)[1] if row.latency else math.nan
    moved = (rates.ingress, rates.finish, rates.requeue) if rates else (math.nan,) * 3
    return (row.depth, row.in_flight, row.clients, *moved, latency_s)


def _sums_of_nodes(rows: Iterable[QueueRow]) -> dict[QueueKey, Values]:
    """Return the values of each nsqd as a whole, and of the cluster under node ""."""
    nodes: defaultdict[str, list[QueueRow]] = defaultdict(list)
    for row in rows:
        nodes[row.node].append(row)
        nodes[""].append(row)
    values: dict[QueueKey, Values] = {}
    for node, queues in nodes.items():
        sums = sums_of(queues)
        moved = (sums.ingress, sums.finish, sums.requeue)
        rates = (math.nan if rate is None else rate for rate in moved)
        values[node, "", ""] = (sums.depth, sums.in_flight, sums.clients, *rates, math.nan)
    return values


# -- ages of waiting messages ---------------------------------------------------------------------

# nsqd does not show the age of a message. But if more messages wait or are in flight than arrived
# since a moment, the oldest is older than that moment, in whatever order they are delivered.

# Moments kept of a queue. The older half has even distances, so an age is at most 4 % too low.
MAX_MOMENTS = 64


class WaitingAges:
    """Follows the message counts of the queues on each nsqd through successive samples.

    ``oldest_s`` has the least age of the oldest message of each nonempty queue, in seconds, by the
    key of the queue on all nsqd. It is replaced by `add` and never changed.
    """

    def __init__(self) -> None:
        self.oldest_s: Mapping[QueueKey, float] = {}
        # Times with the message counts at them, the oldest first.
        self._moments: dict[QueueKey, deque[tuple[float, int]]] = {}

    def add(self, at_s: float, rows: Iterable[QueueRow]) -> None:
        """Add the queues of a sample that was taken at a time on the monotonic clock."""
        moments_by_key: dict[QueueKey, deque[tuple[float, int]]] = {}
        oldest_s: dict[QueueKey, float] = {}
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
