"""What a cluster did in the last six hours, in bounded memory: for `nsq web`.

    history = History(interval_s=2.0)
    history.add(sample)                                   # each sample, as it is taken
    history.series([("", "clicks", "archive")], "finish", since_s=time.time() - 3600)

Kept are a point for each sample for 12 minutes (at 2 s), one for every 10 s for an hour, and one
for every minute for 6 hours; these for each topic and channel of all nsqd together, each nsqd as a
whole, and everything together. Coarser points are means.

A frame is one moment of all series together: for each quantity a column of doubles, one for each
series, compressed. A column without traffic takes almost nothing; a series with traffic takes at
most 90 kB.

Trap: a place in the columns is given to another series when all places are taken, so a place knows
since when it belongs to its series; older numbers in it are not its own.
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

from nsqtools.cluster.queue_rows import Key, QueueRow, sums_of
from nsqtools.cluster.sampling import Sample

log = logging.getLogger("nsqtools")

QUANTITIES = ("depth", "in_flight", "clients", "ingress", "finish", "requeue", "latency")
"""What is kept of a queue. ``requeue`` has those messages in it that timed out, as everywhere.
``latency`` is seconds, of the highest percentile of nsqd, and is not kept of sums."""

MAX_SERIES = 20_000
MAX_POINTS = 360  # of each level
COARSER_STEPS_S = (10.0, 60.0)
GAP_S = 90.0  # a pause that is longer shows as a gap: of three samples, or of three steps

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
        # where a series is in the columns, and from when on (seconds since 1970)
        self._places: dict[Key, tuple[int, float]] = {}
        # the finest first
        self._levels = [Level(step_s, step_s * MAX_POINTS, deque()) for step_s in steps]
        self._is_full = False

    def add(self, sample: Sample) -> None:
        """Keep a sample's queues, and their sums."""
        values = {row.key: _values_of(row) for row in sample.totals}
        values.update(_sums_of_nodes(sample.rows))
        with self._lock:
            self._add(sample.time_s, values)

    def series(
        self, keys: Sequence[Key], quantity: str, *, since_s: float
    ) -> list[tuple[float, float | None]]:
        """Return points of (seconds since 1970, value) from ``since_s`` on, the oldest first.

        A key is (node, topic, channel): ``("", topic, channel)`` a queue on all nsqd, ``(node, "",
        "")`` one nsqd, ``("", "", "")`` everything together. Several are summed up; of latencies
        the worst counts. None is a gap. The points lie the closer the shorter that time is. Nothing
        for a series that is not known; ``ValueError`` for a quantity that is not one of
        `QUANTITIES`.
        """
        column = QUANTITIES.index(quantity)
        with self._lock:
            places = [self._places[key] for key in keys if key in self._places]
            frames, step_s = self._since(since_s)
        begin_s = min((from_s for _, from_s in places), default=math.inf)
        join = max if quantity == "latency" else sum
        shown: list[tuple[float, float | None]] = []
        before_s = math.inf
        for at_s, columns in frames:
            if at_s < begin_s:
                continue
            values = _unpacked(columns[column])
            known = [
                values[number]
                for number, from_s in places
                if at_s >= from_s and number < len(values) and values[number] == values[number]
            ]
            if at_s - before_s > max(GAP_S, 3 * step_s) and shown[-1][1] is not None:
                shown.append(((before_s + at_s) / 2, None))
            shown.append((at_s, join(known) if known else None))
            before_s = at_s
        return shown

    def _add(self, at_s: float, values: Mapping[Key, Values]) -> None:
        """Add a moment. After a clock was set back what lies in its future is forgotten."""
        finest = self._levels[0].frames
        if finest and finest[-1].at_s >= at_s:
            of_all = self._places.items()
            self._places = {key: (place, min(from_s, at_s)) for key, (place, from_s) in of_all}
        self._assign(values, at_s)
        # by the place, which is not the order of the dict once a place has changed hands
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

    def _assign(self, present: Mapping[Key, Values], at_s: float) -> None:
        """Give a place to the new ones; the longest known of those that are gone make room."""
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

        They are of the finest level that is kept that long, with finer ones after its last.
        """
        finest = self._levels[0].frames
        now_s = finest[-1].at_s if finest else since_s
        finer = [level for level in self._levels if now_s - level.keep_s > since_s]
        wanted = self._levels[: len(finer) + 1]
        frames: list[Frame] = []
        begin_s = since_s
        for level in reversed(wanted):
            frames += [frame for frame in level.frames if frame.at_s >= begin_s]
            begin_s = frames[-1].at_s + level.step_s / 2 if frames else since_s
        return frames, wanted[-1].step_s


def _average(finer: Sequence[Frame], level: Level, now_s: float) -> None:
    """Average the last bucket of a level, if it is over and not done yet."""
    if not finer or now_s // level.step_s == finer[-1].at_s // level.step_s:
        return
    bucket = finer[-1].at_s // level.step_s
    middle_s = (bucket + 0.5) * level.step_s
    if level.frames and level.frames[-1].at_s >= middle_s:
        return
    parts = [frame.columns for frame in finer if frame.at_s // level.step_s == bucket]
    level.frames.append(Frame(middle_s, tuple(map(_mean, zip(*parts, strict=True)))))


def _mean(columns: tuple[bytes, ...]) -> bytes:
    """Return the column of the means of some columns, which grow. NaN is left out."""
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
            known = [value for value in moments if not math.isnan(value)]
            total, count = sum(known) if known else math.nan, len(known) or 1
        means.append(total / count)
    return _pack(means)


def _pack(values: Iterable[float]) -> bytes:
    return zlib.compress(array("d", values).tobytes(), 1)


def _unpack(column: bytes) -> array[float]:
    return array("d", zlib.decompress(column))


_unpacked = functools.lru_cache(256)(_unpack)
"""For those who do not change a column: a page shows the trends of fifty queues at once."""


def _values_of(row: QueueRow) -> Values:
    rates = row.rates
    latency_s = max(row.latency)[1] if row.latency else math.nan
    moved = (rates.ingress, rates.finish, rates.requeue) if rates else (math.nan,) * 3
    return (row.depth, row.in_flight, row.clients, *moved, latency_s)


def _sums_of_nodes(rows: Iterable[QueueRow]) -> dict[Key, Values]:
    """Return the values of each nsqd as a whole, and of all together under node ""."""
    nodes: defaultdict[str, list[QueueRow]] = defaultdict(list)
    for row in rows:
        nodes[row.node].append(row)
        nodes[""].append(row)
    values: dict[Key, Values] = {}
    for node, queues in nodes.items():
        sums = sums_of(queues)
        moved = (sums.ingress, sums.finish, sums.requeue)
        known = (math.nan if each is None else each for each in moved)
        values[node, "", ""] = (sums.depth, sums.in_flight, sums.clients, *known, math.nan)
    return values
