"""Turn a log into queue files, as a stop in order would have left them.

For each queue: its files are cut back to where the log began, because what was written to them
since is in the log, too; what was read from them since is read again; and all messages that are not
finished are appended. Nothing is removed before all of it is on disk, so a recovery that is killed
begins again. When a message may be delivered (DPUB, REQ) has no place in Go's files: it stands in
``nsqd.deferred``, which Go ignores.
"""

from __future__ import annotations

import json
import os
import sys
import time
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import NamedTuple

from nsqtools.files.durable import replace_file
from nsqtools.server.daemon_log import DaemonLog
from nsqtools.server.durable.log import LogFiles
from nsqtools.server.durable.records import (
    Deferred,
    Delivered,
    Dropped,
    Finished,
    Kept,
    Published,
    QueueBegins,
    Record,
    Stage,
    decode_blocks,
)
from nsqtools.server.queues.logged_disk_queue import LoggedDiskQueue
from nsqtools.server.queues.queue_files import Block, Positions, encode_length

_DUE_FILE = "nsqd.deferred"
_STEP_BYTES = 1 << 20
_MESSAGE_LIMIT = 1 << 31  # what was accepted once is not too large now
_NEW = b"\0\1"  # the attempts of a message that was never delivered: they count the next one

DueTimes = dict[str, dict[bytes, int]]
"""When deferred messages are due, in ns since 1970: by queue and by id."""


class Standing(NamedTuple):
    """How far a message has come; the greatest is the last."""

    attempts: int = 0
    stage: Stage = Stage.WAITING
    due_ns: int = 0


class LoggedQueue:
    """What the log says of one queue.

    A log has hundreds of thousands of messages, and most were published and no more: those cost an
    entry each, and nothing else. What is kept of a message is what will stand in a file.
    """

    def __init__(self, begins: QueueBegins) -> None:
        self.name = begins.name
        self.base = Positions(*begins[1:6])
        self.read_to = self.base[1:3]
        self.records: dict[bytes, bytes] = {}  # id -> length and record, with no attempts made
        self.standings: dict[bytes, Standing] = {}  # of those that are not just waiting
        self.finished: set[bytes] = set()

    def add(self, frames: bytes, stage: Stage, due_ns: int) -> None:
        """Take messages; the attempts in a frame that is not in flight count the next one."""
        records = self.records
        is_waiting = stage == Stage.WAITING and not due_ns
        at, end = 0, len(frames)
        head = start = b""  # what follows each other mostly has in common: length and timestamp
        while at < end:
            middle = at + 16
            if frames[at:middle] != head:
                head = frames[at:middle]
                size = int.from_bytes(head[:4], "big")
                start = encode_length(size - 4) + head[8:] + b"\0\0"
            after = at + 4 + size
            message_id = frames[at + 18 : at + 34]
            records[message_id] = start + frames[at + 18 : after]
            attempts_made = frames[middle : middle + 2]
            if not is_waiting or attempts_made != _NEW:
                made = int.from_bytes(attempts_made, "big") - (stage != Stage.IN_FLIGHT) & 0xFFFF
                self.stands(message_id, Standing(made, stage, due_ns))
            at = after

    def stands(self, message_id: bytes, standing: Standing) -> None:
        """Note how far a message has come, unless more is known."""
        known = self.standings.get(message_id)
        if known is None or known < standing:
            self.standings[message_id] = standing

    def delivered(self, record: Delivered) -> None:
        """Note that messages were delivered, and how far the disk was read for it."""
        self.read_to = max(self.read_to, (record.read_file, record.read_position))
        standing = Standing(0, Stage.IN_FLIGHT)
        for attempts, message_id in record.each():
            if attempts != standing.attempts:
                standing = Standing(attempts, Stage.IN_FLIGHT)
            self.stands(message_id, standing)

    def unfinished(self, from_disk: Iterable[bytes]) -> Iterator[tuple[bytes, int]]:
        """Yield what to append, as it stands in a file, and when it is due.

        ``from_disk`` are the records that were read since the log began.
        """
        found = {record[10:26]: encode_length(len(record)) + record for record in from_disk}
        found.update(self.records)
        finished, standing_of = self.finished, self.standings.get
        for message_id, encoded in found.items():
            if message_id in finished:
                continue
            standing = standing_of(message_id)
            if standing is None:
                yield encoded, 0
            else:
                attempts = standing.attempts.to_bytes(2, "big")
                yield encoded[:12] + attempts + encoded[14:], standing.due_ns


def replay(records: Iterable[Record]) -> dict[int, LoggedQueue]:
    """Return the queues that live at the end of a log, by their numbers."""
    queues: dict[int, LoggedQueue] = {}
    dropped: set[int] = set()
    for record in records:
        match record:
            case QueueBegins(number=number):
                if number not in dropped:
                    queues[number] = LoggedQueue(record)
            case Published(due_ns, numbers, frames):
                for number in numbers:
                    if number in queues:
                        queues[number].add(frames, Stage.WAITING, due_ns)
            case Dropped(number):
                dropped.add(number)
                queues.pop(number, None)
            case _ if record.number in queues:
                _apply(queues[record.number], record)
    return queues


