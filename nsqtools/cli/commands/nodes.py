"""``nsq nodes``, ``nsq lookup``, ``nsq ping`` and ``nsq info``: the daemons of a cluster."""

from __future__ import annotations

from dataclasses import asdict

from nsqtools.cli.options.cluster_connection import ClusterConnection
from nsqtools.cli.options.params import Json
from nsqtools.cli.render.listing import tell_left_out
from nsqtools.cli.render.output import write_json, write_listing
from nsqtools.cli.running.administering import OneTopic
from nsqtools.cli.running.ends import ExitStatus
from nsqtools.cli.running.runtime import Session

NODES = ("node", "nsqd", "hostname", "version", "topics", "tombstoned", "lookupds", "state")
INFO = ("node", "version", "hostname", "broadcast_address", "tcp_port", "http_port", "start_time")
LATEST_S = 253_402_300_800  # the year 10000, which no date has


def nodes(json: Json = False, *, cluster: ClusterConnection, runtime: Session) -> int:
    """List every nsqd: version, topics, tombstones, and whether it answers.

    The exit status is 6 when one does not.

    Examples:
        nsq nodes --lookupd-http-address lookup-1:4161 --lookupd-http-address lookup-2:4161
        nsq nodes --json | jq -r '.[] | select(.error != "") | .address'
    """
    from nsqtools.cluster.nodes import list_nodes

    with cluster.open() as opened:
        found, failures = list_nodes(opened)
    if json:
        write_json(runtime, [asdict(node) for node in found], indent=2)
    else:
        rows = [
            (
                *(node.address, node.tcp_address or None, node.hostname or None),
                *(node.version or None, node.topics, len(node.tombstoned), len(node.lookupds)),
                node.error or "ok",
            )
            for node in found
        ]
        optional = ("lookupds", "hostname", "tombstoned", "version", "topics")
        write_listing(runtime, NODES, rows, json=False, optional=optional)
    status = tell_left_out(failures, runtime)
    return ExitStatus.PARTLY_DONE if any(node.error for node in found) else status


def lookup(
    topic: OneTopic, json: Json = False, *, cluster: ClusterConnection, runtime: Session
) -> int:
    """Show which nsqd have a topic, as nsqlookupd tells consumers.

    Examples:
        nsq lookup clicks --lookupd-http-address lookup:4161
        nsq lookup clicks --json | jq -r '.nodes[].nsqd'
    """
    from nsqtools.cluster.name_patterns import on_no_nsqd
    from nsqtools.cluster.nodes import lookup_topic

    with cluster.open() as opened:
        where = lookup_topic(opened, topic)
    if not where.nodes:
        runtime.tell(f"nsq: {on_no_nsqd(topic)}")
    if json:
        found = [
            {"nsqd": tcp, "node": http, "lookupds": list(lookupds)}
            for tcp, http, lookupds in where.nodes
        ]
        document = {"topic": topic, "channels": list(where.channels), "nodes": found}
        write_json(runtime, document, indent=2)
    else:
        rows = [(tcp, http, len(lookupds)) for tcp, http, lookupds in where.nodes]
        write_listing(runtime, ("nsqd", "node", "lookupds"), rows, json=False)
    return tell_left_out(where.failures, runtime)


def ping(json: Json = False, *, cluster: ClusterConnection, runtime: Session) -> int:
    """Check the health of every daemon.

    The exit status is 4 when none answers, 6 when some do not.

    Examples:
        nsq ping
        nsq ping --lookupd-http-address lookup:4161
    """
    from nsqtools.cluster.nodes import ping as ping_all

    with cluster.open() as opened:
        pongs = ping_all(opened)
    if json:
        write_json(runtime, [asdict(pong) for pong in pongs], indent=2)
    else:
        rows = [
            (
                *(pong.daemon, pong.address),
                None if pong.elapsed_s is None else pong.elapsed_s * 1000,
                pong.error or "ok",
            )
            for pong in pongs
        ]
        write_listing(runtime, ("daemon", "address", "ms", "state"), rows, json=False)
    if all(not pong.error for pong in pongs):
        return ExitStatus.DONE
    all_dead = all(pong.error for pong in pongs)
    return ExitStatus.UNREACHABLE if all_dead else ExitStatus.PARTLY_DONE


def info(json: Json = False, *, cluster: ClusterConnection, runtime: Session) -> int:
    """Show version, addresses and limits of every nsqd.

    Examples:
        nsq info
        nsq info --nsqd-http-address nsqd-1:4151 --json
    """
    from nsqtools.http.nsqd_http import NsqdHTTPClient

    with cluster.open() as opened:
        answers, failures = opened.ask_nsqds(NsqdHTTPClient.info)
    documents = [{"node": address, **answer} for address, answer in answers.items()]
    if json:
        write_json(runtime, documents, indent=2)
    else:
        rows = [
            [*(document.get(column) for column in INFO[:-1]), moment(document.get("start_time"))]
            for document in documents
        ]
        optional = ("start_time", "hostname", "broadcast_address")
        write_listing(runtime, INFO, rows, json=False, optional=optional)
    return tell_left_out(failures, runtime)


def moment(epoch_s: object) -> str | None:
    """The time in seconds since 1970 as people read it; None for what is not a time."""
    from datetime import UTC, datetime

    if not isinstance(epoch_s, int) or not 0 <= epoch_s < LATEST_S:
        return None
    return datetime.fromtimestamp(epoch_s, UTC).strftime("%Y-%m-%dT%H:%M:%SZ")
