"""The files that a topic has open: one, or with partitions by message time one for each of them.

A file is opened for its first message. It is finished when it is full, when its interval or age is
over, and when its stem is not that of the present any more; partitions by message time stay open
while messages come for them.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

from nsqtools.archive.archive_settings import ArchiveSettings, PartitionBy
from nsqtools.archive.finishing import finish
from nsqtools.archive.layout import Head, Member, index_of, part_of
from nsqtools.archive.part_file import PartFile
from nsqtools.client.message import Batch, Message
from nsqtools.files.durable import make_folders
from nsqtools.files.locks import FolderLocks
from nsqtools.records.naming import with_rev

log = logging.getLogger("nsqtools")

CHECK_S = 1.0
MAX_CHECK_S = 60.0  # whole minutes; a thousand topics that are quiet cost little
PARTITION_IDLE_S = 60.0
MOST_PARTITIONS = 32
REMEMBERED_STEMS = 1000  # a name is not used twice, even if its file was moved away

NextHead = Callable[[], Head | None]
"""Names the next file: `TopicLock.next_head`. Raises ``OSError``."""


@dataclass(slots=True, eq=False)
class OpenFile:
    """A file in progress, and what is held in the member being made."""

    stem: str
    part: PartFile
    last_used_s: float
    batches: list[Batch] = field(default_factory=list)
    adopted: list[Batch] = field(default_factory=list)
    """Second deliveries of what is held: FINished with it, and not written."""
    began_s: float = field(default_factory=time.monotonic)
    is_dirty: bool = False
    """A flush failed: it must be rolled back before it is used."""

    def hold(self, batch: Batch, text: bytes) -> None:
        """Put messages into the member."""
        self.part.append(text)
        self.batches.append(batch)

    def end_member(self) -> Member:
        """Return the member that all of it makes."""
        times = [message.timestamp_ns for batch in self.batches for message in batch]
        return self.part.end_member(len(times), min(times), max(times))

    def ids_by_nsqd(self) -> dict[str, list[bytes]]:
        """Return the identities of what is held."""
        ids: dict[str, list[bytes]] = {}
        for batch in self.batches:
            ids.setdefault(batch.nsqd, []).extend([message.id for message in batch])
        return ids

    def release(self) -> list[Batch]:
        """Hand over what is held: it is to be answered."""
        released = self.batches + self.adopted
        self.batches, self.adopted = [], []
        return released


class FileSet:
    """All methods but `stem` and `holding` raise ``OSError``."""

    def __init__(
        self,
        topic: str,
        settings: ArchiveSettings,
        on_finished: Callable[[Path], None],
        next_head: NextHead,
        locks: FolderLocks,
    ) -> None:
        self._topic = topic
        self._settings = settings
        self._on_finished = on_finished
        self._next_head = next_head
        self._locks = locks
        self._files: dict[str, OpenFile] = {}
        self._ending: list[OpenFile] = []  # full or over, and still to be published
        self._revs: dict[str, int] = {}  # the next number of each stem that was used
        self._stems: dict[int, str] = {}  # by the second of the partition
        self._stems_of_s = -1

    def stem(self, now_s: float, partition_s: float) -> str:
        """Return the name but for its rev. Those of a second are remembered: each read asks."""
        if int(now_s) != self._stems_of_s:
            self._stems_of_s = int(now_s)
            self._stems.clear()
        second = int(partition_s)
        stem = self._stems.get(second)
        if stem is None:
            moment = self._settings.moment
            stem = self._settings.naming.stem(self._topic, moment(now_s), moment(partition_s))
            self._stems[second] = stem
        return stem

    def holding(self) -> list[OpenFile]:
        """Return the files with something held."""
        return [file for file in self._files.values() if file.batches]

    def adopt(self, batch: Batch, message: Message) -> bool:
        """If a message is held, answer this second delivery with it; return whether it is held."""
        for file in self.holding():
            for held in file.batches:
                if held.nsqd == batch.nsqd and any(other.id == message.id for other in held):
                    file.adopted.append(Batch(batch.source, [message]))
                    return True
        return False

    def name_of(self, file: OpenFile) -> str:
        """Return the path of a file below the work directory."""
        return self._settings.directories.name_of(file.part.path)

    def get(self, stem: str, now_s: float) -> OpenFile:
        """Return the open file of a stem, or begin one."""
        file = self._files.get(stem)
        if file is not None and file.is_dirty:
            file = self._clean(file)
        if file is None:
            file = self._files[stem] = OpenFile(stem, self._begin(stem, now_s), now_s)
        file.last_used_s = now_s
        return file

    def _begin(self, stem: str, now_s: float) -> PartFile:
        directories = self._settings.directories
        rev = self._revs.get(stem, 0)
        while True:
            path = directories.work / with_rev(stem, rev)
            rev += 1
            taken = (directories.final(path), part_of(path), index_of(path))
            if any(map(Path.exists, taken)) or not self._locks.take(directories.name_of(path)):
                continue
            part = None
            try:
                part = self._make(path, now_s)
            finally:
                if part is None:
                    self._locks.release(directories.name_of(path))
            if part is None:
                continue
            self._revs[stem] = rev
            if len(self._revs) > REMEMBERED_STEMS:
                del self._revs[next(iter(self._revs))]
            log.info("writing %s", path)
            return part

    def _make(self, path: Path, now_s: float) -> PartFile | None:
        """Make a file; None when another process has just made one of this name."""
        directories = self._settings.directories
        make_folders(directories.work, path.parent, directories.folder_mode)
        head = self._next_head()
        compressor = self._settings.compressor
        try:
            return PartFile(path, directories.file_mode, compressor, now_s, head)
        except FileExistsError:
            return None

    # -- after a failure ------------------------------------------------------------------------

    def _clean(self, file: OpenFile) -> OpenFile | None:
        """Bring a file back to its last member, or leave it when it is gone."""
        if file.part.has_vanished:
            log.error(
                "%s was removed, or finished by another process; writing into a new file",
                file.part.path,
            )
            self._locks.release(self.name_of(file))
            self._files = {stem: other for stem, other in self._files.items() if other is not file}
            self._ending = [other for other in self._ending if other is not file]
            return None
        file.part.roll_back()
        file.is_dirty = False
        return file

    def mark_dirty(self) -> None:
        """Something could not be written: no file is used before it was rolled back."""
        for file in (*self._files.values(), *self._ending):
            file.is_dirty = True

    # -- rotation -------------------------------------------------------------------------------

    def over(self, now_s: float, *, all_files: bool) -> list[OpenFile]:
        """Return the files whose time is over."""
        return [file for file in self._files.values() if all_files or self._is_over(file, now_s)]

    def _is_over(self, file: OpenFile, now_s: float) -> bool:
        age_s = time.monotonic() - file.began_s
        opened_at_s, offset_s = file.part.opened_at_s, self._utc_offset_s(now_s)
        if self._settings.rotation.is_over(opened_at_s, now_s, offset_s, age_s=age_s):
            return True
        if self._settings.partition_by is PartitionBy.arrival:
            return file.stem != self.stem(now_s, now_s)
        is_idlest = file is min(self._files.values(), key=lambda other: other.last_used_s)
        is_one_too_many = is_idlest and len(self._files) > MOST_PARTITIONS
        return is_one_too_many or now_s - file.last_used_s > PARTITION_IDLE_S

    def check_in_s(self, now_s: float) -> float | None:
        """Return in how many seconds `over` may have something new; None for never."""
        if not self._files and not self._ending:
            return None if self._settings.skip_empty_files else 0.0
        if self._ending or self._settings.naming.changes_each_second:
            return CHECK_S
        rotation = self._settings.rotation
        wait_s = MAX_CHECK_S - now_s % MAX_CHECK_S
        if rotation.interval_s is not None:
            into_it_s = (now_s + self._utc_offset_s(now_s)) % rotation.interval_s
            wait_s = min(wait_s, rotation.interval_s - into_it_s)
        if rotation.age_s is not None:
            oldest_s = min((file.began_s for file in self._files.values()), default=0.0)
            wait_s = min(wait_s, oldest_s + rotation.age_s - time.monotonic())
        return max(CHECK_S, wait_s)

    def _utc_offset_s(self, now_s: float) -> float:
        offset = self._settings.moment(now_s).utcoffset()
        return offset.total_seconds() if offset else 0.0

    def is_full(self, file: OpenFile) -> bool:
        """Return whether a file takes no more once it is flushed."""
        return self._settings.rotation.is_full(*file.part.expected_sizes)

    def finish_full(self) -> None:
        """Finish the files that take no more; nothing may be held."""
        full = list(filter(self.is_full, self._files.values()))
        for file in full:
            self.finish(file)
        if full:  # what could not be published earlier is tried again by the clock
            self.publish_ending()

    def finish(self, file: OpenFile) -> None:
        """Write a file no more; `publish_ending` gives it its name. It must hold nothing."""
        del self._files[file.stem]
        self._ending.append(file)

    def publish_ending(self) -> None:
        """Publish the files that are finished; one without messages is removed.

        One that cannot be published now can be the next time.
        """
        while self._ending:
            file = self._ending[0]
            if file.is_dirty and self._clean(file) is None:
                continue
            if file.part.size == 0 and self._settings.skip_empty_files:
                file.part.remove()
            else:
                if file.part.size == 0:  # an empty gzip file is one with an empty member
                    file.part.flush(file.part.end_member(0, 0, 0))
                self._on_finished(finish(file.part.path, self._settings.directories))
            self._locks.release(self.name_of(file))
            del self._ending[0]

    def close(self) -> None:
        """Leave what is still in progress to recovery."""
        for file in (*self._files.values(), *self._ending):
            self._locks.release(self.name_of(file))
