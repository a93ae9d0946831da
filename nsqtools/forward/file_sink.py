"""Messages to files as nsq_to_file writes them: delivered when they are synced.

One thread writes the files of all topics. It syncs when nothing more has come for a moment, when
much has, and at the latest after the interval: sooner than nsq_to_file, which lets messages time
out. When a topic cannot be written its messages go back to the queue for a while; the other topics
go on.
"""

from __future__ import annotations

import logging
import queue
import threading
import time
from collections.abc import Sequence

from nsqtools.errors import NsqError, OutputError
from nsqtools.forward.growing_file import GrowingFile, GrowingFileSettings, publish_orphans
from nsqtools.forward.parcel import DELIVERED, Fate, Outcome, Parcel, Report

log = logging.getLogger("nsqtools")

QUIET_S = 0.05
MUCH = 1 << 20  # bytes
RETRY_S = 5.0


class FileSink:
    """Writes the files. ``topics`` have a file even when nothing comes, unless empty files are
    skipped. Raises `OutputError` when a directory cannot be used."""

    def __init__(
        self, settings: GrowingFileSettings, sync_interval_s: float, topics: Sequence[str] = ()
    ) -> None:
        self._settings = settings
        self._interval_s = max(sync_interval_s, 0.01)
        self._topics = topics
        self._files: dict[str, GrowingFile] = {}
        self._entries: queue.SimpleQueue[tuple[Parcel, Report] | str] = queue.SimpleQueue()
        self._waiting: dict[str, list[tuple[Parcel, Report]]] = {}
        self._size = 0
        self._failure: Exception | None = None
        self._thread = threading.Thread(target=self._run, name="nsq-files", daemon=True)
        try:
            for folder in (settings.output_dir, settings.work_dir):
                folder.mkdir(0o770, parents=True, exist_ok=True)
            for path in publish_orphans(settings):
                log.warning("recovered %s, which was left in the work directory", path)
        except OSError as exc:
            raise OutputError(f"cannot use {exc.filename} ({exc.strerror})") from exc
        self._thread.start()

    def parts(self, parcel: Parcel) -> list[Parcel]:
        return [parcel]

    def submit(self, parcel: Parcel, report: Report) -> None:
        """Write a parcel."""
        self._entries.put((parcel, report))

    def check(self) -> None:
        """Raise ``RuntimeError`` when the thread has failed."""
        if self._failure is not None:
            raise RuntimeError("the writing thread failed") from self._failure

    def rotate(self) -> None:
        """Sync and close all files; the next message opens them again (from any thread)."""
        self._entries.put("rotate")

    def stop(self, timeout_s: float) -> None:
        """Sync and close all files."""
        self._entries.put("stop")
        self._thread.join()

    # -- the thread -----------------------------------------------------------------------------

    def _run(self) -> None:
        try:
            self._serve()
        except Exception as exc:
            self._failure = exc

    def _serve(self) -> None:
        tick_at = sync_at = time.monotonic()
        while True:
            try:
                entry = self._entries.get(timeout=QUIET_S)
            except queue.Empty:
                entry = ""
            now = time.monotonic()
            if isinstance(entry, tuple):
                self._write(*entry, now)
            if entry == "" or self._size >= MUCH or now >= sync_at or entry in ("rotate", "stop"):
                self._sync()
                sync_at = now + self._interval_s
            if now >= tick_at:
                tick_at = now + min(self._interval_s, 1.0)
                self._tick(now)
            if entry in ("rotate", "stop"):
                for topic, file in self._files.items():
                    self._safely(topic, file.close)
            if entry == "stop":
                return

    def _write(self, parcel: Parcel, report: Report, now: float) -> None:
        topic = parcel.topic
        self._waiting.setdefault(topic, []).append((parcel, report))
        self._size += parcel.size
        file = self._file(topic)
        self._safely(topic, lambda: file.write(list(parcel.bodies), now))

    def _file(self, topic: str) -> GrowingFile:
        if topic not in self._files:
            self._files[topic] = GrowingFile(topic, self._settings)
        return self._files[topic]

    def _sync(self) -> None:
        self._size = 0
        for topic in list(self._waiting):
            if self._safely(topic, self._files[topic].sync):
                for parcel, report in self._waiting.pop(topic):
                    report(parcel, DELIVERED)

    def _tick(self, now: float) -> None:
        """Rotate files that nothing comes for, or give them a new one that is empty."""
        for topic in {*self._files, *([] if self._settings.skip_empty_files else self._topics)}:
            file = self._file(topic)
            if self._settings.skip_empty_files:
                self._safely(topic, lambda file=file: file.close_if_due(now))
            else:
                self._safely(topic, lambda file=file: file.rotate_if_due(now))

    def _safely(self, topic: str, call: object) -> bool:
        """Do something with the file of a topic; when that fails, give its messages back."""
        assert callable(call)
        try:
            call()
        except (OSError, NsqError) as exc:
            reason = exc.strerror if isinstance(exc, OSError) else exc
            log.error("topic %s cannot be written: %s; trying again", topic, reason or exc)
            try:
                self._files[topic].roll_back()
            except OSError:
                self._files.pop(topic)  # it is opened again, and cut back then
            for parcel, report in self._waiting.pop(topic, []):
                report(parcel, Outcome(Fate.FAILED, f"cannot write ({reason})", RETRY_S))
            return False
        return True
