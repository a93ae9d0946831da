"""``nsq top``: the cluster, live.

The services are imported when it runs, for the help page does not need them.
"""

from __future__ import annotations

from typing import Annotated

from typer import Option

from nsqtools.cli.options.cluster_connection import ClusterConnection
from nsqtools.cli.options.params import TopicPatterns
from nsqtools.cli.running.ends import stopping
from nsqtools.cli.running.runtime import Session
from nsqtools.errors import ConfigurationError
from nsqtools.records.units import parse_span

INTERVAL_S = 2.0

Interval = Annotated[
    float | None,
    Option(
        "--interval",
        parser=parse_span,
        metavar="DURATION",
        show_default="2s",
        help="Time between two looks.",
    ),
]


def top(
    topic: TopicPatterns = None,
    interval: Interval = None,
    *,
    cluster: ClusterConnection,
    runtime: Session,
) -> int:
    """Watch topics, channels and consumers on the whole screen.

    Runs until q is pressed. Enter opens a topic's channels and a channel's consumers; the keys
    stand at the bottom. The trend shows what comes in, the greatest of the shown values as a full
    bar. Needs a terminal: nsq stat --interval is for pipes.

    Examples:
        nsq top
        nsq top --lookupd-http-address lookup:4161 --interval 1s
    """
    if not (runtime.stdout_is_tty and runtime.stdin.isatty()):
        raise ConfigurationError(
            "nsq top needs a terminal", hint="On a pipe, use nsq stat --interval 2s."
        )
    from nsqtools.cli.top.loop import Top
    from nsqtools.cluster.sampling import Sampler, Subject

    with cluster.open() as opened:
        shown = Top(runtime, Sampler(opened, Subject(topic or ())), interval or INTERVAL_S)
        with stopping(shown.stop) as signals:
            shown.run()
    return signals.status()
