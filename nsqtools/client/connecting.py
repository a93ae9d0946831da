"""When to connect to which nsqd.

`RetryDelays` and `KnownNsqd` decide, with the clock of their caller. `Dialer` connects, and keeps a
consumer connected to the right nsqd.

An nsqd given by address is tried after 8, 16, 32, 64 and then every 120 seconds, each delay reduced
by a random share so that a fleet does not return in step (client guide). An nsqd found through
nsqlookupd is tried when a lookup lists it, but not before a delay that starts at a second and
doubles: otherwise an unauthorized topic would be tried in a hot loop.

A connection that has proven itself (`Connection.is_proven`) resets the delays of its address. If
the user gave the address, nsqd is tried again immediately. If it cannot be reached then, it is
probably restarting, and is tried after `RESTART_DELAY_S`, doubling up to the usual delays.

A SUB creates topic and channel, and nsqd closes the connections of a deleted topic. So before each
SUB after the first, nsqd is asked whether both still exist (`check_still_exists`), at the HTTP port
next to its TCP port, or at the HTTP address of the same host that the user gave. If nsqd answers at
none of them, the kind of the loss decides. A reset or a silence is a fault of the network, and SUB
follows immediately. An end of stream may be a deletion, so SUB waits for one delay. It may then
recreate what was deleted, but never to return to a healthy nsqd would be worse.
"""

from __future__ import annotations

import collections
import functools
import logging
import math
import random
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING
from urllib.parse import urlsplit

from nsqtools.client.connection import (
    Connection,
    http_access,
    identify_body,
    max_attempt_s,
    open_connection,
    refuses_buffer_timeout,
)
from nsqtools.client.io_loop import LoopMember, Timer
from nsqtools.client.opening import Opening, can_open_on_loop
from nsqtools.client.options import ClientOptions
from nsqtools.client.thread_pool import thread_pool
from nsqtools.errors import (
    ConnectionFailed,
    DeadlineExceeded,
    NotFoundError,
    NsqError,
    ProtocolError,
)
from nsqtools.protocol import commands
from nsqtools.protocol.names import (
    HTTP_PORT_OFFSET,
    NSQD_HTTP_PORT,
    Address,
    http_url,
    is_ephemeral,
    shown_url,
)

if TYPE_CHECKING:
    from nsqtools.protocol.stats import TopicStats

log = logging.getLogger("nsqtools")

ConnectionResult = Connection | NsqError

# First delay of an nsqd that a lookup lists: lookups of a consumer are at most one in five seconds.
DISCOVERED_BASE_S = 1.0
# nsqd restarts within a second; eight tries in the first 25 s cost nothing.
RESTART_DELAY_S = 0.1
# An attempt that exceeds its own timeouts by more than this was interrupted by a pause of the
# process: a busy machine delays it by less.
PAUSE_S = 1.0
# Attempts that begin in one turn. Each takes 0.1 ms, and meanwhile no other connection is served.
OPENINGS_PER_TURN = 50
# Attempts at the same time on the I/O thread. An nsqd that does not respond holds a descriptor
# until the timeout, and a process has 1,024 by default.
MAX_OPENINGS = 256
UPTIME_MARGIN_S = 1.0  # nsqd reports its start and its clock in whole seconds
JITTER = 0.1  # largest share by which a delay is reduced
# The system's generator: programs may seed the module's, and a fork copies its state.
rng = random.SystemRandom()


class RetryDelays:
    """The delays of one address: doubling from ``base_s`` to ``maximum_s``, less the jitter."""

    def __init__(self, base_s: float, maximum_s: float) -> None:
        self._base_s = base_s
        self._maximum_s = maximum_s
        self._failures = 0
        # The negative number of failures with which the delays double from `RESTART_DELAY_S`.
        self._restart_failures = min(0, math.ceil(math.log2(RESTART_DELAY_S / base_s)))

    def next_delay_s(self) -> float:
        """Return the seconds to wait after a failed attempt or a lost connection."""
        # Beyond 62 the power would overflow; the maximum applies long before.
        delay_s = min(self._maximum_s, self._base_s * 2.0 ** min(self._failures, 62))
        self._failures += 1
        return delay_s * (1 - rng.uniform(0, JITTER))

    def reset(self, *, restarts: bool = False) -> None:
        """Start with the first delay again, or with `RESTART_DELAY_S` if nsqd ``restarts``."""
        self._failures = self._restart_failures if restarts else 0


