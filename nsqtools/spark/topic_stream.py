"""A stream over a live topic, without Spark: its options, and the archive's stream over a spool.

    topic, channel, spoolDir     required; topicPattern in place of topic is a regular expression
    maxSpoolBytes, maxSpoolRows  pause above, resume below half (default: 1 GiB)
    flushInterval                how long a message waits for others before it is durable (50ms)
    idleTimeout                  a channel that is silent this long is empty: availableNow (2s)
    pollInterval, maxRowsPerTrigger, maxBytesPerTrigger, maxFilesPerTrigger, minRowsPerTrigger,
    maxTriggerDelay, failOnDataLoss, partitionBytes, minPartitions, body, schema
                                 as of nsq-archive

and those of the connection, see `format_options`.

An offset is that of the archive, and the run whose spool it refers to. Only offsets name the run:
at the start of a query Spark asks for an initial offset even when it resumes from a checkpoint.

A batch's files are removed after Spark commits it, which is when it plans the next one: only those
that the committed offset has as read to their end.
"""

from __future__ import annotations

import json
import logging
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

from nsqtools.archive.layout import INDEX, Head, hidden_below, index_of, owner_of, part_of
from nsqtools.archive.storage import failing
from nsqtools.client.connection_settings import ConnectionSettings
from nsqtools.errors import ConfigurationError, NsqError
from nsqtools.spark.archives.archive_files import Listing
from nsqtools.spark.archives.archive_stream import ArchiveStream
from nsqtools.spark.archives.offsets import Offset, decode_offset
from nsqtools.spark.archives.partitions import ReadPartition
from nsqtools.spark.archives.read_settings import (
    BatchLimits,
    ReadSettings,
    StreamSettings,
    batch_settings,
    shared_settings,
    size_option,
)
from nsqtools.spark.format_options import Options, consumer_connection, read_location, subscription
from nsqtools.spark.spool import (
    Fill,
    Spool,
    SpoolSettings,
    choose_run,
    left_over,
)

DEFAULT_POLL_S = 0.05
EPHEMERAL = "#ephemeral"


@dataclass(frozen=True, slots=True)
class TopicSettings:
    """All of it. Executors need no connection."""

    spool: SpoolSettings
    read: ReadSettings
    stream: StreamSettings
    connection: ConnectionSettings | None

    def for_executors(self) -> TopicSettings:
        """Return what may travel to executors."""
        return replace(self, connection=None)


def topic_settings(given: Mapping[str, str], environ: Mapping[str, str]) -> TopicSettings:
    """Read all options. Raises `ConfigurationError`."""
    options = Options("nsq", given)
    subscribed = subscription(options)
    if subscribed.channel.endswith(EPHEMERAL):
        raise ConfigurationError(
            f"channel {subscribed.channel} would be deleted, with its messages, when a query ends",
            hint="Give a channel that is not ephemeral.",
        )
    folder = read_location("spoolDir", options.required("spoolDir", "/shared/spool"))
    flush_s, idle_s = options.duration_s("flushInterval"), options.duration_s("idleTimeout")
    spool = SpoolSettings(folder, *subscribed)
    spool = replace(
        spool,
        max_bytes=size_option(options, "maxSpoolBytes") or spool.max_bytes,
        max_rows=options.integer("maxSpoolRows"),
        flush_s=spool.flush_s if flush_s is None else flush_s,
        idle_s=spool.idle_s if idle_s is None else idle_s,
    )
    read = shared_settings(options, ReadSettings(paths=(str(folder),)))
    stream = batch_settings(options, DEFAULT_POLL_S)
    connection = consumer_connection(options, environ)
    options.end()
    return TopicSettings(spool, read, stream, connection)


log = logging.getLogger("nsqtools")

Document = dict[str, Any]
"""An offset as Spark has it: ``{"run": "<32 hex>", "archive": {...}}``."""

NewSpool = Callable[[str, SpoolSettings, ConnectionSettings], Spool]


