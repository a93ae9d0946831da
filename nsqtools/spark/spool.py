"""A live topic as an archive that this process writes: what ``format("nsq")`` reads from.

An archiver runs on a thread of the process that plans the query's batches, and writes into a
directory of the query, its *spool*. A message is FINished when it is durable there, so the spool is
the truth: it belongs to one checkpoint, whose offsets name the run that the directory is called
after, and a message that is delivered again after a crash is recognized there.

    <spoolDir>/<run>/.spool.json       topics and channel
    <spoolDir>/<run>/.spool.lock       held by the process that writes
    <spoolDir>/<run>/.in-checkpoint    there since some offset names the run

Until an offset names it, a crash leaves a spool that no checkpoint knows, with messages that nsqd
no longer has: the next query of the same topics and channel adopts it (`choose_run`).

Too much unread in the spool pauses the archiver (RDY 0) until half of it is read.
"""

from __future__ import annotations

import json
import logging
import os
import threading
import time
import uuid
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

from nsqtools.archive.archiver import Archiver
from nsqtools.archive.part_file import Directories
from nsqtools.archive.storage import failing
from nsqtools.archive.topic_writer import THROUGHPUT, ArchiveSettings, ArchiveSource, Flush
from nsqtools.client.connection_settings import ConnectionSettings
from nsqtools.cluster.topics import TopicDiscovery
from nsqtools.errors import NsqError, OutputError
from nsqtools.files.durable import replace_file, sync_folder
from nsqtools.files.opening import lock_file
from nsqtools.records.naming import FileNaming, Rotation
from nsqtools.tail.tail import RunLimits

log = logging.getLogger("nsqtools")

ABOUT, LOCK, MARK = ".spool.json", ".spool.lock", ".in-checkpoint"
LOCK_WAIT_S = 20.0  # of a process that is ending
ENDING_WAIT_S = 5.0
LOCK_POLL_S = 0.1
REFRESH_S = 15.0  # how often topics that match a pattern are looked for
FILE_SIZE = 32 << 20
FILE_AGE_S = 30.0


@dataclass(frozen=True, slots=True)
class SpoolSettings:
    """What is spooled, where, and how much of it; times are seconds."""

    folder: Path
    topics: tuple[str, ...]
    channel: str
    pattern: str = ""
    """In place of topics: those whose name contains a regular expression, now and later."""
    max_bytes: int = 1 << 30
    max_rows: int | None = None
    flush_s: float = 0.05
    idle_s: float = 2.0
    """A channel that sends nothing for this long is empty, for ``availableNow``."""

    @property
    def description(self) -> str:
        """What is read, for people."""
        topics = f"topic {', '.join(self.topics)}" if self.topics else f"topics of {self.pattern}"
        return f"{topics}, channel {self.channel}"

    def about(self) -> dict[str, object]:
        """The identity of a spool's query, as it is stored."""
        about: dict[str, object] = {"topics": sorted(self.topics), "channel": self.channel}
        return about | ({"pattern": self.pattern} if self.pattern else {})


@dataclass(frozen=True, slots=True)
class Fill:
    """How much is unread."""

    rows: int
    bytes: int

    def exceeds(self, settings: SpoolSettings, share: float = 1.0) -> bool:
        """Tell whether it is more than a share of what is allowed."""
        too_many = settings.max_rows is not None and self.rows > settings.max_rows * share
        return too_many or self.bytes > settings.max_bytes * share


def choose_run(settings: SpoolSettings) -> str:
    """Return the run of a new query: one that a crash left before any offset named it, or new."""
    deadline_s = time.monotonic() + ENDING_WAIT_S
    while True:
        orphans = [
            directory
            for directory in runs(settings.folder)
            if not (directory / MARK).exists() and _about(directory) == settings.about()
        ]
        for directory in orphans:
            descriptor = lock_file(directory / LOCK)
            if descriptor is not None:
                os.close(descriptor)
                return directory.name
        if not orphans or time.monotonic() > deadline_s:
            return uuid.uuid4().hex
        time.sleep(LOCK_POLL_S)  # of a process that is ending, or of a query that has just begun


def runs(folder: Path) -> Iterator[Path]:
    """Iterate over the spools below a directory, in order."""
    if folder.is_dir():
        yield from sorted(path.parent for path in folder.glob(f"*/{ABOUT}"))


def left_over(folder: Path) -> list[Path]:
    """Return the spools that hold messages and that no process writes now.

    Their queries have ended, or will continue. If a checkpoint is gone, no query reads its spool;
    ``format("nsq-archive")`` does.
    """
    found = []
    for directory in runs(folder):
        names = [path.name for path in directory.iterdir()]
        if not any(not name.startswith(".") or name.endswith(".part") for name in names):
            continue
        descriptor = lock_file(directory / LOCK)
        if descriptor is not None:
            os.close(descriptor)
            found.append(directory)
    return found


def _about(directory: Path) -> object:
    try:
        return json.loads((directory / ABOUT).read_text("utf-8"))
    except (OSError, ValueError):
        return None


