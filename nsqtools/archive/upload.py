"""Upload finished files beside the archiving: what ``nsq to-file --upload`` adds.

The archiver says `Uploads.put` for each finished file, and asks with each tick, through
`Uploads.regulate`, whether more may be consumed. A few threads upload; what does not work is tried
again, with growing pauses, for as long as the process runs, and by the next one. A store that is
full or cannot be reached stops nothing until so many bytes wait on the local disk that the limit is
reached. Then consumption pauses, is reported, and goes on by itself.

Trap: the threads wait inside of obstore, where nothing interrupts them. They are daemons, so that a
process that was asked to end does not wait for a store that does not answer.
"""

from __future__ import annotations

import logging
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

from nsqtools.archive.upload_job import NotUploadable, UploadPlan, upload
from nsqtools.archive.upload_record import files_to_upload, remove_old_records
from nsqtools.errors import NsqError
from nsqtools.records.prometheus import Metric

log = logging.getLogger("nsqtools")

THREADS = 8  # small files wait for answers most of the time
LARGE = 8 << 20  # bytes; such a file has several parts of that size in memory
LARGE_AT_ONCE = 3
FIRST_RETRY_S, LONGEST_RETRY_S = 1.0, 60.0
RESUME_SHARE = 0.9  # of the limit: consumption would else stop and go with every file
SAY_AGAIN_S = 300.0
# At the end of a run; what is left then is uploaded by the next one.
LONGEST_FAILURE_S = 30.0
HURRIED_S = 15.0


class Pausable(Protocol):
    """The archiver, as far as it is known here."""

    def pause(self) -> None: ...
    def resume(self) -> None: ...


@dataclass(slots=True)
class UploadTotals:
    """Counts since the start, and what waits now."""

    files: int = 0
    bytes: int = 0
    failures: int = 0
    conflicts: int = 0
    waiting_files: int = 0
    waiting_bytes: int = 0


