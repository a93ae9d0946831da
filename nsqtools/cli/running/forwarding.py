"""Run a forwarder as a command: signals, progress, metrics, health, counts and exit status."""

from __future__ import annotations

from contextlib import ExitStack
from dataclasses import asdict
from typing import TYPE_CHECKING

from nsqtools.cli.options.forwarding import ForwardOptions
from nsqtools.cli.options.subscribing import look_before
from nsqtools.cli.render.output import write_json
from nsqtools.cli.render.progress import Progress
from nsqtools.cli.running.ends import ExitStatus, status_of_work, stopping
from nsqtools.cli.running.runtime import Runtime
from nsqtools.cli.running.service import service

if TYPE_CHECKING:
    from nsqtools.forward.courier import DeadLetterBox
    from nsqtools.forward.forwarder import ForwardSettings
    from nsqtools.forward.parcel import ForwardTotals, Sink
    from nsqtools.forward.topic_sources import SourceSettings


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
