"""Numbered objects in a folder of an object store, and the lock of a place that is made of them.

Nothing in a store can be appended to or locked. But one process alone can create an object, so
the one that creates the next number has what the numbers are for: the lock of a place (`Lease`), or
the progress of a task (`publishing.row_outcomes`). The others find out when they go on.

The holder of a place writes one more number every few seconds. A number that is not followed up for
a while is a killed run's: the run that creates the next one has the place. A holder that
finds its next number taken has lost the place, and must not publish anything more.

Trap: only a number that is there cannot be written again. A process that slept while another went
on could create its next number after that one was deleted, so who has written looks for a greater.
"""

from __future__ import annotations

import errno
import json
import logging
import os
import socket
import threading
import time
import uuid
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from typing import Any

from nsqtools.archive.place import Place, PlaceLock, locked_error, translating_errors
from nsqtools.errors import NsqError, OutputError

SUFFIX = ".json"


class NumberedObjects:
    """The objects ``000000000001.json`` and so on at a ``place``; `number` is the last of ours.

    All methods raise ``OSError``.
    """

    def __init__(self, place: Place, number: int = 0) -> None:
        self.place = place
        self.number = number

    def latest(self) -> int:
        """Return the greatest number there is, 0 for none."""
        names = [entry.name.removesuffix(SUFFIX) for entry in self.place.list()]
        return max(map(int, filter(str.isdecimal, names)), default=0)

    def read(self, number: int) -> bytes:
        """Return what an object holds. Raises `FileNotFoundError` when it was followed up."""
        return self.place.read(self._name(number))

    def append(self, data: bytes) -> None:
        """Write the next number, and delete the one before it.

        Raises `FileExistsError` when another process has gone on from there.
        """
        self.place.put_if_absent(self._name(self.number + 1), data)
        if self.latest() != self.number + 1:
            self._delete(self.number + 1)
            raise FileExistsError(errno.EEXIST, "another process has gone on", str(self.place))
        before, self.number = self.number, self.number + 1
        if before:
            self._delete(before)

    def _name(self, number: int) -> str:
        return f"{number:012d}{SUFFIX}"

    def _delete(self, number: int) -> None:
        with suppress(OSError):  # it says nothing any more
            self.place.delete(self._name(number))


log = logging.getLogger("nsqtools")

RENEW_S = 5.0
LEASE_S = 20.0
POLL_S = 0.5


class Lease(PlaceLock):
    """The right to write to a place, while it is renewed. `check` before anything is published.

    Methods raise `OutputError` when another run has it, and as `failure_of` says.
    """

    def __init__(self, place: Place, *, renew_s: float = RENEW_S) -> None:
        super().__init__()
        self._place = place
        self._numbers = NumberedObjects(place)
        holder = f"{socket.gethostname()}, process {os.getpid()}"
        self._holder = {"holder": holder, "token": uuid.uuid4().hex}
        self._renew_s = renew_s
        self._renewed_s = 0.0
        self._lost: NsqError | None = None
        self._end = threading.Event()

    def take(self, lease_s: float = LEASE_S) -> None:
        """Take the place; wait for the end of a lease that is not renewed.

        Raises `OutputError` when another run has it.
        """
        deadline_s = time.monotonic() + lease_s
        with translating_errors("read", self._place):
            first = self._numbers.latest()
            while (latest := self._numbers.latest()) and not self._said(latest).get("released"):
                if latest != first:
                    raise locked_error(self._place)
                if time.monotonic() > deadline_s:
                    break
                time.sleep(POLL_S)
        self._numbers.number = latest
        self.renew()

    def raise_if_lost(self) -> None:
        if self._lost is not None:
            raise self._lost

    def check(self) -> None:
        self.raise_if_lost()
        self.renew()

    def keep(self, lease_s: float = LEASE_S) -> None:
        """Renew it until `release`; on a thread.

        It is lost when another run has it, or when it could not be renewed in time, so that
        another may have it.
        """
        while not self._end.wait(self._renew_s):
            try:
                self.renew()
            except NsqError as error:
                if self._lost is None and time.monotonic() - self._renewed_s > lease_s:
                    self._lost = error
                log.log(logging.ERROR if self._lost else logging.WARNING, "%s", error)
                if self._lost:
                    return

    def release(self) -> None:
        """Leave the place to others."""
        self._end.set()
        if self._lost is None:
            self.renew(released=True)

    def renew(self, *, released: bool = False) -> None:
        """Write the next number. Raises `OutputError`."""
        data = json.dumps({**self._holder, "released": released}).encode()
        with _mutex, translating_errors("write", self._place):
            try:
                try:
                    self._numbers.append(data)
                except OSError:
                    if not self._was_written():
                        raise
                    self._numbers.append(data)
            except FileExistsError:
                self._lost = locked_error(self._place)
                raise self._lost from None
        self._renewed_s = time.monotonic()

    def _was_written(self) -> bool:
        """Whether one more is ours: of a write whose answer was lost. Raises ``OSError``."""
        latest = self._numbers.latest()
        token = self._said(latest).get("token")
        if latest == self._numbers.number or token != self._holder["token"]:
            return False
        self._numbers.number = latest
        return True

    def _said(self, number: int) -> dict[str, Any]:
        """Return what a number says; nothing of one that was followed up in this moment."""
        try:
            return dict(json.loads(self._numbers.read(number)))
        except FileNotFoundError:
            return {}
        except ValueError as exc:
            raise OutputError(f"cannot read {self._place} ({exc})") from exc


_mutex = threading.Lock()


@contextmanager
def hold_lease(place: Place, name: str) -> Iterator[PlaceLock]:
    """Hold the lease of a place, whose objects are in the folder ``name``. See `Place.lock`."""
    lease = Lease(place / name)
    lease.take()
    keeper = threading.Thread(target=lease.keep, name="nsq-lease", daemon=True)
    keeper.start()
    try:
        yield lease
    finally:
        try:
            lease.release()
        except NsqError as error:
            # The lease expires by itself, and the result of the run must not change.
            log.warning("%s", error)
        keeper.join()
