"""Run a forwarder as a command: its options, signals, progress, metrics, health, exit status.

A command declares ``forwarding: Forwarding`` and hands it to `run_forwarder` with the place to
which messages go.
"""

from __future__ import annotations

from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

from nsqtools.cli.options.printing import MessageFilter, Pick
from nsqtools.cli.options.publishing import DELIVERY, Rate
from nsqtools.cli.parsing.binding import From, opt
from nsqtools.cli.render.output import write_json
from nsqtools.cli.running.consuming import Consuming, look_before
from nsqtools.cli.running.ends import ExitStatus, status_of_work
from nsqtools.cli.running.runtime import Runtime
from nsqtools.client.connection_settings import ConnectionSettings
from nsqtools.errors import ConfigurationError

if TYPE_CHECKING:
    from nsqtools.forward.courier import DeadLetterBox
    from nsqtools.forward.forwarder import ForwardSettings
    from nsqtools.forward.parcel import ForwardTotals, Sink
    from nsqtools.forward.topic_sources import SourceSettings


class ForwardOptions(Consuming):
    """What the options say. Raises `ConfigurationError` when they contradict each other."""

    keep: MessageFilter
    pick: Pick = None
    rate: Rate = 0.0
    max_attempts: int = opt(
        "N",
        "Give a message up after N attempts, outages not counted; 0: never.",
        DELIVERY,
        0,
        min=0,
    )
    dead_letter_topic: str | None = opt(
        "TOPIC",
        "Publish what cannot be delivered to this topic, on the same nsqd.",
        DELIVERY,
    )
    dead_letter_file: Path | None = opt(
        "FILE", "Append what cannot be delivered to this file, for nsq redrive.", DELIVERY
    )

    def check(self) -> None:
        super().check()
        has_letters = self.dead_letter_topic is not None or self.dead_letter_file is not None
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

    def source(self, channel: str, connection: ConnectionSettings, **more: Any) -> SourceSettings:
        """Where messages come from."""
        from nsqtools.forward.forwarder import THROUGHPUT
        from nsqtools.forward.topic_sources import SourceSettings

        options = connection.client_options(**THROUGHPUT)
        pattern, refresh_s = self.topic_pattern, self.topic_refresh
        return SourceSettings(self.topics, channel, connection, options, pattern, refresh_s, **more)

    def settings(self, source: SourceSettings, **more: Any) -> ForwardSettings:
        """What happens to them on the way; ``more`` are fields that the command decides."""
        from nsqtools.forward.forwarder import ForwardSettings

        usual = {"keep": self.keep, "pick": self.pick, "drain_s": source.options.drain_timeout_s}
        own = {"rate": self.rate, "max_attempts": self.max_attempts}
        return ForwardSettings(**{**usual, **own, **more})


Forwarding = Annotated[ForwardOptions, From(ForwardOptions)]


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

    allow_many()
    look_before(
        source.topics, source.channel, source.connection, runtime, create=options.create, force=True
    )
    forwarder = Forwarder(
        source,
        sink,
        settings,
        dead_letters=dead_letter_box(source, options),
        limits=options.limits.run_limits(),
        on_tick=lambda: watched.tick(lambda: f"{forwarder.totals.delivered:,} messages delivered"),
    )
    with options.watched(
        runtime,
        forwarder.stop,
        metrics=lambda: forwarder.counters.metrics(forwarder.held, forwarder.is_failing),
        health=lambda: (not forwarder.is_failing, forwarder.last_error or "forwarding"),
    ) as watched:
        try:
            forwarder.run()
        finally:
            watched.progress.clear()
            totals = forwarder.totals
            if options.json:
                write_json(runtime, asdict(totals), indent=2)
            runtime.tell(f"nsq: {summary(totals)}")
    if forwarder.falls_short:
        return watched.signals.status(otherwise=ExitStatus.LIMIT_NOT_REACHED)
    is_whole = not totals.dead_lettered and not totals.dropped
    status = status_of_work(is_whole=is_whole, is_anything_done=True)
    return watched.signals.status(otherwise=status)


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
