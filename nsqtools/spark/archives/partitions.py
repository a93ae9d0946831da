"""Split files into ranges of members, and pack the ranges into partitions, deterministically.

A range has the index lines of its members, so that its reader can verify their counts. Bytes
without an index are one range without lines. In a plain file they are split at round positions, and
a line belongs to the range in which it begins. `plan_batch` plans to read all current files.
"""

from __future__ import annotations

import os
from bisect import bisect_right
from collections.abc import Callable, Iterable, Iterator
from contextlib import suppress
from functools import wraps
from itertools import accumulate, pairwise
from typing import NamedTuple, ParamSpec, TypeVar

from nsqtools.archive.form import FileForm, LineKind
from nsqtools.archive.layout import ALL_TIMES, Member, TimeRange, decode_index, encode_members
from nsqtools.archive.place import StoredObject, map_concurrently, translating_errors
from nsqtools.spark.archives.archive_files import (
    UNKNOWN,
    ArchiveListing,
    FileKey,
    ListedFile,
    OnArchiveDamage,
)
from nsqtools.spark.archives.damage import MOVE_AWAY, ArchiveDamage, report_damage
from nsqtools.spark.archives.read_settings import ReadSettings
from nsqtools.spark.format_options import slots_of

ROWS_OF_PARTITION = 500_000
FILES_OF_PARTITION = 128
"""The most files in a partition. Rows and files have a weight in bytes: rows that compress well
are few bytes but as much work as others, and opening a file is work as well."""

Part = tuple[ListedFile, list[Member]]
"""A file, and the members to read of it."""


class Range(NamedTuple):
    """Bytes ``begin`` to ``end`` of a file, whose path at the time of the plan was ``path``.

    ``entry`` is its entry in a store. An object that has replaced it is not read.
    """

    path: str
    key: FileKey
    content: FileForm
    begin: int
    end: int
    shown: str
    """The path in rows and reports, which is that of the finished file."""
    lines: bytes = b""
    entry: StoredObject | None = None

    @property
    def members(self) -> list[Member]:
        """The members in the range, empty without an index."""
        return decode_index(self.lines, self.begin)


ReadPartition = tuple[Range, ...]
"""The ranges that one task reads, in this order."""


def file_refusal(content: FileForm, settings: ReadSettings, *, has_index: bool) -> str:
    """Return the reason why a selected file cannot be read, or "" for a readable file."""
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
    file: ListedFile, members: list[Member], settings: ReadSettings, max_weight: float
) -> Iterator[tuple[Range, float]]:
    """Yield ranges of a file's members with their weights, none much above ``max_weight``."""
    content = file.content()
    row_weight = settings.partition_bytes / ROWS_OF_PARTITION
    indexed = [member for member in members if member.messages != UNKNOWN]
    if not _is_whole(file, settings.within):
        indexed = [member for member in indexed if settings.within.may_contain(member)]

    def range_of(begin: int, end: int, lines: bytes = b"") -> Range:
        place = str(file.place)
        return Range(place, file.key, content, begin, end, file.shown, lines, file.entry)

    for run in _contiguous_runs(indexed):
        # The loop uses indexes of the tuple, as an archive may have a million members.
        ends = list(accumulate([member[1] + row_weight * member[2] for member in run]))
        first, start_weight = 0, 0.0
        while first < len(run):
            after = max(first + 1, bisect_right(ends, start_weight + max_weight))
            selected = run[first:after]
            target = range_of(selected[0].offset, selected[-1].end, encode_members(selected))
            yield target, ends[after - 1] - start_weight
            first, start_weight = after, ends[after - 1]
    for member in members[-1:]:
        if member.messages == UNKNOWN:
            # A delimiter of several bytes could be mistaken for another one from its middle.
            is_short = content.kind is LineKind.messages or len(settings.delimiter) == 1
            can_split = is_short and not content.codec.is_compressed
            size = round(max_weight) if can_split else member.length
            for begin in range(member.offset, member.end, max(1, size)):
                end = min(begin + size, member.end)
                yield range_of(begin, end), end - begin


def _is_whole(file: ListedFile, within: TimeRange) -> bool:
    """Return whether all messages are in a range of times, by the commit record."""
    total = file.total
    if within == ALL_TIMES or total is None:
        return within == ALL_TIMES
    return bool(total.max_ts) and within.contains(total.min_ts) and within.contains(total.max_ts)


def _contiguous_runs(members: list[Member]) -> Iterator[list[Member]]:
    """Yield lists of members without gaps between them."""
    gaps = [n for n, (one, two) in enumerate(pairwise(members), 1) if two[0] != one[0] + one[1]]
    for begin, end in pairwise([0, *gaps, len(members)]):
        yield members[begin:end]


