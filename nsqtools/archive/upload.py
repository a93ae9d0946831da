"""Upload finished files while archiving continues: ``nsq to-file --upload``.

*A file* is uploaded (`upload`) as its index, then its data, then its manifest. Each is verified
before the next.

    topic=clicks/date=2026-11-21/clicks.web1.2026-11-21_08.web1-5b1c2f0e8d9a4e6f-17.log.gz
                                 .clicks ... .log.gz.index       a copy of the local index
                                 .clicks ... .log.gz.manifest    sizes, hashes and counts of both

The name ends in host, writer and number, which no other file has (`layout`), except on a copied
machine. So the index is put only if none exists, which claims the name. An archiver that finds the
index of another file uploads nothing, so it cannot overwrite the other file. The manifest is also
put only if none exists, and marks the file as complete. Each step can be repeated after a crash and
gives the same objects; a file with a manifest is not uploaded again.

*Two records next to the local file* let the next process continue:

    .NAME.uploading    the name of the object, written before the upload begins, and locked by the
                       process that uploads
    .NAME.uploaded     the name of the object, after it was stored and verified

While both exist, the steps after an upload, such as removing the file, are not finished. The name
is chosen once and recorded: a later attempt uses it as well, under any process and host name, so a
file is never stored under two names. ``--delete-uploaded`` removes only the data immediately. The
index stays for as long as a journal may look a message up in it, or a message whose FIN was lost
would be written twice.

`Uploads` runs a few threads in the process of the archiver. The run calls `put` for each finished
file and `regulate` with each tick, which pauses consumption. A failed upload is retried with
growing delays for as long as the process runs, and then by the next process. If the store is full
or unreachable, archiving continues until the files on the local disk reach ``--max-local-bytes``.
Then consumption pauses, which is logged, until uploads have made room.

Trap: a thread that waits for a response in obstore cannot be interrupted. The threads are daemons,
so that a process that is told to stop does not wait for a store that does not respond.
"""

from __future__ import annotations

import errno
import json
import logging
import math
import os
import re
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass, field
from datetime import UTC, datetime
from pathlib import Path, PurePosixPath
from urllib.parse import quote

from nsqtools.archive.finding import ArchiveFile
from nsqtools.archive.journal import RETENTION_S
from nsqtools.archive.layout import (
    INDEX,
    MANIFEST,
    Head,
    Index,
    hidden_below,
    hidden_name,
    index_of,
    load_index,
    owner_of,
    total_of,
)
from nsqtools.archive.place import ChangedError, Place, hash_of
from nsqtools.archive.reader import scan_archive
from nsqtools.errors import ConfigurationError, NsqError
from nsqtools.files.durable import replace_file, sync_folder, write_all
from nsqtools.files.opening import NotOursError, NotRegularError, closing_fd, lock_file, open_own
from nsqtools.protocol.text import NS, load_json
from nsqtools.records.naming import before_extension
from nsqtools.records.prometheus import Metric, metric_of

log = logging.getLogger("nsqtools")

UPLOADING = ".uploading"
UPLOADED = ".uploaded"
# Digits of the writer in the name of an object: 64 bits are enough to tell writers apart.
WRITER_DIGITS = 16

_NOT_IN_NAMES = re.compile(r"[^A-Za-z0-9._-]+")

# Delays between attempts after a failure, doubled from the base to the maximum.
RETRY_BASE_S, RETRY_MAX_S = 1.0, 60.0
# Share of --max-local-bytes at which a paused consumer resumes. At a share of 1, consumption would
# pause and resume with every file.
RESUME_SHARE = 0.9
# Time after which a failure that has not changed is logged again.
REPORT_INTERVAL_S = 300.0
# The end of a run waits this long for uploads that fail, and this long for any upload after a
# signal. The next run uploads the rest.
CLOSE_FAILURE_S = 30.0
CLOSE_SIGNALED_S = 15.0


# -- records next to the local file -------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class UploadRecord:
    """The URL of a place, and the name of the object in it."""

    url: str
    name: str

    def encode(self) -> bytes:
        """Return the content of the file."""
        return json.dumps(asdict(self)).encode() + b"\n"


def decode_record(data: bytes) -> UploadRecord | None:
    """Return the record of a file, None if it was torn."""
    try:
        document = load_json(data)
        return UploadRecord(str(document["url"]), str(document["name"]))
    except (ValueError, KeyError, TypeError):
        return None


