"""What a directory remembers of a topic and channel: who archives it, its files, its messages.

*The lock.* Only one archiver of a topic and channel works in a directory. Its lock is one of the
directory's `FolderLocks`, which need one descriptor for all topics.

*The numbers.* A small file counts the files that were ever begun there, ``pid writer <32 hex>
<number>``: each file carries its number in the head of its index, so that a reader of the archive
as a stream can tell files apart by a few bytes, whatever they are called and wherever they are
moved. The writer is made up at random with the first file: when the count is lost, counting begins
again under another one. Numbers are never used twice; one may be left out.

*The journal.* nsqd delivers a message again when its FIN was lost: after a crash, a cut connection,
or a timeout. What it can deliver again was in flight when that happened, and so was among the last
messages written. Their identities (nsqd, id) are kept in generations, in memory and in small files:
the two youngest always, and with `Journal.keep` those of a moment at which FINs may have been lost,
because such a message can come back only after a long backlog. Files of earlier runs stay for a
week: there may be several crashes before a message comes back. They are read when the first message
comes again.

A line is ``writer number offset length nsqd ids name``: what a member of a file holds from one
nsqd, ids in hex.
It is written before the member is, so it counts only when the index has the member: those before a
run's last line are proved by what followed, and a run that ends by itself writes down that the last
one counts too. After a crash the next run looks it up and writes that down, at its start: the file
may be moved, or read and removed, later. Lines are not fsynced: kill -9 loses nothing of them, and
the worst after a power failure is a message twice. A file is there from its first line on, and open
only while it is written.
"""

from __future__ import annotations

import collections
import itertools
import logging
import os
import re
import uuid
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path

from nsqtools.archive.layout import Head, Member
from nsqtools.errors import ConfigurationError
from nsqtools.files.durable import NEW, adding_path_to_errors, sync_data, sync_folder, write_all
from nsqtools.files.opening import FolderLocks, closing_fd, is_ours, open_to_read, open_to_write

log = logging.getLogger("nsqtools")

KEPT_GENERATIONS = 16
KEPT_FILES = 64
KEPT_FOR_S = 7 * 86_400.0

_NAME = re.compile(r"(?P<stem>\.[^@]+@[^@]+@)(?P<run>[0-9a-f]+)-\d{6,12}\.journal")
_LINE = re.compile(
    r"(?:(?P<writer>[0-9a-f]{32}) (?P<number>\d{1,18}) )?"
    r"(?P<offset>\d{1,18}) (?P<length>\d{1,18}) (?P<nsqd>\S+) (?P<ids>(?:[0-9a-f]{32})+)"
    r" (?P<name>.+)\n"
)

_MEMBER = ("name", "number", "offset", "length")

PROVED = "proved\n"
# Of fixed width: it is replaced in place, within one sector, which no crash tears.
_COUNT = "{pid:<10} writer {writer} {number:020d}\n"
_COUNT_PATTERN = re.compile(r"(\d+) +writer ([0-9a-f]{32}) (\d{20})\n")


class TopicLock:
    """Held until `release`. Raises `ConfigurationError` when it is taken, and ``OSError``.

    ``locks`` are those of the work directory.
    """

    def __init__(self, locks: FolderLocks, folder: Path, topic: str, channel: str) -> None:
        self._path = folder / f".{topic}@{channel}.lock"
        self.locks = locks
        self._name = f"{topic}@{channel}"
        if not locks.take(self._name):
            raise ConfigurationError(
                f"{self._holder()} archives channel {channel} of topic {topic} in {folder} already",
                hint="One archiver does for a channel; give another one its own --work-dir.",
            )
        try:
            found = self._noted()
            self._last = Head(found[2], int(found[3])) if found else None
        except BaseException:
            self.release()
            raise

    def next_head(self) -> Head:
        """Return the head of a new file; its number is durable. Raises ``OSError``."""
        last = self._last or Head(uuid.uuid4().hex, 0)
        # one may be left out when this fails, and none is given twice
        head = self._last = Head(last.writer, last.number + 1)
        is_first = head.number == 1
        line = _COUNT.format(pid=os.getpid(), writer=head.writer, number=head.number)
        opened = open_to_write(self._path, os.O_RDWR | os.O_CREAT)
        with closing_fd(opened) as descriptor, adding_path_to_errors(self._path):
            if is_first:
                os.ftruncate(descriptor, 0)
            os.pwrite(descriptor, line.encode(), 0)
            sync_data(descriptor)
        if is_first:
            sync_folder(self._path.parent)
        return head

    def release(self) -> None:
        """Unlock it."""
        self.locks.release(self._name)

    def _noted(self) -> re.Match[str] | None:
        """Return what the count says, None without one: also to refuse one that others planted."""
        try:
            with closing_fd(open_to_write(self._path, os.O_RDWR)) as descriptor:
                found = os.pread(descriptor, 200, 0)
        except FileNotFoundError:
            return None
        return _COUNT_PATTERN.fullmatch(found.decode("ascii", "replace"))

    def _holder(self) -> str:
        """Name the process that began the last file, if it still runs."""
        with suppress(OSError):
            if (match := self._noted()) is not None:
                os.kill(int(match[1]), 0)
                return f"process {match[1]}"
        return "another process"


