"""Options that commands share, each declared once with its name, short form and help.

A command declares ``topic: Topics`` and has ``--topic/-t`` with the common meaning. A command that
needs another help text declares the option itself, under the same name. Sets of options are in
other modules: addresses and TLS in `connection`, logging in `runtime`, and those of publishing and
printing in `publishing` and `printing`.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Callable
from typing import TYPE_CHECKING, Annotated

from typer import Argument, Context

from nsqtools.cli.parsing.binding import Provided, opt
from nsqtools.errors import ConfigurationError
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


# -- topics, channels, archives -----------------------------------------------------------------


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
    # Not Path, which would join the slashes of a URL.
    list[str],
    Argument(metavar="PATH", help="Archives: files, or directories with everything below."),
]


# -- ranges of time -----------------------------------------------------------------------------


def parse_moment(text: str) -> Moment:
    """Parse a time, and keep its text. Raises ``ValueError``."""
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
    """Return the range of ``--since`` and ``--until``. Raises `ConfigurationError`."""
    from nsqtools.archive.layout import TimeRange

    if since and until and since.ns > until.ns:
        raise ConfigurationError(f"--since {since.text} is later than --until {until.text}")
    return TimeRange(since and since.ns, until and until.ns)


# -- output -------------------------------------------------------------------------------------


BODIES_END = "Delimiter of bodies in raw files; \\0 for NUL."


def parse_delimiter(text: str) -> bytes:
    """Parse a delimiter. Raises ``ValueError``."""
    if not text:
        raise ValueError("it is empty")
    return unescape(text)


Delimiter = Annotated[
    bytes | None, opt("--delimiter -d TEXT", BODIES_END, parser=parse_delimiter, show_default="\\n")
]


def parse_listen(text: str) -> str:
    """Return where to listen: a port alone is on loopback."""
    return f"127.0.0.1:{text}" if text.isdecimal() else text


ListenHTTP = Annotated[
    str | None,
    opt(
        "[HOST:]PORT",
        "Serve /metrics, /health, /ready and /live, on loopback by default.",
        MONITORING,
    ),
]
MessageJson = Annotated[bool, opt("--json", "Print JSON.", OUTPUT)]


def _compile_jq(program: str) -> Callable[[bytes], bytes | None]:
    from nsqtools.records.filters import compile_pick

    return compile_pick(program)


def json_output(
    context: Context,
    json: MessageJson = False,
    jq: Callable[[bytes], bytes | None] | None = opt(
        "JQ", "Print the result of this jq expression on the JSON.", OUTPUT, parser=_compile_jq
    ),
) -> bool:
    """Return whether to print JSON, and let `write_json` apply ``--jq`` to each document."""
    if jq is not None:
        context.obj.json_filters.append(jq)
    return json or jq is not None


Json = Annotated[bool, Provided(json_output)]


# -- limits -------------------------------------------------------------------------------------


def parse_positive_duration(text: str) -> float:
    """Parse a duration above 0. Raises ``ValueError``."""
    if seconds := parse_span(text):
        return seconds
    raise ValueError(f"{text!r} must be > 0")


Count = Annotated[int | None, opt("--count -n N", "Stop after N.", LIMITS, min=1, max=sys.maxsize)]
ExitIdle = Annotated[
    float | None,
    opt("--exit-idle DURATION", "Stop after DURATION without messages (5s, 1m30s).", LIMITS),
]
For = Annotated[float | None, opt("--for DURATION", "Stop after DURATION.", LIMITS)]


# -- confirmation -------------------------------------------------------------------------------


Yes = Annotated[bool, opt("--yes -y", "Do not ask.", SAFETY)]
DryRun = Annotated[bool, opt("--dry-run", "Show what would change, and change nothing.", SAFETY)]
