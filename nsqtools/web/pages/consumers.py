"""Consumers: who is connected to which channel, with the rates between two answers of nsqd.

A consumer is what nsqd calls a client: one connection. Programs connect to every nsqd, so the list
of all joins the connections that have one host name and one client id.
"""

from __future__ import annotations

import time
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass

from starlette.requests import Request

from nsqtools.cluster.directory import ClusterStats
from nsqtools.cluster.queue_rows import ConsumerMeter, ConsumerRow
from nsqtools.cluster.stats_documents import CONSUMER_NUMBERS
from nsqtools.errors import NotFoundError
from nsqtools.protocol.names import is_valid_name
from nsqtools.web.pages.site import Site, Values, as_asked
from nsqtools.web.pages.snapshot import page_number, page_of


@dataclass(frozen=True, slots=True)
class Connections:
    """All connections of some channels at a moment, and the meters of their rates by nsqd."""

    stats: ClusterStats
    each: tuple[ConsumerRow, ...]
    meters: Mapping[str, ConsumerMeter]


@dataclass(frozen=True, slots=True)
class Program:
    """All connections of one host name and client id."""

    hostname: str
    client_id: str
    connections: tuple[ConsumerRow, ...]

    @property
    def channels(self) -> list[tuple[str, str]]:
        return sorted({(each.topic, each.channel) for each in self.connections})

    @property
    def agents(self) -> list[str]:
        return sorted({each.client.user_agent for each in self.connections} - {""})

    @property
    def numbers(self) -> dict[str, int]:
        """The counts of its connections together, by the names that they have everywhere."""
        clients = [each.client for each in self.connections]
        return {
            name: sum(getattr(client, theirs) for client in clients)
            for name, theirs in CONSUMER_NUMBERS.items()
        }

    @property
    def finish(self) -> float | None:
        known = [each.finish for each in self.connections if each.finish is not None]
        return sum(known) if known else None


def connections_of(stats: ClusterStats, before: Connections | None) -> Connections:
    """Return the connections in some statistics, with rates since ``before``."""
    if before is not None and before.stats is stats:
        return before
    known = before.meters if before else {}
    meters = {node.address: known.get(node.address, ConsumerMeter(0.0)) for node in stats.nodes}
    found = (
        row
        for node in stats.nodes
        for row in meters[node.address].measure(node.address, node.at_s, node.stats)
    )
    return Connections(stats, tuple(found), meters)


def programs_of(connections: Iterable[ConsumerRow], text: str = "") -> list[Program]:
    """Join connections to programs, the busiest first; those that have all words of the text."""
    words = text.casefold().split()
    groups: dict[tuple[str, str], list[ConsumerRow]] = {}
    for each in connections:
        groups.setdefault((each.client.hostname, each.client.client_id), []).append(each)
    found = [Program(*name, tuple(group)) for name, group in sorted(groups.items())]
    found = [each for each in found if _has(each, words)]
    found.sort(key=lambda each: -each.numbers["in_flight"])
    return found


def _has(program: Program, words: Sequence[str]) -> bool:
    said = " ".join(
        [
            program.hostname,
            program.client_id,
            *program.agents,
            *(f"{topic}/{channel}" for topic, channel in program.channels),
        ]
    ).casefold()
    return all(word in said for word in words)


MAX_CONNECTIONS = 100


def connections(site: Site, topic: str = "", channel: str = "") -> Connections:
    """Return who is connected to a channel, or to any: answers are shared for a moment."""
    # a name that is none cannot be asked for
    asked = (topic, channel) if is_valid_name(topic) and is_valid_name(channel) else ("", "")

    def ask(before: Connections | None) -> Connections:
        context = site.context
        nsqds = context.watcher.answering
        stats = context.cluster.stats(*asked, clients=True, required=False, nsqds=nsqds)
        return connections_of(stats, before)

    return site.recent(("consumers", *asked), ask)


def show_consumers(site: Site, request: Request) -> Values:
    """Return the values of the list of consumers."""
    text = request.query_params.get("q", "")[:200]
    programs = programs_of(connections(site).each, text)
    return site.frame(
        request,
        "consumers.html",
        "Consumers",
        "Consumers",
        text=text,
        lines=page_of(programs, page_number(request.query_params)),
        connected=sum(len(each.connections) for each in programs),
        page_address=lambda page: site.to.page("/consumers", q=text, page=f"{page}"),
    )


def show_consumer(site: Site, request: Request) -> Values:
    """Return the values of one program's page. Raises `NotFoundError`."""
    hostname = request.query_params.get("hostname", "")
    client_id = request.query_params.get("client_id", "")
    for program in programs_of(connections(site).each):
        if (as_asked(program.hostname), as_asked(program.client_id)) == (hostname, client_id):
            break
    else:
        raise NotFoundError(
            f"no consumer {client_id} of host {hostname} is connected",
            hint="It may have gone, or come back under another name.",
        )
    return site.frame(
        request,
        "consumer.html",
        "Consumers",
        client_id or hostname or "consumer",
        program=program,
        connections=[(each, _fields(each)) for each in program.connections[:MAX_CONNECTIONS]],
        now_s=time.time(),
    )


def _fields(connection: ConsumerRow) -> list[tuple[str, str]]:
    """Return all that nsqd says of a connection, for readers who know its field names."""
    return [
        (name, str(value) if not isinstance(value, bool) else ("yes" if value else "no"))
        for name, value in asdict(connection.client).items()
        if name not in ("pub_counts", "state") and value != ""
    ]
