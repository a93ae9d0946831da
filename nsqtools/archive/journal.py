"""The state of a topic and channel in a directory: its lock, its file numbers, its journal.

*The lock.* Only one archiver of a topic and channel works in a directory. Its lock is one of the
`FolderLocks` of the directory, which need one descriptor for all topics.

*The numbers.* A small file, ``pid writer <32 hex> <number>``, counts the files that archivers began
in the directory. The head of each file's index has the number, so that a few bytes identify the
file under any name and in any place, for example to a reader that streams an archive. The writer is
a random identity, made with the first file: if the count is lost, counting starts again with a new
writer. Numbers are never used twice; one may be skipped.

*The journal.* nsqd redelivers a message if its FIN was lost: after a crash, a cut connection, or a
timeout. Such a message was in flight at that moment, so it was among the last messages written. The
journal keeps identities (nsqd, id) in generations, in memory and in small files. It always keeps
the two youngest generations. `Journal.pin_recent` also keeps the generations of a moment at which
FINs may have been lost, because a long backlog may delay the redelivery. Files of earlier runs stay
for a week, because several crashes may precede a redelivery. They are read when the first message
is redelivered.

A line is ``writer number offset length nsqd ids name``, ids in hex: the messages of one nsqd in one
member of a file. A line is written before its member, so it counts only if the index has the
member. A following line proves that, and a run that ends normally proves its last line with
`PROVED`. After a crash, the next run looks the last member up and writes `PROVED` when it starts,
because the file may be moved, or read and removed, later. Lines are not fsynced: they survive kill
-9, and a power failure duplicates messages at worst. A file of the journal is created with its
first line and open only while it is written.
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

# Pinned generations of a run, each with as many identities as twice max_in_flight, or 1000.
MAX_PINNED_GENERATIONS = 16
# Files of earlier runs that are read, and their age: they bound memory, and bound the time within
# which a message may be redelivered without being written a second time.
MAX_EARLIER_FILES = 64
RETENTION_S = 7 * 86_400.0

_NAME = re.compile(r"(?P<stem>\.[^@]+@[^@]+@)(?P<run>[0-9a-f]+)-\d{6,12}\.journal")
_LINE = re.compile(
    r"(?:(?P<writer>[0-9a-f]{32}) (?P<number>\d{1,18}) )?"
    r"(?P<offset>\d{1,18}) (?P<length>\d{1,18}) (?P<nsqd>\S+) (?P<ids>(?:[0-9a-f]{32})+)"
    r" (?P<name>.+)\n"
)

_MEMBER = ("name", "number", "offset", "length")

PROVED = "proved\n"
# The count has a fixed width, so it is replaced in place, within one sector, which no crash tears.
_COUNT = "{pid:<10} writer {writer} {number:020d}\n"
_COUNT_PATTERN = re.compile(r"(\d+) +writer ([0-9a-f]{32}) (\d{20})\n")


class TopicLock:
    """The lock of a topic and channel until `release`, and the numbers of its files.

    ``locks`` belong to the work directory. Raises `ConfigurationError` if another archiver has the
    lock, and ``OSError``.
    """

    def __init__(self, locks: FolderLocks, folder: Path, topic: str, channel: str) -> None:
        self._path = folder / f".{topic}@{channel}.lock"
        self.locks = locks
        self._name = f"{topic}@{channel}"
        if not locks.take(self._name):
            raise ConfigurationError(
                f"{self._holder()} archives channel {channel} of topic {topic} in {folder} already",
                hint="One archiver is enough for a channel; another one needs its own --work-dir.",
            )
        try:
            count = self._read_count()
            self._last = Head(count[2], int(count[3])) if count else None
        except BaseException:
            self.release()
            raise

    def next_head(self) -> Head:
        """Return the head of a new file, whose number is durable. Raises ``OSError``."""
        last = self._last or Head(uuid.uuid4().hex, 0)
        # A failure below skips the number, because using it twice would be wrong.
        head = self._last = Head(last.writer, last.number + 1)
        is_first = head.number == 1
        line = _COUNT.format(pid=os.getpid(), writer=head.writer, number=head.number)
        file = open_to_write(self._path, os.O_RDWR | os.O_CREAT)
        with closing_fd(file) as descriptor, adding_path_to_errors(self._path):
            if is_first:
                os.ftruncate(descriptor, 0)
            os.pwrite(descriptor, line.encode(), 0)
            sync_data(descriptor)
        if is_first:
            sync_folder(self._path.parent)
        return head

    def release(self) -> None:
        """Unlock the topic."""
        self.locks.release(self._name)

    def _read_count(self) -> re.Match[str] | None:
        """Return the content of the count, None without one.

        Opening it for writing refuses a file that another user planted.
        """
        try:
            with closing_fd(open_to_write(self._path, os.O_RDWR)) as descriptor:
                data = os.pread(descriptor, 200, 0)
        except FileNotFoundError:
            return None
        return _COUNT_PATTERN.fullmatch(data.decode("ascii", "replace"))

    def _holder(self) -> str:
        """Name the process that began the last file, if it still runs."""
        with suppress(OSError):
            if (match := self._read_count()) is not None:
                os.kill(int(match[1]), 0)
                return f"process {match[1]}"
        return "another process"


IsDurable = Callable[[str, Head | None, int, int], bool]
"""Returns whether a member is in the index of its file. The arguments are name and head (None if
unknown) of the file, and offset and length of the member."""


def journals_below(folder: Path) -> dict[str, list[str]]:
    """List the journals in a directory, for all topics at the same time: file names by stem.

    Raises ``OSError``.
    """
    journals: dict[str, list[str]] = {}
    for name in os.listdir(folder):
        if (match := _NAME.fullmatch(name)) is not None:
            journals.setdefault(match["stem"], []).append(name)
    return journals


def stem_of(topic: str, channel: str) -> str:
    """Return the prefix of the journals of a topic and channel."""
    return f".{topic}@{channel}@"


class Journal:
    """The journal of one topic and channel, whose `TopicLock` the caller must have.

    Args:
        earlier: names of the journals of earlier runs.
        run: makes the names of the files of this run unique.
        size: identities of a generation, more than can be in flight.

    Raises ``OSError``.
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
        self._earlier = _retain([folder / name for name in earlier], now_s)
        _confirm(self._earlier, is_durable)
        self._loaded: dict[str, set[bytes]] | None = None
        self._number = 0
        # The youngest is the first.
        self._generations: list[_Generation] = []
        self._begin_generation()

    def has_message(self, nsqd: str, message_id: bytes) -> bool:
        """Return whether a message is written, or is in the member in progress.

        Raises ``OSError``.
        """
        if any(message_id in generation.ids[nsqd] for generation in self._generations):
            return True
        if self._loaded is None:
            self._loaded = _load(self._earlier)
        return message_id in self._loaded.get(nsqd, ())

    def add(self, nsqd: str, ids: Sequence[bytes]) -> None:
        """Add messages of the member in progress."""
        self._generations[0].ids[nsqd].update(ids)

    def discard(self, nsqd: str, ids: Sequence[bytes]) -> None:
        """Remove messages that were not written."""
        # A flush of another file may have begun a generation, so all are searched.
        for generation in self._generations:
            generation.ids[nsqd].difference_update(ids)

    def record(
        self, name: str, head: Head | None, member: Member, ids: Mapping[str, Sequence[bytes]]
    ) -> None:
        """Record the messages of a member before the member is written. Raises ``OSError``."""
        location = f"{member.offset} {member.length}"
        if head is not None:
            location = f"{head.writer} {head.number} {location}"
        lines = [f"{location} {nsqd} {b''.join(ids[nsqd]).hex()} {name}\n" for nsqd in ids]
        self._generations[0].write("".join(lines).encode())

    def confirm(self) -> None:
        """Record in memory that the member is durable."""
        youngest, *older = self._generations
        youngest.confirm()
        if youngest.count >= self._size:
            if older and not older[0].is_pinned:
                self._generations.pop(1).remove()
            self._begin_generation()

    def pin_recent(self) -> None:
        """Keep the recent messages for the rest of the run, because their FINs may be lost.

        Raises ``OSError``.
        """
        self._generations[0].drop_unconfirmed()
        for generation in self._generations[:2]:
            generation.is_pinned |= generation.count > 0
        if self._generations[0].count:
            self._begin_generation()
        while len(self._generations) > 1 + MAX_PINNED_GENERATIONS:
            self._generations.pop().remove()

    def close(self) -> None:
        """End the run. Its files stay, because the last FINs may not have reached nsqd.

        If the last member could not be written, its line is not proved: the file may not have been
        cut back, so the next run looks the member up.
        """
        written = [generation for generation in self._generations if generation.written]
        try:
            if written and self._generations[0].written == self._generations[0].size:
                max(written, key=lambda generation: generation.path).write(PROVED.encode())
        except OSError as exc:
            log.info("cannot close %s (%s); the next run will", exc.filename, exc.strerror)

    def _begin_generation(self) -> None:
        path = self._folder / f"{self._stem}{self._run}-{self._number:012d}.journal"
        self._number += 1
        self._generations.insert(0, _Generation(path))


