"""What a file of an archive is called: a format with tokens, filled in for a topic and a time.

    <TOPIC>.<HOST><REV>.<DATETIME>.log        nsq_to_file's default
    <TOPIC>/<PARTITION>/<HOST>-<PID><REV>.jsonl

A name is made in two steps. `FileNaming.stem` fills in everything but ``<REV>``: files are rotated
when the stem changes. `with_rev` gives the n-th file of a stem its name. A format without ``<REV>``
does no harm: the first file has none, and a later one of the same name gets it before its
extension, so that a name never has to be used twice.

Two traps of nsq_to_file are avoided. Times go through strftime and nothing else (literal digits in
a format stay what they are), and a name never leaves its directory, whatever a topic is called:
``..`` is a valid topic.

`Rotation` says when a file is full or old enough. An interval is aligned to the clock: with 1h
files change on the hour, whenever they were opened. An age counts from the first moment of a file.
Sizes are limits that a file exceeds by at most one flush.
"""

from __future__ import annotations

from dataclasses import dataclass
from datetime import datetime
from enum import Enum
from pathlib import PurePosixPath

from nsqtools.errors import ConfigurationError

DEFAULT_FORMAT = "<TOPIC>.<HOST><REV>.<DATETIME>.log"
DEFAULT_DATETIME_FORMAT = "%Y-%m-%d_%H"
DEFAULT_PARTITION_FORMAT = "%Y-%m-%d"

REV = "<REV>"


class Codec(Enum):
    """What a file is compressed with: `Compression`, or what other programs made of it."""

    NONE = "none"
    GZIP = "gzip"
    ZSTD = "zstd"
    XZ = "xz"
    BZIP2 = "bzip2"

    @property
    def is_compressed(self) -> bool:
        """Whether the bytes alone show where a member begins and ends."""
        return self is not Codec.NONE


class Compression(Enum):
    """What an archiver compresses files with."""

    NONE = "none"
    GZIP = "gzip"
    ZSTD = "zstd"


EXTENSIONS = {Codec.GZIP: ".gz", Codec.ZSTD: ".zst"}


@dataclass(frozen=True, slots=True)
class FileNaming:
    """A filename format and the values of its tokens; ``extension`` is appended if missing.

    ``<DATETIME>`` is the time of arrival, ``<PARTITION>`` that of arrival or of the message, as the
    caller decides. Raises `ConfigurationError` for a format that cannot name a file.
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
        """Return the name but for its ``<REV>``, relative to the directory of the archive.

        Raises `ConfigurationError` when it would be hidden, or lie outside of that directory.
        """
        name = self.format
        name = name.replace("<DATETIME>", arrival.strftime(self.datetime_format))
        name = name.replace("<PARTITION>", partition.strftime(self.partition_format))
        name = name.replace("<HOST>", self.host).replace("<PID>", str(self.pid))
        name = name.replace("<TOPIC>", topic)
        if self.extension and not name.endswith(self.extension):
            name += self.extension
        _check(name)
        return name

    @property
    def changes_each_second(self) -> bool:
        """Whether a name made of the time of arrival can change within a minute."""
        first, last = (datetime(2000, 1, 1, 0, 0, second) for second in (0, 59))
        return self.stem("topic", first, first) != self.stem("topic", last, last)


def with_rev(stem: str, rev: int) -> str:
    """Return the name of the file number ``rev`` of a stem, counted from 0."""
    number = f"-{rev:06d}"
    if REV in stem:
        return stem.replace(REV, number)
    return before_extension(stem, number) if rev else stem


def before_extension(name: str, text: str) -> str:
    """Return a name with a text put in before its extensions."""
    folder, slash, base = name.rpartition("/")
    end = len(base) - sum(map(len, _extensions(base)))
    return f"{folder}{slash}{base[:end]}{text}{base[end:]}"


def _extensions(base: str) -> list[str]:
    """The extension of a name, and the one before ``.gz`` or ``.zst``, last first.

    Dates have dots too.
    """
    found: list[str] = []
    for suffix in reversed(PurePosixPath(base).suffixes):
        is_whole = bool(found) and found[-1] not in EXTENSIONS.values()
        if not suffix[1:].isalpha() or len(found) == 2 or is_whole:
            break
        found.append(suffix)
    return found


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
    """Limits of a file; each None means without. Sizes are bytes, times seconds.

    ``size`` is what the file takes on disk, ``uncompressed_size`` what was put in. An interval
    begins at midnight of the clock that is ``utc_offset_s`` ahead of UTC.
    """

    size: int | None = None
    uncompressed_size: int | None = None
    interval_s: float | None = None
    age_s: float | None = None

    def is_full(self, size: int, uncompressed_size: int) -> bool:
        """Tell whether a file of these sizes takes no more."""
        return (self.size is not None and size >= self.size) or (
            self.uncompressed_size is not None and uncompressed_size >= self.uncompressed_size
        )

    def is_over(
        self, opened_at_s: float, now_s: float, utc_offset_s: float = 0, *, age_s: float = 0
    ) -> bool:
        """Tell whether the time of a file opened at ``opened_at_s`` (since 1970) is over.

        ``age_s`` is measured by the monotonic clock.
        """
        if self.age_s is not None and age_s >= self.age_s:
            return True
        if self.interval_s is None:
            return False
        opened, now = ((at + utc_offset_s) // self.interval_s for at in (opened_at_s, now_s))
        return opened != now
