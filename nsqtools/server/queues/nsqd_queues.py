"""The queues of one nsqd: its topics, their files, and what has to follow when they change.

No sockets: the TCP and HTTP sides call in here. Creating and deleting schedule a write of nsqd.dat;
many changes in a short time are few writes. What has to wait for the disk in regular operation, the
syncs by the clock and these writes, is done on a thread: the loop serves clients meanwhile.
"""

from __future__ import annotations

import errno
import gc
import time
from asyncio import AbstractEventLoop, Future, Task, sleep
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING

from nsqtools.files.durable import remove_temporaries
from nsqtools.protocol.names import is_valid_name
from nsqtools.server.daemon_log import DaemonLog
from nsqtools.server.durable_path import DurablePath
from nsqtools.server.durable_store import DurableStore
from nsqtools.server.options import NsqdOptions
from nsqtools.server.queues.backlog import DiskHealth, QueueBacklog
from nsqtools.server.queues.channel import Channel
from nsqtools.server.queues.data_path import Queues, TopicList
from nsqtools.server.queues.disk_queue import DiskQueue
from nsqtools.server.queues.queue_files import DiskThread, queues_with_files
from nsqtools.server.queues.topic import Topic

if TYPE_CHECKING:
    from nsqtools.server.lookup_peers import LookupRegistry

_FREEZE_EVERY = 200
_LOOK_S = 0.5  # at the disk
_FULL = (errno.ENOSPC, errno.EDQUOT)


