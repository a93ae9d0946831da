"""Publish messages to other nsqd; a parcel is one MPUB, delivered when nsqd confirms it.

In modes ``round-robin`` and ``failover`` one producer chooses among the working nsqd, and follows
the nsqlookupd of the destination. Messages that one nsqd certainly did not store go to another. In
mode ``hash`` the list of nsqd is that of the start. Messages of one key go to the same nsqd, and to
the next one only while that fails.

A message must not return to its source: a mirror that feeds itself fills both disks. Messages of
NSQ have no headers, and forwarding must not change the body, so `LoopGuard` tracks edges (nsqd and
topic, to nsqd and topic) instead of messages. Each forwarder writes its edge into the user agent of
its consumers, which nsqd shows in its stats. Before a topic is forwarded, the guard follows the
edges from its destination. If they lead to the source, the topic is refused. Two forwarders that
start at the same moment see each other at the next check.

An nsqd is identified by host name, broadcast address and port, so that a second name of an nsqd
does not hide a loop. If its HTTP API does not answer, its TCP address is used.
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
from nsqtools.client.options import LARGEST_SIZE
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
from nsqtools.records.units import parse_regexp

log = logging.getLogger("nsqtools")

MAX_MESSAGES = 1000  # per MPUB: an outcome covers all of them, and a refused MPUB is split
# Below the window of a producer, whose `submit` would block the thread that touches messages.
WINDOW_BYTES = 3 << 20

T = TypeVar("T")


class NsqSink:
    """Publish to one or several nsqd.

    ``key`` is the encoder of the template for mode ``hash``. ``nsqds`` are the addresses at the
    start. Raises as `nsqd_addresses` and `check_key` do, and `ConfigurationError` for an invalid
    address.
    """

    def __init__(
        self,
        destination: ConnectionSettings,
        *,
        mode: ForwardMode = ForwardMode.ROUND_ROBIN,
        key: Callable[..., bytes] | None = None,
    ) -> None:
        check_key(key, is_hash=mode is ForwardMode.HASH)
        # The forwarder limits the bytes under way; `submit` must not block. The destination decides
        # whether a message is too large.
        self._options = options = destination.client_options(
            max_outstanding=100_000, publish_max_msg_size=LARGEST_SIZE
        )
        self._key = key
        self.nsqds = nsqd_addresses(destination)
        if self._key is not None:  # one producer for each nsqd, which fails over to the next
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
        """Return one part for each nsqd and MPUB."""
        max_bytes = self._options.publish_max_body_size - mpub_size(())
        groups = [parcel] if self._key is None else parcel.grouped(self._index).values()
        return [
            part for group in groups for part in group.sized(MAX_MESSAGES, max_bytes, SIZE_BYTES)
        ]

    def _index(self, message: Message, body: bytes) -> int:
        return hash_slot(message, self._key, len(self._producers)) if self._key else 0

    def submit(self, parcel: Parcel, report: Report) -> None:
        """Publish one part."""

        def ended(error: PublishError | None) -> None:
            report([parcel], outcome_of(error))

        producer = self._producers[self._index(parcel.messages[0], parcel.bodies[0])]
        try:
            producer.submit(parcel.topic, parcel.bodies, on_settled=lambda p: ended(p.error))
        except PublishError as exc:
            ended(exc)

    def check(self) -> None:
        """Do nothing: producers report errors per message."""

    def stop(self, timeout_s: float) -> None:
        """Wait for publishes under way, then close the connections."""
        until = time.monotonic() + timeout_s
        for producer in self._producers:
            producer.stop(max(0.1, until - time.monotonic()))


def outcome_of(error: PublishError | None) -> Outcome:
    """Return the outcome of a publish."""
    if error is None:
        return DELIVERED
    if isinstance(error, PublishUnknown):
        return Outcome(Fate.UNKNOWN, str(error), may_split=is_stored_in_part(error))
    if isinstance(error, PublishInvalid) or may_split(error):
        return Outcome(Fate.REFUSED, str(error), may_split=True)
    # Not sent, or nsqd cannot store it now, or it refuses this client. An operator can fix these,
    # so they are no reason for dead letters.
    return Outcome(Fate.UNREACHABLE, str(error))


# -- names at the destination ----------------------------------------------------------------------


def parse_rule(text: str) -> tuple[re.Pattern[str], str]:
    r"""Read ``REGEX=NAME``, where NAME may refer to groups: ``eu\.(.*)=\1``.

    Raises `ConfigurationError`.
    """
    pattern, equals, name = text.rpartition("=")
    if not (pattern and equals and name):
        raise ConfigurationError(f"--map {text!r} is not REGEX=NAME, such as 'eu\\.(.*)=\\1'")
    try:
        compiled = parse_regexp(pattern)
        compiled.sub(name, "")  # reads the name, whether or not the pattern matches
    except (ValueError, IndexError, re.error) as exc:
        raise ConfigurationError(f"--map {text!r} cannot rename: {exc}") from None
    return compiled, name


def renamer(destination: str | None, texts: Sequence[str]) -> Callable[[str], str]:
    """Return the function from a topic to its name at the destination.

    That is ``destination`` if there is one, or the name of the first rule that matches the whole
    topic, or the same name. The function raises `ConfigurationError` for an invalid name.

    Raises `ConfigurationError` for a destination together with rules, and for an invalid rule.
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

