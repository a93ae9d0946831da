"""The options of commands that consume until they are stopped: which topics, when to end."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

from typer import Option

from nsqtools.cli.options.params import LIMITS, MONITORING, duration_option

EMPTY_AFTER_S = 2.0  # a connected channel that is silent for this long is empty

Pattern = Annotated[
    str | None,
    Option(
        "--topic-pattern",
        metavar="REGEX",
        help="Also every topic, now and later, whose name matches.",
    ),
]
Refresh = Annotated[
    float,
    duration_option("--topic-refresh", "How often to look for topics of the pattern.", panel=None),
]
UntilEmpty = Annotated[
    bool,
    Option("--until-empty", help="Stop when the channel is empty.", rich_help_panel=LIMITS),
]
MetricsFile = Annotated[
    Path | None,
    Option(
        "--metrics-file",
        metavar="FILE",
        help="Write counts to this file, as Prometheus text.",
        rich_help_panel=MONITORING,
    ),
]
