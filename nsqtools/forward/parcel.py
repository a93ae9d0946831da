"""The interface of sinks: parcels of messages, outcomes, and the counters of a run.

A sink receives a parcel and reports its outcome once, on any thread. The outcome describes only
the reaction of the destination. The forwarder decides between FIN, REQ, dead letter and another
try, so that all sinks behave alike. Counts are by source topic.
"""

from __future__ import annotations

import enum
import logging
import threading
import time
from abc import ABC, abstractmethod
from collections import Counter, defaultdict
from collections.abc import Callable, Hashable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, fields
from queue import SimpleQueue
from typing import Any, NamedTuple, Protocol, TypeVar
from zlib import crc32

from nsqtools.client.attempts import MessageKey, keys_of
from nsqtools.client.connecting import RetryDelays
from nsqtools.client.handling import check_count
from nsqtools.client.message import Batch, Message
from nsqtools.errors import ConfigurationError
from nsqtools.records.envelope import Envelope, MessageLike
from nsqtools.records.prometheus import Metric, metric_of

log = logging.getLogger("nsqtools")

T = TypeVar("T", bound=Hashable)


class Fate(enum.Enum):
    """Reaction of the destination to a parcel."""

    DELIVERED = "delivered"
    """The destination has confirmed the messages."""
    UNKNOWN = "unknown"
    """The destination may have some messages, and another try may double them: the connection broke
    before the answer, or (with ``may_split``) an unknown part of a batch was stored."""
    UNREACHABLE = "unreachable"
    """No destination works. The messages wait, and the attempt does not count."""
    BUSY = "busy"
    """The destination asks for a pause. The messages are requeued, and the attempt does not
    count."""
    FAILED = "failed"
    """The destination cannot accept these messages now, but may do so later."""
    REFUSED = "refused"
    """The destination will never accept these messages."""
    DROPPED = "dropped"
    """The destination refused the messages, and the user chose to drop them."""


class Outcome(NamedTuple):
    """Outcome of a delivery.

    Args:
        error: the reason, for logs and dead letters.
        retry_after_s: delay that the destination asks for.
        may_split: one message may have caused the failure of all.
        repeated: number of times that the messages were sent again although the destination may
            have had them.
    """

    fate: Fate
    error: str = ""
    retry_after_s: float | None = None
    may_split: bool = False
    repeated: int = 0


DELIVERED = Outcome(Fate.DELIVERED)


@dataclass(slots=True, eq=False, weakref_slot=True)
class Parcel:
    """Messages of one topic and nsqd, and the bodies to send.

    ``topic`` is that of the destination, ``size`` the sum of the bodies in bytes, and ``began_at``
    the monotonic time of the first try.
    """

    messages: Batch
    bodies: Sequence[bytes]
    topic: str
    began_at: float
    size: int = field(init=False)

    def __post_init__(self) -> None:
        self.size = sum(map(len, self.bodies))

    def __len__(self) -> int:
        return len(self.bodies)

    def keys(self) -> Iterator[MessageKey]:
        """Yield the identity of each message."""
        return keys_of(self.messages)

    def part(self, start: int, stop: int) -> Parcel:
        """Return the messages from ``start`` to before ``stop`` as a new parcel."""
        messages = Batch(self.messages._source, self.messages[start:stop])
        return Parcel(messages, self.bodies[start:stop], self.topic, self.began_at)

    def chosen(self, places: Sequence[int]) -> Parcel:
        """Return the messages at these indexes as a new parcel."""
        messages = Batch(self.messages._source, [self.messages[place] for place in places])
        bodies = [self.bodies[place] for place in places]
        return Parcel(messages, bodies, self.topic, self.began_at)

    def grouped(self, by: Callable[[Message, bytes], T]) -> dict[T, Parcel]:
        """Group the messages into parcels by the value of ``by`` for a message and its body."""
        groups: dict[T, list[int]] = {}
        for at, (message, body) in enumerate(zip(self.messages, self.bodies, strict=True)):
            groups.setdefault(by(message, body), []).append(at)
        return {value: self.chosen(indexes) for value, indexes in groups.items()}

    def sized(self, most: int, most_bytes: int, extra: int = 0) -> list[Parcel]:
        """Split into parts of at most ``most`` messages and ``most_bytes``.

        A larger body is a part of its own. Each message counts ``extra`` bytes in addition to its
        body.
        """
        if len(self) <= most and self.size + extra * len(self) <= most_bytes:
            return [self]
        parts, begin, size = [], 0, 0
        for at, body in enumerate(self.bodies):
            if at > begin and (at - begin == most or size + len(body) + extra > most_bytes):
                parts.append(self.part(begin, at))
                begin, size = at, 0
            size += len(body) + extra
        return [*parts, self.part(begin, len(self))]

    def unanswered(self) -> Parcel | None:
        """Return the unanswered messages; nsqd takes messages back after msg_timeout."""
        places = [at for at, message in enumerate(self.messages) if not message.is_answered]
        if len(places) == len(self.bodies):
            return self
        return self.chosen(places) if places else None