PublishTarget = tuple[str, str]  # the name of an nsqd, and a topic
# Stats are reused for this long: a pattern may add many topics at the same moment, and each query
# of a daemon that hangs delays the forwarder.
LOOK_S = 5.0


@dataclass(slots=True)
class LoopGuard:
    """Refuse topics whose messages would return to them.

    ``rename`` returns the name of a topic at the destination. The stats of the daemons are up to
    `LOOK_S` old; the topics that this forwarder has started since are in ``_checked``.
    """

    source: ConnectionSettings
    destination: ConnectionSettings
    rename: Callable[[str], str]
    _next_query_s: float = 0.0
    _sources: Collection[str] = ()  # the names of nsqd
    _places: Collection[str] = ()
    # of other forwarders
    _edges: dict[PublishTarget, set[PublishTarget]] = field(default_factory=dict)
    _checked: set[str] = field(default_factory=set)  # topics

    def user_agent(self, topic: str) -> str:
        """Return the user agent of a consumer of the topic, which contains its edge."""
        places = " ".join(self._places or self.destination.nsqd_tcp_addresses)
        return f"nsqtools/{__version__} (to-nsq {self.rename(topic)} at {places})"

    def check(self, topic: str) -> None:
        """Raise `ConfigurationError` if messages of the topic would return to it."""
        target = self.rename(topic)
        if target == topic:
            same = {*self.source.nsqd_tcp_addresses} & {*self.destination.nsqd_tcp_addresses}
            if same:
                raise self._refusal(topic, target, sorted(same)[0])
        if time.monotonic() >= self._next_query_s:
            self._query_edges()
            self._next_query_s = time.monotonic() + LOOK_S
        reached = [(name, target) for name in self._places]
        seen = set(reached)
        while reached:
            name, next_topic = reached.pop()
            if name in self._sources:
                if next_topic == topic:
                    raise self._refusal(topic, target, name)
                if next_topic in self._checked:
                    reached += {(place, self.rename(next_topic)) for place in self._places} - seen
            reached += self._edges.get((name, next_topic), set()) - seen
            seen.update(reached)
        self._checked.add(topic)

    def _query_edges(self) -> None:
        self._sources, self._edges = (), {}
        try:
            with open_cluster(self.source) as cluster:
                self._sources = _by_name(cluster, lambda client: None)
            with open_cluster(self.destination) as cluster:
                stats_by_name = _by_name(cluster, lambda client: client.stats(clients=True))
        except NsqError as exc:
            log.info("cannot check for loops: %s", exc)
            return
        self._places = tuple(stats_by_name)
        for name, stats in stats_by_name.items():
            for row in consumers_of(NodeReport(name, 0.0, stats)):
                if edge := _EDGE.search(row.client.user_agent):
                    places = {(place, edge["topic"]) for place in edge["places"].split()}
                    self._edges.setdefault((name, row.topic), set()).update(places)

    def _refusal(self, topic: str, target: str, name: str) -> ConfigurationError:
        to = f" to {target}" if target != topic else ""
        return ConfigurationError(
            f"cannot forward topic {topic}{to}: its messages would return to {name}",
            hint="Give another --destination-topic or --map, or allow it with --no-loop-guard.",
        )


def _by_name(cluster: Cluster, query: Callable[[NsqdHTTPClient], T]) -> dict[str, T]:
    """Query every nsqd of a cluster; return the results of those that answer, by identity."""

    def ask(client: NsqdHTTPClient) -> tuple[str, T]:
        info = client.info()
        name = f"{info.get('hostname')}/{info['broadcast_address']}:{info['tcp_port']}"
        return name, query(client)

    answers, failures = cluster.ask_nsqds(ask, required=False)
    for failure in failures:
        log.info("cannot check %s for loops: %s", failure.address, failure.error)
    return dict(answers.values())
