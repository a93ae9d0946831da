"""What ``nsq pub`` publishes: the records of files and streams, or texts again and again.

Records are read in batches (`RecordSource`). A batch ends when it is full, when nothing more came
for `LINGER_S`, or at the end of the input. So ``tail -f log | nsq pub`` is prompt and a large file
is fast, without a setting for it.

How far it has come in its files is kept in a checkpoint (`InputCheckpoint`): what is before the
place is done with. The place moves over batches in the order of the input, once each has ended:
everything in it is confirmed, or refused for good. The first record that is unknown or unsent stops
it, so the next run begins with that one. The file is replaced whole and fsynced once a second and
at the end: after a crash at most the batches of the last second are published twice, and with a
rate none of them has more than a second takes.

Texts are templates (`repeated`): ``{n}`` is the number of the message from 1, ``{uuid}`` a random
UUID, ``{now}`` the time in RFC 3339, and ``{now:%H:%M}`` in another form. All other braces stay as
they are, so that JSON need not be escaped.
"""

from __future__ import annotations

import json
import math
import os
import re
import select
import sys
import time
from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from datetime import UTC, datetime
from hashlib import sha256
from pathlib import Path
from typing import Any, Generic, NamedTuple, TypeVar

from nsqtools.errors import ConfigurationError, OutputError
from nsqtools.files.durable import replace_file
from nsqtools.files.opening import closing_fd, lock_file, open_to_read
from nsqtools.protocol.text import utc_text
from nsqtools.records.envelope import Splitter

LINGER_S = 0.005
READ_SIZE = 1 << 18
BATCH_RECORDS = 1000
BATCH_BYTES = 1 << 19
MAX_RECORD_BYTES = 1 << 28  # beyond it the delimiter must be wrong
PIPE_SIZE = 1 << 20
STOP_CHECK_S = 0.2

Record = TypeVar("Record")
Content = TypeVar("Content")


class InputPlace(NamedTuple):
    """A place in the input: the number of the file, the bytes and, of all files, the records
    before it."""

    file: int
    offset: int
    records: int

    def after(self, records: Sequence[bytes], delimiter: bytes) -> InputPlace:
        """The place behind these records, each of which the delimiter ends."""
        size = sum(map(len, records)) + len(records) * len(delimiter)
        return InputPlace(self.file, self.offset + size, self.records + len(records))


BEGIN = InputPlace(0, 0, 0)


@dataclass(slots=True, eq=False)
class InputBatch(Generic[Record]):
    """The records that were read together, and those of them that were not confirmed.

    ``awaited`` counts the publishes of it that have not ended, and one more until all have begun;
    ``lacking`` has, by its place, the nsqd that lack a record (None: all); ``retryable`` has the
    places of those of them that may be published again. ``begin`` and ``end`` are where the input
    stood before and after it.
    """

    records: Sequence[Record]
    begin: InputPlace = BEGIN
    end: InputPlace = BEGIN
    retryable: set[int] = field(default_factory=set)
    lacking: dict[int, Collection[str] | None] = field(default_factory=dict)
    awaited: int = 1


