"""Options of the commands that forward topics, and one run of a forwarder.

`ForwardOptions.run` is common to ``to-nsq``, ``to-http`` and ``to-exec``: signals, progress,
metrics, health, the final counts and the exit status.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING

from nsqtools.cli.options.connection import ConsumerConnection
from nsqtools.cli.options.printing import MessageFilter, PickOption
from nsqtools.cli.options.publishing import DELIVERY, Rate
from nsqtools.cli.parsing.binding import OptionSet, opt
from nsqtools.cli.render.output import write_json
from nsqtools.cli.running.channel_watch import ChannelWatch
from nsqtools.cli.running.consuming import Consuming
from nsqtools.cli.running.runtime import ExitStatus, Session, status_of_work
from nsqtools.errors import ConfigurationError, ConnectionFailed
from nsqtools.protocol.text import counted

if TYPE_CHECKING:
    from nsqtools.client.options import ClientOptions
    from nsqtools.forward.dispatcher import DeadLetterBox
    from nsqtools.forward.forwarder import ForwardSettings
    from nsqtools.forward.parcel import ForwardTotals, Sink


class DeadLetterOptions(OptionSet):
    """When to give up a message, and where it goes. Raises `ConfigurationError`."""

    max_attempts: int = opt(
        "N", "Give up after N attempts, outages not counted; 0: never.", DELIVERY, 0, min=0
    )
    dead_letter_topic: str | None = opt(
        "TOPIC", "Publish what cannot be delivered to this topic, on the same nsqd.", DELIVERY
    )
    dead_letter_file: Path | None = opt(
        "FILE", "Append what cannot be delivered to this file, for nsq redrive.", DELIVERY
    )

    def check(self) -> None:
        if self.dead_letter_topic is not None and self.dead_letter_file is not None:
            raise ConfigurationError("give either --dead-letter-topic or --dead-letter-file")
        if self.max_attempts:
            self.require("--max-attempts")

    def require(self, option: str) -> None:
        """Raise `ConfigurationError` if the dead letters of an option have no destination."""
        if self.dead_letter_topic is None and self.dead_letter_file is None:
            raise ConfigurationError(
                f"{option} needs a destination of dead letters",
                hint="Give --dead-letter-topic or --dead-letter-file.",
            )

    def open(self, options: ClientOptions) -> DeadLetterBox | None:
        """Return the destination of dead letters. Raises `OutputError`, `ConfigurationError`."""
        from nsqtools.forward.dispatcher import DeadLetterFile, DeadLetterTopic

        if self.dead_letter_file is not None:
            return DeadLetterFile(self.dead_letter_file)
        topic = self.dead_letter_topic
        return None if topic is None else DeadLetterTopic(topic, options)


class ForwardOptions(Consuming):
    """Options of a forwarder. Raises `ConfigurationError` if they contradict each other."""

    keep: MessageFilter
    pick: PickOption = None
    rate: Rate = 0.0
    dead_letters: DeadLetterOptions
    connection: ConsumerConnection
    runtime: Session

    def check(self) -> None:
        super().check()
        if self.dead_letters.dead_letter_topic in self.topics:
            topic = self.dead_letters.dead_letter_topic
            raise ConfigurationError(f"dead letters cannot go to {topic}, which is forwarded")

    def settings(
        self,
        channel: str,
        *,
        check: Callable[[str], object] = lambda topic: None,
        batch: int = 1,
        max_in_flight: int | None = None,
    ) -> ForwardSettings:
        """Return the settings of a forwarder.

        ``check`` raises for a topic that must not be consumed, ``batch`` is the number of messages
        that the sink delivers together, and ``max_in_flight`` the default of that option.
        """
        from nsqtools.client.options import THROUGHPUT
        from nsqtools.forward.forwarder import ForwardSettings

        defaults = dict(THROUGHPUT)
        if max_in_flight is not None:
            defaults["max_in_flight"] = max_in_flight
        # A pattern must not match the topic of the dead letters, which would feed themselves.
        dead_letters = filter(None, [self.dead_letters.dead_letter_topic])
        return ForwardSettings(
            self.find_topics(self.connection, check=check, leave_out=dead_letters),
            channel,
            self.connection.client_options(**defaults),
            keep=self.keep,
            pick=self.pick,
            rate=self.rate,
            max_attempts=self.dead_letters.max_attempts,
            batch=batch,
        )

    def run(
        self, settings: ForwardSettings, sink: Sink, addresses: Sequence[str] = (), hint: str = ""
    ) -> int:
        """Forward until a stop or a limit; print the counts and return the exit status.

        Before that, one of the destination ``addresses`` (HOST:PORT) must accept a connection.
        ``hint`` replaces the hint of that error, which is about nsqd.
        """
        from nsqtools.client.connection import require_one
        from nsqtools.files.opening import raise_open_file_limit
        from nsqtools.forward.forwarder import Forwarder

        raise_open_file_limit()
        runtime, connection, channel = self.runtime, self.connection, settings.channel
        watch = ChannelWatch(self.topics, channel, connection, runtime, force=True)
        watch.check_topics(create=self.create)
        try:
            require_one(addresses, settings.options.dial_timeout_s)
        except ConnectionFailed as error:
            error.hint = hint or error.hint
            raise
        forwarder = Forwarder(
            settings,
            sink,
            dead_letters=self.dead_letters.open(settings.options),
            limits=self.limits.run_limits(),
            on_tick=lambda: watched.tick(
                lambda: f"{counted(counters.totals.delivered, 'message', ',')} delivered"
            ),
        )
        counters, dispatcher = forwarder.counters, forwarder.dispatcher
        with self.supervise(
            runtime,
            forwarder.stop,
            metrics=lambda: counters.metrics(dispatcher.held, dispatcher.is_failing),
            health=lambda: (not dispatcher.is_failing, dispatcher.last_error or "forwarding"),
            channel=watch,
            count_done=lambda: counters.totals.received,
        ) as watched:
            try:
                forwarder.run()
            finally:
                watched.progress.clear()
                totals = counters.totals
                if self.json:
                    write_json(runtime, asdict(totals))
                verb = "was" if forwarder.left == 1 else "were"
                left = (
                    f"; {forwarder.left} of them {verb} not redelivered" if forwarder.left else ""
                )
                runtime.info(f"nsq: {summarize(totals)}{left}")
        if forwarder.falls_short:
            return watched.signals.status(otherwise=ExitStatus.LIMIT_NOT_REACHED)
        is_whole = not (totals.dead_lettered or totals.dropped or forwarder.left)
        status = status_of_work(is_whole=is_whole, is_anything_done=True)
        return watched.signals.status(otherwise=status)


def summarize(totals: ForwardTotals) -> str:
    """Return the counts in one line: deliveries, then the other counts above zero."""
    line = f"{totals.delivered} delivered"
    for name, words in (
        ("filtered", "filtered out"),
        ("unjudged", "not judged"),
        ("dead_lettered", "dead letter" if totals.dead_lettered == 1 else "dead letters"),
        ("dropped", "dropped"),
        ("requeued", "requeued"),
        ("repeated", "sent again and perhaps doubled"),
    ):
        if count := getattr(totals, name):
            line += f", {count} {words}"
    return line
