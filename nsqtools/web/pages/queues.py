"""The pages of queues, nodes and consumers.

nsqd calls a consumer a client: one connection. A program connects to every nsqd, so the list of
programs groups connections by host name and client id. Rates are measured between two answers of
nsqd.
"""

from __future__ import annotations

import time
from collections.abc import Iterable
from dataclasses import asdict
from typing import Any, NamedTuple

from starlette.requests import Request

from nsqtools.cluster.directory import DaemonFailure
from nsqtools.cluster.inventory import NodeStatus, list_nodes
from nsqtools.cluster.problems import gone_text
from nsqtools.cluster.queue_rows import (
    ConsumerMeter,
    ConsumerRow,
    NodeReport,
    QueueRow,
    Sums,
    sums_of,
)
from nsqtools.cluster.stats_documents import CONSUMER_NUMBERS
from nsqtools.cluster.texts import format_utc
from nsqtools.cluster.topics import announced_topics, merge_names
from nsqtools.errors import NotFoundError, NsqError
from nsqtools.http.http_api import NsqlookupdHTTPClient
from nsqtools.protocol.names import is_valid_name
from nsqtools.protocol.stats import NsqdStats
from nsqtools.web.api import newest_version
from nsqtools.web.pages.site import PageValues, Site, sanitize_name
from nsqtools.web.pages.snapshot import (
    SHOWN,
    SORTS,
    QueueQuery,
    Snapshot,
    contains_words,
    page_number,
    page_of,
    page_of_queues,
    parse_query,
)

MAX_CONSUMERS = 200
FIELD_NAMES = {"connect_ts": "connected", "ready_count": "RDY", "tls": "TLS"}


def _named(request: Request, name: str) -> str:
    """Return a name that is in the path or in the query."""
    value: str = request.path_params.get(name) or request.query_params.get(name, "")
    return value


def show_queues(site: Site, request: Request) -> PageValues:
    """Return the values of the page of a topic or channel, or of the list of all queues.

    Raises `NotFoundError`.
    """
    topic, channel = _named(request, "topic"), _named(request, "channel")
    if not topic:
        return _overview(site, request)
    snapshot = site.snapshot()
    row = _row(snapshot, topic, channel)
    topic, channel = row.topic, row.channel
    values: PageValues = {
        "topic": topic,
        "channel": channel,
        "row": row,
        "problems": snapshot.problems_of_queue(topic, channel),
        "charts": site.charts(request, row.key),
        "nodes": snapshot.on_nodes(topic, channel),
    }
    if not channel:
        values["channels"] = snapshot.channels(topic)
        values["sums"] = sums_of([row, *values["channels"]])
        values["can_tombstone"] = bool(site.context.cluster.lookupds)
        return site.frame(request, "topic.html", topic, **values)
    rows = connections(site, topic, channel)
    consumers = [row for row in rows if (row.topic, row.channel) == (topic, channel)]
    consumers.sort(key=lambda row: (row.client.hostname, row.client.client_id, row.id))
    values |= {"consumers": consumers[:MAX_CONSUMERS], "consumer_count": len(consumers)}
    values["now_s"] = time.time()
    return site.frame(request, "channel.html", f"{topic}/{channel}", **values)


def _row(snapshot: Snapshot, topic: str, channel: str) -> QueueRow:
    """Return the queue that a request names. Raises `NotFoundError`."""
    if row := snapshot.queue(topic, channel):
        return row
    for total in snapshot.totals:
        if (sanitize_name(total.topic), sanitize_name(total.channel)) == (topic, channel):
            return total
    label = f"channel {topic}/{channel}" if channel else f"topic {topic}"
    hint = "It may have been deleted, or the next sample shows it."
    if nodes := ", ".join(row.node for row in snapshot.on_nodes(topic, channel)):
        hint = f"It was on {nodes}, which does not respond, when that was last seen."
    elif silent := ", ".join(snapshot.silent):
        hint = f"It may have been deleted, or be on {silent}, which does not respond."
    raise NotFoundError(f"no nsqd that answers has the {label}", hint=hint)


def _overview(site: Site, request: Request) -> PageValues:
    query = parse_query(request.query_params)
    snapshot = site.snapshot()
    lines = page_of_queues(snapshot.totals, query, snapshot.growth)
    nodes = [node for node in snapshot.reports if contains_words(node, query.text)]
    return site.frame(
        request,
        "overview.html",
        "Queues",
        search=query.text,
        query=query,
        filters=[
            (name, label, lines.counts[name], query.address(show=name, page=1))
            for name, (label, _) in SHOWN.items()
        ],
        sorts=_sorts(query),
        matching_nodes=nodes[:20] if query.text else [],
        lines=lines,
        page_address=lambda page: query.address(page=page),
    )


