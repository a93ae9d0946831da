"""The options of ``nsq-archive``, and the columns it has. Values only: cheap to make and to pickle.

The columns are those of `archive.columns`, and the place of a message: ``file`` and ``pos`` are the
file's path, and the byte position of the member that holds it.
"""

from __future__ import annotations

import glob
import json
import os
from collections.abc import Iterable, Mapping
from contextlib import suppress
from dataclasses import dataclass, replace
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any, NamedTuple, cast

import pyarrow

from nsqtools.archive.body_columns import BodyColumns, fields_of, load_schema
from nsqtools.archive.columns import message_schema
from nsqtools.archive.layout import EVER, TimeRange
from nsqtools.archive.place import Place
from nsqtools.errors import ConfigurationError
from nsqtools.protocol.names import check_topic
from nsqtools.records.envelope import BodyKind
from nsqtools.spark.format_options import Options, read_place

DEFAULT_PARTITION_BYTES = 16 << 20
DEFAULT_POLL_S = 0.1
STORED_POLL_S = 5.0  # every look at an object store is paid for

DEFAULT_MAX_DELAY_S = 900.0

EARLIEST, LATEST = "earliest", "latest"


class Bodies(NamedTuple):
    """What becomes of bodies; ``fields`` is the JSON Schema of those that are JSON."""

    kind: BodyKind = BodyKind.binary
    fields: Mapping[str, Any] | None = None

    def options(self) -> dict[str, str]:
        """Return them as options of a format."""
        schema = {} if self.fields is None else {"schema": json.dumps(self.fields)}
        return {"body": self.kind.value, **schema}

    def columns(self) -> BodyColumns | None:
        """Return what makes their columns, with a count of its own, if they have any."""
        if self.kind is not BodyKind.json:
            return None
        return BodyColumns(fields_of(self.fields), evolves=False)

    def message_schema(self) -> pyarrow.Schema:
        """Return the columns of a message, those made of its body included."""
        columns = self.columns()
        return columns.schema() if columns else message_schema(self.kind)

    def archived_schema(self) -> pyarrow.Schema:
        """Return them with the place of the message."""
        schema = self.message_schema().append(pyarrow.field("file", pyarrow.string()))
        return schema.append(pyarrow.field("pos", pyarrow.int64()))


BYTES = Bodies()


