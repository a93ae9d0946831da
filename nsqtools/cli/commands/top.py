"""``nsq top``: the cluster, live."""

from __future__ import annotations

import os
import signal

from nsqtools.cli.options.connection import ViewedCluster
from nsqtools.cli.options.params import SAFETY, TopicPatterns, parse_positive_duration
from nsqtools.cli.parsing.binding import opt
from nsqtools.cli.running.runtime import Runtime, Session, stop_on_signals
from nsqtools.errors import ConfigurationError

INTERVAL_S = 1.0
VIEW = "View"
ON_A_PIPE = "nsq stat --interval 2s prints the same figures line by line."


def parse_column(text: str) -> str:
    """Read the name of a column. (Imported late: the help page needs no services.)"""
    from nsqtools.cli.top.view import ALL_NAMES, VIEWS

    if (name := text.strip()) in ALL_NAMES:
        return name
    known = (f"of {kind.value}: {', '.join(view.columns)}" for kind, view in VIEWS.items())
    raise ConfigurationError(f"unknown column {name!r}; the columns are {'; '.join(known)}")


def top(
    topic: TopicPatterns = None,
    interval: float | None = opt(
        "DURATION",
        "Time between two samples.",
        parser=parse_positive_duration,
        show_default="1s; up to 5s if large",
    ),
    columns: str | None = opt(
        "NAME,...", "Columns to show, in this order, in each view those that it has.", VIEW
    ),
    sort: str | None = opt(
        "COLUMN", "Sort by a column, largest numbers first.", VIEW, parser=parse_column
    ),
    filter: list[str] | None = opt(
        "COLUMN>N", "Only lines that match: depth>0, clients=0, paused=yes.", VIEW
    ),
    allow_changes: bool = opt(
        "", "Let keys pause, unpause, empty and delete, tail and peek.", SAFETY
    ),
    *,
    cluster: ViewedCluster,
    runtime: Session,
) -> int:
    """Watch topics, channels, consumers and nsqd live, in full screen, and change them.

    Runs until q is pressed. Enter opens the channels of a topic and the consumers of a channel; Tab
    shows all nsqd and all consumers; ? lists the keys and the columns, which are those of nsq stat.
    An nsqd that does not answer is named, with the time since, and holds nothing up.

    Keys change nothing unless --allow-changes is given. Then p and u pause and unpause the selected
    topic or channel, e empties and d deletes it: the plan is shown first, and what destroys is
    confirmed by typing the name. t tails a topic on an ephemeral channel of its own, v shows some
    messages of a channel and gives them back.

    Needs a terminal that can move its cursor, of 40 columns and 6 lines; the exit status is 2
    otherwise. On a pipe use nsq stat --interval.

    Examples:
        nsq top
        nsq top --lookupd-http-address lookup:4161 --interval 5s
        nsq top --sort depth --filter 'depth>0' --columns depth,ingress,finish,e2e_ms
        nsq top --allow-changes
    """
    check_terminal(runtime)
    from nsqtools.cli.top.app import Top
    from nsqtools.cli.top.view import TopView, parse_line_condition
    from nsqtools.cluster.sampling import SampleFilter, Sampler

    names = [parse_column(name) for name in (columns or "").split(",") if name.strip()]
    for condition in filter or ():
        parse_line_condition(condition)
    conditions = " ".join(part.replace(" ", "") for part in filter or ())
    interval_s = interval or INTERVAL_S
    os.environ.pop("NO_COLOR", None)  # Textual reads NO_COLOR, and has no option of its own.
    if not runtime.has_color:
        os.environ["NO_COLOR"] = "1"
    with cluster.open() as opened:
        screen = Top(
            cluster,
            Sampler(opened, SampleFilter(topic or ()), interval_s=interval_s),
            TopView(names, sort or "", conditions),
            interval_s,
            allows_changes=allow_changes,
            spares_processor=interval is None,
            runtime=runtime,
        )
        additional = (signal.SIGHUP, signal.SIGQUIT)
        with stop_on_signals(
            screen.stop, on_second=lambda: screen.restore(), additional=additional
        ) as signals:
            screen.show_cluster()
    return signals.status()


def check_terminal(runtime: Runtime) -> None:
    """Raise `ConfigurationError` where there is no screen to fill."""
    if not (runtime.stdout_is_tty and runtime.stdin.isatty()):
        raise ConfigurationError("nsq top needs a terminal", hint=ON_A_PIPE)
    if runtime.environ.get("TERM", "dumb") == "dumb":
        raise ConfigurationError(
            "nsq top needs a terminal that can move its cursor, which TERM=dumb cannot",
            hint=ON_A_PIPE,
        )
    from nsqtools.cli.top.screen import LEAST_HEIGHT, LEAST_WIDTH

    columns, lines = os.get_terminal_size(runtime.stdout.fileno())
    if 0 < columns < LEAST_WIDTH or 0 < lines < LEAST_HEIGHT:
        raise ConfigurationError(
            f"nsq top needs {LEAST_WIDTH} columns and {LEAST_HEIGHT} lines, and this terminal has "
            f"{columns} and {lines}",
            hint=ON_A_PIPE,
        )
