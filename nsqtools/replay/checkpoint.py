"""How far a replay has come: of each file, how many messages are done with.

The file is replaced whole and fsynced after each batch, so an interrupted replay continues where it
stopped: nothing is left out, and what is doubled is at most the one batch under way.

A file is known by its writer, its number and its first member, which it keeps wherever it is moved
or uploaded to: by the path alone it would begin again there, and another file that gets the path
would be taken for it. Two machines of one image can use the same writer and number, so the member
is needed, too. A file without an index, or with one of an early version, is known by its path; so
were all of them in version 1.
"""

from __future__ import annotations

import json
from pathlib import Path

from nsqtools.archive.finding import ArchiveFile
from nsqtools.archive.layout import owner_of
from nsqtools.errors import ConfigurationError, OutputError
from nsqtools.files.durable import replace_file

VERSION = 2
READABLE = (1, VERSION)


class Checkpoint:
    """Reads ``path`` if it is there. Raises `ConfigurationError` for one that is not ours."""

    def __init__(self, path: Path) -> None:
        self.done: dict[str, int] = {}
        self._path = path.absolute()
        try:
            content = json.loads(self._path.read_bytes())
            if content["version"] not in READABLE:
                raise ValueError
            self.done = {str(name): int(count) for name, count in content["done"].items()}
        except FileNotFoundError:
            pass
        except OSError as exc:
            raise OutputError(f"cannot read {path} ({exc.strerror})") from exc
        except (ValueError, KeyError, TypeError, AttributeError):
            raise ConfigurationError(
                f"{path} is not the checkpoint of a replay", hint="Give another file."
            ) from None

    def count_of(self, archive: ArchiveFile) -> int:
        """Return how many messages of a file are done with."""
        return max(self.done.get(name, 0) for name in {key_of(archive), path_of(archive)})

    def settle(self, archive: ArchiveFile, count: int) -> None:
        """So many messages of a file are done with; `save` makes it durable."""
        self.done.pop(path_of(archive), None)
        self.done[key_of(archive)] = count

    def save(self) -> None:
        """Make it durable. Raises `OutputError`."""
        content = json.dumps({"version": VERSION, "done": self.done}, indent=1).encode()
        try:
            replace_file(self._path, content)
        except OSError as exc:
            raise OutputError(f"cannot write {self._path} ({exc.strerror})") from exc


def key_of(archive: ArchiveFile) -> str:
    """Return what a file is known by."""
    if archive.head is None or not archive.members:
        return path_of(archive)
    writer, number = archive.head
    _, length, messages, min_ts, max_ts = archive.members[0]
    return f"{writer} {number} {length} {messages} {min_ts} {max_ts}"


def path_of(archive: ArchiveFile) -> str:
    """Return the path or URL, the same for a file in progress and when it is finished."""
    if archive.is_in_progress:
        return str(owner_of(archive.path.absolute()))
    return archive.shown if archive.is_remote else str(archive.path.absolute())
