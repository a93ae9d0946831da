"""The content of a disk after a power cut: record changes of files, and replay every prefix.

    with PowerCut(folder) as record:
        write_something()
        record.note(ids)  # a promise, such as a FIN
    for promised, cut in record.cuts():
        cut.restore(folder)  # ... and recover, and check

After each call there are several cuts, for different orders of writes that a disk may choose. All
of them lack data that was written after the last sync of a file. The names are those of the last
sync of their directory (strict), or the same without names that were unlinked later, or the current
names, with empty files for unsynced data; or the sizes are current as well, with zeros for unsynced
data.

With ``names_with_files`` a file's sync makes all earlier names durable, as in the journals of ext4,
XFS and btrfs. Go's nsqd relies on it.

The initial content of the folder is durable. Trap: only files that are opened through the module
`os` are recorded, and only its functions to name and sync them.
"""

import os
import shutil
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Self

import pytest

CALLS = ("open", "dup", "close", "write", "pwrite", "ftruncate", "fsync", "fdatasync")
CALLS += ("link", "rename", "replace", "unlink")

Names = dict[str, "_File"]


@dataclass(eq=False)
class _File:
    synced: bytes = b""


@dataclass
class Cut:
    """The remaining content, by path below the folder."""

    files: dict[str, bytes]

    def restore(self, folder: Path) -> None:
        shutil.rmtree(folder, ignore_errors=True)
        folder.mkdir(parents=True)
        for name, content in self.files.items():
            path = folder / name
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_bytes(content)


class PowerCut:
    """Records the calls of `os` that concern a folder, inside a with statement."""

    def __init__(self, folder: Path, *, names_with_files: bool = False) -> None:
        self._folder = str(folder)
        self._patch = pytest.MonkeyPatch()
        self._names_with_files = names_with_files
        self._open: dict[int, tuple[int, Any]] = {}  # inode; file, or the path of a directory
        self._names: Names = {}
        self._renamed: set[str] = set()  # old names of renamed files; a rename is one step
        self._promised: list[object] = []
        self._cuts: list[tuple[int, Cut]] = []
        for path in filter(Path.is_file, folder.rglob("*")):
            self._names[str(path)] = _File(path.read_bytes())
        self._synced_names: Names = dict(self._names)

    def __enter__(self) -> Self:
        for name in CALLS:
            self._patch.setattr(os, name, self._recording(name, getattr(os, name)))
        return self

    def __exit__(self, *_: object) -> None:
        self._patch.undo()

    def note(self, *promised: object) -> None:
        """Record promises: from now on their data must survive every cut."""
        self._promised += promised
        self._remember()

    def cuts(self) -> Iterator[tuple[list[object], Cut]]:
        """Iterate over the promises, and the possible contents of the disk, after each call.

        If several calls leave the same content, the promises at the last of them count.
        """
        last = {frozenset(cut.files.items()): (count, cut) for count, cut in self._cuts}
        for count, cut in last.values():
            yield self._promised[:count], cut

    # -- recording ------------------------------------------------------------------------------

    def _remember(self) -> None:
        synced, now = self._synced_names, self._names
        without = {p: file for p, file in synced.items() if p in now or p in self._renamed}
        for names in (synced, without, now):
            self._cut({path: file.synced for path, file in names.items()})
        self._cut({path: _sized(path, file.synced) for path, file in now.items()})

    def _cut(self, contents: dict[str, bytes]) -> None:
        files = {os.path.relpath(path, self._folder): data for path, data in contents.items()}
        self._cuts.append((len(self._promised), Cut(files)))

    def _recording(self, name: str, call: Any) -> Any:
        is_sync = name in ("fsync", "fdatasync")
        on_call = getattr(self, "_on_fsync" if is_sync else f"_on_{name}")

        def record(*arguments: Any, **keywords: Any) -> Any:
            # the model does not need the real sync, which is slow
            result = None if is_sync else call(*arguments, **keywords)
            if on_call(result, *arguments):
                self._remember()
            return result

        return record

    def _opened(self, descriptor: int) -> Any:
        """The file of a descriptor, or None if it is not in the folder (any more)."""
        inode, opened = self._open.get(descriptor, (0, None))
        if opened is None or os.fstat(descriptor).st_ino != inode:  # it was closed without `os`
            return None
        return opened

    def _on_open(self, descriptor: int, path: Any, *_: Any) -> bool:
        path = os.fspath(path)
        if not isinstance(path, str) or not path.startswith(self._folder):
            return False
        inode = os.fstat(descriptor).st_ino
        if os.path.isdir(path):
            self._open[descriptor] = inode, path
        else:
            self._open[descriptor] = inode, self._names.setdefault(path, _File())
        return True

    def _on_dup(self, descriptor: int, other: int) -> bool:
        if other in self._open:
            self._open[descriptor] = self._open[other]
        return False

    def _on_close(self, _: None, descriptor: int) -> bool:
        self._open.pop(descriptor, None)
        return False

    def _on_write(self, written: int, descriptor: int, *_: Any) -> bool:
        return self._opened(descriptor) is not None

    _on_pwrite = _on_ftruncate = _on_write

    def _on_fsync(self, _: None, descriptor: int) -> bool:
        opened = self._opened(descriptor)
        if isinstance(opened, _File):
            opened.synced = Path(f"/proc/self/fd/{descriptor}").read_bytes()
            if self._names_with_files:
                self._synced_names = dict(self._names)
        elif isinstance(opened, str):
            kept = {p: f for p, f in self._synced_names.items() if os.path.dirname(p) != opened}
            new = {p: f for p, f in self._names.items() if os.path.dirname(p) == opened}
            self._synced_names = kept | new
        return opened is not None

    def _on_link(self, _: None, source: Any, target: Any, **__: Any) -> bool:
        return self._name(target, self._names.get(os.fspath(source)))

    def _on_rename(self, _: None, source: Any, target: Any, **__: Any) -> bool:
        self._renamed.add(os.fspath(source))
        return self._name(target, self._names.pop(os.fspath(source), None))

    _on_replace = _on_rename

    def _name(self, target: Any, file: _File | None) -> bool:
        if file is not None:
            self._names[os.fspath(target)] = file
        return file is not None

    def _on_unlink(self, _: None, path: Any, **__: Any) -> bool:
        return self._names.pop(os.fspath(path), None) is not None


def _sized(path: str, content: bytes) -> bytes:
    """The content of a file with its current size, of which only ``content`` was written."""
    size = os.stat(path).st_size if os.path.exists(path) else 0
    return content[:size].ljust(size, b"\0")
