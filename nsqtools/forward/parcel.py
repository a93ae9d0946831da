"""What goes to a sink, and what comes back: a parcel of messages, its outcome, and the counts.

A sink is given a parcel and reports once what became of it, on any thread. The outcome says only
what the destination did; what happens to the messages (FIN, REQ, dead letter, another try) the
forwarder decides, so that it is the same for every sink. Counts are by the topic that messages came
from.
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
from typing import Any, NamedTuple, Protocol, TypeVar, runtime_checkable
from zlib import crc32

from nsqtools.client.attempts import Key, keys_of
from nsqtools.client.connecting import RetryDelays
from nsqtools.client.message import Batch, Message
from nsqtools.errors import ConfigurationError
from nsqtools.records.envelope import Envelope, MessageLike
from nsqtools.records.prometheus import Metric, metric_of

log = logging.getLogger("nsqtools")

T = TypeVar("T", bound=Hashable)


class Fate(enum.Enum):
    """What the destination did with a parcel."""

    DELIVERED = "delivered"
    """It has confirmed that it has the messages."""
    UNKNOWN = "unknown"
    """It may have some of them, and another try may double these: the connection broke before the
    answer, or (with ``may_split``) it stored some and tells not which."""
    UNREACHABLE = "unreachable"
    """No destination works. This is not the messages' fault: they wait until one does."""
    BUSY = "busy"
    """It asks to be left alone for a while. Nothing counts against the messages, which go back to
    their queue."""
    FAILED = "failed"
    """It could not take these messages now, and may later."""
    REFUSED = "refused"
    """It will never take these messages."""
    DROPPED = "dropped"
    """It refused them, and the user said that this is fine."""


class Outcome(NamedTuple):
    """``error`` says why; ``retry_after_s`` is when the destination wants to see it again;
    ``may_split`` that a part of the messages may be to blame for the others; ``repeated`` how often
    they were sent again although the destination may have had them."""

    fate: Fate
    error: str = ""
    retry_after_s: float | None = None
    may_split: bool = False
    repeated: int = 0


DELIVERED = Outcome(Fate.DELIVERED)


@dataclass(slots=True, eq=False, weakref_slot=True)
class Parcel:
    """Messages of one topic and nsqd, and what is sent for each of them.

    ``topic`` is where they go, ``size`` the bytes of all bodies. ``began_at`` is the time of the
    first try, by the monotonic clock.
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

    def keys(self) -> Iterator[Key]:
        """Yield what identifies each message."""
        return keys_of(self.messages)

    def part(self, start: int, stop: int) -> Parcel:
        """Return some of the messages as a parcel of their own."""
        messages = Batch(self.messages.source, self.messages[start:stop])
        return Parcel(messages, self.bodies[start:stop], self.topic, self.began_at)

    def chosen(self, places: Sequence[int]) -> Parcel:
        """Return the messages at some places as a parcel of their own."""
        messages = Batch(self.messages.source, [self.messages[place] for place in places])
        bodies = [self.bodies[place] for place in places]
        return Parcel(messages, bodies, self.topic, self.began_at)

    def grouped(self, by: Callable[[Message, bytes], T]) -> dict[T, Parcel]:
        """Return the messages in parcels, by what ``by`` says of each and of its body."""
        places: dict[T, list[int]] = {}
        for at, (message, body) in enumerate(zip(self.messages, self.bodies, strict=True)):
            places.setdefault(by(message, body), []).append(at)
        return {each: self.chosen(chosen) for each, chosen in places.items()}

    def sized(self, most: int, most_bytes: int, extra: int = 0) -> list[Parcel]:
        """Return parts of at most ``most`` messages and ``most_bytes``; a larger body is alone.

        Each message counts ``extra`` bytes beside its body.
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
        """Return what is still ours to deliver: nsqd may have taken messages back meanwhile."""
        places = [at for at, message in enumerate(self.messages) if not message.is_answered]
        if len(places) == len(self.bodies):
            return self
        return self.chosen(places) if places else None


def as_sent(message: Message, body: bytes) -> MessageLike:
    """Return a message with the body that is sent for it."""
    if body is message.body:
        return message
    what = message.id, message.timestamp_ns, message.attempts, body
    return Envelope(message.topic, message.nsqd, *what)


Report = Callable[[Sequence[Parcel], Outcome], None]


class Circuit:
    """Whether a destination works, as far as is known.

    After ``failures_to_open`` failures in a row it is left alone until ``retry_at``, for a time
    that doubles from ``base_s`` to ``max_s``. Times are readings of the monotonic clock.
    """

    def __init__(self, base_s: float, max_s: float, failures_to_open: int = 1) -> None:
        self.retry_at = 0.0
        self._failures = 0
        self._failures_to_open = failures_to_open
        self._delays = RetryDelays(base_s, max_s)

    def is_open(self, now: float) -> bool:
        """Return whether it is left alone."""
        return now < self.retry_at

    @property
    def is_failing(self) -> bool:
        """Whether nothing has worked since the last failure."""
        return self._failures > 0

    def worked(self) -> None:
        """Note that something has arrived."""
        self._failures = 0
        self.retry_at = 0.0
        self._delays.reset()

    def failed(self, now: float, *, is_hopeless: bool = False) -> None:
        """Note a failure; ``is_hopeless`` when there was not even a connection."""
        self._failures += 1
        if (is_hopeless or self._failures >= self._failures_to_open) and now >= self.retry_at:
            self.retry_at = now + self._delays.next_delay_s()


