"""``nsq nodes``, ``lookup``, ``ping``, ``info``, ``tombstone`` and ``drain``: the daemons."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

from typer import Argument, Context

from nsqtools.cli.options.connection import (
    AddressFlags,
    ClientFlags,
    LookupFlags,
    client_opt,
    effective_options,
)
from nsqtools.cli.options.params import DryRun, Json, Yes
from nsqtools.cli.options.publishing import DrainOptions
from nsqtools.cli.parsing.binding import OptionSet, Provided, opt, subset
from nsqtools.cli.render.outcomes import Progress, report_unreachable
from nsqtools.cli.render.output import FormKind, write_json, write_lines
from nsqtools.cli.running.administering import CHANGE_TIMEOUT_S, Changing, ClusterListing, OneTopic
from nsqtools.cli.running.runtime import (
    ExitStatus,
    Runtime,
    Session,
    hangup_signals,
    stop_on_signals,
)
from nsqtools.client.connection_settings import texts_of
from nsqtools.errors import ConnectionFailed
from nsqtools.protocol.text import counted, format_duration

if TYPE_CHECKING:
    from nsqtools.client.options import ClientOptions
    from nsqtools.cluster.drain import Move
    from nsqtools.cluster.inventory import NodeStatus
    from nsqtools.one_channel.channel_publisher import ChannelMove

NODES = ("node", "nsqd", "hostname", "version", "topics", "tombstoned", "lookupds", "state")
LIMITS = (
    "max_heartbeat_interval",
    "max_output_buffer_size",
    "max_output_buffer_timeout",
    "max_deflate_level",
)
ADDRESSES = ("broadcast_address", "tcp_port", "http_port", "start_time")
WIDE_NODES = (*NODES, *ADDRESSES, *LIMITS)
"""Columns of ``-o wide``; ``--columns`` can name them in any form."""
INFO = ("node", "version", "hostname", *ADDRESSES)
LOOKUP = ("nsqd", "node", "lookupds")
PING = ("daemon", "address", "latency_ms", "state")


def nodes(*, listing: ClusterListing) -> int:
    """List every nsqd: version, topics, tombstones, and whether it answers.

    With -o wide also its ports, start time and limits. The exit status is 6 when one does not
    answer.

    Examples:
        nsq nodes --lookupd-http-address lookup-1:4161 --lookupd-http-address lookup-2:4161
        nsq nodes -o wide
        nsq nodes --json | jq -r '.[] | select(.error) | .node'
    """
    from nsqtools.cluster.inventory import list_nodes

    form = listing.form
    with listing.open(WIDE_NODES) as cluster:
        nodes, failures = list_nodes(cluster)
    documents = [*map(node_document, nodes)]
    if form.is_document:
        write_json(listing.runtime, documents)
    else:
        for document in documents:
            for name in ("max_heartbeat_interval", "max_output_buffer_timeout"):
                document[name] = _interval_text(document[name])
        is_wide = form.kind is FormKind.wide or form.columns
        optional = ("lookupds", "hostname", "tombstoned", "version", "topics")
        listing.write_records(WIDE_NODES if is_wide else NODES, documents, optional)
    for node in nodes:
        if node.aliases:
            aliases = ", ".join(node.aliases)
            listing.runtime.info(f"nsq: {node.address} is one nsqd that is also at {aliases}")
    status = report_unreachable(failures, listing.runtime)
    return ExitStatus.PARTLY_DONE if any(node.error for node in nodes) else status


def _interval_text(interval_ns: object) -> object:
    """Return a duration as people write it. An answer of nsqd may contain any JSON value."""
    if isinstance(interval_ns, int) and 0 <= interval_ns < 1 << 63:
        return format_duration(interval_ns / 1e9)
    return interval_ns


def warn_of_deprecation(command: str, runtime: Runtime) -> None:
    """Name the successor of a deprecated command."""
    successors = {"info": "nsq nodes -o wide", "lookup": "nsq topic info"}
    runtime.info(f"nsq: warning: `nsq {command}` becomes `{successors[command]}` in 0.5")


def lookup(topic: OneTopic, *, listing: ClusterListing) -> int:
    """Show which nsqd have a topic, according to nsqlookupd.

    Examples:
        nsq lookup clicks --lookupd-http-address lookup:4161
        nsq lookup clicks --json | jq -r '.nodes[].nsqd'
    """
    from nsqtools.cluster.inventory import lookup_topic
    from nsqtools.cluster.topics import describe_registered_only

    warn_of_deprecation("lookup", listing.runtime)
    with listing.open(LOOKUP) as cluster:
        answer = lookup_topic(cluster, topic)
    if not answer.nodes:
        listing.runtime.info(f"nsq: {describe_registered_only(f'topic {topic}')}")
    nodes = [node._asdict() for node in answer.nodes]
    if listing.form.is_document:
        document = {"topic": topic, "channels": answer.channels, "nodes": nodes}
        write_json(listing.runtime, document)
    else:
        listing.write_records(LOOKUP, nodes)
    return report_unreachable(answer.failures, listing.runtime)


def ping(*, listing: ClusterListing) -> int:
    """Check the health of every daemon.

    The exit status is 4 when none answers, 6 when some do not.

    Examples:
        nsq ping
        nsq ping --lookupd-http-address lookup:4161
    """
    from nsqtools.cluster.inventory import ping as ping_all

    with listing.open(PING) as cluster:
        pongs = ping_all(cluster)
    listing.write_records(PING, [pong._asdict() for pong in pongs])
    dead = sum(bool(pong.error) for pong in pongs)
    if not dead:
        return ExitStatus.DONE
    return ExitStatus.CONNECT if dead == len(pongs) else ExitStatus.PARTLY_DONE


def info(*, listing: ClusterListing) -> int:
    """Show version, addresses and limits of every nsqd.

    Examples:
        nsq info
        nsq info --nsqd-http-address nsqd-1:4151 --json
    """
    from nsqtools.cluster.stats_documents import moment_text
    from nsqtools.http.http_api import NsqdHTTPClient

    warn_of_deprecation("info", listing.runtime)
    with listing.open(INFO) as cluster:
        answers, failures = cluster.ask_nsqds(NsqdHTTPClient.info)
    documents = [
        {"node": address, **answer, "start_time": moment_text(answer.get("start_time"))}
        for address, answer in answers.items()
    ]
    listing.write_records(INFO, documents, ("start_time", "hostname", "broadcast_address"))
    return report_unreachable(failures, listing.runtime)


def node_document(node: NodeStatus) -> dict[str, Any]:
    """Return an nsqd as JSON: ``node`` is its HTTP address and ``nsqd`` its TCP address."""
    from nsqtools.cluster.stats_documents import moment_text

    facts = node._asdict() | {"error": node.error or None}
    del facts["ahead_s"], facts["info"]  # `nsq check` judges the clock
    info = {name: node.info.get(name) for name in (*ADDRESSES, *LIMITS)}
    info["start_time"] = moment_text(info["start_time"])
    address, tcp_address = facts.pop("address"), facts.pop("tcp_address")
    return {"node": address, "nsqd": tcp_address or None, **facts, **info}


NodeArgument = Annotated[
    str, Argument(metavar="NODE", help="HTTP address of the nsqd, as nsq nodes shows it.")
]


def tombstone(topic: OneTopic, node: NodeArgument, yes: Yes = False, *, change: Changing) -> int:
    """Remove a topic from one nsqd: hide it from consumers, then delete it there.

    nsqlookupd hides the nsqd for this topic for a while, so that consumers do not come back and
    create the topic again. The messages of the topic on this nsqd are lost. Asks for confirmation.

    Examples:
        nsq tombstone clicks nsqd-3:4151 --lookupd-http-address lookup:4161
    """
    from nsqtools.cluster.admin import plan_tombstone

    with change.cluster.open(CHANGE_TIMEOUT_S) as cluster:
        return change.carry_out(cluster, plan_tombstone(cluster, topic, node), yes=yes)


IN_FLIGHT = 500


def client_settings(
    context: Context,
    consumer_opt: list[str] | None = client_opt("consumer", "-X"),
    *,
    profile: Annotated[dict[str, Any], Provided(subset(AddressFlags, "profile", "no_profile"))],
    flags: ClientFlags,
    lookup: Annotated[dict[str, Any], Provided(subset(LookupFlags, "timeout"))],
) -> dict[str, str]:
    """Return the options for connections to both nsqd, as text under go-nsq's names."""
    return texts_of(effective_options(context, "consumer_opt"))


