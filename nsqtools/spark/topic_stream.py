"""A live topic as a stream, without Spark: its options, its spool, and the stream over the spool.

    topic, channel, spoolDir     required; topicPattern in place of topic is a regular expression
    maxSpoolBytes, maxSpoolRows  pause above, resume below half (default: 1 GiB)
    flushInterval                the longest wait of a message until it is durable (50ms)
    idleTimeout                  a channel is empty after this silence, for availableNow (2s)
    pollInterval, maxRowsPerTrigger, maxBytesPerTrigger, maxFilesPerTrigger, minRowsPerTrigger,
    maxTriggerDelay, failOnDataLoss, partitionBytes, minPartitions, body, schema
                                 as for nsq-archive

and options of the connection, see `format_options`.

An archiver runs on a thread of the process that plans the batches of a query, and writes into the
query's directory, its *spool*. A message is finished when it is durable there. The spool also
recognizes a message that is redelivered after a crash.

    <spoolDir>/<run>/.spool.json       topics and channel
    <spoolDir>/<run>/.spool.lock       locked by the process that writes

The name of the run is a hash of topics and channel (random up to version 0.2), and is part of the
offsets. So a query with a new checkpoint reads the finished messages that no query has read: those
of a query that crashed before it stored an offset, or whose checkpoint is gone.

If too much of the spool is unread, the archiver is paused (RDY 0) until half of it has been read.

The files of a batch are removed after Spark commits it, which is when Spark plans the next batch.
Only files that the committed offset counts as completely read are removed.
"""

from __future__ import annotations

import hashlib
import json
import logging
import os
import threading
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

from nsqtools.archive.archiver import Archiver
from nsqtools.archive.layout import INDEX, Head, hidden_below, owner_of, part_of
from nsqtools.archive.part_file import Directories
from nsqtools.archive.place import translating_errors
from nsqtools.archive.topic_writer import THROUGHPUT, ArchiveSettings, Flush
from nsqtools.client.connection_settings import ConnectionSettings
from nsqtools.cluster.topics import ConsumedTopics
from nsqtools.errors import ConfigurationError, NsqError, OutputError
from nsqtools.files.durable import replace_file, sync_folder
from nsqtools.files.opening import lock_file
from nsqtools.protocol.names import check_channel, check_topic, is_ephemeral
from nsqtools.records.naming import FileNaming, Rotation
from nsqtools.spark.archives.archive_files import Listing
from nsqtools.spark.archives.archive_stream import ArchiveStream
from nsqtools.spark.archives.offsets import Offset
from nsqtools.spark.archives.partitions import ReadPartition
from nsqtools.spark.archives.read_settings import (
    BatchLimits,
    ReadSettings,
    StreamSettings,
    batch_settings,
    shared_settings,
)
from nsqtools.spark.format_options import Options, read_connection
from nsqtools.tail import RunLimits

log = logging.getLogger("nsqtools")

ABOUT, LOCK = ".spool.json", ".spool.lock"
LOCK_WAIT_S = 20.0  # The process of an ended query still writes its last messages.
LOCK_POLL_S = 0.1
REFRESH_S = 15.0  # The interval of lookups of topics that match a pattern.
# Only whole files are removed, so small files bound the space of messages that have been read.
FILE_SIZE = 32 << 20
FILE_AGE_S = 30.0
DEFAULT_POLL_S = 0.05


@dataclass(frozen=True, slots=True)
class SpoolSettings:
    """The topics and the limits of a spool; times are seconds."""

    folder: Path
    topics: tuple[str, ...]
    channel: str
    pattern: str = ""
    """A regular expression in place of topics, which also selects later ones."""
    max_bytes: int = 1 << 30
    max_rows: int | None = None
    flush_s: float = 0.05
    idle_s: float = 2.0
    """The silence after which a channel is considered empty, for ``availableNow``."""

    @property
    def description(self) -> str:
        """The source of the messages, as a text for people."""
        topics = f"topic {', '.join(self.topics)}" if self.topics else f"topics of {self.pattern}"
        return f"{topics}, channel {self.channel}"

    def about(self) -> dict[str, object]:
        """Return the identity of the query, which its spool stores."""
        about: dict[str, object] = {"topics": sorted(self.topics), "channel": self.channel}
        return about | ({"pattern": self.pattern} if self.pattern else {})

    @property
    def run(self) -> str:
        """The name of the spool."""
        return hashlib.sha256(json.dumps(self.about()).encode()).hexdigest()[:32]


