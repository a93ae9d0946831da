"""A stream over an archive, without Spark: where it starts, where a batch ends, what it reads.

Offsets and files decide everything, so that a batch planned again after a crash is the same batch.
What an offset names must exist: a file that is gone, or has other members than those counted, is
lost data and is reported.

A file that was read by its name, because it had no index yet, has a head once the index is there:
another tool copied it later, or version 0.2 listed a bucket while the file was uploaded. It is the
same file for as long as it has the name and the size that the offset names.
"""

from __future__ import annotations

import json
import logging
from bisect import bisect_left
from collections.abc import Iterator, Mapping
from dataclasses import replace
from itertools import pairwise, takewhile
from time import monotonic, sleep, time_ns

from nsqtools.archive.layout import Head, Member, TimeRange, end_of
from nsqtools.archive.place import map_concurrently
from nsqtools.errors import ConfigurationError, NsqError
from nsqtools.protocol.text import NS
from nsqtools.spark.archives.archive_files import ArchiveListing, Key, ListedFile
from nsqtools.spark.archives.damage import ArchiveDamage
from nsqtools.spark.archives.offsets import (
    Offset,
    Unread,
    advance,
    between,
    decode_offset,
    format_spans,
    spans_of,
    unite,
)
from nsqtools.spark.archives.partitions import (
    Part,
    ReadPartition,
    damage_reporter,
    is_read,
    partitions_of,
    planned_again,
)
from nsqtools.spark.archives.read_settings import (
    EARLIEST,
    LATEST,
    BatchLimits,
    ReadSettings,
    StreamSettings,
    moment,
)

log = logging.getLogger("nsqtools")

GONE_TRIES = 4
GONE_PAUSE_S = 0.05


