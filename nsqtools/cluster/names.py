"""Names of topics and channels, asked for as cheaply as possible.

nsqlookupd keeps them ready; nsqd is asked only where there is no nsqlookupd, or none that answers.
"""

from __future__ import annotations

from nsqtools.cluster.directory import Cluster
from nsqtools.http.nsqlookupd_http import NsqlookupdHTTPClient


def topic_names(cluster: Cluster) -> list[str]:
    """All topics. Raises the first failure when nobody answers."""
    answers, _ = cluster.ask(cluster.lookupds, NsqlookupdHTTPClient.topics)
    if answers:
        return sorted({name for names in answers.values() for name in names})
    survey = cluster.survey()
    return sorted({each.topic_name for node in survey.nodes for each in node.stats.topics or ()})


def channel_names(cluster: Cluster, topic: str) -> list[str]:
    """The channels of a topic, or of all with ``""``. Raises as above."""
    if topic:
        answers, _ = cluster.ask(cluster.lookupds, lambda client: client.channels(topic))
        if answers:
            return sorted({name for names in answers.values() for name in names})
    survey = cluster.survey(topic)
    return sorted(
        {
            channel.channel_name
            for node in survey.nodes
            for each in node.stats.topics or ()
            for channel in each.channels
        }
    )
