"""What a producer does with its publications, on the I/O thread.

A publication waits here until some nsqd can take it, goes out on a `ProducerLink`, and comes back
as confirmed, rejected, not sent or unknown. Then it is settled, or waits again where that cannot
double it: for the next nsqd, or for the same one within the retry timeout.

With a linger, single messages of a topic are joined into one MPUB while an earlier command is
outstanding (as Nagle's algorithm does it: a lone message does not wait). One that nsqd rejects
without storing any of it is sent again message by message, so that a bad one fails alone. A batch
that is rejected for one of its messages is halved where that was asked for.

nsqd executes the commands of a connection in order and answers each, so an OK belongs to the oldest
command outstanding. When nsqd answers with an error it stops reading: the oldest was rejected and
the commands after it were certainly not executed (measured: 20,000 after a bad one, 0 stored). When
the connection breaks without an answer, what had been handed to the socket is unknown.

A link connects when it is asked to and may: at once when a connection that worked was lost, and
after a failure only when a delay has passed that doubles from 0.1 to 8 seconds and is at least as
long as the failed attempt took. Within the delay a publish must not wait for one connect timeout
after another.

Addresses that were given are used for ever. Those that nsqlookupd list come in an order drawn by
chance, or a fleet of producers would all use the same one. One that is listed no longer is the last
resort for `DELISTED_GRACE_S`, because an nsqlookupd that was just started lists none.

An nsqd that hangs still takes what it is sent. A link whose oldest publish was not answered for
`OVERDUE_S` gets nothing new while another works, and round-robin prefers those that wait for the
fewest answers: a hanging nsqd holds a few publishes then, and not those of all threads.

Trap: a failure may be reported from anywhere in a turn, so sending happens in one place,
`_each_turn`, and whatever changes wakes the loop.
"""

from __future__ import annotations

import collections
import logging
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from typing import NoReturn, get_args

from nsqtools.client import outcomes
from nsqtools.client.connecting import RetryDelays, connect, rng, thread_pool, warn_about_unused
from nsqtools.client.connection import Connection, open_connection
from nsqtools.client.discovery import Discovery
from nsqtools.client.io_loop import LoopMember, Timer
from nsqtools.client.options import ClientOptions, check_times
from nsqtools.client.publication import (
    Failures,
    Mode,
    Parts,
    PendingPublication,
    PublishQueue,
)
from nsqtools.errors import (
    ConfigurationError,
    ConnectionFailed,
    DeadlineExceeded,
    NsqError,
    ProtocolError,
    PublishError,
    PublishUnknown,
    RefusedError,
    ServerError,
)
from nsqtools.protocol import commands
from nsqtools.protocol.frames import OK
from nsqtools.protocol.names import Address

log = logging.getLogger("nsqtools")

UNSEEN_S = 10.0  # a failure that was not looked at for longer is logged
RECONNECT_BASE_S = 0.1
RECONNECT_MAX_S = 8.0
PATIENCE_S = 1.0  # for an nsqd that does not answer to connecting, before the next one is tried
OVERDUE_S = 0.3
DELISTED_GRACE_S = 300.0
WINDOW_BYTES = 4 << 20  # outstanding besides the publication that is being added

# A command without its answer yet, the publications that it carries, and when it was sent. A plain
# tuple: there is one for each publish.
Outstanding = tuple[bytes, list[PendingPublication], float]


@dataclass(frozen=True, slots=True)
class PublishPolicy:
    """Where publications go, and how often they are tried. See `Producer`.

    Raises `ConfigurationError` for what cannot be.
    """

    mode: Mode = "failover"
    retry_timeout_s: float = 0.0
    retry_unknown: bool = False
    linger_s: float = 0.0

    def __post_init__(self) -> None:
        if self.mode not in get_args(Mode):
            raise ConfigurationError(
                f"mode {self.mode!r} is neither failover nor round-robin",
                hint="To publish to every nsqd, use one producer for each.",
            )
        check_times(retry_timeout_s=self.retry_timeout_s, linger_s=self.linger_s)


