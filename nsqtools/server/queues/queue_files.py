"""The names of a disk queue's files, and how they go away.

``NAME.diskqueue.000000.dat`` and so on hold the data, ``NAME.diskqueue.meta.dat`` the positions.

Trap: removing 100 MB takes a file system long, so it is done behind the loop. By then a queue of
the same name may exist again, with files of the same names. So a file is renamed at once and
removed later, under a name that the next start recognizes as a temporary one.
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterable
from pathlib import Path

from nsqtools.server.daemon_log import DaemonLog
from nsqtools.server.queues.disk_thread import Behind

_DATA_FILE = re.compile(r"(.+)\.diskqueue\.(\d{6,})\.dat")
_ANY_FILE = re.compile(r"(.+)\.diskqueue\.(?:\d{6,}|meta)\.dat")


def queues_with_files(data_path: Path, *, with_meta: bool = False) -> set[str]:
    """Return the names of the queues that have data files, or a meta file. Raises ``OSError``."""
    pattern = _ANY_FILE if with_meta else _DATA_FILE
    found = (pattern.fullmatch(name) for name in os.listdir(data_path))
    return {match[1] for match in found if match}


class QueueFiles:
    """The files of the queue ``name`` in a directory."""

    def __init__(self, data_path: Path, name: str, behind: Behind, log: DaemonLog) -> None:
        self.name = name
        self.meta = data_path / f"{name}.diskqueue.meta.dat"
        self._path = data_path
        self._behind = behind
        self._log = log

    def data(self, number: int) -> Path:
        """Return the path of a data file."""
        return self._path / f"{self.name}.diskqueue.{number:06d}.dat"

    def size(self, number: int) -> int:
        """Return the size of a data file, 0 without one."""
        try:
            return self.data(number).stat().st_size
        except OSError:
            return 0

    def numbers(self) -> list[int]:
        """Return the numbers of the data files that are there."""
        try:
            names = os.listdir(self._path)
        except OSError as exc:
            self._log.error(f"DISKQUEUE({self.name}) failed to look for files - {exc}")
            return []
        found = (_DATA_FILE.fullmatch(name) for name in names)
        return sorted(int(match[2]) for match in found if match and match[1] == self.name)

    def remove(self, numbers: Iterable[int]) -> None:
        """Remove data files, behind the loop; failures are logged."""
        condemned: list[str] = []
        for number in numbers:
            path = self.data(number)
            beside = self._path / f".{path.name}.{os.urandom(8).hex()}.tmp"
            try:
                os.rename(path, beside)
            except FileNotFoundError:
                continue
            except OSError as exc:
                self._log.error(f"DISKQUEUE({self.name}) failed to remove data file - {exc}")
            else:
                condemned.append(str(beside))

        def work() -> None:
            for path in condemned:
                os.unlink(path)

        if condemned:
            self._behind.run(work, self._removed)

    def _removed(self, error: OSError | None) -> None:
        if error is not None:
            self._log.error(f"DISKQUEUE({self.name}) failed to remove data file - {error}")

    def set_aside(self, number: int) -> None:
        """Rename a file that cannot be read to ``.bad``."""
        bad = self.data(number)
        self._log.warn(f"DISKQUEUE({self.name}) jump to next file and saving bad file as {bad}.bad")
        try:
            bad.rename(f"{bad}.bad")
        except OSError:
            self._log.error(
                f"DISKQUEUE({self.name}) failed to rename bad diskqueue file {bad} to {bad}.bad"
            )
