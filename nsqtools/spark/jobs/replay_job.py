"""``nsq spark replay``: messages from archives and Parquet back into topics, in parallel.

Each task publishes one partition of the input in order. Partitions are published concurrently, so
the messages of a topic arrive in no particular order. With a ledger, an interrupted replay
continues where it stopped when it is run again. Files in progress still grow, so a replay with a
ledger excludes them.

The first run with a ledger stores a `ReplayPlan`, so that later runs do the same work: the files to
read, the times that ``-2h`` meant, and the partition size. Files that are added later do not belong
to the replay, and its partitions are the same on any cluster. A file that has changed is refused.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from threading import Event
from typing import Any, NamedTuple

from pyspark.sql import Column, DataFrame, SparkSession
from pyspark.sql import functions as F

from nsqtools.archive.finding import Inputs, find_inputs, table_files
from nsqtools.archive.layout import TimeRange
from nsqtools.archive.place import LocalPlace, Place, map_concurrently, translating_errors
from nsqtools.archive.place_url import parse_place
from nsqtools.errors import ConfigurationError, NotFoundError, NsqError
from nsqtools.protocol.names import check_topic
from nsqtools.protocol.text import load_json
from nsqtools.records.units import Moment
from nsqtools.spark.archives.damage import ArchiveDamage, read_damage
from nsqtools.spark.failures import spark_errors
from nsqtools.spark.jobs.inputs import (
    Choice,
    has_bare_bodies,
    list_archives,
    select_messages,
    warn_of_bare_bodies,
)
from nsqtools.spark.publishing.row_outcomes import LOCK, PublishReport, read_entries
from nsqtools.spark.session import cancel_jobs
from nsqtools.spark.spark_settings import SparkSettings

VERSION = 1
PLAN = "replay.json"

# Smaller partitions would mostly cost the start of tasks, and larger ones make retries long.
MIN_PARTITION_BYTES, MAX_PARTITION_BYTES = 8 << 20, 64 << 20
PARTITIONS_PER_SLOT = 4  # With several tasks for each slot, one slow task delays the end less.


@dataclass(frozen=True, slots=True)
class ReplayRequest:
    """The selected messages and their target topics.

    ``topics`` are as in `nsqtools.replay.Selection`. ``where`` is SQL over the columns of a
    message.
    """

    paths: tuple[Place, ...]
    topics: Mapping[str, str] = field(default_factory=dict)
    since: Moment | None = None
    until: Moment | None = None
    where: str = ""
    delimiter: bytes | None = None

    def __post_init__(self) -> None:
        for topic in self.topics.values():
            check_topic(topic)

    @property
    def within(self) -> TimeRange:
        return TimeRange(self.since and self.since.ns, self.until and self.until.ns)

    def job(self) -> dict[str, Any]:
        """Return the identity of the replay, which its ledger stores."""
        return {
            "paths": [str(path.absolute()) for path in self.paths],
            "topics": dict(sorted(self.topics.items())),
            "since": self.since.text if self.since else "",
            "until": self.until.text if self.until else "",
            "where": self.where,
            "delimiter": (self.delimiter or b"").hex(),
        }


@dataclass(frozen=True, slots=True)
class ReplayPlan:
    """The work of a replay with a ledger: files with their sizes, times and partition size."""

    job: dict[str, Any]
    archives: dict[str, int]
    parquet: dict[str, int]
    since_ns: int | None
    until_ns: int | None
    partition_bytes: int
    version: int = VERSION

    def encode(self) -> bytes:
        """Return the content of the file."""
        return json.dumps(asdict(self), indent=1).encode() + b"\n"

    @property
    def inputs(self) -> Inputs:
        """The files to read."""
        return Inputs(tuple(map(parse_place, self.archives)), tuple(map(parse_place, self.parquet)))


def partition_bytes(size: int, slots: int) -> int:
    """Return how much Parquet each task reads, for a total ``size`` and a number of slots."""
    share = size // (PARTITIONS_PER_SLOT * max(1, slots))
    return max(MIN_PARTITION_BYTES, min(MAX_PARTITION_BYTES, share))


def load_plan(ledger: Place, job: Mapping[str, Any]) -> ReplayPlan | None:
    """Load the plan of the first run, None before it. Raises `ConfigurationError`."""
    path = ledger / PLAN
    with translating_errors("read", path):
        try:
            content = ledger.read(PLAN)
        except FileNotFoundError:
            return None
    try:
        plan = ReplayPlan(**load_json(content))
        if plan.version != VERSION:
            raise ValueError
        differences = [name for name in plan.job if plan.job[name] != job[name]]
    except (ValueError, TypeError, KeyError):
        raise ConfigurationError(
            f"{path} is not a replay's plan", hint="Give another directory."
        ) from None
    if differences:
        raise ConfigurationError(
            f"{ledger} is the ledger of another replay: {', '.join(differences)} differ",
            hint="Give the same arguments again, or another directory.",
        )
    return plan


def sizes_of(paths: Iterable[str]) -> dict[str, int]:
    """Return the sizes of files. Raises `OutputError`."""
    places = {path: parse_place(path) for path in paths}
    with translating_errors("read", ""):
        entries = map_concurrently(lambda place: place.stat(), places.values())
        return {path: entry.size for path, entry in zip(places, entries, strict=True)}


PUBLISHED = ("topic", "nsqd", "id", "ts_ns", "attempts", "body")


class ReplayOutcome(NamedTuple):
    """The outcome of a replay.

    ``is_complete`` is whether all tasks ended. ``error`` is the reason if not, or if messages were
    not published. ``in_doubt`` messages may be duplicated when the replay is run again with its
    ledger.
    """

    report: PublishReport
    is_complete: bool
    error: NsqError | None = None
    damages: Sequence[ArchiveDamage] = ()
    in_doubt: int = 0


class ReplayJob:
    """One run of a replay: create it, `open` it with a session, then `count` or `run`.

    ``options`` are options of the sink. ``work`` is the directory of this run, and ``shares_work``
    whether executors can access it. Raises `NsqError` for invalid input before a session starts.
    """

    def __init__(
        self,
        settings: SparkSettings,
        request: ReplayRequest,
        options: Mapping[str, str],
        ledger: Place | None = None,
        *,
        work: Path,
        shares_work: bool,
    ) -> None:
        self.excluded: list[str] = []  # The files in progress, which still grow.
        self._settings, self._request = settings, request
        self._options, self._ledger = options, ledger
        self._outcome_path = work / "outcome.json"
        shared = LocalPlace(work) if shares_work else ledger
        self._damage_path = shared / "damage" if shared else None
        self._is_cancelled, self._has_ended = False, Event()
        self._plan = load_plan(ledger, request.job()) if ledger else None
        if self._plan is not None:
            sizes = self._plan.archives | self._plan.parquet
            for path, size in sizes_of(sizes).items():
                if size != sizes[path]:
                    raise ConfigurationError(
                        f"{path} has changed since the ledger was begun",
                        hint="Give another ledger; everything is published again then.",
                    )
            self._inputs = self._plan.inputs
        else:
            self._inputs = find_inputs(request.paths)
        if request.topics.get(""):
            warn_of_bare_bodies(self._inputs, request.within)
        elif has_bare_bodies(self._inputs):
            raise ConfigurationError(
                "the files have bare bodies, which have no topic", hint="Give --topic."
            )

    def open(self, spark: SparkSession) -> None:
        """Plan the job in a session. Raises `NsqError`."""
        self._spark = spark
        with spark_errors(self._settings):
            within = self._request.within
            if self._ledger is not None:
                if self._plan is None:
                    self._plan = self._new_plan(spark)
                    self._inputs = self._plan.inputs
                # With these settings Parquet is split identically on every cluster.
                files = "spark.sql.files"
                spark.conf.set(f"{files}.maxPartitionBytes", str(self._plan.partition_bytes))
                spark.conf.set(f"{files}.minPartitionNum", "1")
                spark.conf.set(f"{files}.openCostInBytes", str(1 << 20))
                within = TimeRange(self._plan.since_ns, self._plan.until_ns)
            self._rows = self._selected(within)

    def stop(self) -> None:
        """Cancel the job that runs or begins. May be called from any other thread."""
        self._is_cancelled = True
        cancel_jobs(self._spark.sparkContext, self._has_ended)

    def count(self) -> ReplayOutcome:
        """Count the messages that `run` would publish to each topic. Raises `NsqError`."""
        with spark_errors(self._settings):
            rows = self._remaining_rows().groupBy("topic").count().collect()
        report = PublishReport({row["topic"] or "-": row["count"] for row in rows})
        return ReplayOutcome(report, is_complete=True, damages=self._damages())

    def run(self) -> ReplayOutcome:
        """Publish all messages. Raises `NsqError` for a ledger that is in use or read-only."""
        ledger = self._ledger
        if ledger is None:
            return self._publish()
        with ledger.lock(LOCK):
            assert self._plan is not None
            if load_plan(ledger, self._plan.job) not in (None, self._plan):
                raise ConfigurationError(
                    f"another run has begun the ledger {ledger} meanwhile",
                    hint="Run it again: it continues where that one ended.",
                )
            with translating_errors("write the ledger", ledger):
                ledger.put(PLAN, self._plan.encode())
            outcome = self._publish()
            if outcome.is_complete:
                return outcome
            # Tasks that failed have not reported, but the ledger has their progress.
            entries = read_entries(ledger).values()
        report = PublishReport(repeated=sum(entry.repeated for entry in entries))
        for entry in entries:
            report.add(entry)
        in_doubt = sum(entry.sent - entry.done for entry in entries)
        return outcome._replace(report=report, in_doubt=in_doubt)

    def _publish(self) -> ReplayOutcome:
        error = None
        try:
            with spark_errors(self._settings):
                writer = self._rows.write.format("nsq").mode("append")
                if not self._is_cancelled:
                    writer.options(**self._sink_options()).save()
        except NsqError as exc:
            error = None if self._is_cancelled else exc
        finally:
            self._has_ended.set()
        report, is_complete = self._read_outcome()
        return ReplayOutcome(report, is_complete, error, self._damages())

    def _remaining_rows(self) -> DataFrame:
        """Return the rows that `run` publishes, without the finished rows of each partition."""
        if self._ledger is None:
            return self._rows
        with translating_errors("read", self._ledger):
            entries = read_entries(self._ledger)
        done = [entries[n].done if n in entries else 0 for n in range(max(entries, default=0) + 1)]
        # The lower 33 bits of these ids are the number of the row in its partition.
        row = F.monotonically_increasing_id().bitwiseAND((1 << 33) - 1)
        first = F.coalesce(F.get(F.lit(done), F.spark_partition_id()), F.lit(0))
        return self._rows.where(row >= first)

    def _damages(self) -> list[ArchiveDamage]:
        return read_damage(self._damage_path) if self._damage_path else []

    # -- input ----------------------------------------------------------------------------------

    def _new_plan(self, spark: SparkSession) -> ReplayPlan:
        request = self._request
        files = list_archives(self._inputs)
        self.excluded = [str(file.place) for file in files if not file.is_finished]
        with translating_errors("read", ""):
            archives = {str(file.place): file.size() for file in files if file.is_finished}
        tables = table_files((*self._inputs.parquet, *self._inputs.delta))
        parquet = sizes_of(f"{root}/{name}" for root, names in tables.items() for name in names)
        size = partition_bytes(sum(parquet.values()), spark.sparkContext.defaultParallelism)
        within = request.within
        return ReplayPlan(
            request.job(), archives, parquet, within.since_ns, within.until_ns, partition_bytes=size
        )

    def _selected(self, within: TimeRange) -> DataFrame:
        request, inputs = self._request, self._inputs
        if not inputs.places:
            raise NotFoundError("no file to replay")
        # A ledger needs the same partitions on every cluster, so their number must not depend on
        # the default parallelism.
        partitions = 1 if self._ledger is not None else 0
        choice = Choice((), within, request.delimiter, self._damage_path, partitions)
        rows = select_messages(self._spark, inputs, choice)
        if request.where:
            rows = rows.where(request.where)
        return rows.withColumn("topic", target_topic(request.topics)).select(*PUBLISHED)

    # -- output ---------------------------------------------------------------------------------

    def _sink_options(self) -> dict[str, str]:
        options = {**self._options, "outcomePath": str(self._outcome_path)}
        if "rate" in options:
            parallel = self._spark.sparkContext.defaultParallelism
            options["slots"] = str(max(1, min(parallel, self._rows.rdd.getNumPartitions())))
        if self._plan is not None:
            job = hashlib.sha256(self._plan.encode()).hexdigest()
            options |= {"ledgerPath": str(self._ledger), "ledgerJob": job}
        return options

    def _read_outcome(self) -> tuple[PublishReport, bool]:
        """Return the sum of the tasks' reports, and whether all tasks reported."""
        try:
            document = json.loads(self._outcome_path.read_bytes())
        except OSError:  # The job ended before the first report.
            return PublishReport(), False
        is_complete = document.pop("is_complete")
        del document["confirmed"]
        return PublishReport(**document), is_complete


def target_topic(topics: Mapping[str, str]) -> Column:
    """Return the column with the topic to which each message is published."""
    column = F.lit(topics[""]) if topics.get("") else F.col("topic")
    for source, target in topics.items():
        if source:
            column = F.when(F.col("topic") == source, F.lit(target)).otherwise(column)
    return column
