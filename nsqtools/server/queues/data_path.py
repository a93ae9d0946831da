"""The data directory of an nsqd: its lock, and nsqd.dat, which lists topics and channels.

Only one nsqd, of either kind, works in a directory at a time.

nsqd.dat is read at the start and written when topics and channels change. Many changes in a short
time are few writes, which happen on a thread. What the file says of a topic is encoded once, until
that topic changes: with 10,000 topics all of them would hold up the loop.

``nsqd.dat.previous`` is what the file was before its last change. It is read, with the names of
the queue files, when a fault of the disk or another program broke the file itself.
"""

from __future__ import annotations

import errno
import json
import os
from asyncio import AbstractEventLoop
from collections.abc import Callable, Iterable, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

from nsqtools.errors import ConfigurationError
from nsqtools.files.durable import NewestContent, temporary_beside
from nsqtools.files.opening import try_lock
from nsqtools.protocol.text import go_json
from nsqtools.server.daemon_log import NSQ_VERSION, DaemonLog
from nsqtools.server.queues.queue_files import DiskThread, queues_with_files
from nsqtools.server.queues.topic import Topic

_DELAY_S = 0.02


class TopicList:
    """The file, for ``topics`` by name. Nothing is written before `begin`."""

    def __init__(
        self,
        data_path: Path,
        topics: Mapping[str, Topic],
        loop: AbstractEventLoop,
        log: DaemonLog,
    ) -> None:
        self._data_path = data_path
        self._path = data_path / FILE_NAME
        self._previous = data_path / f"{FILE_NAME}.previous"
        self._topics = topics
        self._loop = loop
        self._log = log
        self._file = NewestContent(self._path, 0o600)
        self._encoded: dict[str, bytes] = {}  # by topic, until it changes
        self._thread = DiskThread(loop)  # its own: this waits for no queue
        self._is_due = False
        self._is_begun = False
        self._took_s = 0.0

    def read(self) -> Queues:
        """Return what the file lists, or in place of a broken one the previous and queue files.

        Raises `ConfigurationError` when there are none.
        """
        try:
            return decode_metadata(self._path.read_bytes())
        except FileNotFoundError:
            return {}
        except (ValueError, RecursionError) as exc:
            found = dict.fromkeys(queues_with_files(self._data_path, with_meta=True), False)
            with suppress(OSError, ValueError, RecursionError):
                found |= decode_metadata(self._previous.read_bytes())
            if not found:
                raise ConfigurationError(
                    f"failed to parse metadata in {self._path} - {exc}"
                ) from exc
            self._path.replace(self._path.with_name(f"{FILE_NAME}.broken"))
            self._log.error(
                f"failed to parse metadata in {self._path} - {exc}; it is kept as "
                f"{FILE_NAME}.broken, and topics and channels are those that were there before its "
                f"last change, or have queue files: {' '.join(sorted(found))}. Create others "
                "again before a client publishes"
            )
            return found

    def begin(self) -> None:
        """Write the file now, and from now on at each change. Raises ``OSError``."""
        self._is_begun = True
        self.write()

    def write(self) -> None:
        """Write the file now. Raises ``OSError``."""
        self._work()()

    async def write_pause(self, topic_name: str) -> None:
        """Write it after a topic, or a channel of it, was paused. Raises ``OSError``."""
        self._encoded.pop(topic_name, None)
        await self._thread.wait_for(self._work())

    def changed(self, topic_name: str, *, is_ephemeral: bool) -> None:
        """Write it soon: a topic, or a channel of it, was created or deleted."""
        self._encoded.pop(topic_name, None)
        if self._is_begun and not (is_ephemeral or self._is_due):
            self._is_due = True
            # what takes long is written less often
            self._loop.call_later(max(_DELAY_S, self._took_s), self._write_behind)

    def _write_behind(self) -> None:
        if not self._is_due:
            return
        started_s = self._loop.time()

        def done(error: OSError | None) -> None:
            self._took_s = self._loop.time() - started_s
            if error is not None:
                self._log.error(f"failed to persist metadata - {error}")

        self._thread.run(self._work(), done)

    def _work(self) -> Callable[[], None]:
        """Return the work that writes what holds now."""
        self._is_due = False
        self._log.info(f"NSQ: persisting topic/channel metadata to {self._path}")
        encoded = [
            self._encoded.get(topic.name) or self._encode(topic)
            for topic in self._topics.values()
            if not topic.is_ephemeral
        ]
        number = self._file.number()

        def work() -> None:
            self._keep_previous()
            self._file.write(encode_metadata(encoded), number)

        return work

    def _keep_previous(self) -> None:
        """Give the file its second name; without hard links there is no previous one."""
        beside = temporary_beside(self._previous)
        try:
            os.link(self._path, beside)
            beside.replace(self._previous)
        except OSError:
            pass
        finally:
            beside.unlink(missing_ok=True)  # it stays when it was the previous one already

    def _encode(self, topic: Topic) -> bytes:
        kept = (each for each in topic.channels.values() if not each.is_ephemeral)
        channels = [(each.name, each.is_paused) for each in kept]
        encoded = self._encoded[topic.name] = encode_topic(topic.name, topic.is_paused, channels)
        return encoded

    def end(self) -> None:
        """Finish what is being written, and write nothing by itself any more."""
        self._is_due = self._is_begun = False
        self._thread.end()


