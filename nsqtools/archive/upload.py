"""Upload finished files beside the archiving: what ``nsq to-file --upload`` adds.

*A file* is uploaded (`upload`) as its index, then its data, then its manifest, verified step by
step.

    topic=clicks/date=2026-11-21/clicks.web1.2026-11-21_08.web1-5b1c2f0e8d9a4e6f-17.log.gz
                                 .clicks ... .log.gz.index       as it is beside the local file
                                 .clicks ... .log.gz.manifest    sizes, hashes and counts of both

The name ends in host, writer and number, which no other file has (`layout`), but for those of a
copied machine. So the index is put only if there is none, which claims the name, and who finds that
of another file puts nothing: no archiver can overwrite what another one stores. So is the manifest:
it says that what it names is complete. Each step can be repeated after a crash at any point and
gives the same objects; a file whose manifest is there already is not uploaded again.

*Beside the local file* is what is known of its upload, so that the next process continues:

    .NAME.uploading    the object that the file becomes; written before anything is uploaded, and
                       locked by the process that does it
    .NAME.uploaded     the same when it is there, whole and verified

While both are there what comes after an upload, such as the removal of the file, is still to be
done. The name of the object is decided once and written down: a later attempt, by whichever process
and under whichever host name, continues under the same name, so nothing is stored under two. With
``--delete-uploaded`` only the data goes at once. The index stays for as long as a journal may ask
whether a message is written, or a message whose FIN was lost would be written twice.

*Beside the archiver* (`Uploads`) a few threads upload. The archiver calls `put` for each finished
file, and with each tick `regulate`, which pauses it. What does not work is tried again, with
growing pauses, for as long as the process runs, and by the next one. A store that is full or cannot
be reached stops nothing until the bytes that wait on the local disk reach the limit. Then
consumption pauses, which is reported, and resumes by itself.

Trap: the threads wait inside of obstore, where nothing interrupts them. They are daemons, so that a
process that was asked to end does not wait for a store that does not answer.
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
from typing import TYPE_CHECKING
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
from nsqtools.protocol.text import NS
from nsqtools.records.naming import before_extension
from nsqtools.records.prometheus import Metric, metric_of

if TYPE_CHECKING:
    from nsqtools.archive.archiver import Archiver

log = logging.getLogger("nsqtools")

UPLOADING = ".uploading"
UPLOADED = ".uploaded"
WRITER_DIGITS = 16

_NOT_IN_NAMES = re.compile(r"[^A-Za-z0-9._-]+")

FIRST_RETRY_S, LONGEST_RETRY_S = 1.0, 60.0
RESUME_SHARE = 0.9  # of the limit: or consumption would pause and resume with every file
SAY_AGAIN_S = 300.0
# At the end of a run; what is left then is uploaded by the next one.
LONGEST_FAILURE_S = 30.0
HURRIED_S = 15.0


# -- what is beside the local file --------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class UploadRecord:
    """The storage and the name of the object there."""

    url: str
    name: str

    def encode(self) -> bytes:
        """Return the content of the file."""
        return json.dumps(asdict(self)).encode() + b"\n"


def decode_record(data: bytes) -> UploadRecord | None:
    """Return what a file says; None if it was torn."""
    try:
        document = json.loads(data)
        return UploadRecord(str(document["url"]), str(document["name"]))
    except (ValueError, KeyError, TypeError):
        return None


def uploading_of(path: Path) -> Path:
    """Return the record of the upload that is under way."""
    return path.with_name(f".{path.name}{UPLOADING}")


def uploaded_of(path: Path) -> Path:
    """Return the record of the upload that is done."""
    return path.with_name(f".{path.name}{UPLOADED}")


def files_to_upload(directory: Path) -> Iterator[Path]:
    """Iterate over the finished files below a directory that have an index and are not uploaded,
    or not all that comes after it is done.

    What has no index was not written by an archiver, and is left alone. Raises ``OSError``.
    """
    for index in hidden_below(directory, INDEX):
        path = owner_of(index)
        is_over = uploaded_of(path).exists() and not uploading_of(path).exists()
        if path.is_file() and not is_over:
            yield path


def remove_old_records(directory: Path) -> None:
    """Remove what is left of files that were uploaded and removed long ago. Raises ``OSError``."""
    oldest = time.time() - RETENTION_S
    for suffix in (UPLOADED, UPLOADING):
        for record in list(hidden_below(directory, suffix)):
            path = owner_of(record)
            with suppress(OSError):  # what stays, or another process removed, stops no upload
                if not path.exists() and record.lstat().st_mtime < oldest:
                    record.unlink()  # first: the index keeps the name from others
                    index_of(path).unlink(missing_ok=True)


# -- one file -----------------------------------------------------------------------------------


class NotUploadable(OSError):
    """A retry cannot help: another file is stored under the name, or the index is gone."""


@dataclass(frozen=True, slots=True)
class UploadPlan:
    """What happens to each file below ``directory``, whose finished files are uploaded."""

    directory: Path
    storage: Place
    host: str
    by_topic_and_date: bool = False
    deletes: bool = False


def upload(path: Path, plan: UploadPlan) -> int | None:
    """Upload a finished file; return its size, None if there was nothing to do.

    Raises `NotUploadable`, and ``OSError`` when it did not work: try again later.
    """
    if _is_uploaded(path):
        _remove(path, plan)
        uploading_of(path).unlink(missing_ok=True)
        return None
    record = lock_file(uploading_of(path))
    if record is None:
        return None
    with closing_fd(record):
        is_over = not os.fstat(record).st_nlink or _is_uploaded(path) or not path.exists()
        return None if is_over else _upload(path, plan, record)  # over by another process meanwhile


def _is_uploaded(path: Path) -> bool:
    """Whether a whole record says so of this file: it may be removed then."""
    try:
        with open_own(uploaded_of(path)) as file:
            record = decode_record(file.read(1 << 16))
    except (FileNotFoundError, NotRegularError, NotOursError):
        return False
    index = load_index(index_of(path))
    identity = f"-{_identity_in(index.head)}." if index and index.head else ""
    return record is not None and identity in f"{record.name}."  # else one had the name before


def _upload(path: Path, plan: UploadPlan, descriptor: int) -> int:
    """Upload a file whose record, open with ``descriptor``, is locked."""
    index = index_to_upload(path)
    storage, size = plan.storage, path.stat().st_size
    record = decode_record(os.pread(descriptor, 1 << 16, 0))
    if record is None or record.url != storage.url:
        record = UploadRecord(storage.url, object_name(path, index, plan))
        try:
            os.ftruncate(descriptor, 0)
            os.lseek(descriptor, 0, os.SEEK_SET)
            write_all(descriptor, record.encode())
            os.fsync(descriptor)
        except OSError as exc:
            if exc.errno != errno.ENOSPC:  # uploads make room
                exc.filename = str(uploading_of(path))
                raise
        sync_folder(path.parent)
    manifest = make_manifest(path, size, index, record.name)
    if _claim(storage, path, record.name) or not _is_stored(storage, record.name, manifest):
        storage.verify(record.name, path, storage.put_file(record.name, path))
        _publish(storage, record.name, manifest)
    _remove(path, plan)  # first: it makes room for the record on a full disk
    replace_file(uploaded_of(path), record.encode())
    uploading_of(path).unlink(missing_ok=True)  # which says that all is done
    return size


def index_to_upload(path: Path) -> Index:
    """Return the index of a file that an archiver finished. Raises `NotUploadable`, ``OSError``."""
    try:
        open_own(path).close()  # a link of somebody may lead to what only we may read
    except (NotRegularError, NotOursError) as exc:
        raise NotUploadable(exc.errno, exc.strerror, str(path)) from None
    index = load_index(index_of(path))
    if index is None:
        raise NotUploadable(errno.ENOENT, "it has no index", str(path))
    return index


def _identity_in(head: Head) -> str:
    """Return what names of objects have of a head."""
    return f"{head.writer[:WRITER_DIGITS]}-{head.number}"


def identity_of(archive: ArchiveFile, host: str) -> str:
    """Return what ends the names of what an archive becomes. Raises ``OSError``."""
    token = _NOT_IN_NAMES.sub("_", host) or "host"
    if archive.head:
        return f"{token}-{_identity_in(archive.head)}"
    return f"{token}-{archive.storage.digest(archive.name, archive.size())[:32]}"


def object_name(path: Path, index: Index, plan: UploadPlan) -> str:
    """Return the name of a file's object. Raises ``OSError``."""
    archive = ArchiveFile.at(path, index)
    token = f".{identity_of(archive, plan.host)}"
    name = before_extension(path.relative_to(plan.directory).as_posix(), token)
    if not plan.by_topic_and_date:
        return name
    topics = scan_archive(archive).topics
    first_ns = index.members[0].min_ts if index.members else 0
    first = datetime.fromtimestamp(first_ns / NS if first_ns else path.stat().st_mtime, UTC)
    topic = quote(min(topics), safe="") if topics else "unknown"
    return f"topic={topic}/date={first:%Y-%m-%d}/{PurePosixPath(name).name}"


