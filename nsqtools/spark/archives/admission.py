"""How far the next batch goes: oldest members first, whole members only, under limits. Pure.

A limit that the first member breaks is broken: a batch that could take nothing would never end.
A member whose count no index tells, such as a file without index, fills any limit of rows.
"""

from __future__ import annotations

import heapq
from collections.abc import Callable, Iterable
from dataclasses import dataclass

from nsqtools.archive.layout import Head, Member
from nsqtools.spark.archives.listing import UNKNOWN, Key
from nsqtools.spark.archives.offsets import Offset
from nsqtools.spark.archives.settings import Limits


@dataclass(frozen=True, slots=True)
class Unread:
    """A file of which bytes ``begin`` to ``end`` are unread.

    ``first_ts`` is about the time of the first unread message. The members are loaded when it is
    the file's turn: most files of a large archive wait for many batches.
    """

    key: Key
    begin: int
    end: int
    is_finished: bool
    first_ts: int
    members: Callable[[], list[Member]]


def advance(files: Iterable[Unread], start: Offset, limits: Limits) -> Offset:
    """Return the offset that the next batch ends with; ``start`` when there is nothing new."""
    files = list(files)
    ends = _admit(files, limits)
    under_way = {**start.under_way}
    read: list[Head] = []
    names = {**start.files}
    for file in files:
        position = ends.get(file.key, file.begin)
        is_read = file.is_finished and position >= file.end
        if isinstance(file.key, str):
            if is_read:
                names[file.key] = file.end
        elif is_read:
            read.append(file.key)
        elif position > start.position(file.key):
            under_way[file.key] = position
    end = Offset(start.read, under_way, names).with_read(read)
    if (end.read, end.under_way, end.files) == (start.read, start.under_way, start.files):
        return start
    if start.is_start and (start.read or start.under_way or start.files):
        return Offset(end.read, end.under_way, end.files, began=start)
    return end


def _admit(files: list[Unread], limits: Limits) -> dict[Key, int]:
    """Return how far each file goes that a batch takes something of."""
    ends: dict[Key, int] = {}
    rows = size = 0
    heap = [(file.first_ts, number, 0) for number, file in enumerate(files)]
    heapq.heapify(heap)
    members: dict[int, list[Member]] = {}
    while heap:
        _, number, at = heapq.heappop(heap)
        file = files[number]
        if limits.files is not None and file.key not in ends and len(ends) >= limits.files:
            continue
        if not at:
            members[number] = file.members()
            if isinstance(file.key, str):  # an offset names it as read, or not at all
                members[number] = _as_one(members[number])
        if at == len(members[number]):
            continue
        member = members[number][at]
        rows += member.messages if member.messages != UNKNOWN else (limits.rows or 0)
        size += member.length
        is_too_much = (limits.rows is not None and rows > limits.rows) or (
            limits.bytes is not None and size > limits.bytes
        )
        if is_too_much and ends:
            break
        ends[file.key] = member.end
        if at + 1 < len(members[number]):
            heapq.heappush(heap, (members[number][at + 1].min_ts, number, at + 1))
    return ends


def _as_one(members: list[Member]) -> list[Member]:
    """All members as one."""
    if len(members) < 2:
        return members
    counts = [member.messages for member in members]
    return [
        Member(
            members[0].offset,
            members[-1].end - members[0].offset,
            UNKNOWN if UNKNOWN in counts else sum(counts),
            min(member.min_ts for member in members),
            max(member.max_ts for member in members),
        )
    ]
