"""The settings of an archiver: where, how, and when to flush. Values only."""

from __future__ import annotations

import enum
from dataclasses import dataclass, field
from datetime import UTC, datetime, tzinfo

from nsqtools.archive.codecs import CompressorFactory, Plain
from nsqtools.archive.finishing import Directories
from nsqtools.client.connection_settings import ConnectionSettings
from nsqtools.client.options import ClientOptions
from nsqtools.records.naming import FileNaming, Rotation

LATEST_S = 253_000_000_000.0  # in the year 9987

THROUGHPUT = {
    "max_in_flight": 2500,  # as much as an nsqd allows: it bounds what a flush can hold
    "output_buffer_timeout_s": 0.025,
    "max_backoff_duration_s": 30.0,
    "reconnect_base_s": 2.0,
}
"""Client options of an archiver, where the user gives none."""


class RecordFormat(enum.Enum):
    """What a message becomes: the envelope of all tools, or its body and a delimiter."""

    jsonl = "jsonl"
    raw = "raw"


class PartitionBy(enum.Enum):
    """Whose time ``<PARTITION>`` is."""

    arrival = "arrival"
    message = "message"


@dataclass(frozen=True, slots=True)
class Flush:
    """When messages are made durable and FINished: whichever comes first. ``bytes`` are text."""

    interval_s: float = 1.0
    bytes: int = 8 << 20
    count: int = 10_000


@dataclass(frozen=True, slots=True)
class ArchiveSettings:
    """All of it. ``timezone`` None is local time."""

    directories: Directories
    naming: FileNaming = field(default_factory=FileNaming)
    rotation: Rotation = field(default_factory=Rotation)
    flush: Flush = field(default_factory=Flush)
    format: RecordFormat = RecordFormat.jsonl
    delimiter: bytes = b"\n"
    compressor: CompressorFactory = Plain
    partition_by: PartitionBy = PartitionBy.arrival
    timezone: tzinfo | None = UTC
    skip_empty_files: bool = True

    def moment(self, at_s: float) -> datetime:
        """Return a time since 1970 as the clock of the file names shows it.

        A message may claim any time; those that no calendar has become the nearest that it has.
        """
        at_s = min(max(at_s, 0.0), LATEST_S)
        return datetime.fromtimestamp(at_s, UTC).astimezone(self.timezone)


@dataclass(frozen=True, slots=True)
class ArchiveSource:
    """Where messages come from."""

    channel: str
    connection: ConnectionSettings
    options: ClientOptions