def make_manifest(path: Path, size: int, index: Index, name: str) -> dict[str, object]:
    """Return what the manifest of a file says. The same file always has the same."""
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


def _claim(storage: Place, path: Path, name: str) -> bool:
    """Put the index, which claims the name; return whether there was none.

    Then the file is not stored yet, and nothing has to be checked before it is. Raises
    `NotUploadable` for the index of another file, which may be on its way just now.
    """
    there, data = hidden_name(name, INDEX), index_of(path).read_bytes()
    try:
        version = storage.put_if_absent(there, data)
    except FileExistsError:
        if storage.read(there) != data:
            raise _taken(storage, name) from None
        return False
    try:
        storage.verify_data(there, data, version)
    except ChangedError:
        storage.delete(there)  # or it would be taken for that of another file
        raise
    return True


def _taken(storage: Place, name: str) -> NotUploadable:
    return NotUploadable(errno.EEXIST, "another file is stored there", str(storage / name))


def _is_stored(storage: Place, name: str, manifest: dict[str, object]) -> bool:
    """Return whether the file is there already, whole. Raises `NotUploadable`."""
    try:
        if json.loads(storage.read(hidden_name(name, MANIFEST))) != manifest:
            raise _taken(storage, name)
        return storage.stat(name).size == manifest["size"]
    except FileNotFoundError:  # of the file: it was removed
        return False
    except ValueError:
        raise _taken(storage, name) from None


