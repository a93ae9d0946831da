"""Publish dead letters again: each to the topic that it came from, or all to one.

Lines that are no messages are counted as rejected and named, and the rest goes on. What was not
confirmed goes to the unsent file, line by line as it was.
"""

from __future__ import annotations

import re
import time
from collections import Counter
from collections.abc import Callable, Sequence

from nsqtools.client.options import ClientOptions
from nsqtools.errors import ConfigurationError, NsqError
from nsqtools.protocol.names import check_topic
from nsqtools.publish.pacing import RateLimit
from nsqtools.publish.publish_job import RecordSource, allowance
from nsqtools.publish.publisher import (
    PublishBatch,
    PublishCounts,
    Publisher,
    PublishOptions,
    PublishOutcome,
)
from nsqtools.publish.unsent_files import UnsentFiles
from nsqtools.records.envelope import DeadLetter, Envelope, decode_dead_letter

BATCH = 500


class Redrive:
    """One run. ``kinds`` counts the letters by topic and error. `stop` may be called anywhere.

    Raises `ConfigurationError` for a wrong pattern or topic.
    """

    def __init__(
        self,
        paths: Sequence[str],
        addresses: Sequence[str],
        *,
        topic: str | None,
        error: str | None,
        rate: float,
        client_options: ClientOptions,
        options: PublishOptions,
        unsent: UnsentFiles | None,
        warn: Callable[[str], None],
        show: Callable[[], None],
        is_dry: bool,
        publisher: Publisher | None = None,
    ) -> None:
        try:
            self._matches = re.compile(error or "").search
        except re.error as exc:
            raise ConfigurationError(f"{error!r} is not a regular expression: {exc}") from None
        self._topic = check_topic(topic) if topic is not None else None
        self._rate = RateLimit(rate, time.monotonic()) if rate else None
        self._unsent = unsent
        self._warn = warn
        self._show = show
        self._is_dry = is_dry
        self._is_stopped = False
        self._limit = client_options.publish_max_msg_size
        self.kinds: Counter[tuple[str, str]] = Counter()
        self._source = RecordSource(paths, b"\n", lambda: self._is_stopped)
        self._publisher = publisher or Publisher(
            addresses, client_options, options, lambda: self._is_stopped
        )

    @property
    def counts(self) -> PublishCounts:
        return self._publisher.counts

    @property
    def last_error(self) -> NsqError | None:
        return self._publisher.last_error

    def stop(self) -> None:
        """Read no more, and wait for what was sent."""
        self._is_stopped = True

    def run(self) -> None:
        """Publish everything. Raises `OutputError` for files that cannot be read or written."""
        number = 0
        try:
            for records in self._source.batches():
                by_topic: dict[str, list[tuple[bytes, Envelope]]] = {}
                for record in records:
                    number += 1
                    letter = self._read(record, number)
                    if letter is None or not self._matches(letter.error or ""):
                        continue
                    topic = self._topic or letter.message.topic
                    self.kinds[topic, letter.error or "no error"] += 1
                    by_topic.setdefault(topic, []).append((record, letter.message))
                if not self._is_dry:
                    for topic, letters in by_topic.items():
                        self._publish(topic, letters)
                if self._is_stopped or (self._publisher.has_given_up and self._unsent is None):
                    break
        finally:
            self._publisher.finish()

    def _read(self, record: bytes, number: int) -> DeadLetter | None:
        if not record.strip():
            return None
        try:
            letter = decode_dead_letter(record)
            check_topic(letter.message.topic)
            if not letter.message.body or len(letter.message.body) > self._limit:
                raise ValueError(f"a body of {len(letter.message.body)} bytes cannot be published")
        except ValueError as exc:
            self._warn(f"line {number} is rejected: {exc}")
            self._publisher.count_unsendable(PublishOutcome.REJECTED)
            self._keep([record])
            return None
        return letter

    def _publish(self, topic: str, letters: list[tuple[bytes, Envelope]]) -> None:
        while letters:
            if self._publisher.has_given_up or self._is_stopped:
                self._keep([record for record, _ in letters])
                for _ in letters:
                    self._publisher.count_unsendable(PublishOutcome.UNSENT)
                return
            count = allowance(self._rate, min(len(letters), BATCH))
            part, letters = letters[:count], letters[count:]
            records = [record for record, _ in part]

            def ended(batch: PublishBatch, records: list[bytes] = records) -> None:
                self._keep([records[place] for place in sorted(batch.failures)])

            messages = [message for _, message in part]
            bodies = [message.body for message in messages]
            self._publisher.publish(topic, bodies, ended, origins=messages)
            self._show()

    def _keep(self, records: Sequence[bytes]) -> None:
        if self._unsent is not None:
            for record in records:
                self._unsent.write(record)
