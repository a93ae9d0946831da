"""Common parts of the commands that list and change topics and channels.

As in nsqd, ``depth`` counts the pending messages of one queue. ``waiting`` is the depth of a topic
and of all its channels together. Each change is a plan that is shown, confirmed, carried out and
reported in the same way.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Annotated, Any

from typer import Argument

from nsqtools.cli.options.connection import ClusterConnection
from nsqtools.cli.options.params import GLOBS, DryRun
from nsqtools.cli.parsing.binding import OptionSet
from nsqtools.cli.render.outcomes import report_unreachable
from nsqtools.cli.render.output import Cell, ListingForm, write_listing, write_records
from nsqtools.cli.running.runtime import ExitStatus, Runtime, Session, exit_status_of
from nsqtools.protocol.text import counted

if TYPE_CHECKING:
    from nsqtools.cli.render.documents import ChangeDocument
    from nsqtools.cluster.admin import AdminPlan, Step, StepResult
    from nsqtools.cluster.directory import Cluster
    from nsqtools.cluster.inventory import Inventory
    from nsqtools.cluster.queue_rows import QueueRow

ListedTopics = Annotated[list[str] | None, Argument(metavar="TOPIC", help=GLOBS)]


class ClusterListing(OptionSet):
    """The cluster and the output format of a listing."""

    form: ListingForm
    cluster: ClusterConnection
    runtime: Session

    def open(self, columns: Sequence[str]) -> Cluster:
        """Open the cluster. Raises `ConfigurationError`, first for unknown columns."""
        self.form.check(columns)
        return self.cluster.open()

    def write(
        self, columns: Sequence[str], rows: Iterable[Sequence[Cell]], optional: Sequence[str]
    ) -> None:
        """Print rows with `write_listing`."""
        write_listing(self.runtime, columns, rows, self.form, optional=optional)

    def write_records(
        self,
        columns: Sequence[str],
        documents: Sequence[Mapping[str, Any]],
        optional: Sequence[str] = (),
    ) -> None:
        """Print documents as JSON, or the chosen fields as rows."""
        write_records(self.runtime, columns, documents, self.form, optional=optional)


def select_topics(inventory: Inventory, patterns: Sequence[str] | None) -> list[str]:
    """Return the matching topics, or all. Raises `NotFoundError`."""
    from nsqtools.cluster.topics import select_names

    topics = inventory.topics
    if not patterns:
        return sorted(topics)
    return select_names("topic", patterns, topics, inventory.failures)


def cells_of(row: QueueRow, columns: Sequence[str]) -> list[Cell]:
    """Return a queue of one nsqd in columns of `nsq stat`. Some are empty for a topic."""
    from nsqtools.cluster.stats_documents import COLUMNS

    empty = () if row.channel else ("channel", "in_flight", "clients")
    return [None if name in empty else COLUMNS[name](row) for name in columns]


TopicGlobs = Annotated[list[str], Argument(metavar="TOPIC", help=GLOBS)]
NewTopics = Annotated[list[str], Argument(metavar="TOPIC", help="Names.")]
OneTopic = Annotated[str, Argument(metavar="TOPIC", help="Name of the topic.")]
TopicGlob = Annotated[str, Argument(metavar="TOPIC", help=GLOBS)]
ChannelGlobs = Annotated[list[str], Argument(metavar="CHANNEL", help=GLOBS)]
NewChannels = Annotated[list[str], Argument(metavar="CHANNEL", help="Names.")]
OneChannel = Annotated[str, Argument(metavar="CHANNEL", help="Name of the channel.")]

# Longer than for queries, because nsqd deletes files before it answers.
CHANGE_TIMEOUT_S = 5.0
COLUMNS = ("daemon", "address", "action", "topic", "channel", "messages", "clients")


class Changing(ClusterListing):
    """The cluster of a change, and the output format of its report."""

    dry_run: DryRun = False

    def execute(
        self,
        action: str,
        topics: Sequence[str],
        channels: Sequence[str] | None = None,
        *,
        yes: bool = False,
        with_channels: bool = False,
    ) -> int:
        """Plan a change of topics, or of the given channels, and carry it out."""
        from nsqtools.cluster.admin import Action, plan_channels, plan_topics

        kind = Action(action)
        with self.cluster.open(CHANGE_TIMEOUT_S) as cluster:
            if channels is None:
                plan = plan_topics(cluster, kind, topics, with_channels=with_channels)
                notes = (f"{note}; --channels empties them too" for note in plan.notes)
                plan = plan._replace(notes=tuple(notes))
            else:
                plan = plan_channels(cluster, kind, topics, channels)
            return self.carry_out(cluster, plan, yes=yes)

    def carry_out(self, cluster: Cluster, plan: AdminPlan, *, yes: bool) -> int:
        """Show the plan, ask if it is destructive, apply it, and report the result."""
        from nsqtools.cluster.admin import apply, unwell_nsqds

        form, runtime = self.form, self.runtime
        form.check(COLUMNS if self.dry_run else (*COLUMNS, "error"))
        report_unreachable(plan.failures, runtime)
        for note in plan.notes:
            runtime.info(f"nsq: {note}")
        partly = ExitStatus.PARTLY_DONE if plan.failures else ExitStatus.DONE
        if self.dry_run:
            write_records(runtime, COLUMNS, list(map(change_document, plan.steps)), form)
            return report_unreachable(unwell_nsqds(cluster, plan.steps), runtime) or partly
        if plan.is_destructive and not runtime.confirm(format_plan(plan.steps), "Go on?", yes=yes):
            return ExitStatus.FAILED
        outcomes = apply(cluster, plan)
        if form.kind is not None:
            documents = [
                {**change_document(step), "done": error is None, "error": error and str(error)}
                for step, error in outcomes
            ]
            write_records(runtime, (*COLUMNS, "error"), documents, form)
        return report_changes(outcomes, runtime, otherwise=partly)


def report_changes(
    outcomes: Iterable[StepResult], runtime: Runtime, *, otherwise: ExitStatus
) -> ExitStatus:
    """Report the changes that were made, and each failure; return the exit status."""
    done = [step for step, error in outcomes if not error]
    failed = [(step, error) for step, error in outcomes if error]
    for step, error in failed:
        runtime.report_failure(error, f"{step.text} failed: {error}")
    for line in summarize_changes(done):
        runtime.info(f"nsq: {line}")
    if failed:
        return ExitStatus.PARTLY_DONE if done else exit_status_of(failed[0][1])
    return otherwise


def summarize_changes(steps: Iterable[Step]) -> list[str]:
    """Return a line for each change, with the number of daemons on which it was made."""
    by_change: dict[str, list[str]] = {}
    for step in steps:
        by_change.setdefault(step.text, []).append(step.daemon)
    return [
        f"{change}: done on "
        + " and ".join(f"{daemons.count(kind)} {kind}" for kind in dict.fromkeys(daemons))
        for change, daemons in by_change.items()
    ]


def format_plan(steps: Iterable[Step]) -> list[str]:
    """Return the plan as lines, with the messages that are lost and the connected clients."""
    plan = []
    for step in steps:
        loss = ""
        if step.messages:
            verb = "is" if step.messages == 1 else "are"
            loss = f", {counted(step.messages, 'message', ',')} {verb} lost"
        plan.append(f"{step.text} on {step.daemon} {step.address}{loss}")
        plan += [f"    connected, may create it again: {client}" for client in step.clients]
    return plan


def change_document(step: Step) -> ChangeDocument:
    """Return a step as JSON."""
    return {
        "daemon": step.daemon,
        "address": step.address,
        "action": step.action.value,
        "topic": step.topic,
        "channel": step.channel or None,
        "messages": step.messages,
        "clients": len(step.clients),
        "consumers": list(step.clients),
    }
