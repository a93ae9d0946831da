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

import time
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from datetime import date
from itertools import chain
from pathlib import PurePosixPath
from uuid import uuid4

import pyarrow

from nsqtools.archive.body_columns import ERROR, RESERVED, BodyColumns
from nsqtools.archive.body_schema import fields_of
from nsqtools.archive.catalog import (
    PartitionKey,
    Source,
    group_by_partition,
    has_grown,
    hash_path,
    iterate_sources,
)
from nsqtools.archive.columns import KEYS_OF, message_schema
from nsqtools.archive.compaction_jobs import RunJobs
from nsqtools.archive.compaction_notes import Notes, compacted_size
from nsqtools.archive.compaction_plan import Partition, Selection, choose_file_size, jobs_of
from nsqtools.archive.delta import (
    DeltaCatalog,
    TableFile,
    is_table,
    refuse_other_form,
)
from nsqtools.archive.finding import (
    Inputs,
    check_whole_folder,
    files_in_folder,
    files_in_table,
    files_of_catalog,
)
from nsqtools.archive.place import (
    Place,
    PlaceLock,
    map_concurrently,
    refuse_nested,
    translating_errors,
)
from nsqtools.archive.place_url import parse_place
from nsqtools.archive.replacements import NOTES, locked_table, replace_files
from nsqtools.archive.slices import (
    Job,
    JobResult,
    Settings,
    body_kind,
    body_kind_of,
    columns_in,
    prepare_table,
    unreadable,
)
from nsqtools.archive.table_places import refuse_inside_table, url_of_topic
from nsqtools.errors import ConfigurationError, NotFoundError, OutputError
from nsqtools.records.envelope import BodyKind


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
            if inputs.archives or len(inputs.places) != 1:
                raise ConfigurationError(
                    "missing --output", hint="Only a table can be compacted in place."
                )
            output, is_delta = inputs.places[0], bool(inputs.delta)
        else:
            for place in inputs.places:
                refuse_nested("--output", output, place)
        self.output = output.absolute()
        self._now_s = time.time() if now_s is None else now_s
        with translating_errors("read", self.output):
            self._check(is_delta=is_delta)
        self.table = DeltaCatalog(str(self.output)) if is_delta else None
        self._lock, self._notes = PlaceLock(), Notes(self.output)
        self._given_sources = sources
        self.sources: Sequence[Source] = []
        self.partitions: list[Partition] = []
        self.grown: list[Source] = []
        """Files of bare bodies that have grown since they were compacted. They are skipped."""
        self.without_columns: list[PartitionKey] = []
        """Partitions whose rows do not get the columns of the schema."""

    def _check(self, *, is_delta: bool) -> None:
        """Refuse an output with files of other programs."""
        if self.in_place:
            if not is_delta:
                check_whole_folder(self.output)
            return
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
        self.sources = self._given_sources or self._find_sources()
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
        size = settings.target_bytes if self.in_place else choose_file_size(settings, total)
        for partition in work:
            job = Job(
                str(self.output),
                partition.key,
                (),
                tuple(present[partition.key]),
                settings,
                self._extra_columns,
                is_staged=self.in_place and self.table is None,
            )
            partition.jobs = jobs_of(partition.sources, job, size)

    def _find_sources(self) -> list[Source]:
        if not self.in_place or self.table is None:
            return self.selection.find_sources(self._inputs)
        # Opening a table costs time in proportion to its files, so it is opened once.
        may_have = self.selection.may_have
        return list(iterate_sources(files_of_catalog(self.table, may_have), may_have))

    def _choose_body_kind(self, present: Mapping[PartitionKey, Sequence[Source]]) -> BodyKind:
        """Return the kind of bodies in the output. An existing output decides.

        Raises `ConfigurationError` if another kind was requested.
        """
        requested = self.settings.body
        groups = (
            [partition.sources for partition in self.work] if self.in_place else present.values()
        )
        existing = body_kind(self.table) if self.table else body_kind_of(groups)
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
        in ``_error``. With a Delta table that exists, they include columns of a message, because
        files must have its types.
        """
        tables = [DeltaCatalog(str(place)) for place in self._inputs.delta if not self.in_place]
        has_table = self.table is not None and self.table.exists()
        if self.table is not None and has_table:
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
        columns = {column.name: column for column in (schemas[0] if has_table else ())}
        if has_table and not self.in_place:
            of_messages = {column.name: column for column in message_schema(self._body_kind)}
            columns = of_messages | columns
        for column in chain.from_iterable(schemas):
            if column.name in KEYS_OF:
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
                and self._is_committed(source)
                and source.size < limit
                and source.days == {key.day}
            ]
            retained = [source for source in sources if source not in small]
            return ("small", small, retained) if len(small) > 1 else ("done", [], [])
        note = self._notes.read(key)
        names = [PurePosixPath(source.file.name).stem for source in present]
        new: list[Source] = []
        for source in sources:
            if (size := compacted_size(note, source)) == source.size:
                continue
            is_grown = False
            # Bare bodies have no identity, so those from before the growth would be duplicated.
            if key.day is None:
                with translating_errors("read", source.shown):
                    is_grown = bool(size) or has_grown(source.file, hash_path(source.key), names)
            (self.grown if is_grown else new).append(source)
        return ("done" if not new else "late" if present else "new"), new, []

    def _is_committed(self, source: Source) -> bool:
        """Return whether a file is in the log of the table, or has a manifest.

        A program may be about to store a file without a manifest once more.
        """
        table = source.file.table
        return self.table is not None or (table is not None and table.rows is not None)

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
            if self.table is None:
                root, _ = files_in_table(str(self.output), is_selected)
                files = files_in_folder(root, self.output, list(self.output.list()), is_selected)
            else:
                is_new = not self.table.exists()
                files = [] if is_new else files_of_catalog(self.table, is_selected)
        present = group_by_partition(iterate_sources(files, is_selected))
        return {key: sources for key, sources in present.items() if key in keys}

    # -- running --------------------------------------------------------------------------------

    @contextmanager
    def locked(self) -> Iterator[None]:
        """Lock the output against other compactions, and remove drafts of a killed one."""
        with locked_table(self.output) as self._lock:
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
        elif self.in_place:
            staged = {r.file.path: r.staged for r in partition.results if r.file and r.staged}
            with translating_errors("compact", self.output):
                rows = {source.file.name: source.messages for source in partition.sources}
                replace_files(self.output, staged, rows)
        if self.in_place or partition.is_damaged:
            return
        self._notes.add(partition.key, partition.sources, files)

    def deletable(self) -> tuple[list[Source], dict[str, str]]:
        """Return the archives whose messages are all in Parquet, and the reasons to keep others."""
        is_delta = self.table is not None
        return self._notes.deletable(self.sources, self.selection, is_delta=is_delta)


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
