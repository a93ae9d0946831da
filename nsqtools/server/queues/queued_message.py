"""A queued message is the very frame that its next delivery will send; and the ids of new ones.

One ``bytes`` object holds size, frame type, timestamp, attempts, id and body, so a message costs
its wire size plus one object header, all channels of a topic share it until it is requeued, and
delivering it is a join. The attempts in a waiting frame count the delivery that is to come: 1 for
a new message. A disk record holds the attempts made so far, which is one less.

An id is 16 hexadecimal digits of time, node and sequence, increasing within a topic. A tick is
2^20 ns; in each there are 4096 ids. Where nsqd sleeps a millisecond when they run out or the clock
goes back, this generator continues in the next tick: the ids stay unique and increasing, and the
loop never waits. Two topics can produce the same id, as in nsqd.

What one consumer holds until it answers or times out, and what is deferred, is kept without a
clock. Deliveries of a consumer all get the same timeout, so a dict in the order of delivery is
also in the order of the deadlines, and looking at its first entry replaces a heap. Only a TOUCH
that runs into ``max_msg_timeout`` gets a deadline earlier than those before it; these few are
looked at one by one.

Latency is the time from publish to FIN, over a rolling window. As nsqd does, a channel keeps two
sketches of half a window each: when half a window is over, the older one is dropped and a new one
takes the samples. An answer merges both.
"""

from __future__ import annotations

import struct
from collections.abc import Callable, Iterable, Iterator, Sequence
from copy import copy
from dataclasses import dataclass
from functools import partial
from itertools import islice, repeat
from time import monotonic, time_ns

from ddsketch import DDSketch

from nsqtools.protocol.frames import ID_LENGTH, MESSAGE, MIN_MESSAGE_SIZE
from nsqtools.protocol.requests import LARGE_COUNT
from nsqtools.protocol.stats import LatencyStats


class InFlightMessages:
    """id -> (message, deadline, time of delivery), times in seconds of one monotonic clock."""

    def __init__(self) -> None:
        self._held: dict[bytes, tuple[bytes, float, float]] = {}
        self._capped: set[bytes] = set()  # of these, not in the order of the deadlines

    def __len__(self) -> int:
        return len(self._held)

    def __contains__(self, message_id: bytes) -> bool:
        return message_id in self._held

    def hold(self, messages: list[bytes], now_s: float, timeout_s: float) -> None:
        """Enter messages that are being delivered."""
        self._held.update(
            zip(
                message_ids(messages),
                zip(messages, repeat(now_s + timeout_s), repeat(now_s), strict=False),
                strict=False,
            )
        )

    def take(self, ids: list[bytes]) -> tuple[list[bytes], list[bytes]]:
        """Remove messages that were answered; return them, and the ids that are not held."""
        pop = self._held.pop
        found = [pop(id_, None) for id_ in ids]
        if self._capped:
            self._capped.difference_update(ids)
        messages = [held[0] for held in found if held is not None]
        if len(messages) == len(ids):
            return messages, []
        return messages, [id_ for id_, held in zip(ids, found, strict=True) if held is None]

    def touch(
        self, ids: list[bytes], now_s: float, timeout_s: float, limit_s: float
    ) -> list[bytes]:
        """Restart timeouts, none beyond ``limit_s`` after its delivery; return ids not held."""
        all_held = self._held
        until_s = now_s + timeout_s
        failed = []
        for id_ in ids:
            held = all_held.get(id_)
            if held is None:
                failed.append(id_)
                continue
            message, present_s, delivered_s = held
            deadline_s = delivered_s + limit_s
            if deadline_s > until_s:
                deadline_s = until_s
            if deadline_s == present_s:
                continue  # at the limit before, or just delivered: it is in its place
            del all_held[id_]
            all_held[id_] = (message, deadline_s, delivered_s)
            if deadline_s < until_s:
                self._capped.add(id_)
        return failed

    def next_deadline_s(self) -> float | None:
        """Return the earliest deadline, None when nothing is held."""
        deadlines_s = [self._held[each][1] for each in self._capped]
        deadlines_s += [deadline_s for _, deadline_s, _ in islice(self._held.values(), 1)]
        return min(deadlines_s, default=None)

    def of(self, message_ids: set[bytes]) -> set[bytes]:
        """Return those of some messages that are held."""
        return message_ids & self._held.keys()

    def take_expired(self, now_s: float, limit: int) -> list[bytes]:
        """Remove and return what has timed out, up to a limit."""
        held = self._held
        due = {each: None for each in self._capped if held[each][1] <= now_s}
        for message_id, (_, deadline_s, _) in held.items():
            if deadline_s > now_s or len(due) >= limit:
                break
            due[message_id] = None
        expired = list(due)[:limit]
        self._capped.difference_update(expired)
        return [held.pop(message_id)[0] for message_id in expired]

    def clear(self) -> None:
        """Forget everything: the channel was emptied."""
        self._held.clear()
        self._capped.clear()


