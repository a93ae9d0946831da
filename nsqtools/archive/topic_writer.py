"""One topic's messages into its files. No thread and no clock of its own.

`take` puts messages into the members being made, `flush` makes these durable and FINishes the
messages. Between the two they are *held*: unanswered, to be touched when that takes long. When
anything cannot be written, everything held goes back to nsqd with backoff, and the files go back to
their last durable member before they are written again: see `WriteFailed`.
"""

from __future__ import annotations

import logging
import operator
from collections.abc import Callable, Iterable, Iterator
from dataclasses import astuple, dataclass
from pathlib import Path

from nsqtools.archive.archive_settings import ArchiveSettings, PartitionBy, RecordFormat
from nsqtools.archive.file_set import FileSet, NextHead, OpenFile
from nsqtools.archive.journal import Journal
from nsqtools.client.message import Answers, Batch, Message
from nsqtools.errors import OutputError
from nsqtools.files.locks import FolderLocks
from nsqtools.protocol.text import NS
from nsqtools.records.envelope import encode_many
from nsqtools.records.lines import encode_lines

log = logging.getLogger("nsqtools")


class WriteFailed(OutputError):
    """Nothing of what was held is written; it is back in the queue. ``reason`` is the system's."""

    def __init__(self, message: str, reason: str) -> None:
        super().__init__(message)
        self.reason = reason


@dataclass(slots=True)
class ArchiveTotals:
    """Counts of a topic since the start. ``bytes`` are of finished flushes, as on disk."""

    messages: int = 0
    bytes: int = 0
    files: int = 0
    already_written: int = 0
    failures: int = 0
    ambiguous: int = 0
    """Bodies with the delimiter inside, in raw files: where they end is lost."""

    def plus(self, other: ArchiveTotals) -> ArchiveTotals:
        """Return the sums."""
        mine, others = astuple(self), astuple(other)
        return ArchiveTotals(*map(operator.add, mine, others))


