"""One run of ``nsq pub``: records in, outcomes out, and nothing that is not accounted for.

What cannot be published is known before it is sent where that is possible: empty records, which NSQ
cannot carry, are skipped and counted; records above the message limit and, with JSON lines, records
that are no message, are rejected. Every record that does not end as confirmed goes to the unsent
file, byte for byte with its delimiter, when there is one.

When nsqd stays away for longer than the retry timeout the rest of the input is not published: it
goes to the unsent file, or is left unread when there is none.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from types import TracebackType
from typing import Self

from nsqtools.client.options import ClientOptions
from nsqtools.errors import NsqError, OutputError
from nsqtools.publish.pacing import RateLimit
from nsqtools.publish.publisher import (
    PublishBatch,
    PublishCounts,
    Publisher,
    PublishOptions,
    PublishOutcome,
)
from nsqtools.publish.source import RecordSource
from nsqtools.records.envelope import decode_body


class UnsentFile:
    """Appends records to a file. It is opened at once: a bad path must not show at the end."""

    def __init__(self, path: str, delimiter: bytes) -> None:
        self._path = path
        self._delimiter = delimiter
        try:
            self._file = open(path, "ab")  # noqa: SIM115 - closed by __exit__
        except OSError as exc:
            raise OutputError(f"cannot write {path} ({exc.strerror})") from exc

    def write(self, record: bytes) -> None:
        """Append a record. Raises `OutputError`."""
        try:
            self._file.write(record + self._delimiter)
        except OSError as exc:
            raise OutputError(f"cannot write {self._path} ({exc.strerror})") from exc

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        value: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        try:
            self._file.close()
        except OSError as exc:
            raise OutputError(f"cannot write {self._path} ({exc.strerror})") from exc


class PublishJob:
    """Publishes everything of ``paths`` (``-`` is standard input) to one topic.

    ``rate`` is messages a second, 0 without limit. ``warn`` is told once of each kind of record
    that was refused before sending, ``show`` is called after each batch. `stop` may be called from
    any thread: reading ends, what is under way is settled.
    """

    def __init__(
        self,
        topic: str,
        addresses: Sequence[str],
        *,
        paths: Sequence[str] = ("-",),
        delimiter: bytes = b"\n",
        is_jsonl: bool = False,
        rate: float = 0,
        client_options: ClientOptions,
        options: PublishOptions,
        unsent: UnsentFile | None = None,
        warn: Callable[[str], None] = lambda line: None,
        show: Callable[[PublishCounts], None] = lambda counts: None,
    ) -> None:
        self._topic = topic
        self._is_stopped = False
        self._is_jsonl = is_jsonl
        self._limit = client_options.publish_max_msg_size
        self._rate = RateLimit(rate, time.monotonic()) if rate else None
        self._unsent = unsent
        self._warn = warn
        self._show = show
        self._number = 0  # of records read
        self._source = RecordSource(paths, delimiter, lambda: self._is_stopped)
        self._publisher = Publisher(addresses, client_options, options, lambda: self._is_stopped)

    @property
    def counts(self) -> PublishCounts:
        return self._publisher.counts

    @property
    def last_error(self) -> NsqError | None:
        """The latest reason why something was not published."""
        return self._publisher.last_error

    def stop(self) -> None:
        """Read no more; what is under way is settled."""
        self._is_stopped = True

    def run(self) -> PublishCounts:
        """Publish everything and return the counts. Raises `OutputError` for input and files."""
        try:
            for records in self._source.batches():
                self._take(records)
                if self._publisher.has_given_up and self._unsent is None:
                    break
        finally:
            self._publisher.finish()
        return self.counts

    def _take(self, records: list[bytes]) -> None:
        records, bodies = self._publishable(records)
        while bodies and not self._publisher.has_given_up and not self._is_stopped:
            count = self._allowance(len(bodies))
            self._publish(bodies[:count], records[:count])
            bodies, records = bodies[count:], records[count:]
            self._show(self.counts)
        for record in records:
            self.counts.add(PublishOutcome.UNSENT)
            self._keep(record)

    def _publish(self, bodies: list[bytes], records: list[bytes]) -> None:
        def keep_unconfirmed(batch: PublishBatch) -> None:
            for index in sorted(batch.failures):
                self._keep(records[index])

        self._publisher.publish(self._topic, bodies, keep_unconfirmed)

    def _allowance(self, wanted: int) -> int:
        if self._rate is None:
            return wanted
        while not (allowed := self._rate.allowance(now := time.monotonic())):
            time.sleep(self._rate.wait_s(now))
        count = min(wanted, allowed)
        self._rate.took(count)
        return count

    # -- records that cannot be published -------------------------------------------------------

    def _publishable(self, records: list[bytes]) -> tuple[list[bytes], list[bytes]]:
        """Return the records that can be published, and their bodies."""
        before = self._number
        self._number += len(records)
        if not self._is_jsonl and all(records) and max(map(len, records)) <= self._limit:
            return records, records
        kept, bodies = [], []
        for number, record in enumerate(records, before + 1):
            if not record:
                self.counts.skipped += 1
                continue
            body = self._body(record, number)
            if body is not None:
                kept.append(record)
                bodies.append(body)
        return kept, bodies

    def _body(self, record: bytes, number: int) -> bytes | None:
        reason = ""
        body = record
        if self._is_jsonl:
            try:
                body = decode_body(record)
            except ValueError as exc:
                reason = str(exc)
        if not reason and not body:
            reason = "the body is empty, which NSQ cannot carry"
        if not reason and len(body) > self._limit:
            reason = f"{len(body)} bytes are above the limit of {self._limit}"
        if not reason:
            return body
        self._warn(f"record {number} is rejected: {reason}")
        self.counts.add(PublishOutcome.REJECTED)
        self._keep(record)
        return None

    def _keep(self, record: bytes) -> None:
        """Write a record that was not confirmed to the unsent file, if there is one."""
        if self._unsent is not None:
            self._unsent.write(record)
