"""The queues of one nsqd: its topics, their files, and the tasks that write them.

This module has no sockets: the TCP and HTTP servers call it. Creating or deleting a topic or a
channel schedules a write of nsqd.dat, and many changes in a short time share one write. These
writes and the periodic syncs run on threads, so that the loop can serve clients meanwhile.

The entry of a topic in nsqd.dat is encoded again only when that topic has changed, because encoding
10,000 topics would block the loop. ``nsqd.dat.previous`` is the file before its last change. It is
read, together with the names of the queue files, when nsqd.dat itself is damaged.
"""

from __future__ import annotations

import errno
import gc
import os
import time
from asyncio import AbstractEventLoop, Event, Task, sleep
from collections.abc import Callable, Mapping
from contextlib import suppress
from math import inf
from pathlib import Path
from typing import TYPE_CHECKING

from nsqtools.errors import ConfigurationError
from nsqtools.files.durable import NewestContent, remove_temporaries, temporary_path, unused_name
from nsqtools.protocol.names import is_valid_name
from nsqtools.server.daemon_log import DaemonLog
from nsqtools.server.durable_path import DurablePath
from nsqtools.server.durable_store import DurableBacklog, DurableStore
from nsqtools.server.options import NsqdOptions
from nsqtools.server.queues.channel import Channel
from nsqtools.server.queues.data_path import (
    FILE_NAME,
    Queues,
    decode_metadata,
    encode_metadata,
    encode_topic,
    read_metadata,
)
from nsqtools.server.queues.disk_queue import DiskQueue
from nsqtools.server.queues.message_buffer import (
    NO_CHANNEL,
    ChannelCallbacks,
    DiskHealth,
    QueueBacklog,
)
from nsqtools.server.queues.queue_files import DiskThread, queues_with_files
from nsqtools.server.queues.topic import Topic

if TYPE_CHECKING:
    from nsqtools.server.lookup_peers import LookupRegistry

# Changes within this time are one write of nsqd.dat: a client that creates 1,000 topics does not
# cause 1,000 writes.
_WRITE_DELAY_S = 0.02
_RETRY_S = 1.0  # after a failed write; each failure is an error in the log
# Queues created since the last `gc.freeze`. At 50 ms for 3,000, collecting these takes 3 ms.
_FREEZE_EVERY = 200
# Between two checks of free space. Publishes in this time may exceed the limit.
_CHECK_SPACE_S = 0.5
_FULL = (errno.ENOSPC, errno.EDQUOT)


class TopicList:
    """Reads and writes nsqd.dat, the list of topics and channels.

    With --durable nothing is written, because the database has its own list.
    """

    def __init__(
        self, data_path: Path, topics: Mapping[str, Topic], loop: AbstractEventLoop, log: DaemonLog
    ) -> None:
        self._data_path = data_path
        self._path = data_path / FILE_NAME
        self._previous = data_path / f"{FILE_NAME}.previous"
        self._topics = topics
        self._loop = loop
        self._log = log
        self._file = NewestContent(self._path)
        self._encoded: dict[str, bytes] = {}  # by topic, until the topic changes
        # Separate from the thread of the queues, so that a slow sync does not delay this file.
        self._thread = DiskThread(loop)
        self._is_changed = Event()

    def read(self) -> Queues:
        """Return the queues that the file lists.

        If the file is damaged, return the queues of the previous file and of the queue files.
        Raises `ConfigurationError` when there are none.
        """
        try:
            return decode_metadata(read_metadata(self._path), self._log.warn)
        except FileNotFoundError:
            return {}
        except (ValueError, RecursionError) as exc:
            queues = dict.fromkeys(queues_with_files(self._data_path), False)
            with suppress(OSError, ValueError, RecursionError):
                queues |= decode_metadata(read_metadata(self._previous))
            if not queues:
                raise ConfigurationError(
                    f"failed to parse metadata in {self._path} - {exc}"
                ) from exc
            broken = unused_name(self._path.with_name(f"{FILE_NAME}.broken"))
            self._path.rename(broken)
            self._log.error(
                f"failed to parse metadata in {self._path} - {exc}; it is kept as {broken.name}, "
                "and the topics and channels are restored from the previous file and the queue "
                f"files: {' '.join(sorted(queues))}. Create missing ones before a client publishes"
            )
            return queues

    def write(self) -> None:
        """Write the file now. Raises ``OSError``."""
        self._prepare_write()()

    async def write_pause(self, topic_name: str) -> None:
        """Write the file after a topic, or a channel of it, was paused or unpaused."""
        self._encoded.pop(topic_name, None)
        try:
            await self._thread.wait_for(self._prepare_write())
        except OSError as exc:
            self._retry_write(exc)

    def changed(self, topic_name: str, *, is_ephemeral: bool) -> None:
        """Schedule a write: a topic, or a channel of it, was created or deleted."""
        self._encoded.pop(topic_name, None)
        if not is_ephemeral:
            self._is_changed.set()

    async def write_changes(self) -> None:
        """Write the file shortly after each change, until cancelled."""
        wait_s = _WRITE_DELAY_S
        while True:
            await self._is_changed.wait()
            await sleep(wait_s)
            started_s = self._loop.time()
            try:
                await self._thread.wait_for(self._prepare_write())
            except OSError as exc:
                self._retry_write(exc)
                wait_s = _RETRY_S
            else:
                # On a slow disk, write during at most half of the time.
                wait_s = max(_WRITE_DELAY_S, self._loop.time() - started_s)

    def _retry_write(self, exc: OSError) -> None:
        self._log.error(f"failed to persist metadata - {exc}")
        self._is_changed.set()

    def _prepare_write(self) -> Callable[[], None]:
        """Return a function that writes the current list, and may run on another thread."""
        self._is_changed.clear()
        self._log.info(f"NSQ: persisting topic/channel metadata to {self._path}")
        encoded = [
            self._encoded.get(topic.name) or self._encode(topic)
            for topic in self._topics.values()
            if not topic.is_ephemeral
        ]
        number = self._file.number()

        def write() -> None:
            self._keep_previous()
            self._file.write(encode_metadata(encoded), number)

        return write

    def _keep_previous(self) -> None:
        """Link the file as the previous one. A file system without hard links gets none."""
        with suppress(OSError), temporary_path(self._previous) as temporary:
            os.link(self._path, temporary)
            # Has no effect when both names are links to the same file already.
            temporary.replace(self._previous)

    def _encode(self, topic: Topic) -> bytes:
        channels = [
            (channel.name, channel.is_paused)
            for channel in topic.channels.values()
            if not channel.is_ephemeral
        ]
        encoded = self._encoded[topic.name] = encode_topic(topic.name, topic.is_paused, channels)
        return encoded

    def end(self) -> None:
        """Finish the write that is in progress."""
        self._thread.end()


