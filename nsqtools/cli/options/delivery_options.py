"""Options of the commands that publish: how fast, to which nsqd, and how long to try."""

from __future__ import annotations

from typing import Annotated

from typer import Option

from nsqtools.client.spread import PublishMode
from nsqtools.records.units import parse_span

DELIVERY = "Delivery"

Rate = Annotated[
    float,
    Option(
        "--rate",
        metavar="N",
        min=0,
        help="At most N messages a second; 0 for no limit.",
        rich_help_panel=DELIVERY,
    ),
]
Spread = Annotated[
    PublishMode,
    Option(
        "--mode",
        help="With several nsqd: every message to all of them, to each in turn, or to the first "
        "that works.",
        rich_help_panel=DELIVERY,
    ),
]
RetryTimeout = Annotated[
    float | None,
    Option(
        "--retry-timeout",
        parser=parse_span,
        metavar="DURATION",
        show_default="1m",
        help="How long to try again when nsqd cannot be reached; 0s for not at all.",
        rich_help_panel=DELIVERY,
    ),
]
RetryUnknown = Annotated[
    bool,
    Option(
        "--retry-unknown",
        help="Also publish again what nsqd may have taken just before the connection broke: "
        "such messages can arrive twice.",
        rich_help_panel=DELIVERY,
    ),
]
