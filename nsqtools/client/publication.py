"""One publish and its outcome, and the queue of publications that wait to be sent.

With a linger, single messages are collected by topic and joined into one MPUB. Everything else is
sent in order.

With ``splits``, a batch with a message that nsqd refuses continues in parts (`Parts`) until that
message is alone. The batch settles when all parts have settled, with the outcome of each message.
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
from nsqtools.client.callbacks import call_guarded
from nsqtools.client.former_names import former_names
from nsqtools.client.io_loop import wait_until_released
from nsqtools.errors import DeadlineExceeded, PublishError
from nsqtools.protocol import commands
from nsqtools.protocol.text import counted

log = logging.getLogger("nsqtools")

T = TypeVar("T")

# Messages in a joined MPUB. Beyond a few hundred the cost of a command no longer matters
# (nsq-benchmarks(7)), and one failure affects fewer messages.
MAX_JOINED = 1000
# Failures kept before seen ones are dropped: few enough that their tracebacks hold little memory.
MIN_KEPT_FAILURES = 16

# Taken briefly whenever a publication settles. concurrent.futures expects a lock in each future;
# one for all is cheaper, and only the I/O thread settles, so nothing contends for it.
_settling = threading.RLock()
RUNNING, FINISHED = "RUNNING", "FINISHED"  # states that concurrent.futures defines

Mode = Literal["failover", "round-robin"]
"""How a `Producer` chooses among several nsqd."""


@dataclass(slots=True, eq=False)
class PublishFailure:
    """The error of a publication of ``count`` messages, and whether the program has read it."""

    error: PublishError
    count: int
    is_seen: bool = False


class Failures:
    """The failures of a producer that may have to be logged because the program ignores them."""

    def __init__(self) -> None:
        self._recent: list[PublishFailure] = []
        self._older: list[PublishFailure] = []
        self._prune_at = MIN_KEPT_FAILURES

    def add(self, failure: PublishFailure) -> None:
        """Add a failure, and now and then drop the seen ones.

        A raised error keeps everything alive that the frames of its traceback refer to.
        """
        self._recent.append(failure)
        if len(self._recent) >= self._prune_at:
            self._recent = [failure for failure in self._recent if not failure.is_seen]
            self._prune_at = len(self._recent) + max(MIN_KEPT_FAILURES, len(self._recent))

    def log_unseen(self, prefix: str, *, only_older: bool = False) -> None:
        """Log how many messages failed without the program having read why, and forget them.

        With ``only_older``, failures since the last call are kept until the next one.
        """
        failures = self._older if only_older else self._older + self._recent
        self._older, self._recent = (self._recent if only_older else []), []
        unseen = [failure for failure in failures if not failure.is_seen]
        if unseen:
            log.warning(
                "%s%s unconfirmed, and the outcome was never read: %s",
                prefix,
                counted(sum(failure.count for failure in unseen), "message"),
                unseen[0].error,
            )


@former_names("call_back", "set_exception", "set_result", "set_running_or_notify_cancel")
class Publication(Future[None]):
    """A publish of one message, or of several as one MPUB. A future that settles exactly once.

    `result` returns None when nsqd has confirmed it, and raises the error that `exception` returns:
    `PublishRejected` (nsqd refused it), `PublishRefused` (nsqd does not accept this client),
    `PublishNotSent` (nsqd does not have it) or `PublishUnknown` (nsqd may have it). `errors` has
    the outcome of each message. A failure that is never read is logged.

    It works with ``concurrent.futures.wait``, and with ``await`` in asyncio. Callbacks run on the
    I/O thread and must not block. It cannot be cancelled: a submitted message may be published.
    """

    _condition = threading.Condition(_settling)
    _state = RUNNING
    _result = None
    # For executors, which make the futures that they settle. nsqd's answer settles this one.
    _set_exception, _set_result = Future.set_exception, Future.set_result
    _set_running_or_notify_cancel = Future.set_running_or_notify_cancel

    topic: str
    bodies: Sequence[bytes]
    size: int
    submitted_at: float
    defer_s: float | None = None
    is_settled = False
    _failure: PublishFailure | None = None
    _waiters: list[Any]  # locks of `exception`, and waiters of concurrent.futures
    _callbacks: list[Callable[[Any], object]]
    _is_called_back = False

    @property
    def error(self) -> PublishError | None:
        """Why it was not confirmed; None if it was, and before it has settled."""
        if self._failure is None:
            return None
        self._failure.is_seen = True
        return self._failure.error

    _exception = error  # the attribute that asyncio reads

    @property
    def errors(self) -> Sequence[PublishError | None]:
        """Why each message was not confirmed, or None, in the order of the bodies."""
        error = self.error
        if error is not None and len(error.outcomes) == len(self.bodies):
            return error.outcomes
        return [error] * len(self.bodies)

    def exception(self, timeout: float | None = None) -> PublishError | None:
        """Wait for the outcome; return why it was not confirmed, or None.

        Raises `DeadlineExceeded`, which is a ``TimeoutError``, if it has not settled after
        ``timeout`` seconds. It may still settle later.
        """
        if not self._settles_within(timeout):
            raise DeadlineExceeded(f"a publish to {self.topic} is not settled yet")
        return self.error

    def _settles_within(self, timeout_s: float | None) -> bool:
        """Wait at most ``timeout_s`` seconds until it has settled; return whether it has."""
        return self.is_settled or wait_until_released(
            self._waiters, lambda: self.is_settled, timeout_s
        )

    def result(self, timeout: float | None = None) -> None:
        """Wait for the outcome. Raises `PublishError`, and `DeadlineExceeded` like `exception`."""
        if (error := self.exception(timeout)) is not None:
            raise error

    def wait(self, timeout_s: float | None = None) -> None:
        """Call `result`."""
        self.result(timeout_s)

    def add_done_callback(self, fn: Callable[[Publication], object]) -> None:
        """Call ``fn`` with this on the I/O thread when it settles; immediately if it has."""
        # Append first and check second: `_call_back` sets the flag first and reads the list second,
        # so one of the two threads sees the callback.
        self._callbacks.append(fn)
        if self._is_called_back:
            self._call_back()

    def _call_back(self) -> None:
        """Run the pending callbacks; those that are added later run immediately."""
        self._is_called_back = True
        while self._callbacks:
            try:
                callback = self._callbacks.pop(0)
            except IndexError:  # another thread runs callbacks, too
                return
            call_guarded("a callback of a publication", callback, self)

    def done(self) -> bool:
        """Return whether it has settled."""
        return self.is_settled  # without the lock of `Future`

    def cancel(self) -> bool:
        """Return False: nsqd may have the messages already."""
        return False

    def __await__(self) -> Generator[Any, None, None]:
        import asyncio

        return asyncio.wrap_future(self).__await__()

    def __repr__(self) -> str:
        if not self.is_settled:
            outcome = "not settled"
        else:
            outcome = "published" if self._failure is None else repr(self._failure.error)
        return f"<Publication of {len(self.bodies)} messages to {self.topic}, {outcome}>"


class PendingPublication(Publication):
    """The state of a publication that only the I/O thread changes.

    ``Future.__init__`` is not called: a condition for each would cost as much as the publish.
    """

    failed_at = 0.0  # time of the first failure, or 0
    parts: Parts | None = None  # the parts that it belongs to
    is_awaited = False  # by the thread that publishes it, and by no callback
    is_submitted = False  # false while a signal handler interrupts `submit`
    is_written = False  # handed to a connection
    may_be_stored = False  # by an earlier attempt
    timeout_s: float | None = None
    splits = False  # see `Parts`
    is_alone = False  # must not be joined with others
    window_bytes = 0  # its share of the window: none while a thread publishes it itself

    def __init__(
        self,
        topic: str,
        bodies: Sequence[bytes],
        size: int,
        submitted_at: float,
        defer_s: float | None = None,
        timeout_s: float | None = None,
        splits: bool = False,
    ) -> None:
        self.topic = topic
        self.bodies = bodies
        self.size = size
        self.submitted_at = submitted_at
        self._waiters = []
        self._callbacks = []
        # Only what differs from the class, because each publish makes one.
        if defer_s is not None:
            self.defer_s = defer_s
        if timeout_s is not None:
            self.timeout_s = timeout_s
        if splits:
            self.splits = True

    def __dir__(self) -> list[str]:  # the names of `Publication`, which a program gets this as
        public = {*dir(Publication), *Publication.__annotations__}
        return [name for name in super().__dir__() if name in public]

    def encode(self) -> bytes:
        """Return the command for nsqd."""
        if self.defer_s is not None:
            defer_ms = round(self.defer_s * 1000)
            return commands.deferred_publish(self.topic, defer_ms, self.bodies[0])
        if len(self.bodies) == 1:
            return commands.publish(self.topic, self.bodies[0])
        return commands.multi_publish(self.topic, self.bodies)

    def confirm(self) -> None:
        """Settle it as published, when no other thread waits for it except in a flush."""
        self.is_settled = True
        if self._waiters:  # read second: `wait_until_released` appends first
            self.settle(None)

    def settle(self, error: PublishError | None) -> PublishFailure | None:
        """Set the outcome, once, and wake waiting threads; return the failure, if any."""
        if error is not None:
            self._failure = PublishFailure(error, len(self.bodies))
        # `concurrent.futures.wait` checks the state and adds its waiter under the same lock.
        with _settling:
            self._state = FINISHED
            self.is_settled = True
        for waiter in list(self._waiters):  # some remove themselves when notified
            try:
                self._notify(waiter)
            except BaseException:  # an error here must not keep later publications from settling
                log.exception("a thread that waits for a publication was not notified")
        return self._failure

    def _notify(self, waiter: Any) -> None:
        # By method, not by type: gevent may have replaced the lock types after this was imported.
        if hasattr(waiter, "release"):
            waiter.release()
        elif self._failure is None:
            waiter.add_result(self)
        else:
            waiter.add_exception(self)


def _replace_lock() -> None:
    """Replace the lock in a forked child: a thread of the parent may have held it."""
    global _settling
    _settling = threading.RLock()
    Publication._condition = threading.Condition(_settling)


os.register_at_fork(after_in_child=_replace_lock)


class Parts:
    """The parts of a publication that nsqd refused as a whole. Used on the I/O thread only."""

    def __init__(self, publication: PendingPublication) -> None:
        self.publication = publication
        self._parts = [publication]
        self._unsettled = 1

    def split(self, part: PendingPublication, size: int) -> list[PendingPublication]:
        """Replace a part by publications of at most ``size`` messages, and return them."""
        replacements = []
        for start in range(0, len(part.bodies), size):
            bodies = part.bodies[start : start + size]
            replacement = PendingPublication(
                part.topic, bodies, sum(map(len, bodies)), part.submitted_at, splits=part.splits
            )
            replacement.parts, replacement.is_alone = self, True
            replacement.may_be_stored, replacement.failed_at = part.may_be_stored, part.failed_at
            replacements.append(replacement)
        index = self._parts.index(part)
        self._parts[index : index + 1] = replacements
        self._unsettled += len(replacements) - 1
        self.publication.may_be_stored = False  # now a property of each part
        return replacements

    def settle_one(self) -> bool:
        """Count a settled part; return whether it was the last."""
        self._unsettled -= 1
        return not self._unsettled

    def error(self) -> PublishError | None:
        """Return the error of the publication, with the outcome of each message."""
        failures = [part._failure for part in self._parts]
        return outcomes.combined_error(
            [len(part.bodies) for part in self._parts],
            [None if failure is None else failure.error for failure in failures],
        )


class PublishQueue:
    """The publications of a producer that wait for a connection.

    Those in ``single`` are sent one by one; those in ``joinable``, by topic, in the groups of
    `take_groups`.
    """

    def __init__(self, *, linger_s: float, max_body_size: int) -> None:
        self.single: collections.deque[PendingPublication] = collections.deque()
        self.joinable: dict[str, list[PendingPublication]] = {}
        self._linger_s = linger_s
        self._max_body_size = max_body_size

    def __bool__(self) -> bool:
        return bool(self.single or self.joinable)

    def __iter__(self) -> Iterator[PendingPublication]:
        return itertools.chain(self.single, *self.joinable.values())

    def add(self, publication: PendingPublication) -> None:
        """Queue a publication, unless it has settled because its timeout passed."""
        if publication.is_settled:
            return
        is_single = len(publication.bodies) == 1 and publication.defer_s is None
        if self._linger_s > 0 and is_single and not publication.is_alone:
            self.joinable.setdefault(publication.topic, []).append(publication)
        else:
            self.single += self.joinable.pop(
                publication.topic, ()
            )  # to keep the order of the topic
            self.single.append(publication)

    def add_again(self, publications: Iterable[PendingPublication]) -> None:
        """Queue publications that were sent before, in the order of their submission."""
        single_topics = {publication.topic for publication in self.single}
        for publication in publications:
            # A joined one would be sent after all single ones of its topic.
            publication.is_alone |= publication.topic in single_topics
            self.add(publication)
        by_time = attrgetter("submitted_at")
        self.single = collections.deque(sorted(self.single, key=by_time))
        for joined in self.joinable.values():
            joined.sort(key=by_time)

    def take_all(self) -> list[PendingPublication]:
        """Remove and return all publications."""
        publications = list(self)
        self.single.clear()
        self.joinable.clear()
        return publications

    def take_single(self) -> PendingPublication | None:
        """Remove and return the next single publication; settled ones are dropped."""
        while self.single:
            publication = self.single.popleft()
            if not publication.is_settled:
                return publication
        return None

    def remaining_linger_s(self, topic: str, now: float) -> float:
        """Return how many seconds the messages of a topic may wait for further ones."""
        publications = self.joinable[topic]
        if len(publications) >= MAX_JOINED:
            return 0.0
        return max(0.0, publications[0].submitted_at + self._linger_s - now)

    def take_groups(self, topic: str) -> Iterable[list[PendingPublication]]:
        """Remove the messages of a topic, in groups that nsqd's limits allow as one MPUB."""
        unsettled = (item for item in self.joinable.pop(topic) if not item.is_settled)
        return in_groups(unsettled, attrgetter("size"), self._max_body_size, MAX_JOINED)


def in_groups(
    items: Iterable[T], size_of: Callable[[T], int], max_body_size: int, limit: int = sys.maxsize
) -> Iterator[list[T]]:
    """Group messages into MPUBs of at most ``max_body_size`` bytes and ``limit`` messages."""
    group: list[T] = []
    empty_size = size = commands.mpub_size(())
    for item in items:
        item_size = commands.SIZE_BYTES + size_of(item)
        if group and (size + item_size > max_body_size or len(group) == limit):
            yield group
            group, size = [], empty_size
        group.append(item)
        size += item_size
    if group:
        yield group
