"""When the files of a disk queue are synced, and the meta file that says what is in them.

The owner counts its operations here. After ``sync_every`` of them, and at another file, the meta
file is overwritten at once, so that a kill finds what had happened, and without a sync, because
that would hold up the loop. The disk thread then syncs the data and after it the meta file: these
are what a power failure leaves. The same happens by the clock (``on_dirty`` says that there is
something). A queue has one such sync under way at a time; what happens meanwhile belongs to the
next one.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import NamedTuple

from nsqtools.files.durable import NewestContent
from nsqtools.server.daemon_log import DaemonLog
from nsqtools.server.queues.disk_thread import Behind, Done, Work
from nsqtools.server.queues.record_file import QueueFiles


class Positions(NamedTuple):
    """What the meta file holds."""

    depth: int
    read_file: int
    read_position: int
    write_file: int
    write_position: int

    def encode(self) -> bytes:
        """Return the content of the meta file."""
        depth, read_file, read_position, write_file, write_position = self
        return f"{depth}\n{read_file},{read_position}\n{write_file},{write_position}\n".encode()


class QueueSync:
    """The syncs of one queue. ``snapshot`` returns its positions and the open file, or -1.

    With ``sync_every`` 0 nothing is ever due.
    """

    def __init__(
        self,
        files: QueueFiles,
        behind: Behind,
        log: DaemonLog,
        sync_every: int,
        snapshot: Callable[[], tuple[Positions, int]],
        on_dirty: Callable[[], object],
    ) -> None:
        self._files = files
        self._behind = behind
        self._log = log
        self._sync_every = sync_every
        self._snapshot = snapshot
        self._on_dirty = on_dirty
        self._operations = 0  # since the last sync
        self._not_noted = 0  # of these, since the meta file was written
        self._is_syncing = False
        self._meta = NewestContent(files.meta, 0o600, name_is_durable=False)

    @property
    def is_due(self) -> bool:
        """Whether anything happened since the last sync."""
        return self._operations > 0

    def read(self) -> Positions | None:
        """Return what the meta file holds, None without one that can be read."""
        try:
            numbers = self._files.meta.read_text("ascii").replace(",", "\n").split()
            depth, read_file, read_position, write_file, write_position = map(int, numbers)
        except (OSError, ValueError) as exc:
            if not isinstance(exc, FileNotFoundError):
                self._log.error(f"DISKQUEUE({self._files.name}) failed to retrieveMetaData - {exc}")
            return None
        return Positions(depth, read_file, read_position, write_file, write_position)

    def count(self, operations: int) -> None:
        """Note that something happened which is not on disk yet."""
        if not self._sync_every:
            return
        if not self._operations:
            self._on_dirty()
        self._operations += operations
        self._not_noted += operations
        if self._not_noted >= self._sync_every:
            self._note()
        self._start_if_due()

    def _note(self) -> None:
        self._not_noted = 0
        try:
            self._meta.note(self._snapshot()[0].encode())
        except OSError as exc:
            self.report(exc)

    def _start_if_due(self) -> None:
        if self._operations >= self._sync_every and not self._is_syncing:
            self.start()

    def now(self) -> None:
        """Make what was put and read durable. Raises ``OSError``."""
        positions, data = self._snapshot()
        if data >= 0:
            self._behind.sync(data)
        self._meta.write(positions.encode(), self._meta.number())
        self._operations = self._not_noted = 0

    def start(self, then: Done = lambda _: None) -> None:
        """Have what was put and read until now made durable; a failure is logged."""
        try:
            work, done = self.begin()
        except OSError as exc:  # no descriptor left
            self.report(exc)
            then(exc)
            return
        self._is_syncing = True

        def finished(error: OSError | None) -> None:
            self._is_syncing = False
            self.report(error)
            if error is None:
                done()
                self._start_if_due()
            if self._operations:
                self._on_dirty()
            then(error)

        self._behind.run(work, finished)

    def begin(self) -> tuple[Work, Callable[[], None]]:
        """Return what another thread has to do for a sync, and what to call here once it is done.

        The first is called exactly once, and may raise ``OSError``. Everything up to now is durable
        then; the queue may be used meanwhile.
        """
        data = self._snapshot()[1]
        operations = self._operations

        def done() -> None:
            self._operations = max(0, self._operations - operations)

        return self._work(os.dup(data) if data >= 0 else -1, is_open=True), done

    def leave_file(self, data: int) -> None:
        """Sync and close a file (-1: none) that is not written or read any more."""
        if self._sync_every:
            self._note()
            self._behind.run(self._work(data, is_open=False), self.report)
        elif data >= 0:
            os.close(data)

    def _work(self, data: int, *, is_open: bool) -> Work:
        positions, number = self._snapshot()[0].encode(), self._meta.number()

        def work() -> None:
            try:
                if is_open and self._behind.is_ending:  # the owner syncs it when it closes
                    return
                if data >= 0:
                    self._behind.sync(data)
                self._meta.write(positions, number)
            finally:
                if data >= 0:
                    os.close(data)

        return work

    def drop(self) -> None:
        """Remove the meta file, behind the loop: the queue is empty."""
        self._operations = self._not_noted = 0
        number = self._meta.number()
        self._behind.run(lambda: self._meta.remove(number), self.report)

    def report(self, error: OSError | None) -> None:
        """Log a failure."""
        if error is not None:
            self._log.error(f"DISKQUEUE({self._files.name}) failed to sync - {error}")