_MIDDLE = struct.Struct(">IqH")  # type, timestamp, attempts: the same for a batch of new messages
_ATTEMPTS = struct.Struct(">H")
_TIMESTAMP = struct.Struct(">q")
_ATTEMPTS_AT = 16
ID_AT = 18
BODY_AT = ID_AT + ID_LENGTH
RECORD_OVERHEAD = 4 + MIN_MESSAGE_SIZE  # what a record of a disk queue has besides the body
_SIZE_OVERHEAD = 4 + MIN_MESSAGE_SIZE  # what the size counts besides the body


class _Sizes(dict[int, bytes]):
    """The first field of a frame, by the length of the body."""

    def __missing__(self, length: int) -> bytes:
        size = (length + _SIZE_OVERHEAD).to_bytes(4, "big")
        if length < 1 << 12:
            self[length] = size
        return size


_SIZES = _Sizes()


def new_messages(bodies: Iterable[bytes], ids: Iterable[bytes], timestamp_ns: int) -> list[bytes]:
    """Return one frame a body."""
    middle = _MIDDLE.pack(MESSAGE, timestamp_ns, 1)
    sizes = _SIZES
    return [sizes[len(body)] + middle + id_ + body for body, id_ in zip(bodies, ids, strict=False)]


@dataclass(frozen=True, slots=True)
class LargePublish:
    """A publish of more messages than one turn of the loop may make."""

    count: int
    size: int  # of the bodies
    make_messages: Callable[[], Iterable[list[bytes]]] = tuple  # on the thread of a database


def in_batches(messages: list[bytes]) -> Iterator[list[bytes]]:
    """Yield messages some at a time."""
    for start in range(0, len(messages), LARGE_COUNT):
        yield messages[start : start + LARGE_COUNT]


def message_ids(messages: list[bytes]) -> list[bytes]:
    """Return the id of each."""
    return [message[ID_AT:BODY_AT] for message in messages]


def timestamp_ns(message: bytes) -> int:
    """Return when it was published."""
    stamp: int = _TIMESTAMP.unpack_from(message, 8)[0]
    return stamp


def attempts_of(message: bytes) -> int:
    """Return the attempts in a frame: for one in flight, those made."""
    attempts: int = _ATTEMPTS.unpack_from(message, _ATTEMPTS_AT)[0]
    return attempts


def with_attempts(message: bytes, more: int) -> bytes:
    """Return the message to queue after more attempts, or fewer."""
    if not more:
        return message
    attempts = _ATTEMPTS.unpack_from(message, _ATTEMPTS_AT)[0] + more & 0xFFFF
    return message[:_ATTEMPTS_AT] + _ATTEMPTS.pack(attempts) + message[ID_AT:]


def again(messages: Iterable[bytes]) -> list[bytes]:
    """Return delivered messages as those to queue for the next delivery."""
    queued = []
    for message in messages:
        if message[ID_AT - 1] == 255:
            queued.append(with_attempts(message, 1))
        else:  # as nearly all; this is the quickest way
            changed = bytearray(message)
            changed[ID_AT - 1] += 1
            queued.append(bytes(changed))
    return queued


