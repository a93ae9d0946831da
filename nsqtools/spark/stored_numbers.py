"""Numbered objects in a folder of an object store, of which each is written by one process only.

Nothing in a store can be appended to or locked. But one process alone can create an object, so
whoever creates the next number has what the numbers stand for: the lock of a place (`jobs.lease`),
or the progress of a task (`publishing.stored_progress`). The others find out when they go on.

Trap: only a number that is there cannot be written again. A process that slept while another went
on could create its next number after that one was deleted, so who has written looks for a greater.
"""

from __future__ import annotations

import errno

from nsqtools.spark.location import StoredPlace

SUFFIX = ".json"


class StoredNumbers:
    """The objects ``000000000001.json`` and so on at a ``place``; `number` is the last of ours.

    All methods raise ``OSError``.
    """

    def __init__(self, place: StoredPlace, number: int = 0) -> None:
        self.place = place
        self.number = number

    def latest(self) -> int:
        """Return the greatest number there is, 0 for none."""
        names = [entry.name for entry in self.place.below()]
        return max((int(name.removesuffix(SUFFIX)) for name in names), default=0)

    def read(self, number: int) -> bytes:
        """Return what an object holds. Raises `FileNotFoundError` when it was followed up."""
        object = self._object(number)
        return object.storage.read(object.key)

    def append(self, data: bytes) -> None:
        """Write the next number, and delete the one before it.

        Raises `FileExistsError` when another process has gone on from there.
        """
        object = self._object(self.number + 1)
        object.storage.put_if_absent(object.key, data)
        if self.latest() != self.number + 1:
            self._delete(self.number + 1)
            raise FileExistsError(errno.EEXIST, "another process has gone on", str(object))
        before, self.number = self.number, self.number + 1
        if before:
            self._delete(before)

    def _object(self, number: int) -> StoredPlace:
        return self.place / f"{number:012d}{SUFFIX}"

    def _delete(self, number: int) -> None:
        object = self._object(number)
        try:
            object.storage.delete(object.key)
        except OSError:  # it says nothing any more
            pass