class TopicSettings(NamedTuple):
    """All settings of a stream of topics."""

    spool: SpoolSettings
    read: ReadSettings
    stream: StreamSettings
    connection: ConnectionSettings


def topic_settings(given: Mapping[str, str], environ: Mapping[str, str]) -> TopicSettings:
    """Read all options. Raises `ConfigurationError`."""
    options = Options("nsq", given)
    pattern = options.text("topicPattern") or ""
    if pattern and options.text("topic"):
        raise ConfigurationError("topic and topicPattern exclude each other")
    if not pattern:
        options.required("topic", "clicks")
    topics = tuple(dict.fromkeys(map(check_topic, options.list("topic"))))
    channel = check_channel(options.required("channel", "spark"))
    if is_ephemeral(channel):
        raise ConfigurationError(
            f"channel {channel} would be deleted, with its messages, when a query ends",
            hint="Give a channel that is not ephemeral.",
        )
    options.required("spoolDir", "/shared/spool")
    folder = options.location("spoolDir")
    assert folder is not None
    flush_s, idle_s = options.duration_s("flushInterval"), options.duration_s("idleTimeout")
    spool = SpoolSettings(folder, topics, channel, pattern)
    spool = replace(
        spool,
        max_bytes=options.size("maxSpoolBytes") or spool.max_bytes,
        max_rows=options.integer("maxSpoolRows"),
        flush_s=spool.flush_s if flush_s is None else flush_s,
        idle_s=spool.idle_s if idle_s is None else idle_s,
    )
    read = shared_settings(options, ReadSettings(paths=(str(folder),)))
    stream = batch_settings(options, DEFAULT_POLL_S)
    connection = read_connection(options, environ)
    if pattern:
        ConsumedTopics((), connection, pattern)  # Raises for an invalid pattern.
    options.end()
    return TopicSettings(spool, read, stream, connection)


# -- the spool -----------------------------------------------------------------------------------


class Fill(NamedTuple):
    """An amount of messages in the spool."""

    rows: int
    bytes: int

    def less(self, other: Fill) -> Fill:
        """Return the difference."""
        return Fill(self.rows - other.rows, self.bytes - other.bytes)

    def exceeds(self, settings: SpoolSettings, share: float = 1.0) -> bool:
        """Return whether it exceeds a share of the limits."""
        too_many = settings.max_rows is not None and self.rows > settings.max_rows * share
        return too_many or self.bytes > settings.max_bytes * share


def read_about(directory: Path) -> object:
    """Return the stored `SpoolSettings.about` of a spool, None if there is none."""
    try:
        return json.loads((directory / ABOUT).read_text("utf-8"))
    except (OSError, ValueError):
        return None


