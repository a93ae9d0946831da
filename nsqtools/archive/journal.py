"""Which messages were written lately, so that one that comes again is not written twice.

nsqd delivers a message again when its FIN was lost: after a crash, a cut connection, or a timeout.
What it can deliver again was in flight when that happened, and so was among the last messages
written. Their identities (nsqd, id) are kept in generations, in memory and in small files: the two
youngest always, and with `keep` those of a moment at which FINs may have been lost, because such a
message can come back only after a long backlog. Files of earlier runs are loaded at the start, and
stay for a week: there may be several crashes before a message comes back.

A line is ``offset length nsqd ids name``: what a member of a file holds from one nsqd, ids in hex.
It is written before the member is, so it counts only when the index has the member: for the last
member of a run that is looked up, and those before it are proved by what followed. What the look
found out is written down as the run's last line, for the file may be moved or read and removed
before the next start. Lines are not fsynced: kill -9 loses nothing of them, and the worst after a
power failure is a message twice.
"""

from __future__ import annotations

import collections
import os
import re
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

from nsqtools.archive.layout import Member
from nsqtools.files.durable import NEW, blaming, write_all
from nsqtools.files.opening import open_to_append, open_to_read

KEPT_GENERATIONS = 16
KEPT_FILES = 64
KEPT_FOR_S = 7 * 86_400.0

_LINE = re.compile(
    r"(?P<offset>\d+) (?P<length>\d+) (?P<nsqd>\S+) (?P<ids>(?:[0-9a-f]{32})+) (?P<name>.+)\n"
)

PROVED = "proved\n"

IsDurable = Callable[[str, int, int], bool]
"""Return, by name, offset and length, whether a member is in the index of its file."""


class Journal:
    """The journal of one topic and channel; its lock must be held.

    ``run`` makes the names of this run's files unique. A generation is ``size`` identities: more
    than can be in flight. Raises ``OSError``.
    """

    def __init__(
        self,
        folder: Path,
        topic: str,
        channel: str,
        *,
        run: str,
        size: int,
        is_durable: IsDurable,
        now_s: float,
    ) -> None:
        self._stem = f".{topic}@{channel}@"
        self._folder = folder
        self._run = run
        self._size = size
        self._loaded = _load(self._files_of_earlier_runs(now_s), is_durable)
        self._number = 0
        self._kept: collections.deque[_Generation] = collections.deque()
        self._older: _Generation | None = None
        self._youngest = self._new_generation()

    def knows(self, nsqd: str, message_id: bytes) -> bool:
        """Return whether a message is written, or is in the member that is being made."""
        return message_id in self._loaded.get(nsqd, ()) or any(
            message_id in generation.ids[nsqd] for generation in self._generations()
        )

    def add(self, nsqd: str, ids: Sequence[bytes]) -> None:
        """These go into the member that is being made."""
        self._youngest.ids[nsqd].update(ids)

    def discard(self, nsqd: str, ids: Sequence[bytes]) -> None:
        """These were not written after all. (A flush of another file may have moved them on.)"""
        for generation in self._generations():
            generation.ids[nsqd].difference_update(ids)

    def record(self, name: str, member: Member, ids: Mapping[str, Sequence[bytes]]) -> None:
        """Write down what a member holds, before it is written. Raises ``OSError``."""
        head = f"{member.offset} {member.length}"
        lines = [f"{head} {nsqd} {b''.join(ids[nsqd]).hex()} {name}\n" for nsqd in ids]
        self._youngest.write("".join(lines).encode())

    def confirm(self) -> None:
        """The member is durable."""
        self._youngest.confirm()
        if self._youngest.count >= self._size:
            self._roll()

    def keep(self) -> None:
        """Hold on to what was written lately: FINs may have been lost now. Raises ``OSError``."""
        self._youngest.settle()
        if self._older is not None:
            self._kept.append(self._older)
            self._older = None
        self._kept.append(self._youngest)
        self._youngest = self._new_generation()
        while len(self._kept) > KEPT_GENERATIONS:
            self._kept.popleft().remove()

    def close(self) -> None:
        """Close the files. They stay: whether the last FINs arrived, nobody can tell."""
        for generation in self._generations():
            if generation.count:
                generation.close()
            else:
                generation.remove()

    def _generations(self) -> list[_Generation]:
        return [self._youngest, *([self._older] if self._older else []), *self._kept]

    def _roll(self) -> None:
        if self._older is not None:
            self._older.remove()
        self._older = self._youngest
        self._youngest = self._new_generation()

    def _new_generation(self) -> _Generation:
        path = self._folder / f"{self._stem}{self._run}-{self._number:06d}.journal"
        self._number += 1
        return _Generation(path)

    def _files_of_earlier_runs(self, now_s: float) -> list[Path]:
        """The files that still count, oldest first; the others are removed."""
        found = [
            path
            for path in self._folder.iterdir()
            if path.name.startswith(self._stem) and path.name.endswith(".journal")
        ]
        found.sort(key=lambda path: (path.stat().st_mtime, path.name))
        oldest_s = now_s - KEPT_FOR_S
        stats = [(path, path.stat()) for path in found]
        kept = [path for path, s in stats if s.st_size and s.st_mtime > oldest_s][-KEPT_FILES:]
        for path in set(found) - set(kept):
            path.unlink(missing_ok=True)
        return kept


class _Generation:
    """Identities by nsqd, and the file that has them too."""

    def __init__(self, path: Path) -> None:
        self.ids: collections.defaultdict[str, set[bytes]] = collections.defaultdict(set)
        self._path = path
        self._descriptor = os.open(path, NEW | os.O_WRONLY | os.O_APPEND, 0o600)
        self._size = self._written = 0

    @property
    def count(self) -> int:
        return sum(map(len, self.ids.values()))

    def write(self, lines: bytes) -> None:
        self.settle()
        self._written = self._size + len(lines)  # or a part of it, when that fails
        with blaming(self._path):
            write_all(self._descriptor, lines)

    def confirm(self) -> None:
        self._size = self._written

    def settle(self) -> None:
        """Take back the line of a member that did not become durable: the next would prove it."""
        if self._written != self._size:
            with blaming(self._path):
                os.ftruncate(self._descriptor, self._size)
            self._written = self._size

    def close(self) -> None:
        os.close(self._descriptor)

    def remove(self) -> None:
        self.close()
        self._path.unlink(missing_ok=True)


def _load(paths: Sequence[Path], is_durable: IsDurable) -> dict[str, set[bytes]]:
    identities: dict[str, set[bytes]] = collections.defaultdict(set)
    by_run: dict[str, list[re.Match[str]]] = collections.defaultdict(list)
    newest: dict[str, Path] = {}
    proved: set[str] = set()
    for path in paths:
        run = path.name.rpartition("-")[0]
        newest[run] = path
        with open_to_read(path) as journal:
            text = journal.read().decode("utf-8", "replace").splitlines(keepends=True)
        by_run[run] += filter(None, map(_LINE.fullmatch, text))
        if PROVED in text:
            proved.add(run)
    for run, lines in by_run.items():
        if not lines:
            continue
        last = lines[-1].group("name", "offset", "length")
        is_proved = run in proved or is_durable(last[0], int(last[1]), int(last[2]))
        if is_proved and run not in proved:
            with open_to_append(newest[run]) as file:
                file.write(b"\n" + PROVED.encode())  # what is before it may be torn
        for line in lines:
            if is_proved or line.group("name", "offset", "length") != last:
                ids = bytes.fromhex(line["ids"])
                identities[line["nsqd"]].update(ids[i : i + 16] for i in range(0, len(ids), 16))
    return identities
