"""Upload one finished file: its index, then its data, then its manifest, verified step by step.

    topic=clicks/date=2026-11-21/clicks.web1.2026-11-21_08.web1-5b1c2f0e8d9a4e6f-17.log.gz
                                 .clicks ... .log.gz.index       as it is beside the local file
                                 .clicks ... .log.gz.manifest    sizes, hashes and counts of both

The name ends in host, writer and number, which no other file has (`layout`), so no archiver can
overwrite what another one stored. The manifest is put only if there is none: it says that what it
names is complete. Each step can be repeated after a crash at any point and gives the same objects;
a file whose manifest is there already is not uploaded again.
"""

from __future__ import annotations

import errno
import json
import re
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path, PurePosixPath
from urllib.parse import quote

from nsqtools.archive.finding import ArchiveFile
from nsqtools.archive.layout import Index, index_of, load_index, manifest_of
from nsqtools.archive.reader import look_at
from nsqtools.archive.storage import Storage, hash_of
from nsqtools.archive.upload_record import (
    UploadLock,
    UploadRecord,
    uploaded_of,
    uploading_of,
    was_uploaded,
)
from nsqtools.files.durable import sync_folder
from nsqtools.files.opening import open_to_read
from nsqtools.protocol.text import NS
from nsqtools.records.naming import before_extension

WRITER_DIGITS = 16

_NOT_IN_NAMES = re.compile(r"[^A-Za-z0-9._-]+")


class NotUploadable(OSError):
    """A retry cannot help: another file is stored under the name, or the index is gone."""


@dataclass(frozen=True, slots=True)
class UploadPlan:
    """What happens to each file below ``directory``, whose finished files are uploaded."""

    directory: Path
    storage: Storage
    host: str
    by_topic_and_date: bool = False
    deletes: bool = False


def upload(path: Path, plan: UploadPlan) -> int:
    """Upload a finished file; return its size, 0 if there was nothing to do.

    Raises `NotUploadable`, and ``OSError`` when it did not work: try again later.
    """
    if was_uploaded(path) is not None:
        _clear_up(path, plan)
        return 0
    lock = UploadLock.take(path)
    if lock is None:
        return 0
    try:
        if uploaded_of(path).exists() or not path.exists():  # by another process meanwhile
            return 0
        return _upload(path, plan, lock)
    finally:
        lock.release()


def _upload(path: Path, plan: UploadPlan, lock: UploadLock) -> int:
    index = load_index(index_of(path))
    if index is None:
        raise NotUploadable(errno.ENOENT, "it has no index", str(path))
    storage, size = plan.storage, path.stat().st_size
    record = lock.read()
    is_new = record is None or record.url != storage.url
    if record is None or is_new:
        record = UploadRecord(storage.url, object_name(path, index, plan))
        lock.write(record)
    manifest = make_manifest(path, size, index, record.name)
    has_index = is_new and _put_new_index(storage, path, record.name)
    if has_index or not _is_stored(storage, record.name, manifest):
        if not is_new:
            storage.remove_drafts(record.name)
            for beside in (index_of, manifest_of):
                storage.remove_drafts(str(beside(PurePosixPath(record.name))))
        if not has_index:
            _put_index(storage, path, record.name)
        storage.verify(record.name, path, storage.put_file(record.name, path))
        _publish(storage, record.name, manifest)
    lock.done(record)
    _clear_up(path, plan)
    return size


def object_name(path: Path, index: Index, plan: UploadPlan) -> str:
    """Return the name of a file's object. Raises ``OSError``."""
    head = index.head
    identity = f"{head.writer[:WRITER_DIGITS]}-{head.number}" if head else hash_of(path)[:32]
    token = f".{_NOT_IN_NAMES.sub('_', plan.host) or 'host'}-{identity}"
    name = before_extension(path.relative_to(plan.directory).as_posix(), token)
    if not plan.by_topic_and_date:
        return name
    topics = look_at(ArchiveFile.at(path, index.members, head)).topics
    first_ns = index.members[0].min_ts if index.members else 0
    first = datetime.fromtimestamp(first_ns / NS if first_ns else path.stat().st_mtime, UTC)
    topic = quote(min(topics), safe="") if topics else "unknown"
    return f"topic={topic}/date={first:%Y-%m-%d}/{PurePosixPath(name).name}"


def make_manifest(path: Path, size: int, index: Index, name: str) -> dict[str, object]:
    """Return what the manifest of a file says. The same file always has the same."""
    head, members = index.head, index.members
    times = [time for member in members if member.max_ts for time in (member.min_ts, member.max_ts)]
    return {
        "version": 1,
        "name": PurePosixPath(name).name,
        "size": size,
        "sha256": hash_of(path),
        "index_sha256": hash_of(index_of(path)),
        "writer": head.writer if head else None,
        "number": head.number if head else None,
        "messages": sum(member.messages for member in members),
        "min_ts": min(times) if times else None,
        "max_ts": max(times) if times else None,
    }


def _manifest_name(name: str) -> str:
    return str(manifest_of(PurePosixPath(name)))


def _put_new_index(storage: Storage, path: Path, name: str) -> bool:
    """Put the index if there is none; return whether it is ours, and so is the name.

    Then nobody has stored the file, and nothing has to be looked at before it is.
    """
    there, data = _index(path, name)
    try:
        version = storage.put_if_absent(there, data)
    except FileExistsError:
        return False
    storage.verify_data(there, data, version)
    return True


def _put_index(storage: Storage, path: Path, name: str) -> None:
    there, data = _index(path, name)
    storage.verify_data(there, data, storage.put(there, data))


def _index(path: Path, name: str) -> tuple[str, bytes]:
    with open_to_read(index_of(path)) as file:
        return str(index_of(PurePosixPath(name))), file.read()


def _is_stored(storage: Storage, name: str, manifest: dict[str, object]) -> bool:
    """Return whether the file is there already, whole. Raises `NotUploadable`."""
    try:
        stored = json.loads(storage.read(_manifest_name(name)))
    except FileNotFoundError:
        return False
    except ValueError:
        stored = None
    if stored != manifest:
        raise NotUploadable(errno.EEXIST, "another file is stored there", storage.where(name))
    try:
        return storage.stat(name).size == manifest["size"]
    except FileNotFoundError:  # somebody removed it
        return False


def _publish(storage: Storage, name: str, manifest: dict[str, object]) -> None:
    """Put the manifest. One that is there may be ours: an answer that was lost was repeated."""
    data = json.dumps(manifest, indent=1).encode() + b"\n"
    try:
        storage.put_if_absent(_manifest_name(name), data)
    except FileExistsError:
        _is_stored(storage, name, manifest)


def _clear_up(path: Path, plan: UploadPlan) -> None:
    """Do what comes after an upload; the last step is what says that it is done."""
    if plan.deletes:
        path.unlink(missing_ok=True)
        sync_folder(path.parent)
    uploading_of(path).unlink(missing_ok=True)