class DrainForm(OptionSet):
    """How a drain is confirmed and reported."""

    yes: Yes = False
    dry_run: DryRun = False
    json: Json = False

    def write(
        self,
        runtime: Runtime,
        moves: Iterable[Move | ChannelMove],
        stays: Sequence[str],
        moved: int,
        left: int | None,
    ) -> None:
        """Print the plan and its result as JSON, or the plan of a dry run as lines."""
        if self.json:
            documents = [
                {
                    "topic": move.topic,
                    "channels": [move.channel] if move.channel else [],
                    "messages": move.messages,
                    "repeats": False,
                }
                for move in moves
            ]
            document = {"moves": documents, "stays": list(stays), "moved": moved, "left": left}
            write_json(runtime, document)
        elif self.dry_run:
            write_lines(runtime, [move.line() for move in moves])


def drain(
    node: Annotated[str, Argument(help="HTTP address of the nsqd to empty.")],
    to: str | None = opt(
        "HOST:PORT",
        "HTTP address of the nsqd that takes over.",
        show_default="a temporary nsqd, for each channel its own messages",
    ),
    *,
    form: DrainForm,
    settings: Annotated[dict[str, str], Provided(client_settings)],
    channels: DrainOptions,
    runtime: Session,
) -> int:
    """Move the remaining messages of an nsqd to another one, or to their consumers.

    Stop publishing to the nsqd first; the command ends when no more messages arrive.

    Without --to each channel moves to a temporary nsqd in this process (see nsq replay): ids, times
    and attempts stay, and no other channel gets a message. Messages in flight move when they are
    requeued, and deferred messages when they are due. The command ends when consumers have finished
    all; after an interruption the same command continues.

    With --to each message is published to the other nsqd and, once that is confirmed, finished on
    this one; it gets a new id and timestamp. NSQ publishes to topics, not to channels, so topics
    with several channels are skipped. Messages in flight or deferred stay.

    The exit status is 6 if messages are left.

    Examples:
        nsq drain nsqd-3:4151 --lookupd-http-address lookup:4161
        nsq drain nsqd-3:4151 --to nsqd-1:4151 --dry-run
        nsq drain nsqd-3:4151 --to nsqd-1:4151 --yes
    """
    from nsqtools.client.connection import http_access
    from nsqtools.client.options import LARGEST_SIZE, ClientOptions
    from nsqtools.cluster.admin import warn_if_still_registered
    from nsqtools.cluster.directory import Cluster, ClusterAddresses, short_address
    from nsqtools.cluster.drain import DRAIN_CHANNEL, Drain

    # The other nsqd decides whether a message is too large.
    defaults = ClientOptions(max_in_flight=IN_FLIGHT, publish_max_msg_size=LARGEST_SIZE)
    # With a sample rate nsqd would discard the other messages.
    options = replace(defaults.with_options(settings), sample_rate=0)
    if to is None:
        return drain_channels(node, options, channels, form, runtime)
    access = http_access(options, (node, to))
    with Cluster(ClusterAddresses([node, to]), access) as cluster:
        service = Drain(cluster.nsqd(node), cluster.nsqd(to), options)
        plan = service.plan()
        status = report_remaining(plan.unmovable, runtime)
        if not form.dry_run and plan.moves:
            question = f"Go on, to {short_address(cluster.nsqd(to).url)}?"
            if not runtime.confirm([move.line() for move in plan.moves], question, yes=form.yes):
                return ExitStatus.FAILED
        left = 0
        with stop_on_signals(service.stop, additional=hangup_signals()) as signals:
            if not form.dry_run:
                left = service.run(plan)
        warn_if_still_registered(cluster, service.bare, DRAIN_CHANNEL)
    form.write(runtime, plan.moves, plan.unmovable, service.moved, left)
    if not form.dry_run:
        runtime.info(f"nsq: {counted(service.moved, 'message')} moved, {left} left")
    return signals.status(otherwise=ExitStatus.PARTLY_DONE if left else status)