class ArchiveStream:
    """Makes the answers of a stream's reader. Methods raise `NsqError`."""

    def __init__(self, settings: ReadSettings, stream: StreamSettings) -> None:
        self._last_batch_s = monotonic()
        self._settings = settings
        self._stream = stream
        self._tell = damage_reporter(settings)
        self._listing = ArchiveListing(settings)
        self._listed: dict[Key, ListedFile] = {}
        self._frozen: Mapping[Key, Unread] | None = None
        self._names: dict[Head, str] = {}  # of files that were there and are not read
        self._told: set[str] = set()
        self._reached: Offset | None = None

    # -- where it starts ------------------------------------------------------------------------

    def initial(self) -> Offset:
        """Return where a new stream starts."""
        starting = self._stream.starting_offsets
        if self._stream.starting_timestamp_ns is not None:
            return self._everything_before(self._stream.starting_timestamp_ns)
        if starting.lower() == EARLIEST:
            return Offset(is_start=True)
        if starting.lower() == LATEST:
            return self._everything_before(None)
        try:
            document = json.loads(starting)
        except ValueError:
            raise ConfigurationError(
                f"option startingOffsets={starting!r} is not earliest, latest, or JSON"
            ) from None
        return replace(decode_offset(document), is_start=True, began=None)

    @planned_again
    def _everything_before(self, timestamp_ns: int | None) -> Offset:
        """Return the offset that leaves out what is older than a time; without one, all."""
        unread = self._unread(Offset(), self._files())
        older = filter(None, (_before(each, timestamp_ns) for each in unread))
        return replace(advance(older, Offset(), BatchLimits()), is_start=True)

    # -- where the next batch ends --------------------------------------------------------------

    @planned_again
    def latest(self, start: Offset, limits: BatchLimits) -> Offset:
        """Return where the next batch ends, or ``start`` when there is nothing new."""
        refuse_wider(start.within, self._settings.within)
        files = self._files_with([*start.under_way, *start.unread])
        lost = [head for head in start.under_way if self._is_lost(head, start, files)]
        lost += self._deleted_unread(start, files)
        self._report_gaps(start, files)
        end = advance(self._unread(start, files), start.with_read(lost), limits)
        self._names = {head: name for head, name in self._names.items() if not start.has_read(head)}
        self._reached = start
        if end is not start and not self._waits_for_more():
            self._last_batch_s = monotonic()
            self._reached = replace(end, within=self._settings.within)
        return self._reached

    def _waits_for_more(self) -> bool:
        """Whether too little is there for a batch, and it has not waited long for more."""
        waited_s = monotonic() - self._last_batch_s
        is_needless = not self._stream.min_rows or self._frozen is not None
        if is_needless or waited_s >= self._stream.max_delay_s or (lag := self.lag()) is None:
            return False
        return lag["rows_behind"] < self._stream.min_rows

    @planned_again
    def freeze(self) -> None:
        """End with what there is now: ``availableNow``."""
        self._frozen = None
        self._frozen = {each.key: each for each in self._unread(Offset(), self._files())}

    def _unread(self, start: Offset, files: Mapping[Key, ListedFile]) -> Iterator[Unread]:
        some = list(self._not_read(start, files))
        is_wanted = map_concurrently(
            lambda each: is_read(each[1], self._settings, self._tell_once),
            some,
            is_remote=bool(self._settings.stored()),
        )
        for (key, file), wanted in zip(some, is_wanted, strict=True):
            if not wanted:
                continue
            end, is_finished = file.end(), file.is_finished
            if self._frozen is not None:
                frozen = self._frozen[key]
                end, is_finished = min(end, frozen.end), frozen.is_finished
            begin = start.position(key) if isinstance(key, Head) else 0
            yield Unread(file, begin, end, is_finished)

    def _not_read(
        self, start: Offset, files: Mapping[Key, ListedFile]
    ) -> Iterator[tuple[Key, ListedFile]]:
        for key, file in files.items():
            if self._frozen is not None and key not in self._frozen:
                continue
            if isinstance(key, Head):
                size = start.files.get(file.name)  # of one that was read by its name
                if start.has_read(key) or (file.is_finished and size and size == file.size()):
                    file.forget_members()
                    continue
                self._names[key] = file.shown
            elif not file.is_finished or self._was_read(file, start):
                continue
            yield key, file

    def _was_read(self, file: ListedFile, start: Offset) -> bool:
        before = start.files.get(file.name)
        if before is not None and (size := file.size()) != before:
            problem = f"it has {size} bytes, and had {before} when it was read"
            problem += ": what is new is not read"
            self._tell_once(ArchiveDamage(file.shown, before, problem))
        return before is not None

    def _tell_once(self, damage: ArchiveDamage) -> None:
        """Report a file's damage once: files are looked at again and again."""
        if damage.file not in self._told:
            self._tell(damage)
            self._told.add(damage.file)

    # -- how much there is ----------------------------------------------------------------------

    def lag(self) -> dict[str, int] | None:
        """Return how much of what the last look found follows the offset it gave; None if unknown.

        Seconds are those since the oldest unread message was published. Files without an index
        count bytes only.
        """
        if self._reached is None:
            return None
        try:
            unread = self._unread(self._reached, self._listed)
            found = [each.file.amount(each.begin, each.end) for each in unread]
        except OSError:  # a file is moving
            return None
        rows, size = sum(rows for rows, _, _ in found), sum(size for _, size, _ in found)
        oldest_ns = min((moment for _, _, moment in found if moment), default=0)
        seconds = max(0, (time_ns() - oldest_ns) // NS) if oldest_ns else 0
        return {"rows_behind": rows, "bytes_behind": size, "seconds_behind": seconds}

    @planned_again
    def has_only_younger(self, timestamp_ns: int) -> bool:
        """Whether each writer's last member has only messages published since a time."""
        newest: dict[str, Member] = {}
        files = {key: file for key, file in self._files().items() if isinstance(key, Head)}
        for head in sorted(files):
            if members := files[head].members():
                newest[head.writer] = members[-1]
        return bool(newest) and all(m.min_ts >= timestamp_ns for m in newest.values())

    # -- what a batch reads ---------------------------------------------------------------------

    @planned_again
    def plan(self, start: Offset, end: Offset) -> list[ReadPartition]:
        """Plan to read what lies between two offsets."""
        begun = end.began or start
        moved = [head for head, at in end.under_way.items() if at != begun.position(head)]
        heads = [*end.heads_beyond(begun), *moved]
        parts = self._parts(begun, end, heads, self._files_with(heads))
        return partitions_of(parts, self._settings)

    def _parts(
        self, start: Offset, end: Offset, heads: list[Head], files: Mapping[Key, ListedFile]
    ) -> Iterator[Part]:
        for head in heads:
            if self._is_lost(head, start, files) or self._is_lost(head, end, files):
                continue
            file = files[head]
            upto = end.under_way.get(head)
            if is_read(file, self._settings, self._tell_once):
                members = file.readable()
                upto = upto if upto is not None else end_of(members)
                yield file, between(members, start.position(head), upto)
        by_name = {file.name: file for file in files.values() if file.is_finished}
        for name in sorted(end.files.keys() - start.files.keys()):
            listed = files.get(name) or by_name.get(name)
            if listed is None or listed.size() < end.files[name]:
                self._lose(f"{name} is gone, or shorter than it was")
            elif is_read(listed, self._settings, self._tell_once):
                yield listed, listed.readable()

    def commit(self, end: Offset) -> None:
        """Leave the archive as it is."""

    def stop(self) -> None:
        """Nothing runs."""

    # -- what is gone ---------------------------------------------------------------------------

    def _files(self) -> dict[Key, ListedFile]:
        self._listed = self._listing.files(self._tell_once)
        return self._listed

    def _files_with(self, heads: list[Head]) -> dict[Key, ListedFile]:
        """List the files, again while one is missing: it may be moving."""
        for _ in range(GONE_TRIES):
            files = self._files()
            if all(head in files for head in heads):
                break
            sleep(GONE_PAUSE_S)
        return files

    def _deleted_unread(self, start: Offset, files: Mapping[Key, ListedFile]) -> list[Head]:
        """Return, and report, the files that held messages and are gone without being read."""
        gone = [head for head in start.unread if head not in files]
        for writer, spans in spans_of(gone).items():
            numbers = format_spans(spans)
            self._lose(f"file {numbers} of writer {writer} was deleted before it was read")
        self._told.update(f"{self._name(head)} is gone" for head in gone)  # not again in `plan`
        return gone

    def _name(self, head: Head) -> str:
        return self._names.get(head) or f"file {head.number} of writer {head.writer}"

    def _report_gaps(self, start: Offset, files: Mapping[Key, ListedFile]) -> None:
        """Report numbers of files that this stream never saw, between others that it did.

        They may have been deleted before it looked, or never have been: see `TopicLock`.
        """
        seen = {*(key for key in files if isinstance(key, Head)), *start.under_way, *start.unread}
        for writer, spans in spans_of(seen).items():
            known = unite([*spans, *start.read.get(writer, ())])
            gaps = [(one[1] + 1, other[0] - 1) for one, other in pairwise(known)]
            reached = max((high for _, high in start.read.get(writer, ())), default=0)
            new = format_spans(gap for gap in gaps if gap[1] > reached)
            if new and f"{writer} {new}" not in self._told:
                self._told.add(f"{writer} {new}")
                log.warning(
                    "file %s of writer %s is missing in %s: deleted before this stream saw it, "
                    "or never written (the archiver crashed, or its disk was full)",
                    new,
                    writer,
                    ", ".join(self._settings.paths),
                )

    def _is_lost(self, head: Head, offset: Offset, files: Mapping[Key, ListedFile]) -> bool:
        """Whether a file lacks what an offset says was there; reports it."""
        if head not in files:
            self._lose(f"{self._name(head)} is gone")
            return True
        position = offset.position(head)
        file = files[head]
        members = file.readable()
        at = bisect_left(members, position, key=lambda member: member.end)
        size = file.size()
        if position and (at == len(members) or members[at].end != position or size < position):
            self._lose(f"{file.shown} has no member that ends at byte {position} (of {size})")
            return True
        return False

    def _lose(self, what: str) -> None:
        where = ", ".join(self._settings.paths)
        if self._stream.fail_on_data_loss:
            raise NsqError(
                f"{what}: messages of {where} are lost to this stream",
                hint="Restore the file, or continue without it with failOnDataLoss=false.",
            )
        if what not in self._told:
            self._told.add(what)
            log.warning("%s: messages of %s are lost; continuing without them", what, where)


def refuse_wider(before: TimeRange, now: TimeRange) -> None:
    """Refuse times that are wider than before: older messages are behind the offset, and would be
    silently left out. Raises `ConfigurationError`."""
    was_since, was_until = before.since_ns, before.until_ns
    wider = ""
    if was_since is not None and (now.since_ns is None or now.since_ns < was_since):
        wider = f"since was {moment(was_since, up=999)}"
    elif was_until is not None and (now.until_ns is None or now.until_ns > was_until):
        wider = f"until was {moment(was_until)}"
    if wider:
        raise ConfigurationError(
            f"option {wider} for this checkpoint: messages that were skipped do not come again",
            hint="Give it as it was; read the others as a batch, or with a new checkpoint.",
        )


def _before(unread: Unread, timestamp_ns: int | None) -> Unread | None:
    """Return what of a file is older than a time; None when nothing is."""
    if timestamp_ns is None:
        return unread
    members = unread.members()
    older = list(takewhile(lambda each: each.max_ts and each.max_ts < timestamp_ns, members))
    if len(older) == len(members):
        return unread
    if not older:
        return None
    return unread._replace(end=older[-1].end, is_finished=False)
