"""Messages to other nsqd: a parcel is one MPUB, delivered when nsqd has confirmed it.

With ``round-robin`` and ``failover`` a producer chooses among the nsqd that work, and follows those
that the nsqlookupd of the destination announce; what one of them certainly did not take goes to
another. With ``hash`` messages of the same key go to the same of the nsqd that there were at the
start, and to the next one only while theirs does not work.

No message may come back to where it was: a mirror that feeds itself fills both disks. NSQ's
messages carry nothing but a body, and the body is not ours to change. So `LoopGuard` knows the
edges (nsqd and topic, to nsqd and topic) instead of the messages. Each forwarder writes its edge in
the user agent of its consumers, where nsqd shows it in the stats of its clients. Before a topic
is forwarded, the edges are followed from its destination; when they lead to its source, it is
refused. Two forwarders that begin at the same moment see each other at the next check.

An nsqd is known by its host name, broadcast address and port, so that two names for the same one do
not hide a loop; where its HTTP port cannot be asked, by the address that it is connected to at.
"""

from __future__ import annotations

import logging
import re
import time
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, field
from functools import cache
from typing import TypeVar

from nsqtools import __version__
from nsqtools.client.connection_settings import ConnectionSettings
from nsqtools.client.message import Message
from nsqtools.client.outcomes import is_stored_in_part, may_split
from nsqtools.client.producer import Producer
from nsqtools.cluster.directory import Cluster, nsqd_addresses, open_cluster
from nsqtools.cluster.queue_rows import NodeReport, consumers_of
from nsqtools.errors import (
    ConfigurationError,
    NsqError,
    PublishError,
    PublishInvalid,
    PublishUnknown,
)
from nsqtools.forward import ForwardMode
from nsqtools.forward.parcel import DELIVERED, Fate, Outcome, Parcel, Report, check_key, hash_slot
from nsqtools.http.http_api import NsqdHTTPClient
from nsqtools.protocol.commands import SIZE_BYTES, mpub_size
from nsqtools.protocol.names import check_topic

log = logging.getLogger("nsqtools")

MAX_MESSAGES = 1000  # in one MPUB
WINDOW_BYTES = 3 << 20  # under way: below that of a producer, which would block

T = TypeVar("T")


class NsqSink:
    """Publishes to one or several nsqd. ``key`` gives what ``hash`` goes by: a template's encoder.

    ``nsqds`` are those that there were at the start.

    Raises as `nsqd_addresses` and `check_key`, and `ConfigurationError` for a bad address.
    """

    def __init__(
        self,
        destination: ConnectionSettings,
        *,
        mode: ForwardMode = ForwardMode.ROUND_ROBIN,
        key: Callable[..., bytes] | None = None,
    ) -> None:
        check_key(key, is_hash=mode is ForwardMode.HASH)
        # what is under way is limited by the forwarder: submitting must not block
        self._options = options = destination.client_options(max_outstanding=100_000)
        self._key = key
        self.nsqds = nsqd_addresses(destination)
        if self._key is not None:  # each begins with another one
            orders = [self.nsqds[at:] + self.nsqds[:at] for at in range(len(self.nsqds))]
            self._producers = [Producer(order, options) for order in orders]
            return
        self._producers = [
            Producer(
                destination.nsqd_tcp_addresses,
                options,
                lookupd_http_addresses=destination.lookupd_http_addresses,
                address_map=destination.address_map,
                mode="failover" if mode is ForwardMode.FAILOVER else "round-robin",
            )
        ]

    def parts(self, parcel: Parcel) -> list[Parcel]:
        """One part for each nsqd and MPUB."""
        most = MAX_MESSAGES, self._options.publish_max_body_size - mpub_size(()), SIZE_BYTES
        alike = [parcel] if self._key is None else parcel.grouped(self._place).values()
        return [part for each in alike for part in each.sized(*most)]

    def _place(self, message: Message, body: bytes) -> int:
        return hash_slot(message, self._key, len(self._producers)) if self._key else 0

    def submit(self, parcel: Parcel, report: Report) -> None:
        """Publish one part."""

        def ended(error: PublishError | None) -> None:
            report([parcel], outcome_of(error))

        producer = self._producers[self._place(parcel.messages[0], parcel.bodies[0])]
        try:
            producer.submit(parcel.topic, parcel.bodies, on_settled=lambda p: ended(p.error))
        except PublishError as exc:
            ended(exc)

    def check(self) -> None:
        """Nothing of its own can fail."""

    def stop(self, timeout_s: float) -> None:
        """Wait for what is under way, then close the connections."""
        until = time.monotonic() + timeout_s
        for producer in self._producers:
            producer.stop(max(0.1, until - time.monotonic()))