def report_remaining(lines: Sequence[str], runtime: Runtime) -> ExitStatus:
    """Print the queues that a drain leaves; return the exit status."""
    for line in lines:
        runtime.print_error(f"nsq: stays: {line}")
    return ExitStatus.PARTLY_DONE if lines else ExitStatus.DONE


def drain_channels(
    node: str, options: ClientOptions, channels: DrainOptions, form: DrainForm, runtime: Runtime
) -> int:
    """Move each channel of an nsqd to its consumers; return the exit status."""
    from nsqtools.client.connection import http_access
    from nsqtools.cluster.directory import Cluster, ClusterAddresses, short_address
    from nsqtools.one_channel.channel_publisher import ChannelDrain, plan_channel_moves
    from nsqtools.server.job_nsqd import MARK

    with (
        Cluster(ClusterAddresses([node]), http_access(options, (node,))) as cluster,
        Progress(runtime) as progress,
    ):
        source = cluster.nsqd(node)
        name = short_address(source.url)  # without a password
        place = channels.data_path or Path("nsqd-" + re.sub(r"[^\w.-]+", "-", name))
        left: int | None = 0  # None: unknown
        try:
            moves, stays = plan_channel_moves(source, channels.name)
        except ConnectionFailed as exc:
            if form.dry_run or not (place / MARK).exists():
                raise
            runtime.print_error(f"nsq: {exc}; what {place} has of it is delivered")
            moves, stays = [], []
            left = None
        status = report_remaining(stays, runtime)
        moved = Counter[tuple[str, str]]()
        if not form.dry_run:
            lines = [*(move.line() for move in moves), "what is published meanwhile is moved, too"]
            if moves and not runtime.confirm(lines, f"Go on, and empty {name}?", yes=form.yes):
                return ExitStatus.FAILED
            with channels.open(options, runtime, place=place) as target:
                job = ChannelDrain(source, target, options)
                moved = job.moved
                with stop_on_signals(target.stop, additional=hangup_signals()) as signals:
                    if moves:
                        show = progress.show
                        left = job.run(moves, lambda: show(lambda: f"{moved.total():,} moved"))
                    target.wait_until_consumed(
                        lambda done: progress.show(lambda: f"{done:,} consumed")
                    )
    form.write(runtime, moves, stays, moved.total(), left)
    if form.dry_run:
        runtime.info("nsq: what is published meanwhile is moved, too")
        return status
    for move in moves:
        count = moved[move.topic, move.channel]
        runtime.info(f"nsq: {move.topic}/{move.channel}: {move.messages} before, {count} moved")
    rest = f"what is left on {name} is unknown" if left is None else f"{left} left"
    runtime.info(f"nsq: {counted(moved.total(), 'message')} moved, {rest}")
    if left:
        status = ExitStatus.PARTLY_DONE
    return signals.status(otherwise=channels.status(runtime, status))
