"""Common parts of commands that consume: topics, limits and supervision.

A command declares ``consuming: Consuming``, or `StopLimits` alone. `ChannelWatch` asks nsqd about
the channel. `ConnectionNotice` shows on a terminal from which nsqd the messages come.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, NamedTuple

from nsqtools.cli.options.params import (
    LIMITS,
    MONITORING,
    SAFETY,
    Count,
    ExitIdle,
    For,
    Json,
    ListenHTTP,
    OptionalTopics,
)
from nsqtools.cli.parsing.binding import OptionSet, opt
from nsqtools.cli.render.outcomes import Progress
from nsqtools.cli.running.runtime import CommandSignals, Runtime, hangup_signals, stop_on_signals
from nsqtools.client.connection_settings import ConnectionSettings
from nsqtools.errors import ConfigurationError

if TYPE_CHECKING:
    from nsqtools.cli.running.channel_watch import ChannelWatch
    from nsqtools.cluster.topics import ConsumedTopics
    from nsqtools.http.service import Health, Metrics, Service
    from nsqtools.tail import RunLimits, Tail

# A connected channel without a message for this long is empty.
EMPTY_AFTER_S = 2.0

# For this long after the start of a command, a new nsqd of a topic is discovered within seconds
# instead of the poll interval. Consumers ask nsqlookupd at most every 5 seconds.
FAST_DISCOVERY_S = 60.0

Create = Annotated[
    bool, opt("--create", "Subscribe even if the topic does not exist, which creates it.", SAFETY)
]


class StopLimits(OptionSet):
    """When to stop consuming. Without a limit the command runs until it is stopped."""

    count: Count = None
    until_empty: bool = opt("", "Stop when the channel is empty.", LIMITS)
    exit_idle: ExitIdle = None
    for_: For = None

    def run_limits(self) -> RunLimits:
        """Return the limits as `RunLimits`."""
        from nsqtools.tail import RunLimits

        idle_s = self.exit_idle
        if self.until_empty:
            idle_s = EMPTY_AFTER_S if idle_s is None else min(idle_s, EMPTY_AFTER_S)
        return RunLimits(self.count, idle_s, self.for_)


class Consuming(OptionSet):
    """Topics to consume, limits, and supervision. Raises `ConfigurationError`."""

    topic: OptionalTopics = None
    topic_pattern: str | None = opt("REGEX", "Also every topic, now and later, whose name matches.")
    topic_refresh: float = opt(
        "DURATION", "How often to look for topics of the pattern.", default="1m"
    )
    metrics_file: Path | None = opt(
        "FILE", "Write counts to this file, as Prometheus text.", MONITORING
    )
    listen_http: ListenHTTP = None
    limits: StopLimits
    create: Create = False
    json: Json = False

    def check(self) -> None:
        if not self.topics and self.topic_pattern is None:
            raise ConfigurationError("no topic given", hint="Give --topic or --topic-pattern.")
        if self.topic_pattern == "":  # the unset variable of a script would match every topic
            raise ConfigurationError("--topic-pattern is empty", hint="For every topic write '.'.")

    @property
    def topics(self) -> tuple[str, ...]:
        """The topics of ``--topic``, without repetitions."""
        return tuple(dict.fromkeys(self.topic or ()))

    def find_topics(
        self,
        connection: ConnectionSettings,
        *,
        check: Callable[[str], object] = lambda topic: None,
        leave_out: Iterable[str] = (),
        forgets_deleted: bool = False,
    ) -> ConsumedTopics:
        """Return the topics to consume now and later. The parameters are those of the class."""
        from nsqtools.cluster.topics import ConsumedTopics

        return ConsumedTopics(
            self.topics,
            connection,
            self.topic_pattern,
            self.topic_refresh,
            check=check,
            leave_out=leave_out,
            forgets_deleted=forgets_deleted,
        )

    @contextmanager
    def supervise(
        self,
        runtime: Runtime,
        stop: Callable[[], object],
        *,
        metrics: Metrics,
        health: Health,
        channel: ChannelWatch,
        count_done: Callable[[], int],
    ) -> Iterator[RunStatus]:
        """Call ``stop`` on signals, and supervise the run by the options.

        ``channel`` reports why no message arrives. ``count_done`` counts the messages so far.
        """
        from nsqtools.http.service import service

        metrics_file, environ = self.metrics_file, runtime.environ

        def end() -> None:
            supervised.stopping()
            stop()

        with (
            Progress(runtime) as progress,
            service(
                self.listen_http, environ, metrics=metrics, health=health, metrics_file=metrics_file
            ) as supervised,
            stop_on_signals(end, additional=hangup_signals()) as signals,
            channel.idle_report(count_done, health=health, make_room=progress.clear),
        ):
            yield RunStatus(progress, supervised, signals)


class RunStatus(NamedTuple):
    """The progress of a run, shown on a terminal, to systemd, and over HTTP."""

    progress: Progress
    service: Service
    signals: CommandSignals

    def tick(self, text: Callable[[], str]) -> None:
        """Report an iteration of the working loop; ``text`` returns the progress line."""
        self.service.ready()
        self.service.alive()
        self.progress.show(text)


class ConnectionNotice:
    """Print each change of the connected nsqd. Call it with each tick of a `Tail`."""

    def __init__(self, runtime: Runtime, channel: str) -> None:
        self._runtime = runtime
        self._channel = channel
        self._began_s = runtime.monotonic()
        self._printed: dict[str, set[str]] = {}

    def __call__(self, tail: Tail) -> None:
        """Print the changes. During `FAST_DISCOVERY_S` ask nsqlookupd more often."""
        if self._runtime.monotonic() - self._began_s < FAST_DISCOVERY_S:
            tail.look_up_soon()
        for topic, addresses in tail.connections.items():
            connected, earlier = set(addresses), self._printed.get(topic)
            if connected == earlier:
                continue
            self._printed[topic] = connected
            if not connected:
                lost = ": the connection is lost; trying again"
                text = lost if earlier else ": no nsqd has the topic yet; waiting for one"
            elif not earlier:
                text = f" on {_list(connected)}: waiting (Ctrl-C ends it)"
            elif connected - earlier:
                text = f": now on {_list(connected - earlier)} too"
            else:
                text = f": no longer on {_list(earlier - connected)}"
            self._runtime.info(f"nsq: {topic}/{self._channel}{text}")

    def report_count(self, count: int) -> None:
        """Print at the end how many messages arrived."""
        from nsqtools.protocol.text import counted

        elapsed_s = self._runtime.monotonic() - self._began_s
        self._runtime.info(f"nsq: {counted(count, 'message')} in {elapsed_s:.1f} s")


def _list(addresses: Iterable[str]) -> str:
    return ", ".join(sorted(addresses))
