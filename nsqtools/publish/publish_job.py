"""One run of ``nsq pub``: records in, outcomes out, and nothing that is not accounted for.

What cannot be published is known before it is sent where that is possible: empty records, which NSQ
cannot carry, are skipped and counted; records above the message limit and, with JSON lines, records
that are no message, are rejected. Every record that does not end as confirmed goes to the unsent
file when there is one, byte for byte with its delimiter, in the order of the input.

When nsqd stays away for longer than the retry timeout the rest of the input is not published: it
goes to the unsent file, or is left unread when there is none.

Records are read in batches (`RecordSource`). A batch ends when it is full, when nothing more came
for `LINGER_S`, or at the end of the input. So ``tail -f log | nsq pub`` is prompt and a large file
is fast, without a setting for it.
"""

from __future__ import annotations

import os
import select
import time
from collections import deque
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence

from nsqtools.client.options import ClientOptions
from nsqtools.errors import NsqError, OutputError
from nsqtools.protocol.commands import mpub_size
from nsqtools.publish.input_checkpoint import BEGIN, InputCheckpoint, InputPlace
from nsqtools.publish.pacing import RateLimit
from nsqtools.publish.publisher import (
    PublishBatch,
    PublishCounts,
    Publisher,
    PublishOptions,
    PublishOutcome,
)
from nsqtools.publish.unsent_files import UnsentFiles
from nsqtools.records.envelope import Splitter, decode_body

LINGER_S = 0.005
READ_SIZE = 1 << 18
BATCH_RECORDS = 1000
BATCH_BYTES = 1 << 19
MAX_RECORD_BYTES = 1 << 28  # beyond it the delimiter must be wrong
PIPE_SIZE = 1 << 20
STOP_CHECK_S = 0.2

Select = Callable[[bytes], bytes | None]
"""From a body to the one to publish; None leaves the record out."""


def allowance(rate: RateLimit | None, wanted: int) -> int:
    """Return how many messages go now, at least one: waits for it."""
    if rate is None:
        return wanted
    while not (allowed := rate.allowance(now := time.monotonic())):
        time.sleep(rate.wait_s(now))
    count = min(wanted, allowed)
    rate.took(count)
    return count


class InputBatch:
    """The records that were read together, and those of them that were not confirmed.

    ``awaited`` counts the publishes of it that have not ended; ``lacking`` has, by its place, the
    nsqd that lack a record (None: all); ``retryable`` is whether publishing one of these again may
    help. ``end`` is where the input stood after it.
    """

    __slots__ = ("awaited", "end", "is_taken", "lacking", "records", "retryable")

    def __init__(self, records: Sequence[bytes], end: InputPlace) -> None:
        self.records = records
        self.end = end
        self.retryable = False
        self.lacking: dict[int, Collection[str] | None] = {}
        self.awaited = 0
        self.is_taken = False

    @property
    def has_ended(self) -> bool:
        return self.is_taken and not self.awaited


