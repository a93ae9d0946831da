"""List the files of archives, Parquet and Delta tables with their topics, counts and times.

Each format has a catalog: the indexes of archives, the footers of Parquet, the log of a Delta
table. `finding` lists the files.
"""

from __future__ import annotations

import hashlib
import os
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from datetime import date
from itertools import chain
from typing import NamedTuple

from nsqtools.archive.finding import (
    ArchiveFile,
    PartitionFilter,
    any_partition,
    find_archives,
    map_archives,
)
from nsqtools.archive.layout import Member, folder_of, partition_of
from nsqtools.archive.members import CorruptError
from nsqtools.archive.place import Place, translating_errors
from nsqtools.archive.reader import parquet_contents, read_messages, scan_archive
from nsqtools.errors import ConfigurationError
from nsqtools.protocol.names import is_valid_name
from nsqtools.protocol.text import NS

DAY_NS = 86_400 * NS
# A member with a longer range of times was written while a clock was wrong.
LONG_NS = 366 * DAY_NS
_EPOCH = date(1970, 1, 1).toordinal()
REQUIRED_COLUMNS = ("ts_ns", "body")
PARTITIONS = ("topic", "date")


def day_range(day: date) -> tuple[int, int]:
    """Return the first nanosecond of a day and of the next day, in UTC."""
    begin = (day.toordinal() - _EPOCH) * DAY_NS
    return begin, begin + DAY_NS


class PartitionKey(NamedTuple):
    """One topic on one day; messages without times have no day.

    ``extras`` are further partition columns and their values.
    """

    topic: str | None
    day: date | None
    extras: tuple[tuple[str, str | None], ...] = ()

    @property
    def values(self) -> dict[str, str | None]:
        """The partition columns and their values."""
        day = self.day.isoformat() if self.day else None
        return {"topic": self.topic, "date": day, **dict(self.extras)}

    @property
    def folder(self) -> str:
        return folder_of(self.values)


