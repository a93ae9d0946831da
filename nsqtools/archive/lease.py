"""Numbered objects in a folder of an object store, and the lock that is built from them.

A store can neither append to an object nor lock one. But only one process can create an object, so
the process that creates the next number owns what the numbers stand for: the lock of a place
(`Lease`), or the progress of a task (`publishing.row_outcomes`). Any other process finds its next
number taken.

The holder of a lease creates the next number every few seconds. If the latest number is not
followed by another for the duration of a lease, its run was killed, and the run that creates the
next number becomes the holder. A holder whose next number is taken has lost the lease and must not
publish anything more.

Trap: the store refuses only numbers that exist. A process that slept while another one continued
could create its next number after that number was deleted, so the writer of a number checks that no
greater one exists.
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
from nsqtools.protocol.text import load_json

log = logging.getLogger("nsqtools")

SUFFIX = ".json"

# The holder renews four times within the duration of a lease, so that a slow or failed request does
# not lose it. A run that was killed blocks the next one for LEASE_S.
RENEW_S = 5.0
LEASE_S = 20.0
# Time between two looks at a lease that may be released.
POLL_S = 0.5


class NumberedObjects:
    """The objects ``000000000001.json`` and so on at a ``place``.

    `number` is the last one that this process wrote. All methods raise ``OSError``.
    """

    def __init__(self, place: Place, number: int = 0) -> None:
        self.place = place
        self.number = number

    def latest(self) -> int:
        """Return the greatest existing number, 0 if there is none."""
        names = [entry.name.removesuffix(SUFFIX) for entry in self.place.list()]
        return max(map(int, filter(str.isdecimal, names)), default=0)

    def read(self, number: int) -> bytes:
        """Return the content of an object. Raises `FileNotFoundError` if a later one exists."""
        return self.place.read(self._name(number))

    def append(self, data: bytes) -> None:
        """Write the next number and delete the previous one.

        Raises `FileExistsError` if another process has written it, or a greater one.
        """
        self.place.put_if_absent(self._name(self.number + 1), data)
        if self.latest() != self.number + 1:
            self._delete(self.number + 1)
            raise FileExistsError(errno.EEXIST, "another process has written it", str(self.place))
        previous, self.number = self.number, self.number + 1
        if previous:
            self._delete(previous)

    def _name(self, number: int) -> str:
        return f"{number:012d}{SUFFIX}"

    def _delete(self, number: int) -> None:
        with suppress(OSError):  # Only the greatest number counts, so a leftover does no harm.
            self.place.delete(self._name(number))


class Lease(PlaceLock):
    """The exclusive right to write to a place, for as long as it is renewed.

    Call `check` before anything is published. Methods raise `OutputError` if another run is the
    holder, and the errors of `failure_of`.
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
        self._mutex = threading.Lock()
        self._end = threading.Event()

    def take(self, lease_s: float = LEASE_S) -> None:
        """Become the holder; wait for the end of a lease that is not renewed.

        Raises `OutputError` if another run renews it.
        """
        deadline_s = time.monotonic() + lease_s
        with translating_errors("read", self._place):
            first = self._numbers.latest()
            while (latest := self._numbers.latest()) and not self._entry(latest).get("released"):
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
        """Renew the lease until `release`, on a thread of the caller.

        The lease is lost when another run has taken it, and when renewing has failed for
        ``lease_s``, because another run may take it then.
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
        """Let the next run take the lease without waiting."""
        self._end.set()
        if self._lost is None:
            self.renew(released=True)

    def renew(self, *, released: bool = False) -> None:
        """Write the next number. Raises `OutputError`."""
        data = json.dumps({**self._holder, "released": released}).encode()
        with self._mutex, translating_errors("write", self._place):
            try:
                try:
                    self._numbers.append(data)
                except OSError:
                    # If only the response was lost, the number is ours, and the next one is free.
                    if not self._adopt_written():
                        raise
                    self._numbers.append(data)
            except FileExistsError:
                self._lost = locked_error(self._place)
                raise self._lost from None
        self._renewed_s = time.monotonic()

    def _adopt_written(self) -> bool:
        """Continue from a number that this lease wrote, but got no response for.

        Returns whether there is one. Raises ``OSError``.
        """
        latest = self._numbers.latest()
        token = self._entry(latest).get("token")
        if latest == self._numbers.number or token != self._holder["token"]:
            return False
        self._numbers.number = latest
        return True

    def _entry(self, number: int) -> dict[str, Any]:
        """Return the content of a number, empty if it was replaced in the meantime."""
        try:
            return dict(load_json(self._numbers.read(number)))
        except FileNotFoundError:
            return {}
        except (ValueError, TypeError) as exc:
            raise OutputError(f"cannot read {self._place} ({exc})") from exc


@contextmanager
def hold_lease(place: Place, name: str) -> Iterator[PlaceLock]:
    """Hold the lease of a place; its objects are in the folder ``name``. See `Place.lock`."""
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
            # The lease expires without a release, and the result of the run must not change.
            log.warning("%s", error)
        keeper.join()
