"""What each file of archives, Parquet and Delta tables holds.

Each kind has a catalog that says which files count, how many messages each has and of which times:
the indexes of archives, the footers of Parquet, the log of a Delta table. `finding` says which
files are there.
"""

from __future__ import annotations

import hashlib
import os
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from datetime import date
from itertools import chain
from typing import NamedTuple

from nsqtools.archive.finding import ArchiveFile, Wanted, all_of, find_archives, of_each
from nsqtools.archive.layout import Member, folder_of, partition_of
from nsqtools.archive.members import CorruptError
from nsqtools.archive.place import Place, translating_errors
from nsqtools.archive.reader import look_at, read_messages, rows_of
from nsqtools.errors import ConfigurationError
from nsqtools.protocol.names import is_valid_name
from nsqtools.protocol.text import NS

DAY_NS = 86_400 * NS
LONG_NS = 366 * DAY_NS
_EPOCH = date(1970, 1, 1).toordinal()
NEEDED = ("ts_ns", "body")
PARTITIONS = ("topic", "date")


def range_of(day: date) -> tuple[int, int]:
    """Return the first nanosecond of a day, and that of the next one."""
    begin = (day.toordinal() - _EPOCH) * DAY_NS
    return begin, begin + DAY_NS


class PartitionKey(NamedTuple):
    """A partition: one topic on one day; without a day for what has no times."""

    topic: str | None
    day: date | None
    others: tuple[tuple[str, str | None], ...] = ()

    @property
    def values(self) -> dict[str, str | None]:
        """The columns of the partition and their values."""
        day = self.day.isoformat() if self.day else None
        return {"topic": self.topic, "date": day, **dict(self.others)}

    @property
    def folder(self) -> str:
        return folder_of(self.values)