def _refuse_message(
    link: ProducerLink, timestamp_ns: int, attempts: int, id: bytes, body: bytes
) -> NoReturn:
    raise ProtocolError("a message on a connection without SUB")


class ProducerLink:
    """One nsqd that a producer publishes to, and the commands outstanding there."""

    # of `ConnectionUser`; there are no messages here
    received_at = 0.0
    make_message = staticmethod(_refuse_message)

    def __init__(self, address: Address, user: ProducerIO, *, is_announced: bool = False) -> None:
        self.address = address
        self.is_announced = is_announced  # by nsqlookupd; whether it still is, `is_listed` tells
        self.is_listed = True
        self.known_at = user.loop.now()  # listed, or of use, for the last time
        self.connection: Connection | None = None
        self.outstanding: collections.deque[Outstanding] = collections.deque()
        self._unanswered_bytes = 0
        self.is_connecting = False
        self.tried_at = 0.0
        self.not_before = 0.0  # the next attempt to connect
        self.last_error: NsqError | None = None
        self._options = user.options
        self._loop = user.loop
        self._user = user
        self._delays = RetryDelays(RECONNECT_BASE_S, RECONNECT_MAX_S)
        self._is_closed = False
        self._has_answered = False
        self._last_answer = 0.0  # to a publish: heartbeats go on when nsqd's disk hangs

    # -- connecting -----------------------------------------------------------------------------

    def connect_if_due(self, now: float) -> None:
        """Begin to connect, unless connected, connecting, or within the delay after a failure."""
        if self.connection is None and not self.is_connecting and now >= self.not_before:
            self.is_connecting = True
            self.tried_at = now
            address, options = self.address, self._options
            attempt = partial(open_connection, address, options, is_announced=self.is_announced)
            work = partial(connect, attempt, options)
            thread_pool.run(self._loop, self.address, work, self._connected)

    @property
    def has_failed(self) -> bool:
        """Tell whether it was connected, or tried, and is not."""
        return self.connection is None and self.last_error is not None

    def is_worth_waiting(self, now: float) -> bool:
        """Tell whether it is worth to wait for the connection that is being made."""
        has_hung = isinstance(self.last_error, DeadlineExceeded)
        return self.is_connecting and not has_hung and now - self.tried_at < PATIENCE_S

    def _connected(self, result: Connection | NsqError) -> None:
        self.is_connecting = False
        if isinstance(result, NsqError):
            self.delay_next(result, spent_s=self._loop.now() - self.tried_at)
        elif self._is_closed:
            result.close()
        else:
            self.connection = result
            self.last_error = None
            self._has_answered = False
            self._last_answer = self.known_at = self._loop.now()
            self._user.links.was_accepted = True
            result.attach(self._loop, self)
            version = result.reply.version or "before 0.2.19"
            log.info("connected to %s (nsqd %s)", self.address, version)
        self._user.link_changed()

    def delay_next(self, error: NsqError, *, spent_s: float = 0.0) -> None:
        """Connect again after a delay only."""
        self.last_error = error
        delay_s = max(self._delays.next_delay_s(), spent_s)
        self.not_before = self._loop.now() + delay_s
        log.info("%s; next attempt in %.1f s at the earliest", error, delay_s)

    # -- publishing -----------------------------------------------------------------------------

    def send(self, command: bytes, publications: list[PendingPublication]) -> None:
        """Send a command on the connection, which there must be."""
        assert self.connection is not None
        for publication in publications:
            publication.is_written = True
        self.connection.write(command)
        self._unanswered_bytes += len(command)
        self.outstanding.append((command, publications, self._loop.now()))

    @property
    def is_full(self) -> bool:
        """Tell whether it has more than the window: publishes whose own time was over have left
        that, and their bytes are still here."""
        return self._unanswered_bytes > 2 * WINDOW_BYTES

    def check(self, now: float) -> None:
        """Give the connection up when it is dead, or a publish was not answered in time."""
        if self.connection is not None:
            self.connection.check_liveness()
        waited_s = self._waited_s(now)
        if waited_s > self._options.publish_timeout_s:
            late = DeadlineExceeded(f"{self.address}: no answer to a publish for {waited_s:.0f} s")
            self.lose(late)

    def _waited_s(self, now: float) -> float:
        """Return for how long the oldest publish has waited, and nothing was answered."""
        return now - max(self.outstanding[0][2], self._last_answer) if self.outstanding else 0.0

    def is_responsive(self, now: float) -> bool:
        """Tell whether it is connected, and does not seem to hang."""
        return self.connection is not None and self._waited_s(now) < OVERDUE_S

    def lose(self, error: NsqError) -> None:
        """Close the connection, if there is one."""
        if self.connection is not None:
            self.connection.lose(error)

    def close(self, error: NsqError) -> None:
        """Close for good."""
        self._is_closed = True
        self.lose(error)

    # -- the connection -------------------------------------------------------------------------

    def on_messages(self, messages: list[NoReturn]) -> None:
        """Never called: `make_message` refuses the first."""

    def on_response(self, data: bytes) -> None:
        self._has_answered = True
        if data == OK and self.outstanding:
            self._delays.reset()
            self._last_answer = self._loop.now()
            command, publications, _ = self.outstanding.popleft()
            self._unanswered_bytes -= len(command)
            self._user.confirmed(publications)
        else:
            self.lose(ProtocolError(f"{self.address}: unexpected answer {data[:60]!r}"))

    def on_server_error(self, error: ServerError) -> None:
        self._has_answered = True
        rejected = self.outstanding.popleft()[1] if self.outstanding else []
        not_executed = [each for _, publications, _ in self.outstanding for each in publications]
        self.outstanding.clear()
        self.lose(error)
        self._user.rejected(self, rejected, error)
        self._user.not_sent(not_executed, error)

    def on_lost(self, error: NsqError) -> None:
        """Report what was outstanding, by whether its bytes may have reached nsqd."""
        connection, self.connection = self.connection, None
        assert connection is not None
        self.known_at = self._loop.now()
        untouched = set(map(id, connection.pending))
        not_sent: list[PendingPublication] = []
        unknown: list[PendingPublication] = []
        for command, publications, _ in self.outstanding:
            (not_sent if id(command) in untouched else unknown).extend(publications)
        self.outstanding.clear()
        self._unanswered_bytes = 0
        if self._has_answered or connection.has_received:
            self.last_error = error
            log.info("%s", error)
        else:  # it accepts and dies: as bad as one that refuses
            self.delay_next(error)
        self._user.unknown(unknown, error)
        self._user.not_sent(not_sent, error)
        self._user.link_changed()