IsDurable = Callable[[str, Head | None, int, int], bool]
"""Return whether a member is in the index of its file, by the file's name and head (None if that is
not known) and the member's offset and length."""


def journals_below(folder: Path) -> dict[str, list[str]]:
    """List the journals in a directory once for all topics: names by what `stem_of` returns.

    Raises ``OSError``.
    """
    found: dict[str, list[str]] = {}
    for name in os.listdir(folder):
        if (match := _NAME.fullmatch(name)) is not None:
            found.setdefault(match["stem"], []).append(name)
    return found


def stem_of(topic: str, channel: str) -> str:
    """Return what the names of the journals of a topic and channel begin with."""
    return f".{topic}@{channel}@"


class Journal:
    """The journal of one topic and channel; its lock must be held.

    ``earlier`` are the names of the journals of earlier runs. ``run`` makes the names of this run's
    files unique. A generation is ``size`` identities: more than can be in flight. Raises
    ``OSError``.
    """

    def __init__(
        self,
        folder: Path,
        topic: str,
        channel: str,
        *,
        earlier: Iterable[str],
        run: str,
        size: int,
        is_durable: IsDurable,
        now_s: float,
    ) -> None:
        self._stem = stem_of(topic, channel)
        self._folder = folder
        self._run = run
        self._size = size
        self._earlier = _still_counting([folder / name for name in earlier], now_s)
        _confirm(self._earlier, is_durable)
        self._loaded: dict[str, set[bytes]] | None = None
        self._number = 0
        self._generations: list[_Generation] = []  # the youngest first
        self._begin_generation()

    def knows(self, nsqd: str, message_id: bytes) -> bool:
        """Return whether a message is written, or is in the member that is being made.

        Raises ``OSError``.
        """
        if any(message_id in generation.ids[nsqd] for generation in self._generations):
            return True
        if self._loaded is None:
            self._loaded = _load(self._earlier)
        return message_id in self._loaded.get(nsqd, ())

    def add(self, nsqd: str, ids: Sequence[bytes]) -> None:
        """Note messages of the member that is being made."""
        self._generations[0].ids[nsqd].update(ids)

    def discard(self, nsqd: str, ids: Sequence[bytes]) -> None:
        """Forget messages that were not written. (A flush of another file may have moved them.)"""
        for generation in self._generations:
            generation.ids[nsqd].difference_update(ids)

    def record(
        self, name: str, head: Head | None, member: Member, ids: Mapping[str, Sequence[bytes]]
    ) -> None:
        """Write down what a member holds, before it is written. Raises ``OSError``."""
        place = f"{member.offset} {member.length}"
        if head is not None:
            place = f"{head.writer} {head.number} {place}"
        lines = [f"{place} {nsqd} {b''.join(ids[nsqd]).hex()} {name}\n" for nsqd in ids]
        self._generations[0].write("".join(lines).encode())

    def confirm(self) -> None:
        """Note that the member is durable."""
        youngest, *older = self._generations
        youngest.confirm()
        if youngest.count >= self._size:
            if older and not older[0].is_kept:
                self._generations.pop(1).remove()
            self._begin_generation()

    def pin_recent(self) -> None:
        """Hold on to what was written lately: FINs may have been lost now. Raises ``OSError``."""
        self._generations[0].settle()
        for generation in self._generations[:2]:
            generation.is_kept |= generation.count > 0
        if self._generations[0].count:
            self._begin_generation()
        while len(self._generations) > 1 + KEPT_GENERATIONS:
            self._generations.pop().remove()

    def close(self) -> None:
        """The run ends. Its files stay: it is not known whether the last FINs arrived.

        Nor whether a member that failed is there: its file may not have been cut back. The next run
        looks it up.
        """
        written = [generation for generation in self._generations if generation.written]
        try:
            if written and self._generations[0].written == self._generations[0].size:
                max(written, key=lambda generation: generation.path).write(PROVED.encode())
        except OSError as exc:
            log.info("cannot end %s (%s): the next run will", exc.filename, exc.strerror)

    def _begin_generation(self) -> None:
        path = self._folder / f"{self._stem}{self._run}-{self._number:012d}.journal"
        self._number += 1
        self._generations.insert(0, _Generation(path))


