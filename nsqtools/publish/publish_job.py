"""Publish records, for ``nsq pub``, replay and redrive: each of them is accounted for.

What cannot be published is known before it is sent where that is possible: empty records, which NSQ
cannot carry, are skipped and counted; records above the message limit and those that cannot be read
are rejected. Every record that does not end as confirmed goes to the unsent file when there is one,
in the order of the input.

When nsqd stays away for longer than the retry timeout the rest of the input is not published: it
goes to the unsent file, or is left unread when there is none.
"""

from __future__ import annotations

import os
import re
import stat
from collections import Counter, deque
from collections.abc import Callable, Collection, Iterable, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any, Generic, NamedTuple, Self

from nsqtools.errors import ConfigurationError, OutputError
from nsqtools.files.durable import append_whole, sync_folder
from nsqtools.protocol.names import check_topic
from nsqtools.publish.input import InputBatch, Record, failing
from nsqtools.publish.publisher import (
    PublishBatch,
    PublishCounts,
    Publisher,
    PublishOutcome,
    outcome_of,
)
from nsqtools.records.envelope import MessageLike, decode_body, decode_dead_letter

BUFFER_SIZE = 1 << 16  # of an unsent file


class Outgoing(NamedTuple):
    """What a record publishes: a body, to a topic; and the message that it is from, if any.

    ``why`` says of a dead letter why it was not delivered.
    """

    topic: str
    body: bytes
    origin: MessageLike | None = None
    why: str = ""


