"""Where messages go that are given up: a topic, or a file of dead letters.

A message that nsqd refuses is published there inside a document, because the topic of dead letters
would refuse it for the same reason if the body alone was too large for a message.
"""

from __future__ import annotations

import hashlib
import os
import time
from dataclasses import dataclass
from pathlib import Path

from nsqtools.client.producer import Producer
from nsqtools.errors import OutputError, PublishError
from nsqtools.files.durable import append_whole, sync_folder
from nsqtools.files.opening import open_to_write
from nsqtools.records.envelope import Envelope, encode_dead_letter


@dataclass(frozen=True, slots=True)
class Rejected:
    """A message that is given up: no request, or refused by nsqd for good."""

    topic: str
    body: bytes
    reason: str
    key: str = ""

    def line(self) -> bytes:
        """Return the dead letter, as `nsq redrive` reads it, ended by a newline."""
        now_ns = time.time_ns()
        # a message that was never published has no id, and each dead letter needs one
        id = hashlib.blake2s(self.key.encode("utf-8", "replace") + self.body).hexdigest()[:16]
        message = Envelope(self.topic, "", id.encode(), now_ns, 1, self.body)
        return encode_dead_letter(self.topic, "", message, error=self.reason, failed_at_ns=now_ns)


class RejectedTopic:
    """Publishes dead letters to a topic; without a topic it keeps none."""

    def __init__(self, producer: Producer, topic: str) -> None:
        self._producer = producer
        self._topic = topic

    def keep(self, rejected: Rejected) -> bool:
        """Publish the dead letter; return True when nsqd has confirmed it."""
        if not self._topic:
            return False
        try:
            self._producer.publish(self._topic, rejected.line().rstrip(b"\n"))
        except PublishError:
            return False
        return True


class RejectedFile:
    """Appends dead letters to a file. Raises `OutputError` if that cannot be written."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._append(b"")

    def keep(self, rejected: Rejected) -> bool:
        """Append the dead letter; return True, as it is on disk then."""
        self._append(rejected.line())
        return True

    def _append(self, line: bytes) -> None:
        try:
            descriptor = open_to_write(self._path, os.O_WRONLY | os.O_CREAT | os.O_APPEND)
            try:
                append_whole(descriptor, line)
            finally:
                os.close(descriptor)
            sync_folder(self._path.parent)
        except OSError as error:
            raise OutputError(f"cannot write {self._path} ({error.strerror})") from error
