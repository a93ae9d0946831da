"""The output of commands with ``--json``, as types: ``nsq schema`` shows them as JSON Schema.

An annotation is the description of a field, or a keyword of JSON Schema with its value. Numbers are
never negative. What is printed as it is has its type where it is made.
"""

from dataclasses import dataclass, field
from typing import Annotated, Any, Literal, NotRequired, TypedDict

from nsqtools.archive.topic_writer import ArchiveTotals
from nsqtools.bench.bench_plan import BenchReport
from nsqtools.cluster.inventory import NodeOfTopic, PingResult
from nsqtools.forward.parcel import ForwardTotals
from nsqtools.publish.publisher import PublishCounts
from nsqtools.settings import SettingRow
from nsqtools.spark.doctor import Finding
from nsqtools.spark.publishing.row_outcomes import PublishReport

Time = Annotated[str, ("pattern", "^[0-9]{4}-[0-9]{2}-[0-9]{2}T[0-9:.]+Z$")]
Date = Annotated[str, ("pattern", "^[0-9]{4}-[0-9]{2}-[0-9]{2}$")]

Node = Annotated[str, "HTTP address of the nsqd, host:port."]
TcpAddress = Annotated[str, "TCP address of the nsqd, host:port."]
Nodes = Annotated[int, "The nsqd that have it; 0 when it is only registered with nsqlookupd."]
Depth = Annotated[int, "Messages waiting in the queue."]
InMemory = Annotated[int, "Messages of the queue in memory."]
OnDisk = Annotated[int, "Messages of the queue on disk."]
InFlight = Annotated[int, "Messages delivered to consumers and not yet answered."]
Deferred = Annotated[int, "Messages waiting for the end of their delay."]
Requeued = Annotated[int, "Messages requeued so far."]
TimedOut = Annotated[int, "Messages that timed out so far."]
Messages = Annotated[int, "Messages received so far."]
Clients = Annotated[int, "Connected consumers."]
Paused = Annotated[bool, "Whether the queue is paused."]
Latency = Annotated[
    dict[str, float],
    "Time from publishing to finishing in ms, by quantile, where nsqd measures it.",
]
Failure = Annotated[str | None, "The error, or null."]

# topics and channels


class TopicRow(TypedDict):
    """A topic."""

    topic: str
    nodes: Nodes
    channels: int
    depth: Depth
    waiting: Annotated[int, "Messages waiting in the topic and in its channels."]
    messages: Messages
    paused: bool


class ChannelRow(TypedDict):
    """A channel."""

    topic: str
    channel: str
    nodes: Nodes
    depth: Depth
    in_flight: InFlight
    deferred: Deferred
    clients: Clients
    paused: Paused


class ConsumerDocument(TypedDict):
    client_id: str
    hostname: str
    remote_address: str
    user_agent: str
    version: str
    tls: bool
    snappy: bool
    deflate: bool
    sample_rate: int
    authed: bool
    auth_identity: str
    ready: Annotated[int, "Its RDY count."]
    in_flight: int
    messages: int
    finished: int
    requeued: int
    connect_time: Time | None


class _Counts(TypedDict):
    depth: Depth
    memory: InMemory
    disk: OnDisk
    messages: Messages
    paused: Paused
    e2e_latency_ms: Latency


class _ChannelCounts(_Counts):
    in_flight: InFlight
    deferred: Deferred
    requeued: Requeued
    timed_out: TimedOut
    clients: Clients


class ChannelOfTopic(_ChannelCounts):
    channel: str
    consumers: list[ConsumerDocument]


class TopicOnNode(_Counts):
    node: Node
    channels: list[ChannelOfTopic]
    announced_by: Annotated[list[str], "The nsqlookupd that send consumers of the topic to it."]


class TopicInfo(TypedDict):
    """A topic on every nsqd that has it."""

    topic: str
    nodes: list[TopicOnNode]
    lookupds: Annotated[list[str], "The nsqlookupd with which it is registered."]


