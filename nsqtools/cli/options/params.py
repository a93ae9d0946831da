"""The options that commands share, each declared once: name, short form, environment, help.

A command writes ``topic: Topics`` and has ``--topic/-t`` with the meaning it has everywhere.
Options that come as a set (addresses, TLS, logging) are in `connection` and `runtime`.
"""

from __future__ import annotations

from typing import Annotated

from typer import Option

from nsqtools.records.units import parse_span

LIMITS = "Limits"
OUTPUT = "Output"

Seconds = float

Topic = Annotated[str, Option("--topic", "-t", metavar="TOPIC", help="Name of the topic.")]
Topics = Annotated[list[str], Option("--topic", "-t", metavar="TOPIC", help="Name of the topic.")]
Channel = Annotated[
    str | None, Option("--channel", "-c", metavar="CHANNEL", help="Name of the channel.")
]
TopicPatterns = Annotated[
    list[str] | None,
    Option("--topic", "-t", metavar="PATTERN", help="Only these topics (clicks, 'web.*')."),
]
ChannelPatterns = Annotated[
    list[str] | None, Option("--channel", "-c", metavar="PATTERN", help="Only these channels.")
]

Json = Annotated[bool, Option("--json", help="Print JSON.", rich_help_panel=OUTPUT)]

Count = Annotated[
    int | None,
    Option("--count", "-n", metavar="N", min=1, help="End after N.", rich_help_panel=LIMITS),
]
ExitIdle = Annotated[
    Seconds | None,
    Option(
        "--exit-idle",
        parser=parse_span,
        metavar="DURATION",
        help="End when nothing came for so long (5s, 1m30s).",
        rich_help_panel=LIMITS,
    ),
]
For = Annotated[
    Seconds | None,
    Option(
        "--for",
        parser=parse_span,
        metavar="DURATION",
        help="End after so long.",
        rich_help_panel=LIMITS,
    ),
]
