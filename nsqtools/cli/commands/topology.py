"""``nsq topology``: the topics and channels that a cluster should have, as a file."""

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
from nsqtools.cli.running.administering import CHANGE_TIMEOUT_S, Changing, select_topics
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
    """Print the topics and channels of a cluster, and their pauses, as TOML.

    Ephemeral topics and channels are left out. A topic that not every nsqd has gets
    everywhere = false: its channels belong only on these.

    Examples:
        nsq topology export --lookupd-http-address lookup:4161 > topology.toml
    """
    from nsqtools.cluster.inventory import take_inventory, with_channels
    from nsqtools.cluster.topology import encode, topology_of

    with cluster.open() as opened:
        inventory = take_inventory(opened)
        names = select_topics(inventory, topic)
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

    topology = read_topology(file)
    with cluster.open() as opened:
        steps_plan = plan_topology(opened, topology)
        change = Changing(dry_run=True, form=form, cluster=cluster, runtime=runtime)
        status = change.carry_out(opened, steps_plan, yes=False)
    return ExitStatus.FAILED if (steps_plan.steps or steps_plan.notes) and not status else status


def apply(
    file: TopologyFile,
    prune: bool = opt("", "Delete idle topics and channels that are not in FILE.", SAFETY),
    idle: float | None = opt(
        "DURATION", "Idle time that --prune requires.", SAFETY, show_default="1m"
    ),
    watch: bool = opt("", "Repeat until interrupted, for nsqd that join later."),
    yes: Yes = False,
    *,
    change: Changing,
) -> int:
    """Create the missing topics and channels of a topology, and pause and unpause as it does.

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
        raise ConfigurationError("--prune and --dry-run run once: leave out --watch")
    if idle is not None and not prune:
        raise ConfigurationError("--idle is for --prune")
    topology = read_topology(file)
    if watch:
        ended = threading.Event()
        with stop_on_signals(ended.set) as signals:
            return apply_repeatedly(topology, change, ended) or signals.status()
    with change.cluster.open(CHANGE_TIMEOUT_S) as cluster:
        before = take_inventory(cluster) if prune else None
        if before is not None:
            time.sleep(IDLE_S if idle is None else idle)
        steps_plan = plan_topology(cluster, topology)
        if before is not None:
            steps = (*steps_plan.steps, *idle_steps(cluster, before, topology))
            steps_plan = AdminPlan(sort_steps(steps), steps_plan.failures, steps_plan.notes)
        if not any(steps_plan):
            change.runtime.info("nsq: nothing is lacking")
        status = change.carry_out(cluster, steps_plan, yes=yes)
    return ExitStatus.PARTLY_DONE if steps_plan.notes and not status else status


def apply_repeatedly(topology: Topology, change: Changing, ended: threading.Event) -> int:
    """Apply a topology every `WATCH_S` seconds; an outage of the cluster does not end that."""
    from nsqtools.cluster.topology import plan_topology

    last_error = ""
    while not ended.is_set():
        try:
            with change.cluster.open(CHANGE_TIMEOUT_S) as cluster:
                steps_plan = plan_topology(cluster, topology)
                if steps_plan.steps:
                    change.carry_out(cluster, steps_plan, yes=False)
            last_error = ""
        except ConfigurationError:
            raise  # Time does not repair a wrong configuration.
        except NsqError as exc:
            if str(exc) != last_error:
                change.runtime.info(f"nsq: {exc}; trying again")
            last_error = str(exc)
        ended.wait(WATCH_S)
    return 0


def read_topology(path: Path) -> Topology:
    """Read a file. Raises `ConfigurationError`."""
    from nsqtools.cluster.topology import parse

    try:
        return parse(path.read_text("utf-8-sig"), str(path))
    except (OSError, UnicodeDecodeError) as exc:
        why = exc.strerror if isinstance(exc, OSError) else "not UTF-8"
        raise ConfigurationError(f"cannot read {path} ({why})") from exc
