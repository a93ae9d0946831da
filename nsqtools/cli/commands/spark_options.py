"""The options that commands of ``nsq spark`` share."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

from typer import Option

ARCHIVES = "Archives"

WorkDir = Annotated[
    Path | None,
    Option(
        "--work-dir",
        metavar="DIR",
        help="Where nsq to-file has its files in progress, if not with the finished ones.",
        rich_help_panel=ARCHIVES,
    ),
]
SkipDamaged = Annotated[
    bool,
    Option(
        "--skip-damaged",
        help="Take what is readable of damaged archives, and tell what is not.",
        rich_help_panel=ARCHIVES,
    ),
]