def to_record(message: bytes) -> bytes:
    """Return a waiting message as the record of a disk queue."""
    if message[_ATTEMPTS_AT:ID_AT] == b"\0\1":  # new, as most are
        return b"%b\0\0%b" % (message[8:_ATTEMPTS_AT], message[ID_AT:])
    return with_attempts(message, -1)[8:]


def from_record(record: bytes) -> bytes:
    """Return the message to queue for a record of a disk queue."""
    head = (len(record) + 4).to_bytes(4, "big") + MESSAGE.to_bytes(4, "big")
    return with_attempts(head + record, 1)


_FIRST_TICK = 1288834974288  # nsqd's epoch, in ticks
_PER_TICK = 4096
_SEQUENCES = [b"%03x" % number for number in range(_PER_TICK)]


class MessageIds:
    """The ids of one topic, above all of ``after_ns``. ``node_id`` is 0 to 1023."""

    def __init__(self, node_id: int, after_ns: int = 0) -> None:
        self._node_id = node_id
        self._tick = max(0, (after_ns >> 20) - _FIRST_TICK)
        self._next = _PER_TICK  # sequence number in this tick
        self._head, self._head_tick = b"", -1  # the first digits in a tick

    def take_one(self, now_ns: int) -> bytes:
        """Return a new id."""
        tick = (now_ns >> 20) - _FIRST_TICK
        if tick <= self._tick and self._next < _PER_TICK and self._head_tick == self._tick:
            self._next += 1
            return self._head + _SEQUENCES[self._next - 1]
        [id_] = self.take(1, now_ns)
        self._head, self._head_tick = id_[:13], self._tick
        return id_

    def reserve(self, count: int, now_ns: int) -> MessageIds:
        """Return a generator of the next ``count`` ids, which may be taken later, elsewhere."""
        self._continue_at(now_ns)
        reserved = copy(self)
        self._tick, self._next = divmod(self._tick * _PER_TICK + self._next + count, _PER_TICK)
        return reserved

    def _continue_at(self, now_ns: int) -> None:
        tick = (now_ns >> 20) - _FIRST_TICK
        if tick > self._tick:
            self._tick = tick
            self._next = 0

    def take(self, count: int, now_ns: int) -> list[bytes]:
        """Return ``count`` new ids."""
        self._continue_at(now_ns)
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


# -- latency ---------------------------------------------------------------------------------------

_sketch = partial(DDSketch, 0.01)  # relative accuracy


class LatencyWindow:
    """The samples of one channel."""

    def __init__(self, percentiles: Sequence[float], window_s: float) -> None:
        self.percentiles = tuple(sorted(percentiles, reverse=True))
        self._half_s = window_s / 2
        self._current, self._previous = _sketch(), _sketch()
        self._turns_at_s = monotonic() + self._half_s

    def add(self, published_ns: Iterable[int]) -> None:
        """Enter messages that are finished now, by the time they were published."""
        self._turn()
        now_ns = time_ns()
        for timestamp_ns in published_ns:
            self._current.add(max(0, now_ns - timestamp_ns))

    def _turn(self) -> None:
        now_s = monotonic()
        overdue_s = now_s - self._turns_at_s
        if overdue_s < 0:
            return
        self._previous = self._current if overdue_s < self._half_s else _sketch()
        self._current = _sketch()
        self._turns_at_s = now_s + self._half_s

    def merge_into(self, sketch: DDSketch) -> None:
        """Add the samples of the last window."""
        self._turn()
        sketch.merge(self._previous)
        sketch.merge(self._current)


def latency_stats(latencies: Sequence[LatencyWindow]) -> LatencyStats:
    """Summarize a channel, or all channels of a topic."""
    if not latencies:
        return LatencyStats()
    merged = _sketch()
    for latency in latencies:
        latency.merge_into(merged)
    percentiles = [
        (quantile, float(round(merged.get_quantile_value(quantile) or 0.0)))
        for quantile in latencies[0].percentiles
    ]
    return LatencyStats(count=int(merged.count), percentiles=tuple(percentiles))
