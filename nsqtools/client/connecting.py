"""Connecting: when to try an address, again too, and the few threads on which it is done.

`RetryDelays` and `KnownNsqd` decide, on the clock of their caller; `Dialer` connects, and keeps a
consumer on the nsqd it should be on.

An nsqd given by address is tried after 8, 16, 32, 64 and then every 120 seconds, each delay a
little shorter by chance so that a fleet does not return in step (client guide). An nsqd found
through nsqlookupd is tried when a lookup lists it, but not before a floor that starts at a second
and doubles: without it an unauthorized topic is tried in a hot loop.

A connection that has proven itself (`Connection.is_proven`) resets the delays of its address. If
the user gave the address, nsqd is tried again immediately. One that cannot be reached restarts: it
is tried after `QUICK_S`, doubling to the usual delays.

A SUB creates topic and channel, and nsqd closes the connections of a topic that is deleted. So each
SUB after the first asks nsqd before whether both still exist (`check_subscription`), at the HTTP
port next to its TCP port. Where that is another server, or none, the kind of the loss decides: a
reset or a silence is the network's, and SUB follows immediately; an end of stream may be a
deletion, and SUB waits for one delay. It may then create again what was deleted: never to return to
a healthy nsqd would be worse.

What blocks happens on the threads of `ThreadPool`: connecting, TLS handshakes, lookups over HTTP.
All consumers and producers of a process share them; they end when they have had nothing to do for a
moment. Work is named by the peer that it waits for, and an unreachable peer must not keep those
that answer from being served: those that did not answer last time get half of the threads at most,
with those that are new all but two, and none of them more than two.
"""

from __future__ import annotations

import collections
import logging
import math
import os
import random
import threading
import time
from collections.abc import Callable, Hashable, Iterable
from dataclasses import dataclass
from functools import partial
from typing import Any, TypeVar

from nsqtools.client.connection import (
    Connection,
    http_access,
    max_attempt_s,
    open_connection,
)
from nsqtools.client.io_loop import LoopMember, Timer
from nsqtools.client.options import ClientOptions
from nsqtools.errors import (
    ConnectionFailed,
    DeadlineExceeded,
    NotFoundError,
    NsqError,
    ProtocolError,
)
from nsqtools.protocol import commands
from nsqtools.protocol.names import HTTP_PORT_OFFSET, Address, http_url, is_ephemeral

log = logging.getLogger("nsqtools")

T = TypeVar("T")
Result = Connection | NsqError

DISCOVERED_BASE_S = 1.0
QUICK_S = 0.1
PAUSE_S = 1.0  # what a busy machine holds nobody up for
UPTIME_MARGIN_S = 1.0  # nsqd reports its start and its clock in whole seconds
JITTER = 0.1  # the largest share taken off a delay
rng = random.SystemRandom()  # which no program has seeded, and no fork copies


class RetryDelays:
    """The delays of one address: doubling from ``base_s`` to ``maximum_s``, less some jitter."""

    def __init__(self, base_s: float, maximum_s: float) -> None:
        self._base_s = base_s
        self._maximum_s = maximum_s
        self._failures = 0
        self._quick = min(0, math.ceil(math.log2(QUICK_S / base_s)))

    def next_delay_s(self) -> float:
        """Return the seconds to wait after the try or connection that just failed."""
        delay_s = min(self._maximum_s, self._base_s * 2.0 ** min(self._failures, 62))
        self._failures += 1
        return delay_s * (1 - rng.uniform(0, JITTER))

    def reset(self, *, quick: bool = False) -> None:
        """The address has proven itself. ``quick``: double from `QUICK_S` first."""
        self._failures = self._quick if quick else 0


@dataclass(slots=True)
class _Nsqd:
    """One nsqd that the consumer knows of. Times are readings of the caller's clock."""

    delays: RetryDelays
    is_direct: bool  # given by the user
    not_before: float
    is_listed: bool = True  # by the last lookup; a direct address always is
    is_busy: bool = False  # connecting or connected
    was_just_lost: bool = False  # a connection that worked: the next try is the first since


