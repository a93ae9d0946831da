"""Names of archive files, from a format with tokens, and the limits for rotation.

    <TOPIC>.<HOST><REV>.<DATETIME>.log        nsq_to_file's default
    <TOPIC>/<PARTITION>/<HOST>-<PID><REV>.jsonl

A name is built in two steps. `FileNaming.stem` fills in every token except ``<REV>``; files are
rotated when the stem changes. `with_rev` then names the n-th file of a stem. A format does not need
``<REV>``: the first file has no number, and later files of the same name get it before the
extension, so no name is used twice.

Two traps of nsq_to_file are avoided. Only times go through strftime, so literal digits in a format
are kept. And no name leaves its directory, even for the valid topic ``..``.

`Rotation` determines when a file is full or old enough. An interval is aligned to the clock: with
1h, files rotate on the hour. An age counts from the opening of a file. A file exceeds its size by
at most one flush.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from datetime import datetime
from enum import Enum
from pathlib import PurePosixPath

from nsqtools.errors import ConfigurationError
from nsqtools.protocol.text import format_moment

DEFAULT_FORMAT = "<TOPIC>.<HOST><REV>.<DATETIME>.log"
DEFAULT_DATETIME_FORMAT = "%Y-%m-%d_%H"
DEFAULT_PARTITION_FORMAT = "%Y-%m-%d"

REV = "<REV>"


class Codec(Enum):
    """The compression of an existing file, by an archiver or by another program.

    Arrow is no compression, but its columns are read as text as well: see `arrow_member`.
    """

    NONE = "none"
    GZIP = "gzip"
    ZSTD = "zstd"
    XZ = "xz"
    BZIP2 = "bzip2"
    ARROW = "arrow"

    @property
    def is_compressed(self) -> bool:
        """Whether members can be found without an index, by their own headers."""
        return self is not Codec.NONE


class FileFormat(Enum):
    """The content of new files: lines of JSON, bare bodies, or columns of Arrow."""

    jsonl = "jsonl"
    raw = "raw"
    arrow = "arrow"


class Compression(Enum):
    """The compression of new files."""

    NONE = "none"
    GZIP = "gzip"
    ZSTD = "zstd"


EXTENSIONS = {Codec.GZIP: ".gz", Codec.ZSTD: ".zst", Codec.ARROW: ".arrow"}


@dataclass(frozen=True, slots=True)
class FileNaming:
    """A filename format and the values of its tokens; ``extension`` is appended if missing.

    ``<DATETIME>`` is the time of arrival. ``<PARTITION>`` is the time of arrival or of the message,
    as the caller decides. Raises `ConfigurationError` for a format that cannot name a file.
    """

    format: str = DEFAULT_FORMAT
    datetime_format: str = DEFAULT_DATETIME_FORMAT
    partition_format: str = DEFAULT_PARTITION_FORMAT
    host: str = ""
    pid: int = 0
    extension: str = ""

    def __post_init__(self) -> None:
        try:
            self.stem("topic", datetime(2000, 1, 1), datetime(2000, 1, 1))
        except UnicodeEncodeError as exc:
            raise ConfigurationError(f"the format of times {exc.object!r} is not UTF-8") from None

    def stem(self, topic: str, arrival: datetime, partition: datetime) -> str:
        """Return the name with ``<REV>`` left in it, relative to the directory of the archive.

        Raises `ConfigurationError` if the name is hidden or outside of that directory.
        """
        name = self.format
        name = name.replace("<DATETIME>", format_moment(arrival, self.datetime_format))
        name = name.replace("<PARTITION>", format_moment(partition, self.partition_format))
        name = name.replace("<HOST>", self.host).replace("<PID>", str(self.pid))
        name = name.replace("<TOPIC>", topic)
        if self.extension and not name.endswith(self.extension):
            name += self.extension
        _check(name)
        return name

    @property
    def changes_each_second(self) -> bool:
        """Whether names with the time of arrival can change within a minute."""
        first, last = (datetime(2000, 1, 1, 0, 0, second) for second in (0, 59))
        return self.stem("topic", first, first) != self.stem("topic", last, last)


def with_rev(stem: str, rev: int) -> str:
    """Return the name of the file number ``rev`` of a stem, counted from 0."""
    number = f"-{rev:06d}"
    if REV in stem:
        return stem.replace(REV, number)
    return before_extension(stem, number) if rev else stem


def before_extension(name: str, text: str) -> str:
    """Insert a text into a name, before its extensions."""
    folder, slash, base = name.rpartition("/")
    end = len(base) - sum(map(len, _extensions(base)))
    return f"{folder}{slash}{base[:end]}{text}{base[end:]}"


def _extensions(base: str) -> list[str]:
    """Return the last extension of a name, and the one before ``.gz`` or ``.zst``, in that order.

    A suffix that is not alphabetic is no extension: dates have dots as well.
    """
    extensions: list[str] = []
    for suffix in reversed(PurePosixPath(base).suffixes):
        is_complete = bool(extensions) and extensions[-1] not in EXTENSIONS.values()
        if not suffix[1:].isalpha() or len(extensions) == 2 or is_complete:
            break
        extensions.append(suffix)
    return extensions


def _check(name: str) -> None:
    parts = name.split("/")
    if not {"", ".", ".."}.isdisjoint(parts):
        reason = "does not stay inside its directory"
    elif any(part.startswith(".") for part in parts):
        reason = "is hidden, as only files in progress are"
    elif not name.isprintable():
        reason = "contains control characters, or is not UTF-8"
    elif name.endswith((".part", ".index")):
        reason = "ends like a file in progress"
    else:
        return
    raise ConfigurationError(
        f"the file name {name!r} {reason}",
        hint="Tokens are <TOPIC> <HOST> <PID> <DATETIME> <PARTITION> <REV>.",
    )


@dataclass(frozen=True, slots=True)
class Rotation:
    """Limits of a file, None for no limit. Sizes are bytes, times are seconds.

    ``size`` is the size on disk, ``uncompressed_size`` that of the written data. Intervals begin at
    midnight of the clock that is ``utc_offset_s`` ahead of UTC.
    """

    size: int | None = None
    uncompressed_size: int | None = None
    interval_s: float | None = None
    age_s: float | None = None

    def is_full(self, size: int, uncompressed_size: int) -> bool:
        """Return whether a file of these sizes has reached a limit."""
        return (self.size is not None and size >= self.size) or (
            self.uncompressed_size is not None and uncompressed_size >= self.uncompressed_size
        )

    def is_over(
        self, opened_at_s: float, now_s: float, utc_offset_s: float = 0, *, age_s: float = 0
    ) -> bool:
        """Return whether the interval or age of a file has ended.

        The file was opened at ``opened_at_s`` (since 1970). ``age_s`` is its age by the monotonic
        clock.
        """
        if self.age_s is not None and age_s >= self.age_s:
            return True
        if self.interval_s is None:
            return False
        opened, now = ((at + utc_offset_s) // self.interval_s for at in (opened_at_s, now_s))
        return opened != now


# Of each token. A host is the short name, and a time may contain folders.
_TOKENS = {
    "<TOPIC>": r"(?P<topic>[.a-zA-Z0-9_-]+?(?:#ephemeral)?)",
    "<HOST>": "[^/.]+?",
    "<PID>": r"\d+",
    "<REV>": r"(?:-?\d+)?",
    "<DATETIME>": "[^.]+?",
    "<PARTITION>": "[^.]+?",
}


def topic_pattern(format: str) -> re.Pattern[str]:
    """Return the pattern of the names by a format, or by the beginning of a format.

    Raises `ConfigurationError` for a format without exactly one ``<TOPIC>``, or without the text
    that ends the topic.
    """
    rest = format.partition("<TOPIC>")[2].removeprefix(REV)
    if format.count("<TOPIC>") != 1 or not rest or rest.startswith(tuple(_TOKENS)):
        raise ConfigurationError(
            f"{format!r} must have <TOPIC> once, and text after it",
            hint="Write '<TOPIC>.', or the whole format.",
        )
    parts = re.split(f"({'|'.join(_TOKENS)})", format)
    return re.compile("".join(_TOKENS.get(part, re.escape(part)) for part in parts))


def topic_in(pattern: re.Pattern[str], name: str) -> str | None:
    """Return the topic in the name of a file, which may be below folders; None without one.

    A format without folders applies to the last part of the name.
    """
    relative = name if "/" in pattern.pattern.replace("[^/.]", "") else name.rpartition("/")[2]
    match = pattern.match(relative)
    return match["topic"] if match else None
