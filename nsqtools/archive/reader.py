"""Read archives back: any format, any compression, files in progress, damaged ones too.

Damage is reported to ``on_damage`` and skipped, never raised: with an index reading goes
on at the next member, without one it ends there, and what was readable before the tear is read. Of
a file in progress only what its index names is read; the rest is not durable yet.

Files are recognized by what is in them: gzip by its first bytes, messages (jsonl) by their first
line. Bare bodies have no topic, nsqd, id and time; those fields are empty then.
"""

from __future__ import annotations

import functools
import os
import re
import zlib
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO

from nsqtools.archive.layout import (
    PART,
    Head,
    Member,
    finished_below,
    hidden_below,
    index_of,
    is_hidden,
    load_index,
    owner_of,
)
from nsqtools.archive.members import GZIP_WINDOW, DamagedError, gunzip, is_gzip
from nsqtools.errors import NotFoundError, NsqError, OutputError
from nsqtools.files.opening import NotRegularError, open_to_read
from nsqtools.records.envelope import Envelope, decode
from nsqtools.records.framing import Splitter

READ_SIZE = 1 << 18
LONGEST_LINE = 1 << 28
LARGEST_TEXT = 1 << 26  # of a member at a time

_BEGINNING = re.compile(rb'\{"topic": "[^"]*", "nsqd": "')

OnDamage = Callable[[Path, str], None]


@dataclass(frozen=True, slots=True)
class ArchiveFile:
    """A file to read: where its bytes are, and its index if it has one."""

    path: Path
    members: list[Member] | None
    head: Head | None = None

    @property
    def is_in_progress(self) -> bool:
        return is_hidden(self.path.name, PART)

    @property
    def messages(self) -> int | None:
        """How many messages it has, if its index says so."""
        return None if self.members is None else sum(m.messages for m in self.members)


@dataclass(frozen=True, slots=True)
class TimeRange:
    """From ``since_ns`` up to, and without, ``until_ns``; None is without end."""

    since_ns: int | None = None
    until_ns: int | None = None

    def has(self, timestamp_ns: int) -> bool:
        """Return whether a time is in it."""
        return (self.since_ns is None or timestamp_ns >= self.since_ns) and (
            self.until_ns is None or timestamp_ns < self.until_ns
        )

    def may_have(self, member: Member) -> bool:
        """Return whether some message of a member may be in it."""
        if not member.max_ts:  # unknown
            return True
        return (self.since_ns is None or member.max_ts >= self.since_ns) and (
            self.until_ns is None or member.min_ts < self.until_ns
        )


EVER = TimeRange()


def find_archives(paths: Sequence[Path]) -> list[ArchiveFile]:
    """Return the files at ``paths``; of a directory all below it, those in progress last.

    Raises `NotFoundError` for a path that is not there, and `OutputError`.
    """
    found: list[Path] = []
    for path in paths:
        if path.is_dir():
            # looked for first, so that one that is finished meanwhile is not missed
            in_progress = list(hidden_below(path, PART))
            found += [*finished_below(path), *in_progress]
        elif path.exists():
            found.append(path)
        else:
            raise NotFoundError(f"there is no {path}")
    try:
        archives = [_with_index(path) for path in dict.fromkeys(found)]
    except OSError as exc:
        raise OutputError(f"cannot read {exc.filename} ({exc.strerror})") from exc
    heads = {archive.head for archive in archives if not archive.is_in_progress} - {None}
    return [each for each in archives if not (each.is_in_progress and each.head in heads)]


def _with_index(path: Path) -> ArchiveFile:
    owner = owner_of(path) if is_hidden(path.name, PART) else path
    index = load_index(index_of(owner))
    if index is None:
        return ArchiveFile(path, None)
    return ArchiveFile(path, index.members, index.head)


