"""What the archives in an object store hold, and how one of them is deleted.

As with files, the indexes say it; members that contain a midnight are read, and so are files
without an index. Whether a file has one topic, as its index implies, the compaction itself finds
out: it compares what it reads with what was counted here.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from nsqtools.archive.finding import foreign_file
from nsqtools.archive.layout import INDEX, Member
from nsqtools.archive.storage import failure_of
from nsqtools.records.envelope import Envelope, decode
from nsqtools.spark.archives.archive_files import UNKNOWN, LineKind
from nsqtools.spark.archives.partitions import Range
from nsqtools.spark.archives.read_settings import ReadSettings
from nsqtools.spark.archives.stored_archives import StoredArchive, StoredListing
from nsqtools.spark.archives.texts import open_range, pieces
from nsqtools.spark.jobs.compaction.inventory import Count, CountedFile, day_of
from nsqtools.spark.location import StoredPlace

MANIFEST = ".manifest"  # see `archive.upload`
NEWLINE = b"\n"


def take_stored_inventory(place: StoredPlace) -> list[CountedFile]:
    """Look at all archives below a place.

    Raises `NotFoundError`, `ConfigurationError` for files of other programs, and as `failure_of`
    says.
    """
    files = StoredListing([place]).files(lambda damage: None).values()
    try:
        return [_counted(file) for file in files if isinstance(file, StoredArchive)]
    except OSError as exc:
        raise failure_of(exc, "read", place) from exc


def _counted(file: StoredArchive) -> CountedFile:
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
            count.add(_messages(file, member, count))
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


def _messages(file: StoredArchive, member: Member, count: Count) -> Iterator[Envelope]:
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