class Spool:
    """The spool of one run. Methods are for one thread, and raise `NsqError`."""

    def __init__(self, run: str, settings: SpoolSettings, connection: ConnectionSettings) -> None:
        self.run = run
        self.directory = settings.folder / run
        self._settings = settings
        self._connection = connection
        self._lock: int | None = None
        self._archiver: Archiver | None = None
        self._thread: threading.Thread | None = None
        self._begun = threading.Event()
        self._failure: BaseException | None = None
        self._read_before = Fill(0, 0)
        """The written messages that have been read, minus those that were unread before them."""
        self._is_paused = False

    @property
    def has_begun(self) -> bool:
        """Whether the archiver has loaded the identities of earlier messages."""
        return self._begun.is_set() and self._failure is None

    @property
    def problem(self) -> str:
        """The reasons why messages stay in NSQ, or ""."""
        connection_errors = self._archiver.connection_errors if self._archiver else ()
        return "; ".join(filter(None, [self._unwritten, *connection_errors]))

    @property
    def _unwritten(self) -> str:
        states = self._archiver.states.values() if self._archiver else ()
        reason = next((state.problem for state in states if state.problem), "")
        return reason and f"cannot write the spool {self.directory} ({reason})"

    def open(self) -> None:
        """Create and lock the directory. Raises `OutputError` if another process has the lock."""
        with translating_errors("use", ""):
            self.directory.mkdir(parents=True, exist_ok=True)
            deadline_s = time.monotonic() + LOCK_WAIT_S
            while (lock := lock_file(self.directory / LOCK)) is None:
                if time.monotonic() > deadline_s:
                    raise OutputError(
                        f"another process writes the spool {self.directory}",
                        hint="Each query needs a channel and a spool of its own: is another one "
                        "running?",
                    )
                time.sleep(LOCK_POLL_S)
            self._lock = lock
            if read_about(self.directory) != self._settings.about():
                text = json.dumps(self._settings.about())
                replace_file(self.directory / ABOUT, text.encode(), 0o666)
                sync_folder(self._settings.folder)

    # -- consuming ------------------------------------------------------------------------------

    def start(self) -> None:
        """Start consuming; return when the topics are connected."""
        if self._thread is None:
            self._begin(RunLimits(), self._regulate)
            self._begun.wait()
        if self._failure is not None:
            raise self._failure

    def collect(self, is_past: Callable[[], bool]) -> bool:
        """Consume until the channels are idle or the spool is full.

        A busy channel is never idle, so this also ends when ``is_past`` returns that the received
        messages were published after the start. Returns whether all earlier messages are spooled.
        Raises `OutputError` if the spool cannot be written, which otherwise only Spark's log has.
        """
        began_s = time.monotonic()
        problem = ""

        def stop_when_enough() -> None:
            nonlocal problem
            assert self._archiver is not None
            has_waited = time.monotonic() - began_s > self._settings.idle_s
            problem = problem or (self._unwritten if has_waited else "")
            if problem or self._fill().exceeds(self._settings) or (has_waited and is_past()):
                self._archiver.stop()

        self._begin(RunLimits(idle_s=self._settings.idle_s), stop_when_enough)
        assert self._thread is not None
        self._thread.join()
        self._thread = None
        if self._failure is not None:
            raise self._failure
        if problem:
            raise OutputError(problem)
        return not self._fill().exceeds(self._settings)

    def _begin(self, limits: RunLimits, on_tick: Callable[[], None]) -> None:
        def tick() -> None:
            self._begun.set()
            on_tick()

        connection, settings = self._connection, self._settings
        unread = self._fill()
        self._archiver = Archiver(
            ConsumedTopics(settings.topics, connection, settings.pattern or None, REFRESH_S),
            settings.channel,
            connection.client_options(**THROUGHPUT),
            self._archive_settings(),
            limits=limits,
        )
        self._begun.clear()
        self._read_before = self._written().less(unread)
        self._thread = threading.Thread(
            target=self._archive, args=(tick,), name="nsq-spool", daemon=True
        )
        self._thread.start()

    def _archive_settings(self) -> ArchiveSettings:
        # The time makes names unique, because a reader may have cached an earlier file by its name.
        name = FileNaming("spool.<TOPIC>.<HOST><REV>.jsonl", host=f"{time.time_ns():x}")
        return ArchiveSettings(
            Directories(self.directory, self.directory),
            naming=name,
            rotation=Rotation(size=FILE_SIZE, age_s=FILE_AGE_S),
            flush=Flush(interval_s=self._settings.flush_s),
        )

    def _archive(self, on_tick: Callable[[], None]) -> None:
        assert self._archiver is not None
        try:
            self._archiver.run(on_tick)
        except BaseException as exc:
            self._failure = exc
            log.error("the archiver of %s has ended: %s", self.directory, exc)
        finally:
            self._begun.set()

    def stop(self) -> None:
        """Write and finish the delivered messages, close the files, and unlock the spool."""
        if self._archiver is not None and self._thread is not None:
            self._archiver.stop()
            self._thread.join()
            self._thread = None
        if self._lock is not None:
            os.close(self._lock)
            self._lock = None

    # -- limits ---------------------------------------------------------------------------------

    def note_unread(self, lag: Mapping[str, int] | None) -> None:
        """Record the unread amount of `ArchiveStream.lag`, which may lack the latest messages."""
        if lag is not None:
            unread = Fill(lag["rows_behind"], lag["bytes_behind"])
            self._read_before = self._written().less(unread)

    def _written(self) -> Fill:
        totals = self._archiver.totals if self._archiver else None
        return Fill(totals.messages, totals.bytes) if totals else Fill(0, 0)

    def _fill(self) -> Fill:
        return self._written().less(self._read_before)

    def _regulate(self) -> None:
        assert self._archiver is not None
        is_full = self._fill().exceeds(self._settings, share=0.5 if self._is_paused else 1.0)
        if is_full != self._is_paused:
            state = "is full; no messages are taken" if is_full else "has room again"
            log.warning("the spool %s %s", self.directory, state)
            self._is_paused = is_full
            self._archiver.set_paused(is_full)


# -- the stream ----------------------------------------------------------------------------------


