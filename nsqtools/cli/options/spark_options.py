"""The options that commands of ``nsq spark`` share."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Annotated

from typer import Option

from nsqtools.errors import NsqError

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


@contextmanager
def naming_skip_damaged() -> Iterator[None]:
    """Where the format tells of its options for damage, tell of ours."""
    try:
        yield
    except NsqError as error:
        if "onDamage" not in error.hint:
            raise
        error.hint = "Repair it with nsq archive repair, or leave it out with --skip-damaged."
        raise
