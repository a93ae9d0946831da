"""The options of the commands that publish: where to, how fast, and how long to try."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Annotated, Any

from typer import Option

from nsqtools.cli.parsing.binding import opt
from nsqtools.client.spread import PublishMode
from nsqtools.errors import ConfigurationError
from nsqtools.protocol.commands import MAX_DELAY_S
from nsqtools.records.units import parse_span

DELIVERY = "Delivery"


def parse_defer(text: str) -> float:
    """Read a delay in seconds. Raises ``ValueError`` for one that nsqd refuses."""
    seconds = parse_span(text)
    if seconds > MAX_DELAY_S:
        raise ValueError(f"{text!r} is above nsqd's limit of 1h")
    return seconds


Defer = Annotated[
    float | None,
    opt(
        "--defer DURATION",
        "Defer delivery of each message by DURATION, up to 1h.",
        DELIVERY,
        parser=parse_defer,
    ),
]

Rate = Annotated[
    float, opt("--rate N", "At most N messages a second; 0 for no limit.", DELIVERY, min=0)
]
Spread = Annotated[
    PublishMode,
    opt(
        "--mode",
        "With several nsqd: every message to all of them, to each in turn, or to the first "
        "that works.",
        DELIVERY,
    ),
]
RetryTimeout = Annotated[
    float | None,
    opt(
        "--retry-timeout DURATION",
        "How long to retry when nsqd cannot be reached; 0s for not at all.",
        DELIVERY,
        show_default="1m",
    ),
]
RetryUnknown = Annotated[
    bool,
    opt(
        "--retry-unknown",
        "Also publish again what nsqd may have accepted before the connection broke or its "
        "disk failed: such messages can arrive twice.",
        DELIVERY,
    ),
]


def unsent_option(help: str) -> Any:
    return Option("--unsent-file", metavar="FILE", help=help, rich_help_panel=DELIVERY)


def progress_option(name: str, metavar: str, parser: Callable[[str], Path] | None = None) -> Any:
    """Where a replay notes what is confirmed: a checkpoint, or a ledger of Spark."""
    return Option(
        name,
        parser=parser,
        metavar=metavar,
        help="Record here what is confirmed, and continue from there the next time.",
        rich_help_panel=DELIVERY,
    )


CheckpointFile = Annotated[Path | None, progress_option("--checkpoint", "FILE")]
UnsentRecords = Annotated[
    Path | None,
    opt(
        "--unsent-file FILE",
        "Append every record that was not confirmed to this file, byte for byte. With --mode all "
        "and several nsqd, to one for each: FILE.HOST:PORT.",
        DELIVERY,
    ),
]
UnsentMessages = Annotated[
    Path | None,
    opt(
        "--unsent-file FILE",
        "Append every message that was not confirmed to this file, as JSON. With --mode all and "
        "several nsqd, to one for each: FILE.HOST:PORT.",
        DELIVERY,
    ),
]
TopicMap = Annotated[
    list[str] | None,
    opt("--topic -t [OLD=]NEW", "Where to publish, if not to the topic that a message came from."),
]
DryRun = Annotated[
    bool, opt("--dry-run", "Publish nothing; print how many messages would go to which topic.")
]


def topic_map(texts: Iterable[str]) -> dict[str, str]:
    """Read ``NEW`` and ``OLD=NEW``. Raises `ConfigurationError`."""
    topics = {}
    for text in texts:
        old, _, new = text.rpartition("=")
        if not new or old in topics:
            raise ConfigurationError(
                f"invalid --topic {text!r}", hint="Write NEW once, or OLD=NEW for each topic."
            )
        topics[old] = new
    return topics
