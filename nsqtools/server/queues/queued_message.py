"""Messages in memory: frames, messages in flight, new ids, and latencies.

A queued message is the frame that its next delivery will send. One ``bytes`` object contains size,
frame type, timestamp, attempts, id and body. So a message costs its wire size plus one object
header, all channels of a topic share it until it is requeued, and a delivery joins frames without
encoding. The attempts in a waiting frame include the next delivery: 1 for a new message. A record
on disk has the attempts made so far, which is one less.

An id is 16 hexadecimal digits of time, node and sequence number, and ids increase within a topic. A
tick is 2^20 ns and has 4096 ids. When they run out, or the clock goes back, nsqd sleeps a
millisecond. This generator continues in the next tick instead: ids stay unique and increasing, and
the loop never waits. Two topics can generate the same id, as in nsqd.

All deliveries of a consumer have the same timeout. So a dict in the order of delivery is also in
the order of the deadlines, and its first entry replaces a heap. Only a TOUCH that is limited by
``max_msg_timeout`` gets an earlier deadline than the entries before it. These few are checked one
by one.

Latency is the time from publish to FIN in a rolling window. A channel has two sketches of half a
window each, as in nsqd. After half a window the older one is dropped and a new one gets the
samples. The statistics merge both.
"""

from __future__ import annotations

import struct
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import islice, repeat
from time import monotonic, time_ns

from ddsketch import DDSketch

from nsqtools.protocol.frames import ID_LENGTH, MESSAGE, MIN_MESSAGE_SIZE
from nsqtools.protocol.requests import LARGE_COUNT
from nsqtools.protocol.stats import NO_LATENCY, LatencyStats


class InFlightMessages:
    """The messages that a consumer has received and not answered; times are monotonic."""

    def __init__(self) -> None:
        # id -> (message, deadline, time of delivery), in the order of the deadlines except for the
        # entries in `_capped`.
        self._entries: dict[bytes, tuple[bytes, float, float]] = {}
        self._capped: set[bytes] = set()

    def __len__(self) -> int:
        return len(self._entries)

    def __contains__(self, message_id: bytes) -> bool:
        return message_id in self._entries

    def add(self, messages: list[bytes], now_s: float, timeout_s: float) -> None:
        """Add messages that are being delivered."""
        self._entries.update(
            zip(
                message_ids(messages),
                zip(messages, repeat(now_s + timeout_s), repeat(now_s), strict=False),
                strict=False,
            )
        )

    def take(self, ids: list[bytes]) -> tuple[list[bytes], list[bytes]]:
        """Remove messages that were answered; return them, and the ids not in flight."""
        pop = self._entries.pop
        entries = [pop(id_, None) for id_ in ids]
        if self._capped:
            self._capped.difference_update(ids)
        messages = [entry[0] for entry in entries if entry is not None]
        if len(messages) == len(ids):
            return messages, []
        return messages, [id_ for id_, entry in zip(ids, entries, strict=True) if entry is None]

    def touch(
        self, ids: list[bytes], now_s: float, timeout_s: float, limit_s: float
    ) -> list[bytes]:
        """Restart timeouts; return the ids not in flight.

        No deadline is later than ``limit_s`` after the delivery.
        """
        entries = self._entries
        full_deadline_s = now_s + timeout_s
        failed = []
        for id_ in ids:
            entry = entries.get(id_)
            if entry is None:
                failed.append(id_)
                continue
            message, old_deadline_s, delivered_s = entry
            deadline_s = min(delivered_s + limit_s, full_deadline_s)
            # A message that was just delivered, or is at the limit, keeps its place in the order.
            if deadline_s == old_deadline_s:
                continue
            del entries[id_]
            entries[id_] = (message, deadline_s, delivered_s)
            if deadline_s < full_deadline_s:
                self._capped.add(id_)
        return failed

    def next_deadline_s(self) -> float | None:
        """Return the earliest deadline, None when nothing is in flight."""
        deadlines_s = [self._entries[message_id][1] for message_id in self._capped]
        deadlines_s += [deadline_s for _, deadline_s, _ in islice(self._entries.values(), 1)]
        return min(deadlines_s, default=None)

    def intersection(self, message_ids: set[bytes]) -> set[bytes]:
        """Return the ids of ``message_ids`` that are in flight."""
        return message_ids & self._entries.keys()

    def take_expired(self, now_s: float, limit: int) -> list[bytes]:
        """Remove and return messages that have timed out, at most ``limit``."""
        entries = self._entries
        # A dict and not a set: the messages keep their order.
        due = {id_: None for id_ in self._capped if entries[id_][1] <= now_s}
        for message_id, (_, deadline_s, _) in entries.items():
            if deadline_s > now_s or len(due) >= limit:
                break
            due[message_id] = None
        expired = list(due)[:limit]
        self._capped.difference_update(expired)
        return [entries.pop(message_id)[0] for message_id in expired]

    def clear(self) -> None:
        """Remove all messages: the channel was emptied."""
        self._entries.clear()
        self._capped.clear()