def _publish(storage: Place, name: str, manifest: dict[str, object]) -> None:
    """Put the manifest. One that is there may be ours: an answer that was lost was repeated."""
    data = json.dumps(manifest, indent=1).encode() + b"\n"
    try:
        storage.put_if_absent(hidden_name(name, MANIFEST), data)
    except FileExistsError:
        if not _is_stored(storage, name, manifest):
            raise


def _remove(path: Path, plan: UploadPlan) -> None:
    if plan.deletes:
        path.unlink(missing_ok=True)
        sync_folder(path.parent)


# -- beside the archiver ------------------------------------------------------------------------


@dataclass(slots=True)
class UploadTotals:
    """Counts since the start, and what waits now."""

    files: int = 0
    bytes: int = 0
    failures: int = 0
    conflicts: int = 0
    waiting_files: int = 0
    waiting_bytes: int = 0
    misfits: int = 0
    """Bodies that did not fit the columns of a table."""
    without_column: set[str] = field(default_factory=set)
    """Fields that could not get a column there."""


class Uploads:
    """`put` from any thread; the rest from the thread that runs the archiver."""

    THREADS = 8  # small files wait for answers most of the time

    def __init__(self, plan: UploadPlan, max_local_bytes: int | None = None) -> None:
        self.totals = UploadTotals()
        self.last_error: Exception | None = None
        self._plan = plan
        self._most = max_local_bytes
        self._changed = threading.Condition()
        self._waiting: deque[Path] = deque()
        self._sizes: dict[Path, int] = {}  # also of those under way
        self._failing_since: float | None = None
        self._retry_s = FIRST_RETRY_S
        self._retry_at = 0.0
        self._said, self._said_at = "", 0.0
        self._is_pausing = self._is_closed = False
        self._threads: list[threading.Thread] = []

    # -- what the archiver calls ----------------------------------------------------------------

    def put(self, path: Path) -> None:
        """Have a finished file uploaded; returns at once."""
        try:
            size = path.stat().st_size
        except OSError:  # removed by another program
            return
        with self._changed:
            if path not in self._sizes:
                self._sizes[path] = size
                self._waiting.append(path)
                self.totals.waiting_files += 1
                self.totals.waiting_bytes += size
                self._changed.notify()

    def start(self) -> None:
        """Begin, with what earlier runs left; call it when that is recovered, and as you like."""
        if self._threads:
            return
        try:
            remove_old_records(self._plan.directory)
            for path in files_to_upload(self._plan.directory):
                self.put(path)
        except OSError as exc:
            log.error("cannot look for files to upload in %s (%s)", exc.filename, exc.strerror)
        for number in range(self.THREADS):
            thread = threading.Thread(target=self._run, name=f"nsq-upload-{number}", daemon=True)
            thread.start()
            self._threads.append(thread)

    def regulate(self, archiver: Archiver) -> None:
        """Pause or resume consumption, as what waits on the local disk demands."""
        if not self._most:
            return
        waiting = self.totals.waiting_bytes
        if not self._is_pausing and waiting >= self._most:
            self._is_pausing = True
            what = "consumption pauses: %d bytes wait for their upload, and --max-local-bytes is %d"
            log.error(what, waiting, self._most)
            archiver.set_paused(True)
        elif self._is_pausing and waiting < RESUME_SHARE * self._most:
            self._is_pausing = False
            log.warning("consumption goes on: %d bytes wait for their upload", waiting)
            archiver.set_paused(False)

    def close(
        self,
        *,
        is_hurried: Callable[[], bool] = lambda: False,
        show: Callable[[], None] = lambda: None,
    ) -> int:
        """Wait until all is uploaded, or nothing works any more; return how many files are not.

        Once ``is_hurried`` the rest has few seconds. ``show`` is called now and then.
        """
        self.start()
        ends_at = math.inf
        self.last_error = None
        with self._changed:
            if self._failing_since is not None:  # it has one more chance, at once
                self._failing_since, self._retry_s = time.monotonic(), FIRST_RETRY_S
                self._retry_at = 0.0
                self._changed.notify_all()
        while self.totals.waiting_files:
            now = time.monotonic()
            if is_hurried():
                ends_at = min(ends_at, now + HURRIED_S)
            failing_since = now if self._failing_since is None else self._failing_since
            if now > ends_at or now - failing_since > LONGEST_FAILURE_S:
                break
            if self._is_refused():
                break
            show()
            with self._changed:
                self._changed.wait(0.2)
        with self._changed:
            self._is_closed = True
            self._changed.notify_all()
        return self.totals.waiting_files + self.totals.conflicts

    def _is_refused(self) -> bool:
        """Whether the place does not take the files, which no retry changes."""
        return isinstance(self.last_error, ConfigurationError)

    @property
    def health(self) -> tuple[bool, str]:
        """Whether all is well, and what is not."""
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
                self._ended(path, conflicts=1)
            except (OSError, NsqError) as exc:
                self._failed(path, exc)
            except Exception:  # a name that is not UTF-8, or a defect: the thread goes on
                log.exception("%r is not uploaded", str(path))
                self._ended(path, conflicts=1)
            else:
                if uploaded is not None:
                    log.info("uploaded %s", path)
                self._ended(path, uploaded=uploaded)

    def _next(self) -> Path | None:
        with self._changed:
            while not self._is_closed:
                pause_s = self._retry_at - time.monotonic()
                if self._waiting and pause_s <= 0:
                    if self._failing_since is not None:  # one tries whether it works again
                        self._retry_s = min(2 * self._retry_s, LONGEST_RETRY_S)
                        self._retry_at = time.monotonic() + self._retry_s
                    return self._waiting.popleft()
                self._changed.wait(max(pause_s, 0.01) if self._waiting else None)
        return None

    def _ended(self, path: Path, *, uploaded: int | None = None, conflicts: int = 0) -> None:
        with self._changed:
            self.totals.conflicts += conflicts
            self.totals.waiting_files -= 1
            self.totals.waiting_bytes -= self._sizes.pop(path)
            if uploaded is not None:
                self.totals.files += 1
                self.totals.bytes += uploaded
                if self._failing_since is not None:
                    log.warning("uploading works again")
                self._failing_since, self._retry_s, self._retry_at = None, FIRST_RETRY_S, 0.0
            self._changed.notify_all()

    def _failed(self, path: Path, exc: Exception) -> None:
        now = time.monotonic()
        with self._changed:
            self._waiting.append(path)  # last: one that cannot be read holds up no other
            self.totals.failures += 1
            reason = str(getattr(exc, "strerror", None) or exc)  # whichever file it is
            is_new = self._failing_since is None or reason != self._said
            self.last_error = exc
            self._failing_since = self._failing_since or now
            self._retry_at = now + self._retry_s
            if is_new or now - self._said_at > SAY_AGAIN_S:
                self._said, self._said_at = reason, now
                where = getattr(exc, "filename", None) or self._plan.storage.url
                log.warning("cannot upload %s (%s: %s); trying again", path, where, reason)
                if isinstance(exc, NsqError) and exc.hint:
                    log.warning("hint: %s", exc.hint)