class ChannelOnNode(_ChannelCounts):
    node: Node
    consumers: list[ConsumerDocument]


class ChannelInfo(TypedDict):
    """A channel on every nsqd that has it."""

    topic: str
    channel: str
    nodes: list[ChannelOnNode]


class ChangeDocument(TypedDict):
    """A step of a change, carried out or with --dry-run planned."""

    daemon: Literal["nsqd", "nsqlookupd"]
    address: Annotated[str, "Its HTTP address."]
    action: Literal["create", "delete", "empty", "pause", "unpause", "tombstone"]
    topic: str
    channel: str | None
    messages: Annotated[int, "Messages that are lost."]
    clients: Annotated[int, "Consumers that are connected, and may create it again."]
    consumers: list[str]
    done: NotRequired[Annotated[bool, "Not with --dry-run."]]
    error: NotRequired[Failure]


# the cluster


class NodeRow(TypedDict):
    """An nsqd."""

    node: Node
    nsqd: Annotated[str | None, "TCP address of the nsqd."]
    hostname: str
    version: str
    topics: Annotated[int | None, "Topics registered with nsqlookupd; null where none was asked."]
    tombstoned: Annotated[list[str], "Topics for which an nsqlookupd hides it."]
    lookupds: Annotated[list[str], "The nsqlookupd that announce it."]
    error: Annotated[str | None, "The error if it does not answer, or null."]
    aliases: Annotated[list[str], "Other HTTP addresses of the same nsqd, which are not listed."]
    broadcast_address: str | None
    tcp_port: int | None
    http_port: int | None
    start_time: Time | None
    max_heartbeat_interval: Annotated[int | None, "In ns."]
    max_output_buffer_size: Annotated[int | None, "In bytes."]
    max_output_buffer_timeout: Annotated[int | None, "In ns."]
    max_deflate_level: int | None


class LookupDocument(TypedDict):
    """The nsqd that have a topic."""

    topic: str
    channels: list[str]
    nodes: list[NodeOfTopic]


class NodeInfo(TypedDict):
    """The answer of an nsqd to /info, with node; start_time is a time."""

    node: Node
    version: str
    hostname: str
    broadcast_address: str
    tcp_port: int
    http_port: int
    start_time: Time | None


class NodeOption(TypedDict):
    """An option of a running nsqd."""

    node: Node
    option: str
    value: Any


class MoveDocument(TypedDict):
    topic: str
    channels: list[str]
    messages: int
    repeats: bool


class Drained(TypedDict):
    """The messages that were moved from one nsqd to another."""

    moves: list[MoveDocument]
    stays: list[str]
    moved: int
    left: Annotated[int | None, "null for an nsqd that does not answer."]


class Queue(_ChannelCounts):
    topic: str
    channel: Annotated[str | None, "null for the topic itself."]
    node: Annotated[str | None, "HTTP address of the nsqd; null for all nsqd together."]
    ingress: Annotated[float | None, "Messages received a second; null where unknown."]
    egress: Annotated[float | None, "Messages sent to consumers a second; null where unknown."]
    finish: Annotated[float | None, "Messages finished a second; null where unknown."]
    requeue: Annotated[float | None, "Messages requeued or timed out a second; null where unknown."]
    e2e_ms: Annotated[float | None, "The highest quantile of e2e_latency_ms."]


class NodeOfSample(TypedDict):
    node: Node
    version: str
    health: str
    start_time: Time | None
    memory: NotRequired[Annotated[dict[str, int], "With --show memory."]]


class FailedNode(TypedDict):
    node: str
    error: str


class ConsumerOfChannel(ConsumerDocument):
    topic: str
    channel: str
    node: Node


class Stat(TypedDict):
    """One sample of the queues; with --interval one object a line."""

    time: Time | None
    queues: list[Queue]
    nodes: list[NodeOfSample]
    failed: Annotated[list[FailedNode], "The daemons that did not answer."]
    consumers: NotRequired[Annotated[list[ConsumerOfChannel], "With --show clients."]]


# messages