class PublishJob:
    """Publishes everything of ``paths`` (``-`` is standard input), or ``records``, to one topic.

    ``records`` are batches, ``select`` chooses and changes bodies, and with a ``checkpoint`` the
    run begins where that says, and writes down how far it came. ``rate`` is messages a second, 0
    without limit. ``warn`` is called once for each kind of record that was refused before sending,
    ``show`` is called after each batch. `stop` may be called from any thread: reading ends, and
    what was sent is waited for.
    """

    def __init__(
        self,
        topic: str,
        addresses: Sequence[str],
        *,
        paths: Sequence[str] = ("-",),
        records: Iterable[Sequence[bytes]] | None = None,
        delimiter: bytes = b"\n",
        is_jsonl: bool = False,
        select: Select | None = None,
        checkpoint: InputCheckpoint | None = None,
        rate: float = 0,
        client_options: ClientOptions,
        options: PublishOptions,
        unsent: UnsentFiles | None = None,
        warn: Callable[[str], None] = lambda line: None,
        show: Callable[[PublishCounts], None] = lambda counts: None,
        publisher: Publisher | None = None,
    ) -> None:
        self._topic = topic
        self._is_stopped = False
        self._is_jsonl = is_jsonl
        self._limit = client_options.publish_max_msg_size
        self._batch_limit = client_options.publish_max_body_size
        self._largest_rejected = 0
        self._records = records
        self._select = select
        self._checkpoint = checkpoint
        self._rate = RateLimit(rate, time.monotonic()) if rate else None
        self._unsent = unsent
        self._warn = warn
        self._show = show
        self._number = 0  # of records read
        self._open_batches: deque[InputBatch] = deque()
        begin = checkpoint.place if checkpoint is not None else BEGIN
        self._source = RecordSource(paths, delimiter, self._reads_no_more, begin)
        self._publisher = publisher or Publisher(
            addresses, client_options, options, lambda: self._is_stopped
        )

    @property
    def counts(self) -> PublishCounts:
        return self._publisher.counts

    @property
    def counts_by_nsqd(self) -> Mapping[str, PublishCounts]:
        """The outcomes on each nsqd, where every record goes to several."""
        return self._publisher.counts_by_nsqd

    @property
    def last_error(self) -> NsqError | None:
        """The latest reason why something was not published."""
        return self._publisher.last_error

    @property
    def options_for_larger(self) -> list[str]:
        """The client options with which no record would have been above the limit."""
        if not self._largest_rejected:
            return []
        options = [f"publish_max_msg_size={self._largest_rejected}"]
        if (size := mpub_size([self._largest_rejected])) > self._batch_limit:
            options.append(f"publish_max_body_size={size}")
        return options

    @property
    def bytes_read(self) -> int:
        """The bytes of the files that are in batches, of this run and of those before."""
        return self._source.bytes_read

    def stop(self) -> None:
        """Read no more, and wait for what was sent."""
        self._is_stopped = True

    def run(self) -> PublishCounts:
        """Publish everything and return the counts. Raises `OutputError` for input and files."""
        try:
            for records in self._source.batches() if self._records is None else self._records:
                self._take(records)
                if self._reads_no_more():
                    break
        finally:
            self._publisher.finish()
            self._keep_unconfirmed()
            if self._checkpoint is not None:
                self._checkpoint.save()
        return self.counts

    def _reads_no_more(self) -> bool:
        """Also asked while the input is silent: what nsqd did not take is sent again meanwhile."""
        self._publisher.poll()
        return self._is_stopped or (self._publisher.has_given_up and self._unsent is None)

    def _take(self, records: Sequence[bytes]) -> None:
        if self._publisher.has_given_up:
            self._publisher.drain()  # what was read before comes first in the unsent file
        batch = InputBatch(records, self._source.place)
        if self._unsent is not None or self._checkpoint is not None:
            self._open_batches.append(batch)
        places, bodies = self._publishable(batch)
        while bodies and not self._publisher.has_given_up and not self._is_stopped:
            count = allowance(self._rate, len(bodies))
            self._publish(batch, places[:count], bodies[:count])
            places, bodies = places[count:], bodies[count:]
            self._show(self.counts)
        for place in places:
            self._publisher.count_unsendable(PublishOutcome.UNSENT)
            batch.lacking[place] = None
            batch.retryable = True
        batch.is_taken = True
        self._keep_unconfirmed()

    def _publish(self, batch: InputBatch, places: Sequence[int], bodies: list[bytes]) -> None:
        def on_ended(published: PublishBatch) -> None:
            for index, outcome in published.failures.items():
                batch.retryable |= outcome is not PublishOutcome.REJECTED
                batch.lacking[places[index]] = [
                    nsqd for nsqd, missing in published.missing.items() if index in missing
                ]
            batch.awaited -= 1
            self._keep_unconfirmed()

        batch.awaited += 1
        self._publisher.publish(self._topic, bodies, on_ended)

    def _keep_unconfirmed(self) -> None:
        """Write what was not confirmed to the unsent file, in the order of the input."""
        while self._open_batches and self._open_batches[0].has_ended:
            batch = self._open_batches.popleft()
            if self._unsent is not None:
                for place in sorted(batch.lacking):
                    self._unsent.write(batch.records[place], batch.lacking[place])
            if self._checkpoint is not None:
                self._checkpoint.settle(batch.end, is_whole=not batch.retryable)

    # -- records that cannot be published -------------------------------------------------------

    def _publishable(self, batch: InputBatch) -> tuple[Sequence[int], list[bytes]]:
        """Return the places of the records that can be published, and their bodies."""
        records = batch.records
        before = self._number
        self._number += len(records)
        is_plain = not self._is_jsonl and self._select is None
        if is_plain and all(records) and max(map(len, records)) <= self._limit:
            return range(len(records)), list(records)
        places, bodies = [], []
        for place, record in enumerate(records):
            if not record:
                self.counts.skipped += 1
                continue
            body, reason = self._body(record)
            if body is None:
                self.counts.filtered += 1
                continue
            if not reason:
                places.append(place)
                bodies.append(body)
                continue
            self._warn(f"record {before + place + 1} is rejected: {reason}")
            self._publisher.count_unsendable(PublishOutcome.REJECTED)
            batch.lacking[place] = None
        return places, bodies

    def _body(self, record: bytes) -> tuple[bytes | None, str]:
        """Return the body of a record, None if it is not selected; and why it cannot be published,
        if it cannot."""
        body: bytes | None = record
        if self._is_jsonl:
            try:
                body = decode_body(record)
            except ValueError as exc:
                return b"", str(exc)
        if self._select is not None and body:
            body = self._select(body)
            if body is None:
                return None, ""
        if not body:
            return body, "the body is empty, which NSQ cannot carry"
        if len(body) > self._limit:
            self._largest_rejected = max(self._largest_rejected, len(body))
            return body, f"{len(body)} bytes are above the limit of {self._limit}"
        return body, ""


