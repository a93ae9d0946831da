"""Numbers of many series over time, at falling resolution. Pure: values in, values out.

A frame is one moment of all series together: for each quantity a column of 32-bit floats, one for
each series, compressed. Adding a moment costs a handful of calls whatever the number of series; a
column that stays as it is (queues without traffic) takes almost nothing, and is not averaged again.
Reading one series picks its number from each frame.

Each level keeps frames of one width for a time; when a bucket of the next level is over, the frames
in it are averaged into one. NaN stands for "not known", and is left out of averages.

Trap: a place in the columns is given to another series when all places are taken, so a place knows
since when it belongs to its series; older numbers in it are not its own.
"""

from __future__ import annotations

import math
import zlib
from array import array
from collections import deque
from collections.abc import Collection, Hashable, Iterable, Sequence
from dataclasses import dataclass
from typing import Generic, NamedTuple, TypeVar

NAN = math.nan
FLOAT_BYTES = 4

K = TypeVar("K", bound=Hashable)


@dataclass(frozen=True, slots=True)
class Level:
    """Frames of ``step_s`` seconds, kept for ``keep_s`` seconds."""

    step_s: float
    keep_s: float


class Frame(NamedTuple):
    """The middle of its time, in seconds since 1970, and a compressed column per quantity."""

    at_s: float
    columns: tuple[bytes, ...]


class Place(NamedTuple):
    """Where a series stands in the columns, and from when on (seconds since 1970)."""

    number: int
    since_s: float


def pack(values: Iterable[float]) -> bytes:
    """Compress a column: the first bytes of all numbers, which are alike, stand together."""
    data = array("f", values).tobytes()
    return zlib.compress(b"".join(data[place::FLOAT_BYTES] for place in range(FLOAT_BYTES)), 1)


def unpack(column: bytes) -> array[float]:
    """Return the column that `pack` got."""
    data = zlib.decompress(column)
    length = len(data) // FLOAT_BYTES
    joined = bytearray(len(data))
    for place in range(FLOAT_BYTES):
        joined[place::FLOAT_BYTES] = data[place * length : (place + 1) * length]
    values = array("f")
    values.frombytes(joined)
    return values


def value_at(column: bytes, index: int) -> float:
    """Return one number of a column, NaN where it is shorter."""
    values = unpack(column)
    return values[index] if index < len(values) else NAN


def average(columns: Sequence[bytes]) -> bytes:
    """Return the column of the means of some columns, which may differ in length."""
    if all(column == columns[0] for column in columns):
        return columns[0]
    unpacked = [unpack(column) for column in columns]
    length = max(map(len, unpacked))
    for values in unpacked:
        values.extend([NAN] * (length - len(values)))
    count = len(unpacked)
    means = [total / count for total in map(sum, zip(*unpacked, strict=True))]
    for index, mean in enumerate(means):
        if mean != mean:  # NaN somewhere
            known = [values[index] for values in unpacked if values[index] == values[index]]
            means[index] = sum(known) / len(known) if known else NAN
    return pack(means)


class Places(Generic[K]):
    """Which series stands where, at most ``limit`` of them."""

    def __init__(self, limit: int) -> None:
        self._limit = limit
        self._of: dict[K, Place] = {}
        self._keys: list[K] = []  # by index
        self._present: set[K] = set()
        self._gone: dict[K, None] = {}  # those that are not there, the longest first
        self.left_out = 0

    def __contains__(self, key: K) -> bool:
        return key in self._of

    def get(self, key: K) -> Place | None:
        """Return the place of a series."""
        return self._of.get(key)

    @property
    def keys(self) -> list[K]:
        """All series, in the order of the columns."""
        return self._keys

    def restore(self, key: K, place: Place) -> None:
        """Put a series where it was. Call it in the order of their numbers."""
        self._keys.append(key)
        self._of[key] = place
        self._gone[key] = None

    def assign(self, present: Collection[K], at_s: float) -> list[K]:
        """Give a place to those without one, while there are any; return those that got one."""
        now = set(present)
        for key in self._present - now:
            if key in self._of:
                self._gone[key] = None
        for key in now - self._present:
            self._gone.pop(key, None)
        self._present = now
        self.left_out = 0
        given = []
        for key in [key for key in present if key not in self._of]:
            number = len(self._keys)
            if number < self._limit:
                self._keys.append(key)
            elif self._gone:
                old = next(iter(self._gone))
                del self._gone[old]
                number = self._of.pop(old).number
                self._keys[number] = key
            else:
                self.left_out += 1
                continue
            self._of[key] = Place(number, at_s)
            given.append(key)
        return given


class Frames:
    """The frames of some series at several levels, the finest first."""

    def __init__(self, levels: Sequence[Level], quantities: int) -> None:
        self.levels = tuple(levels)
        self._quantities = range(quantities)
        self._frames: list[deque[Frame]] = [deque() for _ in levels]

    def add(self, frame: Frame) -> list[tuple[Level, Frame]]:
        """Add a moment, later than all before; return what was averaged from earlier ones.

        After a clock was set back what lies in its future is forgotten.
        """
        made = []
        for kept in self._frames:
            while kept and kept[-1].at_s >= frame.at_s:
                kept.pop()
        for index in range(1, len(self.levels)):
            averaged = self._close_bucket(index, frame.at_s)
            if averaged is not None:
                made.append((self.levels[index], averaged))
        self._frames[0].append(frame)
        for level, kept in zip(self.levels, self._frames, strict=True):
            while kept and kept[0].at_s < frame.at_s - level.keep_s:
                kept.popleft()
        return made

    def _close_bucket(self, index: int, now_s: float) -> Frame | None:
        """Average the last bucket of a level, if it is over and not done yet."""
        step_s = self.levels[index].step_s
        finer, own = self._frames[index - 1], self._frames[index]
        if not finer or now_s // step_s == finer[-1].at_s // step_s:
            return None
        bucket = finer[-1].at_s // step_s
        middle_s = (bucket + 0.5) * step_s
        if own and own[-1].at_s >= middle_s:
            return None
        parts = []
        for frame in reversed(finer):
            if frame.at_s // step_s != bucket:
                break
            parts.append(frame.columns)
        frame = Frame(
            middle_s, tuple(average([part[each] for part in parts]) for each in self._quantities)
        )
        own.append(frame)
        return frame

    def of_level(self, index: int) -> list[Frame]:
        """Return the frames of a level, the oldest first."""
        return list(self._frames[index])


def with_gaps(
    points: Iterable[tuple[float, float]], longest_s: float
) -> list[tuple[float, float | None]]:
    """Return the points with None for NaN, and a None wherever nothing was measured for longer."""
    shown: list[tuple[float, float | None]] = []
    before_s = math.inf
    for at_s, value in points:
        if at_s - before_s > longest_s and shown[-1][1] is not None:
            shown.append(((before_s + at_s) / 2, None))
        shown.append((at_s, None if value != value else value))
        before_s = at_s
    return shown