def lock_data_path(data_path: Path) -> int:
    """Return a descriptor with an exclusive flock on the directory itself, until it is closed.

    Raises `ConfigurationError` when the directory is missing or in use.
    """
    try:
        descriptor = os.open(data_path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    except OSError as exc:
        reason = (exc.strerror or "").lower()
        raise ConfigurationError(
            f"failed to lock data-path: open {data_path}: {reason}",
            hint="--data-path must be a directory that exists.",
        ) from exc
    try:
        reason = "" if try_lock(descriptor) else os.strerror(errno.EAGAIN)
    except OSError as exc:
        reason = exc.strerror or str(exc)
    if reason:
        os.close(descriptor)
        raise ConfigurationError(
            f"failed to lock data-path: cannot flock directory {data_path} - "
            f"{reason.lower()} (possibly in use by another instance of nsqd)",
            hint="Stop the other nsqd, or give this one its own --data-path.",
        )
    return descriptor


FILE_NAME = "nsqd.dat"


Queues = dict[str, bool]
"""Whether a queue is paused, by ``TOPIC`` and ``TOPIC:CHANNEL``."""


def encode_topic(name: str, is_paused: bool, channels: Iterable[tuple[str, bool]]) -> bytes:
    """Return what the file says of a topic with its channels, each as (name, is paused)."""
    listed = [{"name": channel, "paused": paused} for channel, paused in channels]
    return go_json({"name": name, "paused": is_paused, "channels": listed or None})


def encode_metadata(topics: Iterable[bytes]) -> bytes:
    """Return the content of the file, as nsqd writes it, from what `encode_topic` returned."""
    listed = b",".join(topics)
    topics_json = b"[%b]" % listed if listed else b"null"
    return b'{"topics":%b,"version":%b}' % (topics_json, go_json(NSQ_VERSION))


def decode_metadata(content: bytes) -> Queues:
    """Read the content of the file. Raises ``ValueError`` when it is not what nsqd writes."""
    document = json.loads(content)
    if not isinstance(document, dict):
        raise ValueError("not an object")
    found: Queues = {}
    for topic in _objects(document, "topics"):
        found[_name(topic)] = topic.get("paused") is True
        for channel in _objects(topic, "channels"):
            found[f"{_name(topic)}:{_name(channel)}"] = channel.get("paused") is True
    return found


def _objects(parent: dict[str, Any], key: str) -> list[dict[str, Any]]:
    found = parent.get(key) or []
    if not isinstance(found, list) or not all(isinstance(item, dict) for item in found):
        raise ValueError(f"{key} is not a list of objects")
    return found


def _name(item: dict[str, Any]) -> str:
    name = item.get("name", "")
    if not isinstance(name, str):
        raise ValueError("a name is not a string")
    return name
