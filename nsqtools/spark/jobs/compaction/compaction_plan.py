"""What is to be done: which days are closed, and which files are new to their partitions. Pure.

A day is closed when it was over some time ago (the grace), and no file in progress can still hold
messages of it: one that has some, or that is empty and was begun before the day closed. Messages
that come later still make the day's partition be merged again.
"""

from __future__ import annotations

import enum
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from datetime import UTC, date, datetime

from nsqtools.protocol.text import NS
from nsqtools.spark.jobs.compaction.compacted_output import Input, Manifest
from nsqtools.spark.jobs.compaction.inventory import CountedFile, Slot, closes_at, end_ns

PLAIN_BY_COMPRESSED = 6
"""About how much larger a file is without gzip."""


class State(enum.Enum):
    """What has to happen to a partition."""

    NEW = "new"
    MERGE = "merge"
    DONE = "done"
    OPEN = "open"


@dataclass(frozen=True, slots=True)
class PlannedPartition:
    """One topic and day: its state, why it is open, and the files that are new to it."""

    slot: Slot
    state: State
    contents: tuple[CountedFile, ...] = ()
    reason: str = ""

    @property
    def messages(self) -> int:
        """How many messages the files have for it."""
        return sum(content.messages[self.slot] for content in self.contents)

    @property
    def size(self) -> int:
        """About how many bytes, compressed, these messages are."""
        return sum(share(content, self.slot) for content in self.contents)


@dataclass(frozen=True, slots=True)
class DaySelection:
    """What the user chose: topics (empty: all), and the days from ``first`` to ``last``.

    ``open_days`` are days that are not closed, too: what is in finished files by now.
    """

    topics: Collection[str] = ()
    first: date | None = None
    last: date | None = None
    open_days: bool = False

    def has(self, slot: Slot) -> bool:
        """Tell whether a partition is chosen. One without topic and date is, unless either is."""
        if slot.topic is None or slot.day is None:
            return not self.topics and self.first is None and self.last is None
        return (
            (not self.topics or slot.topic in self.topics)
            and (self.first is None or slot.day >= self.first)
            and (self.last is None or slot.day <= self.last)
        )


def plan_partitions(
    contents: Sequence[CountedFile],
    manifests: Mapping[Slot, Manifest],
    selection: DaySelection,
    *,
    grace_s: float,
    now_s: float,
) -> list[PlannedPartition]:
    """Return the chosen partitions for which there are archives, days first, then topics."""
    of_slot: dict[Slot, list[CountedFile]] = {}
    for content in contents:
        for slot in filter(selection.has, content.messages):
            finished = of_slot.setdefault(slot, [])
            if not content.is_in_progress:
                finished.append(content)
    unfinished = [content for content in contents if content.is_in_progress]
    partitions = []
    for slot in sorted(of_slot, key=lambda each: (each.day or date.max, each.topic or "")):
        reason = ""
        if not selection.open_days:
            reason = why_open(slot, unfinished, grace_s=grace_s, now_s=now_s)
        manifest = manifests.get(slot)
        known = manifest.known if manifest else {}
        new = tuple(content for content in of_slot[slot] if is_new(content, slot, known))
        if reason:
            state = State.OPEN
        elif not new:
            state = State.DONE
        else:
            state = State.NEW if manifest is None else State.MERGE
        partitions.append(PlannedPartition(slot, state, new, reason))
    return partitions


def why_open(slot: Slot, unfinished: Sequence[CountedFile], *, grace_s: float, now_s: float) -> str:
    """Say why a day is not closed; empty when it is."""
    if slot.day is None:
        return ""
    closing = closes_at(slot.day, grace_s)
    if datetime.fromtimestamp(now_s, UTC) < closing:
        return f"it closes at {closing:%Y-%m-%dT%H:%M:%SZ}"
    for content in unfinished:
        if may_hold(content, slot, closing):
            return f"{content.path} is in progress and may hold messages of it"
    return ""


def may_hold(content: CountedFile, slot: Slot, closing: datetime) -> bool:
    """Tell whether a file in progress holds messages of a topic and day, or will."""
    assert slot.day is not None
    if not content.messages:
        return content.mtime_ns < closing.timestamp() * NS
    if slot.topic not in content.topics:
        return False
    return content.min_ts is None or content.min_ts < end_ns(slot.day)


def is_new(content: CountedFile, slot: Slot, known: Mapping[str, Input]) -> bool:
    """Tell whether a file is not yet in a partition, as it is now.

    Bare bodies cannot be distinguished, so a file of them that has changed is not taken a
    second time (see `changed`).
    """
    taken = known.get(content.key)
    return taken is None or (not taken.is_of(content) and slot.day is not None)


def changed(contents: Sequence[CountedFile], manifest: Manifest | None) -> list[CountedFile]:
    """Return the files of bare bodies that are not what they were when they were taken."""
    known = manifest.known if manifest else {}
    pairs = [(content, known.get(content.key)) for content in contents]
    return [content for content, taken in pairs if taken and not taken.is_of(content)]


def share(content: CountedFile, slot: Slot) -> int:
    """About how many bytes of a file, compressed, are of a topic and day."""
    size = content.size if content.is_compressed else content.size // PLAIN_BY_COMPRESSED
    return size * content.messages[slot] // max(1, content.total)
