"""Messages to other nsqd: a parcel is one MPUB, delivered when nsqd has confirmed it.

With ``round-robin`` and ``failover`` a producer chooses among the nsqd that work; what one of them
certainly did not take goes to another. With ``hash`` messages of the same key go to the same nsqd,
and to the next one only while theirs does not work.

The nsqd of the destination are those that its nsqlookupd announce now (`Destinations`). They are
asked at the start, then at the interval of every client, and soon after nothing could be delivered.
What was given by address always stays. An nsqd is removed only when every nsqlookupd has answered
and none names it, and never all of them: an nsqlookupd that was restarted knows no nsqd. When they
change, new producers take over, and the old ones end what they began. A key may go to another nsqd
then.
"""

from __future__ import annotations

import functools
import logging
import random
import re
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from zlib import crc32

from nsqtools.client.connecting import run_in_background
from nsqtools.client.connection_settings import ConnectionSettings
from nsqtools.client.outcomes import is_stored_in_part, may_split
from nsqtools.client.producer import Producer
from nsqtools.client.publication import Mode
from nsqtools.cluster.directory import open_cluster
from nsqtools.errors import (
    ConfigurationError,
    NotFoundError,
    NsqError,
    PublishError,
    PublishInvalid,
    PublishUnknown,
)
from nsqtools.forward import ForwardMode
from nsqtools.forward.parcel import DELIVERED, Fate, Outcome, Parcel, Report
from nsqtools.protocol.commands import SIZE_BYTES, mpub_size
from nsqtools.protocol.names import check_topic

log = logging.getLogger("nsqtools")

SOON_S = 1.0
SOON_APART_S = 5.0
MAX_MESSAGES = 1000  # in one MPUB


class NsqSink:
    """Publishes to one or several nsqd. ``key`` gives what ``hash`` goes by: a template's encoder.

    Raises `ConfigurationError` for a bad address, and for hash without a key.
    """

    def __init__(
        self,
        destinations: Destinations,
        *,
        mode: ForwardMode = ForwardMode.ROUND_ROBIN,
        key: Callable[..., bytes] | None = None,
    ) -> None:
        self._destinations = destinations
        # what is under way is limited by the forwarder: submitting must not block
        self._options = destinations.settings.client_options(max_outstanding=100_000)
        self._key = key if mode is ForwardMode.HASH else None
        if mode is ForwardMode.HASH and key is None:
            raise ConfigurationError("hash needs a key", hint="For example --key '{.user.id}'.")
        self._mode = mode
        self._producers = self._make_producers()
        self._retired: list[threading.Thread] = []
        self._places: dict[Parcel, int] = {}  # of the parts, among the producers

    def _make_producers(self) -> list[Producer]:
        addresses = list(dict.fromkeys(self._destinations.settings.nsqd_tcp_addresses))
        if self._key is not None:  # each begins with another one
            starts = range(len(addresses))
            return [Producer(addresses[at:] + addresses[:at], self._options) for at in starts]
        mode: Mode = "failover" if self._mode is ForwardMode.FAILOVER else "round-robin"
        return [Producer(addresses, self._options, mode=mode)]

    def parts(self, parcel: Parcel) -> list[Parcel]:
        """One part for each nsqd and MPUB; a message above the limit is alone."""
        if self._key is None or len(self._producers) == 1:
            return self._sized(parcel)
        by_place: dict[int, list[int]] = {}
        messages = parcel.messages
        for at, message in enumerate(messages):
            key = self._key(messages.topic, messages.nsqd, [message])
            by_place.setdefault(crc32(key) % len(self._producers), []).append(at)
        parts = []
        for place, chosen in by_place.items():
            for part in self._sized(parcel.chosen(chosen)):
                self._places[part] = place
                parts.append(part)
        return parts

    def _sized(self, parcel: Parcel) -> list[Parcel]:
        count, limit = len(parcel), self._options.publish_max_body_size
        if count <= MAX_MESSAGES and mpub_size(()) + parcel.size + SIZE_BYTES * count <= limit:
            if count == 1 or max(map(len, parcel.bodies)) <= self._options.publish_max_msg_size:
                return [parcel]
            return [parcel.part(at, at + 1) for at in range(count)]
        middle = count // 2
        if not middle:
            return [parcel]
        return [
            *self._sized(parcel.part(0, middle)),
            *self._sized(parcel.part(middle, count)),
        ]

    def submit(self, parcel: Parcel, report: Report) -> None:
        """Publish one part."""

        def ended(error: PublishError | None) -> None:
            outcome = outcome_of(error)
            if outcome.fate is Fate.UNREACHABLE:
                self._destinations.look_soon(time.monotonic())
            report(parcel, outcome)

        producer = self._producers[self._places.pop(parcel, 0) % len(self._producers)]
        try:
            producer.submit(parcel.topic, parcel.bodies, on_settled=lambda p: ended(p.error))
        except PublishInvalid as exc:
            report(parcel, Outcome(Fate.REFUSED, str(exc), may_split=True))
        except PublishError as exc:
            ended(exc)

    def check(self) -> None:
        """Nothing of its own can fail; follow the nsqd of the destination."""
        if self._destinations.look(time.monotonic()):
            old, self._producers = self._producers, self._make_producers()
            self._retired = [thread for thread in self._retired if thread.is_alive()]
            for producer in old:
                end = functools.partial(producer.stop, self._options.publish_timeout_s)
                thread = threading.Thread(target=end, name="nsq-retired", daemon=True)
                thread.start()
                self._retired.append(thread)

    def stop(self, timeout_s: float) -> None:
        """Wait for what is under way, then close the connections."""
        until = time.monotonic() + timeout_s
        for producer in self._producers:
            producer.stop(max(0.1, until - time.monotonic()))
        for thread in self._retired:
            thread.join(max(0.1, until - time.monotonic()))


