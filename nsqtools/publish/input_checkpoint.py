"""How far ``nsq pub`` has come in its files: what is before the place is done with.

The place moves over batches in the order of the input, once each has ended: everything in it is
confirmed, or refused for good. The first batch of which something is unknown or unsent stops it, so
the next run begins with that batch. The file is replaced whole and fsynced once a second and at the
end: after a crash at most the batches of the last second are published twice.
"""

from __future__ import annotations

import json
import time
from collections.abc import Sequence
from hashlib import sha256
from pathlib import Path
from typing import NamedTuple

from nsqtools.errors import ConfigurationError, OutputError
from nsqtools.files.durable import replace_file

VERSION = 1
SAVE_EVERY_S = 1.0
HEAD = 4096  # the bytes by which a file is recognized


class InputPlace(NamedTuple):
    """A place in the input: the number of the file, the bytes and, of all files, the records
    before it."""

    file: int
    offset: int
    records: int


BEGIN = InputPlace(0, 0, 0)


class InputCheckpoint:
    """Reads ``path`` if it is there; ``files`` are the inputs of this run.

    Raises `ConfigurationError` when the checkpoint is that of other input, and `OutputError`.
    """

    def __init__(self, path: Path, files: Sequence[str]) -> None:
        self.place = BEGIN
        self._path = path.absolute()
        self._files = [str(Path(file).absolute()) for file in files]
        self._is_open = True
        self._next_save_s = 0.0
        self._saved = BEGIN
        try:
            text = self._path.read_bytes()
        except FileNotFoundError:
            return
        except OSError as exc:
            raise OutputError(f"cannot read {path} ({exc.strerror})") from exc
        self._load(path, text)

    def _load(self, path: Path, text: bytes) -> None:
        try:
            content = json.loads(text)
            is_ours = content["version"] == VERSION
            files = content["files"]
            place = InputPlace(*(int(content[name]) for name in InputPlace._fields))
            head = str(content["head"])
        except (ValueError, KeyError, TypeError, AttributeError):
            is_ours = False
        if not is_ours:
            raise ConfigurationError(
                f"{path} is not the checkpoint of nsq pub", hint="Give another file."
            )
        if files != self._files:
            raise ConfigurationError(
                f"{path} is the checkpoint of other files: {', '.join(map(str, files))}",
                hint="Give the same files in the same order, or another checkpoint.",
            )
        if head != self._head(place):
            raise ConfigurationError(
                f"{self._files[place.file]} is not the file that {path} was written for",
                hint="It was replaced, or cut; remove the checkpoint to start over.",
            )
        self.place = self._saved = place

    def settle(self, end: InputPlace, *, is_whole: bool) -> None:
        """Note that the next batch has ended, at ``end``; whether all of it is done with."""
        self._is_open = self._is_open and is_whole
        if self._is_open:
            self.place = end
            if (now := time.monotonic()) >= self._next_save_s:
                self._next_save_s = now + SAVE_EVERY_S
                self.save()

    def save(self) -> None:
        """Make it durable. Raises `OutputError`."""
        if self.place == self._saved:
            return
        content = {
            "version": VERSION,
            "files": self._files,
            **self.place._asdict(),
            "head": self._head(self.place),
        }
        try:
            replace_file(self._path, json.dumps(content, indent=1).encode())
        except OSError as exc:
            raise OutputError(f"cannot write {self._path} ({exc.strerror})") from exc
        self._saved = self.place

    def _head(self, place: InputPlace) -> str:
        """A digest of the beginning of the file; another one where it is shorter than it was."""
        try:
            with open(self._files[place.file], "rb") as file:
                head = file.read(min(HEAD, place.offset))
                size = file.seek(0, 2)
        except (OSError, IndexError):
            return ""
        return sha256(head).hexdigest() if size >= place.offset else ""
