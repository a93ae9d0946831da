"""Archive directories: the names of their files, and the format of an index.

    clicks.host-000000.2026-11-21_08.log.gz            a finished file
    .clicks.host-000000.2026-11-21_08.log.gz.index     its index, or that of the file in progress
    .clicks.host-000000.2026-11-21_08.log.gz.part      the same file while in progress
    .clicks.host-000000.2026-11-21_08.log.gz.copy      a copy in progress from another file system
    .nsq-archive.locks                                 locks of topics and files: see `FolderLocks`
    .clicks@archive.lock                               the number of the last file: see `TopicLock`
    .clicks@archive@18f3a-000000000000.journal         see `journal`

The leading dot hides everything unfinished from globs and from the readers of Spark and Hadoop.

An index has one line for each member, ``offset length count min_ts max_ts``, below its head. Offset
and length are in bytes of the file on disk, the count is in messages, and the timestamps are the
lowest and highest time of publishing, in nanoseconds since 1970 (0 if unknown). A member is durable
if its line ends in a newline, because its data was fsynced before the line was written. Members
follow each other without a gap; `decode_index` stops at the first line that leaves one.

The *total* is the last line of the index of a finished file: ``total members messages bytes min_ts
max_ts``. It is the commit record of the file, and it saves a query planner from reading thousands
of lines. Files of earlier versions lack it. In an object store the manifest has the same figures.

The *head* is the first line, ``writer <32 hex digits> <number>``. It identifies the file for as
long as it exists, under any name and in any place. Files of early archivers lack it.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate, chain
from pathlib import Path, PurePath
from typing import Any, NamedTuple, TypeVar
from urllib.parse import quote, unquote

from nsqtools.files.opening import is_own_link, open_to_read, walk
from nsqtools.protocol.text import INT64

PART = ".part"
INDEX = ".index"
MANIFEST = ".manifest"
ERASED_FROM = ".erased"
LOCKS = ".nsq-archive.locks"
# The folder of rows without a value, as Hive and Spark name it.
NULL_PARTITION = "__HIVE_DEFAULT_PARTITION__"

# A local path, or the name of an object in a place.
P = TypeVar("P", bound=PurePath)


def partition_of(name: str) -> dict[str, str | None]:
    """Return the partition values in the folders of a path, as Hive and Spark write them."""
    parts = (part.partition("=") for part in name.split("/")[:-1])
    values = {key: unquote(value) for key, equals, value in parts if equals}
    return {key: None if value == NULL_PARTITION else value for key, value in values.items()}


def folder_of(values: Mapping[str, str | None]) -> str:
    """Return the path that `partition_of` reads; empty text counts as NULL, as in Delta."""
    quoted = ((k, quote(v, safe=" ") if v else NULL_PARTITION) for k, v in values.items())
    return "/".join(f"{key}={value}" for key, value in quoted)


def part_of(path: P) -> P:
    """Return the path of the file ``path`` while it is in progress."""
    return path.with_name(f".{path.name}{PART}")


def index_of(path: P) -> P:
    """Return the index of the file ``path``, in progress or finished."""
    return path.with_name(f".{path.name}{INDEX}")


def hidden_name(name: str, suffix: str) -> str:
    """Return the name of the index or manifest of an object. See `upload`."""
    folder, slash, base = name.rpartition("/")
    return f"{folder}{slash}.{base}{suffix}"


def names_of_archive(name: str) -> tuple[str, ...]:
    """Return the names of an archive file and of its hidden files."""
    return name, *(hidden_name(name, suffix) for suffix in (INDEX, MANIFEST, ERASED_FROM))


def is_hidden(name: str, suffix: str) -> bool:
    """Return whether an archiver gives a base name like this to hidden files of a suffix."""
    return name.startswith(".") and name.endswith(suffix) and len(name) > len(suffix) + 1


def owner_of(hidden: P) -> P:
    """Return the file to which a ``.part``, ``.index`` or ``.copy`` belongs."""
    return hidden.with_name(hidden.name[1:].rpartition(".")[0])


def hidden_below(directory: Path, suffix: str) -> Iterator[Path]:
    """Iterate over the hidden files with a suffix, in all directories below, in order.

    Callers write to these directories, so links of other users are not followed.
    """
    for folder, names in walk(directory, follows=is_own_link):
        yield from (folder / name for name in names if is_hidden(name, suffix))


_LINES = re.compile(rb"(?:\d{1,18} \d{1,18} \d{1,18} -?\d{1,19} -?\d{1,19}\n)*+")
_TOTAL = re.compile(rb"\ntotal (\d{1,18}) (\d{1,18}) (\d{1,18}) (-?\d{1,19}) (-?\d{1,19})\n\Z")
LONGEST_TOTAL = 128
_HEAD = re.compile(rb"writer ([0-9a-f]{32}) (\d{1,18})\n")


class Head(NamedTuple):
    """The writer of a file, and the file's sequence number. See `journal`."""

    writer: str
    number: int

    def encode(self) -> bytes:
        """Return the line of the index."""
        return b"writer %s %d\n" % (self.writer.encode(), self.number)


