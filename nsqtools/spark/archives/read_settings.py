"""The options of ``nsq-archive`` and its columns, as values that are cheap to create and pickle.

The columns are those of `archive.columns`, and the origin of a message: ``file`` is the path, and
``pos`` the byte position of its member.
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

from nsqtools.archive.body_columns import BodyColumns
from nsqtools.archive.body_schema import fields_of, load_schema
from nsqtools.archive.columns import message_schema
from nsqtools.archive.layout import ALL_TIMES, TimeRange
from nsqtools.archive.place import Place
from nsqtools.archive.place_url import parse_place
from nsqtools.errors import ConfigurationError
from nsqtools.protocol.names import check_topic
from nsqtools.records.envelope import BodyKind
from nsqtools.spark.format_options import Options, read_place

DEFAULT_PARTITION_BYTES = 16 << 20
DEFAULT_POLL_S = 0.1
STORED_POLL_S = 5.0  # Object stores charge for every listing.

DEFAULT_MAX_DELAY_S = 900.0

EARLIEST, LATEST = "earliest", "latest"


class Bodies(NamedTuple):
    """The columns of bodies; ``fields`` is the JSON Schema of JSON bodies."""

    kind: BodyKind = BodyKind.binary
    fields: Mapping[str, Any] | None = None

    def options(self) -> dict[str, str]:
        """Return the options of a format for these columns."""
        schema = {} if self.fields is None else {"schema": json.dumps(self.fields)}
        return {"body": self.kind.value, **schema}

    def columns(self) -> BodyColumns | None:
        """Return a new converter for the columns of JSON bodies, None for other bodies."""
        if self.kind is not BodyKind.json:
            return None
        return BodyColumns(fields_of(self.fields), evolves=False)

    def message_schema(self) -> pyarrow.Schema:
        """Return the columns of a message, including those of its body."""
        columns = self.columns()
        return columns.schema() if columns else message_schema(self.kind)

    def archived_schema(self) -> pyarrow.Schema:
        """Return the columns of a message and its origin."""
        schema = self.message_schema().append(pyarrow.field("file", pyarrow.string()))
        return schema.append(pyarrow.field("pos", pyarrow.int64()))


BYTES = Bodies()


@dataclass(frozen=True, slots=True)
class ReadSettings:
    """The places and the selection of messages, and how they are read."""

    paths: tuple[str, ...]
    work_dir: Path | None = None
    topics: frozenset[str] = frozenset()
    """Empty for all topics."""
    queried_topics: frozenset[str] | None = None
    """The topics that the filter of the query selects: files of others are skipped."""
    queried_nsqds: frozenset[str] | None = None
    """The nsqd that the filter of the query selects: rows of others are not sent to Spark."""
    within: TimeRange = ALL_TIMES
    raw: bool = False
    """Whether files of bare bodies are read."""
    delimiter: bytes = b"\n"
    topic: str | None = None
    """The topic of bare bodies."""
    damage_path: Place | None = None
    """Where damage is reported; without it, damage fails the query."""
    partition_bytes: int = DEFAULT_PARTITION_BYTES
    min_partitions: int = 0
    """0: as many as parallel tasks, if there are enough messages."""
    bodies: Bodies = BYTES

    @property
    def description(self) -> str:
        """The source of the messages, as a text for people."""
        topics = f", topics {', '.join(sorted(self.topics))}" if self.topics else ""
        return f"archive {', '.join(self.paths)}{topics}"

    @property
    def names(self) -> dict[str, frozenset[str]]:
        """The selected values by column; columns without an entry may have any value."""
        names = {"topic": self.topics} if self.topics else {}
        return names if self.queried_nsqds is None else names | {"nsqd": self.queried_nsqds}

    @property
    def wanted_topics(self) -> frozenset[str] | None:
        """The selected topics, None for all."""
        return _intersect(self.queried_topics, self.topics) if self.topics else self.queried_topics

    def narrowed(self, column: str, comparison: str, value: object) -> ReadSettings:
        """Return the settings for a query that keeps only rows with ``column comparison value``.

        ``comparison`` is ``=``, ``in``, ``<``, ``<=``, ``>`` or ``>=``. Other comparisons and
        columns change nothing, because the query filters the rows again.
        """
        if column in ("topic", "nsqd") and comparison in ("=", "in"):
            values = {value} if comparison == "=" else set(cast(Iterable[object], value))
            names = frozenset(name for name in values if isinstance(name, str))
            if column == "topic":
                return replace(self, queried_topics=_intersect(self.queried_topics, names))
            return replace(self, queried_nsqds=_intersect(self.queried_nsqds, names))
        low_ns, high_ns = _bounds(column, value)
        since_ns, until_ns = self.within.since_ns, self.within.until_ns
        first_ns = {"=": low_ns, ">=": low_ns, ">": high_ns}.get(comparison)
        after_ns = {"=": high_ns, "<=": high_ns, "<": low_ns}.get(comparison)
        since_ns = max((ns for ns in (since_ns, first_ns) if ns is not None), default=None)
        until_ns = min((ns for ns in (until_ns, after_ns) if ns is not None), default=None)
        return replace(self, within=TimeRange(since_ns, until_ns))

    def stored(self) -> list[Place]:
        """Return the places in object stores."""
        return [place for place in map(parse_place, self.paths) if place.is_remote]

    def roots(self) -> list[Path]:
        """Return the local files and directories that the paths match now.

        A path that exists is no pattern, even if it has brackets.
        """
        roots: list[Path] = []
        for path in self.paths:
            if parse_place(path).is_remote:
                continue
            is_pattern = glob.has_magic(path) and not os.path.lexists(path)
            matches = sorted(glob.glob(path)) if is_pattern else []
            roots += map(Path, matches or [path])
        return roots


def _intersect(selection: frozenset[str] | None, names: frozenset[str]) -> frozenset[str]:
    return names if selection is None else selection & names


def _bounds(column: str, value: object) -> tuple[int | None, int | None]:
    """Return the first nanosecond that equals the value of a column, and the first after it."""
    if column == "ts_ns" and isinstance(value, int):
        return value, value + 1
    if column == "timestamp" and isinstance(value, datetime) and value.tzinfo is not None:
        micros = (value - datetime(1970, 1, 1, tzinfo=UTC)) // timedelta(microseconds=1)
        return micros * 1000, (micros + 1) * 1000
    return None, None


def moment(timestamp_ns: int | None, *, up: int = 0) -> str | None:
    """Format a time in RFC 3339, with a fraction of up to microseconds if it has one.

    The time is rounded down after ``up`` nanoseconds are added: with 999, the end of a range
    includes the whole range.
    """
    if timestamp_ns is None:
        return None
    at = datetime(1970, 1, 1) + timedelta(microseconds=(timestamp_ns + up) // 1000)
    return f"{at.isoformat()}Z"


class BatchLimits(NamedTuple):
    """The limits of a batch, None for no limit."""

    rows: int | None = None
    bytes: int | None = None
    files: int | None = None


class StreamSettings(NamedTuple):
    """The start of a stream, the limits of its batches, and whether lost data fails it."""

    starting_offsets: str = EARLIEST
    """`EARLIEST`, `LATEST`, or the JSON of an offset."""
    starting_timestamp_ns: int | None = None
    fail_on_data_loss: bool = True
    limits: BatchLimits = BatchLimits()
    poll_s: float = DEFAULT_POLL_S
    min_rows: int = 0
    """A batch waits for this many rows, at most for ``max_delay_s``."""
    max_delay_s: float = DEFAULT_MAX_DELAY_S


def archive_settings(options: Options) -> ReadSettings:
    """Read the options that batches and streams share. Raises `ConfigurationError`."""
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
    """Read the options of partitions and bodies. Raises `ConfigurationError`."""
    return replace(
        settings,
        bodies=body_settings(options),
        partition_bytes=options.size("partitionBytes") or settings.partition_bytes,
        min_partitions=options.integer("minPartitions") or settings.min_partitions,
    )


def body_settings(options: Options) -> Bodies:
    """Read the options ``body`` and ``schema`` (a file, or the JSON Schema itself).

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
    """Read the options of streams. Raises `ConfigurationError`."""
    starting = options.text("startingOffsets")
    timestamp_ns = options.time_ns("startingTimestamp")
    if starting and timestamp_ns is not None:
        raise ConfigurationError("startingOffsets and startingTimestamp exclude each other")
    is_stored = any(parse_place(path).is_remote for path in _paths(options))
    settings = batch_settings(options, STORED_POLL_S if is_stored else DEFAULT_POLL_S)
    starting = (starting or EARLIEST).strip()
    return settings._replace(starting_offsets=starting, starting_timestamp_ns=timestamp_ns)