class RecordSource:
    """Reads inputs one after the other.

    ``paths`` are files, ``-`` is standard input. ``is_stopped`` is asked between reads, and a wait
    for input ends soon after it says yes. ``begin`` is where to begin; ``place`` is the end of the
    latest batch, and ``bytes_read`` counts all files. With a ``rate`` no batch has more records
    than go in a second.
    """

    def __init__(
        self,
        paths: Sequence[str],
        delimiter: bytes,
        is_stopped: Callable[[], bool],
        begin: InputPlace = BEGIN,
        rate: float = 0.0,
    ) -> None:
        self.place = begin
        self._most = min(BATCH_RECORDS, math.ceil(rate)) or BATCH_RECORDS
        self.bytes_read = begin.offset
        self._paths = paths
        self._delimiter = delimiter
        self._is_stopped = is_stopped
        self._lacking = 0  # bytes of the delimiter that the last record of a file does not have
        self._pending: list[bytes] = []
        self._pending_bytes = 0

    def batches(self) -> Iterator[InputBatch[bytes]]:
        """Iterate over batches of records, without their delimiters.

        Raises `OutputError` for a file that cannot be read, `NsqError` for a record without end.
        """
        for file, path in enumerate(self._paths):
            if file < self.place.file:
                continue
            name = "standard input" if path == "-" else path
            with failing("read", name):
                # a FIFO that nobody writes to yet would hold up a stop
                descriptor = os.dup(0) if path == "-" else os.open(path, os.O_NONBLOCK)
            if path != "-":
                os.set_blocking(descriptor, True)
            elif sys.platform == "linux":
                import fcntl

                with suppress(OSError):  # no pipe
                    fcntl.fcntl(0, fcntl.F_SETPIPE_SZ, PIPE_SIZE)  # its writer may run ahead
            try:
                if self.place.file == file and self.place.offset:
                    os.lseek(descriptor, self.place.offset, os.SEEK_SET)
                elif file != self.place.file:
                    self.place = InputPlace(file, 0, self.place.records)
                yield from self._read(descriptor, name)
            finally:
                os.close(descriptor)

    def _read(self, descriptor: int, name: str) -> Iterator[InputBatch[bytes]]:
        splitter = Splitter(self._delimiter, limit=MAX_RECORD_BYTES)
        while not self._is_stopped():
            wait_s = LINGER_S if self._pending else STOP_CHECK_S
            if not select.select([descriptor], [], [], wait_s)[0]:  # a regular file is ready
                if self._pending:
                    yield self._take()
                continue
            with failing("read", name):
                chunk = os.read(descriptor, READ_SIZE)
            records = splitter.feed(chunk) if chunk else splitter.end()
            if not chunk:
                self._lacking = len(self._delimiter) * len(records)
            self._pending += records
            self._pending_bytes += sum(map(len, records))
            while len(self._pending) >= self._most or self._pending_bytes >= BATCH_BYTES:
                yield self._take()
            if not chunk:
                break
        while self._pending:
            yield self._take()

    def _take(self) -> InputBatch[bytes]:
        batch = self._pending[: self._most]
        del self._pending[: self._most]
        self._pending_bytes -= sum(map(len, batch))
        begin, self.place = self.place, self.place.after(batch, self._delimiter)
        if not self._pending:
            self.place = self.place._replace(offset=self.place.offset - self._lacking)
            self._lacking = 0
        self.bytes_read += self.place.offset - begin.offset
        return InputBatch(batch, begin, self.place)


@contextmanager
def failing(verb: str, name: str | Path) -> Iterator[None]:
    """Raise `OutputError` for an ``OSError``: what cannot be done to which file."""
    try:
        yield
    except OSError as exc:
        raise OutputError(f"cannot {verb} {name} ({exc.strerror})") from exc


# -- how far it has come --------------------------------------------------------------------------


VERSION = 1
SAVE_EVERY_S = 1.0
HEAD = 4096  # the bytes by which a file is recognized


def read_checkpoint(
    path: Path, what: str, versions: Collection[int], parse: Callable[[Any], Content]
) -> Content | None:
    """Return what a checkpoint says, None when it is not there.

    Raises `OutputError`, and `ConfigurationError` for one that is not of ``what``.
    """
    with failing("read", path), suppress(ValueError, LookupError, TypeError, AttributeError):
        try:
            with open_to_read(path) as file:
                content = json.loads(file.read())
        except FileNotFoundError:
            return None
        if content["version"] in versions:
            return parse(content)
    raise ConfigurationError(f"{path} is not the checkpoint of {what}", hint="Give another file.")


@contextmanager
def held(checkpoint: Path) -> Iterator[None]:
    """Inside, no other run goes on from a checkpoint: both would publish the same.

    The lock is on a file beside it, as it is replaced itself. Raises `OutputError`.
    """
    with failing("read", checkpoint), suppress(FileNotFoundError):
        open_to_read(checkpoint).close()  # refuse a device before a lock is left beside it
    with failing("write", checkpoint.absolute()):
        descriptor = lock_file(Path(f"{checkpoint}.lock"))
    if descriptor is None:
        raise OutputError(
            f"another run holds the checkpoint {checkpoint}", hint="Wait until it has ended."
        )
    with closing_fd(descriptor):
        yield


def write_checkpoint(path: Path, content: dict[str, Any]) -> None:
    """Replace a checkpoint, durably. Raises `OutputError`."""
    with failing("write", path):
        replace_file(path, json.dumps(content, indent=1).encode())