class _Generation:
    """Identities by nsqd, and the file that has them too."""

    def __init__(self, path: Path) -> None:
        self.ids: collections.defaultdict[str, set[bytes]] = collections.defaultdict(set)
        self.path = path
        self.is_kept = False  # FINs of what is in it may have been lost
        self._is_made = False
        self.size = self.written = 0  # of the lines that count, and of all

    @property
    def count(self) -> int:
        return sum(map(len, self.ids.values()))

    def write(self, lines: bytes) -> None:
        self.settle()
        with self._opened() as descriptor:
            self.written = self.size + len(lines)  # or a part of it, when that fails
            write_all(descriptor, lines)

    def confirm(self) -> None:
        self.size = self.written

    def settle(self) -> None:
        """Take back the line of a member that did not become durable: the next would prove it."""
        if self.written != self.size:
            with self._opened() as descriptor:
                os.ftruncate(descriptor, self.size)
            self.written = self.size

    @contextmanager
    def _opened(self) -> Iterator[int]:
        flags = os.O_WRONLY | os.O_APPEND
        with adding_path_to_errors(self.path):
            if self._is_made:
                opened = open_to_write(self.path, flags | os.O_CREAT)
            else:
                opened = os.open(self.path, NEW | flags, 0o600)
                self._is_made = True
            with closing_fd(opened) as descriptor:
                yield descriptor

    def remove(self) -> None:
        if self._is_made:
            with suppress(OSError):  # what it says stays true, and a later run removes it
                self.path.unlink()


def _still_counting(found: Sequence[Path], now_s: float) -> list[Path]:
    """The files that still count, oldest first; the others are removed."""
    stats = [(path, path.lstat()) for path in found]
    stats.sort(key=lambda each: (each[1].st_mtime, each[0].name))
    oldest_s = now_s - KEPT_FOR_S
    kept = [path for path, s in stats if is_ours(s) and s.st_size and s.st_mtime > oldest_s]
    kept = kept[-KEPT_FILES:]
    for path in set(found) - set(kept):
        path.unlink(missing_ok=True)
    return kept


def _by_run(paths: Sequence[Path]) -> Iterator[list[Path]]:
    """The files of each run, in the order in which it wrote them."""
    for _, run in itertools.groupby(sorted(paths), lambda path: path.name.rpartition("-")[0]):
        yield list(run)


def _confirm(paths: Sequence[Path], is_durable: IsDurable) -> None:
    """Write down which runs' last members are durable, where that is not known yet."""
    for run in _by_run(paths):
        if not any(map(_ends_proved, run)) and (lines := _lines(run)):
            last = lines[-1]
            head = Head(last["writer"], int(last["number"])) if last["writer"] else None
            if is_durable(last["name"], head, int(last["offset"]), int(last["length"])):
                flags = os.O_RDWR | os.O_CREAT | os.O_APPEND
                with closing_fd(open_to_write(run[-1], flags)) as descriptor:
                    text = os.pread(descriptor, os.fstat(descriptor).st_size, 0)
                    os.ftruncate(descriptor, text.rfind(b"\n") + 1)  # what is torn may fill a disk
                    write_all(descriptor, PROVED.encode())


def _ends_proved(path: Path) -> bool:
    with suppress(FileNotFoundError), open_to_read(path) as file:  # it may be removed meanwhile
        file.seek(max(0, os.fstat(file.fileno()).st_size - len(PROVED)))
        return file.read() == PROVED.encode()
    return False


def _lines(paths: Iterable[Path]) -> list[re.Match[str]]:
    """The lines of a run, oldest first."""
    lines: list[re.Match[str]] = []
    for path in paths:
        with suppress(FileNotFoundError), open_to_read(path) as file:
            text = file.read().decode("utf-8", "replace").splitlines(keepends=True)
            lines += filter(None, map(_LINE.fullmatch, text))
    return lines


def _load(paths: Sequence[Path]) -> dict[str, set[bytes]]:
    identities: dict[str, set[bytes]] = collections.defaultdict(set)
    for run in _by_run(paths):
        lines = _lines(run)
        is_proved = any(map(_ends_proved, run))
        last = lines[-1].group(*_MEMBER) if lines else None
        for line in lines:
            if is_proved or line.group(*_MEMBER) != last:
                ids = bytes.fromhex(line["ids"])
                identities[line["nsqd"]].update(ids[i : i + 16] for i in range(0, len(ids), 16))
    return identities
