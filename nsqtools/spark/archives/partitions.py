"""Cut files into ranges of members, and pack these into partitions: the same for the same files.

A range carries the index lines of its members, so that its reader knows how many messages each must
have. What no index covers is one range without lines; a plain file is cut at round positions then,
and a line belongs to the range in which it begins. `plan_batch` plans to read all there is now.
"""

from __future__ import annotations

import os
from bisect import bisect_right
from collections.abc import Callable, Iterable, Iterator
from contextlib import suppress
from functools import wraps
from itertools import accumulate, pairwise
from typing import NamedTuple, ParamSpec, TypeVar

from nsqtools.archive.form import LineKind
from nsqtools.archive.layout import EVER, Member, TimeRange, decode_index, encode_members
from nsqtools.archive.place import Entry, map_concurrently, translating_errors
from nsqtools.spark.archives.archive_files import (
    UNKNOWN,
    ArchiveListing,
    FileContent,
    Key,
    ListedFile,
    OnDamage,
)
from nsqtools.spark.archives.damage import MOVE_AWAY, ArchiveDamage, report_damage
from nsqtools.spark.archives.read_settings import ReadSettings
from nsqtools.spark.format_options import slots_of

ROWS_OF_PARTITION = 500_000
FILES_OF_PARTITION = 128
"""The most that a partition has. A row, or a file, weighs as this many bytes of members: rows that
compress well are few bytes and much work, and a file that is opened is work by itself."""

Part = tuple[ListedFile, list[Member]]
"""What is to be read of a file."""


class Range(NamedTuple):
    """Bytes ``begin`` to ``end`` of a file, which was at ``path`` when this was planned.

    ``entry`` is what a store said of it then: another object in its place is not read.
    """

    path: str
    key: Key
    content: FileContent
    begin: int
    end: int
    shown: str
    """The path that rows and reports name: the one the file has when it is finished."""
    lines: bytes = b""
    entry: Entry | None = None

    @property
    def members(self) -> list[Member]:
        """The members in it; none when no index names them."""
        return decode_index(self.lines, self.begin)


ReadPartition = tuple[Range, ...]
"""What one task reads, in this order."""


def refusal(content: FileContent, settings: ReadSettings, *, has_index: bool) -> str:
    """Return why a file that no option excludes cannot be read; empty when it can."""
    if content.kind is not LineKind.bodies or content.foreign:
        return content.foreign
    if not has_index and not settings.raw:
        return (
            "it does not hold messages as nsq to-file writes them; option format=raw reads bodies"
        )
    if settings.topics and settings.topic is None:
        return "the topic of its bodies is unknown; name it with the option topic"
    return ""


def ranges_of(
    file: ListedFile, members: list[Member], settings: ReadSettings, most: float
) -> Iterator[tuple[Range, float]]:
    """Iterate over the ranges of a file's members, none much above ``most``, and their weights."""
    content = file.content()
    row_weight = settings.partition_bytes / ROWS_OF_PARTITION
    known = [each for each in members if each.messages != UNKNOWN]
    if not _is_whole(file, settings.within):
        known = [each for each in known if settings.within.may_have(each)]

    def range_of(begin: int, end: int, lines: bytes = b"") -> Range:
        place = str(file.place)
        return Range(place, file.key, content, begin, end, file.shown, lines, file.entry)

    for run in _runs(known):
        ends = list(accumulate([each[1] + row_weight * each[2] for each in run]))
        first, before = 0, 0.0
        while first < len(run):
            after = max(first + 1, bisect_right(ends, before + most))
            some = run[first:after]
            wanted = range_of(some[0].offset, some[-1].end, encode_members(some))
            yield wanted, ends[after - 1] - before
            first, before = after, ends[after - 1]
    for member in members[-1:]:
        if member.messages == UNKNOWN:
            # a long delimiter could be taken for another from its middle
            is_short = content.kind is LineKind.messages or len(settings.delimiter) == 1
            can_be_cut = is_short and not content.codec.is_compressed
            size = round(most) if can_be_cut else member.length
            for begin in range(member.offset, member.end, max(1, size)):
                end = min(begin + size, member.end)
                yield range_of(begin, end), end - begin


def _is_whole(file: ListedFile, within: TimeRange) -> bool:
    """Whether all messages are in a range, by the commit record."""
    total = file.total
    if within == EVER or total is None:
        return within == EVER
    return bool(total.max_ts) and within.has(total.min_ts) and within.has(total.max_ts)


def _runs(members: list[Member]) -> Iterator[list[Member]]:
    """Iterate over members that follow each other in the file."""
    cuts = [at for at, (one, two) in enumerate(pairwise(members), 1) if two[0] != one[0] + one[1]]
    for begin, end in pairwise([0, *cuts, len(members)]):
        yield members[begin:end]