class Sink(Protocol):
    """Where messages go. Its methods are called on one thread, which must not wait long: it touches
    the messages."""

    def parts(self, parcel: Parcel) -> list[Parcel]:
        """Return a parcel as the parts that are delivered together; each message is in one."""

    def submit(self, parcel: Parcel, report: Report) -> None:
        """Deliver such a part; return at once. ``report`` is called once, on any thread,
        maybe for several together. A part that is dropped without a report has failed."""

    def check(self) -> None:
        """Raise ``RuntimeError`` when it cannot work any more: a defect, not an outage."""

    def stop(self, timeout_s: float) -> None:
        """Wait for what is under way, for a time, and close the connections."""


@runtime_checkable
class BatchingSink(Sink, Protocol):
    """A sink in which messages wait for others, to be delivered together."""

    def flush(self) -> None:
        """Deliver what waits, and from here on what comes at once. May be called again."""


@runtime_checkable
class WorkerSink(Sink, Protocol):
    """A sink that delivers a limited number of parts at a time."""

    def is_stuck(self, now: float, after_s: float) -> bool:
        """Tell whether each worker has been at one part for longer than ``after_s``."""


class ThreadedSink(ABC):
    """A sink that delivers on threads of its own: a subclass has `deliver`.

    What `deliver` raises is `Fate.FAILED`: the messages are requeued, and after max_attempts they
    are dead letters. Halves of a parcel are tried first, until the message to blame is alone.
    """

    def __init__(self, threads: int = 1) -> None:
        self._parts = SimpleQueue[tuple[Parcel, Report] | None]()
        self._count = threads
        self._threads: list[threading.Thread] = []
        self._busy_since: dict[int, float] = {}  # by thread

    @abstractmethod
    def deliver(self, parcel: Parcel) -> Outcome:
        """Deliver a part, and return what became of it. It may take as long as it needs."""

    def parts(self, parcel: Parcel) -> list[Parcel]:
        """Return a parcel as the parts that are delivered together: as it is."""
        return [parcel]

    def submit(self, parcel: Parcel, report: Report) -> None:
        """Have a thread deliver a part."""
        while len(self._threads) < self._count:
            # a daemon: one that hangs keeps no program from its end
            thread = threading.Thread(target=self._run, name="nsq-sink", daemon=True)
            self._threads.append(thread)
            thread.start()
        self._parts.put((parcel, report))

    def check(self) -> None:  # noqa: B027
        """Raise what must end the program: nothing, unless overridden."""

    def stop(self, timeout_s: float) -> None:
        """Wait for what is under way, for a time."""
        until = time.monotonic() + timeout_s
        for _ in self._threads:
            self._parts.put(None)
        for thread in self._threads:
            thread.join(max(0.0, until - time.monotonic()))

    def is_stuck(self, now: float, after_s: float) -> bool:
        """Tell whether each thread has been at one part for longer than ``after_s``."""
        times = list(self._busy_since.values())
        return len(times) == self._count and max(times) < now - after_s

    def _run(self) -> None:
        while (work := self._parts.get()) is not None:
            parcel, report = work
            self._busy_since[threading.get_ident()] = time.monotonic()
            try:
                outcome = self.deliver(parcel)
            except BaseException as exc:  # SystemExit would end this thread and leave the rest
                log.info("%s.deliver failed", type(self).__name__, exc_info=True)
                error = f"{type(exc).__name__}: {exc}"
                outcome = Outcome(Fate.FAILED, error, may_split=True)
            del self._busy_since[threading.get_ident()]
            with suppress(ConfigurationError):  # which ends the run
                report([parcel], outcome)
            del work, parcel, report


def _count(help: str) -> Any:
    return field(default=0, metadata={"help": help})


@dataclass(slots=True)
class ForwardTotals:
    """Messages by what became of them. As many as were ``repeated`` may be there twice."""

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
        """Add to some counts of a topic."""
        with self._lock:
            known = self._topics[topic]
            for name, count in counts.items():  # `Counter.update` takes four times as long
                known[name] += count

    @property
    def totals(self) -> ForwardTotals:
        """All topics together."""
        with self._lock:
            return ForwardTotals(**sum(self._topics.values(), Counter()))

    def metrics(self, held: int, is_failing: bool) -> Iterator[Metric]:
        """The metrics, for /metrics and for a file."""
        with self._lock:
            topics = {topic: counts.copy() for topic, counts in self._topics.items()}
        for each in fields(ForwardTotals):
            what = each.name if each.name in ("failures", "bytes") else f"{each.name}_messages"
            samples = [({"topic": topic}, counts[each.name]) for topic, counts in topics.items()]
            yield metric_of(f"nsq_forward_{what}_total", each.metadata["help"], samples)
        help = "Messages on their way or waiting to be sent."
        yield metric_of("nsq_forward_held_messages", help, [({}, held)])
        help = "1 while no destination works."
        yield metric_of("nsq_forward_failing", help, [({}, int(is_failing))])


def check_key(key: object | None, *, is_hash: bool) -> None:
    """Raise `ConfigurationError` for the mode hash without a key, or a key without that mode."""
    if is_hash and key is None:
        raise ConfigurationError("hash needs a key", hint="For example --key '{.user.id}'.")
    if key is not None and not is_hash:
        raise ConfigurationError("--key is for --mode hash")


def hash_slot(message: Message, key: Callable[..., bytes], count: int) -> int:
    """Return which of ``count`` destinations the mode hash chooses: the same for the same key."""
    return crc32(key(message.topic, message.nsqd, [message])) % count
