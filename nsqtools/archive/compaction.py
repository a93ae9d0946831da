"""Compaction: archives and tables into few Parquet files by topic and date, each message once.

Catalogs say where to cut a partition into slices of time (`slices`), and which of these become one
file. All files of all partitions are made independently, in processes of this machine
(`in_processes`) or in the tasks of Spark.

What is late becomes a file of its own: of what is in the output already only the identities are
read, for the times concerned, and a message that is there is left out. So a run that was killed at
any point is simply repeated, and nothing that is there is written again. What was taken is noted
for each partition when its files are in place (``_compaction/topic=x/date=y.json``); the note
spares work and allows the deletion of archives, and nothing else depends on it.

    a directory, a bucket    a file appears whole under its name, which says what is in it
    a Delta table            one commit for each partition; within a table the small files of a
                             partition are replaced in the same commit

Bare bodies have neither identity nor time: each file of them becomes one file of Parquet, whose
name is made of the file's identity, so that it is taken once.
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
from pathlib import PurePosixPath
from typing import Any
from uuid import uuid4

import pyarrow

from nsqtools.archive.body_columns import ERROR, RESERVED, BodyColumns, fields_of
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
from nsqtools.archive.layout import INDEX, MANIFEST, Member, aside
from nsqtools.archive.place import (
    Place,
    PlaceLock,
    map_concurrently,
    refuse_nested,
    translating_errors,
)
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
from nsqtools.errors import ConfigurationError, NotFoundError, NsqError, OutputError
from nsqtools.files.scratch import environment
from nsqtools.records.envelope import BodyKind

LEAST_BYTES = 32 << 20  # of a file that is smaller only because more of them run at a time
SLICE_ROWS = 200_000
SLICE_TEXT = 64 << 20
MOST_SLICES = 250  # of a member: an index may claim any number of messages
PACKED = 6  # about how much larger text is than what it is compressed to


# -- what is to be done -------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Selection:
    """What the user chose: topics (empty: all), days from ``first`` to ``last``.

    A day is closed ``grace_s`` after its end; with ``open_days`` others are taken, too.
    """

    topics: frozenset[str] = frozenset()
    first: date | None = None
    last: date | None = None
    open_days: bool = False
    grace_s: float = 3600.0

    def has(self, key: PartitionKey) -> bool:
        """Tell whether a partition is chosen. One without topic and date is, unless either is."""
        is_named = not self.topics or key.topic in self.topics
        if key.day is None:
            return is_named and not (self.first or self.last)
        return is_named and (self.first or date.min) <= key.day <= (self.last or date.max)

    def is_open(self, key: PartitionKey, now_s: float) -> bool:
        """Tell whether a partition has to wait."""
        if key.day is None or self.open_days:
            return False
        return now_s < day_range(key.day)[1] / 10**9 + self.grace_s


def jobs_of(sources: Sequence[Source], job: Job, file_bytes: int) -> list[Job]:
    """Cut a partition into slices, and these into files of about ``file_bytes``. Pure.

    ``job`` has all but the slices.
    """
    if job.key.day is None:
        known = {source.file.name for source in job.present}
        each_alone = (replace(job, slices=(Slice(0, 0, (each,)),), present=()) for each in sources)
        return [each for each in each_alone if each.name not in known]
    begin, end = day_range(job.key.day)
    cuts = [begin]
    rows = text = 0
    fine = (span for each in sources for span in _split_spans(each, begin, end))
    for span in sorted(fine, key=lambda span: span.min_ts):
        if (rows >= SLICE_ROWS or text >= SLICE_TEXT) and span.min_ts > cuts[-1]:
            cuts.append(span.min_ts)
            rows = text = 0
        rows += span.messages
        text += span.length * PACKED
    slices: list[Slice] = []
    sizes: list[float] = []
    for since_ns, until_ns in zip(cuts, [*cuts[1:], end], strict=True):
        some = [(each, each.between(since_ns, until_ns)) for each in sources]
        slices.append(Slice(since_ns, until_ns, tuple(each for each, spans in some if spans)))
        sizes.append(sum(_share(span, since_ns, until_ns) for _, spans in some for span in spans))
    # even files, a little above the size in place of a small one at the end
    files = max(1, math.ceil(sum(sizes) / file_bytes - 0.25))
    of_file: dict[int, list[Slice]] = {}
    for part, size, until in zip(slices, sizes, accumulate(sizes), strict=True):
        middle = (until - size / 2) / (sum(sizes) or 1)
        of_file.setdefault(int(files * middle), []).append(part)
    jobs = [replace(job, slices=tuple(some)) for some in of_file.values()]
    return [
        replace(each, present=tuple(s for s in each.present if s.between(*each.range)))
        for each in jobs
    ]


def _split_spans(source: Source, begin_ns: int, end_ns: int) -> Iterator[Member]:
    """The spans of a file; one that is larger than a slice as several, as if it were even."""
    for span in source.between(begin_ns, end_ns):
        large = max(span.messages // SLICE_ROWS, span.length * PACKED // SLICE_TEXT)
        parts = 1 + 4 * min(large, MOST_SLICES)
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
    """About how many bytes of a span are of a range of times."""
    length = span.max_ts - span.min_ts + 1
    part = min(span.max_ts + 1, until_ns) - max(span.min_ts, since_ns)
    return float(span.length * part / length)


@dataclass(slots=True)
class Partition:
    """A partition and what is done with it; ``state`` is new, late, open, or small."""

    key: PartitionKey
    state: str
    sources: list[Source]
    jobs: list[Job] = field(default_factory=list)
    done: list[JobResult] = field(default_factory=list)

    @property
    def messages(self) -> int:
        """About how many messages are new: a file that spans days counts by the time it spans."""
        if self.key.day is None:
            return sum(source.messages for source in self.sources)
        day = day_range(self.key.day)
        spans = (span for each in self.sources for span in each.between(*day))
        return round(sum(_share(s, *day) / max(1, s.length) * s.messages for s in spans))

    @property
    def files(self) -> list[TableFile]:
        return [done.file for done in self.done if done.file is not None]

    @property
    def is_damaged(self) -> bool:
        return any(done.damages for done in self.done) or any(s.damage for s in self.sources)


RunJobs = Callable[[Sequence[Job]], Iterable[tuple[int, JobResult]]]
"""Runs jobs, in any order, and gives for each its number and what became of it."""


class Compaction:
    """One compaction, planned when it is made. Methods raise `NsqError`."""

    def __init__(
        self,
        inputs: Inputs,
        output: Place | None,
        selection: Selection,
        settings: Settings,
        *,
        is_delta: bool = False,
        now_s: float | None = None,
    ) -> None:
        self.selection, self.settings = selection, settings
        self._inputs = inputs
        self.in_place = output is None
        if output is None:
            if inputs.archives or inputs.parquet or len(inputs.delta) != 1:
                raise ConfigurationError(
                    "missing --output", hint="Only a Delta table is compacted where it is."
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
        self._place = PlaceLock()
        self.sources: list[Source] = []
        self.partitions: list[Partition] = []
        self.grown: list[Source] = []
        """Files of bare bodies that have changed since they were compacted: they are left out."""
        self.without_columns: list[PartitionKey] = []
        """Partitions with rows that do not get the columns of the schema."""

    def _check(self, *, is_delta: bool) -> None:
        """Refuse a place that holds something else."""
        refuse_other_form(self.output, "--format", is_delta=is_delta)
        entries, folders = self.output.children("")
        names = (*(entry.name for entry in entries), *folders)
        shown = {name for name in names if not name.startswith(".")}
        if shown and NOTES not in shown and not is_table(self.output):
            raise ConfigurationError(
                f"{self.output} holds files that compaction did not write",
                hint="Give a place of its own, or one that nsq archive compact has written.",
            )

    def plan(self) -> None:
        """Look at what is there, and say what is to be done."""
        if self.table is not None and self.table.exists():
            self.table.check_writable(removes=self.in_place)
        topics = self.selection.topics
        self.sources = find_sources(
            self._inputs.places,
            lambda partition: partition.get("topic") in {*topics, None} or not topics,
        )
        here = {topic for topic in (source.topic for source in self.sources) if topic is not None}
        for topic in sorted(self.selection.topics - here):
            raise NotFoundError(
                f"there are no messages of {topic}",
                hint="There are: " + (", ".join(sorted(here)) or "no messages at all"),
            )
        of_slot = group_by_partition(self.sources)
        chosen = {key: some for key, some in of_slot.items() if self.selection.has(key)}
        present = self._present(chosen)
        self.partitions, self.grown = [], []
        for key in sorted(chosen, key=lambda each: (each.day or date.max, each.topic or "")):
            there = present.setdefault(key, [])
            state, new, kept = self._state(key, chosen[key], there)
            self.partitions.append(Partition(key, state, new))
            there += kept
        work = self.work
        self._kind = self._kind_of_bodies(present)
        self.others = self._other_columns(work, present)
        self.without_columns = self._without_columns(present)
        total = sum(source.size for each in work for source in each.sources)
        settings = replace(self.settings, body=self._kind)
        size = settings.target_bytes
        if not self.in_place:
            size = min(size, max(LEAST_BYTES, total // max(1, settings.parallel)))
        for partition in work:
            known = tuple(present[partition.key])
            job = Job(str(self.output), partition.key, (), known, settings, self.others)
            partition.jobs = jobs_of(partition.sources, job, size)

    def _kind_of_bodies(self, present: Mapping[PartitionKey, Sequence[Source]]) -> BodyKind:
        """Return what bodies become: what they are there, if that is what was asked for."""
        asked = self.settings.body
        there = body_kind(self.table) if self.table else body_kind_of(present.values())
        is_other = (asked is BodyKind.binary) != (there is BodyKind.binary)
        if there is not None and is_other and asked is not BodyKind.string:
            raise ConfigurationError(
                f"bodies in {self.output} are {there.value}, not {asked.value}",
                hint=f"Give --body {there.value}, or another place.",
            )
        return there or asked

    def _other_columns(
        self, work: Iterable[Partition], present: Mapping[PartitionKey, Sequence[Source]]
    ) -> pyarrow.Schema:
        """Return the columns beside a message's, by name, of output, bodies and inputs.

        Of two types the first is taken; values of the other go to ``_error``.
        """
        tables = [DeltaCatalog(str(place)) for place in self._inputs.delta]
        if self.table is not None and self.table.exists():
            tables.insert(0, self.table)
        schemas = [table.schema() for table in tables]
        if self.settings.fields is not None:
            schemas.append(BodyColumns(fields_of(self.settings.fields)).schema())
        read = [] if self.table else [each for some in present.values() for each in some]
        if self._inputs.parquet or self._inputs.archives:
            read += [each for partition in work for each in partition.sources if each.is_parquet]
        some = list({each.shown: each for each in read if not each.damage}.values())
        schemas += map_concurrently(columns_in, some)
        known: dict[str, pyarrow.Field] = {}
        for column in chain.from_iterable(schemas):
            if column.name in RESERVED:
                continue
            first = known.setdefault(column.name, column)
            if first.type != column.type:
                known.setdefault(ERROR, pyarrow.field(ERROR, pyarrow.string()))
            elif not first.metadata:  # of Parquet, which has none
                known[column.name] = column
        return pyarrow.schema(list(known.values()))

    def _without_columns(
        self, present: Mapping[PartitionKey, Sequence[Source]]
    ) -> list[PartitionKey]:
        """Return the partitions with rows that do not get the columns of the schema: those that are
        Parquet already."""
        if self.settings.fields is None:
            return []
        asked = {*BodyColumns(fields_of(self.settings.fields)).schema().names} - {ERROR, *RESERVED}
        keys = []
        for partition in self.partitions:
            some = [*present.get(partition.key, ()), *partition.sources]
            first = next((each for each in some if each.is_parquet and not each.damage), None)
            if first and not asked <= {*columns_in(first).names, *partition.key.values}:
                keys.append(partition.key)
        return keys

    def _state(
        self, key: PartitionKey, sources: list[Source], there: Sequence[Source]
    ) -> tuple[str, list[Source], list[Source]]:
        """Return the state of a partition, its files to read, and those of them that stay."""
        if self.selection.is_open(key, self._now_s):
            return "open", [], []
        if self.in_place:
            whole = [each for each in sources if not each.damage and not each.is_shared]
            most = self.settings.target_bytes // 2
            small = [each for each in whole if each.size < most and each.days == {key.day}]
            kept = [each for each in sources if each not in small]
            return ("small", small, kept) if len(small) > 1 else ("done", [], [])
        note = self._note(key)
        names = [PurePosixPath(each.file.name).stem for each in there]
        new: list[Source] = []
        for each in sources:
            if (taken := _noted(note, each)) == each.size:
                continue
            grew = False
            if key.day is None:  # bare bodies that were appended to would come again
                with translating_errors("read", each.shown):
                    grew = bool(taken) or has_grown(each.file, hash_path(each.key), names)
            (self.grown if grew else new).append(each)
        return ("done" if not new else "late" if there else "new"), new, []

    @property
    def work(self) -> list[Partition]:
        """The partitions with something to do."""
        return [each for each in self.partitions if each.state in ("new", "late", "small")]

    @property
    def jobs(self) -> list[Job]:
        """All that is to be run, in any order."""
        return [job for partition in self.work for job in partition.jobs]

    def _present(self, keys: Collection[PartitionKey]) -> dict[PartitionKey, list[Source]]:
        """What the output has of some partitions."""
        if self.in_place:
            return {}
        folders = {(key.values["topic"], key.values["date"]) for key in keys}

        def is_selected(partition: Mapping[str, str | None]) -> bool:
            return (partition.get("topic"), partition.get("date")) in folders

        with translating_errors("read", self.output):
            root, found = files_in_table(str(self.output), is_selected)
            if found is None:
                found = files_in_folder(root, self.output, list(self.output.list()), is_selected)
        there = group_by_partition(iterate_sources(found, is_selected))
        return {key: some for key, some in there.items() if key in keys}

    # -- doing it -------------------------------------------------------------------------------

    @contextmanager
    def locked(self) -> Iterator[None]:
        """Keep other compactions out of the output."""
        with self.output.lock(f"{NOTES}/lock") as self._place:
            if not self.output.is_remote:
                folder = self.output.path
                if list(folder.glob("_staging/topic=*/date=*.replaced")):
                    raise OutputError(
                        f"an earlier version was killed while it replaced a day in {self.output}",
                        hint="Run nsq spark compact of that version once: it puts the day back.",
                    )
                for draft in (folder / STAGING).glob("*.parquet"):  # of a run that was killed
                    draft.unlink(missing_ok=True)
            yield

    def run(self, run_jobs: RunJobs) -> None:
        """Do what is planned. The output must be locked."""
        if not self.settings.skips_damaged:
            for source in (each for partition in self.work for each in partition.sources):
                if source.damage:
                    raise unreadable(source, source.damage)
        if self.table is not None and self.jobs:
            others = {name for partition in self.work for name, _ in partition.key.extras}
            prepare_table(self.table, self.others, self._kind, sorted(others))
        of_job = [partition for partition in self.work for _ in partition.jobs]
        for number, done in run_jobs(self.jobs):
            partition = of_job[number]
            partition.done.append(done)
            if len(partition.done) == len(partition.jobs):
                self._finish(partition)
        for partition in self.work:
            if not partition.jobs:
                self._finish(partition)

    def _finish(self, partition: Partition) -> None:
        """Commit the files of a partition, and note what they were made of."""
        self._place.check()
        files = partition.files
        at = partition.key.values
        removes = [TableFile(each.file.name, each.size, partition=at) for each in partition.sources]
        if self.in_place and sum(done.read for done in partition.done) != sum(
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
                data_change=not self.in_place or any(each.duplicates for each in partition.done),
            )
        if self.in_place or partition.is_damaged:
            return
        note = self._note(partition.key)
        sources = note.get("sources", {}) | {each.key: each.size for each in partition.sources}
        names = note.get("files", {}) | {file.path: file.bytes for file in files}
        begins = note.get("begins", {}) | {each.key: each.begin for each in partition.sources}
        document = {"version": 1, "sources": sources, "files": names, "begins": begins}
        with translating_errors("write", self.output):
            self.output.put(self._note_name(partition.key), json.dumps(document).encode())

    def _note_name(self, key: PartitionKey) -> str:
        return f"{NOTES}/{key.folder}.json"

    def _note(self, key: PartitionKey) -> dict[str, Any]:
        with translating_errors("read", self.output):
            return dict(self.output.read_json(self._note_name(key)) or {})

    # -- what is needless then ------------------------------------------------------------------

    def deletable(self) -> tuple[list[Source], dict[str, str]]:
        """Return the archives whose messages are all in verified Parquet, and why others stay."""
        notes: dict[PartitionKey, dict[str, Any]] = {}
        chosen: list[Source] = []
        kept: dict[str, str] = {}
        by_key: dict[str, list[Source]] = {}
        for source in self.sources:
            if not source.is_parquet:
                by_key.setdefault(source.key, []).append(source)
        for some in by_key.values():
            first = some[0]
            keys = [key for source in some for key in source.partitions]
            if not all(map(self.selection.has, keys)):
                continue
            notes |= {key: self._note(key) for key in keys if key not in notes}
            reasons = [first.damage]
            if first.file.head is None and first.topic is None:
                reasons.append("it has neither messages nor an index, so it may not be an archive")
            with translating_errors("read", first.shown):
                reasons.append(why_unfinished(first.file))
            why_not = (self._reason_to_keep(first, key, notes[key]) for key in keys)
            if reason := next(filter(None, chain(reasons, why_not)), ""):
                kept[first.shown] = reason
            else:
                chosen.append(first)
        return chosen, kept

    def _reason_to_keep(self, source: Source, key: PartitionKey, note: Mapping[str, Any]) -> str:
        if _noted(note, source) != source.size:
            return f"not all of it is compacted: {key.topic} on {key.day}"
        for name, size in note["files"].items() if self.table is None else ():
            try:
                if self.output.stat(name).size != size:
                    return f"{self.output / name} has changed"
            except FileNotFoundError:
                return f"{self.output / name} is missing"
        return ""


def _noted(note: Mapping[str, Any], source: Source) -> int | None:
    """Return the size that a file had when it was taken, None if it was not."""
    size: int | None = note.get("sources", {}).get(source.key)
    before = note.get("begins", {}).get(source.key) or source.begin
    if size is None or before == source.begin:
        return size
    if source.damage or source.file.head is not None:
        return None
    with translating_errors("read", source.shown):
        return size if source.file.storage.digest(source.file.name, size) == before else None


def delete_archive(source: Source) -> bool:
    """Delete an archive with what is beside it; False, and it stays, when it has changed, or has a
    writer now.

    Raises as `failure_of` says.
    """
    storage, name, listed = source.file.storage, source.file.name, source.file.entry
    with translating_errors("delete", source.shown), suppress(FileNotFoundError):
        if source.is_parquet or listed is None or why_unfinished(source.file):
            return False
        if storage.stat(name).version == listed.version:
            for each in (name, aside(name, INDEX), aside(name, MANIFEST)):
                storage.delete(each)
            return True
    return False


# -- where jobs run -----------------------------------------------------------------------------


def in_processes(processes: int) -> RunJobs:
    """Run jobs in processes of this machine; one alone runs in this one."""

    def run(jobs: Sequence[Job]) -> Iterator[tuple[int, JobResult]]:
        if processes < 2 or len(jobs) < 2:
            yield from enumerate(map(run_job, jobs))
            return
        count = min(processes, len(jobs))
        with (
            # new interpreters import nothing of the directory that one happens to be in
            environment({"PYTHONSAFEPATH": "1"}),
            ProcessPoolExecutor(count, get_context("spawn"), _belong_to_parent) as pool,
        ):
            waiting = {pool.submit(run_job, job): number for number, job in enumerate(jobs)}
            try:
                for future in as_completed(waiting):
                    yield waiting[future], future.result()
            except BrokenProcessPool:
                raise NsqError(
                    "a process of the compaction was killed",
                    hint="Run it again: what is done is kept. With fewer --processes it takes "
                    "less memory.",
                ) from None
            finally:
                pool.shutdown(cancel_futures=True)

    return run


def _belong_to_parent() -> None:
    """Leave an interrupt of the terminal to the process that has this one, and end with it."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    pyarrow.set_cpu_count(1)
    threading.Thread(target=_end_with, args=[parent_process()], daemon=True).start()


def _end_with(parent: Any) -> None:
    parent.join()
    os._exit(1)
