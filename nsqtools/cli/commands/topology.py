"""``nsq topology``: the topics and channels that a cluster ought to have, as a file."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

from typer import Argument

from nsqtools.cli.options.connection import ClusterConnection
from nsqtools.cli.options.params import TopicPatterns
from nsqtools.cli.render.outcomes import tell_left_out
from nsqtools.cli.render.output import ListingForm, write_text
from nsqtools.cli.running.administering import CHANGE_TIMEOUT, AdminChange, Changing
from nsqtools.cli.running.runtime import ExitStatus, Session

TopologyFile = Annotated[Path, Argument(metavar="FILE", help="What ought to be there, in TOML.")]


def export(
    topic: TopicPatterns = None, *, cluster: ClusterConnection, runtime: Session
) -> ExitStatus:
    """Print the topics and channels of a cluster, with what is paused, as TOML.

    Ephemeral topics and channels are left out. A topic that not every nsqd has gets
    everywhere = false: its channels ought to be where it is.

    Examples:
        nsq topology export --lookupd-http-address lookup:4161 > topology.toml
    """
    from nsqtools.cluster.inventory import registered_channels, take_inventory
    from nsqtools.cluster.topics import select
    from nsqtools.cluster.topology import encode, topology_of

    with cluster.open() as opened:
        inventory = take_inventory(opened)
        names = select("topic", topic, inventory.topics) if topic else sorted(inventory.topics)
        registered = registered_channels(opened, inventory, names)
    write_text(runtime, encode(topology_of(inventory, registered, names)))
    return tell_left_out(inventory.failures, runtime)


def plan(
    file: TopologyFile, *, form: ListingForm, cluster: ClusterConnection, runtime: Session
) -> int:
    """Show what each nsqd and nsqlookupd lacks of a topology.

    The exit status is 0 when nothing is lacking, and 1 when something is. Nothing is changed.

    Examples:
        nsq topology plan topology.toml --lookupd-http-address lookup:4161
    """
    from nsqtools.cluster.topology import plan_topology, read

    wanted = read(file)
    with cluster.open() as opened:
        found = plan_topology(opened, wanted)
        change = AdminChange(dry_run=True, form=form, cluster=cluster, runtime=runtime)
        status = change.carry_out(opened, found, yes=False)
    return ExitStatus.FAILED if found.steps and not status else status


def apply(
    file: TopologyFile,
    *,
    change: Changing,
) -> int:
    """Create what a topology has and the cluster lacks, and pause and unpause as it says.

    Topics and channels are created on every nsqd and with every nsqlookupd, before the first
    message that they would miss. Nothing is deleted.

    Examples:
        nsq topology apply topology.toml --lookupd-http-address lookup:4161
        nsq topology apply topology.toml --dry-run
    """
    from nsqtools.cluster.topology import plan_topology, read

    wanted = read(file)
    with change.cluster.open(CHANGE_TIMEOUT) as cluster:
        found = plan_topology(cluster, wanted)
        if not found.steps:
            change.runtime.tell("nsq: nothing is lacking")
        return change.carry_out(cluster, found, yes=False)
