"""The options that commands share, each declared once: name, short form, help.

A command writes ``topic: Topics`` and has ``--topic/-t`` with the meaning it has everywhere. Where
a command says something else about an option, it declares it itself, under the same name. Options
that come as a set (addresses, TLS, logging) are in `connection` and `runtime`, those of publishing
in `publishing`, of printing in `printing`.
"""

from __future__ import annotations

import sys
import time
from typing import TYPE_CHECKING, Annotated

from typer import Argument

from nsqtools.cli.parsing.binding import opt
from nsqtools.records.units import Moment, parse_span, parse_time, unescape

if TYPE_CHECKING:
    from nsqtools.archive.layout import TimeRange

# Headings of help pages.
INPUT = "Input"
LIMITS = "Limits"
MONITORING = "Monitoring"
OUTPUT = "Output"
SAFETY = "Safety"
SELECTION = "Selection"

GLOBS = "Names, globs ('web*') or /regular expressions/."


# -- what ---------------------------------------------------------------------------------------


Topic = Annotated[str, opt("--topic -t TOPIC", "Name of the topic.")]
Topics = Annotated[list[str], opt("--topic -t TOPIC", "Name of the topic.")]
OptionalTopics = Annotated[list[str] | None, opt("--topic -t TOPIC", "Name of the topic.")]
TopicPatterns = Annotated[list[str] | None, opt("--topic -t GLOB", f"Only these topics. {GLOBS}")]
Channel = Annotated[str | None, opt("--channel -c CHANNEL", "Name of the channel.")]
ChannelName = Annotated[str, opt("--channel -c CHANNEL", "Name of the channel.")]
ChannelPatterns = Annotated[
    list[str] | None, opt("--channel -c GLOB", f"Only these channels. {GLOBS}")
]
ArchivePaths = Annotated[
    list[str],  # a Path would join the slashes of a URL
    Argument(metavar="PATH", help="Archives: files, or directories with everything below."),
]


# -- which messages -----------------------------------------------------------------------------


def parse_moment(text: str) -> Moment:
    """Read a time, and keep how it was written. Raises ``ValueError``."""
    return Moment(text.strip(), parse_time(text, now_ns=time.time_ns()))


Since = Annotated[
    Moment | None,
    opt(
        "--since TIME",
        "Keep messages published at or after this time (2026-11-21T08:00:00Z, -2h).",
        SELECTION,
        parser=parse_moment,
    ),
]
Until = Annotated[
    Moment | None,
    opt(
        "--until TIME", "Keep messages published before this time.", SELECTION, parser=parse_moment
    ),
]


def time_range(since: Moment | None, until: Moment | None) -> TimeRange:
    """The range that ``--since`` and ``--until`` make."""
    from nsqtools.archive.layout import TimeRange

    return TimeRange(since and since.ns, until and until.ns)


# -- how it looks -------------------------------------------------------------------------------


BODIES_END = "What ends each body in raw files; \\0 for NUL."


def parse_delimiter(text: str) -> bytes:
    """Read what ends each body. Raises ``ValueError``."""
    if not text:
        raise ValueError("it is empty")
    return unescape(text)


Delimiter = Annotated[
    bytes | None, opt("--delimiter -d TEXT", BODIES_END, parser=parse_delimiter, show_default="\\n")
]

Json = Annotated[bool, opt("--json", "Print JSON.", OUTPUT)]


# -- how long -----------------------------------------------------------------------------------


def parse_interval(text: str) -> float:
    """Read a duration that is not 0. Raises ``ValueError``."""
    if seconds := parse_span(text):
        return seconds
    raise ValueError(f"{text!r} must be > 0")


Count = Annotated[int | None, opt("--count -n N", "Stop after N.", LIMITS, min=1, max=sys.maxsize)]
ExitIdle = Annotated[
    float | None,
    opt("--exit-idle DURATION", "Stop after DURATION without messages (5s, 1m30s).", LIMITS),
]
For = Annotated[float | None, opt("--for DURATION", "Stop after DURATION.", LIMITS)]


# -- what is destroyed --------------------------------------------------------------------------


Yes = Annotated[bool, opt("--yes -y", "Do not ask.", SAFETY)]
DryRun = Annotated[bool, opt("--dry-run", "Show what would change, and change nothing.", SAFETY)]