def _sorts(query: QueueQuery) -> dict[str, dict[str, Any]]:
    links = {}
    for name, heading in SORTS.items():
        is_sorted = query.sort == name
        # A click on the sorted column reverses it. By default names ascend and numbers descend.
        to_ascending = not query.is_ascending if is_sorted else name == "name"
        state = ("ascending" if query.is_ascending else "descending") if is_sorted else "none"
        address = query.address(sort=name, order="asc" if to_ascending else "desc", page=1)
        links[name] = {"heading": heading, "state": state, "address": address}
    return links


def show_nodes(site: Site, request: Request) -> PageValues:
    """Return the values of the list of nsqd, or of the page of the nsqd in the request.

    Raises `NotFoundError` for an unknown address, because only nsqd of the cluster are queried.
    """
    address = _named(request, "node")
    nodes, failures = site.recent("nodes", lambda _: _all_nodes(site))
    snapshot, cluster = site.snapshot(), site.context.cluster
    if not address:
        return site.frame(
            request,
            "nodes.html",
            "Nodes",
            failures=failures,
            newest=newest_version(node.version for node in nodes),
            lookupds=len(cluster.lookupds),
            nodes=[(node, _sums_of_node(snapshot, node.address)) for node in nodes],
        )
    status = next((node for node in nodes if node.address == address), None)
    if status is None:
        raise NotFoundError(
            f"no nsqd {address} is in the cluster", hint="The list of nodes shows all addresses."
        )

    def ask(_: NsqdStats | None) -> NsqdStats:
        return cluster.nsqd(address).stats(clients=True, memory=True)

    stats = None
    # An nsqd in the sample answers, even if its status has an error.
    error = "" if address in snapshot.reports else status.error
    try:
        stats = None if error else site.recent(("node", address), ask)
    except NsqError as exc:
        error = str(exc)
    rows = snapshot.of_node(address)
    return site.frame(
        request,
        "node.html",
        address,
        status=status,
        stats=stats,
        error=error,
        sums=_sums_of_node(snapshot, address),
        charts=site.charts(request, (address, "", "")),
        lines=page_of_queues(rows, QueueQuery(page=page_number(request.query_params))),
        page_address=lambda page: site.to.page("/nodes", node=address, page=f"{page}"),
        now_s=time.time(),
    )


def _sums_of_node(snapshot: Snapshot, address: str) -> Sums | None:
    """Return the sums of an nsqd, the last ones if it is gone, None if it was never sampled."""
    is_seen = address in snapshot.reports or address in snapshot.gone
    return sums_of(snapshot.of_node(address)) if is_seen else None


def _all_nodes(site: Site) -> tuple[list[NodeStatus], list[DaemonFailure]]:
    """Return every nsqd, including those that are gone, and the failures of other daemons."""
    context = site.context
    nodes: list[NodeStatus] = []
    try:
        nodes, failures = list_nodes(context.cluster)
    except NsqError as error:
        failures = [DaemonFailure("", error)]
    by_address = {node.address: node for node in nodes}
    snapshot = site.snapshot()
    for address, state in snapshot.gone.items():
        gone = NodeStatus(address, "", "", state.version, None, (), (), "no answer")
        node = by_address.get(address, gone)
        if node.error:
            by_address[address] = node._replace(error=gone_text(state, snapshot.sample.time_s))
    return sorted(by_address.values(), key=lambda node: node.address), failures


MAX_INACTIVE = 200


def show_lookup(site: Site, request: Request) -> PageValues:
    """Return the values of the page of nsqlookupd."""
    cluster = site.context.cluster

    def ask(_: Any) -> Any:
        return cluster.fetch_nodes(), cluster.ask(cluster.lookupds, NsqlookupdHTTPClient.topics)

    (known, failures), (topics, failed) = site.recent("lookup", ask)
    errors = {failure.address: str(failure.error) for failure in (*failures, *failed)}
    sampled = {row.topic for row in site.snapshot().totals}
    inactive = sorted(merge_names(topics) - sampled - announced_topics(known))
    return site.frame(
        request,
        "lookup.html",
        "Lookup",
        lookupds=[
            (address, errors.get(address, ""), known.get(address), topics.get(address))
            for address in sorted(cluster.lookupds)
        ],
        inactive=inactive[:MAX_INACTIVE],
        inactive_count=len(inactive),
    )


