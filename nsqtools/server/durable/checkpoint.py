"""Begin a new log with what lives, so that the old one can go.

Queue by queue, its positions on disk and the messages that it has in memory are written, while
clients are served. When that and the queue files are on disk, the new segment is the first one that
counts, and the old ones and the queue files that were read are removed.
"""

from __future__ import annotations

from asyncio import AbstractEventLoop, sleep
from collections.abc import Callable, Iterable, Iterator
from itertools import chain
from pathlib import Path
from typing import NamedTuple

from nsqtools.server.daemon_log import DaemonLog
from nsqtools.server.durable.journal import QueueJournal
from nsqtools.server.durable.log import DurableLog
from nsqtools.server.durable.records import Kept, Stage
from nsqtools.server.loop_meter import STEP_S
from nsqtools.server.queues.logged_disk_queue import LoggedDiskQueue, sync_files
from nsqtools.server.queues.queue_files import DiskThread, Positions

MIN_LOG_BYTES = 64 << 20
_LOOK_S = 1.0
_WRITE_BYTES = 4 << 20  # before waiting for the log
_RECORD_BYTES = 1 << 18


class InMemory(NamedTuple):
    """What a queue holds in memory, at one moment: messages, and when they are due."""

    waiting: list[bytes]
    in_flight: list[bytes]
    deferred: list[tuple[bytes, int]]


class DurableQueue(NamedTuple):
    """A queue to write down; ``in_memory`` is called in the moment in which it is."""

    journal: QueueJournal
    in_memory: Callable[[], InMemory]


class Checkpoints:
    """Makes one when the log has grown to twice what it kept the last time."""

    def __init__(
        self,
        durable: DurableLog,
        queues: Callable[[], Iterable[DurableQueue]],
        loop: AbstractEventLoop,
        thread: DiskThread,
        log: DaemonLog,
    ) -> None:
        self.count = 0
        self._durable = durable
        self._queues = queues
        self._loop = loop
        self._thread = thread
        self._log = log
        self._kept_bytes = 0

    async def run(self) -> None:
        """Look whether one is due, until cancelled."""
        while True:
            await sleep(_LOOK_S)
            grown = self._durable.written_bytes >= max(MIN_LOG_BYTES, 3 * self._kept_bytes)
            if grown or self._durable.needs_checkpoint:
                try:
                    await self.make()
                except OSError as exc:
                    self._log.error(f"DURABLE: failed to make a checkpoint - {exc}")

    async def make(self) -> None:
        """Write down what lives, and remove the old log. Raises ``OSError``."""
        durable = self._durable
        durable.needs_checkpoint = False
        durable.roll()
        first = durable.segment
        to_sync: list[Path] = []
        disks: list[tuple[LoggedDiskQueue, Positions]] = []
        self._kept_bytes = 0
        try:
            for queue in self._queues():
                disk = queue.journal.disk
                to_sync += disk.unsynced_files()
                disks.append((disk, disk.positions))
                await self._write_down(queue)
            await durable.flush()
            await self._thread.wait_for(lambda: sync_files(to_sync))
            await durable.thread.wait_for(lambda: durable.files.begin_at(first))
        except BaseException:
            durable.needs_checkpoint = True
            raise
        for disk, positions in disks:
            disk.checkpointed(positions)
        self.count += 1

    async def _write_down(self, queue: DurableQueue) -> None:
        journal, number = queue.journal, queue.journal.number
        held = queue.in_memory()
        journal.stand_here()
        records = chain(
            _kept(number, Stage.WAITING, held.waiting),
            _kept(number, Stage.IN_FLIGHT, held.in_flight),
            (Kept(number, Stage.DEFERRED, due_ns, frame) for frame, due_ns in held.deferred),
        )
        until_s = self._loop.time() + STEP_S
        for record in records:
            self._durable.append(record)
            self._kept_bytes += len(record.frames)
            if self._durable.waiting_bytes >= _WRITE_BYTES:
                await self._durable.flush()
            elif self._loop.time() >= until_s:
                await sleep(0)
            else:
                continue
            until_s = self._loop.time() + STEP_S


def _kept(number: int, stage: Stage, messages: list[bytes]) -> Iterator[Kept]:
    frames: list[bytes] = []
    size = 0
    for message in messages:
        frames.append(message)
        size += len(message)
        if size >= _RECORD_BYTES:
            yield Kept(number, stage, 0, b"".join(frames))
            frames, size = [], 0
    if frames:
        yield Kept(number, stage, 0, b"".join(frames))
