"""What a cluster did in the last hours, in bounded memory: for `nsq top` and `nsq web`.

    history = History(interval_s=2.0)
    history.add(sample)                                   # each sample, as it is taken
    history.series(("", "clicks", ""), "ingress", since_s=time.time() - 3600)

Kept in memory: a point for each sample for 12 minutes (at 2 s), one for every 10 s for an hour, one
for every minute for a day; these for each topic and channel of all nsqd together, each nsqd as a
whole, and everything together. A queue on one nsqd is kept for 2 minutes only: there may be ten
times as many. With a `HistoryFile` a point for every minute is kept for two days and one for every
10 minutes for 30 days, across restarts.

Coarser points are means. Of more series than `MAX_SERIES` the longest gone make room.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Iterable, Mapping

from nsqtools.cluster.history_file import HistoryFile
from nsqtools.cluster.history_frames import (
    Frame,
    Frames,
    Level,
    Place,
    Places,
    pack,
    value_at,
    with_gaps,
)
from nsqtools.cluster.history_values import (
    QUANTITIES,
    UNKNOWN,
    Values,
    sums_of_nodes,
    values_of,
)
from nsqtools.cluster.queue_rows import Key, QueueRow
from nsqtools.cluster.sampling import Sample

__all__ = ["QUANTITIES", "History"]

log = logging.getLogger("nsqtools")

MAX_SERIES = 20_000
MAX_NODE_SERIES = 50_000
MAX_POINTS = 360  # of the finest level
NODE_POINTS = 60
COARSER = (Level(10.0, 3600.0), Level(60.0, 86400.0))
FILE_LEVELS = (Level(60.0, 2 * 86400.0), Level(600.0, 30 * 86400.0))
GAP_S = 30.0  # a pause that is longer shows as a gap, and one of three steps


def levels_for(interval_s: float, max_points: int = MAX_POINTS) -> list[Level]:
    """Return the levels in memory for samples every ``interval_s`` seconds, the finest first.

    The interval has to be shorter than a minute where there is a file, which gets the minutes.
    """
    finest = Level(interval_s, interval_s * max_points)
    return [finest, *(level for level in COARSER if level.step_s > interval_s)]


class History:
    """See the module. Thread-safe."""

    def __init__(
        self,
        *,
        interval_s: float = 2.0,
        max_points: int = MAX_POINTS,
        file: HistoryFile | None = None,
    ) -> None:
        levels = levels_for(interval_s, max_points)
        self._lock = threading.Lock()
        self._file = file
        self._long = _Group(levels, MAX_SERIES)
        self._short = _Group([Level(interval_s, interval_s * NODE_POINTS)], MAX_NODE_SERIES)
        if file is not None:
            for key, place in file.places():
                self._long.places.restore(key, place)
        self._known: dict[int, tuple[QueueRow, Key, Values]] = {}

    def add(self, sample: Sample) -> None:
        """Keep a sample's rows, and their sums."""
        at_s = sample.time_ns / 1e9
        known, self._known = self._known, {}
        per_node = self._values_of(sample.rows, known)
        together = self._values_of(sample.totals, known) | sums_of_nodes(sample.rows)
        with self._lock:
            self._short.add(at_s, per_node)
            made, fresh = self._long.add(at_s, together)
            if self._file is not None:
                self._file.add_places((key, self._place(key)) for key in fresh)
                for level, frame in made:
                    if level.step_s == FILE_LEVELS[0].step_s:
                        self._file.add(frame)

    def _values_of(
        self, rows: Iterable[QueueRow], known: Mapping[int, tuple[QueueRow, Key, Values]]
    ) -> dict[Key, Values]:
        """Return the values by key. A row that did not change, as most do not, is the same object
        as last time: it is known by its id, which is cheaper than its key."""
        found = {}
        now = self._known
        for row in rows:
            entry = known.get(id(row))
            if entry is None or entry[0] is not row:
                entry = row, row.key, values_of(row)
            now[id(row)] = entry
            found[entry[1]] = entry[2]
        return found

    def _place(self, key: Key) -> Place:
        place = self._long.places.get(key)
        assert place is not None
        return place

    def keys(self) -> list[Key]:
        """Return every series: (node, topic, channel), with "" as `QueueRow` has it.

        ``("", "", "")`` is everything together, ``(node, "", "")`` one nsqd.
        """
        with self._lock:
            return [*self._long.places.keys, *self._short.places.keys]

    def series(
        self, key: Key, quantity: str, *, since_s: float
    ) -> list[tuple[float, float | None]]:
        """Return points of (seconds since 1970, value) from ``since_s`` on, the oldest first.

        None is a gap. The points lie the closer the shorter that time is. Nothing for a series
        that is not known; ``ValueError`` for a quantity that is not one of `QUANTITIES`.
        """
        column = QUANTITIES.index(quantity)
        with self._lock:
            group = self._long if key in self._long.places else self._short
            place = group.places.get(key)
            if place is None:
                return []
            frames, step_s = group.since(since_s)
            oldest_s = frames[0].at_s if frames else float("inf")
        since_s = max(since_s, place.since_s)
        points = [
            (frame.at_s, value_at(frame.columns[column], place.number))
            for frame in frames
            if frame.at_s >= since_s
        ]
        if self._file is not None and group is self._long and since_s < oldest_s:
            older, step_s = self._file.columns(column, since_s, oldest_s)
            points[:0] = [(at_s, value_at(data, place.number)) for at_s, data in older]
        return with_gaps(points, max(GAP_S, 3 * step_s))

    def close(self) -> None:
        """Close the file, with what is not written yet."""
        if self._file is not None:
            self._file.close()