class KnownNsqd:
    """Which nsqd to connect to, and when.

    ``direct`` addresses were given by the user and are tried for ever; others come and go with
    `listed`. An address is never connected twice at a time.
    """

    def __init__(self, direct: Iterable[Address], now: float, options: ClientOptions) -> None:
        self._options = options
        limits_s = options.reconnect_base_s, options.reconnect_max_s
        self._nsqds = {each: _Nsqd(RetryDelays(*limits_s), True, now) for each in direct}

    def listed(self, addresses: Iterable[Address], now: float) -> int:
        """A lookup round found these nsqd. A connected one that is missing stays connected.

        One that is missing and not connected is forgotten once its delay is over. Of more than
        max_discovered_nsqd those that are busy stay and the others are drawn again, so that none
        keeps an nsqd out by announcing many. Return how many are left out.
        """
        listed = set(addresses)
        left_out = self._leave_out(listed)
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
        return left_out

    def _leave_out(self, listed: set[Address]) -> int:
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
        """Return the addresses to connect to now; each counts as busy from here on."""
        due = [a for a, p in self._nsqds.items() if self._is_waiting(p) and p.not_before <= now]
        for address in due:
            self._nsqds[address].is_busy = True
        return due

    def next_due(self) -> float | None:
        """Return when `take_due` will have something, or None when nothing waits."""
        waiting = [p.not_before for p in self._nsqds.values() if self._is_waiting(p)]
        return min(waiting, default=None)

    def failed(
        self,
        address: Address,
        now: float,
        *,
        was_proven: bool = False,
        is_away: bool = False,
        is_gone: bool = False,
    ) -> float:
        """A try or connection has ended. ``is_away``: nsqd cannot be reached; ``is_gone``: it is
        there, and the topic or channel is not.

        Return the seconds until the next try is allowed.
        """
        nsqd = self._nsqds[address]
        restarts = is_away and nsqd.was_just_lost
        if was_proven or is_gone or restarts:
            nsqd.delays.reset(quick=restarts)
        nsqd.was_just_lost = was_proven and nsqd.is_direct
        delay_s = 0.0 if nsqd.was_just_lost else nsqd.delays.next_delay_s()
        nsqd.is_busy = False
        nsqd.is_listed = nsqd.is_direct
        nsqd.not_before = now + delay_s
        return delay_s

    def __getitem__(self, address: Address) -> _Nsqd:
        return self._nsqds[address]

    @staticmethod
    def _is_waiting(nsqd: _Nsqd) -> bool:
        return nsqd.is_listed and not nsqd.is_busy


def warn_about_unused(count: int, options: ClientOptions) -> None:
    """Log how many of the nsqd that nsqlookupd announce are not used, if any."""
    if count > 0:
        log.warning(
            "%d of the nsqd that nsqlookupd announces are left out: they are more than "
            "max_discovered_nsqd (%d)",
            count,
            options.max_discovered_nsqd,
        )


@dataclass(slots=True)
class _Loss:
    """The end of a subscription. ``may_be_deletion``: nsqd has closed the connection itself."""

    at: float
    may_be_deletion: bool
    was_topic_gone: bool = False


class _Undecided(NsqError):
    """Whether topic and channel still exist cannot be asked."""


def check_subscription(
    address: Address, topic: str, channel: str, options: ClientOptions, loss: _Loss, now: float
) -> None:
    """Raise `NotFoundError` where a SUB would create what was deleted since the ``loss``.

    Ephemeral topics and channels end with their last client, so their absence says nothing. A topic
    that has come back, and an nsqd that has restarted, may lack the channel for other reasons than
    its deletion. Raises `_Undecided` where only time can tell.
    """
    if is_ephemeral(topic):
        return
    url = http_url(str(Address(address.host, min(address.port + HTTP_PORT_OFFSET, 65535))), 0)
    try:
        with http_access(options, [url]).nsqd(url) as client:
            info = client.info()
            if info["tcp_port"] != address.port:
                raise ProtocolError(f"{url} is not the HTTP port of {address}")
            # without the channel: nsqd leaves out a topic that lacks the one that is asked for
            topics = {stats.topic_name: stats for stats in client.stats(topic).topics or ()}
            uptime_s = client.uptime_s(info.get("start_time", 0))
    except NsqError as exc:
        if loss.may_be_deletion:
            loss.may_be_deletion = False
            raise _Undecided(f"{address} is there, and ended the connection") from exc
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


