"""One publish and what became of it, and those that wait to be sent.

With a linger, single messages are gathered by topic and joined; everything else waits in order.

A batch of which nsqd refuses a message goes on in parts, where that was asked for (`Parts`), until
the message is alone. It settles when all its parts have, with the outcome of each message.
"""

from __future__ import annotations

import collections
import enum
import itertools
import threading
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Literal

from nsqtools.client import outcomes
from nsqtools.errors import DeadlineExceeded, PublishError
from nsqtools.protocol import commands

MAX_JOINED = 1000

Mode = Literal["failover", "round-robin"]
"""How a `Producer` chooses among several nsqd."""


class PublishMode(enum.Enum):
    """How a job's batches are spread over several nsqd.

    ``all``: every nsqd gets each, and a record is confirmed when all have confirmed it, as to_nsq
    does it. ``round-robin``: one of them, in turn. ``failover``: the first, and the next one only
    while it fails.
    """

    ALL = "all"
    ROUND_ROBIN = "round-robin"
    FAILOVER = "failover"


@dataclass(slots=True, eq=False)
class Failure:
    """Why a publication of ``count`` messages failed, and whether the error was read."""

    error: PublishError
    count: int
    is_seen: bool = False


class Publication:
    """A publish on its way: one message, or several as one MPUB. It settles exactly once.

    When ``is_settled``, ``error`` is None if nsqd has confirmed it, else a `PublishRejected` (nsqd
    refused it), `PublishRefused` (nsqd does not accept this client), `PublishNotSent` (nsqd does
    not have it) or `PublishUnknown` (nsqd may have it). A failure that is not looked at, here or
    with `wait`, is logged. `errors` has the outcome of each message.
    """

    __slots__ = (
        "_waiters",
        "bodies",
        "defer_s",
        "failed_at",
        "failure",
        "is_alone",
        "is_settled",
        "is_written",
        "may_be_stored",
        "on_settled",
        "parts",
        "size",
        "splits",
        "submitted_at",
        "timeout_s",
        "topic",
    )

    def __init__(
        self,
        topic: str,
        bodies: Sequence[bytes],
        size: int,
        submitted_at: float,
        defer_s: float | None = None,
        timeout_s: float | None = None,
        on_settled: Callable[[Publication], None] | None = None,
        splits: bool = False,
    ) -> None:
        self.topic = topic
        self.bodies = bodies
        self.size = size
        self.submitted_at = submitted_at
        self.defer_s = defer_s
        self.timeout_s = timeout_s
        self.on_settled = on_settled
        self.failure: Failure | None = None
        self.failed_at = 0.0  # for the first time; the I/O thread's
        self.splits = splits
        self.parts: Parts | None = None  # of which it is one; the I/O thread's
        self.is_settled = False
        self.is_written = False  # handed to a connection; the I/O thread's
        self.may_be_stored = False  # by an earlier attempt; the I/O thread's
        self.is_alone = False  # must not be joined with others; the I/O thread's
        self._waiters: list[threading.Lock] = []  # each held until the outcome is known

    def encode(self) -> bytes:
        """Return the command for nsqd."""
        if self.defer_s is not None:
            defer_ms = round(self.defer_s * 1000)
            return commands.DeferredPublish(self.topic, defer_ms, self.bodies[0]).encode()
        if len(self.bodies) == 1:
            return commands.Publish(self.topic, self.bodies[0]).encode()
        return commands.MultiPublish(self.topic, self.bodies).encode()

    @property
    def error(self) -> PublishError | None:
        """Why it was not confirmed, or None."""
        if self.failure is None:
            return None
        self.failure.is_seen = True
        return self.failure.error

    @property
    def errors(self) -> Sequence[PublishError | None]:
        """Why each message was not confirmed, or None, in the order of the bodies."""
        error = self.error
        if error is not None and len(error.outcomes) == len(self.bodies):
            return error.outcomes
        return [error] * len(self.bodies)

    def settle(self, error: PublishError | None) -> None:
        """Set the outcome, once (on the I/O thread)."""
        if error is not None:
            self.failure = Failure(error, len(self.bodies))
        self.is_settled = True  # in this order: `wait` adds its lock before it looks
        for waiter in self._waiters:
            waiter.release()

    def wait(self, timeout_s: float | None = None) -> None:
        """Wait for the outcome. Raises `PublishError`, or `DeadlineExceeded` when the time passed
        first (the publication then is still under way)."""
        if not self.is_settled:
            waiter = threading.Lock()
            waiter.acquire()
            self._waiters.append(waiter)
            limit_s = -1 if timeout_s is None else timeout_s
            if not self.is_settled and not waiter.acquire(timeout=limit_s):
                raise DeadlineExceeded(f"a publish to {self.topic} is not settled yet")
        if (error := self.error) is not None:
            raise error

    def __repr__(self) -> str:
        failure = self.failure
        outcome = ("published" if failure is None else repr(failure.error)) * self.is_settled
        return (
            f"<Publication of {len(self.bodies)} messages to {self.topic},"
            f" {outcome or 'not settled'}>"
        )