class _Group:
    """Series that are kept at the same levels."""

    def __init__(self, levels: list[Level], limit: int) -> None:
        self.places: Places[Key] = Places(limit)
        self._frames = Frames(levels, len(QUANTITIES))

    def add(
        self, at_s: float, values: Mapping[Key, Values]
    ) -> tuple[list[tuple[Level, Frame]], list[Key]]:
        """Add a moment; return what was averaged, and the series that are new."""
        left_out = self.places.left_out
        fresh = self.places.assign(values, at_s)
        if self.places.left_out and not left_out:
            log.warning("the history has no room for %d more queues", self.places.left_out)
        ordered: Iterable[Values] = [values.get(key, UNKNOWN) for key in self.places.keys]
        columns = tuple(map(pack, zip(*ordered, strict=True)))
        return self._frames.add(Frame(at_s, columns or (pack(()),) * len(QUANTITIES))), fresh

    def since(self, since_s: float) -> tuple[list[Frame], float]:
        """Return frames from that time on, as close as fits, and how far apart the oldest are.

        The level is the finest that is kept that long; coarser frames stand before it where it
        does not reach back (it may have begun later), and finer ones after it.
        """
        levels = self._frames.levels
        finest = self._frames.of_level(0)
        now_s = finest[-1].at_s if finest else since_s
        wanted = next(
            (i for i, level in enumerate(levels) if now_s - level.keep_s <= since_s),
            len(levels) - 1,
        )
        frames: list[Frame] = []
        step_s = levels[wanted].step_s
        for index in [*range(wanted, len(levels)), *reversed(range(wanted))]:
            kept = [frame for frame in self._frames.of_level(index) if frame.at_s >= since_s]
            if index < wanted:
                end_s = frames[-1].at_s + levels[index + 1].step_s / 2 if frames else since_s
                frames += [frame for frame in kept if frame.at_s > end_s]
            elif frames:
                older = [frame for frame in kept if frame.at_s < frames[0].at_s]
                frames[:0] = older
                step_s = levels[index].step_s if older else step_s
            else:
                frames, step_s = kept, levels[index].step_s
        return frames, step_s
