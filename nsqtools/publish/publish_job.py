"""Publish records for ``nsq pub``, replay and redrive, and account for each of them.

Records are checked before they are sent. Empty records, which NSQ cannot carry, are skipped and
counted. Unreadable records and records above the message limit are rejected. Every record that is
not confirmed goes to the unsent file, if there is one, in the order of the input.

If nsqd is unreachable for longer than the retry timeout, the remaining input is not published. It
goes to the unsent file, or stays unread without one.
"""

from __future__ import annotations

import os
import stat
from collections import Counter, deque
from collections.abc import Callable, Collection, Iterable, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any, Generic, NamedTuple, Self

from nsqtools.errors import ConfigurationError, OutputError
from nsqtools.files.durable import append_whole, sync_folder
from nsqtools.protocol.names import check_topic
from nsqtools.publish.input import InputBatch, InputRecord, translating_file_errors
from nsqtools.publish.publisher import (
    PublishBatch,
    PublishCounts,
    Publisher,
    PublishOutcome,
    classify_error,
)
from nsqtools.records.envelope import MessageLike, decode_body, decode_dead_letter
from nsqtools.records.units import parse_regexp

# Bytes that an unsent file buffers before it appends them.
BUFFER_SIZE = 1 << 16


class OutgoingMessage(NamedTuple):
    """The topic and body that a record is published as.

    ``origin`` is the message that the record was made from, if any. ``error`` is the delivery error
    of a dead letter.
    """

    topic: str
    body: bytes
    origin: MessageLike | None = None
    error: str = ""


