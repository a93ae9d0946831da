"""The pages of queues and nodes: the overview, a topic, a channel, all nsqd, one, nsqlookupd."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

from starlette.requests import Request

from nsqtools.cluster.directory import DaemonFailure
from nsqtools.cluster.inventory import NodeStatus, list_nodes
from nsqtools.cluster.problems import gone_text
from nsqtools.cluster.queue_rows import QueueRow, sums_of
from nsqtools.cluster.topics import all_of
from nsqtools.errors import NotFoundError, NsqError
from nsqtools.http.http_api import KnownNode, NsqlookupdHTTPClient
from nsqtools.protocol.names import is_valid_name
from nsqtools.protocol.stats import NsqdStats, read_stats
from nsqtools.web.pages.consumers import Connections, connections_of
from nsqtools.web.pages.figures import Spark, trend
from nsqtools.web.pages.site import Recent, Site, Values, as_asked
from nsqtools.web.pages.snapshot import (
    SHOWN,
    SORTS,
    QueueQuery,
    Snapshot,
    lines_of,
    page_number,
    read_query,
)

MAX_CONSUMERS = 200


class QueuePages:
    """Makes the values of both pages."""

    def __init__(self, site: Site, recent: Recent[Connections]) -> None:
        self._site = site
        self._recent = recent

    def topic(self, request: Request) -> Values:
        """Return the values of a topic's page. Raises `NotFoundError`."""
        snapshot, row = self._row(request)
        topic = row.topic
        channels = snapshot.channels(topic)
        return self._site.frame(
            request,
            "topic.html",
            "Queues",
            topic,
            topic=topic,
            row=row,
            snapshot=snapshot,
            problems=snapshot.problems_of_queue(topic),
            charts=self._site.charts(request, row.key),
            sums=sums_of([row, *channels]),
            channels=[(each, depth_trend(self._site, each)) for each in channels],
            nodes=snapshot.on_nodes(topic),
            can_tombstone=bool(self._site.context.cluster.lookupds),
        )

    def channel(self, request: Request) -> Values:
        """Return the values of a channel's page. Raises `NotFoundError`."""
        snapshot, row = self._row(request)
        topic, channel = row.topic, row.channel
        found = self.connections(topic, channel)
        mine = [each for each in found.each if (each.topic, each.channel) == (topic, channel)]
        mine.sort(key=lambda each: (each.client.hostname, each.client.client_id, each.id))
        return self._site.frame(
            request,
            "channel.html",
            "Queues",
            f"{topic}/{channel}",
            topic=topic,
            channel=channel,
            row=row,
            snapshot=snapshot,
            problems=snapshot.problems_of_queue(topic, channel),
            charts=self._site.charts(request, row.key),
            nodes=snapshot.on_nodes(topic, channel),
            consumers=mine[:MAX_CONSUMERS],
            consumer_count=len(mine),
            now_s=time.time(),
        )

    def queue(self, request: Request) -> Values:
        """Return the values of a topic's or channel's page whose names are in the query."""
        return self.channel(request) if _named(request, "channel") else self.topic(request)

    def connections(self, topic: str = "", channel: str = "") -> Connections:
        """Return who is connected to a channel, or to any: answers are shared for a moment."""

        # a name that is none cannot be asked for
        asked = (topic, channel) if is_valid_name(topic) and is_valid_name(channel) else ("", "")

        def ask(before: Connections | None) -> Connections:
            return connections_of(self._site.context.watcher.consumers(*asked), before)

        return self._recent.get(asked, ask)

    def _row(self, request: Request) -> tuple[Snapshot, QueueRow]:
        """Return the queue that a request names. Raises `NotFoundError`."""
        topic, channel = _named(request, "topic"), _named(request, "channel")
        snapshot = self._site.snapshot()
        row = snapshot.queue(topic, channel) if snapshot else None
        if snapshot is not None and row is None:
            asked = topic, channel
            row = next(
                (
                    each
                    for each in snapshot.totals
                    if (as_asked(each.topic), as_asked(each.channel)) == asked
                ),
                None,
            )
        if snapshot is None or row is None:
            what = f"channel {topic}/{channel}" if channel else f"topic {topic}"
            gone = len(snapshot.gone) if snapshot else 0
            hint = "It may have been deleted, or the next sample shows it."
            if gone:
                hint = f"It may be on one of the {gone} nsqd that are gone, or have been deleted."
            raise NotFoundError(f"no nsqd that answers has the {what}", hint=hint)
        return snapshot, row


