"""Messages of many files in the order of their times, with few files open and none loaded.

A file is opened when the merge comes to its beginning, which its index tells, or its first message.
Messages of one file keep the order in which they were written: it is that of their times but for
redeliveries. Bare bodies have no time; their files come first, one after the other.
"""

from __future__ import annotations

import heapq
from collections.abc import Iterator, Sequence
from typing import NamedTuple

from nsqtools.archive.finding import ArchiveFile
from nsqtools.archive.reader import (
    EVER,
    OnDamage,
    TimeRange,
    read_messages,
)
from nsqtools.records.envelope import Envelope


class Archived(NamedTuple):
    """A message, the number of its file among those given, and its own number in it, from 1."""

    file: int
    number: int
    message: Envelope


def merge(
    archives: Sequence[ArchiveFile],
    on_damage: OnDamage,
    *,
    delimiter: bytes = b"\n",
    within: TimeRange = EVER,
) -> Iterator[Archived]:
    """Iterate over all messages. Raises `OutputError` for a file that cannot be read."""
    begins = sorted(
        (_begin(archive, delimiter), file)
        for file, archive in enumerate(archives)
        if archive.members is None or any(map(within.may_have, archive.members))
    )
    begins.reverse()
    heads: list[tuple[int, int, int, Envelope, Iterator[Envelope]]] = []

    def push(file: int, number: int, messages: Iterator[Envelope]) -> None:
        message = next(messages, None)
        if message is not None:
            heapq.heappush(heads, (message.timestamp_ns, file, number, message, messages))

    while heads or begins:
        while begins and (not heads or begins[-1] < heads[0][:2]):
            _, file = begins.pop()
            messages = read_messages(archives[file], on_damage, delimiter=delimiter, within=within)
            push(file, 1, messages)
        if heads:
            _, file, number, message, messages = heapq.heappop(heads)
            yield Archived(file, number, message)
            push(file, number + 1, messages)


def _begin(archive: ArchiveFile, delimiter: bytes) -> int:
    """The time of a file's first message; 0 where it has none."""
    if archive.members and archive.members[0].max_ts:
        return min(member.min_ts for member in archive.members)
    messages = read_messages(archive, lambda path, problem: None, delimiter=delimiter)
    first = next(messages, None)
    return first.timestamp_ns if first else 0