def outcome_of(error: PublishError | None) -> Outcome:
    """What the end of a publish means for its messages."""
    if error is None:
        return DELIVERED
    if isinstance(error, PublishUnknown):
        return Outcome(Fate.UNKNOWN, str(error), may_split=is_stored_in_part(error))
    if may_split(error):
        return Outcome(Fate.REFUSED, str(error), may_split=True)
    # not sent, or nsqd cannot store it now, or does not accept us, until that is mended: no
    # reason for dead letters
    return Outcome(Fate.UNREACHABLE, str(error))


# -- the nsqd of the destination -------------------------------------------------------------------


class Destinations:
    """``settings`` are those of the destination with the addresses of now.

    Raises the error when no nsqlookupd answers, and `NotFoundError` when none knows an nsqd.
    """

    def __init__(self, given: ConnectionSettings, now: float) -> None:
        self._given = given
        self._interval_s = given.client_options().lookupd_poll_interval_s
        self._found: ConnectionSettings | None = None
        self._is_asking = False
        self.settings = given
        self.settings = self._ask()
        self._asked_at = now
        self._next_at = self._after(now)

    def look(self, now: float) -> bool:
        """Ask when it is time; return whether `settings` has other addresses than before."""
        if now >= self._next_at and self._given.lookupd_http_addresses and not self._is_asking:
            self._asked_at = now
            self._next_at = self._after(now)
            self._is_asking = True
            try:
                run_in_background(self._given.lookupd_http_addresses, self._ask_in_background)
            except RuntimeError:  # no threads are left
                self._is_asking = False
        found, self._found = self._found, None
        if found is None or found.nsqd_tcp_addresses == self.settings.nsqd_tcp_addresses:
            return False
        log.warning("the destination is now %s", ", ".join(found.nsqd_tcp_addresses))
        self.settings = found
        return True

    def look_soon(self, now: float) -> None:
        """Nothing could be delivered: ask earlier."""
        self._next_at = min(self._next_at, max(now + SOON_S, self._asked_at + SOON_APART_S))

    def _after(self, now: float) -> float:
        return now + self._interval_s * random.uniform(1, 1.3)

    def _ask_in_background(self) -> bool:
        try:
            self._found = self._ask()
        except NsqError as exc:
            log.info("cannot ask for the nsqd of the destination: %s", exc)
            return False
        finally:
            self._is_asking = False
        return True

    def _ask(self) -> ConnectionSettings:
        given, known = self._given, set(self.settings.nsqd_tcp_addresses)
        if not given.lookupd_http_addresses:
            return given
        with open_cluster(given) as cluster:
            answers, failures = cluster.known_nodes()
            if failures and not answers:
                raise failures[0].error
            found = {
                str(cluster.reachable(known.node.tcp))
                for nodes in answers.values()
                for known in nodes
                if known.node.tcp is not None
            }
        found |= set(given.nsqd_tcp_addresses)
        if failures or not found:
            found |= known
        if not found:
            raise NotFoundError("the nsqlookupd of the destination know no nsqd")
        return replace(given, nsqd_tcp_addresses=tuple(sorted(found)))


# -- what a topic is called there ------------------------------------------------------------------


Rule = tuple[re.Pattern[str], str]


def parse_rule(text: str) -> Rule:
    r"""Read ``REGEX=NAME``, where NAME may refer to groups: ``eu\.(.*)=\1``.

    Raises `ConfigurationError`.
    """
    pattern, equals, name = text.rpartition("=")
    if not (pattern and equals and name):
        raise ConfigurationError(f"--map {text!r} is not REGEX=NAME, such as 'eu\\.(.*)=\\1'")
    try:
        compiled = re.compile(pattern)
        re.compile(f"(?:{pattern})|").sub(name, "")
    except re.error as exc:
        raise ConfigurationError(f"--map {text!r} cannot rename: {exc}") from None
    return compiled, name


def renamer(destination: str | None, texts: Sequence[str]) -> Callable[[str], str]:
    """Return the function that gives a topic's name: ``destination`` for all of them, or that of
    the first rule that matches the whole name, or its own.

    It raises `ConfigurationError` when that is not a topic's name. So does this for both at once,
    and for a rule that is not ``REGEX=NAME``.
    """
    rules = list(map(parse_rule, texts))
    if destination is not None and rules:
        raise ConfigurationError("give either --destination-topic or --map")
    if destination is not None:
        name = check_topic(destination)
        return lambda topic: name
    names: dict[str, str] = {}

    def rename(topic: str) -> str:
        if topic not in names:
            names[topic] = check_topic(_renamed(topic, rules))
        return names[topic]

    return rename


def _renamed(topic: str, rules: Sequence[Rule]) -> str:
    for pattern, name in rules:
        if match := pattern.fullmatch(topic):
            return match.expand(name)
    return topic
