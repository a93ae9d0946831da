"""The options that commands of ``nsq spark`` share."""

from __future__ import annotations

import uuid
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from enum import Enum
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING, Annotated, Any

from nsqtools.cli.options.params import SELECTION
from nsqtools.cli.parsing.binding import opt
from nsqtools.errors import ConfigurationError, NsqError

if TYPE_CHECKING:
    from nsqtools.archive.location import Location

ARCHIVES = "Archives"


class TableFormat(Enum):
    """How a job writes what it makes."""

    parquet = "parquet"
    delta = "delta"


def location(text: str) -> Path:
    """Read a path or a ``file:`` URL. Raises ``ValueError`` for anything that is not local."""
    from nsqtools.archive.location import parse_location

    return parse_location(text)


def place(text: str) -> Location:
    """Read a path, or a place in an object store. Raises ``ValueError`` for any other."""
    from nsqtools.archive.location import parse_place

    return parse_place(text)


def places(texts: Iterable[str]) -> list[Location]:
    """Read several of them. Raises ``ValueError``."""
    return [place(text) for text in texts]


def locations(texts: Iterable[str]) -> list[Path]:
    """Read several of them. Raises ``ValueError``."""
    return [location(text) for text in texts]


OutputDir = Annotated[
    Any,  # a Location
    opt("--output -o DIR", "Directory or s3://BUCKET/PREFIX for Parquet or Delta.", parser=place),
]
OutputFormat = Annotated[TableFormat, opt("--format", "What to write: parquet or delta.")]
Topics = Annotated[list[str] | None, opt("--topic -t TOPIC", "Only these topics.", SELECTION)]
WorkDir = Annotated[
    Path | None,
    opt(
        "--work-dir DIR",
        "Where nsq to-file has files in progress, if elsewhere.",
        ARCHIVES,
        parser=location,
    ),
]
SkipDamaged = Annotated[
    bool,
    opt("--skip-damaged", "Read what is readable of damaged archives; report the rest.", ARCHIVES),
]

DamageDir = Annotated[
    Any,  # a Location or None
    opt(
        "--damage-dir DIR",
        "Where executors of a cluster report damage: a shared directory, or s3://BUCKET/PREFIX.",
        ARCHIVES,
        parser=place,
    ),
]


@contextmanager
def damage_place(
    damage_dir: Location | None, *, skip_damaged: bool, is_local: bool
) -> Iterator[Location | None]:
    """A place where this run's tasks report damage, if it is to be skipped.

    Raises `ConfigurationError` when the reports would stay on the machines of executors.
    """
    if not skip_damaged:
        yield None
    elif damage_dir is not None:
        folder = damage_dir.absolute() if isinstance(damage_dir, Path) else damage_dir
        yield folder / f"damage-{uuid.uuid4().hex[:12]}"
    elif is_local:
        with TemporaryDirectory(prefix="nsq-damage-") as directory:
            yield Path(directory)
    else:
        raise ConfigurationError(
            "--skip-damaged on a cluster needs --damage-dir, or nobody would learn what is missing",
            hint="Give a directory that all share, or a place in an object store.",
        )


@contextmanager
def naming_flags() -> Iterator[None]:
    """Rewrite hints that name the format's options to name our flags."""
    try:
        yield
    except NsqError as error:
        if "onDamage" in error.hint:
            error.hint = "Repair it with nsq archive repair, or leave it out with --skip-damaged."
        error.hint = error.hint.replace("failOnDataLoss=false", "--no-fail-on-data-loss")
        raise
