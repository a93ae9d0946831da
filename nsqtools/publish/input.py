"""The input of ``nsq pub``: the records of files and streams, or repeated texts.

Records are read in batches (`RecordSource`). A batch ends when it is full, when no input arrives
for `LINGER_S`, or at the end of the input. So ``tail -f log | nsq pub`` is prompt and a large file
is fast, without a setting for either.

A checkpoint (`InputCheckpoint`) stores the position up to which the files have been published. The
position advances over batches in the order of the input. A batch has ended when each of its records
is confirmed or finally rejected. The first record that is unknown or unsent stops the position, and
the next run starts with it. The file is replaced atomically and fsynced once a second and at the
end. A crash therefore republishes at most the batches of the last second, and with a rate limit no
batch has more records than are sent in a second.

Repeated texts are templates (`repeat_texts`): ``{n}`` is the number of the message from 1,
``{uuid}`` a random UUID, ``{now}`` the time in RFC 3339, and ``{now:%H:%M}`` the time in another
format. All other braces stay as they are, so JSON needs no escapes.
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
from nsqtools.protocol.text import format_moment, load_json, utc_text
from nsqtools.records.envelope import Splitter

# How long an incomplete batch waits for more input. It bounds the added latency of a slow stream.
LINGER_S = 0.005
# Bytes of one read(2).
READ_SIZE = 1 << 18
# A batch ends at either bound, so that one MPUB stays small for nsqd and for our memory.
BATCH_RECORDS = 1000
BATCH_BYTES = 1 << 19
# A longer record means that the delimiter is wrong.
MAX_RECORD_BYTES = 1 << 28
# The maximum that Linux allows an unprivileged process by default.
PIPE_SIZE = 1 << 20
# How long a stop may go unnoticed while no input arrives.
STOP_CHECK_S = 0.2

InputRecord = TypeVar("InputRecord")
Content = TypeVar("Content")


class InputPlace(NamedTuple):
    """A position in the input.

    ``file`` is the index of the file, ``offset`` counts the bytes before the position in that file,
    and ``records`` counts the records before it in all files.
    """

    file: int
    offset: int
    records: int

    def after(self, records: Sequence[bytes], delimiter: bytes) -> InputPlace:
        """Return the position behind these records and their delimiters."""
        size = sum(map(len, records)) + len(records) * len(delimiter)
        return InputPlace(self.file, self.offset + size, self.records + len(records))


START = InputPlace(0, 0, 0)


@dataclass(slots=True, eq=False)
class InputBatch(Generic[InputRecord]):
    """Records that were read together, with the indexes of the unconfirmed ones.

    ``pending`` counts the unfinished publishes of the batch, plus one until all have been started.
    ``unconfirmed`` maps the index of a record to the nsqd that have not confirmed it (None: all).
    ``retryable`` contains the indexes of the unconfirmed records that may be published again.
    ``start`` and ``end`` are the positions of the input before and after the batch.
    """

    records: Sequence[InputRecord]
    start: InputPlace = START
    end: InputPlace = START
    retryable: set[int] = field(default_factory=set)
    unconfirmed: dict[int, Collection[str] | None] = field(default_factory=dict)
    pending: int = 1


class RecordSource:
    """Read inputs one after the other.

    ``paths`` are files; ``-`` is standard input. ``is_stopped`` is called between reads, and a wait
    for input ends within `STOP_CHECK_S` after it returns True. Reading begins at ``start``.
    ``place`` is the end of the latest batch, and ``bytes_read`` counts the bytes of all files. With
    a ``rate`` no batch has more records than are sent in a second.
    """

    def __init__(
        self,
        paths: Sequence[str],
        delimiter: bytes,
        is_stopped: Callable[[], bool],
        start: InputPlace = START,
        rate: float = 0.0,
    ) -> None:
        self.place = start
        self._max_records = min(BATCH_RECORDS, math.ceil(rate)) or BATCH_RECORDS
        self.bytes_read = start.offset
        self._paths = paths
        self._delimiter = delimiter
        self._is_stopped = is_stopped
        # The last record of a file may have no delimiter. The position must not count its bytes.
        self._missing_end_bytes = 0
        self._records: list[bytes] = []
        self._records_bytes = 0

    def batches(self) -> Iterator[InputBatch[bytes]]:
        """Iterate over batches of records, without their delimiters.

        Raises `OutputError` for an unreadable file, and `NsqError` for a record that is longer than
        `MAX_RECORD_BYTES`.
        """
        for file, path in enumerate(self._paths):
            if file < self.place.file:
                continue
            name = "standard input" if path == "-" else path
            with translating_file_errors("read", name):
                # A blocking open of a FIFO would wait for its writer and delay a stop.
                descriptor = os.dup(0) if path == "-" else os.open(path, os.O_NONBLOCK)
            if path != "-":
                os.set_blocking(descriptor, True)
            elif sys.platform == "linux":
                import fcntl

                # A larger pipe lets its writer run ahead. Standard input may be no pipe.
                with suppress(OSError):
                    fcntl.fcntl(0, fcntl.F_SETPIPE_SZ, PIPE_SIZE)
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
            wait_s = LINGER_S if self._records else STOP_CHECK_S
            # A regular file is always ready.
            if not select.select([descriptor], [], [], wait_s)[0]:
                if self._records:
                    yield self._next_batch()
                continue
            with translating_file_errors("read", name):
                chunk = os.read(descriptor, READ_SIZE)
            records = splitter.feed(chunk) if chunk else splitter.end()
            if not chunk:
                self._missing_end_bytes = len(self._delimiter) * len(records)
            self._records += records
            self._records_bytes += sum(map(len, records))
            while len(self._records) >= self._max_records or self._records_bytes >= BATCH_BYTES:
                yield self._next_batch()
            if not chunk:
                break
        while self._records:
            yield self._next_batch()

    def _next_batch(self) -> InputBatch[bytes]:
        batch = self._records[: self._max_records]
        del self._records[: self._max_records]
        self._records_bytes -= sum(map(len, batch))
        start, self.place = self.place, self.place.after(batch, self._delimiter)
        if not self._records:
            self.place = self.place._replace(offset=self.place.offset - self._missing_end_bytes)
            self._missing_end_bytes = 0
        self.bytes_read += self.place.offset - start.offset
        return InputBatch(batch, start, self.place)


@contextmanager
def translating_file_errors(verb: str, name: str | Path) -> Iterator[None]:
    """Turn an ``OSError`` into an `OutputError` that names the action and the file."""
    try:
        yield
    except OSError as exc:
        raise OutputError(f"cannot {verb} {name} ({exc.strerror})") from exc


# -- checkpoints ----------------------------------------------------------------------------------


VERSION = 1
# A crash republishes at most this much time. Each save costs two fsyncs.
SAVE_INTERVAL_S = 1.0
# A file is identified by a digest of its first bytes, at most this many.
HEAD_BYTES = 4096


def read_checkpoint(
    path: Path, command: str, versions: Collection[int], parse: Callable[[Any], Content]
) -> Content | None:
    """Return the parsed content of a checkpoint, None if it does not exist.

    Raises `OutputError`, and `ConfigurationError` for a file that ``command`` has not written.
    """
    with (
        translating_file_errors("read", path),
        suppress(ValueError, LookupError, TypeError, AttributeError),
    ):
        try:
            with open_to_read(path) as file:
                content = load_json(file.read())
        except FileNotFoundError:
            return None
        if content["version"] in versions:
            return parse(content)
    raise ConfigurationError(f"{path} is not a checkpoint of {command}", hint="Give another file.")


@contextmanager
def locked_checkpoint(checkpoint: Path) -> Iterator[None]:
    """Keep other runs from using a checkpoint: both would publish the same records.

    The lock is on a second file, because the checkpoint itself is replaced. Raises `OutputError`.
    """
    # A device is refused before a lock file is created next to it.
    with translating_file_errors("read", checkpoint), suppress(FileNotFoundError):
        open_to_read(checkpoint).close()
    with translating_file_errors("write", checkpoint.absolute()):
        descriptor = lock_file(Path(f"{checkpoint}.lock"))
    if descriptor is None:
        raise OutputError(
            f"another run uses the checkpoint {checkpoint}", hint="Wait until it has ended."
        )
    with closing_fd(descriptor):
        yield


def write_checkpoint(path: Path, content: dict[str, Any]) -> None:
    """Replace a checkpoint durably. Raises `OutputError`."""
    with translating_file_errors("write", path):
        replace_file(path, json.dumps(content, indent=1).encode())


class InputCheckpoint:
    """The position of ``nsq pub`` in ``files``, stored at ``path``; an existing one is read.

    If the last record had no ``delimiter`` and has grown since, it is published again as a whole.
    Raises `ConfigurationError` for a checkpoint of other input, and `OutputError`.
    """

    def __init__(self, path: Path, files: Sequence[str], delimiter: bytes = b"\n") -> None:
        self.place = START
        self._saved: InputPlace | None = None
        self._path = path.absolute()
        self._files = [str(Path(file).absolute()) for file in files]
        self._delimiter = delimiter
        self._inodes: dict[int, int] = {}
        self._next_save_s = 0.0

        def parse(content: Any) -> tuple[list[str], InputPlace, str]:
            place = InputPlace(*(int(content[name]) for name in InputPlace._fields))
            return content["files"], place, str(content["head"])

        content = read_checkpoint(path, "nsq pub", (VERSION,), parse)
        if content is None:
            return
        saved_files, place, head = content
        if saved_files != self._files:
            raise ConfigurationError(
                f"{path} is the checkpoint of other files: {', '.join(map(str, saved_files))}",
                hint="Give the same files in the same order, or another checkpoint.",
            )
        # An empty digest means that the file had been truncated when the checkpoint was written.
        if not head or head != self._digest_head(place):
            raise ConfigurationError(
                f"{self._files[place.file]} is not the file that {path} was written for",
                hint="It was replaced or truncated; remove the checkpoint to start over.",
            )
        self.place = self._complete_record(place)

    def advance(self, batch: InputBatch[bytes]) -> None:
        """Advance over the next batch, which has ended, or to its first retryable record."""
        done = batch.records[: min(batch.retryable, default=None)]
        self.place = batch.start.after(done, self._delimiter) if batch.retryable else batch.end
        if (now := time.monotonic()) >= self._next_save_s:
            self._next_save_s = now + SAVE_INTERVAL_S
            self.save()

    def save(self) -> None:
        """Write the position durably, unless it is unchanged. Raises `OutputError`."""
        if self.place == self._saved:
            return
        source = {"files": self._files, "head": self._digest_head(self.place)}
        write_checkpoint(self._path, {"version": VERSION, **self.place._asdict(), **source})
        self._saved = self.place

    def _complete_record(self, place: InputPlace) -> InputPlace:
        """Return the position, or the one before its last record if that record has grown."""
        if not place.offset:
            return place
        import mmap

        with (
            open(self._files[place.file], "rb") as file,
            mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as content,
        ):
            last_delimiter = content.rfind(self._delimiter, 0, place.offset)
            appended = content[place.offset : place.offset + len(self._delimiter)]
        start = last_delimiter + len(self._delimiter) if last_delimiter >= 0 else 0
        if start == place.offset or appended in (b"", self._delimiter):
            return place
        return place._replace(offset=start, records=place.records - 1)

    def _digest_head(self, place: InputPlace) -> str:
        """Return a digest of the first bytes of the file, "" if it was truncated or replaced."""
        # Nothing has been read of the file yet, and it may be unreadable.
        if place == START:
            return sha256().hexdigest()
        path = self._files[place.file]
        with (
            translating_file_errors("read", path),
            suppress(FileNotFoundError),
            open(path, "rb") as file,
        ):
            status = os.fstat(file.fileno())
            is_same = self._inodes.setdefault(place.file, status.st_ino) == status.st_ino
            if is_same and status.st_size >= place.offset:
                return sha256(file.read(min(HEAD_BYTES, place.offset))).hexdigest()
        return ""


# -- repeated texts -------------------------------------------------------------------------------


_FIELD = re.compile(rb"\{(n|uuid|now)(?::([^{}]+))?\}")


def repeat_texts(
    texts: Sequence[bytes], times: int, interval_s: float, is_stopped: Callable[[], bool]
) -> Iterator[InputBatch[bytes]]:
    """Iterate over batches of ``times`` rounds of the texts.

    With an interval each round is a batch, and ``interval_s`` is the time between two rounds.
    """
    rounds = 1 if interval_s else max(1, BATCH_RECORDS // len(texts))
    next_s = time.monotonic()
    for first in range(1, times + 1, rounds):
        numbers = range(first, min(first + rounds, times + 1))
        yield InputBatch([fill_template(text, number) for number in numbers for text in texts])
        # Rounds that a stall delayed are not caught up.
        next_s = max(next_s + interval_s, time.monotonic())
        while (left_s := next_s - time.monotonic()) > 0 and numbers.stop <= times:
            if is_stopped():
                return
            time.sleep(min(left_s, STOP_CHECK_S))
        if is_stopped():
            return


def check_template(text: bytes) -> None:
    """Raise `ConfigurationError` for a field with an invalid format."""
    for field_match in _FIELD.finditer(text):
        try:
            fill_template(field_match[0], 1)
        except (ValueError, UnicodeDecodeError) as error:
            raise ConfigurationError(
                f"cannot fill in {field_match[0].decode('utf-8', 'replace')}",
                hint="Write {n}, {n:05d}, {uuid}, {now} or {now:%H:%M}.",
            ) from error


def fill_template(text: bytes, number: int) -> bytes:
    """Replace the fields of a template for message ``number``."""

    def format_field(field_match: re.Match[bytes]) -> bytes:
        name, spec = field_match.groups()
        if name == b"n":
            return format(number, spec.decode() if spec else "d").encode()
        if name == b"uuid":
            import uuid

            return str(uuid.uuid4()).encode()
        if spec:
            return format_moment(datetime.now(UTC), spec.decode()).encode()
        return utc_text(time.time()).encode()

    return _FIELD.sub(format_field, text)