class TopicWriter:
    """Writes one topic. ``on_finished`` gets the path of each file that is complete.

    ``next_head`` numbers the files; without it they are known by their names only. ``locks`` are
    those of the work directory.
    """

    def __init__(
        self,
        topic: str,
        settings: ArchiveSettings,
        journal: Journal,
        on_finished: Callable[[Path], None],
        locks: FolderLocks,
        next_head: NextHead = lambda: None,
    ) -> None:
        self.totals = ArchiveTotals()
        self.held_count = 0
        self.held_bytes = 0
        self._settings = settings
        self._journal = journal
        self._sources: dict[str, Answers] = {}
        self._files = FileSet(topic, settings, self._finished, next_head, locks)
        self._on_finished = on_finished

    @property
    def taken(self) -> int:
        """Messages that are written or held."""
        return self.totals.messages + self.held_count

    @property
    def progress(self) -> tuple[int, int]:
        """What grows when writing works."""
        return self.totals.messages, self.totals.files

    # -- messages -------------------------------------------------------------------------------

    def take(self, batch: Batch, now_s: float) -> None:
        """Put messages into their files. Raises `WriteFailed`."""
        try:
            self._note_source(batch)
            if max([message.attempts for message in batch]) > 1:
                batch = self._without_known(batch)
            for stem, messages in self._by_file(batch, now_s):
                self._hold(self._files.get(stem, now_s), messages)
        except OSError as exc:
            raise self._failed(exc, batch) from exc

    def _hold(self, file: OpenFile, batch: Batch) -> None:
        text = self._encode(batch)
        file.hold(batch, text)
        self._journal.add(batch.nsqd, [message.id for message in batch])
        self.held_count += len(batch)
        self.held_bytes += len(text)
        if self._files.is_full(file):
            self._flush()

    def _encode(self, batch: Batch) -> bytes:
        if self._settings.format is RecordFormat.jsonl:
            return encode_many(batch.topic, batch.nsqd, batch)
        delimiter = self._settings.delimiter
        text = encode_lines(batch.topic, batch.nsqd, batch, delimiter=delimiter)
        if delimiter and (more := text.count(delimiter) - len(batch)):
            if not self.totals.ambiguous:
                log.warning(
                    "topic %s: bodies contain the delimiter; where they end is lost in raw "
                    "files; --format jsonl keeps it",
                    batch.topic,
                )
            self.totals.ambiguous += more
        return text

    def _by_file(self, batch: Batch, now_s: float) -> Iterator[tuple[str, Batch]]:
        """The messages of a batch by the stem of the file that they belong in."""
        if not batch:
            return
        if self._settings.partition_by is PartitionBy.arrival:
            yield self._files.stem(now_s, now_s), batch
            return
        stems: dict[str, list[Message]] = {}
        for message in batch:
            stem = self._files.stem(now_s, message.timestamp_ns / NS)
            stems.setdefault(stem, []).append(message)
        for stem, messages in stems.items():
            yield stem, Batch(batch.source, messages)

    # -- messages that come again ---------------------------------------------------------------

    def _note_source(self, batch: Batch) -> None:
        """Where a connection was lost, FINs may have been lost with it."""
        before = self._sources.get(batch.nsqd)
        if before is not batch.source:
            self._sources[batch.nsqd] = batch.source
            if before is not None:
                self._keep_identities()

    def fins_were_lost(self) -> None:
        """nsqd refused FINs as too late: what they were for comes again. Raises `WriteFailed`."""
        try:
            self._keep_identities()
        except OSError as exc:
            raise self._failed(exc) from exc

    def _keep_identities(self) -> None:
        """Remember for long what was written lately, for it may come again after a long backlog."""
        self._flush()
        self._journal.keep()

    def _without_known(self, batch: Batch) -> Batch:
        """Return the messages that are not written; of the others FINish those that are durable."""
        fresh = []
        for message in batch:
            if message.attempts == 1 or not self._journal.knows(batch.nsqd, message.id):
                fresh.append(message)
                continue
            self.totals.already_written += 1
            if not self._files.adopt(batch, message):
                message.finish()
        return Batch(batch.source, fresh)

    # -- flushing -------------------------------------------------------------------------------

    def flush(self) -> None:
        """Make everything held durable, then FINish it. Raises `WriteFailed`."""
        try:
            self._flush()
        except OSError as exc:
            raise self._failed(exc) from exc

    def _flush(self) -> None:
        for file in self._files.holding():
            member = file.end_member()
            self._journal.record(self._files.name_of(file), member, file.ids_by_nsqd())
            file.part.flush(member)
            self._journal.confirm()
            self.totals.messages += member.messages
            self.totals.bytes += member.length
            for batch in file.release():
                batch.finish()
        self.held_count = self.held_bytes = 0
        self._files.finish_full()

    def rotate(self, now_s: float, *, all_files: bool = False) -> None:
        """Finish the files whose time is over, or all of them. Raises `WriteFailed`."""
        try:
            if any(file.batches for file in self._files.over(now_s, all_files=all_files)):
                self._flush()
            for file in self._files.over(now_s, all_files=all_files):
                self._files.finish(file)
            self._files.publish_ending()
            if not (self._settings.skip_empty_files or all_files):
                self._files.get(self._files.stem(now_s, now_s), now_s)
        except OSError as exc:
            raise self._failed(exc) from exc

    def check_in_s(self, now_s: float) -> float | None:
        """Return in how many seconds `rotate` may have something to do; None for never."""
        return self._files.check_in_s(now_s)

    def touch(self) -> None:
        """Restart the timeouts of everything held."""
        for batch in self.held():
            for message in batch:
                message.touch()

    def held(self) -> Iterable[Batch]:
        """Iterate over what is held."""
        return [batch for file in self._files.holding() for batch in file.batches]

    def close(self) -> None:
        """Let go of everything, after the last `rotate`; a file that could not be finished then is
        recovered at the next start."""
        self._files.close()
        self._journal.close()

    def _finished(self, path: Path) -> None:
        self.totals.files += 1
        self._on_finished(path)

    def _failed(self, exc: OSError, *others: Batch) -> WriteFailed:
        """Give everything held back to nsqd, and say what happened."""
        self.totals.failures += 1
        count = 0
        for file in self._files.holding():
            for batch in file.release():
                self._journal.discard(batch.nsqd, [message.id for message in batch])
                count += batch.requeue(0)
        count += sum(batch.requeue(0) for batch in others)
        self.held_count = self.held_bytes = 0
        self._files.mark_dirty()
        path = exc.filename or self._settings.directories.work
        back = f": {count} messages are back in the queue" if count else ""
        return WriteFailed(f"cannot write {path} ({exc.strerror}){back}", exc.strerror or str(exc))