class ProducerLinks:
    """One link for each nsqd: what is listed comes first, in the order in which to try them.

    ``user`` is called with the outcome of publications, and when something has changed.
    """

    def __init__(
        self, addresses: Iterable[Address], discovery: Discovery | None, user: ProducerIO
    ) -> None:
        self._discovery = discovery
        self._options = user.options
        self._takes_turns = user.policy.mode == "round-robin"
        self._loop = user.loop
        self._user = user
        self._links = [ProducerLink(address, user) for address in addresses]
        self._turn = 0
        self.was_accepted = False  # by one of them, at some time
        self._expects_lookup = discovery is not None
        self._lookup_error: NsqError | None = None

    def __iter__(self) -> Iterator[ProducerLink]:
        return iter(list(self._links))

    def __len__(self) -> int:
        return len(self._links)

    def begin(self) -> None:
        """Begin to ask for nsqd."""
        if self._discovery is not None:
            self._discovery.begin(self._loop, self._listed)

    # -- choosing -------------------------------------------------------------------------------

    def choose(self) -> ProducerLink | None:
        """Return a connected link, or None; what may connect begins to, for later.

        What is listed no longer is tried last, and then one that may hang.
        """
        now, links = self._loop.now(), self._links
        if links and not self._takes_turns and links[0].is_responsive(now):
            return links[0]  # the usual case, once a turn
        if self._takes_turns:
            groups = [[link for link in links if link.is_listed is each] for each in (True, False)]
        else:
            groups = [[link] for link in links]
        # round-robin waits at first, or all that waits goes to the one that answers first
        is_first = self._takes_turns and not self._turn
        may_wait = is_first or not any(link.is_responsive(now) for link in links)
        for group in groups:
            for link in group:
                link.connect_if_due(now)
            if may_wait and any(link.is_worth_waiting(now) for link in group):
                return None
            if usable := [link for link in group if link.is_responsive(now)]:
                first = self._turn % len(usable)
                return min(usable[first:] + usable[:first], key=lambda link: len(link.outstanding))
        return next((link for link in links if link.connection is not None), None)

    def choose_after(self, chosen: ProducerLink) -> ProducerLink | None:
        """Return the link for what follows something that went to the one chosen before."""
        if not self._takes_turns:
            return chosen
        self._turn += 1
        return self.choose()

    @property
    def may_connect(self) -> bool:
        """Tell whether some nsqd is connected, or may be soon."""
        is_near = [link.connection is not None or link.is_connecting for link in self._links]
        return self._expects_lookup or any(is_near)

    def next_try_in_s(self) -> float:
        """Return in how many seconds it is worth to `choose` again; a lookup wakes by itself."""
        if self._discovery is not None:
            self._discovery.ask_soon()
        not_before = [link.not_before for link in self._links]
        return min(not_before, default=self._loop.now() + PATIENCE_S) - self._loop.now()

    def last_error(self) -> NsqError | None:
        """Why nothing can be sent; a refusal only when every nsqd refuses."""
        errors = [link.last_error for link in self._links if link.last_error is not None]
        if self._lookup_error is not None:
            errors.append(self._lookup_error)
        elif not self._links and not self._expects_lookup:
            hint = "Is nsqd running with --lookupd-tcp-address, and does allow_announced allow it?"
            empty = "nsqlookupd know no nsqd that messages can be published to"
            errors.append(ConnectionFailed(empty, hint=hint))
        errors.sort(key=lambda error: isinstance(error, RefusedError))
        return errors[0] if errors else None

    # -- what nsqlookupd list -------------------------------------------------------------------

    def _listed(self, found: set[Address], errors: list[NsqError]) -> None:
        self._expects_lookup = False
        self._lookup_error = errors[0] if errors else None
        if not errors:
            self._fit(found)
        self._user.link_changed()

    def _fit(self, found: set[Address]) -> None:
        known = {link.address for link in self._links}
        for link in self._links:
            link.is_listed = link.address in found or not link.is_announced
            if link.is_listed:
                link.known_at = self._loop.now()
        new = sorted(found - known)
        rng.shuffle(new)
        count = sum(link.is_announced and link.is_listed for link in self._links)
        room = max(0, self._options.max_discovered_nsqd - count)
        warn_about_unused(len(new) - room, self._options)
        self._links += [ProducerLink(each, self._user, is_announced=True) for each in new[:room]]
        self._links.sort(key=lambda link: not link.is_listed)

    def changed(self) -> None:
        """A link was made or lost, or the list has changed: let go what is not needed."""
        now, links = self._loop.now(), self._links
        idle = [link for link in links if not (link.is_listed or link.outstanding)]
        spare = [link for link in idle if link.connection is None]
        spare.sort(key=lambda link: link.known_at)
        too_many = len(links) - self._options.max_discovered_nsqd
        for place, link in enumerate(spare):
            if place < too_many or now - link.known_at > DELISTED_GRACE_S:
                links.remove(link)
                link.close(DeadlineExceeded(f"{link.address} is listed no longer"))
        if any(link.is_listed and link.connection is not None for link in links):
            for link in idle:
                link.lose(DeadlineExceeded(f"{link.address} is listed no longer"))
        if self._discovery is not None and any(link.has_failed for link in links if link.is_listed):
            self._discovery.ask_soon()

    # -- all of them ----------------------------------------------------------------------------

    def close(self, error: NsqError) -> None:
        """Close for good."""
        if self._discovery is not None:
            self._discovery.stop()
        for link in self:
            link.close(error)


