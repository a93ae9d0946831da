"""Changes to topics and channels, as a plan that is shown first and carried out afterwards.

    plan = plan_topics(cluster, Action.DELETE, ["clicks"])
    for step in plan.steps: ...      what will change, where, and what is lost
    outcomes = apply(cluster, plan)  the same steps, each with how it ended

A dry run is a plan that is not applied. Steps stand in the order of nsqadmin: nsqlookupd before
nsqd, so that nobody is sent to what is being deleted. A step that fails does not stop the others.
"""

from __future__ import annotations

import enum
from dataclasses import dataclass

from nsqtools.cluster.directory import Cluster, DaemonFailure
from nsqtools.errors import NsqError


class Action(enum.Enum):
    """What is done to a topic or a channel."""

    CREATE = "create"
    DELETE = "delete"
    EMPTY = "empty"
    PAUSE = "pause"
    UNPAUSE = "unpause"
    TOMBSTONE = "tombstone"

    @property
    def is_destructive(self) -> bool:
        """Tell whether it cannot be undone."""
        return self in (Action.DELETE, Action.EMPTY, Action.TOMBSTONE)


class DaemonKind(enum.Enum):
    """Who carries a step out."""

    NSQLOOKUPD = "nsqlookupd"
    NSQD = "nsqd"


@dataclass(frozen=True, slots=True, kw_only=True)
class Step:
    """One change at one daemon. ``channel`` is "" for the topic itself.

    ``messages`` are lost with it. ``clients`` are connected consumers, which would recreate what is
    deleted. ``node`` is the nsqd to hide, for a tombstone.
    """

    daemon: DaemonKind
    address: str
    action: Action
    topic: str
    channel: str = ""
    node: str = ""
    messages: int = 0
    clients: tuple[str, ...] = ()

    @property
    def subject(self) -> str:
        """What is changed: ``topic clicks``, ``channel clicks/archive``."""
        return f"channel {self.topic}/{self.channel}" if self.channel else f"topic {self.topic}"


@dataclass(frozen=True, slots=True)
class AdminPlan:
    """What will change, where. ``failures`` are daemons that could not be asked about it;
    ``notes`` are warnings to show first."""

    steps: tuple[Step, ...]
    failures: tuple[DaemonFailure, ...] = ()
    notes: tuple[str, ...] = ()

    @property
    def is_destructive(self) -> bool:
        """Tell whether it should be confirmed."""
        return any(step.action.is_destructive for step in self.steps)


@dataclass(frozen=True, slots=True)
class StepResult:
    """A step that was tried, and why it failed if it did."""

    step: Step
    error: NsqError | None = None


def apply(cluster: Cluster, plan: AdminPlan) -> list[StepResult]:
    """Carry out every step of a plan, in order, whether or not others fail."""
    return [StepResult(step, _try(cluster, step)) for step in plan.steps]


def _try(cluster: Cluster, step: Step) -> NsqError | None:
    try:
        if step.action is Action.TOMBSTONE:
            cluster.lookupds[step.address].tombstone(step.topic, step.node)
        elif step.daemon is DaemonKind.NSQLOOKUPD:
            lookupd = cluster.lookupds[step.address]
            lookupd.administer(step.action.value, step.topic, step.channel)
        else:
            nsqd = cluster.nsqd(step.address)
            nsqd.administer(step.action.value, step.topic, step.channel)
    except NsqError as exc:
        return exc
    return None
