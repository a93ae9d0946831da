"""One publish and what became of it, and those that wait to be sent.

With a linger, single messages are gathered by topic and joined, until one comes that cannot be
joined; everything else waits in order.

A batch of which nsqd refuses a message goes on in parts, where that was asked for (`Parts`), until
the message is alone. It settles when all its parts have, with the outcome of each message.
"""

from __future__ import annotations

import collections
import itertools
import logging
import os
import sys
import threading
from collections.abc import Callable, Generator, Iterable, Iterator, Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from operator import attrgetter
from typing import Any, Literal, TypeVar

from nsqtools.client import outcomes
from nsqtools.client.io_loop import wait_until_released
from nsqtools.errors import DeadlineExceeded, PublishError
from nsqtools.protocol import commands
from nsqtools.protocol.text import counted

log = logging.getLogger("nsqtools")

T = TypeVar("T")

MAX_JOINED = 1000
FEW_FAILURES = 16

# Held for a moment when a publication settles. All share it: it is the lock that concurrent.futures
# takes of each, and on one I/O thread nothing contends for it.
_settling = threading.RLock()
RUNNING, FINISHED = "RUNNING", "FINISHED"  # of concurrent.futures

Mode = Literal["failover", "round-robin"]
"""How a `Producer` chooses among several nsqd."""


@dataclass(slots=True, eq=False)
class Failure:
    """Why a publication of ``count`` messages failed, and whether the error was read."""

    error: PublishError
    count: int
    is_seen: bool = False


class Failures:
    """The failures of a producer, until it is known whether the outcome was looked at."""

    def __init__(self) -> None:
        self._recent: list[Failure] = []
        self._older: list[Failure] = []
        self._forget_at = FEW_FAILURES

    def add(self, failure: Failure) -> None:
        """Note one, and forget those that were seen: where it was raised, an error keeps all that
        the frames of its traceback refer to."""
        self._recent.append(failure)
        if len(self._recent) >= self._forget_at:
            self._recent = [each for each in self._recent if not each.is_seen]
            self._forget_at = len(self._recent) + max(FEW_FAILURES, len(self._recent))

    def log(self, when: str, *, only_older: bool = False) -> None:
        """Log how many messages failed and were not looked at, and forget them.

        With ``only_older`` those that were added since the last call have time until the next.
        """
        failures = self._older if only_older else self._older + self._recent
        self._older, self._recent = (self._recent if only_older else []), []
        unseen = [failure for failure in failures if not failure.is_seen]
        if unseen:
            log.warning(
                "%s%s unconfirmed, and the outcome was not looked at: %s",
                when,
                counted(sum(failure.count for failure in unseen), "message"),
                unseen[0].error,
            )


