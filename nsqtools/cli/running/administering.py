"""Changes of topics and channels, and what the commands for both have in common.

``depth`` is what nsqd calls it, in every command: the messages that wait in one queue. ``waiting``
is the depth of a topic and of all its channels together. Each change is a plan that is shown,
confirmed, carried out and reported in the same way.
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
from nsqtools.cli.running.runtime import ExitStatus, Runtime, Session, status_of

if TYPE_CHECKING:
    from nsqtools.cli.render.documents import ChangeDocument
    from nsqtools.cluster.admin import AdminPlan, Step, StepResult
    from nsqtools.cluster.directory import Cluster
    from nsqtools.cluster.inventory import Inventory
    from nsqtools.cluster.queue_rows import QueueRow

ListedTopics = Annotated[list[str] | None, Argument(metavar="TOPIC", help=GLOBS)]


class ClusterListing(OptionSet):
    """Of which cluster something is listed, and how."""

    form: ListingForm
    cluster: ClusterConnection
    runtime: Session

    def open(self, columns: Sequence[str]) -> Cluster:
        """The cluster. Raises `ConfigurationError`, first of all for a wrong column."""
        self.form.check(columns)
        return self.cluster.open()

    def write(
        self, columns: Sequence[str], rows: Iterable[Sequence[Cell]], optional: Sequence[str]
    ) -> None:
        """Print rows, as `write_listing` does."""
        write_listing(self.runtime, columns, rows, self.form, optional=optional)

    def write_records(
        self,
        columns: Sequence[str],
        documents: Sequence[Mapping[str, Any]],
        optional: Sequence[str] = (),
    ) -> None:
        """Print documents, or some of their fields as rows."""
        write_records(self.runtime, columns, documents, self.form, optional=optional)


def chosen_topics(inventory: Inventory, patterns: Sequence[str] | None) -> list[str]:
    """The topics that match, or all. Raises `NotFoundError`."""
    from nsqtools.cluster.topics import select_names

    known = inventory.topics
    return select_names("topic", patterns, known, inventory.failures) if patterns else sorted(known)


def cells_of(row: QueueRow, columns: Sequence[str]) -> list[Cell]:
    """A queue of one nsqd in the columns of `nsq stat`; a topic has neither channel nor clients."""
    from nsqtools.cluster.stats_documents import COLUMNS

    has_none = () if row.channel else ("channel", "in_flight", "clients")
    return [None if name in has_none else COLUMNS[name](row) for name in columns]


TopicGlobs = Annotated[list[str], Argument(metavar="TOPIC", help=GLOBS)]
NewTopics = Annotated[list[str], Argument(metavar="TOPIC", help="Names.")]
OneTopic = Annotated[str, Argument(metavar="TOPIC", help="Name of the topic.")]
TopicGlob = Annotated[str, Argument(metavar="TOPIC", help=GLOBS)]
ChannelGlobs = Annotated[list[str], Argument(metavar="CHANNEL", help=GLOBS)]
NewChannels = Annotated[list[str], Argument(metavar="CHANNEL", help="Names.")]
OneChannel = Annotated[str, Argument(metavar="CHANNEL", help="Name of the channel.")]

CHANGE_TIMEOUT_S = 5.0  # nsqd deletes files before it answers
COLUMNS = ("daemon", "address", "action", "topic", "channel", "messages", "clients")


class Changing(ClusterListing):
    """Of which cluster something is changed, and how that is shown."""

    dry_run: DryRun = False

    def make(
        self,
        action: str,
        topics: Sequence[str],
        channels: Sequence[str] | None = None,
        *,
        yes: bool = False,
        with_channels: bool = False,
    ) -> int:
        """Plan a change of topics, or of some of their channels, and carry it out."""
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
        """Show the plan, ask when it destroys something, apply it, and tell how it ended."""
        from nsqtools.cluster.admin import apply, unwell_nsqds

        form, runtime = self.form, self.runtime
        form.check(COLUMNS if self.dry_run else (*COLUMNS, "error"))
        report_unreachable(plan.failures, runtime)
        for note in plan.notes:
            runtime.info(f"nsq: {note}")
        partly = ExitStatus.PARTLY_DONE if plan.failures else ExitStatus.DONE
        if self.dry_run:
            write_records(runtime, COLUMNS, list(map(document, plan.steps)), form)
            return report_unreachable(unwell_nsqds(cluster, plan.steps), runtime) or partly
        if plan.is_destructive and not runtime.confirm(lines(plan.steps), "Go on?", yes=yes):
            return ExitStatus.FAILED
        outcomes = apply(cluster, plan)
        if form.kind is not None:
            documents = [
                {**document(step), "done": error is None, "error": error and str(error)}
                for step, error in outcomes
            ]
            write_records(runtime, (*COLUMNS, "error"), documents, form)
        return report(outcomes, runtime, otherwise=partly)


def report(
    outcomes: Iterable[StepResult], runtime: Runtime, *, otherwise: ExitStatus
) -> ExitStatus:
    """Tell what was done and what failed, node by node; return the exit status."""
    done = [step for step, error in outcomes if not error]
    failed = [(step, error) for step, error in outcomes if error]
    for step, error in failed:
        runtime.report_failure(error, f"{step.text} failed: {error}")
    for line in summary(done):
        runtime.info(f"nsq: {line}")
    if failed:
        return ExitStatus.PARTLY_DONE if done else status_of(failed[0][1])
    return otherwise


def summary(steps: Iterable[Step]) -> list[str]:
    """What was done, a line for each topic or channel."""
    where: dict[str, list[str]] = {}
    for step in steps:
        where.setdefault(step.text, []).append(step.daemon)
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
        shown.append(f"{step.text} on {step.daemon} {step.address}{lost}")
        shown += [f"    connected, may create it again: {client}" for client in step.clients]
    return shown


def document(step: Step) -> ChangeDocument:
    """A step as JSON."""
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