# Frame type, timestamp and attempts: equal for all messages of one publish.
_MIDDLE = struct.Struct(">IqH")
_ATTEMPTS = struct.Struct(">H")
_TIMESTAMP = struct.Struct(">q")
_ATTEMPTS_AT = 16
ID_AT = 18
BODY_AT = ID_AT + ID_LENGTH
RECORD_OVERHEAD = 4 + MIN_MESSAGE_SIZE  # bytes of a record of a disk queue without the body
_SIZE_OVERHEAD = 4 + MIN_MESSAGE_SIZE  # bytes counted by the size field, without the body


class _Sizes(dict[int, bytes]):
    """The size field of a frame by the length of the body, cached for bodies below 4 KiB."""

    def __missing__(self, length: int) -> bytes:
        size = (length + _SIZE_OVERHEAD).to_bytes(4, "big")
        if length < 1 << 12:
            self[length] = size
        return size


_SIZES = _Sizes()


def new_messages(bodies: Iterable[bytes], ids: Iterable[bytes], timestamp_ns: int) -> list[bytes]:
    """Return a frame for each body."""
    middle = _MIDDLE.pack(MESSAGE, timestamp_ns, 1)
    sizes = _SIZES
    return [sizes[len(body)] + middle + id_ + body for body, id_ in zip(bodies, ids, strict=False)]


@dataclass(frozen=True, slots=True)
class LargePublish:
    """A publish of more messages than one iteration of the loop may encode.

    ``size`` counts the bytes of the bodies. The thread of the database calls ``make_messages``.
    """

    count: int
    size: int
    make_messages: Callable[[], Iterable[list[bytes]]] = tuple


def in_batches(messages: list[bytes]) -> Iterator[list[bytes]]:
    """Yield messages in groups of `LARGE_COUNT`."""
    for start in range(0, len(messages), LARGE_COUNT):
        yield messages[start : start + LARGE_COUNT]


def message_ids(messages: list[bytes]) -> list[bytes]:
    """Return the ids of messages."""
    return [message[ID_AT:BODY_AT] for message in messages]


def timestamp_ns(message: bytes) -> int:
    """Return the timestamp of a message, in ns since 1970."""
    stamp: int = _TIMESTAMP.unpack_from(message, 8)[0]
    return stamp


def attempts_of(message: bytes) -> int:
    """Return the attempts in a frame, including the next delivery of a waiting message."""
    attempts: int = _ATTEMPTS.unpack_from(message, _ATTEMPTS_AT)[0]
    return attempts


def with_attempts(message: bytes, added: int) -> bytes:
    """Return the message with ``added`` attempts more, or fewer if that is negative."""
    if not added:
        return message
    # The field has 16 bits and wraps around, as in nsqd.
    attempts = _ATTEMPTS.unpack_from(message, _ATTEMPTS_AT)[0] + added & 0xFFFF
    return message[:_ATTEMPTS_AT] + _ATTEMPTS.pack(attempts) + message[ID_AT:]


