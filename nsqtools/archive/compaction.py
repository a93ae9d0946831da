"""Compact archives and tables to few Parquet files by topic and date, without duplicates.

A partition is cut into slices of time (`slices`) by the catalogs, and consecutive slices become one
file. All files are written independently, in processes on this machine (`in_processes`) or in tasks
of Spark.

Late messages become a new file. Only the identities in its range of times are read from the output,
and messages that the output already has are skipped. So after a kill at any point the run is simply
repeated, and no existing file is written again. When the files of a partition are complete, its
inputs are recorded in a note (``_compaction/topic=x/date=y.json``). The note saves work and permits
the deletion of archives; nothing else depends on it.

    a directory, a bucket    a file appears atomically under a name made of its inputs
    a Delta table            one commit for each partition; a compaction in place replaces the small
                             files of a partition in the same commit

Bare bodies have neither identity nor time. Each file of bare bodies becomes one Parquet file, whose
name contains the identity of the file, so that it is compacted once.
"""

from __future__ import annotations

import json
import math
import os
import signal
import threading
import time
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor, as_completed
from concurrent.futures.process import BrokenProcessPool
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field, replace
from datetime import date
from itertools import accumulate, chain
from multiprocessing import get_context, parent_process
from operator import attrgetter
from pathlib import PurePosixPath
from typing import Any
from uuid import uuid4

import pyarrow

from nsqtools.archive.body_columns import ERROR, RESERVED, BodyColumns
from nsqtools.archive.body_schema import fields_of
from nsqtools.archive.catalog import (
    PartitionKey,
    Source,
    day_range,
    find_sources,
    group_by_partition,
    has_grown,
    hash_path,
    iterate_sources,
)
from nsqtools.archive.delta import DeltaCatalog, TableFile, is_table, refuse_other_form
from nsqtools.archive.finding import Inputs, files_in_folder, files_in_table
from nsqtools.archive.layout import INDEX, MANIFEST, Member, hidden_name
from nsqtools.archive.place import (
    Place,
    PlaceLock,
    map_concurrently,
    refuse_nested,
    translating_errors,
)
from nsqtools.archive.place_url import parse_place
from nsqtools.archive.reader import why_unfinished
from nsqtools.archive.slices import (
    NOTES,
    STAGING,
    Job,
    JobResult,
    Settings,
    Slice,
    body_kind,
    body_kind_of,
    columns_in,
    prepare_table,
    run_job,
    unreadable,
)
from nsqtools.archive.table_places import refuse_inside_table, url_of_topic
from nsqtools.errors import ConfigurationError, NotFoundError, NsqError, OutputError
from nsqtools.files.scratch import environment_variables
from nsqtools.records.envelope import BodyKind

# Files become smaller than the target so that all processes have work, but not smaller than this.
MIN_FILE_BYTES = 32 << 20
# A slice is the unit of sorting and bounds the memory of a process.
SLICE_ROWS = 200_000
SLICE_TEXT = 64 << 20
# An index is untrusted and may claim any number of messages.
MAX_SLICES_PER_MEMBER = 250
COMPRESSION_RATIO = 6  # roughly, of the text of messages


# -- planning -----------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Selection:
    """The selected topics (empty: all) and the days from ``first`` to ``last``.

    A day is closed ``grace_s`` after its end. With ``open_days`` open days are selected as well.
    """

    topics: frozenset[str] = frozenset()
    first: date | None = None
    last: date | None = None
    open_days: bool = False
    grace_s: float = 3600.0

    def has(self, key: PartitionKey) -> bool:
        """Return whether a partition is selected.

        A partition without topic or date is selected unless topics or days were given.
        """
        is_named = not self.topics or key.topic in self.topics
        if key.day is None:
            return is_named and not (self.first or self.last)
        return is_named and (self.first or date.min) <= key.day <= (self.last or date.max)

    def find_sources(self, inputs: Inputs) -> list[Source]:
        """Return the sources that may have selected topics. Raises `NsqError`."""
        topics = self.topics
        return find_sources(
            inputs.places,
            lambda partition: not topics or partition.get("topic") in {*topics, None},
        )

    def has_many_topics(self, inputs: Inputs) -> bool:
        """Return whether several topics are selected. Raises `NsqError`."""
        sources = () if len(self.topics) == 1 else self.find_sources(inputs)
        topics = {source.topic for source in sources}
        return len(topics & self.topics if self.topics else topics) > 1

    def is_open(self, key: PartitionKey, now_s: float) -> bool:
        """Return whether a partition must wait until its day is closed."""
        if key.day is None or self.open_days:
            return False
        return now_s < day_range(key.day)[1] / 10**9 + self.grace_s


