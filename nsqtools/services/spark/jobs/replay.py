"""``nsq spark replay``: messages from archives and Parquet back into topics, in parallel.

Each task publishes a partition of the input, in its order; partitions are published side by side,
so a topic's messages come in no order. With a ledger a replay that was cut short is run again and
goes on where it stopped. For that its partitions must be the same again, on any cluster: which
files are read, the moments that ``-2h`` meant and the size of partitions are written down by the
first run (`Plan`), and hold for those after it. Files in progress still grow, so with a ledger they
are left out.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any
from urllib.parse import unquote, urlsplit

from nsqtools.errors import ConfigurationError, NotFoundError, NsqError, OutputError
from nsqtools.protocol.names import check_topic
from nsqtools.records.units import Moment
from nsqtools.services.archive.durable import replace_file
from nsqtools.services.archive.reader import TimeRange
from nsqtools.services.spark.archives.content import Kind
from nsqtools.services.spark.archives.damage import Damage, read_damage
from nsqtools.services.spark.archives.listing import ListedFile, Listing
from nsqtools.services.spark.failures import spark_errors
from nsqtools.services.spark.jobs.inputs import Choice, Inputs, find_inputs, read_messages
from nsqtools.services.spark.ledger import read_entries
from nsqtools.services.spark.sinks.report import Report, total

if TYPE_CHECKING:
    from pyspark.sql import Column, DataFrame, SparkSession

    from nsqtools.services.spark.settings import SparkSettings

VERSION = 1
PLAN = "replay.json"

PUBLISHED = ("topic", "nsqd", "id", "ts_ns", "attempts", "body")

MIN_PARTITION_BYTES, MAX_PARTITION_BYTES = 8 << 20, 64 << 20
PARTITIONS_PER_SLOT = 4


@dataclass(frozen=True, slots=True)
class Request:
    """What is to be replayed. ``topics`` as `nsqtools.services.replay.replay.Selection` has them;
    ``where`` is SQL over the columns of a message."""

    paths: tuple[Path, ...]
    topics: Mapping[str, str] = field(default_factory=dict)
    since: Moment | None = None
    until: Moment | None = None
    where: str = ""
    delimiter: bytes | None = None

    def __post_init__(self) -> None:
        for topic in self.topics.values():
            check_topic(topic)

    @property
    def since_ns(self) -> int | None:
        return self.since.ns if self.since else None

    @property
    def until_ns(self) -> int | None:
        return self.until.ns if self.until else None

    def job(self) -> dict[str, Any]:
        """What makes two replays the same."""
        return {
            "paths": [str(path.absolute()) for path in self.paths],
            "topics": dict(sorted(self.topics.items())),
            "since": self.since.text if self.since else "",
            "until": self.until.text if self.until else "",
            "where": self.where,
            "delimiter": (self.delimiter or b"").hex(),
        }


@dataclass(frozen=True, slots=True)
class Plan:
    """What the first run with a ledger found: files with their sizes, and how they are cut."""

    job: dict[str, Any]
    archives: dict[str, int]
    parquet: dict[str, int]
    since_ns: int | None
    until_ns: int | None
    partition_bytes: int
    version: int = VERSION

    def encode(self) -> bytes:
        """The text of the file."""
        return json.dumps(asdict(self), indent=1).encode() + b"\n"

    @property
    def inputs(self) -> Inputs:
        """The files to read."""
        return Inputs(tuple(map(Path, self.archives)), tuple(map(Path, self.parquet)))


@dataclass(frozen=True, slots=True)
class Publishing:
    """How it is published. ``options`` are those of the connection and of retrying, for the sink;
    ``rate`` is messages a second in total, 0 without limit."""

    options: Mapping[str, str]
    rate: float = 0.0
    ledger: Path | None = None
    dead_letters: Path | None = None


@dataclass(frozen=True, slots=True)
class Outcome:
    """How a replay ended. ``is_complete`` is whether all tasks came to their end, ``error`` is why
    not, or that messages are left over; ``in_doubt`` messages may come twice when it is run again
    with its ledger."""

    report: Report
    is_complete: bool
    error: NsqError | None = None
    damages: Sequence[Damage] = ()
    in_doubt: int = 0


class Replay:
    """One run: made, then opened with a session, then `count` or `run`.

    ``work`` is a directory for this run alone, and ``shares_work`` whether executors see it, too.
    Raises `NsqError` for what cannot be read or asked for, before there is a session if it can.
    """

    def __init__(
        self,
        settings: SparkSettings,
        request: Request,
        publishing: Publishing,
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

    def count(self) -> Outcome:
        """Say how many messages would go to which topic, as if they had. Raises `NsqError`."""
        with spark_errors(self._settings):
            rows = self._rows.groupBy("topic").count().collect()
        report = Report({row["topic"] or "-": row["count"] for row in rows})
        return Outcome(report, is_complete=True, damages=self._damages())

    def run(self) -> Outcome:
        """Publish everything. Raises `OutputError` for a ledger that cannot be written."""
        if self._publishing.ledger is not None and self._plan is not None:
            save_plan(self._publishing.ledger, self._plan)
        error = None
        try:
            with spark_errors(self._settings):
                if not self._is_cancelled:
                    self._rows.write.format("nsq").mode("append").options(**self._options()).save()
        except NsqError as exc:
            error = exc
        report, is_complete = self._found()
        if self._is_cancelled:
            error = None
        in_doubt = 0
        if self._publishing.ledger is not None and not is_complete:
            entries = read_entries(self._publishing.ledger)
            report = total(
                Report(e.topics, e.rejected, e.unknown, e.dead_lettered, repeated=e.repeated)
                for e in entries
            )
            in_doubt = sum(entry.sent - entry.done for entry in entries)
        return Outcome(report, is_complete, error, self._damages(), in_doubt)

    def _damages(self) -> list[Damage]:
        return read_damage(self._damage_path) if self._damage_path else []

    # -- what is read ---------------------------------------------------------------------------

    def _new_plan(self, spark: SparkSession) -> Plan:
        request = self._request
        archives = {}
        for file in listed(self._inputs.archives):
            if file.is_finished:
                archives[str(file.path)] = size_of(str(file.path))
            else:
                self.left_out.append(str(file.path))
        parquet = parquet_files(spark, self._inputs.parquet)
        slots = spark.sparkContext.defaultParallelism
        return Plan(
            request.job(),
            archives,
            parquet,
            request.since_ns,
            request.until_ns,
            partition_bytes(sum(parquet.values()), slots),
        )

    def _refuse_without_topic(self) -> None:
        """Bare bodies name no topic: said before the first of them is to be published."""
        if self._request.topics.get(""):
            return
        delimiter = self._request.delimiter or b"\n"
        files = listed(self._inputs.archives)
        if any(file.content(delimiter).kind is Kind.bodies for file in files):
            raise ConfigurationError(
                "the files have bare bodies, which name no topic", hint="Give --topic."
            )

    def _selected(self, within: TimeRange) -> DataFrame:
        request, inputs = self._request, self._inputs
        if not (inputs.archives or inputs.parquet):
            raise NotFoundError("there is no file to replay")
        choice = Choice((), within, request.delimiter, self._damage_path)
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

    def _found(self) -> tuple[Report, bool]:
        """What the tasks told, and whether all of them did."""
        try:
            document = json.loads(self._outcome_path.read_bytes())
        except OSError:  # the job ended before the first of them
            return Report(), False
        is_complete = document.pop("is_complete")
        del document["confirmed"]
        return Report(**document), is_complete


def target(topics: Mapping[str, str]) -> Column:
    """The topic that a message goes to."""
    from pyspark.sql import functions as F

    column = F.lit(topics[""]) if topics.get("") else F.col("topic")
    for old, new in topics.items():
        if old:
            column = F.when(F.col("topic") == old, F.lit(new)).otherwise(column)
    return column


def listed(paths: Sequence[Path]) -> list[ListedFile]:
    """The archive files at some paths, as the format ``nsq-archive`` finds and orders them."""
    if not paths:
        return []
    listing = Listing(lambda: list(paths), None)
    return list(listing.files(lambda damage: None).values())


def parquet_files(spark: SparkSession, paths: Sequence[Path]) -> dict[str, int]:
    """The files that Spark reads at some paths, with their sizes. Raises `OutputError`."""
    urls = [url for path in paths for url in sorted(spark.read.parquet(str(path)).inputFiles())]
    found = [unquote(urlsplit(url).path) for url in urls]
    return {path: size_of(path) for path in found}


def partition_bytes(size: int, slots: int) -> int:
    """How much Parquet a task reads: enough tasks for the slots, and none of them tiny."""
    wanted = size // (PARTITIONS_PER_SLOT * max(1, slots))
    return max(MIN_PARTITION_BYTES, min(MAX_PARTITION_BYTES, wanted))


def fix_partitions(spark: SparkSession, bytes: int) -> None:
    """Have Spark cut Parquet the same whatever it runs on."""
    for name, value in (
        ("spark.sql.files.maxPartitionBytes", bytes),
        ("spark.sql.files.minPartitionNum", 1),
        ("spark.sql.files.openCostInBytes", 1 << 20),
    ):
        spark.conf.set(name, str(value))


def load_plan(ledger: Path, job: Mapping[str, Any]) -> Plan | None:
    """The plan of the first run; None when this is it. Raises `ConfigurationError`."""
    path = ledger / PLAN
    try:
        content = path.read_bytes()
    except FileNotFoundError:
        return None
    except OSError as exc:
        raise OutputError(f"cannot read {path} ({exc.strerror})") from exc
    try:
        plan = Plan(**json.loads(content))
        if plan.version != VERSION:
            raise ValueError
        differing = [name for name in plan.job if plan.job[name] != job[name]]
    except (ValueError, TypeError, KeyError):
        raise ConfigurationError(
            f"{path} is not the plan of a replay", hint="Give another directory."
        ) from None
    if differing:
        raise ConfigurationError(
            f"{ledger} is the ledger of another replay: {', '.join(differing)} differ",
            hint="Give the same arguments again, or another directory.",
        )
    return plan


def save_plan(ledger: Path, plan: Plan) -> None:
    """Write it down for the next run. Raises `OutputError`."""
    try:
        ledger.mkdir(parents=True, exist_ok=True)
        replace_file(ledger / PLAN, plan.encode())
    except OSError as exc:
        raise OutputError(f"cannot write the ledger {ledger} ({exc.strerror})") from exc


def check_sizes(plan: Plan) -> None:
    """Raise `ConfigurationError` when a file is not what it was, `OutputError` when it is gone."""
    for path, size in (plan.archives | plan.parquet).items():
        if size_of(path) != size:
            raise ConfigurationError(
                f"{path} has changed since the ledger was begun",
                hint="Give another ledger; everything is published again then.",
            )


def size_of(path: str) -> int:
    """The size of a file. Raises `OutputError`."""
    try:
        return Path(path).stat().st_size
    except OSError as exc:
        raise OutputError(f"cannot read {path} ({exc.strerror})") from exc