@dataclass(frozen=True, slots=True)
class Source:
    """A file with messages of one topic; None for one of bare bodies, which have no times either.

    ``key`` identifies its content: the head of an archive, which stays when the file moves, else
    where it is. ``damage`` is what could not be read of it.
    """

    file: ArchiveFile
    key: str
    size: int
    topic: str | None
    spans: tuple[Member, ...]
    """Its parts; of Parquet one that is all of it."""
    others: tuple[tuple[str, str | None], ...] = ()
    """The columns of partitions beside topic and date, with their values."""
    is_timed: bool = True
    is_shared: bool = False
    """Whether its file has messages of other topics, too, for which there is another source."""
    begin: str = ""
    """What tells an archive from another with the same key: its begin, of two machines of one
    image; without a head its content, of a file that took the place of another."""
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
        """The days of its messages; none where they have no times."""
        return {
            date.fromordinal(_EPOCH + number)
            for span in (self.spans if self.is_timed else ())
            for number in range(span.min_ts // DAY_NS, span.max_ts // DAY_NS + 1)
        }

    @property
    def slots(self) -> list[PartitionKey]:
        """The partitions that it belongs to."""
        return [PartitionKey(self.topic, day, self.others) for day in self.days or (None,)]

    def between(self, since_ns: int, until_ns: int) -> list[Member]:
        """Return the spans that may have messages of a range of times."""
        return [span for span in self.spans if span.max_ts >= since_ns and span.min_ts < until_ns]


def by_slot(sources: Iterable[Source]) -> dict[PartitionKey, list[Source]]:
    """Return the files of each partition."""
    found: dict[PartitionKey, list[Source]] = {}
    for source in sources:
        for slot in source.slots:
            found.setdefault(slot, []).append(source)
    return found


def sources_of(places: Iterable[Place], wanted: Wanted = all_of) -> list[Source]:
    """Return all finished files of some places, each once: of two copies the one with more.

    Raises `NsqError`.
    """
    found: dict[tuple[str, str | None], Source] = {}
    for source in each_source(find_archives([str(place) for place in places], wanted), wanted):
        known = found.setdefault((source.key, source.topic), source)
        if source.messages > known.messages:
            found[source.key, source.topic] = source
    return list(found.values())


def each_source(archives: Iterable[ArchiveFile], wanted: Wanted) -> Iterator[Source]:
    """Iterate over what finished files hold. Raises `NsqError`."""
    known: dict[str, tuple[Member, ...]] = {}
    found, tables = list[ArchiveFile](), list[ArchiveFile]()
    for archive in archives:
        if archive.table is not None:
            tables.append(archive)
        elif not archive.is_in_progress and wanted(
            # of a date its folder says only that of its first message
            {key: value for key, value in partition_of(archive.name).items() if key == "topic"}
        ):
            found.append(archive)
    for archive, scan in zip(found, of_each(look_at, found), strict=True):
        head = archive.head
        key = f"{head.writer} {head.number}" if head else archive.shown
        spans = _spans_of(archive, scan.members)
        both = zip(spans, known.setdefault(key, spans), strict=False)  # a copy may be cut off
        if any(one != other for one, other in both):
            key = archive.shown
        begin = repr(spans[:1])
        if head is None and not scan.damage:
            with translating_errors("read", archive.shown):
                begin = archive.storage.digest(archive.name, scan.size)
        archive = replace(archive, members=None if scan.is_cut else scan.members)
        source = Source(archive, key, scan.size, None, spans, begin=begin, damage=scan.damage)
        wrong = sorted(topic for topic in scan.topics if not is_valid_name(topic))
        if wrong:
            problem = f"it has messages of invalid topics: {wrong[0][:64]!r}"
            source = replace(source, damage=source.damage or problem)
        topics: list[str | None] = [*sorted(scan.topics - set(wrong))]
        is_shared = len(scan.topics) > 1
        for topic in topics or [None]:
            yield replace(source, topic=topic, is_timed=topic is not None, is_shared=is_shared)
    yield from chain.from_iterable(of_each(_sources_in, tables))


def place_of(path: str) -> str:
    """Return what tells the place of a file in the names of what becomes of it."""
    return hashlib.sha256(os.fsencode(path)).hexdigest()[:16]


def has_grown(archive: ArchiveFile, place: str, names: Iterable[str]) -> bool:
    """Return whether a file of bare bodies was appended to after it became one of some ``names``.

    They end with the hash of what it had then, its size, and its place. Raises ``OSError``.
    """
    size = archive.size()
    return any(
        int(before, 16) < size
        and archive.storage.digest(archive.name, int(before, 16)).startswith(begin)
        for *_, begin, before, _ in (each.split("-") for each in names if each.endswith(place))
    )


def _spans_of(archive: ArchiveFile, members: Sequence[Member]) -> tuple[Member, ...]:
    """The members of a file; where one is of more than a year, as by a clock that was wrong, a span
    for each day that has messages: all days between would be partitions. Raises `NsqError`."""
    if all(member.max_ts - member.min_ts < LONG_NS for member in members):
        return tuple(members)
    days: dict[int, Member] = {}
    for message in read_messages(archive, lambda path, problem: None):
        at = message.timestamp_ns
        known = days.setdefault(at // DAY_NS, Member(0, 0, 0, at, at))
        days[at // DAY_NS] = Member(
            0,
            known.length + len(message.body),
            known.messages + 1,
            min(known.min_ts, at),
            max(known.max_ts, at),
        )
    return tuple(days.values())


def _sources_in(archive: ArchiveFile) -> list[Source]:
    """A file by what its log or its manifest says, or else its footer; a source for each topic."""
    table, shown = archive.table, archive.shown
    assert table is not None
    topic = table.partition.get("topic")
    others = tuple((name, at) for name, at in table.partition.items() if name not in PARTITIONS)
    source = Source(archive, shown, table.bytes, topic, (), others)
    try:
        with translating_errors("read", shown):
            found = rows_of(archive)
    except CorruptError as exc:
        return [replace(source, is_timed=False, damage=str(exc))]
    if missing := [each for each in NEEDED if each not in found.columns]:
        raise without_columns(shown, missing)
    is_mixed = 0 < found.untimed < found.rows
    damage = "it has messages with and without a time" if is_mixed else ""
    span = Member(0, table.bytes, found.rows, found.min_ts_ns or 0, found.max_ts_ns or 0)
    source = replace(source, spans=(span,), damage=damage, is_shared=len(found.topics) > 1)
    return [
        replace(source, topic=each, is_timed=not found.untimed and each is not None)
        for each in ((found.topics or [None]) if found.rows else ())
    ]


def without_columns(shown: str, missing: Iterable[str]) -> ConfigurationError:
    """Return the error for Parquet of something else."""
    return ConfigurationError(
        f"{shown} is Parquet without the columns {', '.join(missing)}",
        hint="What nsq to-file, nsq archive compact and nsq spark ingest write has them.",
    )
