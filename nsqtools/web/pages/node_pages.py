"""The pages of nsqd, one and all, and of nsqlookupd with what is registered there."""

from __future__ import annotations

import time
from dataclasses import dataclass, replace

from starlette.requests import Request

from nsqtools.cluster.directory import DaemonFailure
from nsqtools.cluster.inventory import NodeStatus, list_nodes
from nsqtools.errors import NotFoundError, NsqError
from nsqtools.http.http_api import KnownNode, NsqlookupdHTTPClient
from nsqtools.protocol.stats import NsqdStats, read_stats
from nsqtools.web.pages.figures import OF_NODES, trend
from nsqtools.web.pages.site import Recent, Site, Values
from nsqtools.web.pages.snapshot import gone_text, listed, sums_of

MAX_INACTIVE = 200
MAX_TOPICS = 200


@dataclass(frozen=True, slots=True)
class Directory:
    """What the nsqlookupd say. ``nodes`` and ``topics`` go by address."""

    nodes: dict[str, list[KnownNode]]
    topics: dict[str, list[str]]
    failures: tuple[DaemonFailure, ...]


class NodePages:
    """Makes the values of these pages."""

    def __init__(self, site: Site, keep_s: float) -> None:
        self._site = site
        self._statuses: Recent[tuple[list[NodeStatus], list[DaemonFailure]]] = Recent(keep_s)
        self._stats: Recent[NsqdStats] = Recent(keep_s)
        self._directory: Recent[Directory] = Recent(keep_s)

    def all(self, request: Request) -> Values:
        """Return the values of the list of nsqd."""
        cluster, snapshot = self._site.context.cluster, self._site.snapshot()
        nodes, failures = self._statuses.get("", lambda _: self._all())
        history = self._site.context.history
        return self._site.frame(
            request,
            "nodes.html",
            "Nodes",
            "Nodes",
            failures=failures,
            newest=max((node.version for node in nodes), default=""),
            lookupds=len(cluster.lookupds),
            nodes=[
                (
                    node,
                    sums_of(snapshot.of_node(node.address)) if snapshot else sums_of([]),
                    trend(history, (node.address, "", ""), "depth"),
                )
                for node in sorted(nodes, key=lambda node: node.address)
            ],
        )

    def one(self, request: Request) -> Values:
        """Return the values of an nsqd's page. Raises `NotFoundError`.

        Only an nsqd of the cluster is asked: an address that a request brings is not.
        """
        asked = request.path_params.get("node") or request.query_params.get("node", "")
        cluster, snapshot = self._site.context.cluster, self._site.snapshot()
        nodes, _ = self._statuses.get("", lambda _: self._all())
        status = next((node for node in nodes if node.address == asked), None)
        if status is None or snapshot is None:
            raise NotFoundError(
                f"no nsqd {asked} is in the cluster", hint="The list of nodes has all addresses."
            )
        stats, error = None, status.error
        try:
            if not error:
                stats = self._stats.get(
                    asked,
                    lambda _: read_stats(cluster.nsqd(asked).stats(clients=True, memory=True)),
                )
        except NsqError as exc:
            error = str(exc)
        here = snapshot.of_node(asked)
        rows = sorted(listed(here), key=lambda row: (-row.depth, row.topic, row.channel))
        return self._site.frame(
            request,
            "node.html",
            "Nodes",
            asked,
            status=status,
            stats=stats,
            error=error,
            sums=sums_of(here),
            point_key=(asked, "", ""),
            charts=self._site.charts(request, (asked, "", ""), OF_NODES),
            rows=rows[:MAX_TOPICS],
            row_count=len(rows),
            others=[node.address for node in nodes if node.address != asked and not node.error],
            now_s=time.time(),
        )

    def lookup(self, request: Request) -> Values:
        """Return the values of the page of nsqlookupd."""
        cluster, snapshot = self._site.context.cluster, self._site.snapshot()
        directory = self._directory.get("", lambda _: self._ask())
        present = {row.topic for row in snapshot.totals} if snapshot else set()
        registered = sorted({name for names in directory.topics.values() for name in names})
        inactive = [name for name in registered if name not in present]
        errors = {failure.address: str(failure.error) for failure in directory.failures}
        return self._site.frame(
            request,
            "lookup.html",
            "Lookup",
            "Lookup",
            lookupds=[
                (
                    address,
                    errors.get(address, ""),
                    directory.nodes.get(address),
                    directory.topics.get(address),
                )
                for address in sorted(cluster.lookupds)
            ],
            inactive=inactive[:MAX_INACTIVE],
            inactive_count=len(inactive),
        )

    def _all(self) -> tuple[list[NodeStatus], list[DaemonFailure]]:
        """Return every nsqd, those that are gone too, and who else does not answer."""
        context, snapshot = self._site.context, self._site.snapshot()
        nodes: list[NodeStatus] = []
        try:
            nodes, failures = list_nodes(context.cluster, context.watcher.answering)
        except NsqError as error:
            failures = [DaemonFailure("", error)]
        shown = {node.address: node for node in nodes}
        for address, state in (snapshot.gone if snapshot else {}).items():
            gone = NodeStatus(address, "", "", state.version, None, (), (), "no answer")
            node = shown.get(address, gone)
            if node.error:
                shown[address] = replace(node, error=f"gone {gone_text(state)}")
        return [*shown.values()], failures

    def _ask(self) -> Directory:
        cluster = self._site.context.cluster
        nodes, failures = cluster.known_nodes()
        topics, failed = cluster.ask(cluster.lookupds, NsqlookupdHTTPClient.topics)
        return Directory(nodes, topics, (*failures, *failed))
