"""The log on disk: numbered segments, and one sync for all publishes of a moment.

Records are collected on the loop and written by a thread. While it syncs, the publishes of the next
moment collect: with many publishers a sync serves them all, whatever topics they publish to. What
nobody waits for is written after a few milliseconds, without a sync: that survives a kill.

``nsqd.durable.start`` holds the number of the first segment that counts. It is replaced when a
checkpoint is complete, so a kill at any moment finds one whole log.

Traps: when a write fails, the publishes in it are refused, but the other records must not get lost,
because later ones refer to them: they are written again. After a failed sync nobody knows what the
disk has, so `needs_checkpoint` asks for a new log.
"""

from __future__ import annotations

import os
import re
from asyncio import AbstractEventLoop, Future, TimerHandle
from collections.abc import Callable
from pathlib import Path

from nsqtools.files.durable import replace_file, sync_folder
from nsqtools.files.opening import open_to_write
from nsqtools.server.daemon_log import DaemonLog
from nsqtools.server.durable.records import Published, Record, encode_block, encode_record
from nsqtools.server.queues.queue_files import DiskThread

_SEGMENT = re.compile(r"nsqd\.durable\.(\d{6,})\.log")
_START = "nsqd.durable.start"
_DELAY_S = 0.005  # for records that nobody waits for
_RETRY_S = 0.5

Confirmed = Callable[[OSError | None], None]


class LogFiles:
    """The segments in a data directory, and which of them count."""

    def __init__(self, data_path: Path) -> None:
        self._path = data_path

    def segment(self, number: int) -> Path:
        """Return the path of a segment."""
        return self._path / f"nsqd.durable.{number:06d}.log"

    def numbers(self) -> list[int]:
        """Return the segments that are there, also those that do not count. Raises ``OSError``."""
        found = (_SEGMENT.fullmatch(name) for name in os.listdir(self._path))
        return sorted(int(match[1]) for match in found if match)

    def start(self) -> int:
        """Return the first segment that counts. Raises ``OSError``, ``ValueError``."""
        try:
            return int((self._path / _START).read_text("ascii"))
        except FileNotFoundError:
            return 0

    def next_number(self) -> int:
        """Return a number that no segment has. Raises ``OSError``, ``ValueError``."""
        return max(self.start(), 1, *(number + 1 for number in self.numbers()))

    def living(self) -> list[Path]:
        """Return the segments that count. Raises ``OSError``, ``ValueError``."""
        start = self.start()
        return [self.segment(number) for number in self.numbers() if number >= start]

    def begin_at(self, number: int) -> None:
        """Let only segments from here on count, and remove the others. Raises ``OSError``."""
        replace_file(self._path / _START, b"%d\n" % number, 0o600)
        for older in self.numbers():
            if older < number:
                self.segment(older).unlink(missing_ok=True)

    def remove(self) -> None:
        """Remove the log: its messages are in queue files now. Raises ``OSError``."""
        if self.numbers():
            self.begin_at(self.next_number())
        (self._path / _START).unlink(missing_ok=True)
        sync_folder(self._path)


class DurableLog:
    """The log of a running nsqd. ``number`` is that of its first segment."""

    def __init__(
        self, files: LogFiles, number: int, loop: AbstractEventLoop, log: DaemonLog
    ) -> None:
        self.files = files
        self.segment = number
        self.written_bytes = 0  # since the segment began
        self.waiting_bytes = 0
        self.needs_checkpoint = False
        self._loop = loop
        self.thread = DiskThread(loop)  # its own: nothing else may come between
        self._log = log
        self._opened = 0  # the segment that is open
        self._descriptor = -1
        self._position = 0
        self._pending: list[tuple[bytes, bool]] = []  # and whether it is refused in a failure
        self._waiters: list[Confirmed] = []
        self._is_writing = self._is_due = False
        self._timer: TimerHandle | None = None
        self._last_queue = 0

    def next_queue_number(self) -> int:
        """Return a number that no queue has had."""
        self._last_queue += 1
        return self._last_queue

    def append(self, record: Record) -> None:
        """Write a record soon."""
        self._add(record)
        if self._timer is None and not self._is_due:
            self._timer = self._loop.call_later(_DELAY_S, self._write)

    def commit(self, record: Published | None, confirmed: Confirmed) -> None:
        """Write a record, and call back when it, and all before, is on disk, or failed."""
        if record is not None:
            self._add(record, is_refused=True)
        self._waiters.append(confirmed)
        if not self._is_due:
            self._is_due = True
            self._loop.call_soon(self._write)

    async def flush(self) -> None:
        """Wait until all that was appended is on disk. Raises ``OSError``."""
        done: Future[None] = self._loop.create_future()

        def confirmed(error: OSError | None) -> None:
            if not done.done():
                done.set_exception(error) if error is not None else done.set_result(None)

        self.commit(None, confirmed)
        await done

    def write_now(self) -> None:
        """Write and sync what was appended: before there are clients. Raises ``OSError``."""
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        pending, self._pending = self._pending, []
        self._write_block([encoded for encoded, _ in pending], self.segment, is_awaited=True)

    def roll(self) -> None:
        """Begin a new segment with the next write."""
        self.segment += 1

    def _add(self, record: Record, *, is_refused: bool = False) -> None:
        encoded = encode_record(record)
        self.waiting_bytes += len(encoded)
        self._pending.append((encoded, is_refused))

    def _write(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        if self._is_writing:
            return  # what is pending is written next
        pending, self._pending = self._pending, []
        waiters, self._waiters = self._waiters, []
        self._is_due = False
        if not (pending or waiters):
            return
        self._is_writing = True
        self.waiting_bytes = 0
        segment = self.segment

        def work() -> None:
            self._write_block([encoded for encoded, _ in pending], segment, bool(waiters))

        def done(error: OSError | None) -> None:
            self._is_writing = False
            if error is not None:
                self._log.error(f"DURABLE: failed to write the log - {error}")
                self.needs_checkpoint = True
                self._pending[:0] = [entry for entry in pending if not entry[1]]
            for confirmed in waiters:
                confirmed(error)
            if self._waiters:
                self._write()
            elif self._pending and self._timer is None:
                delay_s = _DELAY_S if error is None else _RETRY_S
                self._timer = self._loop.call_later(delay_s, self._write)

        self.thread.run(work, done)

    def _write_block(self, records: list[bytes], segment: int, is_awaited: bool) -> None:
        if self._descriptor < 0 or segment != self._opened:
            self._open(segment)
        block = encode_block(records) if records else b""
        try:
            done = 0
            while done < len(block):
                rest = memoryview(block)[done:]
                done += os.pwrite(self._descriptor, rest, self._position + done)
            if is_awaited:
                self.thread.sync(self._descriptor)
        except OSError:
            os.ftruncate(self._descriptor, self._position)
            raise
        self._position += len(block)
        self.written_bytes = self._position

    def _open(self, segment: int) -> None:
        path = self.files.segment(segment)
        descriptor = open_to_write(path, os.O_RDWR | os.O_CREAT)
        try:
            os.ftruncate(descriptor, 0)
            if self._descriptor >= 0:
                self.thread.sync(self._descriptor)
            sync_folder(path.parent)
        except OSError:
            os.close(descriptor)
            raise
        self.close()
        self._descriptor, self._opened, self._position = descriptor, segment, 0

    def end(self) -> None:
        """Finish what is being written; what was appended since is lost."""
        if self._timer is not None:
            self._timer.cancel()
        self.thread.end()
        self.close()

    def close(self) -> None:
        """Close the segment."""
        if self._descriptor >= 0:
            os.close(self._descriptor)
            self._descriptor = -1