def outcome_of(error: PublishError | None) -> Outcome:
    """What the end of a publish means for its messages."""
    if error is None:
        return DELIVERED
    if isinstance(error, PublishUnknown):
        return Outcome(Fate.UNKNOWN, str(error), may_split=is_stored_in_part(error))
    if isinstance(error, PublishInvalid) or may_split(error):
        return Outcome(Fate.REFUSED, str(error), may_split=True)
    # not sent, or nsqd cannot store it now, or does not accept us, until that is mended: no
    # reason for dead letters
    return Outcome(Fate.UNREACHABLE, str(error))


# -- what a topic is called there ------------------------------------------------------------------


def parse_rule(text: str) -> tuple[re.Pattern[str], str]:
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

    @cache
    def rename(topic: str) -> str:
        for pattern, name in rules:
            if match := pattern.fullmatch(topic):
                return check_topic(match.expand(name))
        return check_topic(topic)

    return rename


# -- loops ---------------------------------------------------------------------------------------


_EDGE = re.compile(r"\(to-nsq (?P<topic>\S+) at (?P<places>[^)]*)\)")

Place = tuple[str, str]  # the name of an nsqd, and a topic
LOOK_S = 5.0


@dataclass(slots=True)
class LoopGuard:
    """Knows where messages go. ``rename`` gives the topic's name at the destination.

    The daemons are looked at once for the topics that are checked within `LOOK_S`: each of them may
    hang, and the forwarder waits. What it begins itself meanwhile it knows.
    """

    source: ConnectionSettings
    destination: ConnectionSettings
    rename: Callable[[str], str]
    _look_at_s: float = 0.0
    _sources: Collection[str] = ()  # the names of nsqd
    _places: Collection[str] = ()
    _edges: dict[Place, set[Place]] = field(default_factory=dict)  # of other forwarders
    _checked: set[str] = field(default_factory=set)  # topics

    def user_agent(self, topic: str) -> str:
        """Return what a consumer of the topic says that it is."""
        places = " ".join(self._places or self.destination.nsqd_tcp_addresses)
        return f"nsqtools/{__version__} (to-nsq {self.rename(topic)} at {places})"

    def check(self, topic: str) -> None:
        """Raise `ConfigurationError` when what is forwarded from the topic would return to it."""
        target = self.rename(topic)
        if target == topic:
            same = {*self.source.nsqd_tcp_addresses} & {*self.destination.nsqd_tcp_addresses}
            if same:
                raise self._refusal(topic, target, sorted(same)[0])
        if time.monotonic() >= self._look_at_s:
            self._look()
            self._look_at_s = time.monotonic() + LOOK_S
        reached = [(name, target) for name in self._places]
        seen = set(reached)
        while reached:
            name, there = reached.pop()
            if name in self._sources:
                if there == topic:
                    raise self._refusal(topic, target, name)
                if there in self._checked:
                    reached += {(each, self.rename(there)) for each in self._places} - seen
            reached += self._edges.get((name, there), set()) - seen
            seen.update(reached)
        self._checked.add(topic)

    def _look(self) -> None:
        self._sources, self._edges = (), {}
        try:
            with open_cluster(self.source) as cluster:
                self._sources = _by_name(cluster, lambda client: None)
            with open_cluster(self.destination) as cluster:
                found = _by_name(cluster, lambda client: client.stats(clients=True))
        except NsqError as exc:
            log.info("cannot check for loops: %s", exc)
            return
        self._places = tuple(found)
        for name, stats in found.items():
            for row in consumers_of(NodeReport(name, 0.0, stats)):
                if edge := _EDGE.search(row.client.user_agent):
                    places = {(place, edge["topic"]) for place in edge["places"].split()}
                    self._edges.setdefault((name, row.topic), set()).update(places)

    def _refusal(self, topic: str, target: str, name: str) -> ConfigurationError:
        to = f"to {target} " if target != topic else ""
        return ConfigurationError(
            f"topic {topic} is not forwarded {to}there: its messages would come back to {name}",
            hint="Give another --destination-topic or --map, or allow it with --no-loop-guard.",
        )


def _by_name(cluster: Cluster, more: Callable[[NsqdHTTPClient], T]) -> dict[str, T]:
    """Ask the nsqd of a cluster; ``more`` of those that answer by the names they are known by."""

    def ask(client: NsqdHTTPClient) -> tuple[str, T]:
        info = client.info()
        name = f"{info.get('hostname')}/{info['broadcast_address']}:{info['tcp_port']}"
        return name, more(client)

    answers, failures = cluster.ask_nsqds(ask, required=False)
    for failure in failures:
        log.info("cannot check %s for loops: %s", failure.address, failure.error)
    return dict(answers.values())
