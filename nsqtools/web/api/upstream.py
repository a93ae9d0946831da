"""What the nsqd of a cluster say, under the names that they announce, for the API."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from nsqtools.cluster.directory import Cluster, DaemonFailure
from nsqtools.errors import NsqError
from nsqtools.http.nsqd_http import NsqdHTTPClient
from nsqtools.protocol.stats import TopicStats, read_stats
from nsqtools.web.api.documents import Nsqd


class UpstreamError(Exception):
    """Nobody answered; the text is nsqadmin's."""


@dataclass(frozen=True, slots=True)
class Gathered:
    """The nsqd that answered, by host and name, and who did not."""

    nsqds: tuple[Nsqd, ...]
    failures: tuple[DaemonFailure, ...]

    @property
    def message(self) -> str:
        """What the answer has under ``message``."""
        return warning([failure.error for failure in self.failures])

    def having(self, topic: str) -> list[tuple[Nsqd, TopicStats]]:
        """The nsqd that have a topic, with it."""
        return [
            (nsqd, each)
            for nsqd in self.nsqds
            for each in nsqd.stats.topics or ()
            if each.topic_name == topic
        ]


def warning(errors: Sequence[NsqError]) -> str:
    """Return the text for errors of some daemons, "" without any."""
    return "WARNING: " + "\n".join(map(str, errors)) if errors else ""


def upstream_error(cluster: Cluster, failures: Sequence[DaemonFailure]) -> UpstreamError:
    """Return the error for nobody that answered."""
    texts = ", ".join(str(failure.error) for failure in failures)
    lookupds = [failure for failure in failures if failure.address in cluster.lookupds]
    kind = "nsqlookupd" if lookupds and len(lookupds) == len(cluster.lookupds) else "nsqd"
    return UpstreamError(f"UPSTREAM_ERROR: failed to query any {kind}: {texts}")


def gather(
    cluster: Cluster, topic: str = "", channel: str = "", *, clients: bool = False
) -> Gathered:
    """Ask every nsqd for its statistics. Raises `UpstreamError`."""
    known, failures = cluster.known_nodes()
    entries: dict[str, dict[str, Any]] = {}
    for lookupd, nodes in known.items():
        for entry in nodes:
            entries.setdefault(str(entry.node.http), {})[lookupd] = entry
    nsqds, impostors = cluster.nsqds_among(entry.node for each in known.values() for entry in each)
    names = {nsqd.address: nsqd.announced for nsqd in nsqds}

    def ask(client: NsqdHTTPClient) -> tuple[Any, dict[str, Any]]:
        stats = read_stats(client.stats(topic, channel, clients=clients))
        is_known = any(names[at] in entries for at in names if nsqd_clients[at] is client)
        return stats, {} if is_known else client.info()

    nsqd_clients = {nsqd.address: nsqd.client for nsqd in nsqds}
    answers, failed = cluster.ask(nsqd_clients, ask)
    failures = [*failures, *impostors, *failed]
    if failures and not answers:
        raise upstream_error(cluster, failures)
    found = []
    for address, (stats, info) in answers.items():
        registered = entries.get(names[address], {})
        first = next(iter(registered.values()), None)
        name = names[address] or f"{info.get('broadcast_address')}:{info.get('http_port')}"
        hostname = first.hostname if first else str(info.get("hostname", ""))
        found.append(Nsqd(name, hostname, stats, registered, info))
    found.sort(key=lambda nsqd: (nsqd.hostname, nsqd.name))
    return Gathered(tuple(found), tuple(failures))


def now_s() -> float:
    """Return the wall clock."""
    return time.time()
