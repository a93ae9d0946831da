"""One file as nsq_to_file writes it: raw bodies and newlines, visible while it grows.

It is appended to when it is there already, unless it is compressed or rotated by age, and then a
new one gets the next ``<REV>``. What is after the last newline, or the last whole gzip member, was
never synced, so its messages were never finished and come again: it is cut off. After an error the
file is cut back to what was synced last, so no line is ever glued to half of another.

What nsq_to_file does not do: two processes never write to one file; the second takes the next rev.
"""

from __future__ import annotations

import os
import re
import zlib
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path

from nsqtools.files.durable import make_folders, place, sync_folder, write_all
from nsqtools.files.locks import try_lock
from nsqtools.files.opening import open_to_write
from nsqtools.records.naming import REV, FileNaming, with_rev

CHUNK = 1 << 16
GZIP = 31  # zlib's window, with gzip's header


@dataclass(frozen=True, slots=True)
class GrowingFileSettings:
    """As nsq_to_file's flags; sizes are bytes of text, ages seconds; 0 is without limit."""

    output_dir: Path
    work_dir: Path
    naming: FileNaming
    gzip_level: int = 0
    rotate_size: int = 0
    rotate_age_s: float = 0.0
    skip_empty_files: bool = False

    @property
    def is_exclusive(self) -> bool:
        """Tell whether files are never appended to."""
        return bool(self.gzip_level or self.rotate_age_s)

    @property
    def has_revs(self) -> bool:
        """Tell whether a period can have several files."""
        return self.is_exclusive or bool(self.rotate_size) or self.work_dir != self.output_dir


class GrowingFile:
    """The files of one topic, one after the other. Raises ``OSError``."""

    def __init__(self, topic: str, settings: GrowingFileSettings) -> None:
        self._topic = topic
        self._settings = settings
        self._fd: int | None = None
        self._path = Path()
        self._stem = ""
        self._rev = 0
        self._size = 0  # of the text
        self._synced = 0, 0  # size on disk, and of the text
        self._opened_at = 0.0
        self._compressor = self._new_compressor()
        self._is_dirty = False

    def write(self, bodies: list[bytes], now: float) -> None:
        """Append lines, rotating where it is due. ``now`` is a reading of the monotonic clock."""
        limit = self._settings.rotate_size
        self.rotate_if_due(now)
        if not limit:
            self._append(b"\n".join(bodies) + b"\n")
            return
        for body in bodies:
            if self._size > limit:
                self.close()
            self.rotate_if_due(now)
            self._append(body + b"\n")

    def rotate_if_due(self, now: float) -> None:
        """Have the file open that is written to now."""
        stem = self.close_if_due(now)
        if self._fd is None:
            self._open(stem, now)

    def close_if_due(self, now: float) -> str:
        """Close a file whose time is over; return the stem of what is written now."""
        moment = datetime.now().astimezone()  # or %Z and %z would be empty
        stem = self._settings.naming.stem(self._topic, moment, moment)
        if not self._settings.has_revs:
            stem = stem.replace(REV, "")
        age = self._settings.rotate_age_s
        if self._fd is not None and (stem != self._stem or (age and now - self._opened_at > age)):
            self.close()
        return stem

    def _append(self, text: bytes) -> None:
        assert self._fd is not None
        self._is_dirty = True
        self._size += len(text)
        if self._compressor is not None:
            text = self._compressor.compress(text)
        write_all(self._fd, text)

    def sync(self) -> None:
        """Make everything durable."""
        if self._fd is None or not self._is_dirty:
            return
        if self._compressor is not None:
            write_all(self._fd, self._compressor.flush())
            self._compressor = self._new_compressor()
        os.fsync(self._fd)
        self._is_dirty = False
        self._synced = os.fstat(self._fd).st_size, self._size

    def roll_back(self) -> None:
        """Cut off what was not synced."""
        if self._fd is not None:
            os.ftruncate(self._fd, self._synced[0])
            self._size = self._synced[1]
        self._compressor = self._new_compressor()
        self._is_dirty = False

    def close(self) -> None:
        """Sync, and give the file its place in the output directory."""
        if self._fd is None:
            return
        self.sync()
        fd, self._fd = self._fd, None
        try:
            if self._settings.work_dir != self._settings.output_dir:
                self._publish()
        finally:
            os.close(fd)

    def _publish(self) -> None:
        settings, rev = self._settings, self._rev
        while True:
            target = settings.output_dir / with_rev(self._stem, rev)
            make_folders(settings.output_dir, target.parent, 0o770)
            try:
                place(self._path, target)
            except FileExistsError:
                rev += 1
                continue
            self._path.unlink(missing_ok=True)
            sync_folder(target.parent)
            return

    # -- opening --------------------------------------------------------------------------------

    def _open(self, stem: str, now: float) -> None:
        rev = self._rev + 1 if stem == self._stem and self._settings.has_revs else 0
        while True:
            name = with_rev(stem, rev)
            path = self._settings.work_dir / name
            fd = self._try(path, self._settings.output_dir / name)
            if fd is not None:
                break
            rev += 1
        self._fd, self._path, self._stem, self._rev = fd, path, stem, rev
        self._size = os.fstat(fd).st_size
        self._synced = self._size, self._size
        self._opened_at = now
        self._compressor = self._new_compressor()
        sync_folder(path.parent)

    def _try(self, path: Path, final: Path) -> int | None:
        """Open a file; None when it cannot be ours, or is full."""
        settings = self._settings
        if final != path and final.exists():
            return None
        make_folders(settings.work_dir, path.parent, 0o770)
        flags = os.O_CREAT | os.O_RDWR | os.O_APPEND
        if settings.is_exclusive:
            flags |= os.O_EXCL
        try:
            fd = open_to_write(path, flags, 0o666)
        except FileExistsError:
            return None
        size = os.fstat(fd).st_size
        if not try_lock(fd) or (settings.rotate_size and size > settings.rotate_size):
            os.close(fd)
            return None
        cut_torn_line(fd)
        return fd

    def _new_compressor(self) -> zlib._Compress | None:
        level = self._settings.gzip_level
        return zlib.compressobj(level, zlib.DEFLATED, GZIP) if level else None