def batch_settings(options: Options, poll_s: float) -> StreamSettings:
    """Read the options of batches, for streams of archives and topics.

    Raises `ConfigurationError`.
    """
    rows, delay_s = options.integer("minRowsPerTrigger"), options.duration_s("maxTriggerDelay")
    if delay_s is not None and rows is None:
        raise ConfigurationError("maxTriggerDelay needs minRowsPerTrigger")
    interval_s = options.duration_s("pollInterval")
    max_rows, max_files = map(options.integer, ("maxRowsPerTrigger", "maxFilesPerTrigger"))
    return StreamSettings(
        fail_on_data_loss=options.flag("failOnDataLoss", default=True),
        limits=BatchLimits(max_rows, options.size("maxBytesPerTrigger"), max_files),
        poll_s=poll_s if interval_s is None else interval_s,
        min_rows=rows or 0,
        max_delay_s=delay_s or DEFAULT_MAX_DELAY_S,
    )


def _paths(options: Options) -> list[str]:
    """Return the paths of ``load(path)``, ``load([path, ...])`` and the option ``paths``."""
    path, paths = options.text("path"), options.list("paths")
    # Spark passes a list of paths as JSON. Other text with a bracket is a pattern.
    with suppress(ValueError):
        document = json.loads(options.text("paths") or "")
        if isinstance(document, list) and all(isinstance(item, str) for item in document):
            paths = document
    return [*([path] if path else []), *paths]