class _Generation:
    """Identities by nsqd, in memory and in a file."""

    def __init__(self, path: Path) -> None:
        self.ids: collections.defaultdict[str, set[bytes]] = collections.defaultdict(set)
        self.path = path
        # FINs of its messages may have been lost.
        self.is_pinned = False
        self._is_created = False
        # Bytes of the confirmed lines, and of all lines.
        self.size = self.written = 0

    @property
    def count(self) -> int:
        return sum(map(len, self.ids.values()))

    def write(self, lines: bytes) -> None:
        self.drop_unconfirmed()
        with self._opened() as descriptor:
            # Set first, because a failure may leave a part of the lines.
            self.written = self.size + len(lines)
            write_all(descriptor, lines)

    def confirm(self) -> None:
        self.size = self.written

    def drop_unconfirmed(self) -> None:
        """Remove the line of a member that did not become durable, or the next would prove it."""
        if self.written != self.size:
            with self._opened() as descriptor:
                os.ftruncate(descriptor, self.size)
            self.written = self.size

    @contextmanager
    def _opened(self) -> Iterator[int]:
        flags = os.O_WRONLY | os.O_APPEND
        with adding_path_to_errors(self.path):
            if self._is_created:
                file = open_to_write(self.path, flags | os.O_CREAT)
            else:
                file = os.open(self.path, NEW | flags, 0o600)
                self._is_created = True
            with closing_fd(file) as descriptor:
                yield descriptor

    def remove(self) -> None:
        if self._is_created:
            with suppress(OSError):  # Its content stays true, and a later run removes it.
                self.path.unlink()


