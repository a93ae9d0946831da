"""``nsq topology``: the topics and channels that a cluster ought to have, as a file."""

from __future__ import annotations

import threading
import time
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

from typer import Argument

from nsqtools.cli.options.connection import ClusterConnection
from nsqtools.cli.options.params import SAFETY, TopicPatterns, Yes
from nsqtools.cli.parsing.binding import opt
from nsqtools.cli.render.outcomes import report_unreachable
from nsqtools.cli.render.output import ListingForm, write_text
from nsqtools.cli.running.administering import CHANGE_TIMEOUT_S, Changing, chosen_topics
from nsqtools.cli.running.runtime import ExitStatus, Session, stop_on_signals
from nsqtools.errors import ConfigurationError, NsqError

if TYPE_CHECKING:
    from nsqtools.cluster.topology import Topology

WATCH_S = 15.0
IDLE_S = 60.0

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
    from nsqtools.cluster.inventory import take_inventory, with_channels
    from nsqtools.cluster.topology import encode, topology_of

    with cluster.open() as opened:
        inventory = take_inventory(opened)
        names = chosen_topics(inventory, topic)
        inventory = with_channels(opened, inventory, names)
    write_text(runtime, encode(topology_of(inventory, names)))
    return report_unreachable(inventory.failures, runtime)


def plan(
    file: TopologyFile, *, form: ListingForm, cluster: ClusterConnection, runtime: Session
) -> int:
    """Show what each nsqd and nsqlookupd lacks of a topology.

    The exit status is 0 when nothing is lacking, and 1 when something is. Nothing is changed.

    Examples:
        nsq topology plan topology.toml --lookupd-http-address lookup:4161
    """
    from nsqtools.cluster.topology import plan_topology

    wanted = read_topology(file)
    with cluster.open() as opened:
        found = plan_topology(opened, wanted)
        change = Changing(dry_run=True, form=form, cluster=cluster, runtime=runtime)
        status = change.carry_out(opened, found, yes=False)
    return ExitStatus.FAILED if (found.steps or found.notes) and not status else status


def apply(
    file: TopologyFile,
    prune: bool = opt(
        "", "Delete what is not in FILE and had no client and no message for --idle.", SAFETY
    ),
    idle: float | None = opt(
        "DURATION", "How long --prune watches first.", SAFETY, show_default="1m"
    ),
    watch: bool = opt("", "Go on, for nsqd that join or come back later, until interrupted."),
    yes: Yes = False,
    *,
    change: Changing,
) -> int:
    """Create what a topology has and the cluster lacks, and pause and unpause as it says.

    Topics and channels are created on every nsqd and with every nsqlookupd, before the first
    message that they would miss. Nothing is deleted without --prune, which shows its plan and
    asks.

    Examples:
        nsq topology apply topology.toml --lookupd-http-address lookup:4161
        nsq topology apply topology.toml --prune --idle 10m --dry-run
    """
    from nsqtools.cluster.admin import AdminPlan, sort_steps
    from nsqtools.cluster.inventory import take_inventory
    from nsqtools.cluster.topology import idle_steps, plan_topology

    if watch and (prune or change.dry_run):
        raise ConfigurationError("--prune and --dry-run look once: leave out --watch")
    if idle is not None and not prune:
        raise ConfigurationError("--idle is for --prune")
    wanted = read_topology(file)
    if watch:
        ended = threading.Event()
        with stop_on_signals(ended.set) as signals:
            return keep(wanted, change, ended) or signals.status()
    with change.cluster.open(CHANGE_TIMEOUT_S) as cluster:
        before = take_inventory(cluster) if prune else None
        if before is not None:
            time.sleep(IDLE_S if idle is None else idle)
        found = plan_topology(cluster, wanted)
        if before is not None:
            steps = (*found.steps, *idle_steps(cluster, before, wanted))
            found = AdminPlan(sort_steps(steps), found.failures, found.notes)
        if not any(found):
            change.runtime.info("nsq: nothing is lacking")
        status = change.carry_out(cluster, found, yes=yes)
    return ExitStatus.PARTLY_DONE if found.notes and not status else status


def keep(wanted: Topology, change: Changing, ended: threading.Event) -> int:
    """Apply a topology again and again; a cluster that cannot be asked is tried again."""
    from nsqtools.cluster.topology import plan_topology

    trouble = ""
    while not ended.is_set():
        try:
            with change.cluster.open(CHANGE_TIMEOUT_S) as cluster:
                found = plan_topology(cluster, wanted)
                if found.steps:
                    change.carry_out(cluster, found, yes=False)
            trouble = ""
        except ConfigurationError:
            raise  # which no time mends
        except NsqError as exc:
            if str(exc) != trouble:
                change.runtime.info(f"nsq: {exc}; trying again")
            trouble = str(exc)
        ended.wait(WATCH_S)
    return 0


def read_topology(path: Path) -> Topology:
    """Read a file. Raises `ConfigurationError`."""
    from nsqtools.cluster.topology import parse

    try:
        return parse(path.read_text("utf-8"), str(path))
    except (OSError, UnicodeDecodeError) as exc:
        why = exc.strerror if isinstance(exc, OSError) else "not UTF-8"
        raise ConfigurationError(f"cannot read {path} ({why})") from exc
