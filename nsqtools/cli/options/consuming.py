"""The options of commands that consume until they are stopped: which topics, when to end."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

from nsqtools.cli.options.params import LIMITS, MONITORING
from nsqtools.cli.parsing.binding import opt

EMPTY_AFTER_S = 2.0  # a connected channel that is silent for this long is empty

Pattern = Annotated[
    str | None, opt("--topic-pattern REGEX", "Also every topic, now and later, whose name matches.")
]
Refresh = Annotated[
    float, opt("--topic-refresh DURATION", "How often to look for topics of the pattern.")
]
UntilEmpty = Annotated[bool, opt("--until-empty", "Stop when the channel is empty.", LIMITS)]
MetricsFile = Annotated[
    Path | None,
    opt("--metrics-file FILE", "Write counts to this file, as Prometheus text.", MONITORING),
]
