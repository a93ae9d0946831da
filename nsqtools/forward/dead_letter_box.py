"""Where dead letters are kept: a topic on the nsqd that delivered the message, or a file.

A message is finished only when its dead letter is confirmed, or on disk. When that fails the
message is requeued, and comes again.
"""

from __future__ import annotations

import logging
import os
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Protocol

from nsqtools.client.options import ClientOptions
from nsqtools.client.producer import Producer
from nsqtools.client.publication import Publication
from nsqtools.errors import ConfigurationError, OutputError, PublishError
from nsqtools.files.durable import sync_folder, write_all
from nsqtools.files.locks import locked
from nsqtools.forward.parcel import Parcel
from nsqtools.protocol.names import check_topic
from nsqtools.records.envelope import encode_dead_letter

log = logging.getLogger("nsqtools")

Kept = Callable[[Parcel, bool], None]


class DeadLetterBox(Protocol):
    """Keeps messages that cannot be delivered."""

    def put(self, parcel: Parcel, error: str, kept: Kept) -> None:
        """Keep the messages; ``kept`` is called with the result, perhaps on another thread."""

    def close(self) -> None:
        """Wait for what is under way."""


class DeadLetterTopic:
    """Publishes the raw bodies to a topic, on the nsqd that each came from."""

    def __init__(self, topic: str, options: ClientOptions) -> None:
        self._topic = check_topic(topic)
        self._options = options
        self._producers: dict[str, Producer] = {}

    def put(self, parcel: Parcel, error: str, kept: Kept) -> None:
        """Publish the messages as they came, not as they would have been sent."""

        def settled(publication: Publication) -> None:
            if publication.error is not None:
                log.warning("dead letters for %s: %s", self._topic, publication.error)
            kept(parcel, publication.error is None)

        nsqd = parcel.messages.nsqd
        if nsqd not in self._producers:
            self._producers[nsqd] = Producer(nsqd, self._options)
        bodies = [message.body for message in parcel.messages]
        try:
            self._producers[nsqd].submit(self._topic, bodies, on_settled=settled)
        except (PublishError, ConfigurationError) as exc:  # no room, or too large
            log.warning("dead letters for %s: %s", self._topic, exc)
            kept(parcel, False)

    def close(self) -> None:
        """Wait for what is under way."""
        for producer in self._producers.values():
            producer.stop(self._options.publish_timeout_s)


class DeadLetterFile:
    """Appends lines to a file, each on disk before its message is finished.

    Raises `OutputError` when the file cannot be opened. A line that a crash tore is ended first.
    Several processes may share a file: it is locked while one writes, because what could not be
    written whole is cut off again, and nothing of another's must be.
    """

    def __init__(self, path: Path) -> None:
        self._path = path
        self._lock = threading.Lock()
        try:
            self._fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC, 0o600)
            with locked(self._fd):
                self._end_torn_line()
            sync_folder(path.parent)
        except OSError as exc:
            raise OutputError(f"cannot write {path} ({exc.strerror})") from exc

    def _end_torn_line(self) -> None:
        size = os.fstat(self._fd).st_size
        if size and os.pread(self._fd, 1, size - 1) != b"\n":
            os.write(self._fd, b"\n")

    def put(self, parcel: Parcel, error: str, kept: Kept) -> None:
        """Write the messages as they came, with the reason."""
        messages, now_ns = parcel.messages, time.time_ns()
        lines = b"".join(
            encode_dead_letter(
                messages.topic, messages.nsqd, message, error=error, failed_at_ns=now_ns
            )
            for message in messages
        )
        try:
            with self._lock, locked(self._fd):
                self._append(lines)
        except OSError as exc:
            log.error("cannot write %s (%s)", self._path, exc.strerror)
            kept(parcel, False)
        else:
            kept(parcel, True)

    def _append(self, lines: bytes) -> None:
        start = os.fstat(self._fd).st_size
        try:
            write_all(self._fd, lines)
            os.fdatasync(self._fd)
        except OSError:
            os.ftruncate(self._fd, start)  # or what follows would be glued to half a line
            raise

    def close(self) -> None:
        """Close the file."""
        os.close(self._fd)


def check_dead_letters(topic: str | None, sources: tuple[str, ...]) -> None:
    """Refuse a topic of dead letters that would be forwarded again. Raises
    `ConfigurationError`."""
    if topic is not None and topic in sources:
        raise ConfigurationError(f"dead letters cannot go to {topic}, which is forwarded")
