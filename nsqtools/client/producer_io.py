"""What a producer does with its publications, on the I/O thread.

A publication waits here until some nsqd can take it, goes out on a `ProducerLink`, and comes back
as confirmed, rejected, not sent or unknown. Then it is settled, or waits again where that cannot
double it: for the next nsqd, or for the same one within the retry timeout.

With a linger, single messages of a topic are joined into one MPUB while an earlier command is
outstanding (as Nagle's algorithm does it: a lone message does not wait). nsqd takes an MPUB whole
or not at all; one that it rejects is sent again message by message, so that a bad one fails alone.

Trap: a failure may be reported from anywhere in a turn, so sending happens in one place,
`_each_turn`, and whatever changes wakes the loop.
"""

from __future__ import annotations

import collections
import functools
import logging
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import TYPE_CHECKING

from nsqtools.client.connection import LIVENESS_TICK_S
from nsqtools.client.io_loop import IOLoop, Timer
from nsqtools.client.options import ClientOptions
from nsqtools.client.producer_link import ProducerLink
from nsqtools.client.publication import Publication
from nsqtools.client.publish_queue import PublishQueue
from nsqtools.client.spread import PublishMode
from nsqtools.errors import (
    DeadlineExceeded,
    NsqError,
    PublishError,
    PublishNotSent,
    PublishRefused,
    PublishRejected,
    PublishUnknown,
    RefusedError,
    ServerError,
)
from nsqtools.protocol import commands
from nsqtools.protocol.addresses import Address
from nsqtools.transport.stream import READ_SIZE

if TYPE_CHECKING:
    import ssl

log = logging.getLogger("nsqtools")

PATIENCE_S = 1.0  # for an nsqd that does not answer to connecting, before the next one is tried
# nsqd refuses every publish while it stops or while the topic is being deleted.
EXITING = "exiting"


@dataclass(frozen=True, slots=True)
class PublishPolicy:
    """Where publications go, and how often they are tried. See `Producer`."""

    mode: PublishMode = PublishMode.FAILOVER
    retry_timeout_s: float = 0.0
    retry_unknown: bool = False
    linger_s: float = 0.0