class Dialer:
    """Connects to ``addresses`` and to what lookups list, from `begin` until `stop`.

    All methods run on the I/O thread. ``done`` gets each connection, or the error. An address is
    busy from the moment its connecting begins until `ended` reports that it failed or was lost.
    """

    def __init__(
        self,
        loop: LoopMember,
        addresses: Iterable[Address],
        options: ClientOptions,
        subscription: tuple[str, str],
        done: Callable[[Address, Result], None],
        check_first: Callable[[Address], Callable[[], None] | None],
    ) -> None:
        """``subscription`` is the topic and the channel.

        ``check_first`` is called before each attempt to subscribe for the first time, and may
        return a check for `open_connection`.
        """
        self._loop = loop
        self._options = options
        self._subscription = subscription
        self._done = done
        self._check_first = check_first
        self._joined: set[Address] = set()
        self._losses: dict[Address, _Loss] = {}  # of nsqd that were joined, until they are again
        self.connecting = 0  # attempts under way
        self._timer: Timer | None = None
        self._is_stopped = False
        self._direct = dict.fromkeys(addresses)
        self._known = KnownNsqd(self._direct, loop.now(), options)
        self.errors: dict[Address, NsqError] = {}  # why nsqd that are known are not connected

    def begin(self) -> None:
        """Connect to what is due, and come back when the next address is."""
        if self._is_stopped:
            return
        now = self._loop.now()
        for address in self._known.take_due(now):
            self.connecting += address not in self._losses
            self._open(address)
        if (next_due := self._known.next_due()) is not None:
            self._timer = self._loop.call_later(next_due - now, self.begin, instead_of=self._timer)

    def _open(self, address: Address) -> None:
        look: Callable[[], None] | None = None
        if (loss := self._losses.get(address)) is not None:
            arguments = (*self._subscription, self._options, loss, self._loop.now())
            look = partial(check_subscription, address, *arguments)
        elif address not in self._joined:
            look = self._check_first(address)
        is_announced, options = not self._known[address].is_direct, self._options
        subscribe = commands.subscribe(*self._subscription)
        attempt = partial(
            open_connection, address, options, subscribe, is_announced=is_announced, look=look
        )
        work = partial(connect, attempt, options)
        thread_pool.run(self._loop, address, work, partial(self._connected, address))

    def listed(self, addresses: Iterable[Address]) -> None:
        """A lookup round has found these."""
        named = {*addresses}
        self.errors = {a: e for a, e in self.errors.items() if a in named or a in self._direct}
        warn_about_unused(self._known.listed(named, self._loop.now()), self._options)
        self.begin()

    def ended(self, address: Address, error: NsqError, *, was_proven: bool, quietly: bool) -> bool:
        """A try or connection has ended; it is retried in time, or when a lookup lists it.

        Return whether it depends on a lookup.
        """
        now, nsqd = self._loop.now(), self._known[address]
        is_away = False
        if (loss := self._losses.get(address)) is not None:
            is_late = isinstance(error, DeadlineExceeded)
            is_away = isinstance(error, ConnectionFailed) and not is_late
            loss.may_be_deletion &= not is_away
        elif address in self._joined:
            is_cut = isinstance(error, DeadlineExceeded) or isinstance(error.__cause__, OSError)
            may_be_deletion = was_proven and nsqd.is_direct and not is_cut
            self._losses[address] = _Loss(now, may_be_deletion)
        delay_s = self._known.failed(address, now, was_proven=was_proven, is_away=is_away)
        self.errors[address] = error
        again = f"in {delay_s:.1f} s" if nsqd.is_direct else "when nsqlookupd lists it"
        log.log(logging.INFO if quietly else logging.WARNING, "%s; trying again %s", error, again)
        self.begin()
        return not nsqd.is_direct

    def stop(self) -> None:
        """Stop connecting. A connection that is being made is closed as soon as it exists."""
        self._is_stopped = True
        if self._timer is not None:
            self._timer.cancel()

    def _connected(self, address: Address, result: Result) -> None:
        self.connecting -= address not in self._losses
        if isinstance(result, Connection):
            self._joined.add(address)
            self._losses.pop(address, None)
            self.errors.pop(address, None)
        if self._is_stopped:
            if isinstance(result, Connection):
                result.close()
        elif isinstance(result, _Undecided | NotFoundError) and address in self._losses:
            self._wait(address, result)
        else:
            self._done(address, result)

    def _wait(self, address: Address, error: NsqError) -> None:
        """nsqd is there, and a SUB would create, or might, what was deleted."""
        is_gone = isinstance(error, NotFoundError)
        delay_s = self._known.failed(address, self._loop.now(), is_gone=is_gone)
        is_new = is_gone and str(self.errors.get(address)) != str(error)
        self.errors[address] = error
        level = logging.WARNING if is_new else logging.INFO
        log.log(level, "%s; trying again in %.1f s", error, delay_s)
        self.begin()


# -- on threads of their own ----------------------------------------------------------------------

MAX_THREADS = 8
MAX_PROVEN = 6  # for one peer that answered: it may be gone by now
MAX_UNPROVEN = 2
MAX_DOUBTFUL = 4  # for all that did not answer last time
MAX_ALL_UNPROVEN = 6  # with those that are new: nsqlookupd may announce many that hang
PROMPT_S = 0.5  # a peer that refuses so fast holds nothing up
IDLE_S = 2.0
MAX_KNOWN = 10_000