@dataclass(frozen=True, slots=True)
class Source:
    """The messages of one topic in a file. Bare bodies have neither topic nor times.

    ``key`` identifies the file: the head of an archive, which stays the same when the file moves,
    or the path. ``damage`` describes an unreadable part.
    """

    file: ArchiveFile
    key: str
    size: int
    """In bytes; of a file without a head that of `ArchiveFile.content`."""
    topic: str | None
    spans: tuple[Member, ...]
    """The members of an archive; for Parquet one span for the whole file."""
    extras: tuple[tuple[str, str | None], ...] = ()
    """The values of partition columns other than topic and date."""
    is_timed: bool = True
    is_shared: bool = False
    """Whether the file has messages of other topics as well, which have their own sources."""
    begin: str = ""
    """Distinguishes files with the same key: the first member, for machines cloned from one image;
    without a head the hash of the content, for a file that replaced another one."""
    damage: str = ""

    @property
    def shown(self) -> str:
        return self.file.shown

    @property
    def is_parquet(self) -> bool:
        return self.file.table is not None

    @property
    def messages(self) -> int:
        return sum(span.messages for span in self.spans)

    @property
    def days(self) -> set[date]:
        """The days of the messages; empty if they have no times."""
        return {
            date.fromordinal(_EPOCH + number)
            for span in (self.spans if self.is_timed else ())
            for number in range(span.min_ts // DAY_NS, span.max_ts // DAY_NS + 1)
        }

    @property
    def partitions(self) -> list[PartitionKey]:
        """The partitions with messages of this source."""
        return [PartitionKey(self.topic, day, self.extras) for day in self.days or (None,)]

    def between(self, since_ns: int, until_ns: int) -> list[Member]:
        """Return the spans that may have messages in a range of times."""
        return [span for span in self.spans if span.max_ts >= since_ns and span.min_ts < until_ns]


def group_by_partition(sources: Iterable[Source]) -> dict[PartitionKey, list[Source]]:
    """Return the sources of each partition."""
    groups: dict[PartitionKey, list[Source]] = {}
    for source in sources:
        for key in source.partitions:
            groups.setdefault(key, []).append(source)
    return groups


def find_sources(
    places: Iterable[Place], is_selected: PartitionFilter = any_partition
) -> list[Source]:
    """Return the sources of all finished files, each once: of two copies the larger one.

    Raises `NsqError`.
    """
    sources: dict[tuple[str, str | None], Source] = {}
    archives = find_archives([str(place) for place in places], is_selected)
    for source in iterate_sources(archives, is_selected):
        copy = sources.setdefault((source.key, source.topic), source)
        if source.messages > copy.messages:
            sources[source.key, source.topic] = source
    return list(sources.values())


def iterate_sources(
    archives: Iterable[ArchiveFile], is_selected: PartitionFilter
) -> Iterator[Source]:
    """Iterate over the sources of finished files. Raises `NsqError`."""
    spans_by_key: dict[str, tuple[Member, ...]] = {}
    logs, tables = list[ArchiveFile](), list[ArchiveFile]()
    for archive in archives:
        if archive.table is not None:
            tables.append(archive)
        elif not archive.is_in_progress and is_selected(
            # The date of the folder is that of the first message only, so it selects nothing.
            {key: value for key, value in partition_of(archive.name).items() if key == "topic"}
        ):
            logs.append(archive)
    for archive, scan in zip(logs, map_archives(scan_archive, logs), strict=True):
        head = archive.head
        key = f"{head.writer} {head.number}" if head else archive.shown
        spans = _spans_of(archive, scan.members)
        # A truncated copy has fewer spans. A file with the same head and other spans is no copy.
        pairs = zip(spans, spans_by_key.setdefault(key, spans), strict=False)
        if any(span != copied for span, copied in pairs):
            key = archive.shown
        begin, size = repr(spans[:1]), scan.size
        if head is None and not scan.damage:
            with translating_errors("read", archive.shown):
                begin, size = archive.content(scan.size)
        archive = replace(archive, members=None if scan.is_cut else scan.members)
        source = Source(archive, key, size, None, spans, begin=begin, damage=scan.damage)
        invalid = sorted(topic for topic in scan.topics if not is_valid_name(topic))
        if invalid:
            problem = f"it has messages of invalid topics: {invalid[0][:64]!r}"
            source = replace(source, damage=source.damage or problem)
        topics: list[str | None] = [*sorted(scan.topics - set(invalid))]
        is_shared = len(scan.topics) > 1
        for topic in topics or [None]:
            yield replace(source, topic=topic, is_timed=topic is not None, is_shared=is_shared)
    yield from chain.from_iterable(map_archives(_sources_of_parquet, tables))


def hash_path(path: str) -> str:
    """Return a short hash of a path, which names of derived files contain."""
    return hashlib.sha256(os.fsencode(path)).hexdigest()[:16]


def has_grown(archive: ArchiveFile, place: str, names: Iterable[str]) -> bool:
    """Return whether a file of bare bodies has grown since it was converted.

    ``place`` is the hash of its path, and ``names`` are the names of Parquet files. A name ends
    with the hash of the content at the time, its size, and the hash of the path. Raises
    ``OSError``.
    """
    size = archive.size()
    return any(
        int(old_size, 16) < size
        and archive.storage.digest(archive.name, int(old_size, 16)).startswith(digest)
        for *_, digest, old_size, _ in (name.split("-") for name in names if name.endswith(place))
    )


def _spans_of(archive: ArchiveFile, members: Sequence[Member]) -> tuple[Member, ...]:
    """Return the members of a file, or one span per day if a member spans more than a year.

    Otherwise each day of such a member would become a partition. Raises `NsqError`.
    """
    if all(member.max_ts - member.min_ts < LONG_NS for member in members):
        return tuple(members)
    days: dict[int, Member] = {}
    for message in read_messages(archive, lambda path, problem: None):
        time_ns = message.timestamp_ns
        day = time_ns // DAY_NS
        span = days.get(day, Member(0, 0, 0, time_ns, time_ns))
        days[day] = Member(
            0,
            span.length + len(message.body),
            span.messages + 1,
            min(span.min_ts, time_ns),
            max(span.max_ts, time_ns),
        )
    return tuple(days.values())


def _sources_of_parquet(archive: ArchiveFile) -> list[Source]:
    """Return a source for each topic of a Parquet file, by its log, manifest or footer."""
    table, shown = archive.table, archive.shown
    assert table is not None
    topic = table.partition.get("topic")
    extras = tuple(
        (name, value) for name, value in table.partition.items() if name not in PARTITIONS
    )
    source = Source(archive, shown, table.bytes, topic, (), extras)
    try:
        with translating_errors("read", shown):
            contents = parquet_contents(archive)
    except CorruptError as exc:
        return [replace(source, is_timed=False, damage=str(exc))]
    if missing := [name for name in REQUIRED_COLUMNS if name not in contents.columns]:
        raise missing_columns_error(shown, missing)
    is_mixed = 0 < contents.untimed < contents.rows
    damage = "it has messages with and without a time" if is_mixed else ""
    min_ts, max_ts = contents.min_ts_ns or 0, contents.max_ts_ns or 0
    span = Member(0, table.bytes, contents.rows, min_ts, max_ts)
    source = replace(source, spans=(span,), damage=damage, is_shared=len(contents.topics) > 1)
    return [
        replace(source, topic=topic, is_timed=not contents.untimed and topic is not None)
        for topic in ((contents.topics or [None]) if contents.rows else ())
    ]


def missing_columns_error(shown: str, missing: Iterable[str]) -> ConfigurationError:
    """Return the error for Parquet without the columns of messages."""
    return ConfigurationError(
        f"{shown} is Parquet without the columns {', '.join(missing)}",
        hint="Give files that nsq to-file, nsq archive compact or nsq spark ingest has written.",
    )