class Uploads:
    """`put` from any thread; the rest from the thread that runs the archiver."""

    def __init__(self, plan: UploadPlan, max_local_bytes: int | None = None) -> None:
        self.totals = UploadTotals()
        self.last_error: Exception | None = None
        self._plan = plan
        self._most = max_local_bytes
        self._changed = threading.Condition()
        self._waiting: deque[tuple[Path, int]] = deque()
        self._known: set[Path] = set()
        self._failing_since: float | None = None
        self._retry_s = FIRST_RETRY_S
        self._retry_at = 0.0
        self._said_at = 0.0
        self._is_pausing = False
        self._large = 0  # files that are being uploaded
        self._threads: list[threading.Thread] = []

    # -- what the archiver calls ----------------------------------------------------------------

    def put(self, path: Path) -> None:
        """Have a finished file uploaded; returns at once."""
        try:
            size = path.stat().st_size
        except OSError:  # removed by whoever shares the directory
            return
        with self._changed:
            if path not in self._known:
                self._known.add(path)
                self._waiting.append((path, size))
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
        for number in range(THREADS):
            thread = threading.Thread(target=self._run, name=f"nsq-upload-{number}", daemon=True)
            self._threads.append(thread)
            thread.start()

    def regulate(self, archiver: Pausable) -> None:
        """Pause or resume consumption, as what waits on the local disk demands."""
        if self._most is None:
            return
        waiting = self.totals.waiting_bytes
        if not self._is_pausing and waiting >= self._most:
            self._is_pausing = True
            log.error(
                "consumption pauses: %d bytes wait for their upload, and --max-local-bytes is %d",
                waiting,
                self._most,
            )
            archiver.pause()
        elif self._is_pausing and waiting < RESUME_SHARE * self._most:
            self._is_pausing = False
            log.warning("consumption goes on: %d bytes wait for their upload", waiting)
            archiver.resume()

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
        hurried_at: float | None = None
        with self._changed:
            if self._failing_since is not None:  # it has one more chance, at once
                self._failing_since, self._retry_s = time.monotonic(), FIRST_RETRY_S
                self._retry_at = 0.0
                self._changed.notify_all()
        while self.totals.waiting_files:
            now = time.monotonic()
            if hurried_at is None and is_hurried():
                hurried_at = now
            if hurried_at is not None and now - hurried_at > HURRIED_S:
                break
            if self._failing_since is not None and now - self._failing_since > LONGEST_FAILURE_S:
                break
            show()
            with self._changed:
                self._changed.wait(0.2)
        return self.totals.waiting_files + self.totals.conflicts

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
            Metric(f"nsq_to_file_{name}", kind, help, [({}, value)])
            for name, kind, help, value in (
                ("uploaded_files_total", "counter", "Files uploaded.", totals.files),
                ("uploaded_bytes_total", "counter", "Bytes uploaded.", totals.bytes),
                ("upload_failures_total", "counter", "Uploads that failed.", totals.failures),
                ("upload_waiting_files", "gauge", "Files to upload.", totals.waiting_files),
                ("upload_waiting_bytes", "gauge", "Bytes to upload.", totals.waiting_bytes),
                (
                    "upload_paused",
                    "gauge",
                    "1 while consumption waits for uploads.",
                    int(self._is_pausing),
                ),
            )
        ]

    # -- on the threads -------------------------------------------------------------------------

    def _run(self) -> None:
        while True:
            path, size = self._next()
            try:
                uploaded = upload(path, self._plan)
            except NotUploadable as exc:
                log.error("%s is not uploaded: %s: %s", path, exc.filename, exc.strerror)
                self._ended(path, size, conflicts=1)
            except (OSError, NsqError) as exc:
                self._failed(path, size, exc)
            else:
                if uploaded:
                    log.info("uploaded %s", path)
                self._ended(path, size, files=1 if uploaded else 0, uploaded=uploaded)

    def _next(self) -> tuple[Path, int]:
        with self._changed:
            while True:
                pause_s = self._retry_at - time.monotonic()
                at = self._first_that_fits()
                if at is not None and pause_s <= 0:
                    if self._failing_since is not None:  # one tries whether it works again
                        self._retry_at = time.monotonic() + self._retry_s
                    path, size = self._waiting[at]
                    del self._waiting[at]
                    self._large += size > LARGE
                    return path, size
                self._changed.wait(max(pause_s, 0.01) if at is not None else None)

    def _first_that_fits(self) -> int | None:
        if self._large < LARGE_AT_ONCE:
            return 0 if self._waiting else None
        small = (at for at, (_, size) in enumerate(self._waiting) if size <= LARGE)
        return next(small, None)

    def _ended(
        self, path: Path, size: int, *, files: int = 0, uploaded: int = 0, conflicts: int = 0
    ) -> None:
        with self._changed:
            self._known.discard(path)
            self._large -= size > LARGE
            self.totals.files += files
            self.totals.bytes += uploaded
            self.totals.conflicts += conflicts
            self.totals.waiting_files -= 1
            self.totals.waiting_bytes -= size
            if uploaded:
                if self._failing_since is not None:
                    log.warning("uploading works again")
                self._failing_since, self._retry_s, self._retry_at = None, FIRST_RETRY_S, 0.0
            self._changed.notify_all()

    def _failed(self, path: Path, size: int, exc: Exception) -> None:
        now = time.monotonic()
        with self._changed:
            self._waiting.appendleft((path, size))
            self._large -= size > LARGE
            self.totals.failures += 1
            is_new = str(exc) != str(self.last_error) or self._failing_since is None
            self.last_error = exc
            self._failing_since = self._failing_since or now
            self._retry_s = min(2 * self._retry_s, LONGEST_RETRY_S)
            self._retry_at = now + self._retry_s
            if is_new or now - self._said_at > SAY_AGAIN_S:
                self._said_at = now
                reason = getattr(exc, "strerror", None) or exc
                where = getattr(exc, "filename", None) or self._plan.storage.url
                log.warning("cannot upload %s (%s: %s); trying again", path, where, reason)