def uploading_of(path: Path) -> Path:
    """Return the path of the record of an upload in progress."""
    return path.with_name(f".{path.name}{UPLOADING}")


def uploaded_of(path: Path) -> Path:
    """Return the path of the record of a finished upload."""
    return path.with_name(f".{path.name}{UPLOADED}")


def files_to_upload(directory: Path) -> Iterator[Path]:
    """Iterate over the finished files below a directory whose upload is not finished.

    Files without an index were not written by an archiver, and are left out. Raises ``OSError``.
    """
    for index in hidden_below(directory, INDEX):
        path = owner_of(index)
        is_finished = uploaded_of(path).exists() and not uploading_of(path).exists()
        if path.is_file() and not is_finished:
            yield path


def remove_old_records(directory: Path) -> None:
    """Remove records and indexes of files that were uploaded and removed long ago.

    Raises ``OSError``.
    """
    oldest_s = time.time() - RETENTION_S
    for suffix in (UPLOADED, UPLOADING):
        for record in list(hidden_below(directory, suffix)):
            path = owner_of(record)
            # A record that stays, or that another process has removed, prevents no upload.
            with suppress(OSError):
                if not path.exists() and record.lstat().st_mtime < oldest_s:
                    # The index is removed last, because it reserves the local name.
                    record.unlink()
                    index_of(path).unlink(missing_ok=True)


# -- one file -----------------------------------------------------------------------------------


class NotUploadable(OSError):
    """A file that no retry can upload: its name is taken by another file, or it has no index."""


@dataclass(frozen=True, slots=True)
class UploadPlan:
    """How the finished files below ``directory`` are uploaded, and whether they are deleted."""

    directory: Path
    place: Place
    host: str
    by_topic_and_date: bool = False
    deletes: bool = False


def upload(path: Path, plan: UploadPlan) -> int | None:
    """Upload a finished file; return its size, None if there was nothing to do.

    Raises `NotUploadable`, and ``OSError`` for a failure that a retry may overcome.
    """
    if _is_uploaded(path):
        _remove(path, plan)
        uploading_of(path).unlink(missing_ok=True)
        return None
    record = lock_file(uploading_of(path))
    if record is None:
        return None
    with closing_fd(record):
        # Another process may have finished the upload before this one got the lock.
        is_finished = not os.fstat(record).st_nlink or _is_uploaded(path) or not path.exists()
        return None if is_finished else _upload(path, plan, record)


def _is_uploaded(path: Path) -> bool:
    """Return whether a record proves that this file is uploaded, so that it may be removed."""
    try:
        with open_own(uploaded_of(path)) as file:
            record = decode_record(file.read(1 << 16))
    except (FileNotFoundError, NotRegularError, NotOursError):
        return False
    index = load_index(index_of(path))
    identity = f"-{_identity_in(index.head)}." if index and index.head else ""
    # The record may be of an earlier file with the same local name.
    return record is not None and identity in f"{record.name}."


def _upload(path: Path, plan: UploadPlan, descriptor: int) -> int:
    """Upload a file whose record is locked and open with ``descriptor``."""
    index = index_to_upload(path)
    place, size = plan.place, path.stat().st_size
    record = decode_record(os.pread(descriptor, 1 << 16, 0))
    if record is None or record.url != place.url:
        record = UploadRecord(place.url, object_name(path, index, plan))
        try:
            os.ftruncate(descriptor, 0)
            os.lseek(descriptor, 0, os.SEEK_SET)
            write_all(descriptor, record.encode())
            os.fsync(descriptor)
        except OSError as exc:
            # Uploads make room on a full disk, so they continue without the record.
            if exc.errno != errno.ENOSPC:
                exc.filename = str(uploading_of(path))
                raise
        sync_folder(path.parent)
    manifest = make_manifest(path, size, index, record.name)
    if _claim(place, path, record.name) or not _is_stored(place, record.name, manifest):
        place.verify(record.name, path, place.put_file(record.name, path))
        _publish(place, record.name, manifest)
    # Removing the file first makes room for the record on a full disk.
    _remove(path, plan)
    replace_file(uploaded_of(path), record.encode())
    # Without this record, the upload counts as finished.
    uploading_of(path).unlink(missing_ok=True)
    return size