# -- reading --------------------------------------------------------------------------------------


class RecordSource:
    """Reads inputs one after the other.

    ``paths`` are files, ``-`` is standard input. ``is_stopped`` is asked between reads, and a wait
    for input ends soon after it says yes. ``begin`` is where to begin; ``place`` is the end of the
    latest batch.
    """

    def __init__(
        self,
        paths: Sequence[str],
        delimiter: bytes,
        is_stopped: Callable[[], bool],
        begin: InputPlace = BEGIN,
    ) -> None:
        self.place = begin
        self._bytes_before = 0
        self._paths = paths
        self._delimiter = delimiter
        self._is_stopped = is_stopped
        self._lacking = 0  # bytes of the delimiter that the last record of a file does not have
        self._pending: list[bytes] = []
        self._pending_bytes = 0

    @property
    def bytes_read(self) -> int:
        """The bytes before the place, in all files."""
        return self._bytes_before + self.place.offset

    def batches(self) -> Iterator[list[bytes]]:
        """Iterate over batches of records, without their delimiters.

        Raises `OutputError` for a file that cannot be read, `NsqError` for a record without end.
        """
        for file, path in enumerate(self._paths):
            if file < self.place.file:
                continue
            descriptor, is_ours = _open(path)
            try:
                if self.place.file == file and self.place.offset:
                    os.lseek(descriptor, self.place.offset, os.SEEK_SET)
                elif file != self.place.file:
                    self._bytes_before += self.place.offset
                    self.place = InputPlace(file, 0, self.place.records)
                yield from self._read(descriptor, path)
            finally:
                if is_ours:
                    os.close(descriptor)

    def _read(self, descriptor: int, path: str) -> Iterator[list[bytes]]:
        splitter = Splitter(self._delimiter, limit=MAX_RECORD_BYTES)
        while not self._is_stopped():
            if not _is_ready(descriptor, LINGER_S if self._pending else STOP_CHECK_S):
                if self._pending:
                    yield self._take()
                continue
            chunk = _read_chunk(descriptor, path)
            records = splitter.feed(chunk) if chunk else splitter.end()
            if not chunk:
                self._lacking = len(self._delimiter) * len(records)
            self._pending += records
            self._pending_bytes += sum(map(len, records))
            while len(self._pending) >= BATCH_RECORDS or self._pending_bytes >= BATCH_BYTES:
                yield self._take()
            if not chunk:
                break
        if self._pending:
            yield self._take()

    def _take(self) -> list[bytes]:
        batch = self._pending[:BATCH_RECORDS]
        self._pending = self._pending[BATCH_RECORDS:]
        left = sum(map(len, self._pending))
        taken = self._pending_bytes - left + len(batch) * len(self._delimiter)
        self._pending_bytes = left
        if not self._pending:
            taken -= self._lacking
            self._lacking = 0
        file, offset, records = self.place
        self.place = InputPlace(file, offset + taken, records + len(batch))
        return batch


def _open(path: str) -> tuple[int, bool]:
    if path == "-":
        _widen_pipe(0)
        return 0, False
    try:
        return os.open(path, os.O_RDONLY), True
    except OSError as exc:
        raise OutputError(f"cannot read {path} ({exc.strerror})") from exc


def _widen_pipe(descriptor: int) -> None:
    """Let the writer run ahead further: fewer and larger reads."""
    import fcntl

    try:
        fcntl.fcntl(descriptor, fcntl.F_SETPIPE_SZ, PIPE_SIZE)
    except (OSError, AttributeError):
        pass  # no pipe, or not on Linux


def _is_ready(descriptor: int, timeout_s: float) -> bool:
    # a regular file is always ready
    return bool(select.select([descriptor], [], [], timeout_s)[0])


def _read_chunk(descriptor: int, path: str) -> bytes:
    try:
        return os.read(descriptor, READ_SIZE)
    except OSError as exc:
        name = "standard input" if path == "-" else path
        raise OutputError(f"cannot read {name} ({exc.strerror})") from exc