class Parts:
    """The parts in which a publication goes on after nsqd refused more. On the I/O thread."""

    __slots__ = ("_parts", "whole")

    def __init__(self, whole: Publication) -> None:
        self.whole = whole
        self._parts = [whole]

    def split(self, part: Publication, size: int) -> list[Publication]:
        """Return publications of ``size`` messages at most in place of a part."""
        smaller = []
        for at in range(0, len(part.bodies), size):
            bodies = part.bodies[at : at + size]
            each = Publication(
                part.topic, bodies, sum(map(len, bodies)), part.submitted_at, splits=part.splits
            )
            each.parts, each.is_alone = self, True
            each.may_be_stored, each.failed_at = part.may_be_stored, part.failed_at
            smaller.append(each)
        at = self._parts.index(part)
        self._parts[at : at + 1] = smaller
        self.whole.may_be_stored = False  # each part knows it by itself
        return smaller

    @property
    def are_settled(self) -> bool:
        return all(part.is_settled for part in self._parts)

    def error(self) -> PublishError | None:
        """The error of the whole, with the outcome of each message."""
        failures = [part.failure for part in self._parts]
        return outcomes.of_parts(
            [len(part.bodies) for part in self._parts],
            [None if failure is None else failure.error for failure in failures],
        )


class PublishQueue:
    """The publications of a producer that no connection has taken yet.

    ``single`` go out one by one; ``gathered``, by topic, as the groups of `take_groups`.
    """

    def __init__(self, *, linger_s: float, max_body_size: int) -> None:
        self.single: collections.deque[Publication] = collections.deque()
        self.gathered: dict[str, list[Publication]] = {}
        self._linger_s = linger_s
        self._max_size = max_body_size - commands.mpub_size(())

    def __bool__(self) -> bool:
        return bool(self.single or self.gathered)

    def __iter__(self) -> Iterator[Publication]:
        return itertools.chain(self.single, *self.gathered.values())

    def add(self, publication: Publication) -> None:
        """Queue a publication, unless it has settled: its time may be over."""
        if publication.is_settled:
            return
        if (
            self._linger_s > 0
            and len(publication.bodies) == 1
            and publication.defer_s is None
            and not publication.is_alone
        ):
            self.gathered.setdefault(publication.topic, []).append(publication)
        else:
            self.single.append(publication)

    def take_all(self) -> list[Publication]:
        """Return what waits, and forget it."""
        waiting = list(self)
        self.single.clear()
        self.gathered.clear()
        return waiting

    def take_single(self) -> Publication | None:
        """Return the next that goes out alone, without those that have settled."""
        while self.single:
            publication = self.single.popleft()
            if not publication.is_settled:
                return publication
        return None

    def lingers_for_s(self, topic: str, now: float) -> float:
        """Return for how many seconds what was gathered for a topic may wait for more."""
        gathered = self.gathered[topic]
        if len(gathered) >= MAX_JOINED:
            return 0.0
        return max(0.0, gathered[0].submitted_at + self._linger_s - now)

    def take_groups(self, topic: str) -> Iterable[list[Publication]]:
        """Take what was gathered for a topic, in groups that nsqd's limits allow as one MPUB."""
        group: list[Publication] = []
        size = 0
        for publication in self.gathered.pop(topic):
            if publication.is_settled:
                continue
            added = commands.SIZE_BYTES + publication.size
            if group and (size + added > self._max_size or len(group) == MAX_JOINED):
                yield group
                group, size = [], 0
            group.append(publication)
            size += added
        if group:
            yield group
