"""``nsq spark replay``: messages from archives and Parquet back into topics, in parallel.

Each task publishes a partition of the input, in its order; partitions are published side by side,
so the messages of a topic come in no order. With a ledger, a replay that was interrupted continues
where it stopped when it is run again (see `replay_plan`). Files in progress still grow, so with a
ledger they are left out.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING

from nsqtools.archive.reader import TimeRange
from nsqtools.errors import ConfigurationError, NotFoundError, NsqError
from nsqtools.spark.archives.archive_files import LineKind
from nsqtools.spark.archives.damage import ArchiveDamage, read_damage
from nsqtools.spark.failures import spark_errors
from nsqtools.spark.jobs.inputs import Choice, find_inputs, read_messages
from nsqtools.spark.jobs.lease import leased
from nsqtools.spark.jobs.replay_plan import (
    ReplayPlan,
    ReplayRequest,
    check_sizes,
    fix_partitions,
    listed,
    load_plan,
    parquet_files,
    partition_bytes,
    save_plan,
    size_of,
)
from nsqtools.spark.location import Location, StoredPlace
from nsqtools.spark.publishing.ledger import LOCK, LedgerEntry, locked_ledger, read_entries
from nsqtools.spark.publishing.row_outcomes import PublishReport, total
from nsqtools.spark.publishing.stored_progress import read_stored_entries

if TYPE_CHECKING:
    from pyspark.sql import Column, DataFrame, SparkSession

    from nsqtools.spark.spark_settings import SparkSettings

PUBLISHED = ("topic", "nsqd", "id", "ts_ns", "attempts", "body")


@dataclass(frozen=True, slots=True)
class ReplayPublishing:
    """How it is published. ``options`` are those of the connection and of retrying, for the sink;
    ``rate`` is messages a second in total, 0 without limit."""

    options: Mapping[str, str]
    rate: float = 0.0
    ledger: Location | None = None
    dead_letters: Location | None = None


@dataclass(frozen=True, slots=True)
class ReplayOutcome:
    """How a replay ended. ``is_complete`` is whether all tasks ended, ``error`` is why not, or that
    messages were not published; ``in_doubt`` messages may come twice when it is run again with its
    ledger."""

    report: PublishReport
    is_complete: bool
    error: NsqError | None = None
    damages: Sequence[ArchiveDamage] = ()
    in_doubt: int = 0


class ReplayJob:
    """One run: made, then opened with a session, then `count` or `run`.

    ``work`` is a directory for this run alone, and ``shares_work`` whether executors see it, too.
    Raises `NsqError` for what cannot be read or asked for, before there is a session if it can.
    """

    def __init__(
        self,
        settings: SparkSettings,
        request: ReplayRequest,
        publishing: ReplayPublishing,
        *,
        work: Path,
        shares_work: bool,
    ) -> None:
        self.left_out: list[str] = []  # files in progress
        self._settings = settings
        self._request = request
        self._publishing = publishing
        self._outcome_path = work / "outcome.json"
        ledger = publishing.ledger
        shared = work if shares_work else ledger
        self._damage_path = shared / "damage" if shared else None
        self._is_cancelled = False
        self._plan = load_plan(ledger, request.job()) if ledger else None
        if self._plan is not None:
            check_sizes(self._plan)
            self._inputs = self._plan.inputs
        else:
            self._inputs = find_inputs(request.paths)
        self._refuse_without_topic()

    def open(self, spark: SparkSession) -> None:
        """Plan what is read, in a session. Raises `NsqError`."""
        self._spark = spark
        with spark_errors(self._settings):
            within = TimeRange(self._request.since_ns, self._request.until_ns)
            if self._publishing.ledger is not None:
                if self._plan is None:
                    self._plan = self._new_plan(spark)
                    self._inputs = self._plan.inputs
                fix_partitions(spark, self._plan.partition_bytes)
                within = TimeRange(self._plan.since_ns, self._plan.until_ns)
            self._rows = self._selected(within)

    def stop(self) -> None:
        """End the job; from any thread."""
        self._is_cancelled = True
        self._spark.sparkContext.cancelAllJobs()

    def count(self) -> ReplayOutcome:
        """Say how many messages would go to which topic, as if they had. Raises `NsqError`."""
        with spark_errors(self._settings):
            rows = self._rows.groupBy("topic").count().collect()
        report = PublishReport({row["topic"] or "-": row["count"] for row in rows})
        return ReplayOutcome(report, is_complete=True, damages=self._damages())

    def run(self) -> ReplayOutcome:
        """Publish everything. Raises `NsqError` for a ledger that is in use or read-only."""
        ledger = self._publishing.ledger
        if ledger is None:
            return self._publish()
        with leased(ledger, LOCK) if isinstance(ledger, StoredPlace) else locked_ledger(ledger):
            assert self._plan is not None
            save_plan(ledger, self._plan)
            outcome = self._publish()
            return outcome if outcome.is_complete else with_ledger(outcome, entries_of(ledger))

    def _publish(self) -> ReplayOutcome:
        error = None
        try:
            with spark_errors(self._settings):
                if not self._is_cancelled:
                    self._rows.write.format("nsq").mode("append").options(**self._options()).save()
        except NsqError as exc:
            error = exc
        if self._is_cancelled:
            error = None
        report, is_complete = self._found()
        return ReplayOutcome(report, is_complete, error, self._damages())

    def _damages(self) -> list[ArchiveDamage]:
        return read_damage(self._damage_path) if self._damage_path else []

    # -- what is read ---------------------------------------------------------------------------

    def _new_plan(self, spark: SparkSession) -> ReplayPlan:
        request = self._request
        archives = {}
        for file in listed(self._inputs.archives):
            if file.is_finished:
                archives[file.location] = size_of(file.location)
            else:
                self.left_out.append(file.location)
        if self._inputs.delta:
            raise ConfigurationError(
                "a replay with a ledger reads archives and Parquet, not Delta",
                hint="Its files would not be the same in a later run.",
            )
        parquet = parquet_files(spark, self._inputs.parquet)
        slots = spark.sparkContext.defaultParallelism
        return ReplayPlan(
            request.job(),
            archives,
            parquet,
            request.since_ns,
            request.until_ns,
            partition_bytes(sum(parquet.values()), slots),
        )

    def _refuse_without_topic(self) -> None:
        """Bare bodies name no topic: refused before anything is published."""
        if self._request.topics.get(""):
            return
        delimiter = self._request.delimiter or b"\n"
        files = listed(self._inputs.archives)
        if any(file.content(delimiter).kind is LineKind.bodies for file in files):
            raise ConfigurationError(
                "the files hold bare bodies, which name no topic", hint="Give --topic."
            )

    def _selected(self, within: TimeRange) -> DataFrame:
        request, inputs = self._request, self._inputs
        if not inputs.places:
            raise NotFoundError("no file to replay")
        # a ledger needs the same partitions on any cluster
        partitions = 1 if self._publishing.ledger is not None else 0
        choice = Choice((), within, request.delimiter, self._damage_path, partitions)
        rows = read_messages(self._spark, inputs, choice)
        if request.where:
            rows = rows.where(request.where)
        return rows.withColumn("topic", target(request.topics)).select(*PUBLISHED)

    # -- how it is published --------------------------------------------------------------------

    def _options(self) -> dict[str, str]:
        publishing = self._publishing
        options = dict(publishing.options) | {"outcomePath": str(self._outcome_path)}
        if publishing.rate:
            parallel = self._spark.sparkContext.defaultParallelism
            slots = max(1, min(parallel, self._rows.rdd.getNumPartitions()))
            options |= {"rate": str(publishing.rate), "slots": str(slots)}
        if publishing.ledger is not None:
            assert self._plan is not None
            job = hashlib.sha256(self._plan.encode()).hexdigest()
            options |= {"ledgerPath": str(publishing.ledger), "ledgerJob": job}
        if publishing.dead_letters is not None:
            options["deadLetterPath"] = str(publishing.dead_letters)
        return options

    def _found(self) -> tuple[PublishReport, bool]:
        """The sum of the tasks' reports, and whether all tasks reported."""
        try:
            document = json.loads(self._outcome_path.read_bytes())
        except OSError:  # the job ended before the first of them
            return PublishReport(), False
        is_complete = document.pop("is_complete")
        del document["confirmed"]
        return PublishReport(**document), is_complete


def entries_of(ledger: Location) -> list[LedgerEntry]:
    """What the ledger knows of all partitions."""
    return read_stored_entries(ledger) if isinstance(ledger, StoredPlace) else read_entries(ledger)


def with_ledger(outcome: ReplayOutcome, entries: Sequence[LedgerEntry]) -> ReplayOutcome:
    """The outcome by the ledger, of a replay of which not all tasks reported."""
    report = total(
        PublishReport(e.topics, e.rejected, e.unknown, e.dead_lettered, repeated=e.repeated)
        for e in entries
    )
    in_doubt = sum(entry.sent - entry.done for entry in entries)
    return replace(outcome, report=report, in_doubt=in_doubt)


def target(topics: Mapping[str, str]) -> Column:
    """The topic that a message goes to."""
    from pyspark.sql import functions as F

    column = F.lit(topics[""]) if topics.get("") else F.col("topic")
    for old, new in topics.items():
        if old:
            column = F.when(F.col("topic") == old, F.lit(new)).otherwise(column)
    return column
