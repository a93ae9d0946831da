"""Select partitions, and cut each into jobs: consecutive slices of time that become one file."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from datetime import date
from itertools import accumulate, chain
from operator import attrgetter

from nsqtools.archive.catalog import PartitionKey, Source, day_range, find_sources
from nsqtools.archive.delta import PartitionValues, TableFile
from nsqtools.archive.finding import Inputs
from nsqtools.archive.layout import Member
from nsqtools.archive.slices import Job, JobResult, Settings, Slice

# Files become smaller than the target so that all workers have work, but not smaller than this:
# the messages of about a second of CPU.
MIN_FILE_BYTES = 8 << 20
# A slice is the unit of sorting and bounds the memory of a process.
SLICE_ROWS = 200_000
SLICE_TEXT = 64 << 20
# An index is untrusted and may claim any number of messages.
MAX_SLICES_PER_MEMBER = 250
COMPRESSION_RATIO = 6  # roughly, of the text of messages


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
        return find_sources(inputs.places, self.may_have)

    def may_have(self, partition: PartitionValues) -> bool:
        """Return whether a file with these values may have selected topics."""
        return not self.topics or partition.get("topic") in {*self.topics, None}

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


def choose_file_size(settings: Settings, total_bytes: int) -> int:
    """Return the size of files with which inputs of ``total_bytes`` occupy all workers. Pure."""
    share = total_bytes // max(1, settings.parallel)
    return min(settings.target_bytes, max(MIN_FILE_BYTES, share))


def jobs_of(sources: Sequence[Source], job: Job, file_bytes: int) -> list[Job]:
    """Cut a partition into slices, and group these to files of about ``file_bytes``. Pure.

    ``job`` is the template: the returned jobs have its fields and their own slices.
    """
    if job.key.day is None:
        names = {source.file.name for source in job.present}
        jobs = [replace(job, slices=(Slice(0, 0, (source,)),), present=()) for source in sources]
        return [job for job in jobs if job.name not in names]
    begin, end = day_range(job.key.day)
    spans = chain.from_iterable(source.between(begin, end) for source in sources)
    size = sum(_share(span, begin, end) for span in spans)
    # Files get equal sizes. A remainder below a quarter makes them a little larger than the target,
    # instead of a small file at the end.
    files = max(1, math.ceil(size / file_bytes - 0.25))
    cuts = _cut_times(sources, begin, end, files)
    slices: list[Slice] = []
    sizes: list[float] = []
    for since_ns, until_ns in zip(cuts, [*cuts[1:], end], strict=True):
        inputs = [(source, source.between(since_ns, until_ns)) for source in sources]
        slices.append(Slice(since_ns, until_ns, tuple(source for source, spans in inputs if spans)))
        sizes.append(sum(_share(span, since_ns, until_ns) for _, spans in inputs for span in spans))
    slices_by_file: dict[int, list[Slice]] = {}
    for part, size, until in zip(slices, sizes, accumulate(sizes), strict=True):
        middle = (until - size / 2) / (sum(sizes) or 1)
        slices_by_file.setdefault(int(files * middle), []).append(part)
    jobs = [replace(job, slices=tuple(parts)) for parts in slices_by_file.values()]
    return [
        replace(job, present=tuple(s for s in job.present if s.between(*job.range))) for job in jobs
    ]


def _cut_times(sources: Iterable[Source], begin_ns: int, end_ns: int, files: int) -> list[int]:
    """Return the first times of slices that have about `SLICE_ROWS` rows or `SLICE_TEXT` bytes.

    Several files get at least two slices each, so that they can have equal sizes.
    """
    cuts = [begin_ns]
    rows = text = 0
    spans = [span for source in sources for span in _split_spans(source, begin_ns, end_ns)]
    max_rows = SLICE_ROWS
    if files > 1:
        max_rows = min(max_rows, math.ceil(sum(span.messages for span in spans) / files / 2))
    for span in sorted(spans, key=attrgetter("min_ts")):
        if (rows >= max_rows or text >= SLICE_TEXT) and span.min_ts > cuts[-1]:
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
