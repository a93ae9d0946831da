"""How far a stream has read an archive, and how far its next batch goes.

    {"version": 1,
     "writers": {"<32 hex>": {"read": "1-17,19-40", "under_way": {"41": 12345}, "unread": "42"}},
     "files": {"old/clicks.log.gz": 4711}}

An offset is small whatever the archive's size. For each writer it has the numbers of the files that
are finished and read to their end, for files that are partly read the number of bytes (always whole
members), and the numbers of files that hold messages and have not been read at all: one of them
that is gone is lost data. Numbers that are nowhere prove nothing: an archiver that crashes, or
finds a full disk, leaves one out. Files without a number, of early archivers and of nsq_to_file,
are there by name and size once they are read, which is when they are finished; many of them are
packed.

That of a stream of topics, which names the spool that it is in, is ``{"run": .., "archive": ..}``.

``began`` is in the first offset after a start that was not at the beginning. Spark does not store
where a stream started: if the first batch is planned again after a crash, it begins there.

`advance` takes the oldest members first, whole members only, under limits. A limit that the first
member exceeds is exceeded, because a batch that took nothing would never end. A member with an
unknown count, such as that of a file without index, exhausts any limit of rows.
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

from nsqtools.archive.layout import EVER, Head, Member, TimeRange
from nsqtools.archive.place import map_concurrently
from nsqtools.errors import ConfigurationError
from nsqtools.spark.archives.archive_files import UNKNOWN, Key, ListedFile
from nsqtools.spark.archives.read_settings import BatchLimits

VERSION = 1
PACKED_VERSION = 2
"""With the names of files packed; version 1 would take them for unread."""

FEW_FILES = 100

Span = tuple[int, int]


def parse_spans(text: str) -> tuple[Span, ...]:
    """Read ``1-17,19``. Raises ``ValueError``."""
    spans: list[Span] = []
    for part in text.split(",") if text else ():
        low, _, high = part.partition("-")
        span = (int(low), int(high or low))
        if span[0] > span[1] or (spans and span[0] <= spans[-1][1]):
            raise ValueError(f"{text!r} is not in order")
        spans.append(span)
    return tuple(spans)


def format_spans(spans: Iterable[Span]) -> str:
    """Return what `parse_spans` reads."""
    return ",".join(f"{low}" if low == high else f"{low}-{high}" for low, high in spans)


def has_number(spans: tuple[Span, ...], number: int) -> bool:
    """Whether a number is in one of the spans, which are in order."""
    at = bisect_right(spans, number, key=lambda span: span[0]) - 1
    return at >= 0 and number <= spans[at][1]


def unite(spans: Iterable[Span]) -> tuple[Span, ...]:
    """Return spans in order, those that touch joined."""
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


def numbers_beyond(spans: tuple[Span, ...], before: tuple[Span, ...]) -> list[int]:
    """Return the numbers in ``spans`` that are not in ``before``."""
    numbers: list[int] = []
    for low, high in spans:
        begin = low
        for other_low, other_high in before:
            if other_high < begin or other_low > high:
                continue
            numbers += range(begin, other_low)
            begin = other_high + 1
        numbers += range(begin, high + 1)
    return numbers


@dataclass(frozen=True, slots=True)
class Offset:
    """Where a stream is. ``read`` has spans by writer, ``under_way`` bytes by file, ``files`` sizes
    by name."""

    read: Mapping[str, tuple[Span, ...]] = field(default_factory=dict)
    under_way: Mapping[Head, int] = field(default_factory=dict)
    files: Mapping[str, int] = field(default_factory=dict)
    unread: frozenset[Head] = frozenset()
    """Files that held messages when this was made, and of which nothing is read."""
    within: TimeRange = EVER
    """The times that were read so far: messages outside are skipped for good."""
    is_start: bool = False
    """It is where the stream starts, and no batch ended there."""
    began: Offset | None = None
    run: str = ""
    """The spool that it is in; empty for an archive."""

    def has_read(self, head: Head) -> bool:
        """Whether a file is finished and read."""
        return has_number(self.read.get(head.writer, ()), head.number)

    def position(self, head: Head) -> int:
        """Return how many bytes are read of a file that is not read to its end."""
        return self.under_way.get(head, 0)

    def with_read(self, heads: Iterable[Head]) -> Offset:
        """Return the offset when these files, too, are read."""
        heads = set(heads)
        read = {**self.read}
        for writer, more in spans_of(heads).items():
            read[writer] = unite([*read.get(writer, ()), *more])
        under_way = {head: pos for head, pos in self.under_way.items() if head not in heads}
        return replace(self, read=read, under_way=under_way, unread=self.unread - heads)

    def heads_beyond(self, before: Offset) -> list[Head]:
        """Return the files that are read here and were not in an offset before."""
        return [
            Head(writer, number)
            for writer in sorted(self.read)
            for number in numbers_beyond(self.read[writer], before.read.get(writer, ()))
        ]

    def encode(self) -> dict[str, Any]:
        """Return what Spark writes down; equal offsets are equal texts."""
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
            if len(files) > FEW_FILES:  # Spark writes them down with each batch
                packed = zlib.compress(json.dumps(files).encode(), 6)
                document["version"] = PACKED_VERSION
                document["packed_files"] = b64encode(packed).decode()
            else:
                document["files"] = files
        if self.within != EVER:
            document["within"] = [self.within.since_ns, self.within.until_ns]
        if self.is_start:
            document["is_start"] = True
        if self.began is not None:
            document["began"] = self.began.encode()
        return {"run": self.run, "archive": document} if self.run else document


def decode_offset(document: Any) -> Offset:
    """Read what `Offset.encode` made. Raises `ConfigurationError`."""
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
            TimeRange(*document["within"]) if "within" in document else EVER,
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
    """A file of which bytes ``begin`` to ``end`` are unread.

    The members are loaded when it is the file's turn: most files of a large archive wait for many
    batches.
    """

    file: ListedFile
    begin: int
    end: int
    is_finished: bool

    @property
    def key(self) -> Key:
        return self.file.key

    def members(self) -> list[Member]:
        """Return those that are unread."""
        return between(self.file.readable(), self.begin, self.end)


def between(members: list[Member], begin: int, end: int) -> list[Member]:
    """Return the members from one offset to another."""
    low = bisect_left(members, begin, key=lambda member: member.offset)
    high = bisect_left(members, end, lo=low, key=lambda member: member.offset)
    return members[low:high]


def advance(files: Iterable[Unread], start: Offset, limits: BatchLimits) -> Offset:
    """Return the offset that the next batch ends with; ``start`` when there is nothing new."""
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


def _admit(files: list[Unread], limits: BatchLimits) -> dict[Key, int]:
    """Return how far each file goes that a batch takes something of."""
    ends: dict[Key, int] = {}
    rows = size = 0
    files = sorted(files, key=lambda each: each.file.first_ts)
    is_remote = any(each.file.entry is not None for each in files)
    loaded = map_concurrently(_to_take, files, is_remote=is_remote)
    heap = [(each.file.first_ts, number, 0) for number, each in enumerate(files)]
    members: dict[int, list[Member]] = {}
    while heap:
        _, number, at = heapq.heappop(heap)
        file = files[number]
        if limits.files is not None and file.key not in ends and len(ends) >= limits.files:
            continue
        if not at:
            members[number] = next(loaded)  # their first ones come in order
        if at == len(members[number]):
            continue
        member = members[number][at]
        rows += member.messages if member.messages != UNKNOWN else member.length
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


def _to_take(unread: Unread) -> list[Member]:
    """The members; those of a file without a head as one: an offset has all of it or nothing."""
    members = unread.members()
    if isinstance(unread.key, Head) or not members:
        return members
    begin, counts = members[0].offset, [each.messages for each in members]
    rows = UNKNOWN if UNKNOWN in counts else sum(counts)
    return [Member(begin, members[-1].end - begin, rows, 0, 0)]