def jobs_of(sources: Sequence[Source], job: Job, file_bytes: int) -> list[Job]:
    """Cut a partition into slices, and group these to files of about ``file_bytes``. Pure.

    ``job`` is the template: the returned jobs have its fields and their own slices.
    """
    if job.key.day is None:
        names = {source.file.name for source in job.present}
        jobs = [replace(job, slices=(Slice(0, 0, (source,)),), present=()) for source in sources]
        return [job for job in jobs if job.name not in names]
    begin, end = day_range(job.key.day)
    cuts = _cut_times(sources, begin, end)
    slices: list[Slice] = []
    sizes: list[float] = []
    for since_ns, until_ns in zip(cuts, [*cuts[1:], end], strict=True):
        inputs = [(source, source.between(since_ns, until_ns)) for source in sources]
        slices.append(Slice(since_ns, until_ns, tuple(source for source, spans in inputs if spans)))
        sizes.append(sum(_share(span, since_ns, until_ns) for _, spans in inputs for span in spans))
    # Files get equal sizes. A remainder below a quarter makes them a little larger than the target,
    # instead of a small file at the end.
    files = max(1, math.ceil(sum(sizes) / file_bytes - 0.25))
    slices_by_file: dict[int, list[Slice]] = {}
    for part, size, until in zip(slices, sizes, accumulate(sizes), strict=True):
        middle = (until - size / 2) / (sum(sizes) or 1)
        slices_by_file.setdefault(int(files * middle), []).append(part)
    jobs = [replace(job, slices=tuple(parts)) for parts in slices_by_file.values()]
    return [
        replace(job, present=tuple(s for s in job.present if s.between(*job.range))) for job in jobs
    ]


def _cut_times(sources: Iterable[Source], begin_ns: int, end_ns: int) -> list[int]:
    """Return the first times of slices that have about `SLICE_ROWS` rows or `SLICE_TEXT` bytes."""
    cuts = [begin_ns]
    rows = text = 0
    spans = (span for source in sources for span in _split_spans(source, begin_ns, end_ns))
    for span in sorted(spans, key=attrgetter("min_ts")):
        if (rows >= SLICE_ROWS or text >= SLICE_TEXT) and span.min_ts > cuts[-1]:
            cuts.append(span.min_ts)
            rows = text = 0
        rows += span.messages
        text += span.length * COMPRESSION_RATIO
    return cuts