def read_text(
    archive: ArchiveFile, on_damage: OnDamage, within: TimeRange = EVER
) -> Iterator[bytes]:
    """Iterate over a file's text in pieces of any size; members outside of a range are left out.

    Raises `OutputError` when it cannot be read at all.
    """
    try:
        with open_to_read(archive.path) as file:
            gzipped = is_gzip(file)
            on_problem = functools.partial(on_damage, archive.path)
            end, size = 0, file.seek(0, os.SEEK_END)
            for member in archive.members or ():
                end = member.end
                if within.may_have(member):
                    yield from read_member(file, member, gzipped, on_problem)
            if not archive.is_in_progress:
                yield from _read_rest(file, archive.path, min(end, size), gzipped, on_damage)
    except NotRegularError as exc:
        on_damage(archive.path, str(exc.strerror))
    except OSError as exc:
        raise OutputError(f"cannot read {archive.path} ({exc.strerror})") from exc


def read_member(
    file: BinaryIO, member: Member, gzipped: bool, on_problem: Callable[[str], None]
) -> Iterator[bytes]:
    """Iterate over the text of a member. Raises ``OSError``; damage is reported."""
    data = _read_all(file, member)
    if len(data) < member.length:
        on_problem(f"{member.length - len(data)} bytes are missing at its end")
    if not gzipped:
        yield data
        return
    decompressor = zlib.decompressobj(GZIP_WINDOW)
    try:
        text = decompressor.decompress(data, LARGEST_TEXT)
        while decompressor.unconsumed_tail:  # larger than any archiver makes it
            yield text
            text = decompressor.decompress(decompressor.unconsumed_tail, LARGEST_TEXT)
    except zlib.error as exc:
        on_problem(f"corrupt at byte {member.offset} ({exc})")
        return
    if decompressor.eof or len(data) < member.length:
        yield text
    else:  # its checksum was not reached: nothing of it can be trusted
        on_problem(f"corrupt at byte {member.offset} (it does not end where it should)")


def _read_all(file: BinaryIO, member: Member) -> bytes:
    """Read a member, or what there is of it: an index may claim lengths that no file has."""
    there = file.seek(0, os.SEEK_END) - member.offset
    if there <= 0:
        return b""
    file.seek(member.offset)
    return file.read(min(member.length, there))


def _read_rest(
    file: BinaryIO, path: Path, offset: int, gzipped: bool, on_damage: OnDamage
) -> Iterator[bytes]:
    """What no index names."""
    if not gzipped:
        file.seek(offset)
        while data := file.read(READ_SIZE):
            yield data
        return
    try:
        for piece in gunzip(file, offset):
            yield piece.text
    except DamagedError as exc:
        on_damage(path, str(exc))


def read_lines(
    archive: ArchiveFile,
    on_damage: OnDamage,
    *,
    delimiter: bytes = b"\n",
    within: TimeRange = EVER,
) -> Iterator[list[bytes]]:
    """Iterate over a file's lines, in lists, without their delimiters. Raises as `read_text`."""
    splitter = Splitter(delimiter, limit=LONGEST_LINE)
    try:
        for text in read_text(archive, on_damage, within):
            if lines := splitter.feed(text):
                yield lines
        if rest := splitter.end():
            yield rest
    except OutputError:
        raise
    except NsqError as exc:
        on_damage(archive.path, str(exc))


def read_messages(
    archive: ArchiveFile,
    on_damage: OnDamage,
    *,
    delimiter: bytes = b"\n",
    within: TimeRange = EVER,
) -> Iterator[Envelope]:
    """Iterate over a file's messages. Raises as `read_text`."""
    number = 0
    is_jsonl: bool | None = None
    for lines in read_lines(archive, on_damage, delimiter=delimiter, within=within):
        if is_jsonl is None:
            is_jsonl = is_message(lines[0])
        for line in lines:
            number += 1
            if not is_jsonl:
                yield Envelope("", "", b"", 0, 0, line)
                continue
            try:
                message = decode(line)
            except ValueError as exc:
                on_damage(archive.path, f"line {number} is not a message: {exc}")
                continue
            if within.has(message.timestamp_ns):
                yield message


def is_message(line: bytes) -> bool:
    """Return whether a file holds messages, by its first line.

    Its beginning is enough, for the rest may be damaged; else it is all of it.
    """
    if _BEGINNING.match(line):
        return True
    try:
        decode(line)
    except ValueError:
        return False
    return True
