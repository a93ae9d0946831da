"""Publications of a producer on the I/O thread: connecting, sending, retries and outcomes.

A publication waits in the queue until an nsqd is available, is sent on a `ProducerLink`, and
returns as confirmed, rejected, not sent or unknown. Then it settles, or is queued again if a retry
cannot duplicate it: for the next nsqd, or for the same one within the retry timeout.

With a linger, single messages of a topic are joined into one MPUB while an earlier command is
outstanding. As in Nagle's algorithm, a lone message does not wait. If nsqd rejects a joined MPUB
without storing any of it, its messages are sent again one by one, so that a bad one fails alone. A
batch with a bad message is halved if the program allowed that (``splits``).

nsqd executes the commands of a connection in order and answers each, so an OK belongs to the oldest
outstanding command. After an error answer it stops reading: the oldest command was rejected, and
the commands behind it were certainly not executed (measured: 20,000 after a bad one, 0 stored). If
the connection breaks without an answer, commands that were handed to the socket are unknown.

A link connects when a publish needs it: immediately after the loss of a working connection, and
after a failure when a delay has passed. The delay doubles from 0.1 to 8 seconds and is at least as
long as the failed attempt took, so that a publish does not wait for one connect timeout after
another.

Configured addresses are used without a time limit. Addresses that nsqlookupd lists are shuffled, or
a fleet of producers would all use the first. One that is no longer listed is the last resort for
`DELISTED_GRACE_S`, because an nsqlookupd that was just started lists none.

An nsqd that hangs still accepts bytes. So a link whose oldest publish has waited for `OVERDUE_S`
gets nothing new while another link works, and round-robin prefers the links with the fewest
outstanding publishes: a hanging nsqd then delays a few publishes, and not those of all threads.

Trap: a failure may be reported from anywhere in a loop iteration. So sending happens in one place,
`_each_turn`, and each change wakes the loop.
"""

from __future__ import annotations

import collections
import logging
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from typing import NoReturn, get_args

from nsqtools.client import outcomes
from nsqtools.client.callbacks import ConnectionEvents
from nsqtools.client.connecting import (
    RetryDelays,
    connect_despite_pause,
    rng,
    warn_about_unused,
)
from nsqtools.client.connection import Connection, open_connection
from nsqtools.client.direct_publish import DirectPath
from nsqtools.client.discovery import Discovery
from nsqtools.client.io_loop import LoopMember, Timer
from nsqtools.client.options import ClientOptions
from nsqtools.client.publication import (
    Failures,
    Mode,
    Parts,
    PendingPublication,
    PublishQueue,
)
from nsqtools.client.thread_pool import thread_pool
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
from nsqtools.protocol.arguments import check_argument, check_times
from nsqtools.protocol.frames import OK
from nsqtools.protocol.names import Address

log = logging.getLogger("nsqtools")

# A failure is logged if the program has not read it for this long: a program that waits for its
# futures in groups has time to do so.
UNSEEN_S = 10.0
# A restarting nsqd is back within seconds, and a publisher waits for it. The longest delay bounds
# the attempts of a fleet at one in eight seconds for each producer.
RECONNECT_BASE_S = 0.1
RECONNECT_MAX_S = 8.0
# How long a publish waits for a connection that is being made before the next nsqd is used. TCP
# repeats a lost SYN after one second.
CONNECT_PATIENCE_S = 1.0
# An nsqd that syncs a busy disk answers within 0.1 s as a rule. A false alarm costs little: the
# link gets its next publish when it has answered.
OVERDUE_S = 0.3
# nsqd registers again with a restarted nsqlookupd within 15 s; five minutes also cover one that is
# being replaced.
DELISTED_GRACE_S = 300.0
# Outstanding bytes of a producer, besides the publication that is being added: enough for a fast
# network's bandwidth times its delay (1 Gbit/s and 30 ms), and little memory.
PUBLISH_WINDOW_BYTES = 4 << 20

