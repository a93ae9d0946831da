"""See that no message comes back to where it was: a mirror that feeds itself fills both disks.

NSQ's messages carry nothing but a body, and the body is not ours to change. So the guard knows the
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
from collections.abc import Callable, Mapping

from nsqtools import __version__
from nsqtools.client.connection_settings import ConnectionSettings
from nsqtools.cluster.directory import Cluster, open_cluster
from nsqtools.errors import ConfigurationError, NsqError
from nsqtools.http.http_api import NsqdHTTPClient
from nsqtools.protocol.stats import read_stats

log = logging.getLogger("nsqtools")

_EDGE = re.compile(r"\(to-nsq (?P<topic>\S+) at (?P<places>[^)]*)\)")

Place = tuple[str, str]  # the name of an nsqd, and a topic


class LoopGuard:
    """Knows where messages go. ``rename`` gives the topic's name at the destination."""

    def __init__(
        self,
        source: ConnectionSettings,
        destination: ConnectionSettings,
        rename: Callable[[str], str],
    ) -> None:
        self._source = source
        self._destination = destination
        self._rename = rename
        self._places: tuple[str, ...] = ()

    def user_agent(self, topic: str) -> str:
        """Return what a consumer of the topic says that it is."""
        places = " ".join(self._places or self._destination.nsqd_tcp_addresses)
        return f"nsqtools/{__version__} (to-nsq {self._rename(topic)} at {places})"

    def check(self, topic: str) -> None:
        """Raise `ConfigurationError` when what is forwarded from the topic would return to it."""
        target = self._rename(topic)
        if target == topic:
            same = {*self._source.nsqd_tcp_addresses} & {*self._destination.nsqd_tcp_addresses}
            if same:
                raise self._refusal(topic, target, sorted(same)[0])
        try:
            with open_cluster(self._source) as cluster:
                sources = set(_names(cluster))
            with open_cluster(self._destination) as cluster:
                names = _names(cluster)
                self._places = tuple(names)
                edges = _edges(names)
        except NsqError as exc:
            log.info("cannot check for loops: %s", exc)
            return
        reached = [(name, target) for name in names]
        seen = set(reached)
        while reached:
            name, there = reached.pop()
            if there == topic and name in sources:
                raise self._refusal(topic, target, name)
            for place in edges.get((name, there), ()):
                if place not in seen:
                    seen.add(place)
                    reached.append(place)

    def _refusal(self, topic: str, target: str, name: str) -> ConfigurationError:
        to = f"to {target} " if target != topic else ""
        return ConfigurationError(
            f"topic {topic} is not forwarded {to}there: its messages would come back to {name}",
            hint="Give another --destination-topic or --map, or allow it with --no-loop-guard.",
        )


def _names(cluster: Cluster) -> dict[str, NsqdHTTPClient]:
    """The nsqd of a cluster that answer, by the names that they are known by."""
    nsqds, failures = cluster.nsqds()
    answers, failed = cluster.ask(
        {nsqd.address: nsqd.client for nsqd in nsqds}, lambda client: (client, client.info())
    )
    for failure in [*failures, *failed]:
        log.info("cannot check %s for loops: %s", failure.address, failure.error)
    return {
        f"{info.get('hostname')}/{info.get('broadcast_address')}:{info['tcp_port']}": client
        for client, info in answers.values()
    }


def _edges(nsqds: Mapping[str, NsqdHTTPClient]) -> dict[Place, set[Place]]:
    """What other forwarders take from these nsqd, and where they say that they bring it."""
    edges: dict[Place, set[Place]] = {}
    for name, nsqd in nsqds.items():
        for topic in read_stats(nsqd.stats(clients=True)).topics or ():
            for channel in topic.channels:
                for client in channel.clients or ():
                    if edge := _EDGE.search(client.user_agent):
                        places = {(place, edge["topic"]) for place in edge["places"].split()}
                        edges.setdefault((name, topic.topic_name), set()).update(places)
    return edges
