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
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from nsqtools.client.connection import LIVENESS_TICK_S
from nsqtools.client.discovery import Discovery
from nsqtools.client.io_loop import LoopMember, Timer
from nsqtools.client.options import ClientOptions
from nsqtools.client.producer_link import ProducerLink
from nsqtools.client.producer_links import ProducerLinks
from nsqtools.client.publication import Publication, is_passing
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

log = logging.getLogger("nsqtools")


@dataclass(frozen=True, slots=True)
class PublishPolicy:
    """Where publications go, and how often they are tried. See `Producer`."""

    mode: PublishMode = PublishMode.FAILOVER
    retry_timeout_s: float = 0.0
    retry_unknown: bool = False
    linger_s: float = 0.0


class ProducerIO:
    """Owns the links and the unsettled publications of one producer.

    ``report`` is called on the I/O thread with publications that have settled.
    """

    def __init__(
        self,
        name: str,
        addresses: Sequence[Address],
        discovery: Discovery | None,
        options: ClientOptions,
        policy: PublishPolicy,
        report: Callable[[list[Publication]], None],
    ) -> None:
        self._options = options
        self._policy = policy
        self._report = report
        self.name = name  # the addresses, for messages
        self.loop = LoopMember(f"producer to {name}", self._each_turn, self._at_end)
        self.links = ProducerLinks(addresses, discovery, options, policy.mode, self.loop, self)
        has_others = len(addresses) > 1 or discovery is not None
        self._resends = policy.retry_timeout_s > 0 or policy.linger_s > 0 or has_others
        self._inbox: collections.deque[Publication] = collections.deque()
        self._is_noted = False  # a call is due that looks at the inbox
        self._queue = PublishQueue(
            linger_s=policy.linger_s, max_body_size=options.publish_max_body_size
        )
        self._settled: list[Publication] = []
        self._is_urgent = False  # send what is gathered now
        self._is_stopping = False
        self._has_ended = False
        self._timer: Timer | None = None

    def start(self) -> None:
        """Begin, from any thread."""
        self.loop.call_soon(self._begin)
        self.loop.start()

    def _begin(self) -> None:
        interval_s = min(LIVENESS_TICK_S, self._options.publish_timeout_s / 4)
        self.loop.call_each(interval_s, self._watch)
        self.links.begin()

    def submit(self, publication: Publication) -> None:
        """Publish, from any thread."""
        self._inbox.append(publication)
        if not self._is_noted:  # set and cleared in this order: `_take` clears before it looks
            self._is_noted = True
            self.loop.call_soon(self._take)

    def flush(self) -> None:
        """Send what is gathered without waiting for more."""
        self._is_urgent = True

    def _take(self) -> None:
        self._is_noted = False
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
            self._settle(publication, self._not_sent(self.links.last_error() or late))

    # -- sending --------------------------------------------------------------------------------

    def _each_turn(self) -> None:
        if self._queue:
            self._dispatch()
        self._report_settled()
        if self._is_stopping and not self._has_unsettled():
            self.loop.stop()

    def _has_unsettled(self) -> bool:
        return bool(self._queue or self._inbox or self.links.has_outstanding)

    def _dispatch(self) -> None:
        queue, links = self._queue, self.links
        link = links.choose()
        while link is not None and (publication := queue.take_single()) is not None:
            link.send(publication.encode(), [publication])
            link = links.choose_after(link)
        for topic in list(queue.gathered):
            if link is not None and self._send_gathered(topic, link):
                link = links.choose_after(link)
        if not queue.gathered:
            self._is_urgent = False
        if queue and not links.may_connect:
            self._find_no_link()

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
        cause = self.links.last_error()
        for publication in self._queue.take_all():
            if self._may_retry(publication, now) and not isinstance(cause, RefusedError):
                self._queue.add(publication)
            else:
                self._settle(publication, self._not_sent(cause))
        self._come_back_in(self.links.next_try_in_s())

    def _come_back_in(self, delay_s: float) -> None:
        now = self.loop.now()
        if self._timer is None or not now < self._timer.at <= now + delay_s:
            self._timer = self.loop.call_later(max(0.0, delay_s), self.loop.wake)

    def _may_retry(self, publication: Publication, now: float) -> bool:
        return now < publication.submitted_at + self._policy.retry_timeout_s

    # -- what links report ----------------------------------------------------------------------

    def link_changed(self) -> None:
        self.links.changed()
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
            if is_passing(error) and self._may_retry(publication, self.loop.now()):
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
                self._settle(publication, self._not_sent(self.links.last_error() or late))
        self.links.check(now)

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
        self.links.close(stopped)
        for publication in [*self._inbox, *self._queue.take_all()]:
            self._settle(publication, self._not_sent(self.links.last_error() or stopped))
        self._inbox.clear()
        self._report_settled()

    def _at_end(self) -> None:
        """It has ended, by a stop or a defect: release everybody who waits."""
        self._end()


def _unknown(cause: NsqError) -> PublishUnknown:
    error = PublishUnknown(f"not confirmed: {cause}", hint=_UNKNOWN_HINT)
    error.__cause__ = cause
    return error


_UNKNOWN_HINT = "nsqd may have the messages; publishing them again may double them."
