"""The options that commands of ``nsq spark`` share."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Annotated

from typer import Option

from nsqtools.errors import NsqError

ARCHIVES = "Archives"


def location(text: str) -> Path:
    """Read a path or a ``file:`` URL. Raises ``ValueError`` for anything that is not local."""
    from nsqtools.spark.location import parse_location

    return parse_location(text)


def locations(texts: Iterable[str]) -> list[Path]:
    """Read several of them. Raises ``ValueError``."""
    return [location(text) for text in texts]


WorkDir = Annotated[
    Path | None,
    Option(
        "--work-dir",
        parser=location,
        metavar="DIR",
        help="Where nsq to-file has its files in progress, if not with the finished ones.",
        rich_help_panel=ARCHIVES,
    ),
]
SkipDamaged = Annotated[
    bool,
    Option(
        "--skip-damaged",
        help="Read what is readable of damaged archives, and report the rest.",
        rich_help_panel=ARCHIVES,
    ),
]


@contextmanager
def naming_skip_damaged() -> Iterator[None]:
    """Rewrite hints that name the format's options for damage to name our flag."""
    try:
        yield
    except NsqError as error:
        if "onDamage" not in error.hint:
            raise
        error.hint = "Repair it with nsq archive repair, or leave it out with --skip-damaged."
        raise
