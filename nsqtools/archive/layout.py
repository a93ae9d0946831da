"""The names of an archive's files, beside each other in one directory:

    clicks.host-000000.2026-11-21_08.log.gz            a finished file
    .clicks.host-000000.2026-11-21_08.log.gz.index     its index, or that of the file in progress
    .clicks.host-000000.2026-11-21_08.log.gz.part      the same file while in progress
    .clicks.host-000000.2026-11-21_08.log.gz.copy      on its way from another file system
    .clicks@archive.lock                               see `topic_lock`
    .clicks@archive@18f3a-000000.journal               see `journal`

Everything unfinished is hidden by its dot, from globs and from Spark's and Hadoop's own readers.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

PART = ".part"
INDEX = ".index"
GZIP = ".gz"


def part_of(path: Path) -> Path:
    """Return where the file ``path`` is while in progress."""
    return path.with_name(f".{path.name}{PART}")


def index_of(path: Path) -> Path:
    """Return the index of the file ``path``, in progress or finished."""
    return path.with_name(f".{path.name}{INDEX}")


def is_hidden(name: str, suffix: str) -> bool:
    """Tell whether a base name is one of ours with this suffix."""
    return name.startswith(".") and name.endswith(suffix) and len(name) > len(suffix) + 1


def owner_of(hidden: Path) -> Path:
    """Return the file that a ``.part``, ``.index`` or ``.copy`` belongs to."""
    return hidden.with_name(hidden.name[1:].rpartition(".")[0])


def hidden_below(directory: Path, suffix: str) -> Iterator[Path]:
    """Iterate over the hidden files with a suffix, in all directories below, in order."""
    for folder, folders, names in os.walk(directory):
        folders.sort()
        for name in sorted(names):
            if is_hidden(name, suffix):
                yield Path(folder, name)


def finished_below(directory: Path) -> Iterator[Path]:
    """Iterate over the finished files below a directory: all that is not hidden, in order."""
    for folder, folders, names in os.walk(directory):
        folders[:] = sorted(name for name in folders if not name.startswith("."))
        for name in sorted(names):
            if not name.startswith("."):
                yield Path(folder, name)
