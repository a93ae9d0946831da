"""``nsq top``: the cluster, live."""

from __future__ import annotations

from typing import Annotated

from nsqtools.cli.options.cluster_connection import ClusterConnection
from nsqtools.cli.options.params import TopicPatterns, duration_option
from nsqtools.cli.running.ends import stopping
from nsqtools.cli.running.runtime import Session
from nsqtools.errors import ConfigurationError

INTERVAL_S = 2.0

Interval = Annotated[
    float | None,
    duration_option("--interval", "Time between two samples.", panel=None, default="2s"),
]


def top(
    topic: TopicPatterns = None,
    interval: Interval = None,
    *,
    cluster: ClusterConnection,
    runtime: Session,
) -> int:
    """Watch topics, channels and consumers live, in full screen.

    Runs until q is pressed. Enter opens the channels of a topic and the consumers of a channel; the
    bottom line lists the keys. The trend shows the rate of incoming messages, the largest value as
    a full bar. Needs a terminal; on a pipe use nsq stat --interval.

    Examples:
        nsq top
        nsq top --lookupd-http-address lookup:4161 --interval 1s
    """
    if not (runtime.stdout_is_tty and runtime.stdin.isatty()):
        raise ConfigurationError(
            "nsq top needs a terminal", hint="On a pipe, use nsq stat --interval 2s."
        )
    from nsqtools.cli.top.loop import Top
    from nsqtools.cluster.sampling import SampleFilter, Sampler

    with cluster.open() as opened:
        shown = Top(runtime, Sampler(opened, SampleFilter(topic or ())), interval or INTERVAL_S)
        with stopping(shown.stop) as signals:
            shown.run()
    return signals.status()