@dataclass(frozen=True, slots=True)
class ReadSettings:
    """What is read, and how."""

    paths: tuple[str, ...]
    work_dir: Path | None = None
    topics: frozenset[str] = frozenset()
    """Without any, all."""
    queried_topics: frozenset[str] | None = None
    """The only topics that the query's own filter lets through; it drops rows, this whole files."""
    queried_nsqds: frozenset[str] | None = None
    """The only nsqds that it lets through: their rows need not go to Spark."""
    within: TimeRange = EVER
    raw: bool = False
    """Also files of bare bodies."""
    delimiter: bytes = b"\n"
    topic: str | None = None
    """The topic of files of bare bodies."""
    damage_path: Place | None = None
    """Where damage is reported; without it, it fails the query."""
    partition_bytes: int = DEFAULT_PARTITION_BYTES
    min_partitions: int = 0
    """0: as many as run at a time, when there is enough for them."""
    bodies: Bodies = BYTES

    @property
    def description(self) -> str:
        """What is read, for people."""
        topics = f", topics {', '.join(sorted(self.topics))}" if self.topics else ""
        return f"archive {', '.join(self.paths)}{topics}"

    @property
    def names(self) -> dict[str, frozenset[str]]:
        """The values that rows may have, by column; other columns may have any."""
        names = {"topic": self.topics} if self.topics else {}
        return names if self.queried_nsqds is None else names | {"nsqd": self.queried_nsqds}

    @property
    def wanted_topics(self) -> frozenset[str] | None:
        """The topics that are read; None for all."""
        return _both(self.queried_topics, self.topics) if self.topics else self.queried_topics

    def narrowed(self, column: str, comparison: str, value: object) -> ReadSettings:
        """Return what is left to read for a query that keeps only rows of ``column <op> value``.

        ``comparison`` is ``=``, ``in``, ``<``, ``<=``, ``>`` or ``>=``. Others change nothing, nor
        do other columns: the query filters rows again.
        """
        if column in ("topic", "nsqd") and comparison in ("=", "in"):
            asked = {value} if comparison == "=" else set(cast(Iterable[object], value))
            names = frozenset(name for name in asked if isinstance(name, str))
            if column == "topic":
                return replace(self, queried_topics=_both(self.queried_topics, names))
            return replace(self, queried_nsqds=_both(self.queried_nsqds, names))
        low_ns, high_ns = _bounds(column, value)
        since_ns, until_ns = self.within.since_ns, self.within.until_ns
        first_ns = {"=": low_ns, ">=": low_ns, ">": high_ns}.get(comparison)
        after_ns = {"=": high_ns, "<=": high_ns, "<": low_ns}.get(comparison)
        since_ns = max((ns for ns in (since_ns, first_ns) if ns is not None), default=None)
        until_ns = min((ns for ns in (until_ns, after_ns) if ns is not None), default=None)
        return replace(self, within=TimeRange(since_ns, until_ns))

    def stored(self) -> list[Place]:
        """Return the places in object stores."""
        return [place for place in map(Place.parse, self.paths) if place.is_remote]

    def roots(self) -> list[Path]:
        """Return the files and directories that the paths name now: patterns change.

        What is there under a name with brackets is that, and no pattern.
        """
        roots: list[Path] = []
        for path in self.paths:
            if Place.parse(path).is_remote:
                continue
            is_pattern = glob.has_magic(path) and not os.path.lexists(path)
            found = sorted(glob.glob(path)) if is_pattern else []
            roots += map(Path, found or [path])
        return roots


def _both(before: frozenset[str] | None, names: frozenset[str]) -> frozenset[str]:
    return names if before is None else before & names


def _bounds(column: str, value: object) -> tuple[int | None, int | None]:
    """Return the first nanosecond that equals a value of a column, and the first after it."""
    if column == "ts_ns" and isinstance(value, int):
        return value, value + 1
    if column == "timestamp" and isinstance(value, datetime) and value.tzinfo is not None:
        micros = (value - datetime(1970, 1, 1, tzinfo=UTC)) // timedelta(microseconds=1)
        return micros * 1000, (micros + 1) * 1000
    return None, None