class ProducerIO:
    """Owns the loop, the links and the unsettled publications of one producer.

    ``report`` is called on the I/O thread with publications that have settled.
    """

    def __init__(
        self,
        addresses: Iterable[Address],
        options: ClientOptions,
        tls: ssl.SSLContext | None,
        policy: PublishPolicy,
        report: Callable[[list[Publication]], None],
    ) -> None:
        self._options = options
        self._policy = policy
        self._report = report
        addresses = list(addresses)
        self.loop = IOLoop(f"nsq-producer-{addresses[0]}", self._each_turn, self._at_end)
        buffer = memoryview(bytearray(READ_SIZE // 16))
        self.links = [ProducerLink(a, options, tls, self.loop, buffer, self) for a in addresses]
        self._resends = policy.retry_timeout_s > 0 or policy.linger_s > 0 or len(self.links) > 1
        self._inbox: collections.deque[Publication] = collections.deque()
        self._queue = PublishQueue(
            linger_s=policy.linger_s, max_body_size=options.publish_max_body_size
        )
        self._settled: list[Publication] = []
        self._turn = 0
        self._is_urgent = False  # send what is gathered now
        self._is_stopping = False
        self._has_ended = False
        self._timer: Timer | None = None

    def start(self) -> None:
        """Start the thread (from any thread)."""
        self.loop.call_soon(self._watch)
        self.loop.start()

    def submit(self, publication: Publication) -> None:
        """Publish, from any thread."""
        self._inbox.append(publication)
        self.loop.call_soon(self._take)

    def flush(self) -> None:
        """Send what is gathered without waiting for more."""
        self._is_urgent = True

    def close_copies(self) -> None:
        """In a forked child: close the descriptors that belong to the parent's thread."""
        for link in self.links:
            if link.connection is not None:
                link.connection.close_copy()
        self.loop.close_copies()

    def _take(self) -> None:
        inbox = self._inbox
        while inbox:
            publication = inbox.popleft()
            if publication.timeout_s is not None:
                left_s = publication.submitted_at + publication.timeout_s - self.loop.now()
                self.loop.call_later(left_s, functools.partial(self._expire, publication))
            self._queue.add(publication)
        if self._has_ended:
            self._end()

    def _expire(self, publication: Publication) -> None:
        if publication.is_settled:
            return
        late = DeadlineExceeded(f"{self.name}: no answer within {publication.timeout_s:.3g} s")
        if publication.is_written:
            self._settle(publication, _unknown(late))
        else:
            self._settle(publication, self._not_sent(self._last_error() or late))

    @property
    def name(self) -> str:
        """The addresses, for messages."""
        return ", ".join(str(link.address) for link in self.links)

    # -- sending --------------------------------------------------------------------------------

    def _each_turn(self) -> None:
        if self._queue:
            self._dispatch()
        self._report_settled()
        if self._is_stopping and not self._has_unsettled():
            self.loop.stop()

    def _has_unsettled(self) -> bool:
        return bool(self._queue or self._inbox or any(link.outstanding for link in self.links))

    def _dispatch(self) -> None:
        queue, in_turn = self._queue, self._policy.mode is PublishMode.ROUND_ROBIN
        link = self._choose_link()
        while link is not None and (publication := queue.take_single()) is not None:
            link.send(publication.encode(), [publication])
            if in_turn:
                self._turn += 1
                link = self._choose_link()
        for topic in list(queue.gathered):
            if link is not None and self._send_gathered(topic, link) and in_turn:
                self._turn += 1
                link = self._choose_link()
        if not queue.gathered:
            self._is_urgent = False
        if queue and not any(link.connection or link.is_connecting for link in self.links):
            self._find_no_link()

    def _choose_link(self) -> ProducerLink | None:
        """Return a connected link, or None; what may connect begins to, for later."""
        now, links = self.loop.now(), self.links
        if self._policy.mode is PublishMode.ROUND_ROBIN:
            for link in links:
                link.connect_if_due(now)
            first = self._turn % len(links)
            in_order = links[first:] + links[:first]
            return next((link for link in in_order if link.connection is not None), None)
        if links[0].connection is not None:  # before any loop: the usual case, once a turn
            return links[0]
        is_any_connected = any(link.connection is not None for link in links)
        for link in links:
            if link.connection is not None:
                return link
            link.connect_if_due(now)
            is_fresh = link.is_connecting and now - link.tried_at < PATIENCE_S
            if is_fresh and not is_any_connected:
                return None
        return None

    def _send_gathered(self, topic: str, link: ProducerLink) -> bool:
        """Send what was gathered for a topic, unless it can wait for more."""
        if link.outstanding and not self._is_urgent and not self._is_stopping:
            left_s = self._queue.lingers_for_s(topic, self.loop.now())
            if left_s > 0:
                self._come_back_in(left_s)
                return False
        for group in self._queue.take_groups(topic):
            if len(group) == 1:
                link.send(group[0].encode(), group)
            else:
                bodies = [publication.bodies[0] for publication in group]
                link.send(commands.MultiPublish(topic, bodies).encode(), group)
        return True

    def _find_no_link(self) -> None:
        """No nsqd can be tried now: fail what must not be retried, and come back for the rest."""
        now = self.loop.now()
        cause = self._last_error()
        for publication in self._queue.take_all():
            if self._may_retry(publication, now) and not isinstance(cause, RefusedError):
                self._queue.add(publication)
            else:
                self._settle(publication, self._not_sent(cause))
        self._come_back_in(min(link.not_before for link in self.links) - now)

    def _come_back_in(self, delay_s: float) -> None:
        now = self.loop.now()
        if self._timer is None or not now < self._timer.at <= now + delay_s:
            self._timer = self.loop.call_later(max(0.0, delay_s), self.loop.wake)

    def _may_retry(self, publication: Publication, now: float) -> bool:
        return now < publication.submitted_at + self._policy.retry_timeout_s

    def _last_error(self) -> NsqError | None:
        """Why nothing can be sent; a refusal only when every nsqd refuses."""
        errors = [link.last_error for link in self.links if link.last_error is not None]
        errors.sort(key=lambda error: isinstance(error, RefusedError))
        return errors[0] if errors else None

    # -- what links report ----------------------------------------------------------------------

    def link_changed(self) -> None:
        self.loop.wake()  # the turn may be past the point where it sends and reports

    def confirmed(self, publications: list[Publication]) -> None:
        for publication in publications:
            self._settle(publication, None)

    def rejected(
        self, link: ProducerLink, publications: list[Publication], error: ServerError
    ) -> None:
        if len(publications) > 1:
            for publication in publications:
                publication.is_alone = True
            self._send_again(publications)
            return
        for publication in publications:
            if EXITING in error.text and self._may_retry(publication, self.loop.now()):
                link.delay_next(error)
                self._send_again([publication])
            else:
                self._settle(
                    publication,
                    PublishRejected(f"not published: {error}", cause=error, hint=error.hint),
                )

    def not_sent(self, publications: list[Publication], error: NsqError) -> None:
        if self._resends and not self._has_ended:
            self._send_again(publications)
        else:
            for publication in publications:
                self._settle(publication, self._not_sent(error))

    def unknown(self, publications: list[Publication], error: NsqError) -> None:
        now = self.loop.now()
        for publication in publications:
            may_double = self._policy.retry_unknown and not self._has_ended
            if may_double and self._may_retry(publication, now):
                self._send_again([publication])
            else:
                self._settle(publication, _unknown(error))

    def _send_again(self, publications: list[Publication]) -> None:
        for publication in publications:
            publication.is_written = False
            self._queue.add(publication)
        self.loop.wake()

    # -- by the clock ---------------------------------------------------------------------------

    def _watch(self) -> None:
        options, now = self._options, self.loop.now()
        limit_s = max(options.publish_timeout_s, self._policy.retry_timeout_s)
        late = DeadlineExceeded(f"cannot connect to {self.name} in time")
        for publication in self._queue:
            if now - publication.submitted_at > limit_s:
                self._settle(publication, self._not_sent(self._last_error() or late))
        for link in self.links:
            link.check(now)
        self.loop.call_later(min(LIVENESS_TICK_S, options.publish_timeout_s / 4), self._watch)

    # -- outcomes -------------------------------------------------------------------------------

    def _settle(self, publication: Publication, error: PublishError | None) -> None:
        if not publication.is_settled:
            publication.settle(error)
            self._settled.append(publication)

    def _report_settled(self) -> None:
        """Make room first: a callback may submit the next publication."""
        if not self._settled:
            return
        settled, self._settled = self._settled, []
        self._report(settled)
        for publication in settled:
            if publication.on_settled is not None:
                try:
                    publication.on_settled(publication)
                except Exception:
                    log.exception("on_settled failed")

    def _not_sent(self, cause: NsqError | None) -> PublishError:
        hint = cause.hint if cause else ""
        if isinstance(cause, RefusedError):
            error: PublishError = PublishRefused(f"not published: {cause}", hint=hint)
        else:
            error = PublishNotSent(f"not published: {cause}", hint=hint)
        if cause is not None:
            error.category = cause.category
            error.__cause__ = cause
        return error

    # -- stopping -------------------------------------------------------------------------------

    def begin_stop(self) -> None:
        """End when every publication has settled."""
        self._is_stopping = True

    def abort(self) -> None:
        """Settle everything now and end."""
        self._is_stopping = True
        self._end()

    def _end(self) -> None:
        self._has_ended = True
        stopped = DeadlineExceeded(f"{self.name}: the producer has stopped")
        for link in self.links:
            link.close(stopped)
        for publication in [*self._inbox, *self._queue.take_all()]:
            self._settle(publication, self._not_sent(self._last_error() or stopped))
        self._inbox.clear()
        self._report_settled()

    def _at_end(self) -> None:
        """The loop has ended, by a stop or a defect: release everybody who waits."""
        self._end()


def _unknown(cause: NsqError) -> PublishUnknown:
    error = PublishUnknown(f"not confirmed: {cause}", hint=_UNKNOWN_HINT)
    error.__cause__ = cause
    return error


_UNKNOWN_HINT = "nsqd may have the messages; publishing them again may double them."
