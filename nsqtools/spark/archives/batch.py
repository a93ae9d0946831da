"""Plan to read all that an archive has now."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from typing import TypeVar

from nsqtools.errors import OutputError
from nsqtools.spark.archives.damage import MOVE_AWAY, Damage, Damages
from nsqtools.spark.archives.listing import ListedFile, Listing
from nsqtools.spark.archives.plan import (
    Part,
    Partition,
    is_left_out,
    partitions_of,
    refusal,
)
from nsqtools.spark.archives.settings import ReadSettings

Result = TypeVar("Result")

TRIES = 5

Tell = Callable[[Damage], None]


def plan_batch(settings: ReadSettings) -> list[Partition]:
    """Plan to read every file, those in progress up to their last durable member.

    Raises `NotFoundError`, `OutputError`, and `NsqError` for damage that fails the query.
    """
    listing = Listing(settings.roots, settings.work_dir)
    tell = teller(settings)

    def plan() -> list[Partition]:
        files = listing.files(tell).values()
        return partitions_of(_parts(files, settings, tell), settings)

    return settled(plan)


def teller(settings: ReadSettings) -> Tell:
    """Return what tells damage that is found in planning."""
    damages = Damages(settings.damage_path, MOVE_AWAY)
    return lambda damage: damages.tell(f"{damage.file} {damage.pos}", [damage])


def settled(plan: Callable[[], Result]) -> Result:
    """Plan again when a file has moved meanwhile. Raises `OutputError`."""
    for tries_left in reversed(range(TRIES)):
        try:
            return plan()
        except FileNotFoundError as exc:
            if not tries_left:
                raise OutputError(f"cannot read {exc.filename} ({exc.strerror})") from exc
        except OSError as exc:
            raise OutputError(f"cannot read {exc.filename} ({exc.strerror})") from exc
    raise AssertionError("unreachable")


def is_read(file: ListedFile, settings: ReadSettings, tell: Tell) -> bool:
    """Tell whether a file is to be read; one that nobody left out and cannot be read is told."""
    content = file.content(settings.delimiter)
    if problem := refusal(content, settings, has_index=file.has_index):
        tell(Damage(file.shown, 0, problem))
        return False
    return not is_left_out(content, settings, has_index=file.has_index)


def _parts(files: Iterable[ListedFile], settings: ReadSettings, tell: Tell) -> Iterator[Part]:
    for file in files:
        if is_read(file, settings, tell):
            yield file, file.content(settings.delimiter), file.readable()
            file.forget_members()