def index_to_upload(path: Path) -> Index:
    """Return the index of a file that an archiver finished. Raises `NotUploadable`, ``OSError``."""
    try:
        # A link of another user may lead to a file that only this process may read.
        open_own(path).close()
    except (NotRegularError, NotOursError) as exc:
        raise NotUploadable(exc.errno, exc.strerror, str(path)) from None
    index = load_index(index_of(path))
    if index is None:
        raise NotUploadable(errno.ENOENT, "it has no index", str(path))
    return index


def _identity_in(head: Head) -> str:
    """Return the part of an object's name that identifies a file by its head."""
    return f"{head.writer[:WRITER_DIGITS]}-{head.number}"


def identity_of(archive: ArchiveFile, host: str) -> str:
    """Return the end of the names of the objects of an archive. Raises ``OSError``."""
    if archive.head:
        return f"{token_of_host(host)}-{_identity_in(archive.head)}"
    return f"{token_of_host(host)}-{archive.content()[0][:32]}"


def token_of_host(host: str) -> str:
    """Return a host as a part of names of objects."""
    return _NOT_IN_NAMES.sub("_", host) or "host"


def object_name(path: Path, index: Index, plan: UploadPlan) -> str:
    """Return the name of a file's object. Raises ``OSError``."""
    archive = ArchiveFile.at(path, index)
    token = f".{identity_of(archive, plan.host)}"
    name = before_extension(path.relative_to(plan.directory).as_posix(), token)
    if not plan.by_topic_and_date:
        return name
    topics = scan_archive(archive).topics
    first_ns = index.members[0].min_ts if index.members else 0
    date = datetime.fromtimestamp(first_ns / NS if first_ns else path.stat().st_mtime, UTC)
    topic = quote(min(topics), safe="") if topics else "unknown"
    return f"topic={topic}/date={date:%Y-%m-%d}/{PurePosixPath(name).name}"


def make_manifest(path: Path, size: int, index: Index, name: str) -> dict[str, object]:
    """Return the manifest of a file, which is the same for each attempt to upload it."""
    head, total = index.head, total_of(index.members)
    return {
        "version": 1,
        "name": PurePosixPath(name).name,
        "size": size,
        "sha256": hash_of(path),
        "index_sha256": hash_of(index_of(path)),
        "writer": head.writer if head else None,
        "number": head.number if head else None,
        "messages": total.messages,
        "min_ts": total.min_ts or None,
        "max_ts": total.max_ts or None,
    }


def _claim(place: Place, path: Path, name: str) -> bool:
    """Claim a name by putting the index; return whether there was no index.

    If there was none, the file cannot be stored yet. Raises `NotUploadable` for the index of
    another file, whose upload may be in progress.
    """
    index_name, data = hidden_name(name, INDEX), index_of(path).read_bytes()
    try:
        version = place.put_if_absent(index_name, data)
    except FileExistsError:
        if place.read(index_name) != data:
            raise _name_taken(place, name) from None
        return False
    try:
        place.verify_data(index_name, data, version)
    except ChangedError:
        # The next attempt would take a damaged index for the index of another file.
        place.delete(index_name)
        raise
    return True


def _name_taken(place: Place, name: str) -> NotUploadable:
    return NotUploadable(errno.EEXIST, "another file is stored there", str(place / name))


def _is_stored(place: Place, name: str, manifest: dict[str, object]) -> bool:
    """Return whether the file is stored as a whole. Raises `NotUploadable` for another file."""
    try:
        if load_json(place.read(hidden_name(name, MANIFEST))) != manifest:
            raise _name_taken(place, name)
        return place.stat(name).size == manifest["size"]
    except FileNotFoundError:
        # There is no manifest yet, or the file was removed after its upload.
        return False
    except ValueError:
        raise _name_taken(place, name) from None


def _publish(place: Place, name: str, manifest: dict[str, object]) -> None:
    """Put the manifest, unless an earlier request did so whose response was lost."""
    data = json.dumps(manifest, indent=1).encode() + b"\n"
    try:
        place.put_if_absent(hidden_name(name, MANIFEST), data)
    except FileExistsError:
        if not _is_stored(place, name, manifest):
            raise


def _remove(path: Path, plan: UploadPlan) -> None:
    if plan.deletes:
        path.unlink(missing_ok=True)
        sync_folder(path.parent)