class TopicStream:
    """Plans the batches of a stream's reader over a spool. Methods raise `NsqError`."""

    def __init__(self, settings: TopicSettings) -> None:
        self._settings = settings
        self._spool: Spool | None = None
        self._archive: ArchiveStream | None = None
        self._is_bounded = False
        self._is_all_spooled = False

    def initial(self) -> Offset:
        """Return the start of a new query, which is always the same."""
        return Offset(is_start=True, run=self._settings.spool.run)

    def freeze(self) -> None:
        """End the stream after the current messages of the topics: ``availableNow``."""
        self._is_bounded = True

    def latest(self, start: Offset, limits: BatchLimits) -> Offset:
        """Return the end of the next batch, or ``start`` if there is nothing new."""
        spool, archive = self._use(start.run, is_new=start.is_start)
        if self._is_bounded:
            return self._latest_bounded(spool, archive, start, limits)
        spool.start()
        end = archive.latest(start, limits)
        spool.note_unread(archive.lag())
        return end

    def lag(self) -> dict[str, Any] | None:
        """Return the amount of the spool after the last offset, and any ``problem`` of filling it.

        None before the first offset.
        """
        lag = self._archive.lag() if self._archive else None
        problem = self._spool and self._spool.problem
        return {**lag, "problem": problem} if lag and problem else lag

    def _latest_bounded(
        self, spool: Spool, archive: ArchiveStream, offset: Offset, limits: BatchLimits
    ) -> Offset:
        """Return the end of the next batch of a bounded stream."""
        # The rest of an earlier run is read first. Then the topics are spooled and read, several
        # times if the spool becomes full before all messages are in it.
        while True:
            end = archive.latest(offset, limits)
            if end != offset or self._is_all_spooled:
                return end
            spool.note_unread(archive.lag())
            self._is_all_spooled = spool.collect(partial(archive.has_only_younger, time.time_ns()))
            archive.freeze()

    def plan(self, start: Offset, end: Offset) -> list[ReadPartition]:
        """Plan a batch between two offsets; the end determines the run."""
        _, archive = self._use(end.run, is_new=False)
        return archive.plan(start if start.run == end.run else Offset(), end)

    def commit(self, end: Offset) -> None:
        """Remove the files that have been read completely."""
        spool = self._spool
        if spool is None or spool.run != end.run or not spool.has_begun:
            # The archiver still needs the identities in these files. The next commit removes them.
            return
        files = Listing(ReadSettings((str(spool.directory),))).files(lambda damage: None)
        read = [
            Path(file.shown)
            for key, file in files.items()
            if isinstance(key, Head) and file.is_finished and end.has_read(key)
        ]
        if read:
            os.sync()  # Spark leaves what it wrote of them to the system, which may lose power
        with translating_errors("remove", ""):
            for path in read:
                path.unlink(missing_ok=True)  # before its index, so that no file is without one
            for index in list(hidden_below(spool.directory, INDEX)):
                path = owner_of(index)
                if not part_of(path).exists() and not path.exists():
                    index.unlink(missing_ok=True)

    def stop(self) -> None:
        """Stop the archiver, which requeues received messages that it has not written."""
        if self._spool is not None:
            self._spool.stop()
            self._spool = None

    def _use(self, run: str, *, is_new: bool) -> tuple[Spool, ArchiveStream]:
        """Open the spool of a run, which must exist unless the query is new."""
        if self._spool is None or self._archive is None or self._spool.run != run:
            self.stop()
            spool = Spool(run, self._settings.spool, self._settings.connection)
            if not is_new:
                self._check(spool)
            spool.open()
            read = replace(self._settings.read, paths=(str(spool.directory),))
            self._spool, self._archive = spool, ArchiveStream(read, self._settings.stream)
        return self._spool, self._archive

    def _check(self, spool: Spool) -> None:
        """Refuse a checkpoint whose spool is gone, or has other topics."""
        if not spool.directory.is_dir():
            problem = f"the spool {spool.directory} is gone, with messages that are not read"
            hint = "Restore it, start with a new checkpoint, or set failOnDataLoss=false."
            if self._settings.stream.fail_on_data_loss:
                raise NsqError(problem, hint=hint)
            log.warning("%s; continuing without it", problem)
        stored, expected = read_about(spool.directory), self._settings.spool.about()
        if stored is not None and stored != expected:
            raise ConfigurationError(
                f"the checkpoint belongs to {json.dumps(stored)}, not to {json.dumps(expected)}",
                hint="Each set of topics and each channel needs its own checkpoint.",
            )
