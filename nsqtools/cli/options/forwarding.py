"""The options of the commands that forward: what is taken, what is left out, how it may end.

A command declares ``forwarding: Forwarding`` and gets a `ForwardOptions`, which
`nsqtools.cli.running.forwarding` runs. Where messages go is the command's own.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

from nsqtools.cli.options.consuming import EMPTY_AFTER_S, MetricsFile, Pattern, Refresh, UntilEmpty
from nsqtools.cli.options.params import Count, ExitIdle, For, Json, ListenHTTP, OptionalTopics
from nsqtools.cli.options.printing import MessageFilter, Pick
from nsqtools.cli.options.publishing import DELIVERY, Rate
from nsqtools.cli.options.subscribing import Create
from nsqtools.cli.parsing.binding import From, opt
from nsqtools.errors import ConfigurationError
from nsqtools.records.filters import Filter


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
        "Try a message N times, then it is a dead letter; 0 for no limit. Outages of the "
        "destination do not count.",
        DELIVERY,
        0,
        min=0,
    ),
    dead_letter_topic: str | None = opt(
        "TOPIC",
        "Publish what cannot be delivered to this topic, on the nsqd that it came from.",
        DELIVERY,
    ),
    dead_letter_file: Path | None = opt(
        "FILE",
        "Append what cannot be delivered to this file, as JSON lines that nsq redrive reads.",
        DELIVERY,
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
