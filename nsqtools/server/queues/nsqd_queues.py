"""The queues of one nsqd: its topics, their files, and what has to follow when they change.

No sockets: the TCP and HTTP sides call in here. Creating and deleting schedule a write of nsqd.dat;
many changes in a short time are few writes. What has to wait for the disk in regular operation, the
syncs by the clock and these writes, is done on a thread: the loop serves clients meanwhile.
"""

from __future__ import annotations

import errno
import time
from asyncio import AbstractEventLoop, Future, Task, sleep
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Protocol

from nsqtools.errors import ConfigurationError
from nsqtools.files.durable import NewestContent, remove_temporaries
from nsqtools.protocol.names import is_ephemeral, is_valid_name
from nsqtools.server.daemon_log import DaemonLog
from nsqtools.server.queues.backlog import Backlog, DiskHealth
from nsqtools.server.queues.channel import Channel
from nsqtools.server.queues.data_path import (
    FILE_NAME,
    TopicMetadata,
    decode_metadata,
    encode_metadata,
    metadata_of_queues,
)
from nsqtools.server.queues.disk_queue import DiskQueue, queues_with_files
from nsqtools.server.queues.latency import LatencyWindow
from nsqtools.server.queues.queued_message import MessageIds
from nsqtools.server.queues.topic import Topic
from nsqtools.server.settings.nsqd_options import NsqdOptions

_PERSIST_DELAY_S = 0.02
_FULL = (errno.ENOSPC, errno.EDQUOT)


class Registry(Protocol):
    """Learns of topics and channels: the side that talks to nsqlookupd."""

    def topic_created(self, topic: Topic) -> None:
        """A topic is new; it must be started once its channels are known."""

    def topic_deleted(self, topic: Topic) -> None: ...
    def channel_created(self, channel: Channel) -> None: ...
    def channel_deleted(self, channel: Channel) -> None: ...


class Alone:
    """A registry for an nsqd without nsqlookupd."""

    def topic_created(self, topic: Topic) -> None:
        topic.start()

    def topic_deleted(self, topic: Topic) -> None:
        pass

    def channel_created(self, channel: Channel) -> None:
        pass

    def channel_deleted(self, channel: Channel) -> None:
        pass


