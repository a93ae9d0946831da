"""A compaction from beginning to end, but for what a user is asked and told."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

from nsqtools.errors import NotFoundError, NsqError
from nsqtools.spark.jobs.compaction.deletion import Deletable, deletable
from nsqtools.spark.jobs.compaction.inventory import UNDATED, Content, Slot, take_inventory
from nsqtools.spark.jobs.compaction.layout import Output
from nsqtools.spark.jobs.compaction.manifest import (
    Manifest,
    read_manifests,
    summarise,
)
from nsqtools.spark.jobs.compaction.partition import Reading, Result, compact_partition
from nsqtools.spark.jobs.compaction.plan import (
    Partition,
    Selection,
    State,
    changed,
    plan,
)
from nsqtools.spark.jobs.inputs import refuse_nested

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

WORK = (State.NEW, State.MERGE)
SMALL_BYTES = 8 << 20
AT_A_TIME = 4


@dataclass(slots=True)
class Compaction:
    """What is to be done, and what has been. Made by `prepare`."""

    output: Output
    selection: Selection
    contents: Sequence[Content]
    manifests: dict[Slot, Manifest]
    partitions: Sequence[Partition]
    results: list[Result] = field(default_factory=list)
    stopped: bool = False

    @property
    def work(self) -> list[Partition]:
        """The partitions that have to be made."""
        return [partition for partition in self.partitions if partition.state in WORK]

    @property
    def changed(self) -> list[Path]:
        """Files of bare bodies that changed after they were taken: nobody can say what is new."""
        bare = [content for content in self.contents if UNDATED in content.messages]
        return [content.path for content in changed(bare, self.manifests.get(UNDATED))]

    def stop(self) -> None:
        """End after the partition that is being made."""
        self.stopped = True

    def run(self, spark: SparkSession, reading: Reading) -> None:
        """Make all partitions. The output must be locked, and recovered. Raises `NsqError`.

        Small ones are made several at a time, for most of their time Spark prepares and waits.
        """
        small = [partition for partition in self.work if partition.size < SMALL_BYTES]
        large = [partition for partition in self.work if partition.size >= SMALL_BYTES]
        try:
            with ThreadPoolExecutor(AT_A_TIME, "compaction") as threads:
                self._collect(threads.map(partial(self._make, spark, reading), small))
            self._collect(map(partial(self._make, spark, reading), large))
            places = {partition.slot: at for at, partition in enumerate(self.partitions)}
            self.results.sort(key=lambda result: places[result.partition.slot])
        finally:
            summarise(self.output, self.manifests.values())
            self.output.tidy()

    def _make(self, spark: SparkSession, reading: Reading, partition: Partition) -> Result | None:
        if self.stopped:
            return None
        before = self.manifests.get(partition.slot)
        try:
            return compact_partition(spark, partition, before, self.output, reading)
        except BaseException:
            self.stopped = True
            raise

    def _collect(self, results: Iterable[Result | None]) -> None:
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


def prepare(
    directory: Path,
    output: Output,
    selection: Selection,
    *,
    grace_s: float,
    now_s: float,
    work_dir: Path | None = None,
) -> Compaction:
    """Look at archives and output, and plan. Raises `NsqError`."""
    refuse_nested("--output", output.root, directory)
    contents = take_inventory(directory, work_dir)
    manifests = read_manifests(output)
    found = {topic for content in contents for topic in content.topics}
    for topic in selection.topics:
        if topic not in found:
            raise NotFoundError(
                f"no archive in {directory} has messages of {topic}",
                hint="It has: " + (", ".join(sorted(filter(None, found))) or "no messages at all"),
            )
    partitions = plan(contents, manifests, selection, grace_s=grace_s, now_s=now_s)
    return Compaction(output, selection, contents, manifests, partitions)


def refuse_open(partitions: Sequence[Partition]) -> None:
    """Raise `NsqError` when a day that was asked for by name is not closed."""
    for partition in partitions:
        if partition.state is State.OPEN:
            raise NsqError(
                f"{partition.slot.day} is not closed: {partition.reason}",
                hint="See --grace; nsq archive repair finishes files that a crash left.",
            )