class NsqdQueues:
    """All topics of one daemon. Call `load` before use and `close` at the end.

    Args:
        topics: Filled here, and shared with ``registry``.
        refusal: The error of publishes, for the nsqd of a job. Such an nsqd redelivers as few
            messages as possible after a kill.
    """

    def __init__(
        self,
        options: NsqdOptions,
        loop: AbstractEventLoop,
        log: DaemonLog,
        topics: dict[str, Topic],
        registry: LookupRegistry,
        *,
        refusal: str = "",
    ) -> None:
        self.options = options
        self.log = log
        self.loop = loop
        self.health = DiskHealth(options, self._spare_bytes)
        # New queues until the next `gc.freeze`. Never, while the daemon shares its process.
        self._until_freeze = inf
        self.topics = topics
        # Topics by the lines of PUB and MPUB that name them: at most four for each topic.
        self.publish_lines: dict[bytes, Topic] = {}
        self.start_time_s = time.time()
        self.registry = registry
        self.refusal = refusal
        self._data_path = Path(options.data_path)
        self._queues_with_files: dict[str, list[int]] = {}  # at the time of `load`
        self.topic_list = TopicList(self._data_path, self.topics, loop, log)
        self.disk_thread = DiskThread(loop)
        self._to_sync: set[DiskQueue] = set()
        self._tasks: list[Task[None]] = []
        self.durable: DurableStore | None = None

    def _spare_bytes(self) -> int:
        return self.durable.database.spare_bytes() if self.durable is not None else 0

    # topics

    def get_topic(self, name: str) -> Topic:
        """Return the topic, and create it if necessary. The name must be valid."""
        topic = self.topics.get(name)
        if topic is None:
            topic = self._create(name)
            self.registry.topic_created(topic)
        return topic

    def _create(self, name: str) -> Topic:
        topic = self.topics[name] = Topic(name, self)
        self.log.info(f"TOPIC({name}): created")
        self.topic_list.changed(name, is_ephemeral=topic.is_ephemeral)
        return topic

    def delete_topic(self, name: str) -> None:
        """Delete a topic with its channels and messages. Raises ``KeyError``."""
        topic = self.topics.pop(name)
        self.publish_lines.clear()
        self.log.info(f"TOPIC({name}): deleting")
        self.registry.topic_deleted(topic)
        topic.delete()
        self.topic_list.changed(name, is_ephemeral=topic.is_ephemeral)

    def backlog(
        self, queue_name: str, is_ephemeral: bool, callbacks: ChannelCallbacks = NO_CHANNEL
    ) -> QueueBacklog:
        """Return a new backlog for the queue of a topic or a channel."""
        options = self.options
        self._until_freeze -= 1
        if not self._until_freeze:
            self.freeze_growth()
        if is_ephemeral:
            return QueueBacklog(options.mem_queue_size, None, self.health, callbacks)
        if self.durable is not None:
            return DurableBacklog(options.mem_queue_size, self.durable, queue_name, callbacks)
        disk = DiskQueue(
            queue_name,
            self._data_path,
            max_bytes_per_file=options.max_bytes_per_file,
            max_msg_size=options.max_msg_size,
            sync_every=options.sync_every,
            log=self.log,
            existing=self._queues_with_files,
            background=self.disk_thread,
            on_dirty=lambda queue: self._to_sync.add(queue),
        )
        return QueueBacklog(options.mem_queue_size, disk, self.health, callbacks)

    async def write_pause(self, topic_name: str) -> None:
        """Persist that a topic, or a channel of it, was paused or unpaused.

        With ``--durable`` a failure raises ``OSError``. Otherwise it is logged, as in the Go nsqd,
        and the state lasts until a restart.
        """
        if self.durable is None:
            await self.topic_list.write_pause(topic_name)
            return
        topic = self.topics[topic_name]
        queues: list[Topic | Channel] = [topic, *topic.channels.values()]
        for queue in queues:
            if isinstance(queue.backlog, DurableBacklog):
                queue.backlog.is_paused = queue.is_paused
                self.durable.note_queue(queue.backlog)
        await self.durable.flush()

    def channel_created(self, channel: Channel) -> None:
        """Register the channel with nsqlookupd and list it in nsqd.dat."""
        self.registry.channel_created(channel)
        self.topic_list.changed(channel.topic_name, is_ephemeral=channel.is_ephemeral)

    def channel_deleted(self, channel: Channel) -> None:
        """Unregister the channel. An ephemeral topic is deleted with its last channel."""
        self.registry.channel_deleted(channel)
        topic = self.topics.get(channel.topic_name)  # None while the topic is being deleted
        if topic is not None and topic.is_ephemeral and not topic.channels:
            self.delete_topic(topic.name)
        self.topic_list.changed(channel.topic_name, is_ephemeral=channel.is_ephemeral)

    def freeze_growth(self) -> None:
        """Exclude the queues from garbage collections: one over 3,000 topics takes 50 ms."""
        gc.freeze()
        self._until_freeze = _FREEZE_EVERY

    # files

    def load(self) -> None:
        """Create the topics and channels of the data path, and start the periodic tasks.

        Raises `ConfigurationError` as `TopicList.read`, and ``OSError`` when nsqd.dat cannot be
        written.
        """
        remove_temporaries(self._data_path)
        files = DurablePath(self._data_path, self.log)
        if self.options.durable:
            self.durable = DurableStore(
                files,
                self.options,
                self.health,
                self.loop,
                self.log,
                is_strict=bool(self.refusal),
            )
            self._create_all(self.durable.listed())
        else:
            files.refuse()
            self._load_files()
        if self.options.min_disk_free or self.options.durable:
            self._tasks.append(self.loop.create_task(self._watch_free_space()))

    def _load_files(self) -> None:
        listed = self.topic_list.read()
        self._queues_with_files = queues_with_files(self._data_path)
        self._create_all(listed)
        try:
            self.topic_list.write()
        except OSError as exc:
            if exc.errno not in _FULL:
                raise
            # A full disk must not keep nsqd from starting: the file that was read is still right.
            self.log.error(f"failed to persist metadata - {exc}")
        for task in (self.topic_list.write_changes(), self._sync_periodically()):
            self._tasks.append(self.loop.create_task(task))

    def _create_all(self, listed: Queues) -> None:
        for queue_name, is_paused in sorted(listed.items()):  # each topic before its channels
            name, _, channel = queue_name.partition(":")
            if not is_valid_name(name):
                self.log.warn(f"skipping creation of invalid topic {name}")
                continue
            topic = self.topics.get(name) or self._create(name)
            if not channel:
                topic.is_paused = is_paused
            elif is_valid_name(channel):
                topic.get_channel(channel).is_paused = is_paused
            else:
                self.log.warn(f"skipping creation of invalid channel {channel}")
        for topic in self.topics.values():
            # The list has all channels, so nsqlookupd need not be asked for them.
            topic.start()

    async def _watch_free_space(self) -> None:
        while True:
            self.health.check_free_space()
            await sleep(_CHECK_SPACE_S)

    async def _sync_periodically(self) -> None:
        while True:
            await sleep(self.options.sync_timeout)
            due, self._to_sync = self._to_sync, set()
            for disk in due:
                if disk.needs_sync:
                    disk.start_sync()
                    # Wait for each sync, so that other work of the disk thread waits for one only.
                    await self.disk_thread.wait_for(lambda: None)

    async def close(self) -> bool:
        """Write nsqd.dat and all unfinished messages to disk; return whether that succeeded."""
        is_whole = True
        if self.durable is not None:
            # On a failure the publishers have got their errors already.
            with suppress(OSError):
                await self.durable.flush()
            self.durable.close()
        self.abandon()
        if self.durable is None:
            try:
                self.topic_list.write()
            except OSError as exc:
                self.log.error(f"failed to persist metadata - {exc}")
                is_whole = False
        self.log.info("NSQ: closing topics")
        # A list and not a generator: a failure must not keep the other topics from closing.
        closed = [topic.close() for topic in self.topics.values()]
        return is_whole and all(closed)

    def abandon(self) -> None:
        """Stop the periodic tasks and write nothing, as after a kill."""
        for task in self._tasks:
            task.cancel()
        self.disk_thread.end()
        self.topic_list.end()
        if self.durable is not None:
            self.durable.abandon()
