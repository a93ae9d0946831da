"""Make the index of a file from the file itself: where its members are, and what they hold."""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import BinaryIO

from nsqtools.services.archive.gunzip import DamagedError, gunzip
from nsqtools.services.archive.index import Member

MAGIC = b"\x1f\x8b"
PLAIN_MEMBER_SIZE = 1 << 20

_TIMESTAMP = re.compile(
    rb'^\{"topic": "[^"\n]*", "nsqd": "[^"\n]*", "id": "[^"\n]*", "ts": (-?\d+),', re.MULTILINE
)


@dataclass(slots=True)
class Scan:
    """The members of a file, and what is wrong behind them (empty: nothing)."""

    members: list[Member] = field(default_factory=list)
    damage: str = ""

    @property
    def end(self) -> int:
        """The offset behind the last member."""
        return self.members[-1].end if self.members else 0


def is_gzip(file: BinaryIO) -> bool:
    """Tell by the first bytes, whatever the file is called."""
    file.seek(0)
    return file.read(len(MAGIC)) == MAGIC


def scan_members(path: Path) -> Scan:
    """Read a whole file. Raises ``OSError``; damage is in the result."""
    with path.open("rb") as file:
        if is_gzip(file):
            return _scan_gzip(file)
        return Scan(list(_plain_members(file)))


def _scan_gzip(file: BinaryIO) -> Scan:
    scan = Scan()
    tally = _Tally()
    try:
        for piece in gunzip(file):
            tally.add(piece.text)
            if piece.member_end is not None:
                scan.members.append(tally.member(scan.end, piece.member_end))
                tally = _Tally()
    except DamagedError as exc:
        scan.damage = str(exc)
    return scan


def _plain_members(file: BinaryIO) -> Iterator[Member]:
    """Cut a plain file at line ends; all of its bytes are in some member."""
    file.seek(0)
    offset = 0
    while lines := file.readlines(PLAIN_MEMBER_SIZE):
        tally = _Tally()
        for line in lines:
            tally.add(line)
        end = file.tell()
        yield tally.member(offset, end)
        offset = end


class _Tally:
    """Counts lines, and looks at the times in those that are messages."""

    def __init__(self) -> None:
        self._lines = 0
        self._rest = b""
        self._times: list[int] = []

    def add(self, text: bytes) -> None:
        text = self._rest + text
        end = text.rfind(b"\n") + 1
        self._rest = text[end:]
        self._count(text[:end])

    def _count(self, text: bytes) -> None:
        self._lines += text.count(b"\n")
        if times := [int(time) for time in _TIMESTAMP.findall(text)]:
            self._times = [min(self._times + times), max(self._times + times)]

    def member(self, begin: int, end: int) -> Member:
        if self._rest:
            self._count(self._rest)
            self._lines += 1
        low, high = self._times or (0, 0)
        return Member(begin, end - begin, self._lines, low, high)