def as_sent(message: Message, body: bytes) -> MessageLike:
    """Return a message with the body that is sent for it."""
    if body is message.body:
        return message
    return Envelope(
        message.topic, message.nsqd, message.id, message.timestamp_ns, message.attempts, body
    )


Report = Callable[[Sequence[Parcel], Outcome], None]


class Circuit:
    """Circuit breaker of a destination.

    After ``failures_to_open`` consecutive failures the circuit is open until ``retry_at``. The time
    doubles from ``base_s`` to ``max_s``. Times are monotonic.
    """

    def __init__(self, base_s: float, max_s: float, failures_to_open: int = 1) -> None:
        self.retry_at = 0.0
        self._failures = 0
        self._failures_to_open = failures_to_open
        self._delays = RetryDelays(base_s, max_s)

    def is_open(self, now: float) -> bool:
        """Return whether the destination must not be used now."""
        return now < self.retry_at

    @property
    def is_failing(self) -> bool:
        """Whether no delivery has succeeded since the last failure."""
        return self._failures > 0

    def worked(self) -> None:
        """Close the circuit after a success."""
        self._failures = 0
        self.retry_at = 0.0
        self._delays.reset()

    def failed(self, now: float, *, is_hopeless: bool = False) -> None:
        """Count a failure; one that ``is_hopeless`` (no connection) opens the circuit alone."""
        self._failures += 1
        if (is_hopeless or self._failures >= self._failures_to_open) and now >= self.retry_at:
            self.retry_at = now + self._delays.next_delay_s()


class Sink(Protocol):
    """A destination of messages.

    Its methods are called on one thread and must return soon, because that thread also touches the
    messages. A sink may have two more:

    - ``flush()`` delivers incomplete batches now, and all later messages without waiting. It may be
      called several times.
    - ``is_stuck(now, after_s)`` returns whether every worker has spent more than ``after_s`` on its
      current part.
    """

    def parts(self, parcel: Parcel) -> list[Parcel]:
        """Split a parcel into the parts to deliver; each message is in exactly one part."""

    def submit(self, parcel: Parcel, report: Report) -> None:
        """Start to deliver a part, and return immediately.

        Call ``report`` once for it, on any thread, maybe for several parts together. A part that is
        dropped without a report has failed.
        """

    def check(self) -> None:
        """Raise ``RuntimeError`` after a defect (not an outage) that ends the run."""

    def stop(self, timeout_s: float) -> None:
        """Wait at most ``timeout_s`` for deliveries under way, and close the connections."""