class Spool:
    """The spool of one run. Methods are for one thread, and raise `NsqError`."""

    def __init__(self, run: str, settings: SpoolSettings, connection: ConnectionSettings) -> None:
        self.directory = settings.folder / run
        self._settings = settings
        self._connection = connection
        self._lock: int | None = None
        self._archiver: Archiver | None = None
        self._thread: threading.Thread | None = None
        self._begun = threading.Event()
        self._failure: BaseException | None = None
        self._unread = Fill(0, 0)
        self._written_before = Fill(0, 0)
        self._is_paused = False

    @property
    def exists(self) -> bool:
        return self.directory.is_dir()

    def about(self) -> object:
        """Return whose spool it is, as `SpoolSettings.about` has it; None when there is none."""
        return _about(self.directory)

    @property
    def has_begun(self) -> bool:
        """Whether the archiver knows what was written before."""
        return self._begun.is_set() and self._failure is None

    def mark(self) -> None:
        """An offset names this run now: no other query may adopt it."""
        if not (self.directory / MARK).exists():
            (self.directory / MARK).touch()
            sync_folder(self.directory)

    def open(self) -> None:
        """Make the directory and hold it. Raises `OutputError` when another process has it."""
        if self._lock is not None:
            return
        with failing("use", ""):
            self.directory.mkdir(parents=True, exist_ok=True)
            self._lock = self._wait_for_lock()
            if _about(self.directory) != self._settings.about():
                about = json.dumps(self._settings.about()).encode()
                replace_file(self.directory / ABOUT, about, 0o666)
                sync_folder(self._settings.folder)

    def _wait_for_lock(self) -> int:
        deadline_s = time.monotonic() + LOCK_WAIT_S
        while (descriptor := lock_file(self.directory / LOCK)) is None:
            if time.monotonic() > deadline_s:
                raise OutputError(
                    f"another process writes the spool {self.directory}",
                    hint="A checkpoint is for one query at a time: is another one running?",
                )
            time.sleep(LOCK_POLL_S)
        return descriptor

    # -- taking messages ------------------------------------------------------------------------

    def start(self) -> None:
        """Take messages from now on; returns when the topics are connected."""
        if self._thread is None:
            self._begin(RunLimits(), self._regulate)
            self._begun.wait()
        self.check()

    def check(self) -> None:
        """Raise what ended the archiver, if anything did."""
        if self._failure is not None:
            raise self._failure
        if self._thread is not None and not self._thread.is_alive():
            raise NsqError(f"the archiver of {self.directory} ended unexpectedly")

    def collect(self, is_past: Callable[[], bool]) -> bool:
        """Take what there is, until the channels are idle or the spool is full.

        Returns whether all that was there is spooled.
        On a busy topic that never happens, so it also ends once ``is_past`` returns that messages
        now received were published after the start.
        """
        began_s = time.monotonic()

        def is_enough() -> bool:
            has_seen_all = time.monotonic() - began_s > self._settings.idle_s
            return self._fill().exceeds(self._settings) or (has_seen_all and is_past())

        self._begin(RunLimits(idle_s=self._settings.idle_s), lambda: self._stop_if(is_enough()))
        assert self._thread is not None
        self._thread.join()
        self._thread = None
        if self._failure is not None:
            raise self._failure
        return not self._fill().exceeds(self._settings)

    def _begin(self, limits: RunLimits, on_tick: Callable[[], None]) -> None:
        self.open()

        def tick() -> None:
            self._begun.set()
            on_tick()

        connection, settings = self._connection, self._settings
        source = ArchiveSource(
            settings.channel,
            connection,
            connection.client_options(**THROUGHPUT),
        )
        pattern = settings.pattern
        self._archiver = Archiver(
            settings.topics,
            source,
            self._archive_settings(),
            discovery=TopicDiscovery(pattern, connection) if pattern else None,
            refresh_s=REFRESH_S,
            limits=limits,
            on_tick=tick,
        )
        self._begun.clear()
        self._note_written()
        self._thread = threading.Thread(target=self._run, name="nsq-spool", daemon=True)
        self._thread.start()

    def _archive_settings(self) -> ArchiveSettings:
        # no name is used twice: what reads them may still know an earlier file by it
        name = FileNaming("spool.<TOPIC>.<HOST><REV>.jsonl", host=f"{time.time_ns():x}")
        return ArchiveSettings(
            Directories(self.directory, self.directory),
            naming=name,
            rotation=Rotation(size=FILE_SIZE, age_s=FILE_AGE_S),
            flush=Flush(interval_s=self._settings.flush_s),
        )

    def _run(self) -> None:
        assert self._archiver is not None
        try:
            self._archiver.run()
        except BaseException as exc:
            self._failure = exc
            log.error("the archiver of %s has ended: %s", self.directory, exc)
        finally:
            self._begun.set()

    def stop(self) -> None:
        """Write and FINish what was delivered, finish the files, and release the spool."""
        if self._archiver is not None and self._thread is not None:
            self._archiver.stop()
            self._thread.join()
            self._thread = None
        if self._lock is not None:
            os.close(self._lock)
            self._lock = None

    # -- not too much of it ---------------------------------------------------------------------

    def note_unread(self, unread: Fill) -> None:
        """Note what is unread now; what was written a moment ago may be missing in it."""
        self._note_written()
        self._unread = unread

    def _note_written(self) -> None:
        totals = self._archiver.totals if self._archiver else None
        self._written_before = Fill(totals.messages, totals.bytes) if totals else Fill(0, 0)

    def _fill(self) -> Fill:
        assert self._archiver is not None
        totals, before = self._archiver.totals, self._written_before
        return Fill(
            self._unread.rows + totals.messages - before.rows,
            self._unread.bytes + totals.bytes - before.bytes,
        )

    def _regulate(self) -> None:
        assert self._archiver is not None
        fill = self._fill()
        if not self._is_paused and fill.exceeds(self._settings):
            log.warning("the spool %s is full; no messages are taken", self.directory)
            self._is_paused = True
            self._archiver.pause()
        elif self._is_paused and not fill.exceeds(self._settings, share=0.5):
            log.warning("the spool %s has room again", self.directory)
            self._is_paused = False
            self._archiver.resume()

    def _stop_if(self, is_enough: bool) -> None:
        if is_enough:
            assert self._archiver is not None
            self._archiver.stop()