def _apply(queue: LoggedQueue, record: Kept | Delivered | Deferred | Finished) -> None:
    match record:
        case Kept(_, stage, due_ns, frames):
            queue.add(frames, stage, due_ns)
        case Delivered():
            queue.delivered(record)
        case Deferred(_, due_ns, attempts, message_id):
            queue.stands(message_id, Standing(attempts, Stage.DEFERRED, due_ns))
        case Finished():
            queue.finished.update(record.each())


class Recovery:
    """A log in a data directory, turned into queue files by `run`; `finish` removes it.

    ``queues`` are the names of the queues that had messages or may get some. Raises ``OSError``.
    """

    def __init__(self, data_path: Path, log: DaemonLog, max_bytes_per_file: int) -> None:
        self.queues: list[str] = []
        self._data_path = data_path
        self._files = LogFiles(data_path)
        self._log = log
        self._max_bytes_per_file = max_bytes_per_file
        self._read: list[LoggedDiskQueue] = []

    def run(self) -> None:
        """Write the queue files. Does nothing without a log. Raises ``OSError``."""
        segments = self._files.living()
        if not segments:
            return
        queues = replay(self._records(segments))
        due = load_due_times(self._data_path)
        count = 0
        for queue in queues.values():
            disk, restored, times = self._restore(queue)
            count += restored
            due[queue.name] = due.get(queue.name, {}) | times
            self._read.append(disk)
        save_due_times(self._data_path, due)
        self.queues = [queue.name for queue in queues.values()]
        self._log.info(f"DURABLE: recovered {count} messages of {len(queues)} queues from the log")

    def _records(self, segments: list[Path]) -> Iterator[Record]:
        for path in segments:
            content = path.read_bytes()
            records, whole = decode_blocks(content)
            if whole < len(content):
                rest = len(content) - whole
                self._log.warn(f"DURABLE: {path} ends in {rest} bytes that were not confirmed")
            yield from records

    def _restore(self, queue: LoggedQueue) -> tuple[LoggedDiskQueue, int, dict[bytes, int]]:
        disk = LoggedDiskQueue(
            queue.name,
            self._data_path,
            max_bytes_per_file=self._max_bytes_per_file,
            max_msg_size=_MESSAGE_LIMIT,
            log=self._log,
            may_have_files=False,
        )
        disk.restore(queue.base)
        due: dict[bytes, int] = {}
        step: list[bytes] = []
        size = count = 0
        for encoded, due_ns in queue.unfinished(_read_again(disk, queue.read_to)):
            step.append(encoded)
            size += len(encoded)
            count += 1
            if due_ns:
                due[encoded[14:30]] = due_ns
            if size >= _STEP_BYTES:
                disk.put_blocks([_block(step)])
                step, size = [], 0
        if step:
            disk.put_blocks([_block(step)])
        disk.close()
        return disk, count, due

    def finish(self) -> None:
        """Remove the log, and the files that were read: nsqd.dat lists all topics.

        Raises ``OSError``.
        """
        self._files.remove()
        self.remove_read_files()

    def remove_read_files(self) -> None:
        """Remove the files that were read: the log does not count any more."""
        for disk in self._read:
            disk.remove_read_files(disk.positions.read_file)
        self._read.clear()


def _block(encoded: list[bytes]) -> Block:
    return Block(b"".join(encoded), list(map(len, encoded)))


def _read_again(disk: LoggedDiskQueue, until: tuple[int, ...]) -> Iterator[bytes]:
    while disk.has_unread and disk.positions[1:3] < until:
        yield from disk.get(1, 1)


def load_due_times(data_path: Path, max_delay_s: float | None = None) -> DueTimes:
    """Return when deferred messages are due; nothing when that is not known.

    No message is due after more than ``max_delay_s``: the clock may have gone back since.
    """
    now_ns = time.time_ns()
    latest_ns = sys.maxsize if max_delay_s is None else now_ns + int(max_delay_s * 1_000_000_000)
    try:
        document = json.loads((data_path / _DUE_FILE).read_bytes())
        return {
            queue: {
                message_id.encode(): min(int(due_ns), latest_ns)
                for message_id, due_ns in times.items()
                if due_ns > now_ns
            }
            for queue, times in document.items()
        }
    except (OSError, ValueError, AttributeError, TypeError):
        return {}


def save_due_times(data_path: Path, due: Mapping[str, Mapping[bytes, int]]) -> None:
    """Write them, durably; without any there is no file. Raises ``OSError``."""
    path = data_path / _DUE_FILE
    document = {
        queue: {message_id.decode("latin-1"): due_ns for message_id, due_ns in times.items()}
        for queue, times in due.items()
        if times
    }
    if document:
        replace_file(path, json.dumps(document).encode(), 0o600)
    elif path.exists():
        os.unlink(path)
