"""Files of records that were not confirmed, which their user publishes again.

They hold bodies, so only their owner may read them. What they have is durable when `sync` or the
``with`` block has ended, and not before: records may come by the thousand. The user names them, so
they may be links, pipes or devices, which take no sync.
"""

from __future__ import annotations

import os
import stat
from collections.abc import Collection, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Self

from nsqtools.errors import OutputError
from nsqtools.files.durable import sync_folder, write_all

BUFFER_SIZE = 1 << 16


class UnsentFiles:
    """Appends records to a file, or to one for each nsqd where every record goes to several.

    The file of an nsqd is ``PATH.HOST:PORT``: publishing it again to that nsqd repeats nothing on
    the others. Files are opened at once: a bad path must not show at the end. All methods raise
    `OutputError`.
    """

    def __init__(self, path: Path, delimiter: bytes, addresses: Sequence[str] = ()) -> None:
        self._delimiter = delimiter
        names = {address: f"{path}.{address}" for address in addresses} or {"": str(path)}
        self._files: dict[str, _Appended] = {}
        for address, name in names.items():
            self._files[address] = _Appended(name)

    def write(self, record: bytes, lacking: Collection[str] | None = None) -> None:
        """Append a record for the nsqd that lack it (None: all)."""
        for address, file in self._files.items():
            if lacking is None or not address or address in lacking:
                file.append(record + self._delimiter)

    def sync(self) -> None:
        """Make durable what was written."""
        for file in self._files.values():
            file.sync()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        try:
            self.sync()
        finally:
            for file in self._files.values():
                file.close()


class _Appended:
    def __init__(self, name: str) -> None:
        self._name = name
        self._buffer = bytearray()
        self._is_synced = True
        flags = os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC
        with self._blaming():
            self._descriptor = os.open(name, flags, 0o600)
            self._is_regular = stat.S_ISREG(os.fstat(self._descriptor).st_mode)
            if self._is_regular:
                sync_folder(Path(os.path.realpath(name)).parent)

    def append(self, data: bytes) -> None:
        self._buffer += data
        self._is_synced = False
        if len(self._buffer) >= BUFFER_SIZE:
            self._flush()

    def _flush(self) -> None:
        data, self._buffer = bytes(self._buffer), bytearray()
        with self._blaming():
            write_all(self._descriptor, data)

    def sync(self) -> None:
        if self._is_synced:
            return
        self._flush()
        if self._is_regular:
            with self._blaming():
                os.fsync(self._descriptor)
        self._is_synced = True

    def close(self) -> None:
        os.close(self._descriptor)

    @contextmanager
    def _blaming(self) -> Iterator[None]:
        try:
            yield
        except OSError as exc:
            raise OutputError(f"cannot write {self._name} ({exc.strerror})") from exc
