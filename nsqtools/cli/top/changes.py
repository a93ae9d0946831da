"""Changes that `nsq top` makes: the plans of `nsq topic` and `nsq channel`, asked for and applied.

They have a cluster of their own, so that they share no connection with the sampler.
"""

from __future__ import annotations

from nsqtools.cli.options.connection import ClusterSettings
from nsqtools.cli.running.administering import lines, summary
from nsqtools.cli.top.console import Change
from nsqtools.cluster.admin import AdminPlan, apply, plan_channels, plan_topics
from nsqtools.cluster.directory import Cluster
from nsqtools.errors import NsqError


class Planned:
    """A change and its plan."""

    def __init__(self, settings: ClusterSettings, change: Change) -> None:
        self._settings = settings
        self.change = change
        self._plan: AdminPlan | None = None

    def plan(self) -> list[str]:
        """Ask the cluster for the plan; return it in lines. Raises `NsqError`."""
        with self._settings.open() as cluster:
            self._plan = self._make_plan(cluster)
        return [
            *(f"left out: {failure.error}" for failure in self._plan.failures),
            *self._plan.notes,
            *lines(self._plan.steps),
        ]

    def carry_out(self) -> list[str]:
        """Carry the plan out; return what was done and what failed."""
        plan = self._plan
        if plan is None:
            return []
        with self._settings.open() as cluster:
            outcomes = apply(cluster, plan)
        failed = [
            f"{each.step.action.value} {each.step.subject} failed: {each.error}"
            for each in outcomes
            if each.error is not None
        ]
        return [*failed, *summary(each.step for each in outcomes if each.error is None)]

    def _make_plan(self, cluster: Cluster) -> AdminPlan:
        action, topic, channel = self.change
        if channel:
            return plan_channels(cluster, action, [topic], [channel])
        return plan_topics(cluster, action, [topic])


def explained(error: NsqError) -> list[str]:
    """An error in lines."""
    return [str(error), *([f"hint: {error.hint}"] if error.hint else [])]
