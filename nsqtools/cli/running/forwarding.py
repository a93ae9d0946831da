"""Run a forwarder as a command: its options, signals, progress, metrics, health, exit status.

A command declares ``forwarding: Forwarding`` and hands it to `run_forwarder` with the place to
which messages go.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

from nsqtools.cli.options.params import (
    EMPTY_AFTER_S,
    Count,
    ExitIdle,
    For,
    Json,
    ListenHTTP,
    MetricsFile,
    OptionalTopics,
    Pattern,
    Refresh,
    UntilEmpty,
)
from nsqtools.cli.options.printing import MessageFilter, Pick
from nsqtools.cli.options.publishing import DELIVERY, Rate
from nsqtools.cli.parsing.binding import From, opt
from nsqtools.cli.render.outcomes import Progress
from nsqtools.cli.render.output import write_json
from nsqtools.cli.running.ends import ExitStatus, status_of_work, stopping
from nsqtools.cli.running.runtime import Runtime
from nsqtools.cli.running.service import service
from nsqtools.cli.running.waiting import Create, look_before
from nsqtools.errors import ConfigurationError
from nsqtools.records.filters import Filter

if TYPE_CHECKING:
    from nsqtools.forward.courier import DeadLetterBox
    from nsqtools.forward.forwarder import ForwardSettings
    from nsqtools.forward.parcel import ForwardTotals, Sink
    from nsqtools.forward.topic_sources import SourceSettings


@dataclass(frozen=True)
class ForwardOptions:
    """What the options say. Raises `ConfigurationError` when they contradict each other."""

    topics: tuple[str, ...]
    pattern: str | None
    refresh_s: float
    keep: Filter | None
    pick: Callable[[bytes], bytes | None] | None
    rate: float
    max_attempts: int
    dead_letter_topic: str | None
    dead_letter_file: Path | None
    count: int | None
    idle_s: float | None
    for_s: float | None
    metrics_file: Path | None
    listen_http: str | None
    create: bool
    json: bool

    def __post_init__(self) -> None:
        has_letters = self.dead_letter_topic is not None or self.dead_letter_file is not None
        if not self.topics and self.pattern is None:
            raise ConfigurationError("no topic given", hint="Give --topic or --topic-pattern.")
        if self.dead_letter_topic is not None and self.dead_letter_file is not None:
            raise ConfigurationError("give either --dead-letter-topic or --dead-letter-file")
        if self.max_attempts and not has_letters:
            raise ConfigurationError(
                "--max-attempts needs a place for what is given up",
                hint="Give --dead-letter-topic or --dead-letter-file.",
            )
        if self.dead_letter_topic in self.topics:
            raise ConfigurationError(
                f"dead letters cannot go to {self.dead_letter_topic}, which is forwarded"
            )


def forward_options(
    topic: OptionalTopics = None,
    topic_pattern: Pattern = None,
    topic_refresh: Refresh = "1m",  # type: ignore[assignment]
    pick: Pick = None,
    rate: Rate = 0.0,
    max_attempts: int = opt(
        "N",
        "Try a message N times (outages do not count), then give up; 0 for no limit.",
        DELIVERY,
        0,
        min=0,
    ),
    dead_letter_topic: str | None = opt(
        "TOPIC",
        "Publish what cannot be delivered to this topic, on the nsqd it came from.",
        DELIVERY,
    ),
    dead_letter_file: Path | None = opt(
        "FILE", "Append what cannot be delivered to this file, for nsq redrive.", DELIVERY
    ),
    metrics_file: MetricsFile = None,
    listen_http: ListenHTTP = None,
    count: Count = None,
    until_empty: UntilEmpty = False,
    exit_idle: ExitIdle = None,
    for_: For = None,
    create: Create = False,
    json: Json = False,
    *,
    keep: MessageFilter,
) -> ForwardOptions:
    """What to forward, and how it may end."""
    return ForwardOptions(
        tuple(dict.fromkeys(topic or ())),
        topic_pattern,
        topic_refresh,
        keep,
        pick,
        rate,
        max_attempts,
        dead_letter_topic,
        dead_letter_file,
        count,
        EMPTY_AFTER_S if until_empty else exit_idle,
        for_,
        metrics_file,
        listen_http,
        create,
        json,
    )


Forwarding = Annotated[ForwardOptions, From(forward_options)]


def run_forwarder(
    source: SourceSettings,
    sink: Sink,
    settings: ForwardSettings,
    options: ForwardOptions,
    runtime: Runtime,
) -> int:
    """Forward until it is stopped or a limit is reached; report, and return the exit status."""
    from nsqtools.files.opening import allow_many
    from nsqtools.forward.forwarder import Forwarder
    from nsqtools.tail.run_limits import RunLimits

    allow_many()
    look_before(
        source.topics, source.channel, source.connection, runtime, create=options.create, force=True
    )
    forwarder = Forwarder(
        source,
        sink,
        settings,
        dead_letters=dead_letter_box(source, options),
        limits=RunLimits(options.count, options.idle_s, options.for_s),
        on_tick=lambda: tick(),
    )
    with ExitStack() as stack:
        progress = stack.enter_context(Progress(runtime))
        supervised = stack.enter_context(
            service(
                options.listen_http,
                runtime.environ,
                metrics=lambda: forwarder.counters.metrics(forwarder.held, forwarder.is_failing),
                health=lambda: (not forwarder.is_failing, forwarder.last_error or "forwarding"),
                metrics_file=options.metrics_file,
            )
        )

        def tick() -> None:
            supervised.ready()
            supervised.alive()
            progress.show(lambda: f"{forwarder.totals.delivered:,} messages delivered")

        def stop() -> None:
            supervised.stopping()
            forwarder.stop()

        signals = stack.enter_context(stopping(stop))
        try:
            forwarder.run()
        finally:
            progress.clear()
            totals = forwarder.totals
            if options.json:
                write_json(runtime, asdict(totals), indent=2)
            runtime.tell(f"nsq: {summary(totals)}")
    if forwarder.falls_short:
        return signals.status(otherwise=ExitStatus.LIMIT_NOT_REACHED)
    is_whole = not totals.dead_lettered and not totals.dropped
    status = status_of_work(is_whole=is_whole, is_anything_done=True)
    return signals.status(otherwise=status)


def dead_letter_box(source: SourceSettings, options: ForwardOptions) -> DeadLetterBox | None:
    """Where what cannot be delivered goes. Raises `OutputError` and `ConfigurationError`."""
    from nsqtools.forward.courier import DeadLetterFile, DeadLetterTopic

    if options.dead_letter_file is not None:
        return DeadLetterFile(options.dead_letter_file)
    if options.dead_letter_topic is not None:
        return DeadLetterTopic(options.dead_letter_topic, source.options)
    return None


def summary(totals: ForwardTotals) -> str:
    """The counts in a line: what was delivered, and what else happened where it did."""
    line = f"{totals.delivered} delivered"
    for name, words in (
        ("filtered", "filtered out"),
        ("dead_lettered", "dead letters"),
        ("dropped", "dropped"),
        ("requeued", "requeued"),
        ("repeated", "sent again and perhaps doubled"),
    ):
        if count := getattr(totals, name):
            line += f", {count} {words}"
    return line
