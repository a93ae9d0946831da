"""Say what is wrong with archive files, and make them whole again.

A repaired file holds every member that is good, and from a member that is cut off the lines that
can still be read; lines that are no messages are left out, where the others are. It gets a new
index. The damaged file stays beside it as ``.NAME.damaged``.
"""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import PurePosixPath

from nsqtools.archive.codecs import members_of
from nsqtools.archive.finding import ArchiveFile
from nsqtools.archive.layout import Index, index_of, manifest_of
from nsqtools.archive.members import codec_at, scan_members
from nsqtools.archive.reader import is_message, read_messages, read_text, split_lines
from nsqtools.errors import OutputError
from nsqtools.files.durable import NEW, copy_of, replace_file, sync_folder
from nsqtools.files.opening import open_to_read
from nsqtools.records.envelope import decode

DAMAGED = ".damaged"
TABLE_REMEDY = "Restore the file, or make it again from its archive: nsq archive convert."


@dataclass(frozen=True, slots=True)
class Verification:
    """What was found in a file; without ``problems`` it is good."""

    path: str
    """Or its URL."""
    messages: int
    problems: tuple[str, ...]


def verify(archive: ArchiveFile) -> Verification:
    """Read a whole file and compare it with its index. Raises `OutputError`."""
    problems: list[str] = []

    def note(path: str, problem: str) -> None:
        problems.append(problem)

    messages = sum(1 for _ in read_messages(archive, note))
    try:
        if not problems and not archive.is_in_progress and archive.members is not None:
            size = archive.size()
            end = archive.members[-1].end if archive.members else 0
            if end != size:
                problems.append(f"its index ends at byte {end} of {size}")
        if archive.table is not None:
            if not problems and archive.messages not in (None, messages):
                problems.append(f"it has {messages} messages, and {archive.messages} in its table")
        elif archive.is_remote:
            problems += _differences_from_manifest(archive)
    except OSError as exc:
        problems.append(f"{exc.filename}: {exc.strerror}")
    return Verification(archive.shown, messages, tuple(problems))


def _differences_from_manifest(archive: ArchiveFile) -> Iterator[str]:
    """Say where a stored file is not what its manifest says; without a manifest, nothing.

    Raises ``OSError``, for an index that is not there too.
    """
    path = PurePosixPath(archive.name)
    try:
        manifest = json.loads(archive.storage.read(str(manifest_of(path))))
        size, digest = manifest["size"], manifest["index_sha256"]
    except FileNotFoundError:
        return
    except (ValueError, KeyError, TypeError):
        yield "its manifest cannot be read"
        return
    if archive.size() != size:
        yield f"its manifest says that it has {size} bytes"
    index = archive.storage.read(str(index_of(path)))
    if hashlib.sha256(index).hexdigest() != digest:
        yield "its index is not the one that was uploaded"


def repair(archive: ArchiveFile, delimiter: bytes = b"\n") -> int:
    """Make a finished file whole; return how many messages it has now. Raises `OutputError`."""
    if archive.table is not None:
        raise OutputError(
            f"cannot repair {archive.shown} (a table is not repaired)", hint=TABLE_REMEDY
        )
    path = archive.path
    beside = copy_of(path)
    try:
        with open_to_read(path) as file:
            begin_member = members_of(codec_at(file))
        count = 0
        beside.unlink(missing_ok=True)
        with os.fdopen(os.open(beside, NEW | os.O_WRONLY), "wb") as copy:
            os.fchmod(copy.fileno(), path.stat().st_mode & 0o7777)
            for text in _readable(_whole_lines(archive, delimiter), delimiter):
                compressor = begin_member()
                copy.write(compressor.compress(text) + compressor.flush())
                count += text.count(delimiter)
            copy.flush()
            os.fsync(copy.fileno())
        members = scan_members(beside).members
        replace_file(index_of(path), Index(archive.head, members).encode())
        path.rename(path.with_name(f".{path.name}{DAMAGED}"))
        beside.rename(path)
        sync_folder(path.parent)
    except OSError as exc:
        raise OutputError(f"cannot repair {path} ({exc.strerror}: {exc.filename})") from exc
    return count


def _readable(texts: Iterable[bytes], delimiter: bytes) -> Iterator[bytes]:
    """Leave out what is no message, where the first line is one."""
    is_jsonl: bool | None = None
    for text in texts:
        lines = split_lines(text, delimiter)
        if is_jsonl is None:
            is_jsonl = is_message(lines[0])
        if not is_jsonl:
            yield text
        elif good := [line for line in lines if _is_whole(line)]:
            yield delimiter.join([*good, b""])


def _is_whole(line: bytes) -> bool:
    try:
        decode(line)
    except ValueError:
        return False
    return True


def _whole_lines(archive: ArchiveFile, delimiter: bytes) -> Iterator[bytes]:
    """The text that can be read, cut at line ends; a last line without its end is left out."""
    rest = b""
    for text in read_text(archive, lambda path, problem: None):
        whole, found, rest = (rest + text).rpartition(delimiter)
        if found:
            yield whole + found
