"""What archives hold: how many messages of which topic and day are in which file.

It is read from the indexes, so that terabytes are counted in seconds. Only members that contain a
midnight are unpacked; files without an index, or with data after it, are read whole. The counts are
compared with what Spark reads later: two independent readings.

A file that nsq to-file wrote has one topic; its first and last member are checked for it. Of a file
in progress the durable part counts. In an object store nothing is checked ahead: whether a file has
one topic, as its index implies, the compaction itself finds out.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import UTC, date, datetime, timedelta
from itertools import islice
from pathlib import Path
from typing import NamedTuple

from nsqtools.archive.finding import ArchiveFile, find_archives, foreign_file
from nsqtools.archive.layout import INDEX, Member, owner_of
from nsqtools.archive.members import codec_at, scan_members
from nsqtools.archive.reader import read_messages
from nsqtools.archive.storage import failure_of
from nsqtools.errors import OutputError
from nsqtools.files.opening import open_to_read
from nsqtools.protocol.names import is_valid_name
from nsqtools.protocol.text import NS
from nsqtools.records.envelope import Envelope, decode
from nsqtools.spark.archives.archive_files import UNKNOWN, LineKind, StoredArchive, StoredListing
from nsqtools.spark.archives.partition_reader import open_range, pieces
from nsqtools.spark.archives.partitions import Range
from nsqtools.spark.archives.read_settings import ReadSettings
from nsqtools.spark.location import Location, StoredPlace

DAY_NS = 86_400 * NS
_EPOCH = date(1970, 1, 1).toordinal()


def day_of(timestamp_ns: int) -> date:
    """Return the day of a time. Every 64-bit number is one: from 1677 to 2262."""
    return date.fromordinal(_EPOCH + timestamp_ns // DAY_NS)


def begin_ns(day: date) -> int:
    """Return the first nanosecond of a day."""
    return (day.toordinal() - _EPOCH) * DAY_NS


def end_ns(day: date) -> int:
    """Return the first nanosecond after a day."""
    return begin_ns(day) + DAY_NS


def closes_at(day: date, grace_s: float) -> datetime:
    """Return when a day is over and its messages had ``grace_s`` to arrive."""
    midnight = datetime(day.year, day.month, day.day, tzinfo=UTC) + timedelta(days=1)
    return midnight + timedelta(seconds=grace_s)


class Slot(NamedTuple):
    """A topic on a day; both None for bare bodies."""

    topic: str | None
    day: date | None


UNDATED = Slot(None, None)
MOST_NAMES = 3


@dataclass(frozen=True, slots=True)
class CountedFile:
    """A file and the messages in it. ``damage`` is what could not be read, empty for nothing."""

    path: Location
    key: str
    """Its head, which stays when it moves; without one its path."""
    size: int
    mtime_ns: int
    members: int
    messages: Mapping[Slot, int]
    is_in_progress: bool = False
    is_compressed: bool = True
    has_index: bool = True
    min_ts: int | None = None
    damage: str = ""
    invalid_topics: str = ""
    """Names the topics that NSQ does not allow; their messages are not in ``messages``."""

    @property
    def topics(self) -> set[str | None]:
        return {slot.topic for slot in self.messages}

    @property
    def total(self) -> int:
        """How many messages it has."""
        return sum(self.messages.values())


@dataclass(slots=True)
class Count:
    """What was counted in a file, and what was wrong with it."""

    messages: Counter[Slot] = field(default_factory=Counter)
    damage: list[str] = field(default_factory=list)
    invalid: Counter[str] = field(default_factory=Counter)

    def on_damage(self, _path: str, problem: str) -> None:
        self.damage.append(problem)

    def add(self, messages: Iterable[Envelope]) -> None:
        """Count messages by their content."""
        for message in messages:
            day = day_of(message.timestamp_ns) if message.topic else None
            self.count(message.topic or None, day, 1)

    def count(self, topic: str | None, day: date | None, messages: int) -> None:
        """Count messages. A topic becomes a directory and an option: only NSQ's names may."""
        if topic is not None and not is_valid_name(topic):
            self.invalid[topic] += messages
        else:
            self.messages[Slot(topic, day)] += messages

    def describe_invalid(self) -> str:
        """Return the invalid topics as text, "" without any."""
        if not self.invalid:
            return ""
        names = ", ".join(f"{name[:64]!r}" for name in sorted(self.invalid)[:MOST_NAMES])
        more = len(self.invalid) - MOST_NAMES
        names += f" and {more} more" if more > 0 else ""
        return f"{self.invalid.total()} messages of invalid topics: {names}"


def take_inventory(directory: Location, work_dir: Path | None = None) -> list[CountedFile]:
    """Look at all archives below a directory (or at one file).

    ``work_dir`` holds more files in progress. Of copies of a file (equal heads) one is taken.
    Raises `NotFoundError` for a missing directory, and `OutputError`.
    """
    if isinstance(directory, StoredPlace):
        return take_stored_inventory(directory)
    contents = []
    found = find_archives([directory.absolute()])
    if work_dir is not None:
        elsewhere = find_archives([work_dir.absolute()])
        found += [archive for archive in elsewhere if archive.is_in_progress]
    archives: dict[str, ArchiveFile] = {}
    for archive in found:
        archives.setdefault(key_of(archive), archive)
    for archive in archives.values():
        try:
            contents.append(look_at(archive))
        except FileNotFoundError:
            if not archive.is_in_progress:
                raise OutputError(f"{archive.path} was removed while it was read") from None
            # finished since: its messages are those of a later run, and its day is not closed
            contents.append(
                CountedFile(owner_of(archive.path), "", 0, 0, 0, {}, is_in_progress=True)
            )
        except OSError as exc:
            raise OutputError(f"cannot read {archive.path} ({exc.strerror})") from exc
    return contents