@dataclass(slots=True)
class _Nsqd:
    """The state of one nsqd. Times are readings of the caller's clock."""

    delays: RetryDelays
    is_direct: bool  # given by the user
    not_before: float
    is_listed: bool = True  # by the last lookup; a direct address always is
    is_busy: bool = False  # connecting or connected
    was_just_lost: bool = False  # the next attempt is the first after a working connection


class KnownNsqd:
    """Decides to which nsqd to connect, and when.

    ``direct`` addresses were given by the user and are tried without a limit. Others are added and
    removed by `listed`. No address has two connections at a time.
    """

    def __init__(self, direct: Iterable[Address], now: float, options: ClientOptions) -> None:
        self._options = options
        limits_s = options.reconnect_base_s, options.reconnect_max_s
        self._nsqds = {address: _Nsqd(RetryDelays(*limits_s), True, now) for address in direct}

    def listed(self, addresses: Iterable[Address], now: float) -> int:
        """Apply the result of a lookup round; return how many nsqd exceed max_discovered_nsqd.

        A missing nsqd that is connected stays connected; another one is forgotten once its delay
        has passed. If there are too many, busy ones stay and the others are drawn at random in each
        round, so that nobody can exclude an nsqd by announcing many addresses.
        """
        listed = set(addresses)
        excess = self._drop_excess(listed)
        for address, nsqd in list(self._nsqds.items()):
            nsqd.is_listed = nsqd.is_direct
            if not (nsqd.is_direct or nsqd.is_busy or address in listed or nsqd.not_before > now):
                del self._nsqds[address]
        for address in listed:
            if address in self._nsqds:
                self._nsqds[address].is_listed = True
            else:
                longest_s = self._options.lookupd_poll_interval_s
                delays = RetryDelays(DISCOVERED_BASE_S, longest_s)
                self._nsqds[address] = _Nsqd(delays, False, now)
        return excess

    def _drop_excess(self, listed: set[Address]) -> int:
        kept = {a for a, nsqd in self._nsqds.items() if nsqd.is_direct or nsqd.is_busy}
        discovered = sum(not self._nsqds[address].is_direct for address in kept)
        idle = sorted(listed - kept)
        room = max(0, self._options.max_discovered_nsqd - discovered)
        if len(idle) <= room:
            return 0
        for address in rng.sample(idle, len(idle) - room):
            listed.remove(address)
            self._nsqds.pop(address, None)
        return len(idle) - room

    def take_due(self, now: float) -> list[Address]:
        """Return the addresses to connect to now, and mark them as busy."""
        due = {address: nsqd for address, nsqd in self._waiting() if nsqd.not_before <= now}
        for nsqd in due.values():
            nsqd.is_busy = True
        return list(due)

    def next_due(self) -> float | None:
        """Return the time at which an address is due, or None if no address waits."""
        return min((nsqd.not_before for _, nsqd in self._waiting()), default=None)

    def failed(
        self,
        address: Address,
        now: float,
        *,
        was_proven: bool = False,
        is_unreachable: bool = False,
        is_deleted: bool = False,
    ) -> float:
        """Record the end of an attempt or connection; return the seconds until the next attempt.

        ``is_unreachable`` means that nsqd did not answer, ``is_deleted`` that nsqd works but lacks
        the topic or channel.
        """
        nsqd = self._nsqds[address]
        restarts = is_unreachable and nsqd.was_just_lost
        if was_proven or is_deleted or restarts:
            nsqd.delays.reset(restarts=restarts)
        nsqd.was_just_lost = was_proven and nsqd.is_direct
        delay_s = 0.0 if nsqd.was_just_lost else nsqd.delays.next_delay_s()
        nsqd.is_busy = False
        nsqd.is_listed = nsqd.is_direct
        nsqd.not_before = now + delay_s
        return delay_s

    def __getitem__(self, address: Address) -> _Nsqd:
        return self._nsqds[address]

    def _waiting(self) -> list[tuple[Address, _Nsqd]]:
        return [(a, nsqd) for a, nsqd in self._nsqds.items() if nsqd.is_listed and not nsqd.is_busy]


