"""How a plan is shown, confirmed, carried out and reported: the same for every change."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING, Annotated

from typer import Argument

from nsqtools.cli.options.connection import ClusterSettings
from nsqtools.cli.options.params import GLOBS
from nsqtools.cli.render.listing import tell_left_out
from nsqtools.cli.render.output import Form, write_json, write_listing
from nsqtools.cli.running.ends import ExitStatus, status_of
from nsqtools.cli.running.runtime import Runtime

if TYPE_CHECKING:
    from nsqtools.cli.render.documents import ChangeDocument
    from nsqtools.cluster.admin import AdminPlan, Step, StepResult
    from nsqtools.cluster.directory import Cluster

TopicGlobs = Annotated[list[str], Argument(metavar="TOPIC", help=GLOBS)]
NewTopics = Annotated[list[str], Argument(metavar="TOPIC", help="Names.")]
OneTopic = Annotated[str, Argument(metavar="TOPIC", help="Name of the topic.")]
TopicGlob = Annotated[str, Argument(metavar="TOPIC", help=GLOBS)]
ChannelGlobs = Annotated[list[str], Argument(metavar="CHANNEL", help=GLOBS)]
NewChannels = Annotated[list[str], Argument(metavar="CHANNEL", help="Names.")]
OneChannel = Annotated[str, Argument(metavar="CHANNEL", help="Name of the channel.")]

COLUMNS = ("daemon", "address", "action", "topic", "channel", "messages", "clients")


def change_topics(
    action: str,
    settings: ClusterSettings,
    runtime: Runtime,
    patterns: Sequence[str],
    *,
    yes: bool = False,
    dry_run: bool,
    form: Form,
    with_channels: bool = False,
) -> int:
    """Plan a change of topics and carry it out."""
    from nsqtools.cluster.admin import Action, plan_topics

    with settings.open() as cluster:
        plan = plan_topics(cluster, Action(action), patterns, with_channels=with_channels)
        return carry_out(cluster, plan, runtime, yes=yes, dry_run=dry_run, form=form)


def change_channels(
    action: str,
    settings: ClusterSettings,
    runtime: Runtime,
    topic: str,
    patterns: Sequence[str],
    *,
    yes: bool = False,
    dry_run: bool,
    form: Form,
) -> int:
    """Plan a change of channels and carry it out."""
    from nsqtools.cluster.admin import Action, plan_channels

    with settings.open() as cluster:
        plan = plan_channels(cluster, Action(action), [topic], patterns)
        return carry_out(cluster, plan, runtime, yes=yes, dry_run=dry_run, form=form)


def carry_out(
    cluster: Cluster,
    plan: AdminPlan,
    runtime: Runtime,
    *,
    yes: bool = False,
    dry_run: bool = False,
    form: Form,
) -> int:
    """Show the plan, ask when it destroys something, apply it, and tell how it ended."""
    from nsqtools.cluster.admin import apply

    form.check(COLUMNS if dry_run else (*COLUMNS, "error"))
    tell_problems(plan, runtime)
    partly = ExitStatus.PARTLY_DONE if plan.failures else ExitStatus.DONE
    if dry_run:
        if form.is_document:
            write_json(runtime, [document(step) for step in plan.steps], indent=2)
        else:
            write_listing(runtime, COLUMNS, map(row, plan.steps), form)
        return partly
    if plan.is_destructive and not yes:
        for line in lines(plan.steps):
            runtime.insist(line)
        if not runtime.confirm("Go on?"):
            runtime.tell("nsq: nothing was changed")
            return ExitStatus.FAILED
    outcomes = apply(cluster, plan)
    if form.is_document:
        write_json(runtime, [outcome_document(outcome) for outcome in outcomes], indent=2)
    elif form.kind is not None:
        write_listing(runtime, (*COLUMNS, "error"), map(outcome_row, outcomes), form)
    return report(outcomes, runtime, otherwise=partly)


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


def row(step: Step) -> tuple[str | int, ...]:
    """A step as a row of `COLUMNS`."""
    return (
        step.daemon.value,
        step.address,
        step.action.value,
        step.topic,
        step.channel or "-",
        step.messages,
        len(step.clients),
    )


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


def outcome_row(outcome: StepResult) -> tuple[str | int | None, ...]:
    """A step that was tried, as a row."""
    return *row(outcome.step), None if outcome.error is None else str(outcome.error)