class PublishJob(Generic[InputRecord]):
    """One run of publishing; call `run` once.

    Args:
        read: Converts a record to a message. It returns None for a record to filter out, and raises
            ``ValueError`` for a record to reject. Without it records are bodies for ``topic``.
        unsent: Receives each record that was not confirmed, as ``format_record`` encodes it.
        on_batch_ended: Called with each ended batch, in the order of the input, up to the first
            batch with a retryable record. That batch ends the job, because the next run starts
            there and would publish the following records twice.
        dry_run: Send nothing, only count.
        warn: Called for each record that is rejected before sending.
        on_progress: Called after each publish.

    Attributes:
        planned: The messages by topic that are published, or would be in a dry run.
        dead_letters: The dead letters among them by topic and error.
        largest_rejected: The size in bytes of the largest body above the message limit, 0 if none.
    """

    def __init__(
        self,
        publisher: Publisher,
        topic: str = "",
        read: Callable[[InputRecord], OutgoingMessage | None] | None = None,
        *,
        unsent: UnsentFiles | None = None,
        format_record: Callable[[Any], bytes] = bytes,
        on_batch_ended: Callable[[InputBatch[InputRecord]], None] | None = None,
        dry_run: bool = False,
        warn: Callable[[str], None] = lambda format_record: None,
        on_progress: Callable[[], None] = lambda: None,
    ) -> None:
        self.planned: Counter[str] = Counter()
        self.dead_letters: Counter[tuple[str, str]] = Counter()
        self.largest_rejected = 0
        self._publisher = publisher
        self._topic = topic
        self._read = read
        self._unsent = unsent
        self._format_record = format_record
        self._on_batch_ended = on_batch_ended
        self._dry_run = dry_run
        self._warn = warn
        self._on_progress = on_progress
        self._is_stuck = False
        self._limit = publisher.client_options.publish_max_msg_size
        self._records_read = 0
        self._open_batches: deque[InputBatch[InputRecord]] = deque()

    def run(self, batches: Iterable[InputBatch[InputRecord]]) -> PublishCounts:
        """Publish everything and return the counts.

        Raises `OutputError` for input that cannot be read and files that cannot be written.
        """
        try:
            for batch in batches:
                self._publish_batch(batch)
                # With an unsent file the loop continues: records that were read from a pipe would
                # otherwise be lost.
                if self._unsent is None and self.should_stop():
                    break
        finally:
            try:
                self._publisher.drain()
            finally:
                # A failed write to the unsent file ends `drain` early.
                self._publisher.finish()
            self._close_ended_batches()
            # Signals are still deferred here, and waiting for consumers may take long.
            if self._unsent is not None:
                self._unsent.sync()
        return self._publisher.counts

    def should_stop(self) -> bool:
        """Return whether to stop reading input.

        Call it also while no input arrives, because it drives the retries of the publisher.
        """
        publisher = self._publisher
        publisher.poll()
        is_lost = publisher.has_given_up and self._unsent is None
        return publisher.is_stopped or self._is_stuck or is_lost

    def _publish_batch(self, batch: InputBatch[InputRecord]) -> None:
        publisher = self._publisher
        if publisher.has_given_up:
            # Earlier records must come first in the unsent file.
            publisher.drain()
        if self._unsent is not None or self._on_batch_ended is not None:
            self._open_batches.append(batch)
        for topic, indexes, bodies, origins in self._read_batch(batch):
            self.planned[topic] += len(bodies)
            if self._dry_run:
                continue
            while bodies and not publisher.has_given_up:
                if not (count := publisher.allowance(len(bodies))):
                    break
                self._publish(batch, topic, indexes[:count], bodies[:count], origins[:count])
                indexes, bodies, origins = indexes[count:], bodies[count:], origins[count:]
                self._on_progress()
            for index in indexes:
                publisher.count_unsendable(PublishOutcome.UNSENT)
                batch.unconfirmed[index] = None
                batch.retryable.add(index)
        if self._dry_run:
            self._on_progress()
        batch.pending -= 1
        self._close_ended_batches()

    def _publish(
        self,
        batch: InputBatch[InputRecord],
        topic: str,
        indexes: Sequence[int],
        bodies: list[bytes],
        origins: Sequence[MessageLike],
    ) -> None:
        def on_ended(published: PublishBatch) -> None:
            for index, error in published.failures().items():
                if classify_error(error) is not PublishOutcome.REJECTED:
                    batch.retryable.add(indexes[index])
                batch.unconfirmed[indexes[index]] = published.errors[index]
            batch.pending -= 1
            self._close_ended_batches()

        batch.pending += 1
        self._publisher.publish(topic, bodies, on_ended, origins=origins)

    def _close_ended_batches(self) -> None:
        """Remove ended batches from the head of the queue, and store their unconfirmed records.

        A batch behind an unfinished one waits, so that the unsent file has the order of the input.
        """
        while self._open_batches and not self._open_batches[0].pending:
            batch = self._open_batches.popleft()
            try:
                if self._unsent is not None:
                    for index in sorted(batch.unconfirmed):
                        self._unsent.write(
                            self._format_record(batch.records[index]), batch.unconfirmed[index]
                        )
                if self._on_batch_ended is not None and not self._is_stuck:
                    self._on_batch_ended(batch)
                    self._is_stuck = bool(batch.retryable)
            except OutputError:
                # The remaining batches are still counted, but not stored.
                self._unsent = self._on_batch_ended = None
                raise

    def _read_batch(
        self, batch: InputBatch[InputRecord]
    ) -> list[tuple[str, Sequence[int], list[bytes], list[MessageLike]]]:
        """Return the valid messages by topic, as indexes in the batch, bodies, and origins."""
        records: Sequence[Any] = batch.records
        first_number = self._records_read + 1
        self._records_read += len(records)
        if self._read is None and all(records) and max(map(len, records)) <= self._limit:
            return [(self._topic, range(len(records)), list(records), [])]
        read: Callable[[Any], OutgoingMessage | None]
        read = self._read or (lambda body: OutgoingMessage(self._topic, body))
        by_topic: dict[str, tuple[list[int], list[bytes], list[MessageLike]]] = {}
        for index, record in enumerate(records):
            if not record:
                self._publisher.counts.skipped += 1
                continue
            try:
                outgoing = read(record)
                if outgoing is None:
                    self._publisher.counts.filtered += 1
                    continue
                if outgoing.topic not in by_topic:
                    check_topic(outgoing.topic)
                self._check_body(outgoing.body)
            except ValueError as exc:
                self._warn(f"record {first_number + index} is rejected: {exc}")
                self._publisher.count_unsendable(PublishOutcome.REJECTED)
                batch.unconfirmed[index] = None
                continue
            if outgoing.error:
                self.dead_letters[outgoing.topic, outgoing.error] += 1
            indexes, bodies, origins = by_topic.setdefault(outgoing.topic, ([], [], []))
            indexes.append(index)
            bodies.append(outgoing.body)
            if outgoing.origin is not None:
                origins.append(outgoing.origin)
        return [(topic, *columns) for topic, columns in by_topic.items()]

    def _check_body(self, body: bytes) -> None:
        if not body:
            raise ValueError("the body is empty, which NSQ cannot carry")
        if len(body) > self._limit:
            self.largest_rejected = max(self.largest_rejected, len(body))
            raise ValueError(f"{len(body)} bytes are above the limit of {self._limit}")


# -- readers of records ---------------------------------------------------------------------------


def record_reader(
    topic: str, select: Callable[[bytes], bytes | None] | None, *, is_jsonl: bool
) -> Callable[[bytes], OutgoingMessage | None] | None:
    """Return a function that converts a record to a message, None if records are plain bodies.

    With ``is_jsonl`` records are lines of JSON. ``select`` converts a body, or returns None to
    filter it out.
    """
    if not is_jsonl and select is None:
        return None

    def read(record: bytes) -> OutgoingMessage | None:
        body: bytes | None = decode_body(record) if is_jsonl else record
        if select is not None and body:
            body = select(body)
        return None if body is None else OutgoingMessage(topic, body)

    return read