def pack(
    ranges: Iterable[tuple[Range, float]], file_weight: float, limit: float
) -> list[ReadPartition]:
    """Pack ranges, in their order, into partitions of about the weight ``limit``."""
    partitions: list[ReadPartition] = []
    current: list[Range] = []
    total = 0.0
    for target, weight in ranges:
        is_same_file = bool(current) and current[-1].path == target.path
        weight += 0.0 if is_same_file else file_weight
        if current and total + weight > limit:
            partitions.append(tuple(current))
            current, total = [], 0.0
        if current and is_same_file and current[-1].end == target.begin and target.lines:
            lines = current[-1].lines + target.lines
            current[-1] = current[-1]._replace(end=target.end, lines=lines)
        else:
            current.append(target)
        total += weight
    if current:
        partitions.append(tuple(current))
    return partitions


def partitions_of(parts: Iterable[Part], settings: ReadSettings) -> list[ReadPartition]:
    """Plan to read parts of files; ``parts`` may be an iterator.

    There are at least as many partitions as parallel tasks, but none below a quarter of
    `ReadSettings.partition_bytes` unless `ReadSettings.min_partitions` requires it.
    """
    # Files are split into ranges of the smallest size, which are joined when their total is known.
    # So the members of a large archive are never in memory at the same time.
    max_weight = float(settings.partition_bytes)
    file_weight, row_weight = max_weight / FILES_OF_PARTITION, max_weight / ROWS_OF_PARTITION
    range_weight = max(1.0, max_weight / 4)
    if settings.min_partitions:
        parts = list(parts)
        members = (member for _, members in parts for member in members)
        selected = [member for member in members if settings.within.may_contain(member)]
        total = sum(member.length + row_weight * max(0, member.messages) for member in selected)
        total += file_weight * len(parts)
        limit = range_weight = max(1.0, min(max_weight, total / settings.min_partitions))
    ranges = [item for part in parts for item in ranges_of(*part, settings, range_weight)]
    if not settings.min_partitions:
        files = len({target.path for target, _ in ranges})
        total = sum(weight for _, weight in ranges) + files * file_weight
        slots = slots_of(os.environ) or os.cpu_count() or 1
        limit = max(range_weight, min(max_weight, total / slots))
    return pack(ranges, file_weight, limit)


Parameters = ParamSpec("Parameters")
Plan = TypeVar("Plan")

TRIES = 5  # A file moves at most a few times: when it is finished, and when it is uploaded.


def planned_again(plan: Callable[Parameters, Plan]) -> Callable[Parameters, Plan]:
    """Decorate a function to plan again if a file moves in the meantime.

    It raises `OutputError` if a file is still missing after `TRIES` plans.
    """

    @wraps(plan)
    def again(*args: Parameters.args, **kwargs: Parameters.kwargs) -> Plan:
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
    on_damage = damage_reporter(settings)
    files = ArchiveListing(settings, settings.within).files(on_damage).values()
    return partitions_of(_parts(files, settings, on_damage), settings)


def damage_reporter(settings: ReadSettings) -> OnArchiveDamage:
    """Return a function that reports damage of whole files during planning."""
    return lambda damage: report_damage(
        settings.damage_path, f"{damage.file} {damage.pos}", [damage], MOVE_AWAY
    )


def is_read(file: ListedFile, settings: ReadSettings, on_damage: OnArchiveDamage) -> bool:
    """Return whether a file is selected and readable; report an unreadable one."""
    content = file.content()
    if problem := file_refusal(content, settings, has_index=file.has_index):
        on_damage(ArchiveDamage(file.shown, 0, problem))
        return False
    topics = settings.wanted_topics
    if topics is None or content.kind is LineKind.nothing:
        return content.kind is not LineKind.nothing
    if content.kind is LineKind.bodies:
        return settings.topic in topics
    # A file with a head has one topic; files of other programs may mix topics.
    return file.head is None or content.topic in ("", *topics)


def _parts(
    files: Iterable[ListedFile], settings: ReadSettings, on_damage: OnArchiveDamage
) -> Iterator[Part]:
    def part_of(file: ListedFile) -> Part | None:
        return (file, file.readable()) if is_read(file, settings, on_damage) else None

    files = (file for file in files if not file.has_none_within(settings.within))
    for part in filter(None, map_concurrently(part_of, files, is_remote=bool(settings.stored()))):
        yield part
        part[0].forget_members()