class Publication(Future[None]):
    """A publish on its way: one message, or several as one MPUB. A future, done exactly once.

    `result` returns None when nsqd has confirmed it, and raises what `exception` returns: a
    `PublishRejected` (nsqd refused it), `PublishRefused` (nsqd does not accept this client),
    `PublishNotSent` (nsqd does not have it) or `PublishUnknown` (nsqd may have it). `errors` has
    the outcome of each message. A failure that is not looked at is logged.

    ``concurrent.futures.wait`` takes it, and so does ``await`` in asyncio. Callbacks are called on
    the I/O thread and must not block. It cannot be cancelled: what was submitted may be published.
    """

    _condition = threading.Condition(_settling)
    _state = RUNNING
    _result = None

    topic: str
    bodies: Sequence[bytes]
    size: int
    submitted_at: float
    defer_s: float | None
    is_settled = False
    _failure: Failure | None = None
    _waiters: list[Any]  # locks of `exception`, and what concurrent.futures adds
    _callbacks: list[Callable[[Any], object]]
    _is_called_back = False

    @property
    def error(self) -> PublishError | None:
        """Why it was not confirmed, or None: also while it is under way."""
        if self._failure is None:
            return None
        self._failure.is_seen = True
        return self._failure.error

    _exception = error  # where asyncio looks

    @property
    def errors(self) -> Sequence[PublishError | None]:
        """Why each message was not confirmed, or None, in the order of the bodies."""
        error = self.error
        if error is not None and len(error.outcomes) == len(self.bodies):
            return error.outcomes
        return [error] * len(self.bodies)

    def exception(self, timeout: float | None = None) -> PublishError | None:
        """Wait for the outcome; return why it was not confirmed, or None.

        Raises `DeadlineExceeded`, which is a ``TimeoutError``, when ``timeout`` seconds passed
        first: it is still under way then.
        """
        if not self._settles_within(timeout):
            raise DeadlineExceeded(f"a publish to {self.topic} is not settled yet")
        return self.error

    def _settles_within(self, timeout_s: float | None) -> bool:
        """Wait until it has settled, for ``timeout_s`` seconds at most; return whether it has."""
        return self.is_settled or wait_until_released(
            self._waiters, lambda: self.is_settled, timeout_s
        )

    def result(self, timeout: float | None = None) -> None:
        """Wait for the outcome. Raises `PublishError`, or `DeadlineExceeded` as `exception`."""
        if (error := self.exception(timeout)) is not None:
            raise error

    def wait(self, timeout_s: float | None = None) -> None:
        """The same as `result`."""
        self.result(timeout_s)

    def add_done_callback(self, fn: Callable[[Publication], object]) -> None:
        """Call ``fn`` with this when it has settled, on the I/O thread; at once if it has."""
        self._callbacks.append(fn)  # in this order: `call_back` looks at them last
        if self._is_called_back:
            self.call_back()

    def call_back(self) -> None:
        """Make the calls that wait, each once; from now on they are made at once."""
        self._is_called_back = True
        while self._callbacks:
            try:
                callback = self._callbacks.pop(0)
            except IndexError:  # two threads may meet here
                return
            try:
                callback(self)
            except BaseException:  # ``sys.exit`` in a callback must not end the I/O thread
                log.exception("a callback of a publication failed")

    def done(self) -> bool:
        """Tell whether it has settled."""
        return self.is_settled  # without the lock of `Future`

    def cancel(self) -> bool:
        """Return False: nsqd may have it."""
        return False

    def __await__(self) -> Generator[Any, None, None]:
        import asyncio

        return asyncio.wrap_future(self).__await__()

    def __repr__(self) -> str:
        failure = self._failure
        outcome = ("published" if failure is None else repr(failure.error)) * self.is_settled
        what = f"{len(self.bodies)} messages to {self.topic}"
        return f"<Publication of {what}, {outcome or 'not settled'}>"


class PendingPublication(Publication):
    """A publication as the I/O thread sees it, which alone changes what is here.

    ``Future.__init__`` is not called: a condition for each would cost as much as a publish.
    """

    failed_at = 0.0  # for the first time
    parts: Parts | None = None  # of which it is one
    is_submitted = False  # a signal handler may have interrupted that
    is_written = False  # handed to a connection
    may_be_stored = False  # by an earlier attempt
    is_alone = False  # must not be joined with others

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
        self._waiters = []
        self._callbacks = [] if on_settled is None else [on_settled]
        self.timeout_s = timeout_s
        self.splits = splits

    def encode(self) -> bytes:
        """Return the command for nsqd."""
        if self.defer_s is not None:
            defer_ms = round(self.defer_s * 1000)
            return commands.deferred_publish(self.topic, defer_ms, self.bodies[0])
        if len(self.bodies) == 1:
            return commands.publish(self.topic, self.bodies[0])
        return commands.multi_publish(self.topic, self.bodies)

    def settle(self, error: PublishError | None) -> Failure | None:
        """Set the outcome, once, and wake who waits; return the failure."""
        if error is not None:
            self._failure = Failure(error, len(self.bodies))
        with _settling:  # `concurrent.futures.wait` looks and adds a waiter inside
            self._state = FINISHED
            self.is_settled = True
        for waiter in list(self._waiters):  # some remove themselves when notified
            try:
                self._notify(waiter)
            except BaseException:  # or the publications that settle after this one never would
                log.exception("a thread that waits for a publication was not notified")
        return self._failure

    def _notify(self, waiter: Any) -> None:
        # By what it can do: gevent may have replaced the types of locks after this was imported.
        if hasattr(waiter, "release"):
            waiter.release()
        elif self._failure is None:
            waiter.add_result(self)
        else:
            waiter.add_exception(self)