class NsqdQueues:
    """All topics of one daemon. Call `load` before use and `close` at the end."""

    def __init__(self, options: NsqdOptions, loop: AbstractEventLoop, log: DaemonLog) -> None:
        self.options = options
        self.log = log
        self.loop = loop
        self.health = DiskHealth(options)
        self._made = 1  # queues
        self._frozen = 0  # of these, out of garbage collections; 0: none ever are
        self.topics: dict[str, Topic] = {}
        self.start_time_s = time.time()
        self.registry: LookupRegistry  # set before `load`
        self._data_path = Path(options.data_path)
        self._queues_with_files: set[str] = set()  # when it was loaded
        self.topic_list = TopicList(self._data_path, self.topics, loop, log)
        self.disk_thread = DiskThread(loop)
        self._to_sync: set[DiskQueue] = set()
        self._tasks: list[Task[None]] = []
        self.durable: DurableStore | None = None
        self.refusal = ""  # why clients may not publish: the nsqd of a job, which doubles little

    # topics

    def get_topic(self, name: str) -> Topic:
        """Return the topic, created if there was none. The name must be valid."""
        topic = self.topics.get(name)
        if topic is None:
            topic = self._create(name)
            self.registry.topic_created(topic)
        return topic

    def _create(self, name: str) -> Topic:
        topic = self.topics[name] = Topic(name, self)
        self.log.info(f"TOPIC({name}): created")
        self._list(name, is_ephemeral=topic.is_ephemeral)
        return topic

    def delete_topic(self, name: str) -> None:
        """Delete a topic with its channels and messages. Raises ``KeyError``."""
        topic = self.topics.pop(name)
        self.log.info(f"TOPIC({name}): deleting")
        self.registry.topic_deleted(topic)
        topic.delete()
        self._list(name, is_ephemeral=topic.is_ephemeral)

    def backlog(self, queue_name: str, is_ephemeral: bool) -> QueueBacklog:
        """Return what waits in the queue of a topic or a channel."""
        options = self.options
        self._note_growth()
        if is_ephemeral:
            return QueueBacklog(options.mem_queue_size, None, self.health)
        if self.durable is not None:
            return self.durable.backlog(queue_name, options.mem_queue_size)
        has_files = queue_name in self._queues_with_files
        self._queues_with_files.discard(queue_name)
        disk = DiskQueue(
            queue_name,
            self._data_path,
            max_bytes_per_file=options.max_bytes_per_file,
            max_msg_size=options.max_msg_size,
            sync_every=options.sync_every,
            log=self.log,
            may_have_files=has_files,
            behind=self.disk_thread,
            on_dirty=lambda queue: self._to_sync.add(queue),
        )
        return QueueBacklog(options.mem_queue_size, disk, self.health)

    def _list(self, topic_name: str, *, is_ephemeral: bool) -> None:
        """Write nsqd.dat soon; the database of --durable has its own list."""
        if self.durable is None:
            self.topic_list.changed(topic_name, is_ephemeral=is_ephemeral)

    async def write_pause(self, topic_name: str) -> None:
        """Write that a topic, or a channel of it, was paused, or not. Raises ``OSError``."""
        if self.durable is None:
            await self.topic_list.write_pause(topic_name)
            return
        topic = self.topics[topic_name]
        queues: list[Topic | Channel] = [topic, *topic.channels.values()]
        await self.durable.write_pauses([(each.backlog, each.is_paused) for each in queues])

    def channel_created(self, channel: Channel) -> None:
        """Have it announced and listed."""
        self.registry.channel_created(channel)
        self._list(channel.topic_name, is_ephemeral=channel.is_ephemeral)

    def channel_deleted(self, channel: Channel) -> None:
        """Have it taken back; an ephemeral topic goes with its last channel."""
        topic = self.topics.get(channel.topic_name)
        if topic is not None:  # else the topic itself is being deleted, and has been unregistered
            self.registry.channel_deleted(channel)
            if topic.is_ephemeral and not topic.channels:
                self.delete_topic(topic.name)
        self._list(channel.topic_name, is_ephemeral=channel.is_ephemeral)

    def freeze_growth(self) -> None:
        """Leave the queues out of garbage collections: of 3,000 topics one takes 50 ms."""
        gc.freeze()
        self._frozen = self._made

    def _note_growth(self) -> None:
        self._made += 1
        if self._frozen and self._made - self._frozen >= _FREEZE_EVERY:
            self.freeze_growth()

    # files

    def load(self) -> None:
        """Create what nsqd.dat lists, write it again, and begin to sync.

        One that is broken is replaced by the names of the queue files; without any it raises
        `ConfigurationError`. Raises ``OSError`` when nsqd.dat cannot be written.
        """
        remove_temporaries(self._data_path)
        files = DurablePath(self._data_path, self.log)
        if self.options.durable:
            self.durable = DurableStore(files, self.options, self.health, self.loop, self.log)
            if self.refusal:
                self.durable.is_strict = True
                self.durable.database.index_ids()
            self._create_all(self.durable.listed())
        else:
            files.refuse()
            self._load_files()
        if self.options.min_disk_free or self.options.durable:
            self._tasks.append(self.loop.create_task(self._look_at_disk()))

    def _load_files(self) -> None:
        listed = self.topic_list.read()
        self._queues_with_files = queues_with_files(self._data_path, with_meta=True)
        self._create_all(listed)
        try:
            self.topic_list.begin()
        except OSError as exc:
            if exc.errno not in _FULL:
                raise
            self.log.error(f"failed to persist metadata - {exc}")  # what was read is still true
        self._tasks.append(self.loop.create_task(self._sync_by_the_clock()))

    def _create_all(self, listed: Queues) -> None:
        for queue_name, is_paused in sorted(listed.items()):  # a topic is before its channels
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
            topic.start()

    async def _look_at_disk(self) -> None:
        while True:
            self.health.look_at_disk()
            await sleep(_LOOK_S)

    async def _sync_by_the_clock(self) -> None:
        while True:
            await sleep(self.options.sync_timeout)
            due, self._to_sync = self._to_sync, set()
            for disk in due:
                if disk.needs_sync:
                    await self._sync(disk)

    async def _sync(self, disk: DiskQueue) -> None:
        """Sync one queue at a time: other work of the disk thread waits for one sync only."""
        done: Future[None] = self.loop.create_future()

        def finished(_: OSError | None) -> None:
            if not done.done():
                done.set_result(None)

        disk.start_sync(finished)
        await done

    async def settle(self) -> None:
        """Wait for what is being written to the database of ``--durable``."""
        if self.durable is not None:
            with suppress(OSError):  # the publishers were told
                await self.durable.flush()

    def close(self) -> None:
        """Write nsqd.dat and every message that is not finished to disk."""
        if self.durable is not None:
            self.durable.close()
        self.abandon()
        if self.durable is None:
            try:
                self.topic_list.write()
            except OSError as exc:
                self.log.error(f"failed to persist metadata - {exc}")
        self.log.info("NSQ: closing topics")
        for topic in self.topics.values():
            topic.close()

    def abandon(self) -> None:
        """Stop the timers and write nothing, as after a kill."""
        for task in self._tasks:
            task.cancel()
        self.disk_thread.end()  # what it has begun is finished
        self.topic_list.end()
        if self.durable is not None:
            self.durable.abandon()