class MessageDocument(TypedDict):
    """A message: one object a line. Archives hold it, and nsq pub --format jsonl reads it."""

    topic: str
    nsqd: Annotated[str, "TCP address of the nsqd that delivered it."]
    id: Annotated[str, ("pattern", "^[0-9a-f]{16}$"), "Unique together with topic and nsqd."]
    ts: Annotated[int, "When it was published, in ns since 1970."]
    attempts: Annotated[int, "How often nsqd has delivered it; 0 where that is not known."]
    body: NotRequired[Annotated[str, "The body, if it is UTF-8."]]
    body64: NotRequired[Annotated[str, "The body in base64, if it is not UTF-8."]]


@dataclass
class CountsOfNode(PublishCounts):
    nsqd: TcpAddress = ""


@dataclass
class PublishedDocument(PublishCounts):
    """The outcomes of the messages."""

    repeated: Annotated[int, "Published again although nsqd may have had them."] = 0
    destinations: Annotated[
        list[CountsOfNode], "The counts of each nsqd, where every message goes to several."
    ] = field(default_factory=list)


class PlannedDocument(TypedDict):
    """The messages that would be published (--dry-run)."""

    topics: Annotated[dict[str, int], "Messages by topic."]


# archives


class ArchiveRow(TypedDict):
    """An archive."""

    file: str
    messages: int
    topics: Annotated[str, "Names, with commas between them."]
    first: Time | None
    last: Time | None
    bytes: int
    format: str
    state: str


class RepairedFile(TypedDict):
    file: str
    messages: int


class Repaired(TypedDict):
    """The finished and repaired files."""

    finished: Annotated[list[str], "Files that a crash had left in progress."]
    repaired: list[RepairedFile]


class DamagedFile(TypedDict):
    file: str
    problems: list[str]


class StoredQueueRow(TypedDict):
    """A queue in a data directory."""

    topic: str
    channel: Annotated[str | None, "Null for what waits in the topic itself."]
    messages: Annotated[int, "Whole messages in files, deferred ones included."]
    deferred: Annotated[int | None, "Those of them that are deferred; null where files do not say."]
    bytes: Annotated[int, "Of these messages, as in the files."]
    oldest: Time | None
    newest: Time | None
    files: int
    state: Literal["good", "damaged", "orphaned", "set aside", "read"]
    memory: Annotated[int | None, "Messages that are not in files, by --nsqd-http-address."]


class RecoveredDocument(TypedDict):
    """The recovered messages and the unreadable files."""

    archive: Annotated[str | None, "Null when there was nothing to recover."]
    messages: int
    damaged: list[DamagedFile]


class Verified(TypedDict):
    """The damaged files."""

    files: int
    messages: int
    damaged: list[DamagedFile]


@dataclass
class ArchivedDocument(ArchiveTotals):
    """The archived messages."""

    on_file_failures: Annotated[int, "Times that the command of --on-file failed."] = 0
    uploaded: Annotated[int, "Files uploaded or landed."] = 0
    not_uploaded: Annotated[int, "Files left for the next run to upload."] = 0
    misfits: Annotated[int, "Bodies that did not fit their columns; of tables only."] = 0
    fields_without_column: Annotated[int, "Fields that could not get a column; of tables only."] = 0


class ConvertedDocument(TypedDict):
    """The archives that were converted to a table."""

    archives: Annotated[int, "Archives that were brought into the table now."]
    files: Annotated[int, "Files that they became."]
    messages: int
    misfits: Annotated[int, "Bodies that did not fit their columns."]
    fields_without_column: Annotated[int, "Fields that could not get a column."]


# Spark


class PlannedPartitionDocument(TypedDict):
    topic: str | None
    date: Date | None
    state: Annotated[
        Literal["new", "late", "open", "small"],
        "What there is to do: all of it, what is new, nothing yet, or to replace small files.",
    ]
    files: int
    messages: Annotated[int, "About how many; of a file that spans days by the time it spans."]


class CompactionPlan(TypedDict):
    """The plan of a compaction (--dry-run)."""

    partitions: list[PlannedPartitionDocument]