def _retain(paths: Sequence[Path], now_s: float) -> list[Path]:
    """Return the files that still count, oldest first, and remove the others."""
    files = [(path, path.lstat()) for path in paths]
    files.sort(key=lambda file: (file[1].st_mtime, file[0].name))
    oldest_s = now_s - RETENTION_S
    retained = [path for path, s in files if is_ours(s) and s.st_size and s.st_mtime > oldest_s]
    retained = retained[-MAX_EARLIER_FILES:]
    for path in set(paths) - set(retained):
        path.unlink(missing_ok=True)
    return retained


def _by_run(paths: Sequence[Path]) -> Iterator[list[Path]]:
    """Iterate over the files of each run, in the order in which they were written."""
    for _, run in itertools.groupby(sorted(paths), lambda path: path.name.rpartition("-")[0]):
        yield list(run)


def _confirm(paths: Sequence[Path], is_durable: IsDurable) -> None:
    """Write `PROVED` for each unproved run whose last member is durable."""
    for run in _by_run(paths):
        if not any(map(_ends_proved, run)) and (lines := _lines(run)):
            last = lines[-1]
            head = Head(last["writer"], int(last["number"])) if last["writer"] else None
            if is_durable(last["name"], head, int(last["offset"]), int(last["length"])):
                flags = os.O_RDWR | os.O_CREAT | os.O_APPEND
                with closing_fd(open_to_write(run[-1], flags)) as descriptor:
                    text = os.pread(descriptor, os.fstat(descriptor).st_size, 0)
                    # Removing the torn line first makes room on a full disk.
                    os.ftruncate(descriptor, text.rfind(b"\n") + 1)
                    write_all(descriptor, PROVED.encode())


def _ends_proved(path: Path) -> bool:
    # Another program may have removed the file.
    with suppress(FileNotFoundError), open_to_read(path) as file:
        file.seek(max(0, os.fstat(file.fileno()).st_size - len(PROVED)))
        return file.read() == PROVED.encode()
    return False


def _lines(paths: Iterable[Path]) -> list[re.Match[str]]:
    """Return the lines of a run, oldest first."""
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
