"""The position of a stream in an archive, and the end of its next batch.

    {"version": 1,
     "writers": {"<32 hex>": {"read": "1-17,19-40", "under_way": {"41": 12345}, "unread": "42"}},
     "files": {"old/clicks.log.gz": 4711}}

The size of an offset does not depend on that of the archive. For each writer it has the numbers of
the finished files that were read completely, the number of bytes (always whole members) read of
other files, and the numbers of files with messages that have not been read at all. If one of the
latter is gone, data is lost. A number that is missing everywhere proves nothing, because an
archiver skips a number when it crashes or finds a full disk. Files without a number, of early
archivers and of nsq_to_file, are recorded by name and size when they have been read, after they
are finished; many of them are packed.

The offset of a stream of topics has the name of its spool: ``{"run": .., "archive": ..}``.

``began`` is part of the first offset after a start that was not at the beginning. Spark does not
store where a stream started. If the first batch is planned again after a crash, it begins there.

`advance` takes the oldest members first, only whole members, up to the limits. The first member is
taken even if it exceeds a limit, because a stream with empty batches would never proceed. A member
with an unknown count, as in a file without index, counts a row for each byte.
"""

from __future__ import annotations

import heapq
import json
import zlib
from base64 import b64decode, b64encode
from bisect import bisect_left, bisect_right
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple

from nsqtools.archive.layout import ALL_TIMES, Head, Member, TimeRange
from nsqtools.archive.place import map_concurrently
from nsqtools.errors import ConfigurationError
from nsqtools.spark.archives.archive_files import UNKNOWN, FileKey, ListedFile
from nsqtools.spark.archives.read_settings import BatchLimits

VERSION = 1
PACKED_VERSION = 2
"""The version with packed names of files, which a reader of version 1 would not find."""

MAX_UNPACKED_FILES = 100

Span = tuple[int, int]


def parse_spans(text: str) -> tuple[Span, ...]:
    """Parse ``1-17,19``. Raises ``ValueError``."""
    spans: list[Span] = []
    for part in text.split(",") if text else ():
        low, _, high = part.partition("-")
        span = (int(low), int(high or low))
        if span[0] > span[1] or (spans and span[0] <= spans[-1][1]):
            raise ValueError(f"{text!r} is not in order")
        spans.append(span)
    return tuple(spans)


def format_spans(spans: Iterable[Span]) -> str:
    """Format spans for `parse_spans`."""
    return ",".join(f"{low}" if low == high else f"{low}-{high}" for low, high in spans)


def has_number(spans: tuple[Span, ...], number: int) -> bool:
    """Return whether a number is in one of the sorted spans."""
    index = bisect_right(spans, number, key=lambda span: span[0]) - 1
    return index >= 0 and number <= spans[index][1]


def unite(spans: Iterable[Span]) -> tuple[Span, ...]:
    """Sort spans, and join adjacent and overlapping ones."""
    united: list[Span] = []
    for low, high in sorted(spans):
        if united and low <= united[-1][1] + 1:
            united[-1] = (united[-1][0], max(high, united[-1][1]))
        else:
            united.append((low, high))
    return tuple(united)


def spans_of(heads: Iterable[Head]) -> dict[str, tuple[Span, ...]]:
    """Return the numbers of files by writer."""
    numbers: dict[str, list[Span]] = {}
    for head in heads:
        numbers.setdefault(head.writer, []).append((head.number, head.number))
    return {writer: unite(numbers[writer]) for writer in sorted(numbers)}


def numbers_beyond(spans: tuple[Span, ...], excluded: tuple[Span, ...]) -> list[int]:
    """Return the numbers in ``spans`` that are not in ``excluded``."""
    numbers: list[int] = []
    for low, high in spans:
        begin = low
        for other_low, other_high in excluded:
            if other_high < begin or other_low > high:
                continue
            numbers += range(begin, other_low)
            begin = other_high + 1
        numbers += range(begin, high + 1)
    return numbers