class NsqdQueues:
    """All topics of one daemon. Call `load` before use and `close` at the end."""

    def __init__(self, options: NsqdOptions, loop: AbstractEventLoop, log: DaemonLog) -> None:
        self.options = options
        self.log = log
        self.loop = loop
        self.health = DiskHealth()
        self.topics: dict[str, Topic] = {}
        self.start_time_s = time.time()
        self.registry: Registry = Alone()
        self._data_path = Path(options.data_path)
        self._queues_with_files: set[str] = set()  # when it was loaded
        self._persist_scheduled = False
        self._is_loading = False
        self._metadata_file = NewestContent(self._data_path / FILE_NAME, 0o600)
        self._disk_thread = ThreadPoolExecutor(1, thread_name_prefix="nsqd-disk")
        self._syncing: Task[None] | None = None

    # topics

    def get_topic(self, name: str) -> Topic:
        """Return the topic, created if there was none. The name must be valid."""
        topic = self.topics.get(name)
        if topic is None:
            topic = self._create(name)
            self.registry.topic_created(topic)
        return topic

    def _create(self, name: str) -> Topic:
        topic = Topic(
            name,
            self._backlog(name, name),
            MessageIds(self.options.node_id),
            self.loop,
            self.log,
            self._make_channel,
        )
        topic.on_channel_created = self._channel_created
        topic.on_channel_deleted = self._channel_deleted
        self.topics[name] = topic
        self.log.info(f"TOPIC({name}): created")
        self._changed(topic.is_ephemeral)
        return topic

    def delete_topic(self, name: str) -> None:
        """Delete a topic with its channels and messages. Raises ``KeyError``, ``OSError``."""
        topic = self.topics.pop(name)
        self.log.info(f"TOPIC({name}): deleting")
        self.registry.topic_deleted(topic)
        try:
            topic.delete()
        finally:
            self._changed(topic.is_ephemeral)

    def _make_channel(self, topic_name: str, name: str) -> Channel:
        options = self.options
        percentiles = options.e2e_processing_latency_percentile
        return Channel(
            topic_name,
            name,
            self._backlog(f"{topic_name}:{name}", name),
            self.loop,
            self.log,
            latency=LatencyWindow(percentiles, options.e2e_processing_latency_window_time)
            if percentiles
            else None,
            max_consumers=options.max_channel_consumers,
        )

    def _backlog(self, queue_name: str, name: str) -> Backlog:
        options = self.options
        disk = None
        if not is_ephemeral(name):
            disk = DiskQueue(
                queue_name,
                self._data_path,
                max_bytes_per_file=options.max_bytes_per_file,
                max_msg_size=options.max_msg_size,
                sync_every=options.sync_every,
                log=self.log,
                may_have_files=queue_name in self._queues_with_files,
            )
        return Backlog(options.mem_queue_size, disk, self.health)

    def _channel_created(self, channel: Channel) -> None:
        self.registry.channel_created(channel)
        self._changed(channel.is_ephemeral)

    def _channel_deleted(self, channel: Channel) -> None:
        topic = self.topics.get(channel.topic_name)
        if topic is not None:  # else the topic itself is being deleted, and has been unregistered
            self.registry.channel_deleted(channel)
            if topic.is_ephemeral and not topic.channels:
                self.delete_topic(topic.name)
        self._changed(channel.is_ephemeral)

    # files

    def load(self) -> None:
        """Create what nsqd.dat lists, write it again, and begin to sync.

        One that is broken is replaced by the names of the queue files; without any it raises
        `ConfigurationError`. Raises ``OSError`` when nsqd.dat cannot be written.
        """
        metadata = self._read_metadata()
        remove_temporaries(self._data_path)
        self._queues_with_files = queues_with_files(self._data_path)
        self._is_loading = True
        for listed in metadata:
            self._load_topic(listed)
        self._is_loading = False
        try:
            self.persist()
        except OSError as exc:
            if exc.errno not in _FULL:
                raise
            self.log.error(f"failed to persist metadata - {exc}")  # what was read still stands
        self._syncing = self.loop.create_task(self._sync_by_the_clock())

    def _read_metadata(self) -> list[TopicMetadata]:
        path = self._data_path / FILE_NAME
        try:
            return decode_metadata(path.read_bytes())
        except FileNotFoundError:
            return []
        except (ValueError, RecursionError) as exc:
            found = metadata_of_queues(queues_with_files(self._data_path, with_meta=True))
            if not found:
                raise ConfigurationError(f"failed to parse metadata in {path} - {exc}") from exc
            path.replace(path.with_name(f"{FILE_NAME}.broken"))
            names = [":".join((t.name, *(name for name, _ in t.channels))) for t in found]
            self.log.error(
                f"failed to parse metadata in {path} - {exc}; it is kept as {FILE_NAME}.broken, "
                "and topics and channels are those that have queue files, none paused: "
                f"{' '.join(names)}. Create the others again before anybody publishes"
            )
            return found

    def _load_topic(self, listed: TopicMetadata) -> None:
        if not is_valid_name(listed.name):
            self.log.warn(f"skipping creation of invalid topic {listed.name}")
            return
        topic = self._create(listed.name)
        topic.is_paused = listed.is_paused
        for name, is_paused in listed.channels:
            if is_valid_name(name):
                topic.get_channel(name).is_paused = is_paused
            else:
                self.log.warn(f"skipping creation of invalid channel {name}")
        topic.start()

    def persist(self) -> None:
        """Write nsqd.dat now. Raises ``OSError``."""
        self._metadata_file.write(*self._next_metadata())

    def _next_metadata(self) -> tuple[bytes, int]:
        self._persist_scheduled = False
        path = self._data_path / FILE_NAME
        self.log.info(f"NSQ: persisting topic/channel metadata to {path}")
        return encode_metadata(list(self._metadata())), self._metadata_file.number()

    def _metadata(self) -> Iterator[TopicMetadata]:
        for topic in self.topics.values():
            if not topic.is_ephemeral:
                channels = tuple(
                    (channel.name, channel.is_paused)
                    for channel in topic.channels.values()
                    if not channel.is_ephemeral
                )
                yield TopicMetadata(topic.name, topic.is_paused, channels)

    def _changed(self, was_ephemeral: bool) -> None:
        if not (was_ephemeral or self._is_loading or self._persist_scheduled):
            self._persist_scheduled = True
            self.loop.call_later(_PERSIST_DELAY_S, self._try_persist)

    def _try_persist(self) -> None:
        if not self._persist_scheduled:
            return
        content, number = self._next_metadata()
        writing = self.loop.run_in_executor(
            self._disk_thread, self._metadata_file.write, content, number
        )
        writing.add_done_callback(self._persisted)

    def _persisted(self, writing: Future[None]) -> None:
        if not writing.cancelled() and (exc := writing.exception()) is not None:
            self.log.error(f"failed to persist metadata - {exc}")

    def _disks(self) -> Iterator[DiskQueue]:
        for topic in self.topics.values():
            backlogs = [topic.backlog, *(each.backlog for each in topic.channels.values())]
            yield from (backlog.disk for backlog in backlogs if backlog.disk is not None)

    async def _sync_by_the_clock(self) -> None:
        while True:
            await sleep(self.options.sync_timeout)
            for disk in [disk for disk in self._disks() if disk.needs_sync]:
                await self._sync(disk)

    async def _sync(self, disk: DiskQueue) -> None:
        try:
            work, done = disk.begin_sync()
            await self.loop.run_in_executor(self._disk_thread, work)
        except OSError as exc:
            self.log.error(f"DISKQUEUE({disk.name}) failed to sync - {exc}")
        else:
            done()

    def close(self) -> None:
        """Write nsqd.dat and every message that is not finished to disk."""
        self.abandon()
        try:
            self.persist()
        except OSError as exc:
            self.log.error(f"failed to persist metadata - {exc}")
        self.log.info("NSQ: closing topics")
        for topic in self.topics.values():
            topic.close()

    def abandon(self) -> None:
        """Stop the timers and write nothing, as after a kill."""
        self._persist_scheduled = False
        if self._syncing is not None:
            self._syncing.cancel()
        self._disk_thread.shutdown()  # what it has begun is finished
