"""A disk queue whose positions stand in the durable log: it syncs nothing by itself.

What was written since the last checkpoint is in the log, too, so a sync is due only at the next
one; and the files that were read since must stay until then, because a recovery reads them again.
"""

from __future__ import annotations

import os
from pathlib import Path

from nsqtools.files.durable import sync_folder
from nsqtools.files.opening import descriptor_to_read
from nsqtools.server.daemon_log import DaemonLog
from nsqtools.server.queues.disk_queue import DiskQueue
from nsqtools.server.queues.queue_files import Behind, Positions


class LoggedDiskQueue(DiskQueue):
    """One queue; see `DiskQueue`."""

    def __init__(
        self,
        name: str,
        data_path: Path,
        *,
        max_bytes_per_file: int,
        max_msg_size: int,
        log: DaemonLog,
        may_have_files: bool,
        behind: Behind | None = None,
    ) -> None:
        self._read_files: list[int] = []
        super().__init__(
            name,
            data_path,
            max_bytes_per_file=max_bytes_per_file,
            max_msg_size=max_msg_size,
            sync_every=0,
            log=log,
            may_have_files=may_have_files,
            behind=behind,
        )
        self._synced_file = self._write_file

    def restore(self, positions: Positions) -> None:
        """Go back to positions; what was written since is removed, what was read is there again."""
        self.abandon()
        self.depth = positions.depth
        self._read_file, self._read_position = positions[1:3]
        self._write_file, self._write_position = positions[3:]
        self._synced_file = self._write_file
        self._files.remove(n for n in self._files.numbers() if n > self._write_file)
        if self._files.size(self._write_file) > self._write_position:
            os.truncate(self._files.data(self._write_file), self._write_position)

    def unsynced_files(self) -> list[Path]:
        """Return the files that were written since `checkpointed`."""
        return [self._files.data(n) for n in range(self._synced_file, self._write_file + 1)]

    def checkpointed(self, positions: Positions) -> None:
        """These positions are in the log, and on disk: remove what was read before them."""
        self._synced_file = max(self._synced_file, positions.write_file)
        self.remove_read_files(positions.read_file)

    def remove_read_files(self, before: int) -> None:
        """Remove the files with lower numbers that have been read."""
        self._files.remove(number for number in self._read_files if number < before)
        self._read_files = [number for number in self._read_files if number >= before]

    def close(self) -> None:
        """Sync everything and close. Raises ``OSError``."""
        try:
            sync_files(self.unsynced_files())
            self.sync()
        finally:
            self.abandon()

    def _remove(self, number: int) -> None:
        self._read_files.append(number)

    def _drop(self) -> None:
        super()._drop()
        self.remove_read_files(self._read_file)
        self._synced_file = self._write_file


def sync_files(paths: list[Path]) -> None:
    """Make files, and their names, durable; those that are gone are not needed any more."""
    for path in paths:
        try:
            descriptor = descriptor_to_read(path)
        except FileNotFoundError:
            continue
        try:
            os.fsync(descriptor)
        finally:
            os.close(descriptor)
    for folder in {path.parent for path in paths}:
        sync_folder(folder)
