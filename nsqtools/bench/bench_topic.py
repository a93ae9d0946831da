"""The topic of a measurement, by nsqd's HTTP API: filled, counted, and deleted afterwards.

Trap: nsqd is asked before anything is created, so that what is our own can be deleted.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Iterator, Sequence
from typing import TYPE_CHECKING, NamedTuple

from nsqtools.client.options import ClientOptions
from nsqtools.client.reachable import require_one
from nsqtools.errors import ConfigurationError, NsqError

if TYPE_CHECKING:
    from nsqtools.cluster.directory import Cluster, DaemonFailure
    from nsqtools.protocol.stats import TopicStats

log = logging.getLogger("nsqtools")

STALLED_S = 5.0
POLL_S = 0.02


def open_cluster(
    nsqd_tcp_addresses: Sequence[str], nsqd_http_addresses: Sequence[str], options: ClientOptions
) -> Cluster:
    """nsqd's HTTP API. Raises when a topic or channel could not be deleted afterwards."""
    from nsqtools.client.discovery import http_access
    from nsqtools.cluster.directory import Cluster, ClusterAddresses

    cluster = Cluster(
        ClusterAddresses(tuple(nsqd_http_addresses), (), tuple(nsqd_tcp_addresses)),
        http_access(options, nsqd_http_addresses),
    )
    try:
        nsqds, failures = cluster.nsqds()
        if failures or len(nsqds) < len(nsqd_tcp_addresses):
            require_one(nsqd_tcp_addresses, options.dial_timeout_s)
            raise _no_http_api(failures)
    except BaseException:
        cluster.close()
        raise
    return cluster


def delete_own(cluster: Cluster, topic: str, channel: str = "") -> None:
    """Delete a topic, or only the channel; warn where that did not work."""
    _, failures = cluster.ask_nsqds(
        lambda nsqd: nsqd.administer("delete", topic, channel), required=False
    )
    for failure in failures:
        what = f"channel {channel} of topic {topic}" if channel else f"topic {topic}"
        log.warning("%s may not have been deleted: %s", what, failure.error)


class Counts(NamedTuple):
    """Messages of a topic that were published; those of a channel that wait, and are unfinished."""

    published: int
    waiting: int
    unfinished: int


def counts(cluster: Cluster, topic: str, channel: str = "") -> Counts:
    """What nsqd counts, all nsqd together."""
    found = list(_topics(cluster, topic, channel))
    channels = [each for topic in found for each in topic.channels if channel]
    return Counts(
        published=sum(topic.message_count for topic in found),
        waiting=sum(each.depth for each in channels),
        unfinished=sum(
            each.depth + each.in_flight_count + each.deferred_count for each in channels
        ),
    )


def wait_until_queued(
    cluster: Cluster, topic: str, channel: str, total: int, keep_waiting: Callable[[], bool]
) -> None:
    """nsqd moves messages from the topic to the channel in its own time."""
    before, since = -1, time.monotonic()
    while keep_waiting() and time.monotonic() - since < STALLED_S:
        queued = counts(cluster, topic, channel).waiting
        if queued >= total:
            return
        if queued != before:
            before, since = queued, time.monotonic()
        time.sleep(POLL_S)


def _topics(cluster: Cluster, topic: str, channel: str) -> Iterator[TopicStats]:
    for node in cluster.stats(topic, channel).nodes:
        yield from node.stats.topics or ()


def _no_http_api(failures: Sequence[DaemonFailure]) -> NsqError:
    why = f" ({failures[0].error})" if failures else ""
    error = NsqError(
        f"nsqd's HTTP API is needed to delete what is measured on{why}",
        hint="Give --nsqd-http-address, one for each --nsqd-tcp-address.",
    )
    error.category = failures[0].error.category if failures else ConfigurationError.category
    return error
