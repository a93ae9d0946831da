"""The form of a file: messages (jsonl), bare bodies, or a format of other programs. Pure.

`form_of_text` decides it for all readers, by the first 64 KiB of the text: one line that is a
message is enough. A first line alone would not do: it may be damaged, blank or a comment, or the
file may begin within a line. Where a file has messages, its other lines are damage; a body that
readers do not take for a message is published or stored as it is, so a wrong guess for bodies
cannot be undone.

The index does not decide, because indexes of raw files have times as well. It only rules out that
another program wrote the file.
"""

from __future__ import annotations

import json
import re
from contextlib import suppress
from enum import Enum
from typing import NamedTuple

from nsqtools.archive.members import CorruptError, Unpacker, codec_of, is_decodable
from nsqtools.errors import NsqError
from nsqtools.records.envelope import decode
from nsqtools.records.naming import Codec

HEAD_SIZE = 1 << 16
"""Bytes of text that decide the form."""
ZSTD_BLOCK_SIZE = 1 << 17
"""Largest block of zstd, of which nothing is unpacked before all of it has been read."""
BEGINNING_SIZE = HEAD_SIZE + ZSTD_BLOCK_SIZE
"""Bytes of a file that are read for its first text."""
PARQUET_MAGIC = b"PAR1"


class LineKind(Enum):
    """The content of a file's lines."""

    messages = "messages"
    bodies = "bodies"
    nothing = "nothing"


class FileForm(NamedTuple):
    """The form of a file; ``topic`` is that of the first message whose topic can be read.

    ``foreign`` is the reason why it cannot be read, or empty. ``codec`` is that of the file,
    where `reader.form_of` has read it.
    """

    kind: LineKind
    topic: str = ""
    foreign: str = ""
    codec: Codec = Codec.NONE


BEGINNING = re.compile(rb'\{"topic": "[^"]*", "nsqd": "')
_PART = re.compile(rb'", ?"nsqd": ?"[^"]*", ?"id": ?"|", ?"ts": ?-?\d+, ?"attempts": ?\d+, ?"body')
_KEYS = {"topic", "nsqd", "id", "ts", "attempts", "body", "body64"}
_LEAST_KEYS = 5  # a message has six, and damage to one key leaves five


def is_message(line: bytes) -> bool:
    """Return whether a line is a message, also a damaged one."""
    if BEGINNING.match(line) or (b'"nsqd"' in line and is_decodable(line)):
        return True
    if not _PART.search(line):
        return False
    try:
        value = json.loads(line)
    except (ValueError, RecursionError):
        return True
    return isinstance(value, dict) and len(_KEYS & value.keys()) >= _LEAST_KEYS


def form_of_text(text: bytes, *, has_index: bool = True) -> FileForm:
    """Return the form of a file by its first text, which may end within a line.

    Without an index another program may have written it.
    """
    if not text:
        return FileForm(LineKind.nothing)
    if not has_index and (foreign := foreign_format(text)).reason:
        return FileForm(LineKind.bodies, foreign=str(foreign))
    messages = list(filter(is_message, text.split(b"\n")))
    for line in messages:
        with suppress(ValueError):
            return FileForm(LineKind.messages, decode(line).topic)
    return FileForm(LineKind.messages if messages else LineKind.bodies)


def text_of(beginning: bytes) -> bytes:
    """Return the text that can be unpacked from the first bytes of a file."""
    codec = codec_of(beginning)
    if not codec.is_compressed:
        return beginning[:HEAD_SIZE]
    with suppress(CorruptError, NsqError):
        return Unpacker(codec).unpack(beginning, HEAD_SIZE)
    return b""


# -- other formats ------------------------------------------------------------------------------


class Foreign(NamedTuple):
    """The reason why a file is not read, and the remedy; both are empty for a readable file."""

    reason: str = ""
    remedy: str = ""

    def __str__(self) -> str:
        return f"{self.reason}: {self.remedy[:1].lower()}{self.remedy[1:]}".rstrip(".")


