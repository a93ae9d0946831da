"""What is in a file of an archive: told by its bytes, never by its name."""

from __future__ import annotations

import re
import zlib
from enum import Enum
from typing import NamedTuple

from nsqtools.archive.members import GZIP_WINDOW, MAGIC
from nsqtools.archive.reader import ArchiveFile, is_message, read_lines
from nsqtools.records.envelope import decode

LOOK_SIZE = 1 << 12

_BEGINNING = re.compile(rb'\{"topic": "([^"\\]*)", "nsqd": "')


class Kind(Enum):
    """What the lines of a file are."""

    messages = "messages"
    bodies = "bodies"
    nothing = "nothing"


class Content(NamedTuple):
    """What the first line says; ``topic`` is that of its message."""

    kind: Kind
    is_gzip: bool
    topic: str = ""


def look_into(archive: ArchiveFile, delimiter: bytes) -> Content:
    """Read as much of a file as it takes to tell what it is. Raises ``OSError``, `OutputError`."""
    with archive.path.open("rb") as file:
        data = file.read(LOOK_SIZE)
    is_gzip = data.startswith(MAGIC)
    if is_gzip:
        try:
            data = zlib.decompressobj(GZIP_WINDOW).decompress(data, LOOK_SIZE)
        except zlib.error:
            data = b""
    if match := _BEGINNING.match(data):
        return Content(Kind.messages, is_gzip, match[1].decode("ascii", "replace"))
    return _look_well(archive, delimiter, is_gzip)


def _look_well(archive: ArchiveFile, delimiter: bytes, is_gzip: bool) -> Content:
    """Keys may stand in another order, and what comes first may be damaged."""
    problems: list[str] = []
    lines = read_lines(archive, lambda path, problem: problems.append(problem), delimiter=delimiter)
    first = next(lines, None)
    if first is None:
        # nothing that is readable in a file of ours: reading it says what is wrong
        kind = Kind.messages if problems and archive.members else Kind.nothing
        return Content(Kind.bodies if problems and not archive.members else kind, is_gzip)
    if not is_message(first[0]):
        return Content(Kind.bodies, is_gzip)
    try:
        return Content(Kind.messages, is_gzip, decode(first[0]).topic)
    except ValueError:
        return Content(Kind.messages, is_gzip)