def key_of(archive: ArchiveFile) -> str:
    """Return the identity of a file, as text."""
    return archive.head.encode().decode().strip() if archive.head else str(archive.path)


def look_at(archive: ArchiveFile) -> CountedFile:
    """Count the messages of one file. Raises ``OSError``."""
    status = archive.path.stat()
    with open_to_read(archive.path) as file:
        codec = codec_at(file)
    members = archive.members or []
    if archive.is_in_progress or (members and members[-1].end == status.st_size):
        count = _by_members(archive.path, members)
    else:
        scan = scan_members(archive.path)
        members = scan.members
        if scan.damage or len(scan.topics) > 1:
            count = _by_reading(ArchiveFile.at(archive.path))
        else:
            count = _by_members(archive.path, members)
    times = [member.min_ts for member in members if member.max_ts]
    return CountedFile(
        archive.path,
        key_of(archive),
        status.st_size,
        status.st_mtime_ns,
        len(members),
        dict(count.messages),
        archive.is_in_progress,
        codec.is_compressed,
        archive.members is not None,
        min(times) if times else None,
        "; ".join(count.damage),
        count.describe_invalid(),
    )


def _by_members(path: Path, members: Sequence[Member]) -> Count:
    """Trust what is known of members that are within one day."""
    count = Count()
    ends = [next(_messages(path, member, count), None) for member in {*members[:1], *members[-1:]}]
    topics = {message.topic for message in ends if message is not None}
    if len(topics) > 1:
        return _by_reading(ArchiveFile.at(path, list(members)))
    topic = topics.pop() if topics else ""
    for member in members:
        first, last = day_of(member.min_ts), day_of(member.max_ts)
        if not topic:
            count.count(None, None, member.messages)
        elif first == last and member.max_ts:
            count.count(topic, first, member.messages)
        else:
            count.add(_messages(path, member, count))
    return count


def _by_reading(archive: ArchiveFile) -> Count:
    count = Count()
    count.add(read_messages(archive, count.on_damage))
    return count


def _messages(path: Path, member: Member, count: Count) -> Iterator[Envelope]:
    """The messages of one member; the reader would continue after it."""
    alone = ArchiveFile.at(path, [member])
    return islice(read_messages(alone, count.on_damage), member.messages)


MANIFEST = ".manifest"  # see `archive.upload`
NEWLINE = b"\n"


def take_stored_inventory(place: StoredPlace) -> list[CountedFile]:
    """Look at all archives below a place.

    Raises `NotFoundError`, `ConfigurationError` for files of other programs, and as `failure_of`
    says.
    """
    files = StoredListing([place]).files(lambda damage: None).values()
    try:
        return [_look_at_stored(file) for file in files if isinstance(file, StoredArchive)]
    except OSError as exc:
        raise failure_of(exc, "read", place) from exc


def _look_at_stored(file: StoredArchive) -> CountedFile:
    count = Count()
    content = file.content(NEWLINE)
    if content.foreign:
        raise foreign_file(file.shown, content.foreign)
    members = file.readable()
    for member in members:
        if content.kind is LineKind.bodies and member.messages != UNKNOWN:
            count.count(None, None, member.messages)
        elif _is_of_one_day(member) and content.topic:
            count.count(content.topic, day_of(member.min_ts), member.messages)
        else:
            count.add(_stored_messages(file, member, count))
    times = [member.min_ts for member in members if member.max_ts]
    return CountedFile(
        file.place,
        file.head.encode().decode().strip() if file.head else str(file.place),
        file.entry.size,
        file.entry.modified_ns,
        len(members),
        dict(count.messages),
        is_compressed=content.codec.is_compressed,
        has_index=file.has_index,
        min_ts=min(times) if times else None,
        damage="; ".join(count.damage),
        invalid_topics=count.describe_invalid(),
    )


def _is_of_one_day(member: Member) -> bool:
    is_known = member.messages != UNKNOWN and bool(member.max_ts)
    return is_known and day_of(member.min_ts) == day_of(member.max_ts)


def _stored_messages(file: StoredArchive, member: Member, count: Count) -> Iterator[Envelope]:
    """The messages of one member, or of all that no index names."""
    content = file.content(NEWLINE)
    lines = member.encode() if member.messages != UNKNOWN else b""
    wanted = Range(file.location, file.key, content, member.offset, member.end, file.shown, lines)

    def note(_pos: int, problem: str) -> None:
        count.damage.append(problem)

    with open_range(wanted, ReadSettings((file.location,))) as opened:
        for piece in pieces(opened, wanted, NEWLINE, note):
            for number, line in enumerate(_split(piece.text)):
                if content.kind is LineKind.bodies:
                    yield Envelope("", "", b"", 0, 0, line)
                    continue
                try:
                    yield decode(line)
                except ValueError as exc:
                    note(piece.pos, f"line {number + 1} is not a message: {exc}")


def _split(text: bytes) -> Sequence[bytes]:
    return text.removesuffix(NEWLINE).split(NEWLINE) if text else ()


def delete_stored(content: CountedFile) -> bool:
    """Delete an archive with its index; return False, and leave it, when it has changed.

    Raises as `failure_of` says.
    """
    place = content.path
    assert isinstance(place, StoredPlace)
    try:
        entry = place.entry()
        if (entry.size, entry.modified_ns) != (content.size, content.mtime_ns):
            return False
        place.storage.delete(place.key)
        for suffix in (INDEX, MANIFEST):
            beside = place.beside(f".{place.name}{suffix}")
            beside.storage.delete(beside.key)
    except OSError as exc:
        raise failure_of(exc, "delete", place) from exc
    return True