def _start_afresh() -> None:
    """In a forked child: a thread of the parent may have held the lock."""
    global _settling
    _settling = threading.RLock()
    Publication._condition = threading.Condition(_settling)


os.register_at_fork(after_in_child=_start_afresh)


class Parts:
    """The parts in which a publication goes on after nsqd refused more. On the I/O thread."""

    def __init__(self, whole: PendingPublication) -> None:
        self.whole = whole
        self._parts = [whole]
        self._unsettled = 1  # of them

    def split(self, part: PendingPublication, size: int) -> list[PendingPublication]:
        """Return publications of ``size`` messages at most in place of a part."""
        smaller = []
        for at in range(0, len(part.bodies), size):
            bodies = part.bodies[at : at + size]
            each = PendingPublication(
                part.topic, bodies, sum(map(len, bodies)), part.submitted_at, splits=part.splits
            )
            each.parts, each.is_alone = self, True
            each.may_be_stored, each.failed_at = part.may_be_stored, part.failed_at
            smaller.append(each)
        at = self._parts.index(part)
        self._parts[at : at + 1] = smaller
        self._unsettled += len(smaller) - 1
        self.whole.may_be_stored = False  # each part knows it by itself
        return smaller

    def settled_one(self) -> bool:
        """Note that a part has settled; return whether it was the last."""
        self._unsettled -= 1
        return not self._unsettled

    def error(self) -> PublishError | None:
        """The error of the whole, with the outcome of each message."""
        failures = [part._failure for part in self._parts]
        return outcomes.combined_error(
            [len(part.bodies) for part in self._parts],
            [None if failure is None else failure.error for failure in failures],
        )


class PublishQueue:
    """The publications of a producer that no connection has taken yet.

    ``single`` go out one by one; ``gathered``, by topic, as the groups of `take_groups`.
    """

    def __init__(self, *, linger_s: float, max_body_size: int) -> None:
        self.single: collections.deque[PendingPublication] = collections.deque()
        self.gathered: dict[str, list[PendingPublication]] = {}
        self._linger_s = linger_s
        self._max_body_size = max_body_size

    def __bool__(self) -> bool:
        return bool(self.single or self.gathered)

    def __iter__(self) -> Iterator[PendingPublication]:
        return itertools.chain(self.single, *self.gathered.values())

    def add(self, publication: PendingPublication) -> None:
        """Queue a publication, unless it has settled: its time may be over."""
        if publication.is_settled:
            return
        is_single = len(publication.bodies) == 1 and publication.defer_s is None
        if self._linger_s > 0 and is_single and not publication.is_alone:
            self.gathered.setdefault(publication.topic, []).append(publication)
        else:
            self.single += self.gathered.pop(publication.topic, ())  # they came first
            self.single.append(publication)

    def take_all(self) -> list[PendingPublication]:
        """Return what waits, and forget it."""
        waiting = list(self)
        self.single.clear()
        self.gathered.clear()
        return waiting

    def take_single(self) -> PendingPublication | None:
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

    def take_groups(self, topic: str) -> Iterable[list[PendingPublication]]:
        """Take what was gathered for a topic, in groups that nsqd's limits allow as one MPUB."""
        waiting = (each for each in self.gathered.pop(topic) if not each.is_settled)
        return in_groups(waiting, attrgetter("size"), self._max_body_size, MAX_JOINED)


def in_groups(
    items: Iterable[T], size_of: Callable[[T], int], max_body_size: int, most: int = sys.maxsize
) -> Iterator[list[T]]:
    """Group what has messages of these sizes into MPUBs within a size, of ``most`` items each."""
    group: list[T] = []
    empty = size = commands.mpub_size(())
    for item in items:
        added = commands.SIZE_BYTES + size_of(item)
        if group and (size + added > max_body_size or len(group) == most):
            yield group
            group, size = [], empty
        group.append(item)
        size += added
    if group:
        yield group