@dataclass(frozen=True, slots=True)
class Offset:
    """The position of a stream.

    ``read`` has spans by writer, ``under_way`` bytes by file, and ``files`` sizes by name.
    """

    read: Mapping[str, tuple[Span, ...]] = field(default_factory=dict)
    under_way: Mapping[Head, int] = field(default_factory=dict)
    files: Mapping[str, int] = field(default_factory=dict)
    unread: frozenset[Head] = frozenset()
    """Files with messages, at the time of this offset, of which nothing has been read."""
    within: TimeRange = ALL_TIMES
    """The range of times of earlier batches: messages outside of it are never read."""
    is_start: bool = False
    """Whether the stream starts here, without a batch that ended here."""
    began: Offset | None = None
    run: str = ""
    """The name of the spool; empty for an archive."""

    def has_read(self, head: Head) -> bool:
        """Return whether a file is finished and read."""
        return has_number(self.read.get(head.writer, ()), head.number)

    def position(self, head: Head) -> int:
        """Return how many bytes have been read of a file that is not read completely."""
        return self.under_way.get(head, 0)

    def with_read(self, heads: Iterable[Head]) -> Offset:
        """Return the offset with these files read completely."""
        heads = set(heads)
        read = {**self.read}
        for writer, spans in spans_of(heads).items():
            read[writer] = unite([*read.get(writer, ()), *spans])
        under_way = {head: pos for head, pos in self.under_way.items() if head not in heads}
        return replace(self, read=read, under_way=under_way, unread=self.unread - heads)

    def heads_beyond(self, start: Offset) -> list[Head]:
        """Return the files that have been read completely since an earlier offset."""
        return [
            Head(writer, number)
            for writer in sorted(self.read)
            for number in numbers_beyond(self.read[writer], start.read.get(writer, ()))
        ]

    def encode(self) -> dict[str, Any]:
        """Return the document that Spark stores; equal offsets have equal texts."""
        writers: dict[str, dict[str, Any]] = {}
        for writer in sorted({*self.read, *(head.writer for head in self.under_way)}):
            writers[writer] = {"read": format_spans(self.read.get(writer, ())), "under_way": {}}
        for writer, spans in spans_of(self.unread).items():
            state = writers.setdefault(writer, {"read": "", "under_way": {}})
            state["unread"] = format_spans(spans)
        for head in sorted(self.under_way):
            writers[head.writer]["under_way"][str(head.number)] = self.under_way[head]
        document: dict[str, Any] = {"version": VERSION, "writers": writers}
        if self.files:
            files = dict(sorted(self.files.items()))
            if len(files) > MAX_UNPACKED_FILES:  # Spark stores the offset with every batch.
                packed = zlib.compress(json.dumps(files).encode(), 6)
                document["version"] = PACKED_VERSION
                document["packed_files"] = b64encode(packed).decode()
            else:
                document["files"] = files
        if self.within != ALL_TIMES:
            document["within"] = [self.within.since_ns, self.within.until_ns]
        if self.is_start:
            document["is_start"] = True
        if self.began is not None:
            document["began"] = self.began.encode()
        return {"run": self.run, "archive": document} if self.run else document


def decode_offset(document: Any) -> Offset:
    """Decode the document of `Offset.encode`. Raises `ConfigurationError`."""
    try:
        if run := document.get("run"):
            return replace(decode_offset(document["archive"]), run=str(run))
        if document["version"] not in (VERSION, PACKED_VERSION):
            raise ConfigurationError(
                f"the offset is of version {document['version']}, this program knows "
                f"{PACKED_VERSION}",
                hint="The checkpoint was written by another version of nsqtools.",
            )
        read: dict[str, tuple[Span, ...]] = {}
        under_way: dict[Head, int] = {}
        unread: set[Head] = set()
        for writer, state in document["writers"].items():
            for low, high in parse_spans(state.get("unread", "")):
                unread.update(Head(writer, number) for number in range(low, high + 1))
            if spans := parse_spans(state["read"]):
                read[writer] = spans
            for number, position in state["under_way"].items():
                under_way[Head(writer, int(number))] = int(position)
        files = document.get("files", {})
        if "packed_files" in document:
            files = json.loads(zlib.decompress(b64decode(document["packed_files"])))
        return Offset(
            read,
            under_way,
            {str(name): int(size) for name, size in files.items()},
            frozenset(unread),
            TimeRange(*document["within"]) if "within" in document else ALL_TIMES,
            is_start=bool(document.get("is_start", False)),
            began=decode_offset(document["began"]) if "began" in document else None,
        )
    except ConfigurationError:
        raise
    except (KeyError, TypeError, ValueError, AttributeError, zlib.error) as exc:
        raise ConfigurationError(
            f"{json.dumps(document)[:200]} is not an offset ({exc!r})",
            hint="The checkpoint's directory offsets shows what an offset looks like.",
        ) from None