class TopicStream:
    """Answers what a stream's reader is asked. Methods raise `NsqError`."""

    def __init__(
        self,
        settings: SpoolSettings,
        connection: ConnectionSettings,
        read: ReadSettings,
        stream: StreamSettings,
        *,
        new_spool: NewSpool = Spool,
    ) -> None:
        self._settings = settings
        self._connection = connection
        self._read = read
        self._stream = stream
        self._new_spool = new_spool
        self._first_run = ""
        self._spool: Spool | None = None
        self._archive: ArchiveStream | None = None
        self._reached: Offset | None = None
        self._run = ""
        self._is_bounded = False
        self._is_all_spooled: bool | None = None

    def initial(self) -> Document:
        """Return where a new query starts. The same each time it is asked."""
        if not self._first_run:
            self._first_run = choose_run(self._settings)
        return _document(self._first_run, Offset(is_start=True))

    def freeze(self) -> None:
        """End once what is in the topics now has been read: ``availableNow``."""
        self._is_bounded = True

    def latest(self, start: Document, limits: BatchLimits) -> Document:
        """Return where the next batch ends, or ``start`` when there is nothing new."""
        run, offset = _parse(start)
        spool, archive = self._use(run, is_new=offset.is_start)
        if self._is_bounded:
            end = self._latest_bounded(spool, archive, offset, limits)
        else:
            spool.start()
            end = archive.latest(offset, limits)
            spool.note_unread(Fill(*archive.unread(end)))
        self._reached = end
        return start if end == offset else _document(run, end)

    def lag(self) -> dict[str, int] | None:
        """Return how much of the spool follows the last offset; None before there is one."""
        if self._archive is None or self._reached is None:
            return None
        return self._archive.lag(self._reached)

    def _latest_bounded(
        self, spool: Spool, archive: ArchiveStream, offset: Offset, limits: BatchLimits
    ) -> Offset:
        """Spool what there is, read that; again when the spool was full before all was in it."""
        while True:
            if self._is_all_spooled is not None:
                end = archive.latest(offset, limits)
                if end != offset or self._is_all_spooled:
                    return end
            spool.note_unread(Fill(*archive.unread(offset)))
            self._is_all_spooled = spool.collect(partial(archive.has_only_younger, time.time_ns()))
            archive.freeze()

    def plan(self, start: Document, end: Document) -> list[ReadPartition]:
        """Plan to read what lies between two offsets; the run is that of the end."""
        run, upto = _parse(end)
        start_run, begin = _parse(start)
        _, archive = self._use(run, is_new=False)
        return archive.plan(begin if start_run == run else Offset(), upto)

    def commit(self, end: Document) -> None:
        """Remove the files that are read to their end, and never asked for again."""
        run, offset = _parse(end)
        if run != self._run or self._spool is None or not self._spool.has_begun:
            return  # what the archiver must recognize is not known yet: the next commit removes it
        files = Listing(lambda: [self._spool_directory], None).files(lambda damage: None)
        with failing("remove", ""):
            for key, file in files.items():
                if isinstance(key, Head) and file.is_finished and offset.has_read(key):
                    file.path.unlink(
                        missing_ok=True
                    )  # before its index, so that no file is without one
                    index_of(file.path).unlink(missing_ok=True)
            for index in list(hidden_below(self._spool_directory, INDEX)):
                path = owner_of(index)
                if not part_of(path).exists() and not path.exists():
                    index.unlink(missing_ok=True)

    def stop(self) -> None:
        """End the archiver; messages that it received and did not write are requeued."""
        if self._spool is not None:
            self._spool.stop()
            self._spool = None

    @property
    def _spool_directory(self) -> Path:
        return self._settings.folder / self._run

    def _use(self, run: str, *, is_new: bool) -> tuple[Spool, ArchiveStream]:
        """Have the spool of a run, which must be there unless the query is new."""
        if self._run == run and self._spool is not None and self._archive is not None:
            if not is_new:
                self._spool.mark()
            return self._spool, self._archive
        self.stop()
        spool = self._new_spool(run, self._settings, self._connection)
        if not is_new and not spool.exists:
            problem = (
                f"the spool {spool.directory} is gone, with messages that the stream has not read"
            )
            if self._stream.fail_on_data_loss:
                raise NsqError(
                    problem,
                    hint="Restore it, start with a new checkpoint, or set failOnDataLoss=false.",
                )
            log.warning("%s; continuing without it", problem)
        if not is_new:
            self._refuse_other_topics(spool)
        spool.open()
        if not is_new:
            spool.mark()
        self._say_what_is_left()
        read = replace(self._read, paths=(str(spool.directory),))
        self._run, self._spool, self._archive = run, spool, ArchiveStream(read, self._stream)
        return spool, self._archive

    def _refuse_other_topics(self, spool: Spool) -> None:
        before = spool.about()
        if before is not None and before != self._settings.about():
            raise ConfigurationError(
                f"the checkpoint belongs to {json.dumps(before)}, not to "
                f"{json.dumps(self._settings.about())}",
                hint="Give each set of topics and each channel a checkpoint of its own.",
            )

    def _say_what_is_left(self) -> None:
        for directory in left_over(self._settings.folder):
            log.warning(
                "the spool %s holds messages that no query reads now; if its checkpoint is gone, "
                "read it with format nsq-archive, then remove it",
                directory,
            )


def _document(run: str, offset: Offset) -> Document:
    return {"run": run, "archive": offset.encode()}


def _parse(document: Document) -> tuple[str, Offset]:
    try:
        return str(document["run"]), decode_offset(document["archive"])
    except (KeyError, TypeError):
        raise ConfigurationError(
            f"{document!r} is not an offset of format 'nsq'",
            hint="A checkpoint belongs to one source; use another one for another source.",
        ) from None