class ThreadedSink(ABC):
    """A sink that calls `deliver` of a subclass on its own threads.

    An exception of `deliver` is `Fate.FAILED`. The parcel is tried again in halves until the bad
    message is alone; that message is requeued, and becomes a dead letter after max_attempts.

    Raises `ConfigurationError` for a number of threads below 1.
    """

    def __init__(self, threads: int = 1) -> None:
        check_count("threads", threads)
        self._parts = SimpleQueue[tuple[Parcel, Report] | None]()
        self._count = threads
        self._threads: list[threading.Thread] = []
        self._busy_since: dict[int, float] = {}  # by thread

    @abstractmethod
    def deliver(self, parcel: Parcel) -> Outcome:
        """Deliver a part and return its outcome. There is no time limit."""

    def parts(self, parcel: Parcel) -> list[Parcel]:
        """Return the parcel as one part."""
        return [parcel]

    def submit(self, parcel: Parcel, report: Report) -> None:
        """Queue a part for the threads."""
        while len(self._threads) < self._count:
            # A daemon thread that hangs does not keep the program from exiting.
            thread = threading.Thread(target=self._run, name="nsq-sink", daemon=True)
            self._threads.append(thread)
            thread.start()
        self._parts.put((parcel, report))

    def check(self) -> None:  # noqa: B027
        """Do nothing. Override it to raise an error that ends the run."""

    def stop(self, timeout_s: float) -> None:
        """Wait at most ``timeout_s`` for the threads."""
        until = time.monotonic() + timeout_s
        for _ in self._threads:
            self._parts.put(None)
        for thread in self._threads:
            thread.join(max(0.0, until - time.monotonic()))

    def is_stuck(self, now: float, after_s: float) -> bool:
        """Return whether every thread has spent more than ``after_s`` on its current part."""
        times = list(self._busy_since.values())
        return len(times) == self._count and max(times) < now - after_s

    def _run(self) -> None:
        while (work := self._parts.get()) is not None:
            parcel, report = work
            self._busy_since[threading.get_ident()] = time.monotonic()
            try:
                outcome = self.deliver(parcel)
            except BaseException as exc:  # SystemExit, too, would end only this thread
                log.info("%s.deliver failed", type(self).__name__, exc_info=True)
                error = f"{type(exc).__name__}: {exc}"
                outcome = Outcome(Fate.FAILED, error, may_split=True)
            del self._busy_since[threading.get_ident()]
            with suppress(ConfigurationError):  # the dispatcher raises it again
                report([parcel], outcome)
            del work, parcel, report


def _count(help: str) -> Any:
    return field(default=0, metadata={"help": help})


@dataclass(slots=True)
class ForwardTotals:
    """Counts of messages by outcome. At most ``repeated`` messages may have arrived twice."""

    received: int = _count("Messages received.")
    filtered: int = _count("Messages that a filter left out, finished.")
    unjudged: int = _count("Deliveries to which a filter or --pick could not be applied, refused.")
    delivered: int = _count("Messages that the destination confirmed, finished.")
    dead_lettered: int = _count("Messages written to the dead letters, finished.")
    dropped: int = _count("Messages that the destination refused, dropped as asked, finished.")
    requeued: int = _count("Messages requeued after a failure, or under way at a stop.")
    repeated: int = _count("Messages sent again although the destination may have had them.")
    failures: int = _count("Tries to deliver that failed.")
    unreported: int = _count("Messages without a report of the sink in half of msg_timeout.")
    bytes: int = _count("Bytes of the bodies delivered.")


class Counters:
    """The counts of each topic. Thread-safe."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._topics: defaultdict[str, Counter[str]] = defaultdict(Counter)

    def add(self, topic: str, **counts: int) -> None:
        """Add to counts of a topic."""
        with self._lock:
            totals = self._topics[topic]
            for name, count in counts.items():  # `Counter.update` takes four times as long
                totals[name] += count

    @property
    def totals(self) -> ForwardTotals:
        """The sums over all topics."""
        with self._lock:
            return ForwardTotals(**sum(self._topics.values(), Counter()))

    def metrics(self, held: int, is_failing: bool) -> Iterator[Metric]:
        """Yield the metrics for Prometheus."""
        with self._lock:
            topics = {topic: counts.copy() for topic, counts in self._topics.items()}
        for total in fields(ForwardTotals):
            name = total.name if total.name in ("failures", "bytes") else f"{total.name}_messages"
            samples = [({"topic": topic}, counts[total.name]) for topic, counts in topics.items()]
            yield metric_of(f"nsq_forward_{name}_total", total.metadata["help"], samples)
        help = "Messages on their way or waiting to be sent."
        yield metric_of("nsq_forward_held_messages", help, [({}, held)])
        help = "1 while no destination works."
        yield metric_of("nsq_forward_failing", help, [({}, int(is_failing))])


def check_key(key: object | None, *, is_hash: bool) -> None:
    """Raise `ConfigurationError` for mode hash without a key, and for a key in another mode."""
    if is_hash and key is None:
        raise ConfigurationError("hash needs a key", hint="For example --key '{.user.id}'.")
    if key is not None and not is_hash:
        raise ConfigurationError("--key is for --mode hash")


def hash_slot(message: Message, key: Callable[..., bytes], count: int) -> int:
    """Return the index of the destination that mode hash chooses among ``count``."""
    return crc32(key(message.topic, message.nsqd, [message])) % count
