"""Topics and channels: listed, shown node by node, and changed.

``depth`` is what nsqd calls it, in every command: the messages that wait in one queue. ``waiting``
is the depth of a topic and of all its channels together. Each change is a plan that is shown,
confirmed, carried out and reported in the same way.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING, Annotated, Any

from typer import Argument

from nsqtools.cli.options.connection import ClusterConnection, ClusterSettings
from nsqtools.cli.options.params import GLOBS, DryRun
from nsqtools.cli.parsing.binding import From, OptionSet
from nsqtools.cli.render.outcomes import tell_left_out
from nsqtools.cli.render.output import (
    Cell,
    Form,
    ListingForm,
    write_json,
    write_listing,
    write_records,
)
from nsqtools.cli.running.runtime import ExitStatus, Runtime, Session, status_of

if TYPE_CHECKING:
    from nsqtools.cli.render.documents import ChangeDocument
    from nsqtools.cluster.admin import AdminPlan, Step, StepResult
    from nsqtools.cluster.directory import Cluster
    from nsqtools.cluster.queue_rows import QueueRow

ListedTopics = Annotated[list[str] | None, Argument(metavar="TOPIC", help=GLOBS)]

TOPICS = ("topic", "nodes", "channels", "depth", "waiting", "messages", "paused")
CHANNELS = ("topic", "channel", "nodes", "depth", "in_flight", "deferred", "clients", "paused")
TOPIC_NODES = ("node", "channel", "depth", "disk", "in_flight", "messages", "clients", "paused")
CHANNEL_NODES = (
    "node",
    "depth",
    "disk",
    "in_flight",
    "deferred",
    "requeued",
    "timed_out",
    "messages",
    "clients",
    "paused",
)


def list_topics(
    settings: ClusterSettings, runtime: Runtime, patterns: Sequence[str], form: Form
) -> int:
    """A line for each topic."""
    from nsqtools.cluster.inventory import take_inventory
    from nsqtools.cluster.topics import select

    form.check(TOPICS)
    with settings.open() as cluster:
        inventory = take_inventory(cluster)
    names = select("topic", patterns, inventory.topics) if patterns else sorted(inventory.topics)
    rows: list[Sequence[Cell]] = []
    for name in names:
        found = [topic for _, topic in inventory.where(name)]
        channels = {channel.channel_name for topic in found for channel in topic.channels}
        depth = sum(topic.depth for topic in found)
        waiting = depth + sum(channel.depth for topic in found for channel in topic.channels)
        messages = sum(topic.message_count for topic in found)
        paused = any(topic.paused for topic in found)
        rows.append((name, len(found), len(channels), depth, waiting, messages, paused))
    write_listing(runtime, TOPICS, rows, form, optional=("messages", "channels"))
    return tell_left_out(inventory.failures, runtime)


def list_channels(
    settings: ClusterSettings, runtime: Runtime, patterns: Sequence[str], form: Form
) -> int:
    """A line for each channel of some topics."""
    from nsqtools.cluster.inventory import registered_channels, take_inventory
    from nsqtools.cluster.queue_rows import channel_row
    from nsqtools.cluster.topics import select

    form.check(CHANNELS)
    with settings.open() as cluster:
        inventory = take_inventory(cluster)
        known = inventory.topics
        names = select("topic", patterns, known) if patterns else sorted(known)
        registered = registered_channels(cluster, inventory, names)
    found: dict[tuple[str, str], list[QueueRow]] = {
        pair: [] for pairs in registered.values() for pair in pairs
    }
    for name in names:
        for address, topic in inventory.where(name):
            for channel in topic.channels:
                row = channel_row(address, name, channel)
                found.setdefault((name, row.channel), []).append(row)
    summed = ("depth", "in_flight", "deferred", "clients")
    rows: list[Sequence[Cell]] = [
        (
            *pair,
            len(queues),
            *(sum(getattr(row, count) for row in queues) for count in summed),
            any(row.paused for row in queues),
        )
        for pair, queues in sorted(found.items())
    ]
    write_listing(runtime, CHANNELS, rows, form, optional=("deferred", "nodes", "in_flight"))
    return tell_left_out(inventory.failures, runtime)


def cells_of(row: QueueRow, columns: Sequence[str]) -> list[Cell]:
    """A queue of one nsqd in the columns of `nsq stat`; a topic has neither channel nor clients."""
    from nsqtools.cluster.stats_documents import COLUMNS

    has_none = () if row.channel else ("channel", "in_flight", "clients")
    return [None if name in has_none else COLUMNS[name](row) for name in columns]


def show_topic(settings: ClusterSettings, runtime: Runtime, name: str, form: Form) -> int:
    """One topic: a line for it and for each of its channels, on each nsqd."""
    from nsqtools.cluster.inventory import take_inventory
    from nsqtools.cluster.queue_rows import rows_of_topic
    from nsqtools.cluster.stats_documents import topic_document
    from nsqtools.cluster.topics import missing, on_no_nsqd

    form.check(TOPIC_NODES)
    with settings.open() as cluster:
        inventory = take_inventory(cluster)
    if name not in inventory.topics:
        raise missing("topic", name, inventory.topics)
    found = list(inventory.where(name))
    if not found:
        runtime.tell(f"nsq: {on_no_nsqd(name)}")
    if form.is_document:
        nodes = [topic_document(address, topic) for address, topic in found]
        known = inventory.lookupds_that_know(name)
        write_json(runtime, {"topic": name, "nodes": nodes, "lookupds": known}, indent=2)
        return tell_left_out(inventory.failures, runtime)
    queues = (row for address, topic in found for row in rows_of_topic(address, topic))
    rows = [cells_of(row, TOPIC_NODES) for row in queues]
    write_listing(runtime, TOPIC_NODES, rows, form, optional=("disk", "messages"))
    return tell_left_out(inventory.failures, runtime)


def show_channel(
    settings: ClusterSettings, runtime: Runtime, topic: str, name: str, form: Form
) -> int:
    """One channel: a line for each nsqd."""
    from nsqtools.cluster.inventory import channel_of, take_inventory
    from nsqtools.cluster.queue_rows import channel_row
    from nsqtools.cluster.stats_documents import channel_document
    from nsqtools.cluster.topics import missing

    form.check(CHANNEL_NODES)
    with settings.open() as cluster:
        inventory = take_inventory(cluster)
    if topic not in inventory.topics:
        raise missing("topic", topic, inventory.topics)
    where = list(inventory.where(topic))
    found = [(at, each) for at, stats in where if (each := channel_of(stats, name)) is not None]
    if not found:
        there = {each.channel_name for _, stats in where for each in stats.channels}
        raise missing("channel", name, there)
    if form.is_document:
        document: dict[str, Any] = {"topic": topic, "channel": name}
        document["nodes"] = [channel_document(at, topic, each) for at, each in found]
        write_json(runtime, document, indent=2)
    else:
        queues = (channel_row(at, topic, each) for at, each in found)
        rows = [cells_of(row, CHANNEL_NODES) for row in queues]
        optional = ("disk", "timed_out", "requeued", "messages", "deferred")
        write_listing(runtime, CHANNEL_NODES, rows, form, optional=optional)
    return tell_left_out(inventory.failures, runtime)


TopicGlobs = Annotated[list[str], Argument(metavar="TOPIC", help=GLOBS)]
NewTopics = Annotated[list[str], Argument(metavar="TOPIC", help="Names.")]
OneTopic = Annotated[str, Argument(metavar="TOPIC", help="Name of the topic.")]
TopicGlob = Annotated[str, Argument(metavar="TOPIC", help=GLOBS)]
ChannelGlobs = Annotated[list[str], Argument(metavar="CHANNEL", help=GLOBS)]
NewChannels = Annotated[list[str], Argument(metavar="CHANNEL", help="Names.")]
OneChannel = Annotated[str, Argument(metavar="CHANNEL", help="Name of the channel.")]

CHANGE_TIMEOUT_S = 5.0  # nsqd deletes files before it answers
COLUMNS = ("daemon", "address", "action", "topic", "channel", "messages", "clients")


class AdminChange(OptionSet):
    """Of which cluster, and how it is shown."""

    dry_run: DryRun = False
    form: ListingForm
    cluster: ClusterConnection
    runtime: Session

    def of_topics(
        self,
        action: str,
        patterns: Sequence[str],
        *,
        yes: bool = False,
        with_channels: bool = False,
    ) -> int:
        """Plan a change of topics and carry it out."""
        from nsqtools.cluster.admin import Action, plan_topics

        with self.cluster.open(CHANGE_TIMEOUT_S) as cluster:
            plan = plan_topics(cluster, Action(action), patterns, with_channels=with_channels)
            return self.carry_out(cluster, plan, yes=yes)

    def of_channels(
        self, action: str, topic: str, patterns: Sequence[str], *, yes: bool = False
    ) -> int:
        """Plan a change of channels and carry it out."""
        from nsqtools.cluster.admin import Action, plan_channels

        with self.cluster.open(CHANGE_TIMEOUT_S) as cluster:
            plan = plan_channels(cluster, Action(action), [topic], patterns)
            return self.carry_out(cluster, plan, yes=yes)

    def carry_out(self, cluster: Cluster, plan: AdminPlan, *, yes: bool) -> int:
        """Show the plan, ask when it destroys something, apply it, and tell how it ended."""
        from nsqtools.cluster.admin import apply

        form, runtime = self.form, self.runtime
        form.check(COLUMNS if self.dry_run else (*COLUMNS, "error"))
        tell_problems(plan, runtime)
        partly = ExitStatus.PARTLY_DONE if plan.failures else ExitStatus.DONE
        if self.dry_run:
            write_records(runtime, COLUMNS, list(map(document, plan.steps)), form)
            return partly
        if plan.is_destructive and not runtime.agree(lines(plan.steps), "Go on?", yes=yes):
            return ExitStatus.FAILED
        outcomes = apply(cluster, plan)
        if form.kind is not None:
            documents = list(map(outcome_document, outcomes))
            write_records(runtime, (*COLUMNS, "error"), documents, form)
        return report(outcomes, runtime, otherwise=partly)


Changing = Annotated[AdminChange, From(AdminChange)]


def tell_problems(plan: AdminPlan, runtime: Runtime) -> None:
    """Name the daemons that were not reached, and what is to be known before."""
    tell_left_out(plan.failures, runtime)
    for note in plan.notes:
        runtime.tell(f"nsq: {note}")


def report(
    outcomes: Iterable[StepResult], runtime: Runtime, *, otherwise: ExitStatus
) -> ExitStatus:
    """Tell what was done and what failed, node by node; return the exit status."""
    done = [outcome.step for outcome in outcomes if outcome.error is None]
    failed = [outcome for outcome in outcomes if outcome.error is not None]
    for outcome in failed:
        step = outcome.step
        if runtime.is_json and outcome.error is not None:
            runtime.report(outcome.error)
        else:
            runtime.insist(f"nsq: {step.action.value} {step.subject} failed: {outcome.error}")
    for line in summary(done):
        runtime.tell(f"nsq: {line}")
    if failed:
        return ExitStatus.PARTLY_DONE if done else status_of(failed[0].error)
    return otherwise


def summary(steps: Iterable[Step]) -> list[str]:
    """What was done, a line for each topic or channel."""
    where: dict[str, list[str]] = {}
    for step in steps:
        where.setdefault(f"{step.action.value} {step.subject}", []).append(step.daemon.value)
    return [
        f"{what}: done on "
        + " and ".join(f"{daemons.count(kind)} {kind}" for kind in dict.fromkeys(daemons))
        for what, daemons in where.items()
    ]


def lines(steps: Iterable[Step]) -> list[str]:
    """The plan for people: what goes where, what is lost, and who is connected."""
    shown = []
    for step in steps:
        lost = f", {step.messages} messages are lost" if step.messages else ""
        shown.append(
            f"{step.action.value} {step.subject} on {step.daemon.value} {step.address}{lost}"
        )
        shown += [f"    connected, may create it again: {client}" for client in step.clients]
    return shown


def document(step: Step) -> ChangeDocument:
    """A step as JSON."""
    return {
        "daemon": step.daemon.value,
        "address": step.address,
        "action": step.action.value,
        "topic": step.topic,
        "channel": step.channel or None,
        "messages": step.messages,
        "clients": len(step.clients),
        "consumers": list(step.clients),
    }


def outcome_document(outcome: StepResult) -> ChangeDocument:
    """A step that was tried, as JSON."""
    error = None if outcome.error is None else str(outcome.error)
    return {**document(outcome.step), "done": error is None, "error": error}