def moment(timestamp_ns: int | None, *, up: int = 0) -> str | None:
    """A time in RFC 3339, with as many digits of a second as it needs, down to microseconds.

    With ``up`` nanoseconds it is rounded up: the end of a range then leaves nothing of it out.
    """
    if timestamp_ns is None:
        return None
    at = datetime(1970, 1, 1) + timedelta(microseconds=(timestamp_ns + up) // 1000)
    return f"{at.isoformat()}Z"


class BatchLimits(NamedTuple):
    """How much a batch takes at most; None for no limit."""

    rows: int | None = None
    bytes: int | None = None
    files: int | None = None


class StreamSettings(NamedTuple):
    """Where a stream begins, how much a batch takes, and whether lost data fails it."""

    starting_offsets: str = EARLIEST
    """`EARLIEST`, `LATEST`, or the JSON of an offset."""
    starting_timestamp_ns: int | None = None
    fail_on_data_loss: bool = True
    limits: BatchLimits = BatchLimits()
    poll_s: float = DEFAULT_POLL_S
    min_rows: int = 0
    """A batch waits until this many are there, ``max_delay_s`` at most."""
    max_delay_s: float = DEFAULT_MAX_DELAY_S


def archive_settings(options: Options) -> ReadSettings:
    """Read what batches and streams have in common. Raises `ConfigurationError`."""
    paths = _paths(options)
    if not paths:
        raise ConfigurationError(
            "format 'nsq-archive' needs a path",
            hint='For example: spark.read.format("nsq-archive").load("/var/nsq")',
        )
    reports = options.choice("onDamage", ("fail", "report")) == "report"
    damage_path = options.place("damagePath")
    if reports != bool(damage_path):
        raise ConfigurationError(
            "onDamage=report needs damagePath, and damagePath needs onDamage=report",
            hint="damagePath is a directory shared with executors, or a place in an object store, "
            "for reports of damage.",
        )
    topic = options.text("topic")
    settings = ReadSettings(
        paths=tuple(str(read_place("path", path)) for path in paths),
        work_dir=options.location("workDir"),
        topics=frozenset(map(check_topic, options.list("topics"))),
        within=TimeRange(options.time_ns("since"), options.time_ns("until")),
        raw=options.choice("format", ("auto", "raw")) == "raw",
        delimiter=options.ending("delimiter") or b"\n",
        topic=check_topic(topic) if topic else None,
        damage_path=damage_path,
    )
    if settings.work_dir is not None and len(settings.stored()) == len(paths):
        raise ConfigurationError(
            "workDir is for archives in directories: no file in progress goes on in a bucket",
            hint="Read both together: the directory of nsq to-file, and the bucket.",
        )
    return shared_settings(options, settings)


def shared_settings(options: Options, settings: ReadSettings) -> ReadSettings:
    """Read how archives are split into partitions, and bodies. Raises `ConfigurationError`."""
    return replace(
        settings,
        bodies=body_settings(options),
        partition_bytes=options.size("partitionBytes") or settings.partition_bytes,
        min_partitions=options.integer("minPartitions") or settings.min_partitions,
    )


def body_settings(options: Options) -> Bodies:
    """Read ``body`` and ``schema``: a file, or the JSON Schema itself.

    Raises `ConfigurationError` and `OutputError`.
    """
    kind = BodyKind(options.choice("body", ("binary", "string", "json")))
    text = options.text("schema")
    if (kind is BodyKind.json) != (text is not None):
        raise ConfigurationError(
            "body=json needs the option schema, and schema is for body=json",
            hint="nsq archive schema ARCHIVE > FILE makes one of a sample.",
        )
    return Bodies(kind, None if text is None else load_schema(text))


def stream_settings(options: Options) -> StreamSettings:
    """Read what only streams have. Raises `ConfigurationError`."""
    starting = options.text("startingOffsets")
    timestamp_ns = options.time_ns("startingTimestamp")
    if starting and timestamp_ns is not None:
        raise ConfigurationError("startingOffsets and startingTimestamp exclude each other")
    is_stored = any(Place.parse(path).is_remote for path in _paths(options))
    settings = batch_settings(options, STORED_POLL_S if is_stored else DEFAULT_POLL_S)
    starting = (starting or EARLIEST).strip()
    return settings._replace(starting_offsets=starting, starting_timestamp_ns=timestamp_ns)


def batch_settings(options: Options, poll_s: float) -> StreamSettings:
    """Read what makes a batch of any stream. Raises `ConfigurationError`."""
    rows, delay_s = options.integer("minRowsPerTrigger"), options.duration_s("maxTriggerDelay")
    if delay_s is not None and rows is None:
        raise ConfigurationError("maxTriggerDelay needs minRowsPerTrigger")
    wanted_s = options.duration_s("pollInterval")
    most_rows, most_files = map(options.integer, ("maxRowsPerTrigger", "maxFilesPerTrigger"))
    return StreamSettings(
        fail_on_data_loss=options.flag("failOnDataLoss", default=True),
        limits=BatchLimits(most_rows, options.size("maxBytesPerTrigger"), most_files),
        poll_s=poll_s if wanted_s is None else wanted_s,
        min_rows=rows or 0,
        max_delay_s=delay_s or DEFAULT_MAX_DELAY_S,
    )


def _paths(options: Options) -> list[str]:
    """``load(path)``, ``load([path, ...])``, which Spark hands on as JSON, or ``paths``."""
    one, several = options.text("path"), options.list("paths")
    with suppress(ValueError):
        found = json.loads(options.text("paths") or "")
        if isinstance(found, list) and all(isinstance(each, str) for each in found):
            several = found  # else it is a pattern with a bracket
    return [*([one] if one else []), *several]