# Publishes in sequence, each alone, after which the next one is expected to be alone, too. Lending
# the connection costs as much as one publish saves.
LEND_AFTER = 3
# A system call that does not block ends within microseconds, unless its thread gets no CPU.
RECLAIM_AGAIN_S = 0.001

# An unanswered command, its publications, and the time when it was sent. A plain tuple is the
# cheapest, and each publish makes one.
Outstanding = tuple[bytes, list[PendingPublication], float]


@dataclass(frozen=True, slots=True)
class PublishPolicy:
    """Where publications go, and how often they are retried. See `Producer`.

    Raises `ConfigurationError` for values out of range.
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
        check_argument("retry_unknown", self.retry_unknown, bool)
        check_times(retry_timeout_s=self.retry_timeout_s, linger_s=self.linger_s)


def _refuse_message(
    link: ProducerLink, timestamp_ns: int, attempts: int, id: bytes, body: bytes
) -> NoReturn:
    raise ProtocolError("a message on a connection without SUB")


class ProducerLink:
    """One nsqd that a producer publishes to, and its outstanding commands."""

    # `ConnectionUser` demands these two; without SUB there are no messages.
    received_at = 0.0
    make_message = staticmethod(_refuse_message)

    def __init__(self, address: Address, user: ProducerIO, *, is_announced: bool = False) -> None:
        self.address = address
        self.is_announced = is_announced  # found through nsqlookupd
        self.is_listed = True  # by the last lookup; a configured address always is
        self.last_used = user.loop.now()  # when it was last listed, connected or lost
        self.connection: Connection | None = None
        self.outstanding: collections.deque[Outstanding] = collections.deque()
        self._unanswered_bytes = 0
        self.is_connecting = False
        self.tried_at = 0.0
        self.not_before = 0.0  # time of the next attempt to connect
        self.last_error: NsqError | None = None
        self._options = user.options
        self._loop = user.loop
        self._user = user
        self._delays = RetryDelays(RECONNECT_BASE_S, RECONNECT_MAX_S)
        self._is_closed = False
        self._has_answered = False
        # Of a publish. A heartbeat does not count: nsqd sends them even while its disk hangs.
        self._last_answer = 0.0

    # -- connecting -----------------------------------------------------------------------------

    def connect_if_due(self, now: float) -> None:
        """Begin to connect, unless connected, connecting, or within the delay after a failure."""
        if self.connection is None and not self.is_connecting and now >= self.not_before:
            self.is_connecting = True
            self.tried_at = now
            address, options = self.address, self._options
            attempt = partial(open_connection, address, options, is_announced=self.is_announced)
            work = partial(connect_despite_pause, attempt, options)
            thread_pool.run(self._loop, self.address, work, self._connected)

    @property
    def has_failed(self) -> bool:
        """Return whether it is not connected because an attempt or a connection failed."""
        return self.connection is None and self.last_error is not None

    def is_worth_waiting(self, now: float) -> bool:
        """Return whether a publish should wait for the attempt to connect."""
        has_hung = isinstance(self.last_error, DeadlineExceeded)
        return self.is_connecting and not has_hung and now - self.tried_at < CONNECT_PATIENCE_S

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
            self._last_answer = self.last_used = self._loop.now()
            self._user.link_connected()
            result.attach(self._loop, self)
            version = result.reply.version or "before 0.2.19"
            log.info("connected to %s (nsqd %s)", self.address, version)
            self._user.events.connected(str(self.address))
        self._user.link_changed()

    def delay_next(self, error: NsqError, *, spent_s: float = 0.0) -> None:
        """Allow the next attempt to connect only after a delay."""
        self.last_error = error
        delay_s = max(self._delays.next_delay_s(), spent_s)
        self.not_before = self._loop.now() + delay_s
        log.info("%s; next attempt in %.1f s at the earliest", error, delay_s)

    # -- publishing -----------------------------------------------------------------------------

    def send(self, command: bytes, publications: list[PendingPublication]) -> None:
        """Send a command. The link must be connected."""
        assert self.connection is not None
        for publication in publications:
            publication.is_written = True
        self.connection.write(command)
        self._unanswered_bytes += len(command)
        self.outstanding.append((command, publications, self._loop.now()))

    def lend(self) -> DirectPath | None:
        """Lend the connection to publishing threads, if possible."""
        calls = None if self.connection is None else self.connection.lend()
        return None if calls is None else DirectPath(*calls)

    def reclaim(self, direct: DirectPath) -> None:
        """Continue what a publishing thread has begun."""
        assert self.connection is not None
        if (exchange := direct.unfinished) is None:
            self.connection.reclaim()
            return
        command, publication = exchange.command, exchange.publication
        publication.is_written = True
        self._unanswered_bytes += len(command)
        self.outstanding.append((command, [publication], publication.submitted_at))
        self.connection.reclaim(command, exchange.sent, exchange.received)

    @property
    def is_full(self) -> bool:
        """Return whether its unanswered commands exceed twice the window.

        The window alone does not bound them: publishes whose timeout passed have left it, but their
        bytes are still queued here.
        """
        return self._unanswered_bytes > 2 * PUBLISH_WINDOW_BYTES

    def check(self, now: float) -> None:
        """Close the connection if it is dead, or if a publish was not answered in time."""
        if self.connection is not None:
            self.connection.check_liveness()
        waited_s = self._waited_s(now)
        if waited_s > self._options.publish_timeout_s:
            late = DeadlineExceeded(f"{self.address}: no answer to a publish for {waited_s:.0f} s")
            self.lose(late)

    def _waited_s(self, now: float) -> float:
        """Return how long the oldest publish has waited without any publish being answered."""
        return now - max(self.outstanding[0][2], self._last_answer) if self.outstanding else 0.0

    def is_responsive(self, now: float) -> bool:
        """Return whether it is connected and does not seem to hang."""
        return self.connection is not None and self._waited_s(now) < OVERDUE_S

    def lose(self, error: NsqError) -> None:
        """Close the connection, if there is one."""
        if self.connection is not None:
            self.connection.lose(error)

    def close(self, error: NsqError) -> None:
        """Close the connection and make no other."""
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
        not_executed = [item for _, publications, _ in self.outstanding for item in publications]
        self.outstanding.clear()
        self.lose(error)
        self._user.rejected(self, rejected, error)
        self._user.not_sent(not_executed, error)

    def on_lost(self, error: NsqError) -> None:
        """Report outstanding publishes, by whether their bytes may have reached nsqd."""
        connection, self.connection = self.connection, None
        assert connection is not None
        self.last_used = self._loop.now()
        unsent_commands = set(map(id, connection.pending))
        not_sent: list[PendingPublication] = []
        unknown: list[PendingPublication] = []
        for command, publications, _ in self.outstanding:
            (not_sent if id(command) in unsent_commands else unknown).extend(publications)
        self.outstanding.clear()
        self._unanswered_bytes = 0
        if self._has_answered or connection.has_received:
            self.last_error = error
            log.info("%s", error)
        else:  # a connection that is accepted and dies at once must not be retried in a hot loop
            self.delay_next(error)
        if not self._is_closed:
            self._user.events.lost(str(self.address), error)
        self._user.unknown(unknown, error)
        self._user.not_sent(not_sent, error)
        self._user.link_changed()


class ProducerLinks:
    """The links to all nsqd, in the order in which to try them: listed ones come first."""

    def __init__(
        self, addresses: Iterable[Address], discovery: Discovery | None, user: ProducerIO
    ) -> None:
        self._discovery = discovery
        self._options = user.options
        self._is_round_robin = user.policy.mode == "round-robin"
        self._loop = user.loop
        self._user = user
        self._links = [ProducerLink(address, user) for address in addresses]
        self._index = 0  # of round-robin
        self._expects_lookup = discovery is not None
        self._lookup_error: NsqError | None = None

    def __iter__(self) -> Iterator[ProducerLink]:
        return iter(list(self._links))

    def __len__(self) -> int:
        return len(self._links)

    def begin(self) -> None:
        """Start looking up nsqd."""
        if self._discovery is not None:
            self._discovery.begin(self._loop, self._listed)

    # -- choosing -------------------------------------------------------------------------------

    def choose(self) -> ProducerLink | None:
        """Return a connected link, or None, and start connecting others that may be needed.

        Links that are no longer listed come last, except for those that seem to hang.
        """
        now, links = self._loop.now(), self._links
        if links and not self._is_round_robin and links[0].is_responsive(now):
            return links[0]  # the usual case
        if self._is_round_robin:
            delisted = [link for link in links if not link.is_listed]
            groups = [[link for link in links if link.is_listed], delisted]
        else:
            groups = [[link] for link in links]
        # The first publish of round-robin waits for all links. Otherwise the whole queue would go
        # to the one that connects first.
        is_first = self._is_round_robin and not self._index
        may_wait = is_first or not any(link.is_responsive(now) for link in links)
        for group in groups:
            for link in group:
                link.connect_if_due(now)
            if may_wait and any(link.is_worth_waiting(now) for link in group):
                return None
            if usable := [link for link in group if link.is_responsive(now)]:
                start = self._index % len(usable)
                return min(usable[start:] + usable[:start], key=lambda link: len(link.outstanding))
        return next((link for link in links if link.connection is not None), None)

    def only_choice(self) -> ProducerLink | None:
        """Return the link that `choose` returns as long as it works."""
        links = self._links
        return links[0] if links and (len(links) == 1 or not self._is_round_robin) else None

    def choose_after(self, link: ProducerLink) -> ProducerLink | None:
        """Return the link for the next command, after one that was sent on ``link``."""
        if not self._is_round_robin:
            return link
        self._index += 1
        return self.choose()

    @property
    def may_connect(self) -> bool:
        """Return whether an nsqd is connected, or may be soon."""
        return self._expects_lookup or any(
            link.connection is not None or link.is_connecting for link in self._links
        )

    def next_try_in_s(self) -> float:
        """Return the seconds until `choose` may succeed; a lookup wakes the loop itself."""
        if self._discovery is not None:
            self._discovery.ask_soon()
        not_before = [link.not_before for link in self._links]
        return min(not_before, default=self._loop.now() + CONNECT_PATIENCE_S) - self._loop.now()

    def last_error(self) -> NsqError | None:
        """Return why nothing can be sent: a refusal only if every nsqd refuses."""
        errors = [link.last_error for link in self._links if link.last_error is not None]
        if self._lookup_error is not None:
            errors.append(self._lookup_error)
        elif not self._links and not self._expects_lookup:
            hint = "Is nsqd running with --lookupd-tcp-address, and does allow_announced allow it?"
            text = "nsqlookupd lists no nsqd that messages can be published to"
            errors.append(ConnectionFailed(text, hint=hint))
        errors.sort(key=lambda error: isinstance(error, RefusedError))
        return errors[0] if errors else None

    # -- lookups --------------------------------------------------------------------------------

    def _listed(self, addresses: set[Address], errors: list[NsqError]) -> None:
        self._expects_lookup = False
        self._lookup_error = errors[0] if errors else None
        if not errors:
            self._update_links(addresses)
        self._user.link_changed()

    def _update_links(self, addresses: set[Address]) -> None:
        for link in self._links:
            link.is_listed = link.address in addresses or not link.is_announced
            if link.is_listed:
                link.last_used = self._loop.now()
        new = sorted(addresses - {link.address for link in self._links})
        rng.shuffle(new)
        count = sum(link.is_announced and link.is_listed for link in self._links)
        room = max(0, self._options.max_discovered_nsqd - count)
        warn_about_unused(len(new) - room, self._options)
        self._links += [
            ProducerLink(address, self._user, is_announced=True) for address in new[:room]
        ]
        self._links.sort(key=lambda link: not link.is_listed)

    def drop_delisted(self) -> None:
        """Drop links that are neither listed nor needed, after a change of links or list."""
        now, links = self._loop.now(), self._links
        idle = [link for link in links if not (link.is_listed or link.outstanding)]
        unconnected = [link for link in idle if link.connection is None]
        unconnected.sort(key=lambda link: link.last_used)
        excess = len(links) - self._options.max_discovered_nsqd
        for index, link in enumerate(unconnected):
            if index < excess or now - link.last_used > DELISTED_GRACE_S:
                links.remove(link)
                link.close(DeadlineExceeded(f"{link.address} is no longer listed"))
        if any(link.is_listed and link.connection is not None for link in links):
            for link in idle:
                link.lose(DeadlineExceeded(f"{link.address} is no longer listed"))
        if self._discovery is not None and any(link.has_failed for link in links if link.is_listed):
            self._discovery.ask_soon()

    # -- all of them ----------------------------------------------------------------------------

    def close(self, error: NsqError) -> None:
        """Close all links, and make no other."""
        if self._discovery is not None:
            self._discovery.stop()
        for link in self:
            link.close(error)


class ProducerIO:
    """Owns the links and the unsettled publications of one producer.

    ``report`` is called on the I/O thread with settled publications. ``release_window`` is called
    with publications that wait for an nsqd that may hang while other nsqd work. ``retried`` counts
    messages that were sent again, ``repeated`` those of them that nsqd may have stored before.
    """

    def __init__(
        self,
        name: str,
        addresses: Sequence[Address],
        discovery: Discovery | None,
        options: ClientOptions,
        policy: PublishPolicy,
        report: Callable[[list[PendingPublication]], None],
        release_window: Callable[[Iterable[PendingPublication]], None],
        events: ConnectionEvents,
    ) -> None:
        self.options = options
        self.events = events
        self.policy = policy
        self._report = report
        self._release_window = release_window
        self.name = name  # the addresses, for messages
        self.retried = self.repeated = 0
        self.loop = LoopMember(f"producer to {name}", self._each_turn, self._at_end)
        self.links = ProducerLinks(addresses, discovery, self)
        self._inbox: collections.deque[PendingPublication] = collections.deque()
        size = options.publish_max_body_size
        self._queue = PublishQueue(linger_s=policy.linger_s, max_body_size=size)
        self._settled: list[PendingPublication] = []
        self._expires_at: dict[PendingPublication, float] = {}  # those with a timeout of their own
        # One timer serves all, so that a confirmed publication leaves nothing behind in the heap.
        self._expiry: Timer | None = None
        self.failures = Failures()
        self._was_accepted = False  # by an nsqd, at any time: see `outcomes.is_transient`
        self._flushes = False  # send joinable messages without waiting for further ones
        self._is_stopping = False
        self._has_ended = False
        self._retries_ended = False
        self._timer: Timer | None = None
        self.direct: DirectPath | None = None  # while the connection of `_lender` is lent
        self._lender: ProducerLink | None = None
        self._lone_publishes = 0  # in sequence, without any other under way
        self._last_exchanges = 0

    def start(self) -> None:
        """Begin, from any thread."""
        # It raises if no thread can be started, and may be called again then.
        self.loop.start(self._begin)

    def _begin(self) -> None:
        self.loop.call_every(min(OVERDUE_S, self.options.publish_timeout_s / 4), self._watch)
        self.loop.call_every(
            UNSEEN_S, lambda: self.failures.log_unseen(f"{self.name}: ", only_older=True)
        )
        self.links.begin()

    def submit(self, publication: PendingPublication) -> None:
        """Publish, from any thread."""
        self._inbox.append(publication)
        if self.loop.has_ended:
            self._end()
        else:  # if it ends concurrently, `_at_end` checks the inbox once more
            self.loop.wake()

    def _lend(self) -> None:
        """Lend the connection that the next publish would use."""
        self._lone_publishes = self._last_exchanges = 0
        if (link := self.links.only_choice()) is not None and not self._is_stopping:
            self._lender, self.direct = link, link.lend()

    def reclaim(self) -> bool:
        """Take the lent connection back; return False if that has to wait."""
        direct, link = self.direct, self._lender
        if direct is None or link is None:
            return True
        if not direct.end():
            self._wake_in(RECLAIM_AGAIN_S)
            return False
        self.direct = None
        if direct.unfinished is not None:
            self._watch_timeout(direct.unfinished.publication)
        link.reclaim(direct)
        return True

    def flush(self) -> None:
        """Send joinable messages without waiting for further ones."""
        self._flushes = True
        self.reclaim()  # the thread that publishes may be the one that waits

    def _take_inbox(self) -> None:
        inbox = self._inbox
        while inbox:
            publication = inbox.popleft()
            self._watch_timeout(publication)
            self._queue.add(publication)

    def _watch_timeout(self, publication: PendingPublication) -> None:
        if publication.timeout_s is not None:
            expires_at = publication.submitted_at + publication.timeout_s
            self._expires_at[publication] = expires_at
            self._schedule_expiry(expires_at)

    def _schedule_expiry(self, at: float) -> None:
        if self._expiry is None or at < self._expiry.at:
            delay_s = at - self.loop.now()
            self._expiry = self.loop.call_later(delay_s, self._expire, instead_of=self._expiry)

    def _expire(self) -> None:
        """Settle publications whose own timeout has passed."""
        self._expiry = None
        now = self.loop.now()
        for publication, expires_at in list(self._expires_at.items()):
            if expires_at <= now:
                limit = f"{publication.timeout_s:.3g} s"
                late = DeadlineExceeded(f"{self.name}: no answer within {limit}")
                if publication.is_written:
                    self._settle(publication, outcomes.unknown(late))
                else:
                    self._settle(publication, outcomes.not_sent(self.links.last_error() or late))
        for publication in self._queue.take_all():
            self._queue.add(publication)  # which drops settled ones
        if self._expires_at:
            self._schedule_expiry(min(self._expires_at.values()))

    # -- sending --------------------------------------------------------------------------------

    def _each_turn(self) -> None:
        self._take_inbox()
        if self._has_ended:
            self._end()
        if (self._queue or self._is_stopping) and self.direct is not None and not self.reclaim():
            return
        if self._queue:
            self._dispatch()
        self._report_settled()
        if self._lone_publishes >= LEND_AFTER:
            self._lend()
        if self._is_stopping and not (self._queue or self._inbox or self._awaits_outcome):
            self.loop.stop()

    @property
    def _is_outstanding(self) -> bool:
        return any(link.outstanding for link in self.links)

    @property
    def _awaits_outcome(self) -> bool:
        """Return whether an unanswered publish has not settled by its own timeout."""
        return any(
            not publication.is_settled
            for link in self.links
            for _, publications, _ in link.outstanding
            for publication in publications
        )

    def _dispatch(self) -> None:
        queue, links = self._queue, self.links
        link = links.choose()
        while link and not link.is_full and (publication := queue.take_single()) is not None:
            link.send(publication.encode(), [publication])
            link = links.choose_after(link)
        for topic in list(queue.joinable):
            if link and not link.is_full and self._send_joined(topic, link):
                link = links.choose_after(link)
        if not queue.joinable:
            self._flushes = False
        if queue and not links.may_connect:
            self._fail_without_link()

    def _send_joined(self, topic: str, link: ProducerLink) -> bool:
        """Send the joinable messages of a topic, unless they may wait; return whether sent."""
        if link.outstanding and not self._flushes and not self._is_stopping:
            left_s = self._queue.remaining_linger_s(topic, self.loop.now())
            if left_s > 0:
                self._wake_in(left_s)
                return False
        for group in self._queue.take_groups(topic):
            if len(group) == 1:
                link.send(group[0].encode(), group)
            else:
                bodies = [publication.bodies[0] for publication in group]
                link.send(commands.multi_publish(topic, bodies), group)
        return True

    def _fail_without_link(self) -> None:
        """Fail publications that must not be retried, as no nsqd can be tried now."""
        now = self.loop.now()
        cause = self.links.last_error()
        is_transient = outcomes.is_transient(cause, was_accepted=self._was_accepted)
        for publication in self._queue.take_all():
            if self._may_retry(publication, now) and is_transient:
                self._queue.add(publication)
            else:
                self._settle(publication, outcomes.not_sent(cause))
        self._wake_in(self.links.next_try_in_s())

    def _wake_in(self, delay_s: float) -> None:
        now = self.loop.now()
        if self._timer is None or not now < self._timer.at <= now + delay_s:
            self._timer = self.loop.call_later(max(0.0, delay_s), self.loop.wake)

    def _may_retry(self, publication: PendingPublication, now: float) -> bool:
        # The time begins with the first failure, not while it waits in the queue.
        if not publication.failed_at:
            publication.failed_at = now
        retries_until = publication.failed_at + self.policy.retry_timeout_s
        return now < retries_until and not self._retries_ended

    def end_retries(self) -> None:
        """Retry nothing from now on."""
        self._retries_ended = True
        self.loop.wake()

    # -- reports of links -----------------------------------------------------------------------

    def link_connected(self) -> None:
        self._was_accepted = True

    def link_changed(self) -> None:
        # Deferred, because dropping a link is itself such a change.
        self.loop.call_soon(self._drop_delisted)

    def _drop_delisted(self) -> None:
        if self.reclaim():
            self.links.drop_delisted()
        else:
            self.loop.call_later(RECLAIM_AGAIN_S, self._drop_delisted)

    def confirmed(self, publications: list[PendingPublication]) -> None:
        for publication in publications:
            self._settle(publication, None)

    def rejected(
        self, link: ProducerLink, publications: list[PendingPublication], error: ServerError
    ) -> None:
        count = sum(len(publication.bodies) for publication in publications)
        # A refusal is of the client or of the topic, which all of them have in common.
        is_of_one = not isinstance(error, RefusedError) and outcomes.stored_nothing(error, count)
        if len(publications) > 1 and is_of_one:
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
            is_retried = self._retry_or_settle(
                publications, lambda: outcomes.rejected(error, count)
            )
            if is_retried or (outcomes.is_server_unavailable(error) and len(self.links) > 1):
                link.delay_next(error)  # so that other links get the next publishes

    @staticmethod
    def _split(publication: PendingPublication, size: int) -> list[PendingPublication]:
        if len(publication.bodies) == 1:
            publication.is_alone = True
            return [publication]
        parts = publication.parts or Parts(publication)
        return parts.split(publication, size)

    def not_sent(self, publications: list[PendingPublication], error: NsqError) -> None:
        # A single nsqd that refuses everything for now would refuse them one by one, each time with
        # a new connection.
        would_fail_again = (
            len(self.links) == 1
            and not self.policy.retry_timeout_s
            and isinstance(error, ServerError)
            and outcomes.is_server_unavailable(error)
        )
        if not (would_fail_again or self._has_ended or self._retries_ended):
            self._send_again(publications)
        else:
            for publication in publications:
                self._settle(publication, outcomes.not_sent(error))

    def unknown(self, publications: list[PendingPublication], error: NsqError) -> None:
        self._retry_or_settle(publications, lambda: outcomes.unknown(error))

    def _retry_or_settle(
        self, publications: list[PendingPublication], make_failure: Callable[[], PublishError]
    ) -> bool:
        """Retry the publications for which that is safe, settle the others.

        Return whether any is retried.
        """
        now, retries = self.loop.now(), []
        for publication in publications:
            # An exception of its own for each: raising one in two threads would mix tracebacks.
            failure = make_failure()
            publication.may_be_stored |= isinstance(failure, PublishUnknown)
            is_safe = outcomes.may_try_again(failure, retry_unknown=self.policy.retry_unknown)
            if is_safe and not self._has_ended and self._may_retry(publication, now):
                if isinstance(failure, PublishUnknown):
                    self.repeated += len(publication.bodies)
                if outcomes.is_stored_in_part(failure):
                    retries += self._split(publication, 1)
                else:
                    retries.append(publication)
            else:
                self._settle(publication, failure)
        self._send_again(retries)
        return bool(retries)

    def _send_again(self, publications: list[PendingPublication]) -> None:
        for publication in publications:
            publication.is_written = False
            self.retried += len(publication.bodies)
        self._queue.add_again(publications)
        self.loop.wake()

    # -- by the clock ---------------------------------------------------------------------------

    def _watch(self) -> None:
        options, now = self.options, self.loop.now()
        if (direct := self.direct) is not None:
            # Unused, or used by a thread that stands still: it must not miss heartbeats.
            if direct.exchanges == self._last_exchanges:
                self.reclaim()
            self._last_exchanges = direct.exchanges
        limit_s = max(options.publish_timeout_s, self.policy.retry_timeout_s)
        late = DeadlineExceeded(f"cannot connect to {self.name} in time")
        for publication in self._queue:
            if now - (publication.failed_at or publication.submitted_at) > limit_s:
                self._settle(publication, outcomes.not_sent(self.links.last_error() or late))
        for link in self.links:
            if self.direct is not None and link is self._lender:
                continue
            link.check(now)
            # An nsqd that hangs must not fill the window that publishes to the others need.
            if len(self.links) > 1 and link.outstanding and not link.is_responsive(now):
                self._release_window(
                    publication
                    for _, publications, _ in link.outstanding
                    for publication in publications
                )

    # -- outcomes -------------------------------------------------------------------------------

    def _settle(self, publication: PendingPublication, error: PublishError | None) -> None:
        if publication.is_settled:
            return
        if error is not None and publication.may_be_stored:
            error = outcomes.as_unknown(error)
        failure = publication.settle(error)
        if (parts := publication.parts) is not None:
            if parts.settle_one():
                self._settle(parts.publication, parts.error())
            return
        self._settled.append(publication)
        if failure is not None:
            self.failures.add(failure)
        if publication.timeout_s is not None:
            self._expires_at.pop(publication, None)

    def _report_settled(self) -> None:
        if not self._settled:
            return
        settled, self._settled = self._settled, []
        is_lone = len(settled) == 1 and settled[0].is_awaited and not self._is_outstanding
        self._lone_publishes = self._lone_publishes + 1 if is_lone else 0
        # Before the callbacks: it makes room in the window, and a callback may submit.
        self._report(settled)
        for publication in settled:
            publication._call_back()

    # -- stopping -------------------------------------------------------------------------------

    def begin_stop(self) -> None:
        """End when every publication has settled."""
        self._is_stopping = True

    def abort(self) -> None:
        """Settle everything now and end."""
        self._is_stopping = self._has_ended = True  # `_each_turn` does the rest

    def _at_end(self) -> None:
        self._end()
        self.loop.call_soon(self._end)  # for publications that are submitted concurrently

    def _end(self) -> None:
        """Settle everything and release waiting threads, after a stop or a defect."""
        self._has_ended = True
        while not self.reclaim():  # or a thread would use the descriptor after it was closed
            time.sleep(RECLAIM_AGAIN_S)
        stopped = DeadlineExceeded(f"{self.name}: the producer has stopped")
        self.links.close(stopped)
        self._take_inbox()
        for publication in self._queue.take_all():
            self._settle(publication, outcomes.not_sent(self.links.last_error() or stopped))
        self._report_settled()