class ProducerIO:
    """Owns the links and the unsettled publications of one producer.

    ``report`` is called on the I/O thread with publications that have settled, and ``set_aside``
    with those that wait for an nsqd that may hang, while there are others. ``retried`` counts
    messages that were sent again, and ``repeated`` those of them that nsqd may have had already.
    """

    def __init__(
        self,
        name: str,
        addresses: Sequence[Address],
        discovery: Discovery | None,
        options: ClientOptions,
        policy: PublishPolicy,
        report: Callable[[list[PendingPublication]], None],
        set_aside: Callable[[Iterable[PendingPublication]], None],
    ) -> None:
        self.options = options
        self.policy = policy
        self._report = report
        self._release_window = set_aside
        self.name = name  # the addresses, for messages
        self.retried = self.repeated = 0
        self.loop = LoopMember(f"producer to {name}", self._each_turn, self._at_end)
        self.links = ProducerLinks(addresses, discovery, self)
        self._inbox: collections.deque[PendingPublication] = collections.deque()
        size = options.publish_max_body_size
        self._queue = PublishQueue(linger_s=policy.linger_s, max_body_size=size)
        self._settled: list[PendingPublication] = []
        self._timed: dict[PendingPublication, float] = {}  # when their own time is over
        self._expiry: Timer | None = None  # one for all: a confirmed publication leaves nothing
        self.failures = Failures()
        self._is_urgent = False  # send what is gathered now
        self._is_stopping = False
        self._has_ended = False
        self._retries_ended = False
        self._timer: Timer | None = None

    def start(self) -> None:
        """Begin, from any thread."""
        self.loop.start(self._begin)  # which may fail, and be called again

    def _begin(self) -> None:
        self.loop.call_every(min(OVERDUE_S, self.options.publish_timeout_s / 4), self._watch)
        self.loop.call_every(UNSEEN_S, lambda: self.failures.log(f"{self.name}: ", only_older=True))
        self.links.begin()

    def submit(self, publication: PendingPublication) -> None:
        """Publish, from any thread."""
        self._inbox.append(publication)
        if self.loop.has_ended:
            self._end()
        else:  # should it end in this moment, its end looks once more
            self.loop.wake()

    def flush(self) -> None:
        """Send what is gathered without waiting for more."""
        self._is_urgent = True

    def _take(self) -> None:
        inbox = self._inbox
        while inbox:
            publication = inbox.popleft()
            if publication.timeout_s is not None:
                until = publication.submitted_at + publication.timeout_s
                self._timed[publication] = until
                self._expire_at(until)
            self._queue.add(publication)

    def _expire_at(self, until: float) -> None:
        if self._expiry is None or until < self._expiry.at:
            delay_s = until - self.loop.now()
            self._expiry = self.loop.call_later(delay_s, self._expire, instead_of=self._expiry)

    def _expire(self) -> None:
        """Settle those whose time is over."""
        self._expiry = None
        now = self.loop.now()
        for publication, until in list(self._timed.items()):
            if until <= now:
                limit = f"{publication.timeout_s:.3g} s"
                late = DeadlineExceeded(f"{self.name}: no answer within {limit}")
                if publication.is_written:
                    self._settle(publication, outcomes.unknown(late))
                else:
                    self._settle(publication, outcomes.not_sent(self.links.last_error() or late))
        for publication in self._queue.take_all():
            self._queue.add(publication)  # unless it has settled
        if self._timed:
            self._expire_at(min(self._timed.values()))

    # -- sending --------------------------------------------------------------------------------

    def _each_turn(self) -> None:
        self._take()
        if self._has_ended:
            self._end()
        if self._queue:
            self._dispatch()
        self._report_settled()
        if self._is_stopping and not (
            self._queue or self._inbox or any(link.outstanding for link in self.links)
        ):
            self.loop.stop()

    def _dispatch(self) -> None:
        queue, links = self._queue, self.links
        link = links.choose()
        while link and not link.is_full and (publication := queue.take_single()) is not None:
            link.send(publication.encode(), [publication])
            link = links.choose_after(link)
        for topic in list(queue.gathered):
            if link and not link.is_full and self._send_gathered(topic, link):
                link = links.choose_after(link)
        if not queue.gathered:
            self._is_urgent = False
        if queue and not links.may_connect:
            self._fail_without_link()

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
                link.send(commands.multi_publish(topic, bodies), group)
        return True

    def _fail_without_link(self) -> None:
        """No nsqd can be tried now: fail what must not be retried, and come back for the rest."""
        now = self.loop.now()
        cause = self.links.last_error()
        is_transient = outcomes.is_transient(cause, was_accepted=self.links.was_accepted)
        for publication in self._queue.take_all():
            if self._may_retry(publication, now) and is_transient:
                self._queue.add(publication)
            else:
                self._settle(publication, outcomes.not_sent(cause))
        self._come_back_in(self.links.next_try_in_s())

    def _come_back_in(self, delay_s: float) -> None:
        now = self.loop.now()
        if self._timer is None or not now < self._timer.at <= now + delay_s:
            self._timer = self.loop.call_later(max(0.0, delay_s), self.loop.wake)

    def _may_retry(self, publication: PendingPublication, now: float) -> bool:
        """Its time begins with its first failure, not while it waits its turn."""
        if not publication.failed_at:
            publication.failed_at = now
        until = publication.failed_at + self.policy.retry_timeout_s
        return now < until and not self._retries_ended

    def end_retries(self) -> None:
        """Try nothing again from now on."""
        self._retries_ended = True
        self.loop.wake()

    # -- what links report ----------------------------------------------------------------------

    def link_changed(self) -> None:
        self.loop.call_soon(self.links.changed)  # not at once: letting one go is a change, too

    def confirmed(self, publications: list[PendingPublication]) -> None:
        for publication in publications:
            self._settle(publication, None)

    def rejected(
        self, link: ProducerLink, publications: list[PendingPublication], error: ServerError
    ) -> None:
        count = sum(len(publication.bodies) for publication in publications)
        if len(publications) > 1 and outcomes.stored_nothing(error, count):
            for publication in publications:
                publication.is_alone = True
            self._send_again(publications)
        elif (
            count > 1
            and publications[0].splits
            and outcomes.may_split(outcomes.rejected(error, count))
        ):
            self._send_again(self._split(publications[0], (count + 1) // 2))
        else:
            again = self._try_again_or_settle(publications, lambda: outcomes.rejected(error, count))
            if again or (outcomes.is_server_unavailable(error) and len(self.links) > 1):
                link.delay_next(error)  # the others take what comes next

    @staticmethod
    def _split(publication: PendingPublication, size: int) -> list[PendingPublication]:
        if len(publication.bodies) == 1:
            publication.is_alone = True
            return [publication]
        parts = publication.parts or Parts(publication)
        return parts.split(publication, size)

    def not_sent(self, publications: list[PendingPublication], error: NsqError) -> None:
        fails_again = (  # one after the other, with a connection for each
            len(self.links) == 1
            and not self.policy.retry_timeout_s
            and isinstance(error, ServerError)
            and outcomes.is_server_unavailable(error)
        )
        if not (fails_again or self._has_ended or self._retries_ended):
            self._send_again(publications)
        else:
            for publication in publications:
                self._settle(publication, outcomes.not_sent(error))

    def unknown(self, publications: list[PendingPublication], error: NsqError) -> None:
        self._try_again_or_settle(publications, lambda: outcomes.unknown(error))

    def _try_again_or_settle(
        self, publications: list[PendingPublication], make_failure: Callable[[], PublishError]
    ) -> bool:
        """Return whether some of them are sent again."""
        now, again = self.loop.now(), []
        for publication in publications:
            failure = make_failure()  # one for each: it is raised where a thread waits
            publication.may_be_stored |= isinstance(failure, PublishUnknown)
            may_again = outcomes.may_try_again(failure, retry_unknown=self.policy.retry_unknown)
            if may_again and not self._has_ended and self._may_retry(publication, now):
                if isinstance(failure, PublishUnknown):
                    self.repeated += len(publication.bodies)
                if outcomes.is_stored_in_part(failure):
                    again += self._split(publication, 1)
                else:
                    again.append(publication)
            else:
                self._settle(publication, failure)
        self._send_again(again)
        return bool(again)

    def _send_again(self, publications: list[PendingPublication]) -> None:
        for publication in publications:
            publication.is_written = False
            self.retried += len(publication.bodies)
            self._queue.add(publication)
        self.loop.wake()

    # -- by the clock ---------------------------------------------------------------------------

    def _watch(self) -> None:
        options, now = self.options, self.loop.now()
        limit_s = max(options.publish_timeout_s, self.policy.retry_timeout_s)
        late = DeadlineExceeded(f"cannot connect to {self.name} in time")
        for publication in self._queue:
            if now - (publication.failed_at or publication.submitted_at) > limit_s:
                self._settle(publication, outcomes.not_sent(self.links.last_error() or late))
        for link in self.links:
            link.check(now)
            # one that hangs must not fill the window of the others
            if len(self.links) > 1 and link.outstanding and not link.is_responsive(now):
                self._release_window(each for sent in link.outstanding for each in sent[1])

    # -- outcomes -------------------------------------------------------------------------------

    def _settle(self, publication: PendingPublication, error: PublishError | None) -> None:
        if publication.is_settled:
            return
        if error is not None and publication.may_be_stored:
            error = outcomes.as_unknown(error)
        failure = publication.settle(error)
        if (parts := publication.parts) is not None:
            if parts.settled_one():
                self._settle(parts.whole, parts.error())
            return
        self._settled.append(publication)
        if failure is not None:
            self.failures.add(failure)
        if publication.timeout_s is not None:
            self._timed.pop(publication, None)

    def _report_settled(self) -> None:
        """Make room first: a callback may submit the next publication."""
        if not self._settled:
            return
        settled, self._settled = self._settled, []
        self._report(settled)
        for publication in settled:
            publication.call_back()

    # -- stopping -------------------------------------------------------------------------------

    def begin_stop(self) -> None:
        """End when every publication has settled."""
        self._is_stopping = True

    def abort(self) -> None:
        """Settle everything now and end."""
        self._is_stopping = self._has_ended = True  # the turn does the rest

    def _at_end(self) -> None:
        self._end()
        self.loop.call_soon(self._end)  # for what is submitted in this moment

    def _end(self) -> None:
        """It ends, by a stop or a defect: release all threads that wait."""
        self._has_ended = True
        stopped = DeadlineExceeded(f"{self.name}: the producer has stopped")
        self.links.close(stopped)
        self._take()
        for publication in self._queue.take_all():
            self._settle(publication, outcomes.not_sent(self.links.last_error() or stopped))
        self._report_settled()
