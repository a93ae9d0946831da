"""The files below a directory, listed again and again: an unchanged directory is not read again.

Its modification time decides, unless it is so recent that another change could have the same one.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import NamedTuple

from nsqtools.archive.layout import PART, is_hidden

SETTLED_NS = 2_000_000_000

CannotList = Callable[[Path, str], None]
"""Told a directory and why."""


class Folder(NamedTuple):
    """What is in a directory, all in order. ``is_settled``: it can be relied on while the time of
    change is the same."""

    changed_ns: int
    is_settled: bool
    folders: list[Path]
    in_progress: list[Path]
    finished: list[Path]


class Folders:
    """Remembers the directories that it has read."""

    def __init__(self) -> None:
        self._known: dict[Path, Folder] = {}

    def walk(self, root: Path, cannot_list: CannotList) -> Iterator[Folder]:
        """Iterate over a directory and those below that are not hidden; or over a single file."""
        if not root.is_dir():
            is_part = is_hidden(root.name, PART)
            yield Folder(0, False, [], [root] if is_part else [], [] if is_part else [root])
            return
        waiting = [root]
        while waiting:
            path = waiting.pop()
            try:
                folder = self._folder(path)
            except FileNotFoundError:
                continue
            except OSError as exc:
                cannot_list(path, exc.strerror or str(exc))
                continue
            waiting += reversed(folder.folders)
            yield folder

    def _folder(self, path: Path) -> Folder:
        now_ns = time.time_ns()
        changed_ns = path.stat().st_mtime_ns
        known = self._known.get(path)
        if known is not None and known.is_settled and known.changed_ns == changed_ns:
            return known
        folders, in_progress, finished = [], [], []
        with os.scandir(path) as entries:
            for entry in entries:
                if is_hidden(entry.name, PART):
                    in_progress.append(entry.name)
                elif entry.name.startswith("."):
                    continue
                elif entry.is_dir():
                    folders.append(entry.name)
                else:
                    finished.append(entry.name)
        is_settled = now_ns - changed_ns > SETTLED_NS
        paths = (
            [path / name for name in sorted(some)] for some in (folders, in_progress, finished)
        )
        folder = self._known[path] = Folder(changed_ns, is_settled, *paths)
        return folder