def pack(
    ranges: Iterable[tuple[Range, float]], file_weight: float, limit: float
) -> list[ReadPartition]:
    """Pack ranges, in their order, into partitions of about the weight ``limit``."""
    partitions: list[ReadPartition] = []
    held: list[Range] = []
    total = 0.0
    for each, weight in ranges:
        is_next = bool(held) and held[-1].path == each.path
        weight += 0.0 if is_next else file_weight
        if held and total + weight > limit:
            partitions.append(tuple(held))
            held, total = [], 0.0
        if held and is_next and held[-1].end == each.begin and each.lines:
            held[-1] = held[-1]._replace(end=each.end, lines=held[-1].lines + each.lines)
        else:
            held.append(each)
        total += weight
    if held:
        partitions.append(tuple(held))
    return partitions


def partitions_of(parts: Iterable[Part], settings: ReadSettings) -> list[ReadPartition]:
    """Plan to read parts of files; ``parts`` may be made lazily.

    There are at least as many partitions as run at a time, but none below a quarter of the wanted
    size unless `ReadSettings.min_partitions` asks for it. Files are cut that fine, and joined again
    as their total allows: the members of a large archive are never in memory all at once.
    """
    most = float(settings.partition_bytes)
    file_weight, row_weight = most / FILES_OF_PARTITION, most / ROWS_OF_PARTITION
    cut = max(1.0, most / 4)
    if settings.min_partitions:
        parts = list(parts)
        members = (member for _, members in parts for member in members)
        some = [each for each in members if settings.within.may_have(each)]
        total = sum(each.length + row_weight * max(0, each.messages) for each in some)
        total += file_weight * len(parts)
        limit = cut = max(1.0, min(most, total / settings.min_partitions))
    ranges = [each for part in parts for each in ranges_of(*part, settings, cut)]
    if not settings.min_partitions:
        files = len({each.path for each, _ in ranges})
        total = sum(weight for _, weight in ranges) + files * file_weight
        slots = slots_of(os.environ) or os.cpu_count() or 1
        limit = max(cut, min(most, total / slots))
    return pack(ranges, file_weight, limit)


Given = ParamSpec("Given")
Planned = TypeVar("Planned")

TRIES = 5


def planned_again(plan: Callable[Given, Planned]) -> Callable[Given, Planned]:
    """Have a function plan again when a file has moved meanwhile. It raises `OutputError` then."""

    @wraps(plan)
    def again(*args: Given.args, **kwargs: Given.kwargs) -> Planned:
        with translating_errors("read", ""):
            for _ in range(TRIES - 1):
                with suppress(FileNotFoundError):
                    return plan(*args, **kwargs)
            return plan(*args, **kwargs)

    return again


@planned_again
def plan_batch(settings: ReadSettings) -> list[ReadPartition]:
    """Plan to read every file, those in progress up to their last durable member.

    Raises `NotFoundError`, `OutputError`, and `NsqError` for damage that fails the query.
    """
    tell = damage_reporter(settings)
    files = ArchiveListing(settings, settings.within).files(tell).values()
    return partitions_of(_parts(files, settings, tell), settings)


def damage_reporter(settings: ReadSettings) -> OnDamage:
    """Return a function that reports damage found while planning."""
    return lambda damage: report_damage(
        settings.damage_path, f"{damage.file} {damage.pos}", [damage], MOVE_AWAY
    )


def is_read(file: ListedFile, settings: ReadSettings, tell: OnDamage) -> bool:
    """Whether a file is to be read; one that should be and cannot is reported."""
    content = file.content()
    if problem := refusal(content, settings, has_index=file.has_index):
        tell(ArchiveDamage(file.shown, 0, problem))
        return False
    topics = settings.wanted_topics
    if topics is None or content.kind is LineKind.nothing:
        return content.kind is not LineKind.nothing
    if content.kind is LineKind.bodies:
        return settings.topic in topics
    # a file of one of our writers has one topic; another, repaired or not, may mix them
    return file.head is None or content.topic in ("", *topics)


def _parts(files: Iterable[ListedFile], settings: ReadSettings, tell: OnDamage) -> Iterator[Part]:
    def part_of(file: ListedFile) -> Part | None:
        return (file, file.readable()) if is_read(file, settings, tell) else None

    wanted = (file for file in files if not file.has_none_within(settings.within))
    for part in filter(None, map_concurrently(part_of, wanted, is_remote=bool(settings.stored()))):
        yield part
        part[0].forget_members()