_BOM = b"\xef\xbb\xbf"
_UNPACK = "Unpack it first."
_NO_ARCHIVE = "Give the archives by name, or a folder of their own."
_FORMATS = (
    (rb"PAR1|PARE", "Parquet, not an archive", _NO_ARCHIVE),
    (rb"\x04\x22\x4d\x18|\x02\x21\x4c\x18", "lz4", _UNPACK),
    (rb"PK(\x03\x04|\x05\x06|\x07\x08)", "zip", _UNPACK),
    (rb"7z\xbc\xaf\x27\x1c", "7z", _UNPACK),
    (rb"Rar!\x1a\x07", "rar", _UNPACK),
    (rb"[\s\S]{257}ustar[ \0]", "tar", _UNPACK),
    (rb"\x1f[\x9d\xa0]", "compress (.Z)", _UNPACK),
    (rb"LZIP[\0\x01]", "lzip", _UNPACK),
    (rb"\x89LZO\0", "lzop", _UNPACK),
    (rb"\x5d\0\0[\0-\xff]{2}", "lzma", _UNPACK),
    (rb"\xff\x06\0\0sNaPpY", "snappy", _UNPACK),
    (rb"-----BEGIN PGP MESSAGE|age-encryption\.org/", "encrypted", "Decrypt it first."),
    (rb"SQLite format 3\0", "SQLite", _NO_ARCHIVE),
    (rb"ORC[\s\S]{0,12}[\0-\x08]", "ORC", _NO_ARCHIVE),
    (rb"Obj\x01", "Avro", _NO_ARCHIVE),
    (rb"ARROW1|FEA1", "Arrow", _NO_ARCHIVE),
    (rb"SEQ[\x04-\x06]|RCF\x01", "a sequence file of Hadoop", _NO_ARCHIVE),
    (rb"\x89HDF\r\n\x1a\n", "HDF5", _NO_ARCHIVE),
    (rb"\x80[\x02-\x05][\x95\x7d\x5d\x28\x63\x4b\x58\x8c]", "pickle", _NO_ARCHIVE),
    (rb"\x93NUMPY", "NumPy", _NO_ARCHIVE),
    (rb"%PDF-|\x7fELF", "a document or a program", _NO_ARCHIVE),
    (
        rb"\xff\xfe|\xfe\xff|\0\0\xfe\xff|([\t\n\r -~]\0){8}|(\0[\t\n\r -~]){8}",
        "UTF-16 or UTF-32",
        "Make UTF-8 of it: iconv -f UTF-16 -t UTF-8.",
    ),
    (
        rb'\s*\[\s*\{([^{}]{0,1000}|\s*\n([^\n]*\n){0,8}\s*)"nsqd"\s*:',
        "a JSON array",
        "Make a line of each message: jq -c '.[]'.",
    ),
    (
        rb'\s*\{\s*\n([^\n]*\n){0,8}\s*"nsqd"\s*:',
        "JSON over several lines",
        "Make a line of each message: jq -c .",
    ),
)
_FOREIGN = [(re.compile(magic), Foreign(f"it is {name}", to)) for magic, name, to in _FORMATS]


def foreign_format(text: bytes) -> Foreign:
    """Return why the text of a file, once unpacked, is not that of an archive."""
    if codec_of(text).is_compressed:
        return Foreign("it is compressed twice", _UNPACK)
    text = text.removeprefix(_BOM)
    return next((foreign for magic, foreign in _FOREIGN if magic.match(text)), Foreign())


def why_foreign(name: str, beginning: bytes) -> Foreign:
    """Return why a file without an index is not taken for an archive.

    ``name`` is relative to the place that was given, "" for a file that was named itself.
    """
    foreign = foreign_format(text_of(beginning))
    if not foreign.reason and beginning and any(part.startswith("_") for part in name.split("/")):
        return Foreign(
            "it has no index, and names that begin with _ are those of other programs",
            "An archive whose name begins with _ is read when the file itself is given.",
        )
    return foreign
