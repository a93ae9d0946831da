"""The options that ``nsq archive`` and ``nsq replay`` share."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING, Annotated

from typer import Option

from nsqtools.records.units import parse_time, unescape

if TYPE_CHECKING:
    from nsqtools.archive.reader import TimeRange

SELECTION = "Selection"


def parse_moment(text: str) -> int:
    """Read a time, as nanoseconds since 1970. Raises ``ValueError``."""
    return parse_time(text, now_ns=time.time_ns())


Since = Annotated[
    int | None,
    Option(
        "--since",
        parser=parse_moment,
        metavar="TIME",
        help="Only messages published then or later (2026-11-21T08:00:00Z, -2h).",
        rich_help_panel=SELECTION,
    ),
]
Until = Annotated[
    int | None,
    Option(
        "--until",
        parser=parse_moment,
        metavar="TIME",
        help="Only messages published before that.",
        rich_help_panel=SELECTION,
    ),
]
Delimiter = Annotated[
    bytes | None,
    Option(
        "--delimiter",
        "-d",
        parser=unescape,
        metavar="TEXT",
        show_default="\\n",
        help="What ends each body in raw files; \\0 for NUL.",
    ),
]


def time_range(since_ns: int | None, until_ns: int | None) -> TimeRange:
    """The range that ``--since`` and ``--until`` make."""
    from nsqtools.archive.reader import TimeRange

    return TimeRange(since_ns, until_ns)