def _split_spans(source: Source, begin_ns: int, end_ns: int) -> Iterator[Member]:
    """Iterate over the spans of a file, and split spans larger than a slice into equal parts.

    The parts assume that the messages of a span are evenly distributed in time.
    """
    for span in source.between(begin_ns, end_ns):
        excess = max(span.messages // SLICE_ROWS, span.length * COMPRESSION_RATIO // SLICE_TEXT)
        parts = 1 + 4 * min(excess, MAX_SLICES_PER_MEMBER)
        length = (span.max_ts - span.min_ts) // parts
        for number in range(parts):
            low = span.min_ts + number * length
            if low < end_ns:
                yield span._replace(
                    min_ts=max(begin_ns, low),
                    messages=span.messages // parts,
                    length=span.length // parts,
                )


def _share(span: Member, since_ns: int, until_ns: int) -> float:
    """Return roughly how many bytes of a span are in a range of times."""
    length = span.max_ts - span.min_ts + 1
    part = min(span.max_ts + 1, until_ns) - max(span.min_ts, since_ns)
    return float(span.length * part / length)


@dataclass(slots=True)
class Partition:
    """A partition with its jobs and results. ``state`` is new, late, open, small or done."""

    key: PartitionKey
    state: str
    sources: list[Source]
    jobs: list[Job] = field(default_factory=list)
    results: list[JobResult] = field(default_factory=list)

    @property
    def messages(self) -> int:
        """Roughly how many messages are new. A file that spans days counts in proportion."""
        if self.key.day is None:
            return sum(source.messages for source in self.sources)
        day = day_range(self.key.day)
        spans = (span for source in self.sources for span in source.between(*day))
        return round(sum(_share(s, *day) / max(1, s.length) * s.messages for s in spans))

    @property
    def files(self) -> list[TableFile]:
        return [result.file for result in self.results if result.file is not None]

    @property
    def is_damaged(self) -> bool:
        return any(result.damages for result in self.results) or any(
            source.damage for source in self.sources
        )


RunJobs = Callable[[Sequence[Job]], Iterable[tuple[int, JobResult]]]
"""Runs jobs in any order, and yields the index and the result of each."""


class Compaction:
    """One compaction: call `plan`, then `run` while it is `locked`. Methods raise `NsqError`."""

    def __init__(
        self,
        inputs: Inputs,
        output: Place | None,
        selection: Selection,
        settings: Settings,
        *,
        is_delta: bool = False,
        now_s: float | None = None,
        sources: Sequence[Source] | None = None,
    ) -> None:
        self.selection, self.settings = selection, settings
        self._inputs = inputs
        self.in_place = output is None
        if output is None:
            if inputs.archives or inputs.parquet or len(inputs.delta) != 1:
                raise ConfigurationError(
                    "missing --output", hint="Only a Delta table can be compacted in place."
                )
            output, is_delta = inputs.delta[0], True
        else:
            for place in inputs.places:
                refuse_nested("--output", output, place)
        self.output = output.absolute()
        self._now_s = time.time() if now_s is None else now_s
        with translating_errors("read", self.output):
            self._check(is_delta=is_delta)
        self.table = DeltaCatalog(str(self.output)) if is_delta else None
        self._lock = PlaceLock()
        self._given_sources = sources
        self.sources: Sequence[Source] = []
        self.partitions: list[Partition] = []
        self.grown: list[Source] = []
        """Files of bare bodies that have grown since they were compacted. They are skipped."""
        self.without_columns: list[PartitionKey] = []
        """Partitions whose rows do not get the columns of the schema."""

    def _check(self, *, is_delta: bool) -> None:
        """Refuse an output with files of other programs."""
        refuse_other_form(self.output, "--format", is_delta=is_delta)
        entries, folders = self.output.children("")
        names = (*(entry.name for entry in entries), *folders)
        visible = {name for name in names if not name.startswith(".")}
        if visible and NOTES not in visible and not is_table(self.output):
            raise ConfigurationError(
                f"{self.output} has files that compaction did not write",
                hint="Give an empty place, or one that nsq archive compact has written.",
            )

    def plan(self) -> None:
        """Find the inputs and existing outputs, and plan the jobs of each partition."""
        if self.table is not None and self.table.exists():
            self.table.check_writable(removes=self.in_place)
        self.sources = self._given_sources or self.selection.find_sources(self._inputs)
        available = {source.topic for source in self.sources if source.topic is not None}
        for topic in sorted(self.selection.topics - available):
            raise NotFoundError(
                f"there are no messages of {topic}",
                hint="There are: " + (", ".join(sorted(available)) or "no messages at all"),
            )
        sources = {
            key: group
            for key, group in group_by_partition(self.sources).items()
            if self.selection.has(key)
        }
        present = self._present_sources(sources)
        self.partitions, self.grown = [], []
        for key in sorted(sources, key=lambda key: (key.day or date.max, key.topic or "")):
            state, new, retained = self._classify(key, sources[key], present.setdefault(key, []))
            self.partitions.append(Partition(key, state, new))
            present[key] += retained
        work = self.work
        self._body_kind = self._choose_body_kind(present)
        self._extra_columns = self._find_extra_columns(work, present)
        self.without_columns = self._find_without_columns(present)
        total = sum(source.size for partition in work for source in partition.sources)
        settings = replace(self.settings, body=self._body_kind)
        size = settings.target_bytes
        if not self.in_place:
            size = min(size, max(MIN_FILE_BYTES, total // max(1, settings.parallel)))
        for partition in work:
            job = Job(
                str(self.output),
                partition.key,
                (),
                tuple(present[partition.key]),
                settings,
                self._extra_columns,
            )
            partition.jobs = jobs_of(partition.sources, job, size)

    def _choose_body_kind(self, present: Mapping[PartitionKey, Sequence[Source]]) -> BodyKind:
        """Return the kind of bodies in the output. An existing output decides.

        Raises `ConfigurationError` if another kind was requested.
        """
        requested = self.settings.body
        existing = body_kind(self.table) if self.table else body_kind_of(present.values())
        is_other = (requested is BodyKind.binary) != (existing is BodyKind.binary)
        # The default, string, accepts any existing kind.
        if existing is not None and is_other and requested is not BodyKind.string:
            raise ConfigurationError(
                f"bodies in {self.output} are {existing.value}, not {requested.value}",
                hint=f"Give --body {existing.value}, or another place.",
            )
        return existing or requested

    def _find_extra_columns(
        self, work: Iterable[Partition], present: Mapping[PartitionKey, Sequence[Source]]
    ) -> pyarrow.Schema:
        """Return the columns of output, bodies and inputs in addition to those of a message.

        If a column has two types, the first one is used, and values of the other type are reported
        in ``_error``.
        """
        tables = [DeltaCatalog(str(place)) for place in self._inputs.delta]
        if self.table is not None and self.table.exists():
            tables.insert(0, self.table)
        schemas = [table.schema() for table in tables]
        if self.settings.fields is not None:
            schemas.append(BodyColumns(fields_of(self.settings.fields)).schema())
        files = [] if self.table else list(chain.from_iterable(present.values()))
        if self._inputs.parquet or self._inputs.archives:
            inputs = chain.from_iterable(partition.sources for partition in work)
            files += [source for source in inputs if source.is_parquet]
        files = list({source.shown: source for source in files if not source.damage}.values())
        schemas += map_concurrently(columns_in, files)
        columns: dict[str, pyarrow.Field] = {}
        for column in chain.from_iterable(schemas):
            if column.name in RESERVED:
                continue
            first = columns.setdefault(column.name, column)
            if first.type != column.type:
                columns.setdefault(ERROR, pyarrow.field(ERROR, pyarrow.string()))
            # Parquet files have no metadata, but the schema of bodies has.
            elif not first.metadata:
                columns[column.name] = column
        return pyarrow.schema(list(columns.values()))

    def _find_without_columns(
        self, present: Mapping[PartitionKey, Sequence[Source]]
    ) -> list[PartitionKey]:
        """Return the partitions whose rows do not get the columns of the schema.

        Only the bodies of archives are read by the schema, not those of Parquet files.
        """
        if self.settings.fields is None:
            return []
        columns = {*BodyColumns(fields_of(self.settings.fields)).schema().names}
        columns -= {ERROR, *RESERVED}
        keys = []
        for partition in self.partitions:
            sources = chain(present.get(partition.key, ()), partition.sources)
            first = next((s for s in sources if s.is_parquet and not s.damage), None)
            if first and not columns <= {*columns_in(first).names, *partition.key.values}:
                keys.append(partition.key)
        return keys

    def _classify(
        self, key: PartitionKey, sources: list[Source], present: Sequence[Source]
    ) -> tuple[str, list[Source], list[Source]]:
        """Return the state of a partition, its files to read, and its files to retain."""
        if self.selection.is_open(key, self._now_s):
            return "open", [], []
        if self.in_place:
            limit = self.settings.target_bytes // 2
            small = [
                source
                for source in sources
                if not source.damage
                and not source.is_shared
                and source.size < limit
                and source.days == {key.day}
            ]
            retained = [source for source in sources if source not in small]
            return ("small", small, retained) if len(small) > 1 else ("done", [], [])
        note = self._read_note(key)
        names = [PurePosixPath(source.file.name).stem for source in present]
        new: list[Source] = []
        for source in sources:
            if (compacted_size := _compacted_size(note, source)) == source.size:
                continue
            is_grown = False
            # Bare bodies have no identity, so those from before the growth would be duplicated.
            if key.day is None:
                with translating_errors("read", source.shown):
                    is_grown = bool(compacted_size) or has_grown(
                        source.file, hash_path(source.key), names
                    )
            (self.grown if is_grown else new).append(source)
        return ("done" if not new else "late" if present else "new"), new, []

    @property
    def work(self) -> list[Partition]:
        """The partitions with inputs to compact."""
        return [
            partition
            for partition in self.partitions
            if partition.state in ("new", "late", "small")
        ]

    @property
    def jobs(self) -> list[Job]:
        """The jobs of all partitions."""
        return [job for partition in self.work for job in partition.jobs]

    def _present_sources(self, keys: Collection[PartitionKey]) -> dict[PartitionKey, list[Source]]:
        """Return the files that the output already has in these partitions."""
        if self.in_place:
            return {}
        folders = {(key.values["topic"], key.values["date"]) for key in keys}

        def is_selected(partition: Mapping[str, str | None]) -> bool:
            return (partition.get("topic"), partition.get("date")) in folders

        with translating_errors("read", self.output):
            root, files = files_in_table(str(self.output), is_selected)
            if files is None:
                files = files_in_folder(root, self.output, list(self.output.list()), is_selected)
        present = group_by_partition(iterate_sources(files, is_selected))
        return {key: sources for key, sources in present.items() if key in keys}

    # -- running --------------------------------------------------------------------------------

    @contextmanager
    def locked(self) -> Iterator[None]:
        """Lock the output against other compactions, and remove drafts of a killed one."""
        with self.output.lock(f"{NOTES}/lock") as self._lock:
            if not self.output.is_remote:
                folder = self.output.path
                if list(folder.glob("_staging/topic=*/date=*.replaced")):
                    raise OutputError(
                        f"an earlier version was killed while it replaced a day in {self.output}",
                        hint="Run nsq spark compact of that version once: it puts the day back.",
                    )
                for draft in (folder / STAGING).glob("*.parquet"):
                    draft.unlink(missing_ok=True)
            yield

    def run(self, run_jobs: RunJobs) -> None:
        """Run the jobs, and commit each partition when its jobs are done.

        The output must be locked.
        """
        run_together([self], run_jobs)

    def prepare(self) -> None:
        """Refuse damaged inputs, and create the table and its columns."""
        if not self.settings.skips_damaged:
            for source in chain.from_iterable(partition.sources for partition in self.work):
                if source.damage:
                    raise unreadable(source, source.damage)
        if self.table is not None and self.jobs:
            extras = {name for partition in self.work for name, _ in partition.key.extras}
            with translating_errors("use", self.output):
                if not self.table.exists():
                    refuse_inside_table(self.output)
            prepare_table(self.table, self._extra_columns, self._body_kind, sorted(extras))

    def add(self, partition: Partition, result: JobResult) -> None:
        """Add the result of a job, and commit the partition if it is the last one."""
        partition.results.append(result)
        if len(partition.results) == len(partition.jobs):
            self._finish(partition)

    def finish(self) -> None:
        """Commit the partitions without jobs."""
        for partition in self.work:
            if not partition.jobs:
                self._finish(partition)

    def _finish(self, partition: Partition) -> None:
        """Commit the files of a partition, and record its inputs."""
        self._lock.check()
        files = partition.files
        removes = [
            TableFile(source.file.name, source.size, partition=partition.key.values)
            for source in partition.sources
        ]
        # Rows that were not read would be lost with the files that are replaced.
        if self.in_place and sum(result.read for result in partition.results) != sum(
            source.messages for source in partition.sources
        ):
            raise OutputError(
                f"{partition.key.topic} on {partition.key.day}: not all rows of "
                f"{self.output} were read, so nothing of it is replaced"
            )
        if self.table is not None and (files or self.in_place):
            self.table.commit(
                files,
                removes if self.in_place else (),
                app_id=f"nsq-compact-{uuid4().hex}",
                number=1,
                data_change=not self.in_place
                or any(result.duplicates for result in partition.results),
            )
        if self.in_place or partition.is_damaged:
            return
        note = self._read_note(partition.key)
        sizes = {source.key: source.size for source in partition.sources}
        begins = {source.key: source.begin for source in partition.sources}
        document = {
            "version": 1,
            "sources": note.get("sources", {}) | sizes,
            "files": note.get("files", {}) | {file.path: file.bytes for file in files},
            "begins": note.get("begins", {}) | begins,
        }
        with translating_errors("write", self.output):
            self.output.put(self._note_name(partition.key), json.dumps(document).encode())

    def _note_name(self, key: PartitionKey) -> str:
        return f"{NOTES}/{key.folder}.json"

    def _read_note(self, key: PartitionKey) -> dict[str, Any]:
        with translating_errors("read", self.output):
            return dict(self.output.read_json(self._note_name(key)) or {})

    # -- deleting compacted archives ------------------------------------------------------------

    def deletable(self) -> tuple[list[Source], dict[str, str]]:
        """Return the archives whose messages are all in Parquet, and the reasons to keep others."""
        notes: dict[PartitionKey, dict[str, Any]] = {}
        deletable: list[Source] = []
        reasons_to_keep: dict[str, str] = {}
        by_file: dict[str, list[Source]] = {}
        for source in self.sources:
            if not source.is_parquet:
                by_file.setdefault(source.key, []).append(source)
        for sources in by_file.values():
            first = sources[0]
            keys = [key for source in sources for key in source.partitions]
            if not all(map(self.selection.has, keys)):
                continue
            notes |= {key: self._read_note(key) for key in keys if key not in notes}
            reasons = [first.damage]
            if first.file.head is None and first.topic is None:
                reasons.append("it has neither messages nor an index, so it may not be an archive")
            with translating_errors("read", first.shown):
                reasons.append(why_unfinished(first.file))
            of_partitions = (self._reason_to_keep(first, key, notes[key]) for key in keys)
            if reason := next(filter(None, chain(reasons, of_partitions)), ""):
                reasons_to_keep[first.shown] = reason
            else:
                deletable.append(first)
        return deletable, reasons_to_keep

    def _reason_to_keep(self, source: Source, key: PartitionKey, note: Mapping[str, Any]) -> str:
        if _compacted_size(note, source) != source.size:
            return f"not all of it is compacted: {key.topic} on {key.day}"
        for name, size in note["files"].items() if self.table is None else ():
            try:
                if self.output.stat(name).size != size:
                    return f"{self.output / name} has changed"
            except FileNotFoundError:
                return f"{self.output / name} is missing"
        return ""


def _compacted_size(note: Mapping[str, Any], source: Source) -> int | None:
    """Return the size of a file when it was compacted, None if it was not."""
    size: int | None = note.get("sources", {}).get(source.key)
    begin = note.get("begins", {}).get(source.key) or source.begin
    if size is None or begin == source.begin:
        return size
    if source.damage or source.file.head is not None:
        return None
    # A file without a head has another hash after it has grown. The old part is compared.
    with translating_errors("read", source.shown):
        return size if source.file.storage.digest(source.file.name, size) == begin else None


# -- several tables ----------------------------------------------------------------------------


def run_together(compactions: Sequence[Compaction], run_jobs: RunJobs) -> None:
    """Run the jobs of all compactions together. Their outputs must be locked."""
    for compaction in compactions:
        compaction.prepare()
    owners = [
        (compaction, partition)
        for compaction in compactions
        for partition in compaction.work
        for _ in partition.jobs
    ]
    jobs = [job for compaction in compactions for job in compaction.jobs]
    for number, result in run_jobs(jobs):
        compaction, partition = owners[number]
        compaction.add(partition, result)
    for compaction in compactions:
        compaction.finish()


def compactions_by_topic(
    inputs: Inputs, url: str, selection: Selection, settings: Settings, *, is_delta: bool
) -> list[Compaction]:
    """Return a compaction for each selected topic. The URLs of the tables contain the topics.

    Raises `NsqError`, also for bare bodies, which have no topic.
    """
    by_topic: dict[str | None, list[Source]] = {}
    sources_of_file: dict[str, list[Source]] = {}
    for source in selection.find_sources(inputs):
        sources_of_file.setdefault(source.key, []).append(source)
        if not selection.topics or source.topic in selection.topics:
            by_topic.setdefault(source.topic, []).append(source)
    compactions = []
    settings = replace(settings, parallel=max(1, settings.parallel // max(1, len(by_topic))))
    for topic, sources in by_topic.items():
        try:
            output = parse_place(url_of_topic(url, topic))
        except ValueError as exc:
            raise ConfigurationError(
                f"{sources[0].shown} has no table below {url}: {exc}",
                hint="Select topics with --topic, or give a place of one table.",
            ) from None
        # A file is deleted only if all of its topics are selected and compacted.
        others = [other for s in sources if s.is_shared for other in sources_of_file[s.key]]
        unique = list({(s.key, s.topic): s for s in [*sources, *others]}.values())
        chosen = replace(selection, topics=frozenset([str(topic)]))
        # Tables of other topics have other columns.
        tables = [p for p in inputs.delta if any(s.shown.startswith(f"{p}/") for s in sources)]
        compactions.append(
            Compaction(
                replace(inputs, delta=tuple(tables)),
                output,
                chosen,
                settings,
                is_delta=is_delta,
                sources=unique,
            )
        )
    if missing := sorted(selection.topics - {*by_topic}):
        raise NotFoundError(f"there are no messages of {', '.join(missing)}")
    return compactions


def delete_archive(source: Source) -> bool:
    """Delete an archive file with its index and manifest.

    Returns False, and deletes nothing, if it has changed since the listing or has a writer now.
    Raises the errors of `failure_of`.
    """
    storage, name, listed = source.file.storage, source.file.name, source.file.entry
    with translating_errors("delete", source.shown), suppress(FileNotFoundError):
        if source.is_parquet or listed is None or why_unfinished(source.file):
            return False
        if storage.stat(name).version == listed.version:
            for path in (name, hidden_name(name, INDEX), hidden_name(name, MANIFEST)):
                storage.delete(path)
            return True
    return False


# -- processes ----------------------------------------------------------------------------------


def in_processes(processes: int) -> RunJobs:
    """Return a runner of jobs in parallel processes; a single job runs in this process."""

    def run(jobs: Sequence[Job]) -> Iterator[tuple[int, JobResult]]:
        if processes < 2 or len(jobs) < 2:
            yield from enumerate(map(run_job, jobs))
            return
        count = min(processes, len(jobs))
        with (
            # Otherwise new interpreters would import modules from the current directory.
            environment_variables({"PYTHONSAFEPATH": "1"}),
            ProcessPoolExecutor(count, get_context("spawn"), _start_worker) as pool,
        ):
            numbers = {pool.submit(run_job, job): number for number, job in enumerate(jobs)}
            try:
                for future in as_completed(numbers):
                    yield numbers[future], future.result()
            except BrokenProcessPool:
                raise NsqError(
                    "a process of the compaction was killed",
                    hint="Run it again: finished partitions are kept. Fewer --processes need less "
                    "memory.",
                ) from None
            finally:
                pool.shutdown(cancel_futures=True)

    return run


def _start_worker() -> None:
    """Let the parent process handle SIGINT, and end with it."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    pyarrow.set_cpu_count(1)
    threading.Thread(target=_exit_with_parent, args=[parent_process()], daemon=True).start()


def _exit_with_parent(parent: Any) -> None:
    parent.join()
    os._exit(1)