# -- the threads --------------------------------------------------------------------------------


@dataclass(slots=True)
class UploadTotals:
    """Counts since the start, and the present backlog of files."""

    files: int = 0
    bytes: int = 0
    failures: int = 0
    conflicts: int = 0
    waiting_files: int = 0
    waiting_bytes: int = 0
    misfits: int = 0
    """Bodies that did not fit the columns of a table."""
    without_column: set[str] = field(default_factory=set)
    """Fields of bodies that could not get a column in a table."""


class Uploads:
    """Uploads files on a few threads.

    Call `put` from any thread, and the other methods from the thread that runs the archiver.
    """

    # More than there are cores, because small files wait for responses most of the time.
    THREADS = 8
    # Whether the files are replaced by others, so that a user is told of those instead.
    REPLACES_FILES = False

    def __init__(self, plan: UploadPlan, max_local_bytes: int | None = None) -> None:
        self.totals = UploadTotals()
        self.last_error: Exception | None = None
        self._plan = plan
        self._max_local_bytes = max_local_bytes
        self._changed = threading.Condition()
        self._waiting: deque[Path] = deque()
        # The sizes of waiting files and of files whose upload is in progress.
        self._sizes: dict[Path, int] = {}
        self._failing_since: float | None = None
        self._retry_s = RETRY_BASE_S
        self._retry_at = 0.0
        self._reported, self._reported_at = "", 0.0
        self._is_pausing = self._is_closed = False
        self._threads: list[threading.Thread] = []

    # -- on the thread of the run ---------------------------------------------------------------

    def put(self, path: Path) -> None:
        """Queue a finished file."""
        try:
            size = path.stat().st_size
        except OSError:
            # Another program has removed the file.
            return
        with self._changed:
            if path not in self._sizes:
                self._sizes[path] = size
                self._waiting.append(path)
                self.totals.waiting_files += 1
                self.totals.waiting_bytes += size
                self._changed.notify()

    def start(self) -> None:
        """Start the threads, and queue the files that earlier runs did not upload.

        Call it after recovery. Further calls have no effect.
        """
        if self._threads:
            return
        try:
            remove_old_records(self._plan.directory)
            for path in files_to_upload(self._plan.directory):
                self.put(path)
        except OSError as exc:
            log.error("cannot list the files to upload in %s (%s)", exc.filename, exc.strerror)
        for number in range(self.THREADS):
            thread = threading.Thread(target=self._run, name=f"nsq-upload-{number}", daemon=True)
            thread.start()
            self._threads.append(thread)

    def regulate(self, set_paused: Callable[[bool], None]) -> None:
        """Pause consumption while there is a `_shortage`."""
        waiting, shortage = self.totals.waiting_bytes, self._shortage()
        if shortage and not self._is_pausing:
            self._is_pausing = True
            log.error(
                "consumption pauses: %d bytes wait for their upload, and %s", waiting, shortage
            )
            set_paused(True)
        elif self._is_pausing and not shortage:
            self._is_pausing = False
            log.warning("consumption resumes: %d bytes wait for their upload", waiting)
            set_paused(False)

    def _shortage(self) -> str:
        """Return why no more files may wait, "" if more may."""
        limit = self._max_local_bytes
        share = RESUME_SHARE if self._is_pausing else 1
        if limit and self.totals.waiting_bytes >= share * limit:
            return f"--max-local-bytes is {limit}"
        return ""

    def close(
        self,
        *,
        is_signaled: Callable[[], bool] = lambda: False,
        on_wait: Callable[[], None] = lambda: None,
    ) -> int:
        """Wait until all files are uploaded or uploads fail; return how many files are left.

        After ``is_signaled`` returns true, the wait ends within `CLOSE_SIGNALED_S`. ``on_wait`` is
        called several times a second.
        """
        self.start()
        ends_at = math.inf
        self.last_error = None
        with self._changed:
            if self._failing_since is not None:
                # One attempt is made immediately, whatever the present delay is.
                self._failing_since, self._retry_s = time.monotonic(), RETRY_BASE_S
                self._retry_at = 0.0
                self._changed.notify_all()
        while self.totals.waiting_files:
            now = time.monotonic()
            if is_signaled():
                ends_at = min(ends_at, now + CLOSE_SIGNALED_S)
            failing_since = now if self._failing_since is None else self._failing_since
            if now > ends_at or now - failing_since > CLOSE_FAILURE_S:
                break
            if self._is_rejected():
                break
            on_wait()
            with self._changed:
                self._changed.wait(0.2)
        with self._changed:
            self._is_closed = True
            self._changed.notify_all()
        return self.totals.waiting_files + self.totals.conflicts

    def _is_rejected(self) -> bool:
        """Return whether the place does not accept the files, which no retry changes."""
        return isinstance(self.last_error, ConfigurationError)

    @property
    def health(self) -> tuple[bool, str]:
        """Whether consumption is not paused, and a line with the problem, or ""."""
        if self._is_pausing:
            return False, f"paused: {self.totals.waiting_bytes} bytes wait for their upload"
        if self._failing_since is not None:
            return True, f"uploading fails: {self.last_error}"
        return True, ""

    def metrics(self) -> Sequence[Metric]:
        """Return the counts, for Prometheus."""
        totals = self.totals
        return [
            metric_of(f"nsq_to_file_{name}", help, [({}, value)])
            for name, help, value in (
                ("uploaded_files_total", "Files uploaded.", totals.files),
                ("uploaded_bytes_total", "Bytes uploaded.", totals.bytes),
                ("upload_failures_total", "Uploads that failed.", totals.failures),
                ("upload_waiting_files", "Files to upload.", totals.waiting_files),
                ("upload_waiting_bytes", "Bytes to upload.", totals.waiting_bytes),
                ("upload_paused", "1 while consumption waits for uploads.", int(self._is_pausing)),
            )
        ]

    # -- on the threads -------------------------------------------------------------------------

    def _run(self) -> None:
        while path := self._next():
            try:
                uploaded = upload(path, self._plan)
            except NotUploadable as exc:
                log.error("%s is not uploaded: %s: %s", path, exc.filename, exc.strerror)
                self._complete(path, conflicts=1)
            except (OSError, NsqError) as exc:
                self._retry_later(path, exc)
            except Exception:
                # A file name that is not UTF-8, or a defect, must not end the thread.
                log.exception("%r is not uploaded", str(path))
                self._complete(path, conflicts=1)
            else:
                if uploaded is not None:
                    log.info("uploaded %s", path)
                self._complete(path, uploaded=uploaded)

    def _next(self) -> Path | None:
        with self._changed:
            while not self._is_closed:
                pause_s = self._retry_at - time.monotonic()
                if self._waiting and pause_s <= 0:
                    # During a failure only one thread at a time tries, so the next must wait.
                    if self._failing_since is not None:
                        self._retry_s = min(2 * self._retry_s, RETRY_MAX_S)
                        self._retry_at = time.monotonic() + self._retry_s
                    return self._waiting.popleft()
                self._changed.wait(max(pause_s, 0.01) if self._waiting else None)
        return None

    def _complete(self, path: Path, *, uploaded: int | None = None, conflicts: int = 0) -> None:
        with self._changed:
            self.totals.conflicts += conflicts
            self.totals.waiting_files -= 1
            self.totals.waiting_bytes -= self._sizes.pop(path)
            if uploaded is not None:
                self.totals.files += 1
                self.totals.bytes += uploaded
                if self._failing_since is not None:
                    log.warning("uploading works again")
                self._failing_since, self._retry_s, self._retry_at = None, RETRY_BASE_S, 0.0
            self._changed.notify_all()

    def _retry_later(self, path: Path, exc: Exception) -> None:
        now = time.monotonic()
        with self._changed:
            # At the end of the queue, so that an unreadable file does not delay the others.
            self._waiting.append(path)
            self.totals.failures += 1
            # Without the file name, so that the same reason of another file is not logged again.
            reason = str(getattr(exc, "strerror", None) or exc)
            is_new = self._failing_since is None or reason != self._reported
            self.last_error = exc
            self._failing_since = self._failing_since or now
            self._retry_at = now + self._retry_s
            if is_new or now - self._reported_at > REPORT_INTERVAL_S:
                self._reported, self._reported_at = reason, now
                url = getattr(exc, "filename", None) or self._plan.place.url
                log.warning("cannot upload %s (%s: %s); trying again", path, url, reason)
                if isinstance(exc, NsqError) and exc.hint:
                    log.warning("hint: %s", exc.hint)
