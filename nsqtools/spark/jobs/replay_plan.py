"""What a replay with a ledger keeps of its first run, so that later runs do the same work.

The files to read, the times that ``-2h`` meant, and the partition size are stored: files that are
added later do not belong to the replay, and its partitions are the same on any cluster. A file that
has changed is refused.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import TYPE_CHECKING, Any
from urllib.parse import unquote, urlsplit

from nsqtools.archive.storage_objects import open_storage
from nsqtools.errors import ConfigurationError, OutputError
from nsqtools.protocol.names import check_topic
from nsqtools.records.units import Moment
from nsqtools.spark.archives.archive_files import ListedFile
from nsqtools.spark.archives.read_settings import ReadSettings
from nsqtools.spark.archives.stored_archives import listing_of
from nsqtools.spark.jobs.inputs import Inputs, parquet_objects
from nsqtools.spark.location import Location, StoredPlace, absolute, parse_place, spark_url

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

VERSION = 1
PLAN = "replay.json"

MIN_PARTITION_BYTES, MAX_PARTITION_BYTES = 8 << 20, 64 << 20
PARTITIONS_PER_SLOT = 4


@dataclass(frozen=True, slots=True)
class ReplayRequest:
    """What is to be replayed. ``topics`` as `nsqtools.replay.replay.Selection` has them;
    ``where`` is SQL over the columns of a message."""

    paths: tuple[Location, ...]
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
            "paths": [str(absolute(path)) for path in self.paths],
            "topics": dict(sorted(self.topics.items())),
            "since": self.since.text if self.since else "",
            "until": self.until.text if self.until else "",
            "where": self.where,
            "delimiter": (self.delimiter or b"").hex(),
        }


@dataclass(frozen=True, slots=True)
class ReplayPlan:
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
        return Inputs(tuple(map(parse_place, self.archives)), tuple(map(parse_place, self.parquet)))


def listed(paths: Sequence[Location]) -> list[ListedFile]:
    """The archive files at some paths, as the format ``nsq-archive`` finds and orders them."""
    if not paths:
        return []
    listing = listing_of(ReadSettings(tuple(map(str, paths))))
    return list(listing.files(lambda damage: None).values())


def parquet_files(spark: SparkSession, paths: Sequence[Location]) -> dict[str, int]:
    """The files that Spark reads at some paths, with their sizes. Raises `OutputError`."""
    found: list[str] = []
    for path in paths:
        if isinstance(path, StoredPlace):
            found += sorted(map(str, parquet_objects(path, as_files=True)))
        else:
            urls = sorted(spark.read.parquet(spark_url(path)).inputFiles())
            found += [unquote(urlsplit(url).path) for url in urls]
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


def load_plan(ledger: Location, job: Mapping[str, Any]) -> ReplayPlan | None:
    """The plan of the first run; None when this is it. Raises `ConfigurationError`."""
    path = ledger / PLAN
    try:
        content = open_storage(str(ledger)).read(PLAN)
    except FileNotFoundError:
        return None
    except OSError as exc:
        raise OutputError(f"cannot read {path} ({exc.strerror})") from exc
    try:
        plan = ReplayPlan(**json.loads(content))
        if plan.version != VERSION:
            raise ValueError
        differing = [name for name in plan.job if plan.job[name] != job[name]]
    except (ValueError, TypeError, KeyError):
        raise ConfigurationError(
            f"{path} is not a replay's plan", hint="Give another directory."
        ) from None
    if differing:
        raise ConfigurationError(
            f"{ledger} is the ledger of another replay: {', '.join(differing)} differ",
            hint="Give the same arguments again, or another directory.",
        )
    return plan


def save_plan(ledger: Location, plan: ReplayPlan) -> None:
    """Write it down for the next run. Raises `OutputError`."""
    try:
        open_storage(str(ledger)).put(PLAN, plan.encode())
    except OSError as exc:
        raise OutputError(f"cannot write the ledger {ledger} ({exc.strerror})") from exc


def check_sizes(plan: ReplayPlan) -> None:
    """Raise `ConfigurationError` when a file is not what it was, `OutputError` when it is gone."""
    for path, size in (plan.archives | plan.parquet).items():
        if size_of(path) != size:
            raise ConfigurationError(
                f"{path} has changed since the ledger was begun",
                hint="Give another ledger; everything is published again then.",
            )


def size_of(path: str) -> int:
    """The size of a file. Raises `OutputError`."""
    place = parse_place(path)
    try:
        return place.entry().size if isinstance(place, StoredPlace) else place.stat().st_size
    except OSError as exc:
        raise OutputError(f"cannot read {path} ({exc.strerror})") from exc
