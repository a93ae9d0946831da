"""What is known of a file's upload, beside the file, so that the next process goes on with it.

    .NAME.uploading    the object that the file becomes; written before anything is uploaded, and
                       locked by the process that does it
    .NAME.uploaded     the same when it is there, whole and verified

While both are there what comes after an upload, such as the removal of the file, is still to be
done.

The name of the object is decided once and written down: a later attempt, by whichever process and
under whichever host name, continues under the same name, so nothing is stored under two.

With ``--delete-uploaded`` only the data goes at once. The index stays for as long as a journal may
ask whether a message is written, or a message whose FIN was lost would be written twice.
"""

from __future__ import annotations

import json
import os
import time
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path

from nsqtools.archive.journal import KEPT_FOR_S
from nsqtools.archive.layout import hidden_below, index_of, owner_of
from nsqtools.files.durable import blaming, replace_file, sync_folder, write_all
from nsqtools.files.locks import try_lock
from nsqtools.files.opening import NotRegularError, open_to_read, open_to_write

UPLOADING = ".uploading"
UPLOADED = ".uploaded"


@dataclass(frozen=True, slots=True)
class UploadRecord:
    """The storage and the name of the object there."""

    url: str
    name: str

    def encode(self) -> bytes:
        """Return the content of the file."""
        return json.dumps(asdict(self)).encode() + b"\n"


def decode_record(data: bytes) -> UploadRecord | None:
    """Return what a file says; None if it was torn."""
    try:
        document = json.loads(data)
        return UploadRecord(str(document["url"]), str(document["name"]))
    except (ValueError, KeyError, TypeError):
        return None


def uploading_of(path: Path) -> Path:
    """Return the record of the upload that is under way."""
    return path.with_name(f".{path.name}{UPLOADING}")


def uploaded_of(path: Path) -> Path:
    """Return the record of the upload that is done."""
    return path.with_name(f".{path.name}{UPLOADED}")


class UploadLock:
    """The locked record of one file. Raises ``OSError``; `taken` is None when another has it."""

    def __init__(self, path: Path, descriptor: int) -> None:
        self._path = path
        self._descriptor = descriptor

    @classmethod
    def take(cls, path: Path) -> UploadLock | None:
        """Lock a file's upload; None when another process is at it or has just done it."""
        descriptor = open_to_write(uploading_of(path), os.O_RDWR | os.O_CREAT)
        if try_lock(descriptor) and os.fstat(descriptor).st_nlink:
            return cls(path, descriptor)
        os.close(descriptor)
        return None

    def read(self) -> UploadRecord | None:
        """Return what an earlier attempt wrote down."""
        return decode_record(os.pread(self._descriptor, 1 << 16, 0))

    def write(self, record: UploadRecord) -> None:
        """Write the record down, durably."""
        with blaming(uploading_of(self._path)):
            os.ftruncate(self._descriptor, 0)
            os.lseek(self._descriptor, 0, os.SEEK_SET)
            write_all(self._descriptor, record.encode())
            os.fsync(self._descriptor)
        sync_folder(self._path.parent)

    def done(self, record: UploadRecord) -> None:
        """The object is there, whole and verified."""
        replace_file(uploaded_of(self._path), record.encode())

    def release(self) -> None:
        """Let others try; the record stays."""
        os.close(self._descriptor)


def files_to_upload(directory: Path) -> Iterator[Path]:
    """Iterate over the finished files below a directory that have an index and are not uploaded,
    or not all that comes after it is done.

    What has no index was not written by an archiver, and is left alone. Raises ``OSError``.
    """
    for index in hidden_below(directory, ".index"):
        path = owner_of(index)
        is_over = uploaded_of(path).exists() and not uploading_of(path).exists()
        if path.is_file() and not is_over:
            yield path


def remove_old_records(directory: Path) -> None:
    """Remove what is left of files that were uploaded and removed long ago. Raises ``OSError``."""
    oldest = time.time() - KEPT_FOR_S
    for record in list(hidden_below(directory, UPLOADED)):
        path = owner_of(record)
        if not path.exists() and record.stat().st_mtime < oldest:
            index_of(path).unlink(missing_ok=True)
            record.unlink(missing_ok=True)
    for record in list(hidden_below(directory, UPLOADING)):
        path = owner_of(record)
        if not path.exists() and not index_of(path).exists():
            record.unlink(missing_ok=True)


def was_uploaded(path: Path) -> UploadRecord | None:
    """Return where a file is stored, if it is. Raises ``OSError``."""
    try:
        with open_to_read(uploaded_of(path)) as file:
            return decode_record(file.read(1 << 16))
    except (FileNotFoundError, NotRegularError):
        return None
