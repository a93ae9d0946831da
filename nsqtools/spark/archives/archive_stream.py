"""A stream over an archive, without Spark: its start, the end of each batch, and its partitions.

Plans depend only on offsets and files, so a batch that is planned again after a crash is the same
batch. The files of an offset must exist: if a file is gone, or has other members than counted,
data is lost, which is reported.

A file that was read by its name, because it had no index, may have a head later: another tool
copied the index after the file, or version 0.2 listed a bucket during the upload. It is the same
file as long as it has the name and the size in the offset.
"""

from __future__ import annotations

import logging
from bisect import bisect_left
from collections.abc import Iterator, Mapping
from dataclasses import replace
from itertools import pairwise, takewhile
from time import monotonic, sleep, time_ns

from nsqtools.archive.layout import Head, Member, TimeRange, end_of
from nsqtools.archive.place import map_concurrently
from nsqtools.errors import ConfigurationError, NsqError
from nsqtools.protocol.text import NS, load_json
from nsqtools.spark.archives.archive_files import ArchiveListing, FileKey, ListedFile
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

# A file is missing in a listing while it moves, which takes milliseconds.
MISSING_TRIES = 4
MISSING_PAUSE_S = 0.05


class ArchiveStream:
    """Plans the batches of a stream's reader. Methods raise `NsqError`."""

    def __init__(self, settings: ReadSettings, stream: StreamSettings) -> None:
        self._last_batch_s = monotonic()
        self._settings = settings
        self._stream = stream
        self._report_damage = damage_reporter(settings)
        self._listing = ArchiveListing(settings)
        self._listed: dict[FileKey, ListedFile] = {}
        self._frozen: Mapping[FileKey, Unread] | None = None
        self._names: dict[Head, str] = {}  # The names of existing files that are not read yet.
        self._reported: set[str] = set()
        self._reached: Offset | None = None

    # -- the start ------------------------------------------------------------------------------

    def initial(self) -> Offset:
        """Return the start of a new stream."""
        starting = self._stream.starting_offsets
        if self._stream.starting_timestamp_ns is not None:
            return self._everything_before(self._stream.starting_timestamp_ns)
        if starting.lower() == EARLIEST:
            return Offset(is_start=True)
        if starting.lower() == LATEST:
            return self._everything_before(None)
        try:
            document = load_json(starting)
        except ValueError:
            raise ConfigurationError(
                f"option startingOffsets={starting!r} is not earliest, latest, or JSON"
            ) from None
        return replace(decode_offset(document), is_start=True, began=None)

    @planned_again
    def _everything_before(self, timestamp_ns: int | None) -> Offset:
        """Return the offset after all messages older than a time, or without one after all."""
        unread = self._unread(Offset(), self._files())
        older = filter(None, (_older_part(file, timestamp_ns) for file in unread))
        return replace(advance(older, Offset(), BatchLimits()), is_start=True)

    # -- the end of a batch ---------------------------------------------------------------------

    @planned_again
    def latest(self, start: Offset, limits: BatchLimits) -> Offset:
        """Return the end of the next batch, or ``start`` if there is nothing new."""
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
        """Return whether the next batch waits for `StreamSettings.min_rows`."""
        waited_s = monotonic() - self._last_batch_s
        if not self._stream.min_rows or self._frozen is not None:
            return False
        if waited_s >= self._stream.max_delay_s or (lag := self.lag()) is None:
            return False
        return lag["rows_behind"] < self._stream.min_rows

    @planned_again
    def freeze(self) -> None:
        """End the stream after the current messages: ``availableNow``."""
        self._frozen = None
        self._frozen = {file.key: file for file in self._unread(Offset(), self._files())}

    def _unread(self, start: Offset, files: Mapping[FileKey, ListedFile]) -> Iterator[Unread]:
        """Yield the selected files with unread bytes."""
        unread = list(self._unread_files(start, files))
        selected = map_concurrently(
            lambda item: is_read(item[1], self._settings, self._report_once),
            unread,
            is_remote=bool(self._settings.stored()),
        )
        for (key, file), is_selected in zip(unread, selected, strict=True):
            if not is_selected:
                continue
            end, is_finished = file.end(), file.is_finished
            if self._frozen is not None:
                frozen = self._frozen[key]
                end, is_finished = min(end, frozen.end), frozen.is_finished
            begin = start.position(key) if isinstance(key, Head) else 0
            yield Unread(file, begin, end, is_finished)

    def _unread_files(
        self, start: Offset, files: Mapping[FileKey, ListedFile]
    ) -> Iterator[tuple[FileKey, ListedFile]]:
        for key, file in files.items():
            if self._frozen is not None and key not in self._frozen:
                continue
            if isinstance(key, Head):
                size = start.files.get(file.name)  # The file may have been read by its name.
                if start.has_read(key) or (file.is_finished and size and size == file.size()):
                    file.forget_members()
                    continue
                self._names[key] = file.shown
            elif not file.is_finished or self._was_read(file, start):
                continue
            yield key, file

    def _was_read(self, file: ListedFile, start: Offset) -> bool:
        old_size = start.files.get(file.name)
        if old_size is not None and (size := file.size()) != old_size:
            problem = f"it has {size} bytes, and had {old_size} when it was read"
            problem += ": what is new is not read"
            self._report_once(ArchiveDamage(file.shown, old_size, problem))
        return old_size is not None

    def _report_once(self, damage: ArchiveDamage) -> None:
        """Report a file's damage once, although every listing finds it again."""
        if damage.file not in self._reported:
            self._report_damage(damage)
            self._reported.add(damage.file)

    # -- the lag --------------------------------------------------------------------------------

    def lag(self) -> dict[str, int] | None:
        """Return the amount of data after the last offset, as of its listing; None if unknown.

        ``seconds_behind`` counts from the publishing of the oldest unread message. Files without an
        index count only bytes.
        """
        if self._reached is None:
            return None
        try:
            unread = self._unread(self._reached, self._listed)
            amounts = [item.file.amount(item.begin, item.end) for item in unread]
        except OSError:  # A file is moving.
            return None
        rows, size = sum(rows for rows, _, _ in amounts), sum(size for _, size, _ in amounts)
        oldest_ns = min((moment for _, _, moment in amounts if moment), default=0)
        seconds = max(0, (time_ns() - oldest_ns) // NS) if oldest_ns else 0
        return {"rows_behind": rows, "bytes_behind": size, "seconds_behind": seconds}

    @planned_again
    def has_only_younger(self, timestamp_ns: int) -> bool:
        """Return whether each writer's last member has only messages published since a time."""
        newest: dict[str, Member] = {}
        files = {key: file for key, file in self._files().items() if isinstance(key, Head)}
        for head in sorted(files):
            if members := files[head].members():
                newest[head.writer] = members[-1]
        return bool(newest) and all(m.min_ts >= timestamp_ns for m in newest.values())

    # -- the partitions of a batch --------------------------------------------------------------

    @planned_again
    def plan(self, start: Offset, end: Offset) -> list[ReadPartition]:
        """Plan a batch between two offsets."""
        start = end.began or start
        advanced = [head for head, pos in end.under_way.items() if pos != start.position(head)]
        heads = [*end.heads_beyond(start), *advanced]
        parts = self._parts(start, end, heads, self._files_with(heads))
        return partitions_of(parts, self._settings)

    def _parts(
        self, start: Offset, end: Offset, heads: list[Head], files: Mapping[FileKey, ListedFile]
    ) -> Iterator[Part]:
        for head in heads:
            if self._is_lost(head, start, files) or self._is_lost(head, end, files):
                continue
            file = files[head]
            if is_read(file, self._settings, self._report_once):
                members = file.readable()
                stop = end.under_way.get(head, end_of(members))
                yield file, between(members, start.position(head), stop)
        by_name = {file.name: file for file in files.values() if file.is_finished}
        for name in sorted(end.files.keys() - start.files.keys()):
            listed = files.get(name) or by_name.get(name)
            if listed is None or listed.size() < end.files[name]:
                self._report_loss(f"{name} is gone, or shorter than it was")
            elif is_read(listed, self._settings, self._report_once):
                yield listed, listed.readable()

    def commit(self, end: Offset) -> None:
        """Do nothing: a stream does not change the archive."""

    def stop(self) -> None:
        """Do nothing: no thread runs."""

    # -- lost data ------------------------------------------------------------------------------

    def _files(self) -> dict[FileKey, ListedFile]:
        self._listed = self._listing.files(self._report_once)
        return self._listed

    def _files_with(self, heads: list[Head]) -> dict[FileKey, ListedFile]:
        """List the files, repeatedly while one is missing, which may be moving."""
        for _ in range(MISSING_TRIES):
            files = self._files()
            if all(head in files for head in heads):
                break
            sleep(MISSING_PAUSE_S)
        return files

    def _deleted_unread(self, start: Offset, files: Mapping[FileKey, ListedFile]) -> list[Head]:
        """Report and return the files that had messages and were deleted without being read."""
        gone = [head for head in start.unread if head not in files]
        for writer, spans in spans_of(gone).items():
            numbers = format_spans(spans)
            self._report_loss(f"file {numbers} of writer {writer} was deleted before it was read")
        # `plan` would report the same files under their names.
        self._reported.update(f"{self._name(head)} is gone" for head in gone)
        return gone

    def _name(self, head: Head) -> str:
        return self._names.get(head) or f"file {head.number} of writer {head.writer}"

    def _report_gaps(self, start: Offset, files: Mapping[FileKey, ListedFile]) -> None:
        """Log the missing numbers of files between those that this stream has listed.

        The files may have been deleted before the first listing, or never been written: see
        `TopicLock`.
        """
        heads = {*(key for key in files if isinstance(key, Head)), *start.under_way, *start.unread}
        for writer, spans in spans_of(heads).items():
            numbers = unite([*spans, *start.read.get(writer, ())])
            gaps = [(low[1] + 1, high[0] - 1) for low, high in pairwise(numbers)]
            reached = max((high for _, high in start.read.get(writer, ())), default=0)
            new = format_spans(gap for gap in gaps if gap[1] > reached)
            if new and f"{writer} {new}" not in self._reported:
                self._reported.add(f"{writer} {new}")
                log.warning(
                    "file %s of writer %s is missing in %s: deleted before this stream saw it, "
                    "or never written (the archiver crashed, or its disk was full)",
                    new,
                    writer,
                    ", ".join(self._settings.paths),
                )

    def _is_lost(self, head: Head, offset: Offset, files: Mapping[FileKey, ListedFile]) -> bool:
        """Return, and report, whether a file lacks data that an offset counts as read."""
        if head not in files:
            self._report_loss(f"{self._name(head)} is gone")
            return True
        position = offset.position(head)
        file = files[head]
        members = file.readable()
        index = bisect_left(members, position, key=lambda member: member.end)
        size = file.size()
        has_end = index < len(members) and members[index].end == position and size >= position
        if position and not has_end:
            problem = f"{file.shown} has no member that ends at byte {position} (of {size})"
            self._report_loss(problem)
            return True
        return False

    def _report_loss(self, problem: str) -> None:
        paths = ", ".join(self._settings.paths)
        if self._stream.fail_on_data_loss:
            raise NsqError(
                f"{problem}: messages of {paths} are lost to this stream",
                hint="Restore the file, or continue without it with failOnDataLoss=false.",
            )
        if problem not in self._reported:
            self._reported.add(problem)
            log.warning("%s: messages of %s are lost; continuing without them", problem, paths)


def refuse_wider(old: TimeRange, new: TimeRange) -> None:
    """Raise `ConfigurationError` if the new range of times is wider than that of earlier batches.

    Messages outside of the old range are behind the offset, and would be omitted silently.
    """
    wider = ""
    if old.since_ns is not None and (new.since_ns is None or new.since_ns < old.since_ns):
        wider = f"since was {moment(old.since_ns, up=999)}"
    elif old.until_ns is not None and (new.until_ns is None or new.until_ns > old.until_ns):
        wider = f"until was {moment(old.until_ns)}"
    if wider:
        raise ConfigurationError(
            f"option {wider} for this checkpoint: messages that were skipped do not come again",
            hint="Give it as it was; read the others as a batch, or with a new checkpoint.",
        )


def _older_part(unread: Unread, timestamp_ns: int | None) -> Unread | None:
    """Return the part of a file that is older than a time, None for no part."""
    if timestamp_ns is None:
        return unread
    members = unread.members()
    older = list(takewhile(lambda m: m.max_ts and m.max_ts < timestamp_ns, members))
    if len(older) == len(members):
        return unread
    if not older:
        return None
    return unread._replace(end=older[-1].end, is_finished=False)