class MadePartition(TypedDict):
    topic: str | None
    date: Date | None
    state: Literal["new", "late", "small"]
    files: Annotated[int, "Files written; none when all messages were there."]
    read: int
    duplicates: int
    rows: int
    bytes: int


class Compacted(TypedDict):
    """The result of a compaction."""

    partitions: list[MadePartition]
    deleted: list[str]
    misfits: Annotated[int, "Bodies that did not fit their columns."]


class VacuumedTable(TypedDict):
    table: str
    dropped_files: Annotated[int, "Files of days that were dropped (--drop-older-than)."]
    dropped_messages: int
    files: Annotated[int, "Files that were no longer in the table and were deleted."]
    bytes: Annotated[int, "Size of the deleted files."]
    log_entries: Annotated[int, "Files of the log that were deleted."]


class Vacuumed(TypedDict):
    """The result of a vacuum, or its plan with --dry-run."""

    tables: list[VacuumedTable]


class ErasedFile(TypedDict):
    file: str
    messages: int
    erased: Annotated[int, "Messages that were erased, or match with --dry-run."]


class Erased(TypedDict):
    """The result of an erasure, or its plan with --dry-run."""

    messages: Annotated[int, "Messages in all files, after the erasure."]
    erased: int
    files: list[ErasedFile]
    unreachable: Annotated[dict[str, str], "Files that keep messages, or may, with the reasons."]


class Ingested(TypedDict):
    """The result of an ingestion."""

    rows: Annotated[int, "Messages ingested."]
    batches: Annotated[int, "Batches that ended."]
    body_bytes: Annotated[int, "Bytes of the bodies ingested."]
    misfits: Annotated[int, "Bodies that did not fit their columns."]
    fields_without_column: Annotated[int, "Fields that could not get a column."]
    rows_behind: Annotated[int, "Messages that wait in the archive or the spool."]
    damages: Annotated[int, "Places in archives that could not be read, reported in this run."]


@dataclass
class SparkReplayed(PublishReport):
    """The outcomes of the messages."""

    confirmed: int = 0
    is_complete: bool = False


class MessagesOfTopic(TypedDict):
    topic: str
    messages: int


class FiguresDocument(TypedDict):
    topic: str | None
    messages: int
    bytes: int
    size_p50: int
    size_p95: int
    size_p99: int
    size_max: int
    attempts_p50: int | None
    attempts_p95: int | None
    attempts_max: int | None
    redeliveries: int
    duplicates: int
    nsqd: list[str]
    first: Time | None
    last: Time | None


class FiguresOfInterval(FiguresDocument):
    begin: Time | None


class GapDocument(TypedDict):
    topic: str
    begin: Time
    end: Time
    seconds: float


class SparkReport(TypedDict):
    """The traffic of topics."""

    sources: list[str]
    by_s: float
    gap_s: float
    topics: list[FiguresDocument]
    intervals: list[FiguresOfInterval]
    gaps: list[GapDocument]
    gaps_in_all: int


# settings, and documents of no single command


class ProfileRow(TypedDict):
    """A profile of the configuration file."""

    profile: str
    selected: bool
    settings: Annotated[int | None, "How many it has; null if commands refuse the profile."]


class SchemaRow(TypedDict):
    """A command that prints JSON."""

    command: str
    schema: str
    prints: str


class Error(TypedDict):
    """An error: one line on stderr. A command that was asked for JSON writes it."""

    code: Annotated[
        Literal["failed", "usage", "not_found", "connect", "refused", "system", "bug"],
        "The kind of error.",
    ]
    message: str
    hint: Annotated[str | None, "A remedy."]
    address: Annotated[str | None, "Whom it concerns, where it is about a daemon."]
    status: Annotated[int, "The exit status that it leads to."]


# check


class ProblemRow(TypedDict):
    severity: Literal["critical", "warning", "note"]
    kind: str
    topic: str | None
    channel: str | None
    node: Annotated[str | None, "HTTP address of the daemon."]
    text: str
    remedy: Annotated[str, "A remedy."]
    since: Annotated[Time, "When it was first seen, with --state maybe by an earlier run."]