class PublishJob(Generic[Record]):
    """Publishes records, each of which ``read`` turns into what is sent; `run` it once.

    ``read`` returns None for a record to leave out, and raises ``ValueError`` for one that cannot
    be published; without it records are the bodies for ``topic``. ``line`` makes of a record what
    the unsent file keeps. ``settled`` is called with each batch that has ended, in the order of the
    input, up to the first with a record that has to be published again: that ends the job, for the
    next run begins there, and would repeat what follows. ``warn`` is called for each record that is
    refused before sending, ``show`` after each publish. With ``dry_run`` nothing is sent;
    ``planned`` counts what is, or would be, by topic, and ``letters`` dead letters of it by topic
    and reason.
    """

    def __init__(
        self,
        publisher: Publisher,
        topic: str = "",
        read: Callable[[Record], Outgoing | None] | None = None,
        *,
        unsent: UnsentFiles | None = None,
        line: Callable[[Any], bytes] = bytes,
        settled: Callable[[InputBatch[Record]], None] | None = None,
        dry_run: bool = False,
        warn: Callable[[str], None] = lambda line: None,
        show: Callable[[], None] = lambda: None,
    ) -> None:
        self.planned: Counter[str] = Counter()
        self.letters: Counter[tuple[str, str]] = Counter()
        self.largest_rejected = 0  # the bytes of a body
        self._publisher = publisher
        self._topic = topic
        self._read = read
        self._unsent = unsent
        self._line = line
        self._settled = settled
        self._dry_run = dry_run
        self._warn = warn
        self._show = show
        self._is_stuck = False
        self._limit = publisher.client_options.publish_max_msg_size
        self._number = 0  # of records read
        self._open_batches: deque[InputBatch[Record]] = deque()

    def run(self, batches: Iterable[InputBatch[Record]]) -> PublishCounts:
        """Publish everything and return the counts. Raises `OutputError` for input and files."""
        try:
            for batch in batches:
                self._take(batch)
                if self._unsent is None and self.is_over():  # it has whatever was read of a pipe
                    break
        finally:
            try:
                self._publisher.drain()
            finally:  # where a file cannot be written that ended early
                self._publisher.finish()
            self._keep_unconfirmed()
            if self._unsent is not None:
                self._unsent.sync()  # while signals still wait, and before consumers are waited for
        return self._publisher.counts

    def is_over(self) -> bool:
        """Tell whether to read no more.

        To be asked also while the input is silent: what nsqd did not take is sent again meanwhile.
        """
        publisher = self._publisher
        publisher.poll()
        is_lost = publisher.has_given_up and self._unsent is None
        return publisher.is_stopped or self._is_stuck or is_lost

    def _take(self, batch: InputBatch[Record]) -> None:
        publisher = self._publisher
        if publisher.has_given_up:
            publisher.drain()  # what was read before comes first in the unsent file
        if self._unsent is not None or self._settled is not None:
            self._open_batches.append(batch)
        for topic, places, bodies, origins in self._outgoing(batch):
            self.planned[topic] += len(bodies)
            if self._dry_run:
                continue
            while bodies and not publisher.has_given_up:
                if not (count := publisher.allowance(len(bodies))):
                    break
                self._publish(batch, topic, places[:count], bodies[:count], origins[:count])
                places, bodies, origins = places[count:], bodies[count:], origins[count:]
                self._show()
            for place in places:
                publisher.count_unsendable(PublishOutcome.UNSENT)
                batch.lacking[place] = None
                batch.retryable.add(place)
        if self._dry_run:
            self._show()
        batch.awaited -= 1
        self._keep_unconfirmed()

    def _publish(
        self,
        batch: InputBatch[Record],
        topic: str,
        places: Sequence[int],
        bodies: list[bytes],
        origins: Sequence[MessageLike],
    ) -> None:
        def on_ended(published: PublishBatch) -> None:
            for index, error in published.failures().items():
                if outcome_of(error) is not PublishOutcome.REJECTED:
                    batch.retryable.add(places[index])
                batch.lacking[places[index]] = published.errors[index]
            batch.awaited -= 1
            self._keep_unconfirmed()

        batch.awaited += 1
        self._publisher.publish(topic, bodies, on_ended, origins=origins)

    def _keep_unconfirmed(self) -> None:
        """Write what was not confirmed to the unsent file, in the order of the input."""
        while self._open_batches and not self._open_batches[0].awaited:
            batch = self._open_batches.popleft()
            try:
                if self._unsent is not None:
                    for place in sorted(batch.lacking):
                        self._unsent.write(self._line(batch.records[place]), batch.lacking[place])
                if self._settled is not None and not self._is_stuck:
                    self._settled(batch)
                    self._is_stuck = bool(batch.retryable)
            except OutputError:
                self._unsent = self._settled = None  # the others are counted all the same
                raise

    def _outgoing(
        self, batch: InputBatch[Record]
    ) -> list[tuple[str, Sequence[int], list[bytes], list[MessageLike]]]:
        """Return what can be published: for each topic places in the batch, bodies, and origins."""
        records: Sequence[Any] = batch.records
        before = self._number
        self._number += len(records)
        if self._read is None and all(records) and max(map(len, records)) <= self._limit:
            return [(self._topic, range(len(records)), list(records), [])]
        read: Callable[[Any], Outgoing | None]
        read = self._read or (lambda body: Outgoing(self._topic, body))
        found: dict[str, tuple[list[int], list[bytes], list[MessageLike]]] = {}
        for place, record in enumerate(records):
            if not record:
                self._publisher.counts.skipped += 1
                continue
            try:
                outgoing = read(record)
                if outgoing is None:
                    self._publisher.counts.filtered += 1
                    continue
                if outgoing.topic not in found:
                    check_topic(outgoing.topic)
                self._check(outgoing.body)
            except ValueError as exc:
                self._warn(f"record {before + place + 1} is rejected: {exc}")
                self._publisher.count_unsendable(PublishOutcome.REJECTED)
                batch.lacking[place] = None
                continue
            if outgoing.why:
                self.letters[outgoing.topic, outgoing.why] += 1
            places, bodies, origins = found.setdefault(outgoing.topic, ([], [], []))
            places.append(place)
            bodies.append(outgoing.body)
            if outgoing.origin is not None:
                origins.append(outgoing.origin)
        return [(topic, *columns) for topic, columns in found.items()]

    def _check(self, body: bytes) -> None:
        if not body:
            raise ValueError("the body is empty, which NSQ cannot carry")
        if len(body) > self._limit:
            self.largest_rejected = max(self.largest_rejected, len(body))
            raise ValueError(f"{len(body)} bytes are above the limit of {self._limit}")


# -- what records say -----------------------------------------------------------------------------