Work = tuple[LoopMember, Callable[[], Any], Callable[[Any], None]]


class ThreadPool:
    """The threads, started when there is work."""

    def __init__(self) -> None:
        self._start_afresh()
        os.register_at_fork(after_in_child=self._start_afresh)

    def _start_afresh(self) -> None:
        """Have no threads, as a forked child has none of its parent's, and nothing to do."""
        self._changed = threading.Condition()
        self._waiting: dict[Hashable, collections.deque[Work]] = {}
        self._running: collections.Counter[Hashable] = collections.Counter()
        self._has_answered: dict[Hashable, bool] = {}  # the last time; oldest first
        self._count = 0  # waiting
        self._threads = 0
        self._idle = 0

    def run(
        self,
        loop: LoopMember,
        peer: Hashable,
        work: Callable[[], T],
        done: Callable[[T | NsqError], None],
    ) -> None:
        """Do what waits for a peer on one of the threads; ``done`` gets the outcome on the loop."""
        with self._changed:
            self._waiting.setdefault(peer, collections.deque()).append((loop, work, done))
            self._count += 1
            self._changed.notify()
            needs_thread = self._count > self._idle and self._threads < MAX_THREADS
            self._threads += needs_thread
        # Outside the lock. A start switches greenlets where gevent has patched threads, and a lock
        # that was made before the patch does not tell two greenlets apart.
        if needs_thread:
            self._start_thread()

    def _start_thread(self) -> None:
        try:
            threading.Thread(target=self._serve, name="nsq-background", daemon=True).start()
        except RuntimeError as exc:  # no threads are left; or the interpreter ends
            with self._changed:
                self._threads -= 1
                if self._threads:
                    return
                abandoned, self._waiting, self._count = self._waiting, {}, 0
            for peer, works in abandoned.items():
                failed = ConnectionFailed(f"cannot reach {peer} ({exc})")
                for loop, _, done in works:
                    loop.call_soon(partial(done, failed))

    def _serve(self) -> None:
        while True:
            with self._changed:
                taken = self._take()
                if taken is None:
                    self._idle += 1
                    is_wanted = self._changed.wait(IDLE_S)
                    self._idle -= 1
                    if not is_wanted and not self._waiting:
                        self._threads -= 1
                        return
                    continue
            began_at = time.monotonic()
            peer, (loop, work, done) = taken
            try:
                result = work()
            except NsqError as exc:
                result = exc
            except BaseException as exc:  # a defect must cost no thread, and keep nobody waiting
                log.exception("cannot reach %s", peer)
                result = ConnectionFailed(f"cannot reach {peer} ({exc!r})")
            loop.call_soon(partial(done, result))
            is_prompt = time.monotonic() - began_at < PROMPT_S
            self._note(peer, has_answered=is_prompt or not isinstance(result, NsqError))

    def _take(self) -> tuple[Hashable, Work] | None:
        for peer, works in self._waiting.items():
            if self._may_run(peer):
                work = works.popleft()
                self._count -= 1
                del self._waiting[peer]
                if works:  # the other peers come first
                    self._waiting[peer] = works
                self._running[peer] += 1
                return peer, work
        return None

    def _may_run(self, peer: Hashable) -> bool:
        answers, running = self._has_answered.get, self._running
        if answers(peer):
            return running[peer] < MAX_PROVEN
        unproven = [answers(each) for each in running.elements() if not answers(each)]
        return (
            running[peer] < MAX_UNPROVEN
            and len(unproven) < MAX_ALL_UNPROVEN
            and (answers(peer) is None or unproven.count(False) < MAX_DOUBTFUL)
        )

    def _note(self, peer: Hashable, *, has_answered: bool) -> None:
        with self._changed:
            self._running[peer] -= 1
            if not self._running[peer]:
                del self._running[peer]
            self._has_answered.pop(peer, None)
            self._has_answered[peer] = has_answered
            if len(self._has_answered) > MAX_KNOWN:
                del self._has_answered[next(iter(self._has_answered))]
            if self._waiting and self._idle:
                self._changed.notify(self._idle)  # what was held back for this peer may go on


thread_pool = ThreadPool()


def connect(attempt: Callable[[], Connection], options: ClientOptions) -> Connection:
    """Make an ``attempt``, an `open_connection`.

    One that took longer than it may says that this process stood still, perhaps with its machine,
    and nothing about nsqd: there is one more.
    """
    too_late = time.monotonic() + max_attempt_s(options) + PAUSE_S
    try:
        return attempt()
    except DeadlineExceeded:
        if time.monotonic() <= too_late:
            raise
    return attempt()