class LakeRow(TypedDict):
    """A topic in a table."""

    place: str
    topic: str | None
    rows: int
    misfits: Annotated[int, "Rows with _error in files with messages of the last day."]
    newest: Annotated[Time | None, "The time of the newest message, by nsqd's clock."]


class CheckDocument(TypedDict):
    """The verdict on a cluster."""

    status: Annotated[int, "The exit status."]
    problems: list[ProblemRow]
    not_judged: Annotated[list[str], "Omitted checks, and the reasons."]
    nodes: Annotated[int, "The nsqd that answered."]
    queues: Annotated[int, "Topics and channels, each counted once."]
    tables: Annotated[list[LakeRow], "The topics in tables of --lake."]


class ScheduledEntry(TypedDict):
    """An entry of a scheduler."""

    key: str
    due: Annotated[Time | None, "When it is published; null for a message that nsqd refused."]
    topic: str
    bytes: Annotated[int, "Size of the body."]
    repeats: Annotated[str | None, "Interval or cron expression; null for an entry that ends."]
    catch_up: Annotated[str | None, "Missed occurrences that are published: all, last or none."]
    envelope: Annotated[bool, "Whether the body is published inside a document with the key."]
    error: Failure


class ShownEntry(ScheduledEntry):
    """An entry with its body."""

    body: NotRequired[str]
    body64: NotRequired[Annotated[str, "The body in base64, if it is not UTF-8."]]


# authd


class AuthDecision(TypedDict):
    """Whether a user of nsq authd may do something."""

    user: str
    permission: Literal["publish", "subscribe"]
    topic: str
    channel: str | None
    allowed: bool
    topic_pattern: Annotated[str | None, "The pattern that allows it, as nsqd gets it."]
    channel_patterns: Annotated[list[str], "Its patterns for channels; none to publish."]
    needs_tls: Annotated[bool, "Whether the user is refused without TLS."]
    common_name: Annotated[str | None, "What the client's certificate must have."]
    addresses: Annotated[list[str], "Networks that the client must be in; none for all."]


DOCUMENTS: dict[str, Any] = {
    "authd-check": AuthDecision,
    "topic-list": list[TopicRow],
    "topic-info": TopicInfo,
    "channel-list": list[ChannelRow],
    "channel-info": ChannelInfo,
    "changes": list[ChangeDocument],
    "check": CheckDocument,
    "nodes": list[NodeRow],
    "lookup": LookupDocument,
    "ping": list[PingResult],
    "info": list[Annotated[NodeInfo, ("additionalProperties", True)]],
    "node-options": list[NodeOption],
    "drain": Drained,
    "stat": Stat,
    "message": MessageDocument,
    "pub": PublishedDocument,
    "replay": PublishedDocument | PlannedDocument,
    "to-nsq": ForwardTotals,
    "to-file": ArchivedDocument,
    "schedule-list": list[ScheduledEntry],
    "schedule-show": ShownEntry,
    "archive-info": list[ArchiveRow],
    "archive-repair": Repaired,
    "archive-convert": ConvertedDocument,
    "archive-verify": Verified,
    "queue-list": list[StoredQueueRow],
    "queue-verify": Verified,
    "queue-recover": RecoveredDocument,
    "archive-compact": Compacted,
    "archive-compact-plan": CompactionPlan,
    "archive-vacuum": Vacuumed,
    "archive-erase": Erased,
    "spark-compact": Compacted,
    "spark-doctor": list[Finding],
    "spark-ingest": Ingested,
    "spark-replay": SparkReplayed | list[MessagesOfTopic],
    "spark-report": SparkReport,
    "bench": BenchReport,
    "config-show": list[SettingRow],
    "config-profiles": list[ProfileRow],
    "schema": list[SchemaRow],
    "error": Error,
}
"""By the name of a command with dashes, or of a document that several commands print."""
