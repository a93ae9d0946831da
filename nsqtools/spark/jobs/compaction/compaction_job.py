"""A compaction from beginning to end, and which archives may be deleted after it.

An archive may be deleted when every message in it belongs to a partition that was verified with
this very file among its inputs, and whose Parquet files still exist. One that was read with damage
stays, and so does what only may be an archive: a file of bare bodies that nsq to-file did not
write.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

from nsqtools.archive.layout import index_of
from nsqtools.errors import NotFoundError, NsqError, OutputError
from nsqtools.files.durable import sync_folder
from nsqtools.spark.archives.damage import ArchiveDamage, unreadable
from nsqtools.spark.jobs.compaction.compacted_output import (
    CompactionOutput,
    Input,
    Manifest,
)
from nsqtools.spark.jobs.compaction.compaction_plan import (
    DaySelection,
    PlannedPartition,
    State,
    changed,
    plan_partitions,
)
from nsqtools.spark.jobs.compaction.inventory import (
    UNDATED,
    CountedFile,
    Slot,
    delete_stored,
    take_inventory,
)
from nsqtools.spark.jobs.compaction.partition_job import (
    ArchiveReading,
    PartitionResult,
    compact_partition,
    compact_stored,
)
from nsqtools.spark.jobs.compaction.stored_output import StoredOutput
from nsqtools.spark.jobs.inputs import refuse_nested
from nsqtools.spark.location import Location, StoredPlace

if TYPE_CHECKING:
    from pyspark.sql import SparkSession


Output = CompactionOutput | StoredOutput


@dataclass(frozen=True, slots=True)
class Deletable:
    """The archives that may be deleted, and for each that may not the reason."""

    contents: tuple[CountedFile, ...]
    kept: Mapping[str, str]

    @property
    def bytes(self) -> int:
        """How much space they take."""
        return sum(content.size for content in self.contents)

    @property
    def messages(self) -> int:
        """How many messages are in them."""
        return sum(content.total for content in self.contents)


def deletable(
    contents: Sequence[CountedFile],
    manifests: Mapping[Slot, Manifest],
    output: Output,
    selection: DaySelection,
    *,
    assumed: Iterable[Slot] = (),
) -> Deletable:
    """Look at the finished files that are wholly within the selection.

    ``assumed`` are partitions that a run would make, for what it would delete.
    """
    assumed = set(assumed)
    broken = {
        slot: missing
        for slot, manifest in manifests.items()
        if slot not in assumed and (missing := output.missing(manifest))
    }
    known = {slot: manifest.known for slot, manifest in manifests.items()}
    chosen: list[CountedFile] = []
    kept = {}
    for content in contents:
        if content.is_in_progress or not all(map(selection.has, content.messages)):
            continue
        reasons = [
            reason
            for slot in content.messages
            if slot not in assumed and (reason := _why_not(content, slot, known, broken))
        ]
        reasons = [*_why_never(content), *reasons]
        if reasons:
            kept[str(content.path)] = reasons[0]
        else:
            chosen.append(content)
    return Deletable(tuple(chosen), kept)


def _why_never(content: CountedFile) -> Iterator[str]:
    if content.damage:
        yield content.damage
    if content.invalid_topics:
        yield content.invalid_topics
    if not content.messages:
        yield "it is empty"
    if UNDATED in content.messages and not content.has_index:
        yield "it has neither messages nor an index, so it may not be an archive"


def _why_not(
    content: CountedFile,
    slot: Slot,
    known: Mapping[Slot, Mapping[str, Input]],
    broken: Mapping[Slot, Sequence[str]],
) -> str:
    name = f"{slot.topic} on {slot.day}" if slot.day else "bare bodies"
    taken = known.get(slot, {}).get(content.key)
    if taken is None or not taken.is_of(content):
        return f"not all of it is compacted: {name}"
    if taken.is_damaged:
        return "it was read with damage"
    if slot in broken:
        return f"{broken[slot][0]} is missing"
    return ""


def delete(contents: Iterable[CountedFile]) -> list[str]:
    """Delete archives with their indexes; return those that changed meanwhile, which stay.

    Raises `OutputError`.
    """
    changed = []
    for content in contents:
        if isinstance(content.path, StoredPlace):
            if not delete_stored(content):
                changed.append(str(content.path))
            continue
        try:
            status = content.path.stat()
            if (status.st_size, status.st_mtime_ns) != (content.size, content.mtime_ns):
                changed.append(str(content.path))
                continue
            content.path.unlink()
            index_of(content.path).unlink(missing_ok=True)
            sync_folder(content.path.parent)
        except OSError as exc:
            raise OutputError(f"cannot delete {content.path} ({exc.strerror})") from exc
    return changed


WORK = (State.NEW, State.MERGE)
SMALL_BYTES = 8 << 20
AT_A_TIME = 4


@dataclass(slots=True)
class Compaction:
    """What is to be done, and what has been. Made by `prepare_compaction`."""

    output: Output
    selection: DaySelection
    contents: Sequence[CountedFile]
    manifests: dict[Slot, Manifest]
    partitions: Sequence[PlannedPartition]
    results: list[PartitionResult] = field(default_factory=list)
    stopped: bool = False

    @property
    def work(self) -> list[PlannedPartition]:
        """The partitions that have to be made."""
        return [partition for partition in self.partitions if partition.state in WORK]

    @property
    def changed(self) -> list[Location]:
        """Files of bare bodies that changed after they were taken: what is new is unknown."""
        bare = [content for content in self.contents if UNDATED in content.messages]
        return [content.path for content in changed(bare, self.manifests.get(UNDATED))]

    @property
    def damages(self) -> list[ArchiveDamage]:
        """What could not be read in this run, and messages that belong to no topic of NSQ."""
        taken = {content.path for result in self.results for content in result.partition.contents}
        refused = [
            ArchiveDamage(str(content.path), 0, content.invalid_topics)
            for content in self.contents
            if content.invalid_topics and (content.path in taken or not content.messages)
        ]
        return [*refused, *(damage for result in self.results for damage in result.damages)]

    def stop(self) -> None:
        """End after the partition that is being made."""
        self.stopped = True

    def run(self, spark: SparkSession, reading: ArchiveReading) -> None:
        """Make all partitions. The output must be locked, and recovered. Raises `NsqError`.

        Small ones are made several at a time, for most of their time Spark prepares and waits.
        """
        if not reading.skip_damaged:
            self._refuse_invalid_topics()
        small = [partition for partition in self.work if partition.size < SMALL_BYTES]
        large = [partition for partition in self.work if partition.size >= SMALL_BYTES]
        try:
            with ThreadPoolExecutor(self._at_a_time, "compaction") as threads:
                self._collect(threads.map(partial(self._make, spark, reading), small))
            self._collect(map(partial(self._make, spark, reading), large))
            places = {partition.slot: at for at, partition in enumerate(self.partitions)}
            self.results.sort(key=lambda result: places[result.partition.slot])
        finally:
            self.output.summarise(self.manifests.values())
            self.output.tidy()

    @property
    def _at_a_time(self) -> int:
        """Commits to one Delta table come one after another."""
        is_delta = isinstance(self.output, StoredOutput) and self.output.is_delta
        return 1 if is_delta else AT_A_TIME

    def _refuse_invalid_topics(self) -> None:
        for partition in self.work:
            for content in partition.contents:
                if content.invalid_topics:
                    raise unreadable(str(content.path), content.invalid_topics)

    def _make(
        self, spark: SparkSession, reading: ArchiveReading, partition: PlannedPartition
    ) -> PartitionResult | None:
        if self.stopped:
            return None
        before = self.manifests.get(partition.slot)
        try:
            if isinstance(self.output, StoredOutput):
                return compact_stored(spark, partition, before, self.output, reading)
            return compact_partition(spark, partition, before, self.output, reading)
        except BaseException:
            self.stopped = True
            raise

    def _collect(self, results: Iterable[PartitionResult | None]) -> None:
        for result in results:
            if result is not None:
                self.manifests[result.partition.slot] = result.manifest
                self.results.append(result)

    def deletable(self, *, assume_done: bool = False) -> Deletable:
        """Say which archives may be deleted, or could be if the work were done."""
        assumed = [partition.slot for partition in self.work] if assume_done else []
        return deletable(
            self.contents, self.manifests, self.output, self.selection, assumed=assumed
        )


def prepare_compaction(
    directory: Location,
    output: Output,
    selection: DaySelection,
    *,
    grace_s: float,
    now_s: float,
    work_dir: Path | None = None,
) -> Compaction:
    """Look at archives and output, and plan. Raises `NsqError`."""
    refuse_nested("--output", output.root, directory)
    contents = take_inventory(directory, work_dir)
    manifests = output.manifests()
    found = {topic for content in contents for topic in content.topics}
    for topic in selection.topics:
        if topic not in found:
            raise NotFoundError(
                f"no archive in {directory} has messages of {topic}",
                hint="It has: " + (", ".join(sorted(filter(None, found))) or "no messages at all"),
            )
    partitions = plan_partitions(contents, manifests, selection, grace_s=grace_s, now_s=now_s)
    return Compaction(output, selection, contents, manifests, partitions)


def refuse_open(partitions: Sequence[PlannedPartition]) -> None:
    """Raise `NsqError` when a day that was asked for by name is not closed."""
    for partition in partitions:
        if partition.state is State.OPEN:
            raise NsqError(
                f"{partition.slot.day} is not closed: {partition.reason}",
                hint="See --grace; nsq archive repair finishes files that a crash left.",
            )