class Unread(NamedTuple):
    """A file with unread bytes from ``begin`` to ``end``.

    Its members are loaded lazily, because most files of a large archive wait for many batches.
    """

    file: ListedFile
    begin: int
    end: int
    is_finished: bool

    @property
    def key(self) -> FileKey:
        return self.file.key

    def members(self) -> list[Member]:
        """Return the unread members."""
        return between(self.file.readable(), self.begin, self.end)


def between(members: list[Member], begin: int, end: int) -> list[Member]:
    """Return the members from one offset to another."""
    low = bisect_left(members, begin, key=lambda member: member.offset)
    high = bisect_left(members, end, lo=low, key=lambda member: member.offset)
    return members[low:high]


def advance(files: Iterable[Unread], start: Offset, limits: BatchLimits) -> Offset:
    """Return the end of the next batch, or ``start`` if there is nothing new."""
    files = list(files)
    ends = _admit(files, limits)
    under_way = {**start.under_way}
    read: list[Head] = []
    unread: list[Head] = []
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
        elif file.end and not position:
            unread.append(file.key)
    end = Offset(start.read, under_way, names, run=start.run).with_read(read)
    if (end.read, end.under_way, end.files) == (start.read, start.under_way, start.files):
        return start
    began = start if start.is_start and (start.read or start.under_way or start.files) else None
    return replace(end, within=start.within, unread=frozenset(unread), began=began)


def _admit(files: list[Unread], limits: BatchLimits) -> dict[FileKey, int]:
    """Return the files of a batch, each with the position where the batch ends."""
    ends: dict[FileKey, int] = {}
    rows = size = 0
    files = sorted(files, key=lambda unread: unread.file.first_ts)
    is_remote = any(unread.file.entry is not None for unread in files)
    loaded = map_concurrently(_admissible_members, files, is_remote=is_remote)
    # The heap has the next member of each file: its time, the number of the file, and its index.
    heap = [(unread.file.first_ts, number, 0) for number, unread in enumerate(files)]
    members: dict[int, list[Member]] = {}
    while heap:
        _, number, index = heapq.heappop(heap)
        file = files[number]
        if limits.files is not None and file.key not in ends and len(ends) >= limits.files:
            continue
        if not index:
            # Files leave the heap for the first time in the order of `files`, as they are loaded.
            members[number] = next(loaded)
        if index == len(members[number]):
            continue
        member = members[number][index]
        rows += member.messages if member.messages != UNKNOWN else member.length
        size += member.length
        exceeds = (limits.rows is not None and rows > limits.rows) or (
            limits.bytes is not None and size > limits.bytes
        )
        if exceeds and ends:
            break
        ends[file.key] = member.end
        if index + 1 < len(members[number]):
            heapq.heappush(heap, (members[number][index + 1].min_ts, number, index + 1))
    return ends


def _admissible_members(unread: Unread) -> list[Member]:
    """Return the members of a file; a file without a head is one member."""
    # An offset can only record that such a file has been read completely.
    members = unread.members()
    if isinstance(unread.key, Head) or not members:
        return members
    begin, counts = members[0].offset, [member.messages for member in members]
    rows = UNKNOWN if UNKNOWN in counts else sum(counts)
    return [Member(begin, members[-1].end - begin, rows, 0, 0)]
