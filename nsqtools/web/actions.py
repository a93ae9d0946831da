"""Changes from the browser: a plan to show, and then to carry out. `WebContext.act` does that.

The plans are those of `nsq topic`, `nsq channel` and `nsq tombstone`.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, replace

from nsqtools.cluster.admin import Action, AdminPlan
from nsqtools.cluster.admin_plans import plan_channels, plan_tombstone, plan_topics
from nsqtools.cluster.directory import Cluster
from nsqtools.errors import ConfigurationError
from nsqtools.protocol.names import check_channel, check_topic
from nsqtools.protocol.stats import read_stats


@dataclass(frozen=True, slots=True, kw_only=True)
class Change:
    """A change to a topic, or to one channel of it; ``node`` is the nsqd of a tombstone.

    ``with_channels``: of all channels of the topic too. Raises `ConfigurationError` for what
    cannot be a name.
    """

    action: Action
    topic: str
    channel: str = ""
    node: str = ""
    with_channels: bool = False

    def __post_init__(self) -> None:
        check_topic(self.topic)
        if self.channel:
            check_channel(self.channel)
        if (self.action is Action.TOMBSTONE) is not bool(self.node):
            raise ConfigurationError("a tombstone needs a node, and nothing else has one")

    @property
    def name(self) -> str:
        """What nsqadmin calls it in its notifications."""
        if self.action is Action.TOMBSTONE:
            return "tombstone_topic_producer"
        return f"{self.action.value}_{'channel' if self.channel else 'topic'}"


def plan_change(cluster: Cluster, change: Change) -> AdminPlan:
    """Plan a change; its notes say what will create again what is deleted.

    Raises `NotFoundError`, and the first failure when nobody answers.
    """
    if change.action is Action.TOMBSTONE:
        plan = plan_tombstone(cluster, change.topic, change.node)
    elif change.channel:
        plan = plan_channels(cluster, change.action, [change.topic], [change.channel])
    else:
        plan = plan_topics(
            cluster, change.action, [change.topic], with_channels=change.with_channels
        )
    if change.action in (Action.DELETE, Action.TOMBSTONE):
        notes = (*plan.notes, *recreators(cluster, change, plan))
        return replace(plan, notes=notes)
    return plan


def recreators(cluster: Cluster, change: Change, plan: AdminPlan) -> Iterable[str]:
    """Yield a line for those who are connected and would create again what is deleted."""
    consumers = sum(len(step.clients) for step in plan.steps)
    if consumers:
        yield f"{consumers} connected consumers create it again when they reconnect"
    if change.channel:
        return
    nodes = {step.address for step in plan.steps if step.action is Action.DELETE}
    known = {address: cluster.nsqd(address) for address in nodes - set(cluster.lookupds)}
    answers, _ = cluster.ask(known, lambda client: read_stats(client.stats(clients=True)))
    for address, stats in answers.items():
        publishing = [
            client.remote_address
            for client in stats.producers or ()
            if change.topic in dict(client.pub_counts)
        ]
        if publishing:
            yield (
                f"{len(publishing)} connected producers have published to it on {address}, and"
                " create it again with the next message"
            )