class InputCheckpoint:
    """Reads ``path`` if it is there; ``files`` are the inputs of this run.

    A last record without ``delimiter`` that has grown since is not done with: it begins again.
    Raises `ConfigurationError` when the checkpoint is that of other input, and where there can be
    none, and `OutputError`.
    """

    def __init__(self, path: Path, files: Sequence[str], delimiter: bytes = b"\n") -> None:
        self.place = BEGIN
        self._saved: InputPlace | None = None
        self._path = path.absolute()
        self._files = [str(Path(file).absolute()) for file in files]
        self._delimiter = delimiter
        self._inodes: dict[int, int] = {}
        self._next_save_s = 0.0

        def parse(content: Any) -> tuple[list[str], InputPlace, str]:
            place = InputPlace(*(int(content[name]) for name in InputPlace._fields))
            return content["files"], place, str(content["head"])

        found = read_checkpoint(path, "nsq pub", (VERSION,), parse)
        if found is None:
            return
        before, place, head = found
        if before != self._files:
            raise ConfigurationError(
                f"{path} is the checkpoint of other files: {', '.join(map(str, before))}",
                hint="Give the same files in the same order, or another checkpoint.",
            )
        if not head or head != self._head(place):  # none: it had been cut when this was written
            raise ConfigurationError(
                f"{self._files[place.file]} is not the file that {path} was written for",
                hint="It was replaced, or cut; remove the checkpoint to start over.",
            )
        self.place = self._whole(place)

    def settle(self, batch: InputBatch[bytes]) -> None:
        """Note that the next batch has ended."""
        done = batch.records[: min(batch.retryable, default=None)]
        self.place = batch.begin.after(done, self._delimiter) if batch.retryable else batch.end
        if (now := time.monotonic()) >= self._next_save_s:
            self._next_save_s = now + SAVE_EVERY_S
            self.save()

    def save(self) -> None:
        """Make it durable. Raises `OutputError`."""
        if self.place == self._saved:
            return
        more = {"files": self._files, "head": self._head(self.place)}
        write_checkpoint(self._path, {"version": VERSION, **self.place._asdict(), **more})
        self._saved = self.place

    def _whole(self, place: InputPlace) -> InputPlace:
        """The place, or that before it, where its last record turns out to have been cut off."""
        if not place.offset:
            return place
        import mmap

        with (
            open(self._files[place.file], "rb") as file,
            mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as content,
        ):
            before = content.rfind(self._delimiter, 0, place.offset)
            goes_on = content[place.offset : place.offset + len(self._delimiter)]
        begin = before + len(self._delimiter) if before >= 0 else 0
        if begin == place.offset or goes_on in (b"", self._delimiter):
            return place
        return place._replace(offset=begin, records=place.records - 1)

    def _head(self, place: InputPlace) -> str:
        """A digest of the beginning of the file; "" where it is shorter now, or another one."""
        if place == BEGIN:  # nothing was read of it yet, and perhaps it cannot be
            return sha256().hexdigest()
        path = self._files[place.file]
        with failing("read", path), suppress(FileNotFoundError), open(path, "rb") as file:
            status = os.fstat(file.fileno())
            is_same = self._inodes.setdefault(place.file, status.st_ino) == status.st_ino
            if is_same and status.st_size >= place.offset:
                return sha256(file.read(min(HEAD, place.offset))).hexdigest()
        return ""


# -- texts again and again ------------------------------------------------------------------------


_FIELD = re.compile(rb"\{(n|uuid|now)(?::([^{}]+))?\}")


def repeated(
    texts: Sequence[bytes], times: int, interval_s: float, is_stopped: Callable[[], bool]
) -> Iterator[InputBatch[bytes]]:
    """Iterate over batches of ``times`` rounds of the texts; with an interval a round each."""
    rounds = 1 if interval_s else max(1, BATCH_RECORDS // len(texts))
    next_s = time.monotonic()
    for first in range(1, times + 1, rounds):
        numbers = range(first, min(first + rounds, times + 1))
        yield InputBatch([filled(text, number) for number in numbers for text in texts])
        next_s = max(next_s + interval_s, time.monotonic())  # after a stall no faster
        while (left_s := next_s - time.monotonic()) > 0 and numbers.stop <= times:
            if is_stopped():
                return
            time.sleep(min(left_s, STOP_CHECK_S))
        if is_stopped():
            return


def check_template(text: bytes) -> None:
    """Raise `ConfigurationError` for a field whose form cannot be."""
    for found in _FIELD.finditer(text):
        try:
            filled(found[0], 1)
        except (ValueError, UnicodeDecodeError) as error:
            shown = found[0].decode("utf-8", "replace")
            raise ConfigurationError(
                f"cannot fill in {shown}", hint="Write {n}, {n:05d}, {uuid}, {now} or {now:%H:%M}."
            ) from error


def filled(text: bytes, number: int) -> bytes:
    """The text with its fields filled in."""

    def value(field: re.Match[bytes]) -> bytes:
        name, form = field.groups()
        if name == b"n":
            return format(number, form.decode() if form else "d").encode()
        if name == b"uuid":
            import uuid

            return str(uuid.uuid4()).encode()
        if form:
            return datetime.now(UTC).strftime(form.decode()).encode()
        return utc_text(time.time()).encode()

    return _FIELD.sub(value, text)