def warn_about_unused(count: int, options: ClientOptions) -> None:
    """Log that ``count`` of the announced nsqd exceed max_discovered_nsqd, if it is positive."""
    if count > 0:
        log.warning(
            "%d of the nsqd that nsqlookupd announces are left out: they are more than "
            "max_discovered_nsqd (%d)",
            count,
            options.max_discovered_nsqd,
        )


@dataclass(slots=True)
class _Loss:
    """The end of a subscription. ``may_be_deletion``: nsqd closed the connection itself."""

    at: float
    may_be_deletion: bool
    was_topic_gone: bool = False


class _Undecided(NsqError):
    """nsqd cannot be asked whether topic and channel still exist."""


def check_still_exists(
    address: Address,
    topic: str,
    channel: str,
    options: ClientOptions,
    http_addresses: Sequence[str],
    loss: _Loss,
    now: float,
) -> None:
    """Raise `NotFoundError` if a SUB would recreate what was deleted since the ``loss``.

    Ephemeral topics and channels end with their last client, so their absence proves nothing. A
    recreated topic, and an nsqd that has restarted, may lack the channel for other reasons than its
    deletion. Raises `_Undecided` if SUB should wait for one delay.
    """
    if is_ephemeral(topic):
        return
    usual = str(Address(address.host, min(address.port + HTTP_PORT_OFFSET, 65535)))
    given = (http_url(text, NSQD_HTTP_PORT) for text in http_addresses)
    same_host = (url for url in given if urlsplit(url).hostname == address.host.lower())
    for url in dict.fromkeys((http_url(usual, 0), *same_host)):
        try:
            topics, uptime_s = _ask_nsqd(url, address, topic, options)
            break
        except NsqError as exc:
            error = exc
    else:
        if loss.may_be_deletion:
            loss.may_be_deletion = False
            raise _Undecided(f"{address} ended the connection, and is running") from error
        return
    if topic not in topics:
        loss.was_topic_gone = True
        raise NotFoundError(f"topic {topic} was deleted at {address}; waiting until it exists")
    has_channel = any(stats.channel_name == channel for stats in topics[topic].channels)
    has_restarted = uptime_s < now - loss.at + UPTIME_MARGIN_S
    if not (has_channel or loss.was_topic_gone or has_restarted or is_ephemeral(channel)):
        raise NotFoundError(
            f"channel {channel} of topic {topic} was deleted at {address}; waiting until it exists"
        )


def _ask_nsqd(
    url: str, address: Address, topic: str, options: ClientOptions
) -> tuple[dict[str, TopicStats], float]:
    """Return the topic by its name, if it exists, and the uptime of nsqd in seconds.

    Raises `NsqError`, also if another nsqd answers at ``url``.
    """
    with http_access(options, [url]).nsqd(url) as client:
        info = client.info()
        if info["tcp_port"] != address.port:
            raise ProtocolError(f"{shown_url(url)} is not the HTTP port of {address}")
        # Not with the channel as well: nsqd would omit a topic that lacks it.
        topics = {stats.topic_name: stats for stats in client.stats(topic).topics or ()}
        return topics, client.uptime_s(info.get("start_time", 0))


