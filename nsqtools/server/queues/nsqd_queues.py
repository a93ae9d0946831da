"""The queues of one nsqd: its topics, their files, and what has to follow when they change.

No sockets: the TCP and HTTP sides call in here. Creating and deleting schedule a write of nsqd.dat;
many changes in a short time are few writes. What has to wait for the disk in regular operation, the
syncs by the clock and these writes, is done on a thread: the loop serves clients meanwhile.

What nsqd.dat says of a topic is encoded once, until that topic changes: with 10,000 topics all of
them would hold up the loop. ``nsqd.dat.previous`` is what the file was before its last change. It
is read, with the names of the queue files, when a fault of the disk or another program broke the
file itself.
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
from nsqtools.server.queues.message_buffer import DiskHealth, QueueBacklog
from nsqtools.server.queues.queue_files import DiskThread, queues_with_files
from nsqtools.server.queues.topic import Topic

if TYPE_CHECKING:
    from nsqtools.server.lookup_peers import LookupRegistry

_DELAY_S = 0.02  # before nsqd.dat is written
_RETRY_S = 1.0  # after it could not be written
_FREEZE_EVERY = 200
_LOOK_S = 0.5  # at the disk
_FULL = (errno.ENOSPC, errno.EDQUOT)


class TopicList:
    """The file, for ``topics`` by name. With --durable nothing is written: the database has its own
    list."""

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
        self._encoded: dict[str, bytes] = {}  # by topic, until it changes
        self._thread = DiskThread(loop)  # its own: this waits for no queue
        self._is_changed = Event()

    def read(self) -> Queues:
        """Return what the file lists, or in place of a broken one the previous and queue files.

        Raises `ConfigurationError` when there are none.
        """
        try:
            return decode_metadata(read_metadata(self._path), self._log.warn)
        except FileNotFoundError:
            return {}
        except (ValueError, RecursionError) as exc:
            found = dict.fromkeys(queues_with_files(self._data_path), False)
            with suppress(OSError, ValueError, RecursionError):
                found |= decode_metadata(read_metadata(self._previous))
            if not found:
                raise ConfigurationError(
                    f"failed to parse metadata in {self._path} - {exc}"
                ) from exc
            kept = unused_name(self._path.with_name(f"{FILE_NAME}.broken"))
            self._path.rename(kept)
            self._log.error(
                f"failed to parse metadata in {self._path} - {exc}; it is kept as "
                f"{kept.name}, and topics and channels are those that were there before its "
                f"last change, or have queue files: {' '.join(sorted(found))}. Create others "
                "again before a client publishes"
            )
            return found

    def write(self) -> None:
        """Write the file now. Raises ``OSError``."""
        self._work()()

    async def write_pause(self, topic_name: str) -> None:
        """Write it after a topic, or a channel of it, was paused."""
        self._encoded.pop(topic_name, None)
        try:
            await self._thread.wait_for(self._work())
        except OSError as exc:
            self._write_later(exc)

    def changed(self, topic_name: str, *, is_ephemeral: bool) -> None:
        """Note that a topic, or a channel of it, was created or deleted."""
        self._encoded.pop(topic_name, None)
        if not is_ephemeral:
            self._is_changed.set()

    async def write_behind(self) -> None:
        """Write the file a moment after each change, until cancelled."""
        wait_s = _DELAY_S
        while True:
            await self._is_changed.wait()
            await sleep(wait_s)
            started_s = self._loop.time()
            try:
                await self._thread.wait_for(self._work())
            except OSError as exc:
                self._write_later(exc)
                wait_s = _RETRY_S
            else:  # what takes long is written less often
                wait_s = max(_DELAY_S, self._loop.time() - started_s)

    def _write_later(self, exc: OSError) -> None:
        self._log.error(f"failed to persist metadata - {exc}")
        self._is_changed.set()

    def _work(self) -> Callable[[], None]:
        """Return the work that writes what holds now."""
        self._is_changed.clear()
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
        with suppress(OSError), temporary_path(self._previous) as beside:
            os.link(self._path, beside)
            beside.replace(self._previous)  # nothing, when it was that already

    def _encode(self, topic: Topic) -> bytes:
        kept = (each for each in topic.channels.values() if not each.is_ephemeral)
        channels = [(each.name, each.is_paused) for each in kept]
        encoded = self._encoded[topic.name] = encode_topic(topic.name, topic.is_paused, channels)
        return encoded

    def end(self) -> None:
        """Finish what is being written."""
        self._thread.end()


class NsqdQueues:
    """All topics of one daemon. Call `load` before use and `close` at the end."""

    def __init__(self, options: NsqdOptions, loop: AbstractEventLoop, log: DaemonLog) -> None:
        self.options = options
        self.log = log
        self.loop = loop
        self.health = DiskHealth(options)
        self._until_freeze = inf  # new queues
        self.topics: dict[str, Topic] = {}
        self.start_time_s = time.time()
        self.registry: LookupRegistry  # before `load`
        self._data_path = Path(options.data_path)
        self._queues_with_files: dict[str, list[int]] = {}  # when it was loaded
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
        self.topic_list.changed(name, is_ephemeral=topic.is_ephemeral)
        return topic

    def delete_topic(self, name: str) -> None:
        """Delete a topic with its channels and messages. Raises ``KeyError``."""
        topic = self.topics.pop(name)
        self.log.info(f"TOPIC({name}): deleting")
        self.registry.topic_deleted(topic)
        topic.delete()
        self.topic_list.changed(name, is_ephemeral=topic.is_ephemeral)

    def backlog(self, queue_name: str, is_ephemeral: bool) -> QueueBacklog:
        """Return what waits in the queue of a topic or a channel."""
        options = self.options
        self._until_freeze -= 1
        if not self._until_freeze:
            self.freeze_growth()
        if is_ephemeral:
            return QueueBacklog(options.mem_queue_size, None, self.health)
        if self.durable is not None:
            return DurableBacklog(options.mem_queue_size, self.durable, queue_name)
        disk = DiskQueue(
            queue_name,
            self._data_path,
            max_bytes_per_file=options.max_bytes_per_file,
            max_msg_size=options.max_msg_size,
            sync_every=options.sync_every,
            log=self.log,
            found=self._queues_with_files,
            background=self.disk_thread,
            on_dirty=lambda queue: self._to_sync.add(queue),
        )
        return QueueBacklog(options.mem_queue_size, disk, self.health)

    async def write_pause(self, topic_name: str) -> None:
        """Write that a topic, or a channel of it, was paused, or not.

        It holds if that fails, as in Go's nsqd. With ``--durable`` that raises ``OSError``.
        """
        if self.durable is None:
            await self.topic_list.write_pause(topic_name)
            return
        topic = self.topics[topic_name]
        queues: list[Topic | Channel] = [topic, *topic.channels.values()]
        for each in queues:
            if isinstance(each.backlog, DurableBacklog):
                each.backlog.is_paused = each.is_paused
                self.durable.note_queue(each.backlog)
        await self.durable.flush()

    def channel_created(self, channel: Channel) -> None:
        """Have it announced and listed."""
        self.registry.channel_created(channel)
        self.topic_list.changed(channel.topic_name, is_ephemeral=channel.is_ephemeral)

    def channel_deleted(self, channel: Channel) -> None:
        """Have it taken back; an ephemeral topic goes with its last channel."""
        self.registry.channel_deleted(channel)
        topic = self.topics.get(channel.topic_name)  # None while that is being deleted
        if topic is not None and topic.is_ephemeral and not topic.channels:
            self.delete_topic(topic.name)
        self.topic_list.changed(channel.topic_name, is_ephemeral=channel.is_ephemeral)

    def freeze_growth(self) -> None:
        """Leave the queues out of garbage collections: of 3,000 topics one takes 50 ms."""
        gc.freeze()
        self._until_freeze = _FREEZE_EVERY

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
        self._queues_with_files = queues_with_files(self._data_path)
        self._create_all(listed)
        try:
            self.topic_list.write()
        except OSError as exc:
            if exc.errno not in _FULL:
                raise
            self.log.error(f"failed to persist metadata - {exc}")  # what was read is still true
        for work in (self.topic_list.write_behind(), self._sync_by_the_clock()):
            self._tasks.append(self.loop.create_task(work))

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
                    disk.start_sync()
                    # one at a time: other work of the disk thread waits for one sync only
                    await self.disk_thread.wait_for(lambda: None)

    async def close(self) -> bool:
        """Write nsqd.dat and every message that is not finished to disk; return whether all is."""
        is_whole = True
        if self.durable is not None:
            with suppress(OSError):  # the publishers were told
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
        closed = [topic.close() for topic in self.topics.values()]  # all, whatever fails
        return is_whole and all(closed)

    def abandon(self) -> None:
        """Stop the timers and write nothing, as after a kill."""
        for task in self._tasks:
            task.cancel()
        self.disk_thread.end()  # what it has begun is finished
        self.topic_list.end()
        if self.durable is not None:
            self.durable.abandon()