def _named(request: Request, name: str) -> str:
    found: str = request.path_params.get(name) or request.query_params.get(name, "")
    return found


def depth_trend(site: Site, row: QueueRow) -> Spark:
    """Return the depth of a queue in the last two minutes."""
    return trend(site.context.history, row.key, "depth")


EVERYTHING = ("", "", "")


def overview(site: Site, request: Request) -> Values:
    """Return the values of the page of all queues."""
    query = read_query(request.query_params)
    snapshot = site.snapshot()
    totals = snapshot.totals if snapshot else []
    lines = lines_of(totals, query, snapshot.growth if snapshot else {})
    history = site.context.history
    words = query.text.casefold().split()
    nodes = (
        []
        if not words or not snapshot
        else [node for node in snapshot.reports if all(word in node.casefold() for word in words)]
    )
    return site.frame(
        request,
        "overview.html",
        "Queues",
        "Queues",
        search=query.text,
        snapshot=snapshot,
        cluster=snapshot.sums if snapshot else sums_of([]),
        trends={
            name: trend(history, EVERYTHING, name)
            for name in ("depth", "in_flight", "ingress", "finish", "requeue")
        },
        problems=snapshot.problems if snapshot else [],
        query=query,
        filters=[
            (name, label, lines.counts[name], query.address(show=name, page=1))
            for name, (label, _) in SHOWN.items()
        ],
        sorts=_sorts(query),
        matching_nodes=nodes[:20],
        rows=[(row, depth_trend(site, row)) for row in lines.rows],
        lines=lines,
        page_address=lambda page: query.address(page=page),
    )


def _sorts(query: QueueQuery) -> dict[str, dict[str, Any]]:
    headings = {"name": "Topic / channel"} | {name: head for name, (head, _) in SORTS.items()}
    made = {}
    for name, heading in headings.items():
        is_sorted = query.sort == name
        # names begin with a, numbers with the largest
        turned = not query.is_ascending if is_sorted else name == "name"
        state = ("ascending" if query.is_ascending else "descending") if is_sorted else "none"
        address = query.address(sort=name, order="asc" if turned else "desc", page=1)
        made[name] = {"heading": heading, "state": state, "address": address}
    return made


MAX_INACTIVE = 200


@dataclass(frozen=True, slots=True)
class Directory:
    """What the nsqlookupd say. ``nodes`` and ``topics`` go by address."""

    nodes: dict[str, list[KnownNode]]
    topics: dict[str, list[str]]
    failures: tuple[DaemonFailure, ...]


class NodePages:
    """Makes the values of these pages."""

    def __init__(self, site: Site, keep_s: Callable[[], float]) -> None:
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
        lines = lines_of(here, QueueQuery(page=page_number(request.query_params)))
        return self._site.frame(
            request,
            "node.html",
            "Nodes",
            asked,
            status=status,
            stats=stats,
            error=error,
            sums=sums_of(here),
            charts=self._site.charts(request, (asked, "", "")),
            lines=lines,
            page_address=lambda page: self._site.to.page("/nodes", node=asked, page=f"{page}"),
            others=[node.address for node in nodes if node.address != asked and not node.error],
            now_s=time.time(),
        )

    def lookup(self, request: Request) -> Values:
        """Return the values of the page of nsqlookupd."""
        cluster, snapshot = self._site.context.cluster, self._site.snapshot()
        directory = self._directory.get("", lambda _: self._ask())
        present = {row.topic for row in snapshot.totals} if snapshot else set()
        inactive = sorted(all_of(directory.topics) - present)
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