def reader(
    topic: str, select: Callable[[bytes], bytes | None] | None, *, is_jsonl: bool
) -> Callable[[bytes], Outgoing | None] | None:
    """Return what reads bodies, or lines of JSON; None where records are published as they are.

    ``select`` chooses and changes bodies.
    """
    if not is_jsonl and select is None:
        return None

    def read(record: bytes) -> Outgoing | None:
        body: bytes | None = decode_body(record) if is_jsonl else record
        if select is not None and body:
            body = select(body)
        return None if body is None else Outgoing(topic, body)

    return read


def letter_reader(topic: str | None, error: str | None) -> Callable[[bytes], Outgoing | None]:
    """Return what reads lines of dead letters, to publish each to its topic, or to one.

    Those are left out whose error does not match. Raises `ConfigurationError` for a wrong pattern
    or topic.
    """
    try:
        matches = re.compile(error or "").search
    except re.error as exc:
        raise ConfigurationError(f"{error!r} is not a regular expression: {exc}") from None
    if topic is not None:
        check_topic(topic)

    def read(line: bytes) -> Outgoing | None:
        if not line.strip():
            return None
        message, why = decode_dead_letter(line)
        check_topic(message.topic)
        if not matches(why):
            return None
        return Outgoing(topic or message.topic, message.body, message, why or "no error")

    return read


# -- files of records that were not confirmed -----------------------------------------------------


class UnsentFiles:
    """Appends records to a file, or to one for each nsqd where every record goes to several.

    They hold bodies, so only their owner may read them. What they have is durable when `sync` or
    the ``with`` block has ended, and not before: records may come by the thousand. The user names
    them, so they may be links, pipes or devices, which take no sync.

    The file of an nsqd is ``PATH.HOST:PORT``: publishing it again to that nsqd repeats nothing on
    the others. Files are opened at once: a bad path must not show at the end. All methods raise
    `OutputError`. Raises `ConfigurationError` for a file among the ``inputs`` of the run (``-`` is
    standard input), which would never end.
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
        self._files: dict[str, _Appended] = {}
        for address, name in names.items():
            self._files[address] = file = _Appended(name)
            if any(map(file.is_file, inputs)):
                raise ConfigurationError(
                    f"{name} is read, and what is not confirmed would be appended to it",
                    hint="Give --unsent-file another file.",
                )

    def write(self, record: bytes, lacking: Collection[str] | None = None) -> None:
        """Append a record for the nsqd that lack it (None: all)."""
        for address, file in self._files.items():
            if lacking is None or not address or address in lacking:
                file.append(record + self._delimiter)

    def sync(self) -> None:
        """Make durable what was written."""
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


class _Appended:
    def __init__(self, name: str) -> None:
        self._name = name
        self._buffer = bytearray()
        self._is_synced = True
        with failing("write", self._name):
            self._open()

    def _open(self) -> None:
        flags = os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC
        self._descriptor = os.open(self._name, flags, 0o600)
        self._is_regular = stat.S_ISREG(os.fstat(self._descriptor).st_mode)
        if self._is_regular:
            sync_folder(Path(os.path.realpath(self._name)).parent)

    def is_file(self, path: str) -> bool:
        """Tell whether the path, or ``-`` for standard input, leads to this regular file."""
        with suppress(OSError):
            given = os.stat(0 if path == "-" else path)
            return self._is_regular and os.path.samestat(given, os.fstat(self._descriptor))
        return False

    def append(self, data: bytes) -> None:
        self._buffer += data
        self._is_synced = False
        if len(self._buffer) >= BUFFER_SIZE:
            self._flush()

    def _flush(self) -> None:
        data, self._buffer = bytes(self._buffer), bytearray()
        with failing("write", self._name):
            if self._is_regular and not self.is_file(self._name):  # it was taken away meanwhile
                before = self._descriptor
                try:
                    self._open()
                except FileNotFoundError:
                    if not os.fstat(before).st_nlink:
                        raise  # otherwise its folder was renamed, and it is there
                else:
                    os.fsync(before)
                    os.close(before)
            append_whole(self._descriptor, data, is_durable=False)

    def sync(self) -> None:
        if self._is_synced:
            return
        self._flush()
        if self._is_regular:
            with failing("write", self._name):
                os.fsync(self._descriptor)
        self._is_synced = True

    def close(self) -> None:
        os.close(self._descriptor)