class Dialer:
    """Connects to ``addresses`` and to nsqd that lookups list, from `begin` until `stop`.

    All methods run on the I/O thread. ``done`` gets each connection, or the error. An address is
    busy from the start of an attempt until `ended` reports its failure or loss.
    """

    def __init__(
        self,
        loop: LoopMember,
        addresses: Iterable[Address],
        options: ClientOptions,
        subscription: tuple[str, str],
        done: Callable[[Address, ConnectionResult], None],
        check_first: Callable[[Address], Callable[[], None] | None],
        http_addresses: Sequence[str] = (),
    ) -> None:
        """``subscription`` is the topic and the channel.

        ``check_first`` is called before each attempt to subscribe for the first time, and may
        return a check for `open_connection`. ``http_addresses`` are those of nsqd, if known.
        """
        self._loop = loop
        self._options = options
        self._subscription = subscription
        self._done = done
        self._check_first = check_first
        self._http_addresses = http_addresses
        self._joined: set[Address] = set()  # nsqd that have been subscribed to
        self._losses: dict[Address, _Loss] = {}  # of joined nsqd, until they are connected again
        self.connecting = 0  # first attempts in progress
        self._timer: Timer | None = None
        self._unopened: collections.deque[Address] = collections.deque()
        self._openings: dict[Address, Opening] = {}
        self._is_stopped = False
        self._direct = dict.fromkeys(addresses)
        self._known = KnownNsqd(self._direct, loop.now(), options)
        self.errors: dict[Address, NsqError] = {}  # why nsqd are not connected

    def begin(self) -> None:
        """Connect to the nsqd that are due, and schedule the next ones."""
        if self._is_stopped:
            return
        now = self._loop.now()
        is_opening = bool(self._unopened)
        for address in self._known.take_due(now):
            self.connecting += address not in self._losses
            self._unopened.append(address)
        if not is_opening:
            self._open_next()
        if (next_due := self._known.next_due()) is not None:
            self._timer = self._loop.call_later(next_due - now, self.begin, instead_of=self._timer)

    def _open_next(self) -> None:
        room = MAX_OPENINGS - len(self._openings)
        for _ in range(min(OPENINGS_PER_TURN, room, len(self._unopened))):
            self._open(self._unopened.popleft())
        # Otherwise the end of an attempt makes room.
        if self._unopened and len(self._openings) < MAX_OPENINGS:
            self._loop.call_soon(self._open_next)

    def _open(self, address: Address) -> None:
        check: Callable[[], None] | None = None
        if (loss := self._losses.get(address)) is not None:
            check = partial(
                check_still_exists,
                address,
                *self._subscription,
                self._options,
                self._http_addresses,
                loss,
                self._loop.now(),
            )
        elif address not in self._joined:
            check = self._check_first(address)
        if check is None and can_open_on_loop(self._options):
            self._open_on_loop(address)
        else:
            self._open_on_thread(address, check)

    def _open_on_loop(self, address: Address) -> None:
        started_at = self._loop.now()
        try:
            self._openings[address] = Opening(
                self._loop,
                address,
                self._options,
                self._commands,
                is_announced=not self._known[address].is_direct,
                done=partial(self._opened, address, started_at),
            )
        except (LookupError, UnicodeError):  # the name of a host, or text that cannot be one
            self._open_on_thread(address)
        except ConnectionFailed as exc:
            # Not in this call: the failure of many addresses would make it recursive.
            self._loop.call_soon(partial(self._connected, address, exc))

    @functools.cached_property
    def _commands(self) -> tuple[bytes, bytes]:
        return commands.subscribe(*self._subscription), identify_body(self._options)

    def _opened(self, address: Address, started_at: float, result: ConnectionResult) -> None:
        was_full = len(self._openings) == MAX_OPENINGS
        del self._openings[address]
        is_late = isinstance(result, DeadlineExceeded) and was_paused(started_at, self._options)
        if isinstance(result, NsqError) and (is_late or refuses_buffer_timeout(result)):
            self._open_on_thread(address)  # which tries again, or says what to do
        else:
            self._connected(address, result)
        if was_full:
            self._open_next()

    def _open_on_thread(self, address: Address, check: Callable[[], None] | None = None) -> None:
        is_announced, options = not self._known[address].is_direct, self._options
        subscribe = commands.subscribe(*self._subscription)
        attempt = partial(
            open_connection, address, options, subscribe, is_announced=is_announced, check=check
        )
        work = partial(connect_despite_pause, attempt, options)
        thread_pool.run(self._loop, address, work, partial(self._connected, address))

    def listed(self, addresses: Iterable[Address]) -> None:
        """Apply the result of a lookup round."""
        listed = {*addresses}
        self.errors = {a: e for a, e in self.errors.items() if a in listed or a in self._direct}
        warn_about_unused(self._known.listed(listed, self._loop.now()), self._options)
        self.begin()

    def ended(self, address: Address, error: NsqError, *, was_proven: bool, level: int) -> bool:
        """Record the end of an attempt or connection, and log it.

        Return whether the next attempt depends on a lookup.
        """
        now, nsqd = self._loop.now(), self._known[address]
        is_unreachable = False
        if (loss := self._losses.get(address)) is not None:
            is_late = isinstance(error, DeadlineExceeded)
            is_unreachable = isinstance(error, ConnectionFailed) and not is_late
            loss.may_be_deletion &= not is_unreachable
        elif address in self._joined:
            is_cut = isinstance(error, DeadlineExceeded) or isinstance(error.__cause__, OSError)
            may_be_deletion = was_proven and nsqd.is_direct and not is_cut
            self._losses[address] = _Loss(now, may_be_deletion)
        delay_s = self._known.failed(
            address, now, was_proven=was_proven, is_unreachable=is_unreachable
        )
        self.errors[address] = error
        next_try = f"in {delay_s:.1f} s" if nsqd.is_direct else "when nsqlookupd lists it"
        log.log(level, "%s; trying again %s", error, next_try)
        self.begin()
        return not nsqd.is_direct

    def stop(self) -> None:
        """Stop connecting. A connection that a thread is making is closed when it is ready."""
        self._is_stopped = True
        self._unopened.clear()
        for opening in self._openings.values():
            opening.close()
        self._openings.clear()
        if self._timer is not None:
            self._timer.cancel()

    def _connected(self, address: Address, result: ConnectionResult) -> None:
        self.connecting -= address not in self._losses
        if isinstance(result, Connection):
            self._joined.add(address)
            self._losses.pop(address, None)
            self.errors.pop(address, None)
        if self._is_stopped:
            if isinstance(result, Connection):
                result.close()
        elif isinstance(result, _Undecided | NotFoundError) and address in self._losses:
            self._postpone_subscribe(address, result)
        else:
            self._done(address, result)

    def _postpone_subscribe(self, address: Address, error: NsqError) -> None:
        """Try again later, as a SUB would or might recreate what was deleted."""
        is_deleted = isinstance(error, NotFoundError)
        delay_s = self._known.failed(address, self._loop.now(), is_deleted=is_deleted)
        is_new = is_deleted and str(self.errors.get(address)) != str(error)
        self.errors[address] = error
        level = logging.WARNING if is_new else logging.INFO
        log.log(level, "%s; trying again in %.1f s", error, delay_s)
        self.begin()


def connect_despite_pause(attempt: Callable[[], Connection], options: ClientOptions) -> Connection:
    """Make an ``attempt`` to connect, and one more after a pause of the process.

    An attempt that exceeded its own timeouts proves that this process or its machine was stopped,
    and nothing about nsqd.
    """
    started_at = time.monotonic()
    try:
        return attempt()
    except DeadlineExceeded:
        if not was_paused(started_at, options):
            raise
    return attempt()


def was_paused(started_at: float, options: ClientOptions) -> bool:
    """Return whether an attempt that is late was interrupted by a pause of the process."""
    return time.monotonic() > started_at + max_attempt_s(options) + PAUSE_S
