"""The options that ``nsq replay`` and ``nsq spark replay`` share: where messages go."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Annotated

from typer import Option

from nsqtools.errors import ConfigurationError

Topics = Annotated[
    list[str] | None,
    Option(
        "--topic",
        "-t",
        metavar="[OLD=]NEW",
        help="Where to publish, if not to the topic that a message came from.",
    ),
]
DryRun = Annotated[
    bool, Option("--dry-run", help="Publish nothing; say what would go to which topic.")
]


def topic_map(texts: Iterable[str]) -> dict[str, str]:
    """Read ``NEW`` and ``OLD=NEW``. Raises `ConfigurationError`."""
    topics = {}
    for text in texts:
        old, _, new = text.rpartition("=")
        if not new or old in topics:
            raise ConfigurationError(
                f"--topic {text!r} cannot be followed", hint="Write NEW once, or OLD=NEW."
            )
        topics[old] = new
    return topics