# -- consumers ------------------------------------------------------------------------------------


class Program(NamedTuple):
    """The connections with one host name and client id."""

    hostname: str
    client_id: str
    connections: tuple[ConsumerRow, ...]

    @property
    def channels(self) -> list[tuple[str, str]]:
        return sorted({(connection.topic, connection.channel) for connection in self.connections})

    @property
    def agents(self) -> list[str]:
        return sorted({connection.client.user_agent for connection in self.connections} - {""})

    @property
    def search_text(self) -> str:
        """The text that a search covers."""
        return " ".join([*self[:2], *self.agents, *map("/".join, self.channels)])

    @property
    def numbers(self) -> dict[str, int]:
        """The sums of the counts of its connections, by our names."""
        clients = [connection.client for connection in self.connections]
        return {
            name: sum(getattr(client, field) for client in clients)
            for name, field in CONSUMER_NUMBERS.items()
        }

    @property
    def finish(self) -> float | None:
        percentages = [
            connection.finish for connection in self.connections if connection.finish is not None
        ]
        return sum(percentages) if percentages else None


def programs_of(connections: Iterable[ConsumerRow], text: str = "") -> list[Program]:
    """Group connections to programs, and return the matching ones, the busiest first.

    A program matches if it has all words of ``text``.
    """
    groups: dict[tuple[str, str], list[ConsumerRow]] = {}
    for connection in connections:
        groups.setdefault((connection.client.hostname, connection.client.client_id), []).append(
            connection
        )
    programs = [Program(*name, tuple(group)) for name, group in sorted(groups.items())]
    programs = [program for program in programs if contains_words(program.search_text, text)]
    programs.sort(key=lambda program: -program.numbers["in_flight"])
    return programs


MAX_CONNECTIONS = 100

Connected = tuple[ConsumerMeter, list[ConsumerRow]]


def connections(site: Site, topic: str = "", channel: str = "") -> list[ConsumerRow]:
    """Return the connections to a channel, or to all channels. Answers are shared per sample."""
    # nsqd cannot be queried for an invalid name.
    queue = (topic, channel) if is_valid_name(topic) and is_valid_name(channel) else ("", "")

    def ask(previous: Connected | None) -> Connected:
        meter = previous[0] if previous else ConsumerMeter(0.0)
        answers, _ = site.context.cluster.ask_nsqds(
            lambda client: (time.monotonic(), client.stats(*queue, clients=True)),
            required=False,
            nsqds=site.context.cluster.remembered,
        )
        reports = (NodeReport(address, *answer) for address, answer in answers.items())
        return meter, meter.measure(*reports)

    return site.recent(("consumers", *queue), ask)[1]


def show_consumers(site: Site, request: Request) -> PageValues:
    """Return the values of the list of consumers."""
    text = request.query_params.get("q", "")[:200]
    programs = programs_of(connections(site), text)
    return site.frame(
        request,
        "consumers.html",
        "Consumers",
        text=text,
        lines=page_of(programs, page_number(request.query_params)),
        connected=sum(len(program.connections) for program in programs),
        page_address=lambda page: site.to.page("/consumers", q=text, page=f"{page}"),
    )


def show_consumer(site: Site, request: Request) -> PageValues:
    """Return the values of one program's page. Raises `NotFoundError`."""
    identity = hostname, client_id = _named(request, "hostname"), _named(request, "client_id")
    for program in programs_of(connections(site)):
        if (sanitize_name(program.hostname), sanitize_name(program.client_id)) == identity:
            break
    else:
        raise NotFoundError(
            f"no consumer {client_id} of host {hostname} is connected",
            hint="It may have disconnected, or reconnected under another name.",
        )
    return site.frame(
        request,
        "consumer.html",
        client_id or hostname or "consumer",
        program=program,
        connections=[
            (connection, _fields(connection))
            for connection in program.connections[:MAX_CONNECTIONS]
        ],
        now_s=time.time(),
    )


def _fields(connection: ConsumerRow) -> list[tuple[str, str]]:
    """Return all fields of a connection, by nsqd's names for them in words."""

    def text(name: str, value: Any) -> str:
        if isinstance(value, bool):
            return "yes" if value else "no"
        if name == "connect_ts":
            return format_utc(value)
        return f"{value:,}" if isinstance(value, int) else str(value)

    return [
        (FIELD_NAMES.get(name) or name.removesuffix("_count").replace("_", " "), text(name, value))
        for name, value in asdict(connection.client).items()
        if name not in ("pub_counts", "state") and value != ""
    ]
