"""Turn a file in progress into a finished one: it appears whole, under a name nobody else has.

The index goes first, so that no finished file lacks its own; then the file; then the hidden names
go. Every step may be the last one before a crash, and doing it all again leads to the same end.
"""

from __future__ import annotations

import itertools
from dataclasses import dataclass
from pathlib import Path

from nsqtools.archive.layout import index_of, part_of
from nsqtools.files.durable import copy_of, make_folders, place, sync_folder
from nsqtools.records.naming import with_rev


@dataclass(frozen=True, slots=True)
class Directories:
    """Where files are finished and where they are in progress (often the same), and modes.

    Both are absolute and must exist; `make` makes them.
    """

    output: Path
    work: Path
    file_mode: int = 0o640
    folder_mode: int = 0o750

    def make(self) -> None:
        """Make both directories where they are missing. Raises ``OSError``."""
        for folder in (self.output, self.work):
            folder.mkdir(self.folder_mode, parents=True, exist_ok=True)

    def final(self, path: Path) -> Path:
        """Return where a file of the work directory belongs when it is finished."""
        return self.output / path.relative_to(self.work)


def finish(path: Path, directories: Directories) -> Path:
    """Publish the file ``path`` of the work directory; return its final path.

    It must be durable, cut to its index, and not be written any more. Raises ``OSError``.
    """
    part, index = part_of(path), index_of(path)
    wanted = directories.final(path)
    make_folders(directories.output, wanted.parent, directories.folder_mode)
    for rev in itertools.count():
        final = wanted.with_name(with_rev(wanted.name, rev))
        try:
            if not _is_same(part, index, final):
                place(index, index_of(final))
                place(part, final)
            break
        except FileExistsError:
            continue
    sync_folder(final.parent)
    copy_of(final).unlink(missing_ok=True)  # a crash left it behind
    part.unlink(missing_ok=True)
    if index != index_of(final):
        index.unlink(missing_ok=True)
    sync_folder(part.parent)
    return final


def _is_same(part: Path, index: Path, final: Path) -> bool:
    """Tell whether ``final`` is the finished file already: a crash or error came before the end.

    Times and sizes of every member are in the index, so two that are equal are of one file.
    """
    if not part.exists():
        return True
    if not final.exists() or not index_of(final).exists():
        return False
    return (
        part.stat().st_size == final.stat().st_size
        and part.stat().st_size > 0
        and index.read_bytes() == index_of(final).read_bytes()
    )