def cut_torn_line(fd: int) -> None:
    """Cut off what is after the last newline."""
    end = os.fstat(fd).st_size
    at = end
    while at:
        begin = max(0, at - CHUNK)
        found = os.pread(fd, at - begin, begin).rfind(b"\n")
        if found >= 0:
            begin += found + 1
        at = begin
        if found >= 0:
            break
    if at != end:
        os.ftruncate(fd, at)


def cut_torn_member(fd: int) -> None:
    """Cut off what is after the last whole gzip member."""
    end, whole, at = os.fstat(fd).st_size, 0, 0
    decompressor = zlib.decompressobj(GZIP)
    while at < end:
        data = os.pread(fd, CHUNK, at)
        at += len(data)
        try:
            while data:
                decompressor.decompress(data, 1 << 20)
                while decompressor.unconsumed_tail:
                    decompressor.decompress(decompressor.unconsumed_tail, 1 << 20)
                data = decompressor.unused_data
                if decompressor.eof:
                    whole = at - len(data)
                    decompressor = zlib.decompressobj(GZIP)
                else:
                    break
        except zlib.error:
            break
    if whole != end:
        os.ftruncate(fd, whole)


def publish_orphans(settings: GrowingFileSettings) -> list[Path]:
    """Give files that a crash left in the work directory their place; return where they are."""
    if settings.work_dir == settings.output_dir:
        return []
    placed = []
    for path in sorted(settings.work_dir.rglob("*")):
        if not path.is_file() or path.is_symlink() or path.name.startswith("."):
            continue
        fd = open_to_write(path, os.O_RDWR)
        try:
            if not try_lock(fd):
                continue  # another process writes to it
            (cut_torn_member if path.suffix == ".gz" else cut_torn_line)(fd)
            os.fsync(fd)
            placed.append(_put(path, settings))
        finally:
            os.close(fd)
    return placed


def _put(path: Path, settings: GrowingFileSettings) -> Path:
    name, rev = str(path.relative_to(settings.work_dir)), 0
    if found := re.search(r"-(\d{6})(?!.*-\d{6})", name):
        name, rev = name[: found.start()] + REV + name[found.end() :], int(found[1])
    while True:
        target = settings.output_dir / with_rev(name, rev)
        make_folders(settings.output_dir, target.parent, 0o770)
        try:
            place(path, target)
        except FileExistsError:
            rev += 1
            continue
        path.unlink(missing_ok=True)
        sync_folder(target.parent)
        return target