def dead_letter_reader(
    topic: str | None, error: str | None
) -> Callable[[bytes], OutgoingMessage | None]:
    """Return a function that converts a line of a dead-letter file to a message.

    The message goes to ``topic``, by default to the topic that it came from. Dead letters whose
    error does not match the pattern ``error`` are filtered out. Raises `ConfigurationError` for an
    invalid pattern or topic.
    """
    try:
        matches = parse_regexp(error or "").search
    except ValueError as exc:
        raise ConfigurationError(f"{error!r} is not a regular expression: {exc}") from None
    if topic is not None:
        check_topic(topic)

    def read(line: bytes) -> OutgoingMessage | None:
        if not line.strip():
            return None
        message, delivery_error = decode_dead_letter(line)
        check_topic(message.topic)
        if not matches(delivery_error):
            return None
        target = topic or message.topic
        return OutgoingMessage(target, message.body, message, delivery_error or "no error")

    return read


# -- files of unconfirmed records -----------------------------------------------------------------


class UnsentFiles:
    """Append records to one file, or to one file per nsqd if each record goes to several nsqd.

    The files contain bodies, so only their owner may read them. They are durable after `sync` or
    the end of the ``with`` block: a sync for each of thousands of records would be too slow. The
    user names them, so they may be links, pipes or devices, which cannot be synced.

    The file of an nsqd is ``PATH.HOST:PORT``. Publishing it again to that nsqd repeats no message
    on the others. The files are opened immediately, so that a bad path fails at the start of a run.
    All methods raise `OutputError`. The constructor raises `ConfigurationError` for a file among
    the ``inputs`` of the run (``-`` is standard input), because that input would never end.
    """

    def __init__(
        self,
        path: Path,
        delimiter: bytes,
        addresses: Collection[str] = (),
        *,
        inputs: Iterable[str] = (),
    ) -> None:
        self._delimiter = delimiter
        names = {address: f"{path}.{address}" for address in addresses} or {"": str(path)}
        self._files: dict[str, _AppendedFile] = {}
        for address, name in names.items():
            self._files[address] = file = _AppendedFile(name)
            if any(map(file.is_file, inputs)):
                raise ConfigurationError(
                    f"{name} is an input, and unconfirmed records would be appended to it",
                    hint="Give --unsent-file another file.",
                )

    def write(self, record: bytes, addresses: Collection[str] | None = None) -> None:
        """Append a record for the nsqd that have not confirmed it (None: all)."""
        for address, file in self._files.items():
            if addresses is None or not address or address in addresses:
                file.append(record + self._delimiter)

    def sync(self) -> None:
        """Make the written records durable."""
        for file in self._files.values():
            file.sync()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        try:
            self.sync()
        finally:
            for file in self._files.values():
                file.close()


class _AppendedFile:
    def __init__(self, name: str) -> None:
        self._name = name
        self._buffer = bytearray()
        self._is_synced = True
        with translating_file_errors("write", self._name):
            self._open()

    def _open(self) -> None:
        flags = os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC
        self._descriptor = os.open(self._name, flags, 0o600)
        self._is_regular = stat.S_ISREG(os.fstat(self._descriptor).st_mode)
        if self._is_regular:
            sync_folder(Path(os.path.realpath(self._name)).parent)

    def is_file(self, path: str) -> bool:
        """Return whether the path, or ``-`` for standard input, is this regular file."""
        with suppress(OSError):
            status = os.stat(0 if path == "-" else path)
            return self._is_regular and os.path.samestat(status, os.fstat(self._descriptor))
        return False

    def append(self, data: bytes) -> None:
        self._buffer += data
        self._is_synced = False
        if len(self._buffer) >= BUFFER_SIZE:
            self._flush()

    def _flush(self) -> None:
        data, self._buffer = bytes(self._buffer), bytearray()
        with translating_file_errors("write", self._name):
            # The file was moved or deleted during the run, for instance by logrotate.
            if self._is_regular and not self.is_file(self._name):
                old_descriptor = self._descriptor
                try:
                    self._open()
                except FileNotFoundError:
                    # A file with a link still exists: its directory was renamed. Keep it.
                    if not os.fstat(old_descriptor).st_nlink:
                        raise
                else:
                    os.fsync(old_descriptor)
                    os.close(old_descriptor)
            append_whole(self._descriptor, data, is_durable=False)

    def sync(self) -> None:
        if self._is_synced:
            return
        self._flush()
        if self._is_regular:
            with translating_file_errors("write", self._name):
                os.fsync(self._descriptor)
        self._is_synced = True

    def close(self) -> None:
        os.close(self._descriptor)