def for_redelivery(messages: Iterable[bytes]) -> list[bytes]:
    """Return delivered messages with one attempt more, to be queued."""
    queued = []
    for message in messages:
        if message[ID_AT - 1] == 255:  # the increment carries into the high byte
            queued.append(with_attempts(message, 1))
        else:  # the fastest way for nearly all messages
            changed = bytearray(message)
            changed[ID_AT - 1] += 1
            queued.append(bytes(changed))
    return queued


def to_record(message: bytes) -> bytes:
    """Return a waiting message as the record of a disk queue."""
    if message[_ATTEMPTS_AT:ID_AT] == b"\0\1":  # new, as most messages are
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
    """Generates the ids of one topic, larger than all ids of the time ``after_ns`` and before.

    ``node_id`` is 0 to 1023.
    """

    __slots__ = ("_head", "_next", "_node_id", "_tick")

    def __init__(self, node_id: int, after_ns: int = 0) -> None:
        self._node_id = node_id
        self._begin_tick(max(0, (after_ns >> 20) - _FIRST_TICK))
        self._next = _PER_TICK  # the next sequence number in the tick

    def _begin_tick(self, tick: int) -> None:
        self._tick = tick
        self._next = 0
        # The last three digits are the sequence number. The others are equal within a tick.
        self._head = b"%013x" % (tick << 10 | self._node_id)

    def reserve(self, count: int, now_ns: int) -> MessageIds:
        """Return a generator of the next ``count`` ids, for another thread to use later."""
        self._continue_at(now_ns)
        reserved = MessageIds.__new__(MessageIds)  # `copy.copy` takes ten times as long
        reserved._node_id, reserved._tick = self._node_id, self._tick
        reserved._head, reserved._next = self._head, self._next
        tick, first = divmod(self._tick * _PER_TICK + self._next + count, _PER_TICK)
        self._begin_tick(tick)
        self._next = first
        return reserved

    def _continue_at(self, now_ns: int) -> None:
        tick = (now_ns >> 20) - _FIRST_TICK
        if tick > self._tick:
            self._begin_tick(tick)

    def take(self, count: int, now_ns: int) -> list[bytes]:
        """Return ``count`` new ids."""
        self._continue_at(now_ns)
        ids: list[bytes] = []
        while True:
            head = self._head
            run = _SEQUENCES[self._next : self._next + count - len(ids)]
            ids += [head + sequence for sequence in run]
            self._next += len(run)
            if len(ids) == count:
                return ids
            self._begin_tick(self._tick + 1)


# -- latency ---------------------------------------------------------------------------------------

_sketch = partial(DDSketch, 0.01)  # the relative error of a quantile


class LatencyWindow:
    """The latencies of one channel in the last ``window_s`` seconds."""

    def __init__(self, percentiles: Sequence[float], window_s: float) -> None:
        self.percentiles = tuple(sorted(percentiles, reverse=True))
        self._half_s = window_s / 2
        self._current, self._previous = _sketch(), _sketch()
        self._rotates_at_s = monotonic() + self._half_s

    def add(self, published_ns: Iterable[int]) -> None:
        """Add the latencies of messages that are finished now, given their timestamps."""
        self._rotate()
        now_ns = time_ns()
        for timestamp_ns in published_ns:
            self._current.add(max(0, now_ns - timestamp_ns))

    def _rotate(self) -> None:
        now_s = monotonic()
        overdue_s = now_s - self._rotates_at_s
        if overdue_s < 0:
            return
        self._previous = self._current if overdue_s < self._half_s else _sketch()
        self._current = _sketch()
        self._rotates_at_s = now_s + self._half_s

    def merge_into(self, sketch: DDSketch) -> None:
        """Add the samples of the window to ``sketch``."""
        self._rotate()
        sketch.merge(self._previous)
        sketch.merge(self._current)


def latency_stats(latencies: Sequence[LatencyWindow]) -> LatencyStats:
    """Return the statistics of one channel, or of all channels of a topic."""
    if not latencies:
        return NO_LATENCY
    merged = _sketch()
    for latency in latencies:
        latency.merge_into(merged)
    percentiles = [
        (quantile, float(round(merged.get_quantile_value(quantile) or 0.0)))
        for quantile in latencies[0].percentiles
    ]
    return LatencyStats(count=int(merged.count), percentiles=tuple(percentiles))
