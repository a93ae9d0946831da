"""Make the index of a file from the file itself: where its members are, and what they hold."""

from __future__ import annotations

import re
from dataclasses import dataclass, field
from pathlib import Path
from typing import BinaryIO

from nsqtools.archive.gunzip import DamagedError, gunzip
from nsqtools.archive.index import Member

MAGIC = b"\x1f\x8b"
PLAIN_MEMBER_SIZE = 1 << 20

_HEAD = re.compile(
    rb'^\{"topic": "([^"\n]*)", "nsqd": "[^"\n]*", "id": "[^"\n]*", "ts": (-?\d+),', re.MULTILINE
)


@dataclass(slots=True)
class Scan:
    """The members of a file, what is wrong behind them (empty: nothing), and the topics in it.

    Without topics it is a file of bare bodies.
    """

    members: list[Member] = field(default_factory=list)
    damage: str = ""
    topics: set[str] = field(default_factory=set)
    is_gzip: bool = False

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
    scan = Scan()
    with path.open("rb") as file:
        scan.is_gzip = is_gzip(file)
        if scan.is_gzip:
            _scan_gzip(file, scan)
        else:
            _scan_plain(file, scan)
    return scan


def _scan_gzip(file: BinaryIO, scan: Scan) -> None:
    tally = _Tally(scan.topics)
    try:
        for piece in gunzip(file):
            tally.add(piece.text)
            if piece.member_end is not None:
                scan.members.append(tally.member(scan.end, piece.member_end))
                tally = _Tally(scan.topics)
    except DamagedError as exc:
        scan.damage = str(exc)


def _scan_plain(file: BinaryIO, scan: Scan) -> None:
    """Cut a plain file at line ends; all of its bytes are in some member."""
    file.seek(0)
    while lines := file.readlines(PLAIN_MEMBER_SIZE):
        tally = _Tally(scan.topics)
        for line in lines:
            tally.add(line)
        scan.members.append(tally.member(scan.end, file.tell()))
        if not lines[-1].endswith(b"\n") and scan.topics:
            scan.damage = f"cut off in the line at byte {file.tell() - len(lines[-1])}"


class _Tally:
    """Counts lines, and looks at topics and times in those that are messages."""

    def __init__(self, topics: set[str]) -> None:
        self._topics = topics
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
        if heads := _HEAD.findall(text):
            times = [*self._times, *[int(time) for _, time in heads]]
            self._times = [min(times), max(times)]
            self._topics.update({topic.decode("ascii", "replace") for topic, _ in heads})

    def member(self, begin: int, end: int) -> Member:
        if self._rest:
            self._count(self._rest)
            self._lines += 1
        low, high = self._times or (0, 0)
        return Member(begin, end - begin, self._lines, low, high)