class Member(NamedTuple):
    """A range of a file that is readable without the rest of it."""

    offset: int
    length: int
    messages: int
    min_ts: int
    max_ts: int

    @property
    def end(self) -> int:
        """The offset after its last byte."""
        return self.offset + self.length

    def encode(self) -> bytes:
        """Return the line of the index."""
        return b"%d %d %d %d %d\n" % self


def end_of(members: Sequence[Member]) -> int:
    """Return the offset after the last member of a file, 0 without members."""
    return members[-1].end if members else 0


@dataclass(frozen=True, slots=True)
class TimeRange:
    """From ``since_ns`` up to, but not including, ``until_ns``; None is no bound."""

    since_ns: int | None = None
    until_ns: int | None = None

    def contains(self, timestamp_ns: int) -> bool:
        """Return whether a time is in the range. 0, of a bare body, is only in `ALL_TIMES`."""
        if not timestamp_ns:
            return self == ALL_TIMES
        return self.overlaps(timestamp_ns, timestamp_ns)

    def may_contain(self, member: Member) -> bool:
        """Return whether a message of a member may be in the range, as it may if 0 (unknown)."""
        return not member.max_ts or self.overlaps(member.min_ts, member.max_ts)

    def overlaps(self, min_ns: int, max_ns: int) -> bool:
        """Return whether any time from ``min_ns`` to ``max_ns`` is in the range."""
        return (self.since_ns is None or max_ns >= self.since_ns) and (
            self.until_ns is None or min_ns < self.until_ns
        )

    def mask(self, times: Any) -> Any:
        """Return the mask of the times of an Arrow column that are in the range or unknown."""
        from pyarrow import compute

        mask = compute.is_valid(times)
        # Arrow compares a column of int64 with no larger numbers.
        lowest, highest = INT64[0], INT64[-1]
        if self.since_ns is not None:
            since_ns = min(max(self.since_ns, lowest), highest)
            mask = compute.and_(mask, compute.greater_equal(times, since_ns))
        if self.until_ns is not None and self.until_ns <= highest:
            mask = compute.and_(mask, compute.less(times, max(self.until_ns, lowest)))
        return compute.fill_null(mask, True)


ALL_TIMES = TimeRange()


class Total(NamedTuple):
    """The sum of a finished file. Times are 0 if those of any member are unknown."""

    members: int
    messages: int
    end: int
    min_ts: int
    max_ts: int

    def encode(self) -> bytes:
        """Return the line of the index."""
        return b"total %d %d %d %d %d\n" % self


def total_of(members: list[Member]) -> Total:
    """Return the sum of all members of a file."""
    is_timed = bool(members) and all(member.max_ts for member in members)
    return Total(
        len(members),
        sum(member.messages for member in members),
        end_of(members),
        min(member.min_ts for member in members) if is_timed else 0,
        max(member.max_ts for member in members) if is_timed else 0,
    )


def decode_total(data: bytes) -> Total | None:
    """Return the total at the end of an index, None for an index without one."""
    match = _TOTAL.search(data)
    return Total(*map(int, match.groups())) if match else None


class Index(NamedTuple):
    """The content of an index, without the total."""

    head: Head | None
    members: list[Member]

    def encode(self) -> bytes:
        """Return the lines of head and members."""
        return (self.head.encode() if self.head else b"") + encode_members(self.members)


def split_head(data: bytes) -> tuple[Head | None, bytes]:
    """Return the head, None if there is none, and the lines of members."""
    match = _HEAD.match(data)
    if match is None:
        return None, data
    return Head(match[1].decode(), int(match[2])), data[match.end() :]


def decode_index(data: bytes, end: int = 0) -> list[Member]:
    """Read the lines of members, up to the first that is cut off or leaves a gap.

    The first member begins at offset ``end``. A head before the lines is skipped.
    """
    lines = _LINES.match(split_head(data)[1])
    numbers = map(int, lines[0].split() if lines else ())
    members = list(map(Member._make, zip(*[numbers] * 5, strict=True)))
    offsets = accumulate([member[1] for member in members], initial=end)
    for position, (member, offset) in enumerate(zip(members, offsets, strict=False)):
        if member[0] != offset:
            return members[:position]
    return members


def encode_members(members: Sequence[Member]) -> bytes:
    """Return the lines of members."""
    numbers = tuple(chain.from_iterable(members))
    return b"%d %d %d %d %d\n" * len(members) % numbers


def load_index(path: Path) -> Index | None:
    """Read an index file; return None if it does not exist. Raises ``OSError``."""
    try:
        with open_to_read(path) as file:
            data = file.read()
    except FileNotFoundError:
        return None
    return Index(split_head(data)[0], decode_index(data))
